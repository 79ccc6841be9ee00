"""What each layout knows of its trainer beside the write order: husks, mixed saves, trackers, what is ahead, argv."""

import os
import shutil
from pathlib import Path

import pytest

from podwatch.checkpoints.inspection import Inspection
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.table import SaveEnd
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of
from podwatch.domain.errors import ConfigurationError
from tests.drivers.checkpoints import catalogue_of
from tests.drivers.checkpoints import judge as judged
from tests.support.checkpoints import ManualClock, safetensors_bytes, torch_zip_bytes
from tests.support.layout_checks import age
from tests.support.layout_makers import Script, core, run
from tests.support.layout_makers.core import TRACKER


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def make(name: str, out: Path, *command: str) -> Layout:
    return layout_of(all_trainers()[name], Site(out, command=command))


def judge(layout: Layout, step: int) -> Inspection:
    found = judged(layout, step)
    assert found is not None
    return found


def resume(layout: Layout, *command: str, step: int | None = 10) -> tuple[str, ...]:
    return layout.resume_command(command, step, "auto", {}).argv


# -- every layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(all_trainers()))
def test_every_layout_stands_an_empty_directory(name: str, out: Path) -> None:
    from podwatch.config.settings import CustomLayoutSettings

    layout = layout_of(all_trainers()[name], Site(out / "nothing", custom=CustomLayoutSettings()))
    assert layout.name == name
    assert layout.steps() == {}
    assert layout.progress() == ()
    assert layout.ahead_of(None) == ()
    assert layout.step_paths(3) == ()
    assert layout.pinned() == {}
    assert layout.watch_roots()
    assert layout.trackers(None) == ()
    assert layout.chosen_because == ""
    assert isinstance(layout.reshards, bool)
    with pytest.raises(ConfigurationError, match="no part 'nonsense'"):
        layout.part_dir("nonsense", 5)


# -- verl -------------------------------------------------------------------------------------------------------------


def test_verl_husks_are_no_checkpoints(out: Path) -> None:
    run(core.verl_fsdp(out, 10))
    shutil.rmtree(out / "global_step_10" / "actor")
    verdict = judge(make("verl", out), 10)
    assert "actor/*" in verdict.reason
    assert not verdict.damaged


def test_verl_world_size_is_read_and_must_be_one(out: Path) -> None:
    run(core.verl_fsdp(out, 10, world=4))
    layout = make("verl", out)
    assert judge(layout, 10).world_size == 4
    assert not layout.reshards
    actor = out / "global_step_10" / "actor"
    (actor / "model_world_size_2_rank_0.pt").write_bytes((actor / "model_world_size_4_rank_0.pt").read_bytes())
    os.utime(actor / "model_world_size_2_rank_0.pt", (1, 1))
    assert "actor: files of 2 and 4 ranks are mixed" in judge(layout, 10).faults


def test_verl_needs_a_critic_where_other_steps_have_one(out: Path) -> None:
    layout = make("verl", out)
    run(core.verl_fsdp(out, 20))
    assert judge(layout, 20).whole
    run(core.verl_critic(out, 10))
    (out / TRACKER).write_text("20")
    assert "files like checkpoint/critic/" in judge(layout, 20).reason


def test_verl_without_optimizer_only_once_a_second_save_has_none(out: Path) -> None:
    clock = ManualClock()
    layout = make("verl", out)
    catalogue = catalogue_of(layout, clock, settle=5, settle_weak=60)

    def save(step: int, *, optimizer: bool) -> set[int]:
        run(core.verl_fsdp(out, step))
        for file in (out / f"global_step_{step}" / "actor").glob("optim_*"):
            if not optimizer:
                file.unlink()
        age(out / f"global_step_{step}", 100)
        for _ in range(4):
            catalogue.rescan()
            clock.advance(1000)
        return {s.step for s in catalogue.rescan() if s.complete}

    assert save(10, optimizer=False) == set()
    assert "actor/optim_world_size_* is missing" in catalogue.sets[0].reason
    assert save(20, optimizer=False) == {10, 20}
    assert catalogue.verify(20) == ()
    assert save(30, optimizer=True) == {10, 20, 30}
    assert save(40, optimizer=False) == {10, 20, 30}
    assert save(50, optimizer=False) == {10, 20, 30, 40, 50}
    catalogue = catalogue_of(layout, clock, settle=5, settle_weak=60, records=catalogue.records)
    assert save(60, optimizer=False) == {10, 20, 30, 40, 50, 60}, "a podwatch that starts again does not ask anew"


