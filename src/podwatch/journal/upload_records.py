"""The journal's records of uploads: objects already sent, and uploads that are not finished."""

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

    ``upload`` is the store's id; ``parts`` are (number, ``StoredPart.note``) of parts known to have been sent. The rest
    identifies the source of the upload: any difference now voids this record, and the upload is given up. ``ctime_ns``
    (0: not known) changes for harmless reasons too, such as a link: where it differs, the sent parts are compared by
    hash.
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
