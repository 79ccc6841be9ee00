"""``layout = "auto"``: which trainer a command or a directory is taken for, and what is asked."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.command import Command
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import choose, make_layout, recognised
from podwatch.config.settings import CheckpointSettings, CustomLayoutSettings, Settings, TrainerSettings
from podwatch.domain.errors import ConfigurationError
from tests.support.layout_makers import more, run
from tests.support.layout_makers.core import MAKERS, hf, verl_fsdp


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def settings(out: Path, *command: str, layout: str = "auto", custom: bool = False) -> Settings:
    return Settings(
        run_id="r",
        trainer=TrainerSettings(layout=layout, output_dir=out, command=command),  # type: ignore[arg-type]
        checkpoints=CheckpointSettings(custom=CustomLayoutSettings() if custom else None),
    )


@pytest.mark.parametrize(
    ("command", "layout"),
    [
        ("uv run rl @ rl.toml --ckpt", "prime-rl"),
        ("python -m prime_rl.entrypoints.rl @ x.toml", "prime-rl"),
        ("python3 -m verl.trainer.main_ppo data.x=1", "verl"),
        ("torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer", "verl"),
        ("python my_main.py actor_rollout_ref.model.path=x", "verl"),
        ("torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file x.toml", "torchtitan"),
        ("bash torchtitan/run_train.sh --checkpoint.enable", "torchtitan"),
        ("torchrun -m torchtitan.train --module llama3 --config llama3_8b --dump_folder ./outputs", "torchtitan"),
        ("./run_train.sh --module llama3 --config llama3_8b --dump_folder outputs", "torchtitan"),
        ("accelerate launch -m axolotl.cli.train x.yml", "hf"),
        ("axolotl train x.yml", "hf"),
        ("llamafactory-cli train x.yaml", "hf"),
        ("swift rlhf --rlhf_type grpo", "hf"),
        ("torchrun --nproc_per_node=8 train.py --resume_from_checkpoint True", "hf"),
        ("deepspeed --num_gpus 8 train.py --per_device_train_batch_size 4", "hf"),
        ("torchrun pretrain_gpt.py --train-iters 5 --tensor-model-parallel-size 2", "megatron"),
        ("nemo llm pretrain --factory llama3_8b", "nemo"),
    ],
)
def test_known_by_its_command(command: str, layout: str, out: Path) -> None:
    made = make_layout(settings(out, *command.split()))
    assert made.name == layout
    assert made.chosen_because
    named = make_layout(settings(out, *command.split(), layout=layout))
    assert named.chosen_because == ""


EVERY = {**MAKERS, **more.MAKERS}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_known_by_what_lies_in_the_directory(name: str, out: Path) -> None:
    layout, maker = EVERY[name]
    run(maker(out, 10))
    made = make_layout(settings(out, "bash", "unknown.sh"))
    assert made.name == layout
    assert made.chosen_because
    assert set(made.steps()) == {10}


def test_a_script_is_read(out: Path) -> None:
    (out.parent / "run.sh").write_text(
        "#!/bin/bash\n# python -m prime_rl.entrypoints.rl is what we used before\n"
        'exec python3 -m verl.trainer.main_ppo \\\n    trainer.n_gpus_per_node=8 "$@"\n'
    )
    made = make_layout(settings(out, "bash", "run.sh"))
    assert (made.name, made.chosen_because) == ("verl", "the command runs verl.trainer.main_ppo")


def test_several_are_asked_about_with_their_reasons(out: Path) -> None:
    run(hf(out, 5))
    run(verl_fsdp(out, 5))
    with pytest.raises(ConfigurationError) as problem:
        make_layout(settings(out, "bash", "unknown.sh"))
    text = str(problem.value)
    assert "several layouts fit" in text
    assert "hf: checkpoint-5 contains trainer_state.json" in text
    assert "verl: global_step_5 is beside latest_checkpointed_iteration.txt" in text
    assert 'layout = "' in problem.value.fix
    assert make_layout(settings(out, "bash", "unknown.sh", layout="hf")).name == "hf"


def test_certain_beats_possible(out: Path) -> None:
    run(MAKERS["dcp"][1](out, 5))
    assert make_layout(settings(out, "axolotl", "train", "x.yml")).name == "hf"


def test_none_says_what_was_looked_at(out: Path) -> None:
    (out / "weird").mkdir()
    with pytest.raises(ConfigurationError) as problem:
        make_layout(settings(out, "bash", "unknown.sh"))
    text = f"{problem.value} {problem.value.fix}"
    assert "'bash unknown.sh'" in text
    assert "holds weird" in text
    assert all(name in text for name in all_trainers())
    with pytest.raises(ConfigurationError, match="there is no command"):
        make_layout(settings(out.parent / "nothing"))


def test_a_custom_section_is_meant(out: Path) -> None:
    assert make_layout(settings(out, "./train.sh", custom=True)).name == "custom"
    with pytest.raises(ConfigurationError, match="several layouts fit"):
        make_layout(settings(out, "axolotl", "train", "x", custom=True))


def test_a_directory_that_cannot_be_read_speaks_for_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_layout: Layout) -> dict[int, object]:
        raise PermissionError(13, "Permission denied", str(out))

    monkeypatch.setattr(Layout, "steps", refused)
    assert choose(Site(out, command=("rl", "@", "x.toml"))).layout == "prime-rl"
    assert recognised(Site(out)) == []


@pytest.mark.parametrize(
    ("command", "name", "module", "launcher"),
    [
        ("env A=1 nohup torchrun --nproc_per_node 8 dir/train.py --x", "train.py", "", "torchrun"),
        ("accelerate launch --config_file c.yaml --num_processes 8 train.py --x", "train.py", "", "accelerate"),
        ("python -m torch.distributed.run --nnodes 1 -m pkg.train --x", "", "pkg.train", "torch.distributed.run"),
        ("uv run --env-file .env deepspeed --num_gpus 8 train.py", "train.py", "", "deepspeed"),
        ("/v/bin/python3.12 -u -X dev /v/bin/rl @ x.toml", "rl", "", ""),
        ("conda run -n env python -m a.b", "", "a.b", ""),
        ("python -c pass", "", "", ""),
        ("vim train.py", "vim", "", ""),
        ("", "", "", ""),
    ],
)
def test_programs_are_seen_through_their_wrappers(command: str, name: str, module: str, launcher: str) -> None:
    seen = Command(command.split()).program
    assert (seen.name, seen.module, seen.launcher) == (name, module, launcher)


def test_words_in_arguments_are_no_program(out: Path) -> None:
    for command in ("vim verl.trainer.py", "tail -f axolotl", "python serve.py --name torchtitan", "less train.yaml"):
        assert recognised(Site(out, command=tuple(command.split()))) == []


@given(st.lists(st.sampled_from(["uv", "run", "-m", "python", "torchrun", "bash", "-c", "x.py", "--a", "-", "", "="])))
def test_no_command_breaks_the_parser(words: list[str]) -> None:
    assert Command(words).programs
    recognised(Site(Path("/nonexistent"), command=tuple(words)))


def test_a_sign_on_disk_can_be_what_is_missing(out: Path) -> None:
    """open-instruct saves accelerate's state and a marker of its own."""
    run(more.MAKERS["accelerate"][1](out, 10))
    (step,) = (path.parent for path in out.rglob("random_states_0.pkl"))
    own = out / "step_10"
    step.rename(own)
    assert [r.layout for r in recognised(Site(out))] == ["accelerate"]
    (own / "COMPLETED").write_text("COMPLETED")
    assert [r.layout for r in recognised(Site(out))] == ["open-instruct"]