def test_verl_automodel_needs_its_model_and_the_optimizers_index(out: Path) -> None:
    run(core.verl_automodel(out, 10))
    layout, directory = make("verl", out), out / "global_step_10"
    found = judge(layout, 10)
    assert (found.whole, found.world_size) == (True, None), "torch reads the shards with any number of ranks"
    shutil.rmtree(directory / "model" / "consolidated")
    assert judge(layout, 10).whole, "no resume reads the export"
    for shard in (directory / "model").glob("shard-*.safetensors"):
        shard.unlink()
    assert "actor/*" in judge(layout, 10).reason


def test_verl_automodel_in_a_role(out: Path) -> None:
    """With the engine in PPO the same lies in ``actor``; the optimizer's index closes it."""
    run(core.verl_automodel(out, 10))
    directory = out / "global_step_10"
    (directory / "actor").mkdir()
    for name in ("model", "optim"):
        (directory / name).rename(directory / "actor" / name)
    (directory / "data_0.pt").rename(directory / "data.pt")
    layout = make("verl", out)
    assert judge(layout, 10).whole, judge(layout, 10).reason
    os.utime(directory / "actor" / "optim" / ".metadata", (1, 1))
    assert "newer than" in judge(layout, 10).reason
    shutil.rmtree(directory / "actor" / "model")
    assert not judge(layout, 10).whole


def test_verl_trackers(out: Path) -> None:
    run(core.verl_fsdp(out, 10))
    layout = make("verl", out)
    assert layout.pinned() == {10: f"named by {TRACKER}"}
    for text in ("", "1", "abc", "0x10", "-5", "9" * 30):
        (out / TRACKER).write_text(text)
        verdict = judge(layout, 10)
        assert not verdict.whole, text
        assert verdict.rests_on == (out / TRACKER,)
        assert layout.pinned() == ({1: f"named by {TRACKER}"} if text == "1" else {})
    (out / TRACKER).unlink()
    assert f"{TRACKER} is missing" in judge(layout, 10).reason
    assert layout.ahead_of(None) == (out / "global_step_10",)
    (out / TRACKER).write_text("30")
    assert judge(layout, 10).whole
    assert judge(layout, 10).rests_on == (out / TRACKER,)
    assert set(layout.ahead_of(None)) == {out / "global_step_10", out / TRACKER}
    (tracker,) = layout.trackers(10)
    assert (tracker.path, tracker.content, tracker.target) == (out / TRACKER, b"10", None)


def test_a_tracker_that_went_back_says_nothing_of_an_older_future(out: Path) -> None:
    """Set right for a start from 5, while step 10 came back out of quarantine: its own files speak for it."""
    run(core.verl_fsdp(out, 10))
    (out / TRACKER).write_text("5")
    assert "names step 5: the save of step 10 has not finished" in judge(make("verl", out), 10).reason
    later = (out / TRACKER).stat().st_mtime + 60
    os.utime(out / TRACKER, (later, later))
    assert judge(make("verl", out), 10).whole


def test_verl_commands(out: Path) -> None:
    command = (
        "python3", "-m", "verl.trainer.main_ppo", "trainer.resume_mode=auto", "+trainer.resume_from_path=/x",
        "trainer.total_training_steps=99", f"trainer.default_local_dir={out}/ckpt",
    )  # fmt: skip
    layout = make("verl", out, *command)
    assert layout.watch_roots() == (out / "ckpt",)
    kept = (*command[:3], *command[5:])
    assert resume(layout, *command) == (
        *kept, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={out}/ckpt/global_step_10",
    )  # fmt: skip
    made = layout.resume_command(command, None, "auto", {})
    assert made.argv == kept
    assert made.removed == ("trainer.resume_mode=auto", "+trainer.resume_from_path=/x")
    assert layout.target_step(command) == 99
    spaced = out / "a dir"
    assert resume(make("verl", spaced), "x")[-1] == f"trainer.resume_from_path='{spaced}/global_step_10'"


