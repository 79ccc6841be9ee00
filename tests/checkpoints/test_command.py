"""One reading of a training command: the lookup of a setting, the commands of a shell script, hostile files."""

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.command import Command, without_settings, without_words
from podwatch.checkpoints.command_files import LARGEST, plain_yaml
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.shell_words import shell_commands
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of

YAML = """
# the run
max_steps: 80
trainer:
  ckpt:
    interval: 5     # every five
  name: "a b"
  layers: [1, 2]
on: true
"""
SAID = {
    "rl.toml": "max_steps = 80\non = true\n[trainer]\nname = 'a b'\n[trainer.ckpt]\ninterval = 5\n",
    "rl.yaml": YAML,
    "rl.json": json.dumps({"max_steps": 80, "on": True, "trainer": {"name": "a b", "ckpt": {"interval": 5}}}),
}


@pytest.mark.parametrize("file", SAID)
@pytest.mark.parametrize("named", ["@ {}", "@{}", "--config {}", "--config={}", "--job.config_file {}", "train {}"])
def test_a_setting_is_found_in_the_file_that_the_command_names(tmp_path: Path, file: str, named: str) -> None:
    (tmp_path / file).write_text(SAID[file])
    command = Command(("uv", "run", "rl", *named.format(file).split(), "--lr", "1"), tmp_path)
    assert command.number("max_steps") == command.number("max-steps") == 80
    assert (command.number("ckpt.interval", "trainer.ckpt.interval"), command.value("trainer.name")) == (5, "a b")
    assert command.value("on") == "true"
    assert command.value("trainer.layers") is None
    assert command.value("nothing.there") is None


@pytest.mark.parametrize(
    "words",
    ["--ckpt.interval 7", "--ckpt.interval=7", "ckpt.interval=7", "+ckpt.interval=7", "++ckpt.interval='7'",
     "--ckpt.interval 1 --ckpt.interval 7"],
)  # fmt: skip
def test_the_words_come_before_the_file(tmp_path: Path, words: str) -> None:
    (tmp_path / "rl.toml").write_text("[ckpt]\ninterval = 5\n")
    assert Command(("rl", "@", "rl.toml", *words.split()), tmp_path).number("ckpt.interval") == 7


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["sh", "-c", 'exec train.py --name one "$@"', "x"], "one"),
        (["sh", "-c", 'exec train.py --name one "$@"', "x", "--name", "two"], "two"),
        (["sh", "-c", "exec train.py --name $NAME", "x"], None),
        (["sh", "-c", "exec train.py --name $1", "x", "one"], "one"),
        (["sh", "-c", "echo --name one", "x"], None),
        (["sh", "-c", "exec train.py # --name one", "x"], None),
        (["sh", "-c", "cat <<EOF\n--name one don't\nEOF\nexec train.py --name 'two three'", "x"], "two three"),
        (["bash", "-c", "sh -c 'train.py --name one'"], "one"),
        (["train.py", "--name", "$NAME"], "$NAME"),
    ],
)
def test_a_shell_is_read_as_it_runs(argv: list[str], value: str | None) -> None:
    assert Command(argv).given("name") == value


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ('python train.py "$@"', True),
        ("python train.py $*", True),
        ('python train.py "${@}" 2>&1 | tee log', True),
        ('exec env A=1 torchrun train.py "$@"', True),
        ('ARGS="$@"\npython train.py $ARGS', True),
        ("python train.py $PODWATCH_RESUME_ARGS", True),
        ("python train.py", False),
        ("python train.py '$@'", False),
        ('python train.py # "$@"', False),
        ('echo "$@"; python train.py --node $PODWATCH_NODE_RANK', False),
        ("python train.py $ARGS", False),
    ],
)
def test_whether_arguments_reach_the_trainer(tmp_path: Path, text: str, passes: bool) -> None:
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\nset -e\n{text}\n")
    for argv in (["bash", "-o", "pipefail", "-c", text, "x"], ["bash", "run.sh"], ["./run.sh"], ["nohup", "./run.sh"]):
        assert Command(argv, tmp_path).passes_arguments_on() is passes
    assert Command(["bash", "absent.sh"], tmp_path).passes_arguments_on(), "unknown"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["sh", "-c", 't.py "$@"'], "sh"),
        (["/bin/bash", "-o", "pipefail", "-c", 't.py "$@"'], "bash"),
        (["nohup", "bash", "-lc", 't.py "$@"'], "bash"),
        (["sh", "-c", 't.py "$@"', "train"], ""),
        (["sh", "-c", "t.py $PODWATCH_RESUME_ARGS"], ""),
        (["bash", "run.sh"], ""),
        (["t.py"], ""),
    ],
)
def test_a_shell_line_needs_a_name_before_its_first_argument(argv: list[str], name: str) -> None:
    assert Command(argv).name_of_shell() == name


