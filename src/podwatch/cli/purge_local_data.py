"""What podwatch has on this machine for one run, and its removal (promises 2, 8 and 9).

Nothing is removed that only looks like podwatch's: a directory is opened segment by segment without following a link,
it must belong to podwatch's user, and only entries with the names that podwatch creates are removed from it. podwatch's
directory beside output_dir is this run's only if the run record in it names the run; the record is removed last, so
that an interrupted removal can be repeated. Everything here blocks.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.cli.systemd_service import Service
from podwatch.daemon.paths_and_run_lock import runtime_roots, workspace_of
from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.finding import counted
from podwatch.journal.run_record_file import load_run_record
from podwatch.policy.lost_by_purge import KeptFile
from podwatch.recovery import quarantine
from podwatch.recovery.quarantine import SPARE
from podwatch.system.files import DIRECTORY_FLAGS, Removed, remove_entry
from podwatch.system.open_by_descriptor import HIDDEN, KEPT, RootReplaced, check_owner, measure, open_path
from podwatch.system.own_directories import Workspace
from podwatch.system.rename_places import corners_of, drop_empty

if TYPE_CHECKING:
    from podwatch.config.settings import Settings

_STATE = re.compile(
    r"journal\.sqlite[\w.-]*|lock|keeper|incidents|recording|\.?history\.jsonl[\w.-]*|logs|wandb"
    r"|\.?last-good\.json[\w.-]*|podwatch\.log[\w.-]*"
)
_RUNTIME = re.compile(r"\.?(endpoint|status)\.json[\w.-]*|guard\.lock|control|init\.pid|podwatch\.log[\w.-]*")
_RECORD = re.compile(r"run\.json([\w.-]*)")
_HELD = re.compile(r"(\d{1,18})\.([^/]+)")
_MADE = ("# Written by `podwatch ", "# Secrets, written by `podwatch ")
"""First words of the configuration and the key file that podwatch wrote."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing on this machine. ``keep``: why a purge leaves it; empty: a purge removes it. ``steps``: the complete
    checkpoints in it; ``save``: (step, save_id) if podwatch knows it; ``unstored``: the steps that exist only here."""

    kind: str
    path: Path
    bytes: int | None = None
    note: str = ""
    keep: str = ""
    steps: tuple[int, ...] = ()
    save: tuple[int, str] | None = None
    number: int | None = None
    unstored: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "path": str(self.path),
            "bytes": self.bytes,
            "note": self.note,
            "kept_because": self.keep or None,
            "complete_steps": list(self.steps),
            "unstored_steps": list(self.unstored),
        }


@dataclass(slots=True)
class Purged:
    """``removed`` paths, and ``problems`` with path and reason."""

    removed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class LocalData:
    """The local data of one run."""

    def __init__(self, settings: "Settings", service: Service, environ: Mapping[str, str]) -> None:
        self._settings, self._service = settings, service
        self._workspace = workspace_of(settings)
        self._roots = runtime_roots(settings.state_dir, environ)

    def items(self) -> list[Item]:
        """Everything, in the order in which a purge removes it."""
        reason, run = self._not_ours(), self._settings.run_id
        beside, record = (
            [item if item.keep else replace(item, keep=reason) for item in items]
            for items in ((*self._quarantines(), *self._folders()), self._record())
        )
        return [
            *beside,
            *_directory(self._settings.state_dir / run, _STATE, "state", "database, logs, incidents"),
            *(item for root in self._roots for item in _directory(root / run, _RUNTIME, "runtime", "sockets, status")),
            *record,
            *_made(self._service.key_file, "key-file", "secrets"),
            *_made(self._service.configuration, "configuration", ""),
        ]

    # -- beside output_dir --------------------------------------------------------------------------------------------

    def _not_ours(self) -> str:
        """Why podwatch's directory beside output_dir is not known to be this run's; empty if it is."""
        workspace = self._workspace
        try:
            workspace.check()
            record = load_run_record(workspace, looking=True)
        except PodwatchError as error:
            return str(error)
        if record is None:
            return f"no readable record ({workspace.record}) says that it belongs to the run {self._settings.run_id}"
        return "" if record.run_id == self._settings.run_id else f"it belongs to the run {record.run_id}"

    def _quarantines(self) -> Iterator[Item]:
        tree = self._workspace.tree
        try:
            entries = quarantine.listing(self._workspace)
        except PodwatchError as error:
            yield Item("quarantine", self._workspace.quarantine, keep=str(error))
            return
        for entry in entries:
            states = entry.get("steps") or {}
            whole = tuple(sorted(int(step) for step, state in states.items() if state == Completeness.COMPLETE))
            note = ", ".join(f"step {step} ({state})" for step, state in states.items())
            for path in map(Path, entry["paths"]):
                size, _ = tree.measure(path)
                item = Item("quarantine", path, size, note or "by-products", self._of_another(path.parent), whole)
                if problem := entry.get("problem"):
                    item = replace(item, note=problem, keep=item.keep or "its contents are unknown", steps=())
                yield replace(item, number=entry["id"])

    def _folders(self) -> Iterator[Item]:
        tree = self._workspace.tree
        for what in sorted(KEPT - {"quarantine"}):
            for home in corners_of(self._workspace, what):
                keep = self._of_another(home)
                for name in tree.names(home):
                    size, _ = tree.measure(home / name)
                    match = _HELD.fullmatch(name) if what == "uploading" else None
                    if match is None:
                        yield Item(what, home / name, size, keep=keep)
                        continue
                    only = not self._elsewhere(home / name)
                    step, note = int(match[1]), "hard links of a checkpoint that is being uploaded"
                    steps = (step,) if only else ()
                    yield Item(what, home / name, size, note, keep, steps, (step, match[2]))

    def _record(self) -> Iterator[Item]:
        tree, home = self._workspace.tree, self._workspace.outside
        with contextlib.suppress(OSError, HostError):
            for name in tree.names(home):
                if _RECORD.fullmatch(name):
                    yield Item("record", home / name, tree.measure(home / name)[0])

    def _of_another(self, home: Path) -> str:
        """Whose run the directory is, if it is another's: an output_dir of a run can be inside that of this one."""
        if home.parent.name != HIDDEN or home.parent.parent in self._workspace.roots:
            return ""
        other = Workspace(home.parent.parent)
        if self._workspace.tree.lstat(other.record) is None:
            return ""
        try:
            found = load_run_record(other, looking=True)
        except PodwatchError as error:
            return str(error)
        mine = found is not None and found.run_id == self._settings.run_id
        return "" if mine else f"it belongs to {'another run' if found is None else f'the run {found.run_id}'}"

    def _elsewhere(self, place: Path) -> bool:
        """Whether the trainer still has each of these hard links under a name of its own."""
        try:
            files = self._files(place)
        except (OSError, HostError):
            return False
        return bool(files) and all(status.st_nlink > 1 for _, status in files)

    def files_of(self, item: Item) -> list[KeptFile]:
        """The files of a quarantine, under the paths that the trainer gave them. Raises OSError, HostError."""
        entry = next(e for e in quarantine.listing(self._workspace) if e["id"] == item.number)
        kept = []
        for move in entry["moves"]:
            for directory in map(Path, entry["paths"]):
                for inside, status in self._files(directory / str(move["to"])):
                    path = f"{move['from']}/{inside}" if inside else str(move["from"])
                    kept.append(KeptFile(path, status.st_size, status.st_mtime_ns))
        return kept

    def _files(self, path: Path) -> list[tuple[str, os.stat_result]]:
        """(path below ``path``, status) of each regular file; "" for ``path`` itself. Raises OSError, HostError."""
        tree = self._workspace.tree
        status = tree.lstat(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            return [("", status)] if status is not None and stat.S_ISREG(status.st_mode) else []
        found = []
        with tree.directory(path) as root:
            for directory, _, names, fd in os.fwalk(".", dir_fd=root, onerror=_raise):
                for name in names:
                    one = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISREG(one.st_mode):
                        found.append((os.path.normpath(f"{directory}/{name}"), one))
        return found

    # -- removing -----------------------------------------------------------------------------------------------------

    def purge(self, items: Sequence[Item]) -> Purged:
        """Remove each item that a purge may remove. Continues after a problem and reports it. While data of the run
        stay beside output_dir, the record stays, which says whose they are."""
        done, tree = Purged(), self._workspace.tree
        mine = [] if self._not_ours() else [h for what in KEPT for h in corners_of(self._workspace, what)]
        wanted = [item for item in items if not item.keep]
        for item in wanted:
            if item.kind != "record":
                self._remove(item, done)
        for home in mine:
            if not self._of_another(home):
                with contextlib.suppress(OSError, HostError):
                    tree.remove_tree(home / SPARE)
                    drop_empty(tree, home)
        homes = (self._workspace.outside, self._workspace.inside)
        left = any(item.keep and any(home in item.path.parents for home in homes) for item in items)
        for item in wanted:
            if item.kind == "record" and not done.problems and not left:
                self._remove(item, done)
        return done

    def _remove(self, item: Item, done: Purged) -> None:
        tree = self._workspace.tree
        try:
            if item.kind in KEPT or item.kind == "record":
                place = self._to_trash(item) if item.kind in ("quarantine", "uploading") else item.path
                problems = tree.remove_tree(place).problems
                if not problems:
                    drop_empty(tree, place.parent)
                    drop_empty(tree, item.path.parent)
            elif item.kind in ("state", "runtime"):
                problems = _remove_known(item.path, _STATE if item.kind == "state" else _RUNTIME)
            else:
                item.path.unlink()
                problems = []
        except FileNotFoundError:
            return
        except (OSError, PodwatchError) as error:
            problems = [f"{item.path}: {error.strerror if isinstance(error, OSError) else error}"]
        done.problems += problems
        if not problems:
            done.removed.append(str(item.path))

    def _to_trash(self, item: Item) -> Path:
        """Rename it into the trash beside it: a removal that is interrupted then leaves no half checkpoint behind under
        its name, and needs no second decision. Returns the new path."""
        trash = item.path.parent.with_name("trash")
        self._workspace.tree.make(trash)
        place = trash / f"purged-{item.kind}-{item.path.name}"
        self._workspace.tree.rename(item.path, place)
        return place


def _raise(error: OSError) -> None:
    raise error


def _directory(path: Path, known: re.Pattern[str], kind: str, note: str) -> list[Item]:
    """The directory of a run, if it exists; with the reason to keep it where it is not podwatch's, or holds more."""
    seen = [0, 0]
    try:
        with _opened(path) as (_, fd):
            names = sorted(os.listdir(fd))  # noqa: PTH208 - a descriptor
            for name in filter(known.fullmatch, names):
                measure(fd, name, seen, 1 << 20, 64)
    except (FileNotFoundError, NotADirectoryError) as error:
        return [] if isinstance(error, FileNotFoundError) else [Item(kind, path, keep="it is not a directory")]
    except OSError as error:
        what = "it is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
        return [Item(kind, path, keep=what)]
    except RootReplaced as error:
        return [Item(kind, path, keep=str(error))]
    if strangers := [name for name in names if not known.fullmatch(name)]:
        others = f"{counted(len(strangers), 'entry', 'entries')} not podwatch's stay, such as {strangers[0]}"
        note = f"{note}; {others}"
    return [Item(kind, path, seen[0], note)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptors of the directory above, and of the directory itself: no link of another user is followed on the way
    to it, it is no link, and it belongs to podwatch's user. Raises OSError, RootReplaced."""
    above, links = open_path(path.parent)
    try:
        if links:
            raise RootReplaced(f"a symbolic link of user {min(links)} is on its path", where=str(path))
        fd = os.open(path.name, DIRECTORY_FLAGS, dir_fd=above)
        try:
            check_owner(fd, fd, path)
            yield above, fd
        finally:
            os.close(fd)
    finally:
        os.close(above)


def _remove_known(path: Path, known: re.Pattern[str]) -> list[str]:
    """Remove the entries with podwatch's names, the lock last, and the directory if it is empty then."""
    done = Removed()
    with _opened(path) as (above, fd):
        names = sorted((n for n in os.listdir(fd) if known.fullmatch(n)), key=lambda n: (n == "lock", n))  # noqa: PTH208
        for name in names:
            remove_entry(fd, name, f"{path}/{name}", os.fstat(fd).st_dev, done, lambda _: None)
        with contextlib.suppress(OSError):  # not empty: another's entries
            os.rmdir(path.name, dir_fd=above)
    if path.parent.name in ("podwatch", "run"):
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # podwatch's own, after its last run
    return done.problems


def _made(path: Path, kind: str, note: str) -> list[Item]:
    """A configuration or key file in its usual place. A purge removes only one that podwatch wrote."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            return [Item(kind, path, keep="it is a link, or belongs to another user")]
        ours = path.read_bytes().decode(errors="replace").startswith(_MADE)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [Item(kind, path, note=note, keep=f"it cannot be read: {error.strerror}")]
    return [Item(kind, path, status.st_size, note, "" if ours else "podwatch did not write it")]