def test_verl_default_directory_counts_only_inside_output_dir(out: Path) -> None:
    names = ("trainer.project_name=p", "trainer.experiment_name=e")
    site = Site(out / "checkpoints" / "p" / "e", cwd=out, command=names)
    assert layout_of(all_trainers()["verl"], site).watch_roots() == (site.output_dir,)
    assert layout_of(all_trainers()["verl"], Site(out, cwd=out, command=names)).watch_roots() == (site.output_dir,)
    assert layout_of(all_trainers()["verl"], Site(out, cwd=out.parent, command=names)).watch_roots() == (out,)


# -- torchtitan, DCP --------------------------------------------------------------------------------------------------


def test_torchtitan_export_is_kept_and_never_resumed_from(out: Path) -> None:
    run(core.torchtitan(out, 10))
    run(core.torchtitan_export(out, 20))
    layout = make("torchtitan", out)
    assert judge(layout, 10).whole
    verdict = judge(layout, 20)
    assert not verdict.whole
    assert "contains only the model" in verdict.reason
    assert layout.pinned() == {20: "the export at the end of the run"}
    assert layout.ahead_of(10) == (out / "checkpoint" / "step-20",)
    shutil.rmtree(out / "checkpoint" / "step-20")
    assert layout.pinned() == {}
    export = out / "checkpoint" / "step-30"
    export.mkdir()
    (export / "model-00001-of-00001.safetensors").write_bytes(safetensors_bytes())
    (export / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    assert "contains only the model" in judge(layout, 30).reason
    assert layout.pinned() == {30: "the export at the end of the run"}


def test_torchtitan_seed_folder_and_commands(out: Path) -> None:
    (out / "titan.toml").write_text('[checkpoint]\nfolder = "ck"\n[training]\nsteps = 50\n')
    command = ("torchrun", "-m", "torchtitan.train", "--job.config_file", str(out / "titan.toml"))
    layout = make("torchtitan", out, *command)
    assert layout.watch_roots() == (out / "ck",)
    assert layout.target_step(command) == 50
    (out / "ck" / "step-0").mkdir(parents=True)
    assert layout.steps() == {}
    assert layout.ahead_of(None) == ()
    assert resume(layout, *command, "--checkpoint.load_step=7") == (*command, "--checkpoint.load_step", "10")
    assert resume(layout, *command, "--checkpoint.load-step", "7", step=None) == command


def test_dcp_in_parts_needs_what_other_steps_have(out: Path) -> None:
    layout = make("dcp", out)
    for step in (10, 20):
        script = Script()
        for folder in ("model", "optimizer"):
            script.dcp(out / f"iter_{step:05}" / folder)
        run(script.operations)
    assert judge(layout, 20).whole
    assert judge(layout, 20).ends is SaveEnd.NONE
    shutil.rmtree(out / "iter_00020" / "optimizer")
    assert judge(layout, 20).reason == "it has 0 files like checkpoint/optimizer/.metadata, step 10 has 1"
    assert layout.part_dir("checkpoint", 30) == out / "iter_00030"
    with pytest.raises(ConfigurationError, match="plain DCP"):
        resume(layout, "python", "t.py")


def test_a_number_at_the_end_of_a_name_makes_no_dcp_step(out: Path) -> None:
    """Nothing foreign is called incomplete, set aside or removed."""
    run(core.dcp(out, 10))
    for name in ("run_77", "2026", "logs99"):
        (out / name / "deep").mkdir(parents=True)
        (out / name / "deep" / "notes.txt").write_text("mine")
    layout = make("dcp", out)
    for _ in range(2):
        assert set(layout.steps()) == {10}
        assert layout.ahead_of(5) == (out / "step_10",)
        assert layout.ahead_of(None) == (out / "step_10",)
        assert layout.step_paths(77) == ()
    script = Script()
    script.dcp(out / "run_88")
    run(script.operations, 1)
    assert set(layout.steps()) == {10, 88}
    shutil.rmtree(out / "step_10")
    assert set(layout.steps()) == {88}


# -- Megatron-LM, NeMo ------------------------------------------------------------------------------------------------


def test_megatron_commands_leave_a_base_model_alone(out: Path) -> None:
    command = ("torchrun", "pretrain_gpt.py", "--save", str(out), "--load", "/base", "--finetune", "--train-iters", "9")
    layout = make("megatron", out, *command)
    assert resume(layout, *command, step=None) == command
    assert resume(layout, *command) == (
        "torchrun", "pretrain_gpt.py", "--save", str(out), "--train-iters", "9",
        "--load", str(out), "--ckpt-step", "10",
    )  # fmt: skip
    assert layout.target_step(command) == 9
    assert make("megatron", out, "--save", str(out / "x")).watch_roots() == (out / "x",)


def test_megatron_legacy_needs_every_model_parallel_rank(out: Path) -> None:
    run(core.megatron_legacy(out, 10))
    layout = make("megatron", out)
    assert judge(layout, 10).whole
    shutil.rmtree(out / "iter_0000010" / "mp_rank_01_000")
    assert "3 of 4 model-parallel ranks" in judge(layout, 10).reason
    (out / TRACKER).write_text("release")
    assert layout.pinned() == {}


def test_nemo_prefers_last_and_looks_at_its_marker(out: Path) -> None:
    run(core.nemo(out, 10))
    layout, root = make("nemo", out), out / "checkpoints"
    (name,) = [p.name for p in root.iterdir()]
    shutil.copytree(root / name, root / name.removesuffix("-last"))
    assert (layout.steps()[10][0].path, layout.steps()[10][0].names) == (root, (name,))
    assert set(layout.step_paths(10)) == {root / name, root / name.removesuffix("-last")}
    mark = root / f"{name}-unfinished"
    mark.touch()
    assert f"{mark.name} exists" in judge(layout, 10).reason
    assert judge(layout, 10).rests_on == (mark,)
    export = root / name.replace("-last", "-end")
    shutil.copytree(root / name, export)
    assert set(layout.ahead_of(5)) == {root / name, root / name.removesuffix("-last"), mark, export}
    assert layout.ahead_of(10) == ()
    with pytest.raises(ConfigurationError, match="choose in Python"):
        resume(layout, "python", "t.py")
    assert layout.part_dir("checkpoint", 7) == root, "a restore brings the name"


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def test_the_best_model_is_never_removed(out: Path) -> None:
    for step in (5, 10, 15):
        run(core.hf(out, step))
    layout = make("hf", out)
    assert layout.pinned() == {}
    state = out / "checkpoint-15" / "trainer_state.json"
    state.write_text(state.read_text().replace("null", '"/elsewhere/checkpoint-5"'))
    assert layout.pinned() == {5: "best_model_checkpoint in trainer_state.json"}


@pytest.mark.parametrize(
    ("command", "end"),
    [
        (("torchrun", "train.py", "--output_dir", "o"), ("--resume_from_checkpoint", "{checkpoint}")),
        (("llamafactory-cli", "train", "x.yaml"), ("resume_from_checkpoint={checkpoint}",)),
        (
            ("llamafactory-cli", "train", "x.yaml", "resume_from_checkpoint=old"),
            ("resume_from_checkpoint={checkpoint}",),
        ),
        (("llamafactory-cli", "train", "--stage", "sft"), ("--resume_from_checkpoint", "{checkpoint}")),
        (("axolotl", "train", "x.yml"), ("--resume-from-checkpoint", "{checkpoint}")),
        (("axolotl", "train", "x.yml", "--auto-resume-from-checkpoints"), ("--resume-from-checkpoint", "{checkpoint}")),
        (("swift", "sft", "--add_version", "false"), ("--resume_from_checkpoint", "{checkpoint}")),
    ],
)
def test_hf_presets(out: Path, command: tuple[str, ...], end: tuple[str, ...]) -> None:
    kept = tuple(a for a in command if a not in ("resume_from_checkpoint=old", "--auto-resume-from-checkpoints"))
    filled = tuple(a.format(checkpoint=out / "checkpoint-10") for a in end)
    assert resume(make("hf", out), *command) == (*kept, *filled)
    assert resume(make("hf", out), *command, step=None) == kept


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("trl", "sft", "--output_dir", "o"), "restart at step 0"),
        (("swift", "sft"), "versioned directory"),
        (("axolotl", "train", "x.yml", "--", "--nproc_per_node=2"), "go to the launcher"),
        (("torchrun", "deaf.py"), "the script calls Trainer.train"),
        (("bash", "run.sh"), "does not pass arguments on"),
        (("bash", "-c", "torchrun train.py"), "does not pass arguments on"),
    ],
)
def test_what_cannot_be_preset_is_said(out: Path, command: tuple[str, ...], why: str) -> None:
    (out.parent / "deaf.py").write_text("trainer = Trainer()\ntrainer.train()\n")
    (out.parent / "run.sh").write_text("#!/bin/sh\n# pass $@ on?\ntorchrun train.py --x 1\n")
    with pytest.raises(ConfigurationError, match=why):
        resume(make("hf", out), *command)
    assert resume(make("hf", out), *command, step=None) == command
    if "pass arguments" in why:  # those of the operator would not reach the trainer either
        with pytest.raises(ConfigurationError, match=why):
            make("hf", out).resume_command(command, 10, ("--from", "{step}"), {})
        return
    own = make("hf", out).resume_command(command, 10, ("--from", "{step}"), {}).argv
    assert own == (*command, "--from", "10")