@pytest.mark.parametrize(
    ("argv", "layout"),
    [
        ("srun --ntasks 8 python -u -m verl.trainer.main_ppo", "verl"),
        ("docker run --rm -v /a:/b image axolotl train c.yml", ""),
        ("docker exec -w /app trainer accelerate launch -m axolotl.cli.train c.yml", "hf"),
        ("ray job submit --working-dir . -- python3 -m verl.trainer.main_ppo", "verl"),
        ("uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base", "skyrl"),
        ("numactl -N 0 -m 0 python -m verl.trainer.main_ppo", "verl"),
        ("nice -n 5 ionice -c 2 -n 0 uv run --group gpu rl @ x.toml", "prime-rl"),
        ("timeout 3h torchrun -m torchtitan.train", "torchtitan"),
        ("bash -c 'cd /app && exec uv run rl @ x.toml'", "prime-rl"),
        ("python train.py", ""),
    ],
)
def test_one_recogniser_sees_through_every_wrapper(argv: str, layout: str) -> None:
    command = Command(shlex.split(argv))
    found = [name for name, t in all_trainers().items() if t.command.recognised(name, command, certain=True)]
    assert found == ([layout] if layout else [])


def test_removed_settings_are_those_of_the_table_and_a_placeholder_stays() -> None:
    command = ("t", "--a.b", "1", "+a.b=2", "~c", "--a.b={step}", "--d", "true", "--d", "x", "--e")
    kept, removed = without_settings(command, ("a.b", "c"), ("--d",))
    assert kept == ("t", "--a.b={step}", "x", "--e")
    assert removed == ("--a.b", "1", "+a.b=2", "~c", "--d", "true", "--d")
    assert without_words(command, removed) == kept


# -- hostile ----------------------------------------------------------------------------------------------------------


def many(path: Path, text: bytes) -> None:
    path.write_bytes(text * (LARGEST // len(text) // 4))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a loop of links": lambda path: path.symlink_to(path),
    "not UTF-8": lambda path: path.write_bytes(b"max_steps: \xff\xfe"),
    "too large": lambda path: path.write_bytes(b" " * (LARGEST + 1)),
    "brackets": lambda path: many(path, b"[" * 1000),
    "quotes": lambda path: many(path, b"'\"'\"\\" * 100),
    "deep": lambda path: path.write_bytes(b"".join(b" " * n + b"a:\n" for n in range(2000))),
    "NUL": lambda path: path.write_bytes(b"max_steps: 5\0\n\0: 1\n"),
    "here-documents": lambda path: many(path, b"x <<A\n"),
    "substitutions": lambda path: many(path, b"$($(`"),
    "a script of itself": lambda path: path.write_text("sh run.sh\n" * 10_000),
    "all arguments, often": lambda path: path.write_text('t "$@"\n' * 10_000),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("file", ["run.toml", "run.yaml", "run.json", "run.sh"])
def test_a_hostile_file_is_unknown(tmp_path: Path, name: str, file: str) -> None:
    HOSTILE[name](tmp_path / file)
    argv = ["bash", file, *"a" * 1000] if file.endswith(".sh") else ["train", "@", file]
    began = time.process_time()
    command = Command(argv, tmp_path)
    assert command.number("max_steps") is None
    assert command.passes_arguments_on() in (True, False)
    assert time.process_time() - began < 5


@given(st.text(alphabet="ab $@\"'\\\n#;&|()<>{}`=-*!~", max_size=60))
def test_no_text_breaks_the_reading_of_a_shell(text: str) -> None:
    assert isinstance(shell_commands(text, ("1", "2"), "x"), list)
    assert Command(["sh", "-c", text, "x"]).programs


@given(st.text(alphabet="ab: -#\n'\"[]{}&*|>0.\0", max_size=80))
def test_no_text_breaks_the_reading_of_yaml(text: str) -> None:
    assert isinstance(plain_yaml(text), dict)


@given(
    st.lists(
        st.sampled_from(["--", "--a", "-", "=", "+=", "~", "@", "a=1", "\0", "", "-m", "sh", "-c", "uv", "run", "x.sh"])
    )
)
def test_no_words_break_a_layout(words: list[str]) -> None:
    site = Site(Path("/nonexistent/out"), command=tuple(words))
    for kind in all_trainers().values():
        if kind.name != "custom":
            layout = layout_of(kind, site)
            assert layout.target_step(words) is None or words
            assert layout.processes(words) is None
