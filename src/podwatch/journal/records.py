"""The journal's records of uploads: objects already sent, and checkpoints already published."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UploadedObject:
    """One file of a checkpoint that is in the store already, so that a restarted upload does not send it again.

    ``path`` is ``<part>/<path inside the part>`` as in the manifest: unique within a checkpoint. ``size``,
    ``mtime_ns``, ``inode`` and ``device`` are those of the source while it was read: any difference now voids this
    record. ``file_id`` is empty in stores without versions. ``parts_sha1`` are the hashes of the parts as really sent.
    """

    path: str
    part: str
    size: int
    mtime_ns: int
    mode: int
    inode: int
    device: int
    key: str
    file_id: str
    parts_sha1: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BegunUpload:
    """One large file whose multi-part upload was started: a restarted upload sends only the missing parts.

    ``upload`` is the store's id; ``parts`` are (number, SHA-1) of parts known to have been sent. The rest identifies
    the source of the upload: any difference now voids this record, and the upload is given up. ``ctime_ns`` (0: not
    known) changes for harmless reasons too, such as a link: where it differs, the sent parts are compared by hash.
    """

    path: str
    upload: str
    key: str
    part_size: int
    size: int
    mtime_ns: int
    inode: int
    device: int
    parts: tuple[tuple[int, str], ...] = ()
    ctime_ns: int = 0


@dataclass(frozen=True, slots=True)
class PublishedSave:
    """One checkpoint whose manifest is verified in the store and was named by our pointer (or came from there).

    ``wall`` is epoch seconds. ``restored`` means that it was fetched from the store, so it need not be sent again.
    """

    step: int
    save_id: str
    lineage: str
    generation: int
    seq: int
    manifest_key: str
    manifest_file_id: str
    manifest_sha1: str
    manifest_size: int
    total_bytes: int
    wall: float
    restored: bool = False