def test_a_script_that_passes_arguments_on_is_fine(out: Path) -> None:
    for text in ('torchrun train.py "$@"\n', "torchrun train.py ${PODWATCH_RESUME_ARGS}\n"):
        (out.parent / "run.sh").write_text(text)
        assert resume(make("hf", out), "bash", "run.sh")[-1] == str(out / "checkpoint-10")
    assert resume(make("hf", out), "sh", "-c", "t.py {resume_args}")[-1].startswith("t.py --resume_from_checkpoint ")


def test_a_wandb_run_goes_on(out: Path) -> None:
    made = make("hf", out).resume_command(("train",), 10, "auto", {"shared": "abc"})
    assert made.environment["WANDB_RUN_ID"] == "abc"
    assert make("hf", out).wandb_variables() == ("WANDB_RUN_ID",)
    for ids in ({}, {"shared": "-rf"}, {"shared": "a b"}, {"trainer": "abc"}):
        assert not make("hf", out).resume_command(("train",), 10, "auto", ids).environment.get("WANDB_RUN_ID")


def test_prime_rl_broadcast_needs_its_weights(out: Path) -> None:
    run(core.prime_rl_a(out, 10))
    broadcast = out / "run_default" / "broadcasts" / "step_10"
    (broadcast / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    (broadcast / "STABLE").touch()
    assert "model-00001-of-00001.safetensors is missing" in judge(make("prime-rl", out), 10).reason
    (broadcast / "model.safetensors.index.json").unlink()
    assert judge(make("prime-rl", out), 10).whole
    (broadcast / "config.json").write_text("{}")
    (broadcast / "model.safetensors").unlink()
    assert "broadcast:*.safetensors" in judge(make("prime-rl", out), 10).reason
    (broadcast / "NCCL_READY").touch()
    assert judge(make("prime-rl", out), 10).whole, "weights that travel by NCCL leave no file"
    (broadcast / "NCCL_READY").unlink()
    (broadcast / "model.pt").write_bytes(torch_zip_bytes({}))
    (broadcast / "STABLE").touch()
    assert judge(make("prime-rl", out), 10).whole


def test_megatron_config_speaks_for_this_save_only(out: Path) -> None:
    """The tracker may be far ahead: what lies in the directory must still be of one save."""
    run(core.megatron(out, 10))
    (out / TRACKER).write_text("20")
    common = out / "iter_0000010" / "common.pt"
    assert judge(make("megatron", out), 10).whole
    later = common.stat().st_mtime + 60
    os.utime(common, (later, later))
    assert "common.pt is newer than metadata.json" in judge(make("megatron", out), 10).reason
