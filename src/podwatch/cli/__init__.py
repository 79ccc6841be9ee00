# ruff: noqa: PTH100, PTH109, PTH117, PTH120
# Built-in modules only at the top: an import before main() can come from the current directory.
"""The ``podwatch`` command: one file per command, heavy imports inside the command."""

import gc
import io
import os
import signal
import sys

AGAIN, UNDER_INIT = 86, "PODWATCH_UNDER_INIT"
"""``ExitCode.GAVE_UP``, and the variable of the same name: importing them takes time in which a signal can come."""
TRAINING_PATH = "PODWATCH_TRAINING_PYTHONPATH"
"""``trainer.environment.GIVEN_PATH``."""


def main() -> None:
    """Entry point of the console script."""
    end_early_with_its_code()
    leave_out_current_directory()
    keep_standard_descriptors()
    leave_out_what_others_can_write()
    gc.disable()  # modules are no garbage: looking for it there took a quarter of the time of `status`
    from podwatch.cli.root import cli, run

    gc.freeze()  # nor at the exit
    gc.enable()
    run(cli)


def end_early_with_its_code() -> None:
    """A job that is stopped before init has taken over ends with 86, as later on: the signal's own code would tell the
    engine not to run it again. Nothing runs yet."""
    given = sys.argv[1:]
    options = given[: given.index("--")] if "--" in given else given
    if {"run", "--job"} <= {*options} and UNDER_INIT not in os.environ:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(AGAIN))


def leave_out_current_directory() -> None:
    """Remove the current directory from ``sys.path``: it can belong to another user.

    ``python -m`` puts it first, and so does an empty or relative entry of PYTHONPATH, often by accident
    (``PYTHONPATH=$PYTHONPATH:/x`` with an unset variable). Absolute entries, and podwatch's own directory, are kept."""
    listed = os.environ.get("PYTHONPATH", "")
    entries = listed.split(os.pathsep) if listed else []
    kept = {entry for entry in entries if os.path.isabs(entry)} | {_home()}
    try:
        loose = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)}
        first = {os.getcwd(), ""} if not sys.flags.safe_path else set()
    except FileNotFoundError:  # the current directory was deleted
        return
    sys.path[:] = [
        entry
        for position, entry in enumerate(sys.path)
        if entry in kept or not (entry in loose or (position == 0 and entry in first))
    ]


def leave_out_what_others_can_write() -> None:
    """Remove from ``sys.path`` and from PYTHONPATH, for podwatch's own children too, the entries that another user
    could write or replace, with a line on standard error: podwatch imports from there, also as root. Training gets it
    as it was given. What the interpreter has imported before (sitecustomize, encodings) is beyond that."""
    listed = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    if "PYTHONPATH" not in os.environ:
        return
    before, home = list(sys.path), _home()
    sys.path[:] = [entry for entry in before if entry not in listed or entry == home]
    from pathlib import Path

    from podwatch.config.trusted_files import check_trusted
    from podwatch.domain.errors import ConfigurationError

    refused = set()
    for entry in dict.fromkeys(listed):
        try:
            check_trusted(Path(entry), "an entry of PYTHONPATH")
        except ConfigurationError as error:
            refused.add(entry)
            print(f"podwatch does without this entry of PYTHONPATH: {error}", file=sys.stderr)
        except OSError:
            refused.add(entry)  # it is not there
    sys.path[:] = [entry for entry in before if entry not in refused or entry == home]
    os.environ.setdefault(TRAINING_PATH, os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in listed if entry not in refused)


def keep_standard_descriptors() -> None:
    """Open /dev/null where standard input, output or error is closed (``podwatch run >&- 2>&- &``): the next file to be
    opened, such as the state database, would have that number, and children would write into it. And show text that
    the terminal's encoding does not have, or a name that is not UTF-8, escaped."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _home() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
