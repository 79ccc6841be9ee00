"""The last good configuration: a copy of each file that the daemon could load, used when the file cannot be loaded.

A daemon that refuses to start because of a typo guards nothing. It therefore keeps the copy in
``<state_dir>/<run_id>/``, uses it, and reports that. Without one it exits with 78.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.config.loading import LoadedSettings, find_file, load_settings, load_text, named_file
from podwatch.config.settings import Settings
from podwatch.config.toml_text import intact_lines
from podwatch.config.trusted_files import read_trusted, read_trusted_bytes
from podwatch.domain.document import Document, Text, writable
from podwatch.domain.errors import ConfigurationError, IntegrityError
from podwatch.system.files import atomic_write

COPY_NAME = "last-good.json"


@dataclass(frozen=True, slots=True)
class _Copy(Document):
    KIND = "podwatch-last-good-configuration"
    FILE = COPY_NAME
    LARGEST = 16 << 20

    path: Text
    """Need not be UTF-8, and a document is: what is read is as ``writable`` makes it."""
    text: Text


def last_good_path(state_dir: Path, run_id: str) -> Path:
    return state_dir / run_id / COPY_NAME


def save_last_good(loaded: LoadedSettings) -> None:
    """Store a copy of the file that was just loaded, atomically and fsynced. Does nothing for settings without a file
    or from a copy. Raises OSError, which the daemon can ignore.
    """
    if loaded.path is None or loaded.refused:
        return
    target = last_good_path(loaded.settings.state_dir, loaded.settings.run_id)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_write(target, _Copy(str(loaded.path), loaded.text).to_bytes())


def load_last_good(
    path: Path, *, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None, run: str = ""
) -> LoadedSettings | None:
    """The settings of the last good copy of the file at ``path``; None without a usable copy.

    Environment and flags apply as usual.
    """
    for copy in _copies(path, environ, overrides or {}):
        try:
            kept = _Copy.from_bytes(read_trusted_bytes(copy))
            if kept.path == writable(str(path)):
                return load_text(kept.text, path, environ=environ, overrides=overrides, run=run)
        except (ConfigurationError, IntegrityError, ValueError):
            continue
    return None


def load_or_last_good(
    path: Path | None, *, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None, run: str = ""
) -> LoadedSettings:
    """Like load_settings, but uses the last good copy of an unusable file, with ``refused`` set to the reason. Without
    a copy it raises the file's own ConfigurationError."""
    try:
        return load_settings(path, environ=environ, overrides=overrides, run=run)
    except ConfigurationError as error:
        where = _named(path, environ, run)
        copy = load_last_good(where, environ=environ, overrides=overrides, run=run) if where is not None else None
        if copy is None:
            raise
        return replace(copy, refused=str(error))


def _named(path: Path | None, environ: Mapping[str, str], run: str) -> Path | None:
    if path is not None:
        return named_file(path, environ)
    try:
        return find_file(None, environ=environ, run=run)
    except ConfigurationError:
        return named_file(Path(environ["PODWATCH_CONFIG"]), environ) if environ.get("PODWATCH_CONFIG") else None


def _copies(path: Path, environ: Mapping[str, str], overrides: Mapping[str, object]) -> list[Path]:
    """Every copy in the state directory that flag, environment or the broken file names, then in the default one, the
    newest first."""
    named = overrides.get("state_dir") or environ.get("PODWATCH_STATE_DIR")
    if not named:
        with contextlib.suppress(ConfigurationError):
            named = intact_lines(read_trusted(path)).get("state_dir")
    places = [named_file(Path(str(named)), environ)] if named else []
    found: list[Path] = []
    for place in dict.fromkeys((*places, Path(Settings.model_fields["state_dir"].default))):
        with contextlib.suppress(OSError):
            found += sorted(place.glob(f"*/{COPY_NAME}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [copy for copy in found if copy.is_file()]
