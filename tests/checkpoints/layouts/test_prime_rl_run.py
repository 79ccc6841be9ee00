"""prime-rl's run directory (since 2026-08), a run that saves nothing, and supervised fine-tuning."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.command import Command
from podwatch.checkpoints.prime_rl import PrimeRLLayout, run_directory
from podwatch.checkpoints.scan import scan_part
from podwatch.checkpoints.shapes import Concern
from podwatch.checkpoints.trainers import concerns, make_layout
from podwatch.config.settings import Settings
from tests.drivers.checkpoints import prime_rl_layout
from tests.support.checkpoints import dcp_operations, finish, torch_zip_bytes, write_prime_rl_step

SAVES = ("--ckpt", "--ckpt.interval", "5")
NAME = st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True)


def settings(output_dir: Path, command: tuple[str, ...], cwd: Path) -> Settings:
    trainer = {"output_dir": str(output_dir), "cwd": str(cwd), "command": list(command), "layout": "prime-rl"}
    return Settings.model_validate({"run_id": "r", "trainer": trainer})


def about(subject: str, output_dir: Path, command: tuple[str, ...], cwd: Path) -> list[Concern]:
    return [c for c in concerns(settings(output_dir, command, cwd)) if c.subject == subject]


# -- the run directory ------------------------------------------------------------------------------------------------


@given(base=NAME, name=NAME, directory=st.none() | NAME, split=st.integers(0, 7), joined=st.booleans())
def test_flags_and_files_name_the_same_directory(
    tmp_path_factory: pytest.TempPathFactory, base: str, name: str, directory: str | None, split: int, joined: bool
) -> None:
    """Whether a value is a flag, ``--flag=value`` or in the TOML file: the directory is the same, and a flag wins."""
    cwd = tmp_path_factory.mktemp("cwd")
    values = {"output-dir": base, "run.name": name, "run.dir": directory}
    flags: list[str] = []
    document: dict[str, str] = {}
    for bit, (key, value) in enumerate(values.items()):
        if value is None:
            continue
        if split >> bit & 1:
            flags += [f"--{key}={value}"] if joined else [f"--{key}", value]
        else:
            document[key] = value
    lines = [f'output_dir = "{document["output-dir"]}"'] if "output-dir" in document else []
    run = [f'{key[4:]} = "{value}"' for key, value in document.items() if key.startswith("run.")]
    (cwd / "rl.toml").write_text("\n".join([*lines, "[run]", *run]) + "\n")
    command = ("uv", "run", "rl", "@", "rl.toml", *flags)
    assert run_directory(Command(command, cwd)).path == cwd / base / (directory or name)
    assert run_directory(Command((*command, "--run.dir", "zz"), cwd)).path == cwd / base / "zz"
    shutil.rmtree(cwd)


def test_a_run_without_a_name_is_refused_with_the_fix(tmp_path: Path) -> None:
    own = tmp_path / "outputs" / "wordle--qwen3--a1b2"
    command = ("uv", "run", "rl", "@", "rl.toml", *SAVES)
    assert about("run.name", own, command, tmp_path) == []  # an older version may write to output_dir itself
    (own / "logs" / "attempt_1").mkdir(parents=True)
    (found,) = about("run.name", own.parent, command, tmp_path)
    assert found.certain
    assert '"--run.name", "wordle--qwen3--a1b2"' in found.fix
    assert str(own) in found.fix
    (found,) = about("run.name", own, command, tmp_path)
    assert '"--run.name", "wordle--qwen3--a1b2"' in found.fix
    assert about("run.name", own, (*command, "--run.name", own.name), tmp_path) == []


@pytest.mark.parametrize("output", ["outputs", "outputs/two", "elsewhere/one"])
def test_another_directory_than_the_run_writes_to_is_refused(tmp_path: Path, output: str) -> None:
    command = ("uv", "run", "rl", "@", "rl.toml", "--run.name", "one", *SAVES)
    (found,) = about("run.name", tmp_path / output, command, tmp_path)
    assert found.certain
    assert f'trainer.output_dir = "{tmp_path / "outputs" / "one"}"' in found.fix
    assert about("run.name", tmp_path / "outputs" / "one", command, tmp_path) == []


def test_a_link_to_the_run_directory_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "volume" / "one").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "volume")
    command = ("rl", "@", "rl.toml", "--run.name", "one", *SAVES)
    assert about("run.name", tmp_path / "volume" / "one", command, tmp_path) == []


# -- a run that saves nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "toml", "says"),
    [
        ((), "", '"--ckpt", "--ckpt.interval"'),
        ((), "[wandb]\nname = 'x'\n", '"--ckpt", "--ckpt.interval"'),
        (("--ckpt",), "", '"--ckpt.interval"'),
        (("--ckpt.keep-last", "2"), "", '"--ckpt.interval"'),
        ((), "[ckpt]\nkeep_last = 2\n", '"--ckpt.interval"'),
        (("--ckpt", "--ckpt.interval", "5"), "", ""),
        (("--ckpt.interval=5",), "", ""),
        ((), "[ckpt]\ninterval = 5\n", ""),
        (("--ckpt.interval", "5"), "[ckpt]\n", ""),
        ((), "[trainer.ckpt]\ninterval = 5\n", ""),
    ],
)
def test_a_run_that_saves_nothing_is_named(tmp_path: Path, words: tuple[str, ...], toml: str, says: str) -> None:
    (tmp_path / "rl.toml").write_text(toml)
    found = about("saves", tmp_path / "outputs", ("uv", "run", "rl", "@", "rl.toml", *words), tmp_path)
    if not says:
        assert found == []
        return
    assert found[0].certain
    assert says in found[0].fix


@pytest.mark.parametrize(
    ("script", "subjects"),
    [
        ("uv run rl @ rl.toml", ["run.name", "saves"]),
        ("uv run rl @ rl.toml --run.name one --ckpt --ckpt.interval 5", []),
        ('cd /app && uv run rl @ rl.toml --output-dir "$OUT" --run.name "$NAME" --ckpt.interval 5', []),
        ("exec uv run rl @ rl.toml \\\n  --run.name one \\\n  --ckpt.interval 5  # it's saved", []),
        ('uv run rl @ rl.toml "$@"', []),
        ("echo 'unclosed\nuv run rl @ rl.toml", []),
    ],
)
@pytest.mark.parametrize("inline", [True, False])
def test_a_shell_script_is_read(tmp_path: Path, script: str, subjects: list[str], inline: bool) -> None:
    """Nothing is claimed of what a script may get from variables or arguments."""
    own = tmp_path / "outputs" / "one"
    (own / "logs" / "attempt_1").mkdir(parents=True)
    (tmp_path / "start.sh").write_text(f"#!/bin/bash\n{script}\n")
    command = ("bash", "-c", script) if inline else ("bash", "start.sh")
    assert [c.subject for c in concerns(settings(own, command, tmp_path))] == subjects


# -- supervised fine-tuning -------------------------------------------------------------------------------------------


def write_sft_step(output_dir: Path, step: int, ranks: int = 2) -> Path:
    trainer = output_dir / "checkpoints" / f"step_{step}" / "trainer"
    (trainer / "dataloader").mkdir(parents=True)
    for rank in range(ranks):
        (trainer / "dataloader" / f"rank_{rank}.pt").write_bytes(torch_zip_bytes({"position": 5}))
    finish(dcp_operations(trainer, 4096, ranks))
    return trainer


def sft(output_dir: Path, *words: str) -> PrimeRLLayout:
    layout = make_layout(settings(output_dir, ("uv", "run", "sft", "@", "sft.toml", *words), output_dir.parent))
    assert isinstance(layout, PrimeRLLayout)
    return layout


def test_an_sft_step_is_complete_without_an_orchestrator(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    trainer = write_sft_step(out, 5)
    for layout in (sft(out), prime_rl_layout(out)):  # by its command, and by what is on disk
        parts = layout.steps()[5]
        assert [p.name for p in parts if p.required] == ["trainer"]
        verdict = layout.judge(5, [scan_part(p).found for p in parts])
        assert verdict.whole, verdict.reason
        assert layout.finish_lines == ("SFT trainer finished!",)
    (trainer / "dataloader" / "rank_0.pt").unlink()
    verdict = sft(out).judge(5, [scan_part(p).found for p in sft(out).steps()[5]])
    assert not verdict.whole
    assert "dataloader/rank_0.pt" in verdict.reason


def test_an_rl_step_that_lacks_its_orchestrator_stays_incomplete(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    for variant in ("A", "B"):
        write_prime_rl_step(out, 5, variant)
        own = out / "run_default" if variant == "A" else out
        shutil.rmtree(own / "checkpoints" / "step_5" / "orchestrator")
        for layout in (prime_rl_layout(out), prime_rl_layout(out, command=("uv", "run", "rl", "@", "rl.toml"))):
            assert not layout.judge(5, [scan_part(p).found for p in layout.steps()[5]]).whole
        shutil.rmtree(out)


def test_sft_resumes_by_its_version_and_restores_into_an_empty_directory(tmp_path: Path) -> None:
    out = tmp_path / "outputs"
    new = sft(out, "--run.name", "x").resume_command(("sft", "@", "s.toml", "--run.name", "x"), 5, "auto", {})
    assert new.argv[-2:] == ("--resume.step", "5")
    layout = prime_rl_layout(out)
    layout.expect_parts({"trainer"})
    assert layout.part_dir("trainer", 5) == out / "checkpoints" / "step_5" / "trainer"
    write_sft_step(out, 5)
    assert set(layout.ahead_of(4)) == {out / "checkpoints" / "step_5"}
