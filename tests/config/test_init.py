"""`podwatch config init`: what it refuses, what it leaves in the command, and which directory it names."""

import contextlib
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from podwatch.cli.config import config
from podwatch.cli.detect_machine import layout_at, without_resume
from podwatch.cli.root import cli
from podwatch.config.env_files import env_lines, parse_env, read_env_file
from podwatch.config.loading import load_settings
from podwatch.config.settings import Settings, TrainerSettings
from podwatch.domain.errors import ConfigurationError, HostError, UsageError

LINE_ENDS_OF_STR = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def init(*arguments: str) -> Result:
    return CliRunner().invoke(config, ["init", *arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trainer_of(here: Path) -> TrainerSettings:
    settings: Settings = load_settings(here / "podwatch.toml", environ={}).settings
    return settings.trainer


# -- a current directory that was deleted ------------------------------------------------------------------------------


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of the deleted current directory, with a usable ``p.toml``."""
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    for name, text in {
        "p.env": "B2_APPLICATION_KEY_ID=a\nB2_APPLICATION_KEY=b\n",
        "p.toml": f'run_id = "r1"\nstate_dir = "{tmp_path}/state"\n[trainer]\noutput_dir = "{tmp_path}/out"\n'
        f'layout = "hf"\nenv_file = "{tmp_path}/p.env"\n[sync]\nstore = "file://{tmp_path}/store"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "store").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "config init",
        "config init -o x.toml --pid {pid}",
        "config init -o {tmp}/x.toml -- python train.py",
        "run -- python train.py",
        "run --job -- python train.py",
        "bootstrap file://{tmp}/store r1 --dir x",
        "bootstrap file://{tmp}/store r1 --dir ./b",
        "-c x.toml install",
        "-c {tmp}/p.toml restore --to x",
        "-c {tmp}/p.toml runs restore r1 --to x",
    ],
)
def test_a_current_directory_that_was_deleted_is_named_with_the_fix(gone: Path, words: str) -> None:
    result = CliRunner().invoke(cli, words.format(tmp=gone, pid=os.getpid()).split())
    assert isinstance(result.exception, HostError), (result.output, result.exception)
    assert "the current directory was deleted" in str(result.exception)
    assert "`cd " in str(result.exception)
    assert sorted(path.name for path in gone.iterdir()) == ["p.env", "p.toml", "store"], "nothing was written"


@pytest.mark.parametrize("words", ["store ls", "runs list", "config show"])
def test_a_command_that_names_all_files_absolutely_needs_no_current_directory(gone: Path, words: str) -> None:
    result = CliRunner().invoke(cli, ["-c", f"{gone}/p.toml", *words.split()])
    assert result.exit_code == 0, (result.output, result.exception)


def test_init_for_a_process_with_absolute_paths_needs_no_current_directory(gone: Path) -> None:
    result = init("-o", str(gone / "x.toml"), "--pid", str(os.getppid()))
    assert result.exit_code == 0, (result.output, result.exception)


# -- output ------------------------------------------------------------------------------------------------------------


def directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [directory, os.mkfifo])
@pytest.mark.parametrize("file", ["x.toml", "x.env"])
def test_an_output_that_is_no_file_is_refused_also_with_force(
    here: Path, file: str, make: Callable[[Path], None]
) -> None:
    make(here / file)
    before = (here / file).lstat()
    refused = init("--force", "-o", "x.toml", "--", "rl")
    assert isinstance(refused.exception, UsageError)
    assert f"{here / file}" in str(refused.exception)
    assert "a directory" in str(refused.exception) or "not a regular file" in str(refused.exception)
    assert [path.name for path in here.iterdir()] == [file]
    assert (here / file).lstat().st_ino == before.st_ino


@pytest.mark.parametrize("name", [".", "..", ""])
def test_the_current_directory_as_output_is_refused(here: Path, name: str) -> None:
    (here / "app").mkdir()
    os.chdir(here / "app")
    refused = init("--force", "-o", name, "--", "rl")
    assert isinstance(refused.exception, UsageError)
    assert "podwatch.toml" in str(refused.exception), "the fix names a file in it"
    assert [path.name for path in here.rglob("*")] == ["app"]


def test_a_name_that_no_file_can_have(here: Path) -> None:
    refused = init("-o", "x" * 300, "--", "rl")
    assert isinstance(refused.exception, HostError)
    assert "File name too long" in str(refused.exception)


def test_force_replaces_a_link_to_a_file(here: Path) -> None:
    (here / "old").write_text("old")
    (here / "podwatch.toml").symlink_to("old")
    assert init("--force", "--", "rl").exit_code == 0
    assert (here / "old").read_text() == "old"


# -- env file ----------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True), st.text(
    st.one_of(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"),
              st.sampled_from(LINE_ENDS_OF_STR + "\"'\\$`# \t=")))))  # fmt: skip
def test_what_is_written_into_an_env_file_is_read_back(secrets: dict[str, str]) -> None:
    text = env_lines(secrets)
    assert parse_env(text, where="f") == secrets
    assert parse_env(f"no line\n{text}x = '", where="f", names=secrets.keys() - {"x"}) == {
        name: value for name, value in secrets.items() if name != "x"
    }


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "\n", "caf\udce9"])
def test_what_an_env_file_cannot_hold_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigurationError, match="MY_KEY") as refused:
        env_lines({"MY_KEY": value})
    assert value not in str(refused.value)


def test_init_writes_what_it_can_and_names_the_rest(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = f"a{LINE_ENDS_OF_STR}b"
    monkeypatch.setenv("ODD_API_KEY", odd)
    monkeypatch.setenv("TWO_LINES_KEY", "-----BEGIN\nsecret")
    monkeypatch.setenv("B2_APPLICATION_KEY", os.fsdecode(b"\xffsecret"))
    result = init("--", "rl")
    assert result.exit_code == 0, (result.output, result.exception)
    written = read_env_file(here / "podwatch.env")
    assert written["ODD_API_KEY"] == odd
    assert not {"TWO_LINES_KEY", "B2_APPLICATION_KEY"} & written.keys()
    assert "not written: B2_APPLICATION_KEY, TWO_LINES_KEY" in result.output
    assert f"secrets: {len(written)})" in result.output
    assert "secret" not in result.output.replace("secrets: ", "")
    again = init("--force", "--", "rl")
    assert again.exit_code == 0, (again.output, again.exception)
    assert read_env_file(here / "podwatch.env") == written


def test_such_characters_outside_secrets_are_read_back_from_the_toml(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = f"/h{LINE_ENDS_OF_STR}\t\n\r\x01\x7f\"'\\"
    monkeypatch.setenv("HF_HOME", odd)
    result = init("--", "rl", odd)
    assert result.exit_code == 0, (result.output, result.exception)
    assert (trainer_of(here).env["HF_HOME"], trainer_of(here).command[1]) == (odd, odd)


# -- resume flags ------------------------------------------------------------------------------------------------------

LEFT = "podwatch cannot tell"


@pytest.mark.parametrize(
    ("words", "kept", "removed"),
    [
        ("python train.py --resume --lr 1", "python train.py --lr 1", "--resume"),
        ("python train.py --resume -v", "python train.py -v", "--resume"),
        ("python train.py --lr 1 --resume", "python train.py --lr 1", "--resume"),
        ("python train.py --resume=out/step_4 x", "python train.py x", "--resume=out/step_4"),
        ("python train.py --resume_from_checkpoint -v", "python train.py -v", "--resume_from_checkpoint"),
        ("python train.py --resume_from_checkpoint out/c x", "python train.py x", "--resume_from_checkpoint out/c"),
        ("python train.py --ckpt-step -1 x", "python train.py x", "--ckpt-step -1"),
        ("python train.py --resume out/dir", "python train.py --resume out/dir", ""),
        ("python train.py --resume 40 --lr 1", "python train.py --resume 40 --lr 1", ""),
        ("python train.py --resume -1", "python train.py --resume -1", ""),
        ("uv run rl --resume @ x.toml", "uv run rl @ x.toml", "--resume"),
        ("uv run rl @ x.toml --resume out/dir", "uv run rl @ x.toml out/dir", "--resume"),
        ("uv run rl @ x.toml --resume true", "uv run rl @ x.toml", "--resume true"),
        ("uv run rl @ x.toml --trainer.ckpt.resume_step 4", "uv run rl @ x.toml", "--trainer.ckpt.resume_step 4"),
        ("python -m verl.trainer.main_ppo +trainer.resume_mode=auto", "python -m verl.trainer.main_ppo",
         "+trainer.resume_mode=auto"),
        ("axolotl train c.yml --auto-resume-from-checkpoints x.txt", "axolotl train c.yml x.txt",
         "--auto-resume-from-checkpoints"),
        ("torchrun -m torchtitan.train --checkpoint.load_step 5 --x 5", "torchrun -m torchtitan.train --x 5",
         "--checkpoint.load_step 5"),
    ],
)  # fmt: skip
def test_only_a_value_is_removed_with_its_flag(here: Path, words: str, kept: str, removed: str) -> None:
    assert without_resume(words.split(), layout_at(words.split(), here)) == (
        tuple(kept.split()),
        tuple(removed.split()),
    )
    result = init("--", *words.split())
    assert result.exit_code == 0, (result.output, result.exception)
    assert trainer_of(here).command[: len(kept.split())] == tuple(kept.split())
    assert trainer_of(here).command[len(kept.split()) :][:1] in ((), ("--run.name",))
    assert (f"removed from the command: {removed} (" in result.output) is bool(removed)
    assert (LEFT in result.output) is ("--resume" in kept.split())


def test_a_word_that_can_be_a_value_or_not_stays_and_is_shown(here: Path) -> None:
    result = init("--", "python", "train.py", "--resume", "out/dir")
    assert "left in the command: --resume out/dir" in result.output


# -- run directory of prime-rl -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [("--resume.step", "40"), ("--resume",), ("--resume.dir=old/checkpoints/step_4",)])
def test_the_run_directory_of_a_command_that_resumes(here: Path, version: tuple[str, ...]) -> None:
    """Only the resume flag shows the version, and it is removed from the command."""
    (here / "rl.toml").write_text('output_dir = "runs"\n')
    result = init("--", "uv", "run", "rl", "@", "rl.toml", "--ckpt", *version, "--output-dir", "o", "--max-steps", "9")
    assert result.exit_code == 0, (result.output, result.exception)
    trainer = trainer_of(here)
    assert trainer.command[-2] == "--run.name", "else each start has a new directory"
    assert trainer.output_dir == here / "o" / trainer.command[-1]
    assert "--run.name" in (here / "podwatch.toml").read_text()
    assert "pid 0" not in (here / "podwatch.toml").read_text()
    assert load_settings(here / "podwatch.toml", environ={}).settings.run_id == trainer.command[-1]


@pytest.mark.parametrize(
    ("table", "place"),
    [('[run]\nname = "a"\n', "runs/a"), ('[run]\nname = "a"\ndir = "b"\n', "runs/b"),
     ('[run]\nname = "a"\n[resume]\nstep = 4\n', "runs/a")],
)  # fmt: skip
@pytest.mark.parametrize("resume", [(), ("--resume.step", "40")])
def test_the_run_directory_that_a_file_names(here: Path, table: str, place: str, resume: tuple[str, ...]) -> None:
    """Versions without run directories refuse the tables run and resume."""
    (here / "rl.toml").write_text(f'output_dir = "runs"\n{table}')
    words = ("uv", "run", "rl", "@", "rl.toml")
    assert init("--", *words, *resume).exit_code == 0
    assert (trainer_of(here).output_dir, trainer_of(here).command) == (here / place, words)


def test_an_older_prime_rl_writes_to_output_dir_itself(here: Path) -> None:
    (here / "rl.toml").write_text('output_dir = "runs"\n')
    assert init("--", "uv", "run", "rl", "@", "rl.toml", "--ckpt.resume-step", "4").exit_code == 0
    assert trainer_of(here).output_dir == here / "runs"


# -- a running command, printed ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(home: Path, *arguments: str, **env: str) -> Iterator[int]:
    """`python .../rl ARGUMENTS` in ``home``; its pid."""
    program = home / "rl"
    program.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments], cwd=home, stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], **env},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_pid_without_a_file_prints_its_configuration_and_writes_nothing(here: Path) -> None:
    (here / "podwatch.toml").write_text("mine")
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": "hush-1-hush", "EDITOR": "vi"}
    with running(here, "--max-steps", "99", "--ckpt.resume-step", "40", **env) as pid:
        result = init("--pid", str(pid))
    assert result.exit_code == 0, (result.output, result.exception)
    trainer = tomllib.loads(result.stdout)["trainer"]
    assert trainer["command"] == [sys.executable, str(here / "rl"), "--max-steps", "99"]
    assert trainer["cwd"] == str(here)
    assert trainer["env"]["WANDB_MODE"] == "offline"
    assert "removed from the command: --ckpt.resume-step 40" in result.stderr
    assert "WANDB_API_KEY" in result.stderr
    assert "hush" not in result.output
    assert sorted(path.name for path in here.iterdir()) == ["podwatch.toml", "rl"]
    assert (here / "podwatch.toml").read_text() == "mine"


def test_what_podwatch_added_to_its_own_start_is_left_out(here: Path) -> None:
    words = ("--trainer.wandb.id", "abc", "--max-steps", "99", "--ckpt.resume-step=5")
    with running(here, *words, PODWATCH_START_ID="s1", WANDB_RUN_ID="abc", WANDB_MODE="offline") as pid:
        result = init("--pid", str(pid))
    trainer = tomllib.loads(result.stdout)["trainer"]
    assert trainer["command"][2:] == ["--max-steps", "99"]
    assert trainer["env"].keys() & {"WANDB_RUN_ID", "WANDB_MODE"} == {"WANDB_MODE"}


@pytest.mark.parametrize(
    "arguments",
    [("--wandb.api-key", "abcdef123456"), ("--hf-token=abcdef123456",), ("--x", "hf_abcdefghijklmnopqrstuv"),
     ("--store", "https://me:abcdef123456@host/x")],
)  # fmt: skip
def test_a_secret_argument_is_not_printed(here: Path, arguments: tuple[str, ...]) -> None:
    with running(here, *arguments) as pid:
        result = init("--pid", str(pid))
    assert result.exit_code != 0
    said = f"{result.output} {result.exception}"
    assert "looks like a secret" in said
    assert "abcdef123456" not in said
    assert "hf_abc" not in said


def test_a_title_is_no_command(here: Path) -> None:
    """setproctitle replaces the arguments: nothing is left to be written."""
    process = subprocess.Popen(["PRIME-RL::Launcher"], executable="/bin/cat", stdin=subprocess.PIPE)
    try:
        while b"PRIME" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)  # between fork and exec it has no command line
        assert "title" in str(init("--pid", str(process.pid)).exception)
    finally:
        process.communicate()
