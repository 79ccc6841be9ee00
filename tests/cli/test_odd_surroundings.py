"""Commands with closed or full output, an encoding that has not every letter, and files that are not what they seem."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from podwatch import cli
from podwatch.app.variables_of_own_processes import UNDER_INIT
from podwatch.cli import root
from podwatch.config.loading import load_settings
from podwatch.config.units import parse_duration, parse_size
from podwatch.domain.errors import ConfigurationError, ExitCode

pytestmark = pytest.mark.slow

TEXT = 'run_id = "{run}"\nstate_dir = "{root}/state"\n[trainer]\noutput_dir = "{root}/out"\ncommand = ["true"]\n'
UNKNOWN = 3


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, TEXT.format(run="r", root=tmp_path).encode())


def written(root: Path, data: bytes) -> Path:
    path = root / "podwatch.toml"
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def podwatch(
    config: Path, *words: str, closed: tuple[int, ...] = (), stdout: int = subprocess.PIPE, **environ: str
) -> "subprocess.CompletedProcess[str]":
    def close() -> None:
        for number in closed:
            os.close(number)

    usual = {"PATH": os.environ["PATH"], "HOME": str(config.parent), "PODWATCH_RUNTIME_DIR": str(config.parent)}
    return subprocess.run(
        [sys.executable, "-m", "podwatch", "-c", str(config), *words],
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        env={**usual, **environ},
        preexec_fn=close,
    )  # fmt: skip


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_descriptors_change_neither_the_command_nor_its_code(config: Path, closed: tuple[int, ...]) -> None:
    done = podwatch(config, "status", closed=closed)
    assert (done.returncode, done.stderr) == (UNKNOWN, "")
    assert podwatch(config, "config", "validate", closed=closed).returncode == 0


@pytest.mark.parametrize("closed", [(0,), (1,), (1, 2), (0, 1, 2)])
def test_no_file_gets_the_number_of_a_closed_standard_descriptor(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """Else a child that prints would write into the state database."""
    code = (
        "import os, subprocess\nfrom podwatch.cli import keep_standard_descriptors\nkeep_standard_descriptors()\n"
        f"file = os.open({str(tmp_path / 'database')!r}, os.O_RDWR | os.O_CREAT)\nprint('text')\n"
        "child = subprocess.run(['sh', '-c', 'echo text; echo text >&2; exec 3<&0']).returncode\n"
        "os._exit(0 if file > 2 and child == 0 else 1)"
    )

    def close() -> None:
        for number in closed:
            os.close(number)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, preexec_fn=close, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "database").read_bytes() == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("status",), ("config", "show"), ("status", "--json")])
def test_output_that_cannot_be_written_is_named(config: Path, words: tuple[str, ...], unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = podwatch(config, *words, stdout=full.fileno(), PYTHONUNBUFFERED=unbuffered)
    code = UNKNOWN if words[0] == "status" else 1  # monitoring reads 1 as a warning about the run
    assert (done.returncode, done.stderr) == (code, "podwatch: cannot write the output: No space left on device\n")


def test_an_error_inside_status_is_unknown_not_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> NoReturn:
        raise RuntimeError("bug")

    monkeypatch.setattr("podwatch.cli.status.ask_status", broken)
    monkeypatch.setattr(sys, "argv", ["podwatch", "status"])
    with pytest.raises(SystemExit) as ended:
        root.run(root.cli)
    assert ended.value.code == UNKNOWN
    assert "internal error (RuntimeError: bug)" in capsys.readouterr().err


def test_an_encoding_that_lacks_a_letter_shows_it_escaped(tmp_path: Path) -> None:
    config = written(tmp_path, TEXT.format(run="r\N{SNOWMAN}", root=tmp_path).encode())
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (("status",), ("config", "validate")):
        done = podwatch(config, *words, **ascii_only)
        assert "internal error" not in done.stderr
        assert done.returncode == (UNKNOWN if words == ("status",) else 78)


@pytest.mark.parametrize(
    ("text", "why"),
    [("x = " + "[" * 5000, "nested too deeply"), ("x = " + "9" * 5000, "a number with too many digits")],
)
@pytest.mark.parametrize("reads", ["daemon", "status"])
def test_toml_that_no_parser_takes_is_a_problem_of_the_configuration(
    tmp_path: Path, text: str, why: str, reads: str
) -> None:
    config = written(tmp_path, text.encode())
    if reads == "daemon":
        with pytest.raises(ConfigurationError, match=why):
            load_settings(config, environ={})
    else:
        done = podwatch(config, "status")
        assert (done.returncode, "not valid TOML" in done.stderr) == (UNKNOWN, True)


def test_a_name_that_no_file_can_have_is_ignored_by_status(tmp_path: Path) -> None:
    config = written(tmp_path, b'run_id = "a\\u0000b"\nstate_dir = "/s\\u0000t"\n')
    assert podwatch(config, "status").returncode == UNKNOWN


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse_duration, "999999999999999999999d"), (parse_duration, 1e40), (parse_duration, "36501d"),
        (parse_size, 2**63), (parse_size, "9999999999999 TiB"), (parse_size, 1e30),
    ],
)  # fmt: skip
def test_numbers_that_no_system_call_takes_are_refused(parse: Callable[[object], float], value: object) -> None:
    with pytest.raises(ValueError, match="cannot be l"):
        parse(value)
    assert parse_duration("36500d") > 0
    assert parse_size(2**63 - 1) == 2**63 - 1


AT_FIRST_IMPORT = """
import os, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGNAL)

sys.meta_path.insert(0, Stop())
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("arguments", "code"), [(("run", "--job"), 86), (("run",), None), (("status", "--", "--job"), None)]
)
def test_a_job_that_is_stopped_before_it_has_begun_ends_with_86(
    tmp_path: Path, name: str, arguments: tuple[str, ...], code: int | None
) -> None:
    """Slurm ends all tasks of a step when one has ended: the others may still be importing."""
    (tmp_path / "sitecustomize.py").write_text(AT_FIRST_IMPORT.replace("SIGNAL", name))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    default = f"import os, signal; signal.signal(signal.{name}, signal.default_int_handler)" if name == "SIGINT" else ""
    argv = [sys.executable, "-m", "podwatch", *arguments]
    start = f"{default}\nimport os, sys\nos.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run([sys.executable, "-S", "-c", start, *argv], env=environ, capture_output=True, check=False)
    assert done.returncode == (code if code is not None else -getattr(signal, name)), done.stderr


def test_the_constants_of_the_early_end_are_those_of_the_rest() -> None:
    assert (cli.AGAIN, cli.UNDER_INIT) == (ExitCode.GAVE_UP, UNDER_INIT)
