"""Loads the settings in a process that ends: what validates them takes 9 MiB, which a daemon would hold until its end.

``python -m podwatch.config.loading_child`` reads a ``Request`` from its standard input and writes the settings, or the
error, to its standard output; both as pickles, because the two are one program with the same rights.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from podwatch.config.last_good import load_or_last_good
from podwatch.config.loading import LoadedSettings, learn_secrets, load_settings
from podwatch.config.setting_names import known_keys
from podwatch.domain.errors import PodwatchError

SECONDS = 60.0
"""Half a second on an idle machine. After this the settings are loaded here: memory is no reason not to guard."""


@dataclass(frozen=True, slots=True)
class Request:
    path: Path | None
    overrides: Mapping[str, object]
    run: str
    last_good: bool
    """Use the last good copy of a file that cannot be used."""

    def load(self, environ: Mapping[str, str]) -> LoadedSettings:
        load = load_or_last_good if self.last_good else load_settings
        return load(self.path, environ=environ, overrides=self.overrides, run=self.run)


def load_in_child(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object], run: str, *, last_good: bool = False
) -> LoadedSettings:
    """Like load_settings, or with ``last_good`` like load_or_last_good. Blocks for as long as a child takes to load
    them. Raises PodwatchError."""
    request = Request(path, dict(overrides), run, last_good)
    answer = _ask(request, environ)
    if isinstance(answer, PodwatchError):
        raise answer
    if not isinstance(answer, LoadedSettings):
        return request.load(environ)
    learn_secrets(answer.settings, environ)
    return answer


def _ask(request: Request, environ: Mapping[str, str]) -> object:
    """What the child answers; None if it could not, whatever the reason."""
    command = [sys.executable, "-P", "-m", "podwatch.config.loading_child"]
    try:
        done = subprocess.run(
            command,
            input=pickle.dumps(request),
            stdout=subprocess.PIPE,
            env=dict(environ),
            timeout=SECONDS,
            start_new_session=True,  # Ctrl-C is for the parent
            check=True,
        )
        keys, answer = pickle.loads(done.stdout)
    except Exception:  # also those of an answer that something else printed into
        return None
    return answer if keys == known_keys() else None  # else podwatch was upgraded while this process runs


def main() -> int:
    request: Request = pickle.load(sys.stdin.buffer)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an installed package prints must not mix with the answer
    answer: LoadedSettings | PodwatchError
    try:
        answer = request.load(os.environ)
    except PodwatchError as error:
        answer = error.with_traceback(None)
    with contextlib.suppress(BrokenPipeError), out:  # the daemon was killed meanwhile
        pickle.dump((known_keys(), answer), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
