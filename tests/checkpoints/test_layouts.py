"""What each layout says of itself: variants, parts, what is ahead, resume commands, targets, W&B, progress."""

import json
import os
import shutil
from pathlib import Path

import pytest

from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.scan import scan_part
from podwatch.checkpoints.table import SaveEnd
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.settings import CheckpointSettings, CustomLayoutSettings, Settings, TrainerSettings
from podwatch.domain.errors import ConfigurationError
from tests.drivers.checkpoints import custom_layout, hf_layout, prime_rl_layout
from tests.support.checkpoints import (
    dcp_operations,
    finish,
    orchestrator_operations,
    torch_zip_bytes,
    write_hf_step,
    write_prime_rl_step,
    write_rollouts,
)

COMMAND = ("uv", "run", "rl", "@", "rl.toml", "--ckpt", "--ckpt.interval", "5")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


def relative(paths: tuple[Path, ...], root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in paths}


def resume(layout: Layout, command: tuple[str, ...], step: int | None = 10, **more: object) -> tuple[str, ...]:
    return layout.resume_command(command, step, more.get("override", "auto"), more.get("wandb", {})).argv  # type: ignore[arg-type]


# -- prime-rl: which variant ----------------------------------------------------------------------------------------


def test_variant_is_told_from_the_disk(out: Path) -> None:
    layout = prime_rl_layout(out)
    assert layout.variant == ""
    write_prime_rl_step(out, 5, "A")
    assert layout.variant == "A"
    write_prime_rl_step(out, 10, "B")  # the trainer was upgraded in place
    assert layout.variant == "B"


def test_variant_before_anything_is_written(out: Path, tmp_path: Path) -> None:
    assert prime_rl_layout(out, command=(*COMMAND, "--ckpt.resume-step", "5")).variant == "A"
    assert prime_rl_layout(out, command=(*COMMAND, "--run.name", "x")).variant == "B"
    source = tmp_path / "src" / "prime_rl" / "trainer"
    source.mkdir(parents=True)
    (source / "ckpt.py").write_text("class CheckpointManager: ...")
    assert prime_rl_layout(out, cwd=tmp_path).variant == "B"
    (source / "runs.py").touch()
    assert prime_rl_layout(out, cwd=tmp_path).variant == "A"


def test_variant_of_a_set_to_be_restored(out: Path) -> None:
    layout = prime_rl_layout(out)
    layout.expect_parts({"trainer", "orchestrator", "broadcast"})
    assert layout.part_dir("orchestrator", 5) == out / "run_default/checkpoints/step_5/orchestrator"
    layout.expect_parts({"trainer", "orchestrator"})
    assert layout.part_dir("orchestrator", 5) == out / "checkpoints/step_5/orchestrator"
    with pytest.raises(ConfigurationError, match="no part 'model'"):
        layout.part_dir("model", 5)


def test_parts_and_what_is_required(out: Path) -> None:
    write_prime_rl_step(out / "a", 5, "A")
    write_prime_rl_step(out / "b", 5, "B")
    a = {p.name: (p.required, p.uploaded) for p in prime_rl_layout(out / "a").steps()[5]}
    assert {n for n, (required, _) in a.items() if required} == {"trainer", "orchestrator", "broadcast"}
    assert {n for n, (_, uploaded) in a.items() if uploaded} == {"trainer", "orchestrator", "broadcast"}
    b = {p.name: p.required for p in prime_rl_layout(out / "b").steps()[5]}
    assert {n for n, required in b.items() if required} == {"trainer", "orchestrator"}


@pytest.mark.parametrize("kind", ["nccl", "nixl", "NIXL"])
def test_nccl_and_nixl_need_no_broadcast(out: Path, tmp_path: Path, kind: str) -> None:
    write_prime_rl_step(out, 5, "A")
    shutil.rmtree(out / "run_default" / "broadcasts")
    (tmp_path / "rl.toml").write_text(f'[weight_broadcast]\ntype = "{kind}"\n')
    by_flag = prime_rl_layout(out, command=("rl", "--weight-broadcast.type", kind))
    for layout, whole in (
        (prime_rl_layout(out), False),
        (prime_rl_layout(out, command=COMMAND), True),
        (by_flag, True),
    ):
        parts = [scan_part(p).found for p in layout.steps()[5]]
        assert layout.judge(5, parts).whole is whole


@pytest.mark.parametrize("variant", ["A", "B"])
def test_checkpoints_on_another_volume(out: Path, tmp_path: Path, variant: str) -> None:
    """ckpt.output_dir moves the trainer's half and weights; the orchestrator's half stays."""
    disk = tmp_path / "disk"
    write_prime_rl_step(out, 5, variant, checkpoint_dir=disk, weights=True)
    layout = prime_rl_layout(out, checkpoint_dir=disk)
    assert layout.variant == variant
    assert disk / "checkpoints" in layout.watch_roots()
    parts = [scan_part(p).found for p in layout.steps()[5]]
    verdict = layout.judge(5, parts)
    assert verdict.whole, verdict.reason
    assert disk / "checkpoints" / "step_5" in layout.step_paths(5)
    assert disk / "weights" / "step_5" in layout.ahead_of(4)


def test_a_stable_marker_older_than_its_weights_does_not_count(out: Path) -> None:
    write_prime_rl_step(out, 5, "A")
    layout = prime_rl_layout(out)
    os.utime(out / "run_default/broadcasts/step_5/STABLE", (1_700_000_000, 1_700_000_000))
    verdict = layout.judge(5, [scan_part(p).found for p in layout.steps()[5]])
    assert not verdict.whole
    assert "newer than broadcast:STABLE" in verdict.problems["broadcast"]


# -- prime-rl: ahead of N ---------------------------------------------------------------------------------------------


def test_ahead_of_in_layout_a(out: Path) -> None:
    for step in (5, 10, 15):
        write_prime_rl_step(out, step, "A", weights=True)
        write_rollouts(out, step)
    finish(orchestrator_operations(out / "run_default/checkpoints/step_20/orchestrator", 20, "A"))
    assert relative(prime_rl_layout(out).ahead_of(10), out) == {
        "checkpoints/step_15",
        "run_default/checkpoints/step_15",
        "run_default/checkpoints/step_20",
        "weights/step_15",
        "run_default/broadcasts/step_15",
        "run_default/rollouts",
        "rollouts",
    }


def test_ahead_of_in_layout_b(out: Path) -> None:
    for step in (5, 10, 15):
        write_prime_rl_step(out, step, "B")
        write_rollouts(out, step, "B")
    assert relative(prime_rl_layout(out).ahead_of(10), out) == {
        "checkpoints/step_15",
        "broadcasts/step_10",
        "broadcasts/step_15",
        "rollouts/step_15",
    }


@pytest.mark.parametrize("variant", ["A", "B"])
def test_a_fresh_start_sets_everything_of_the_trainer_aside(out: Path, variant: str) -> None:
    write_prime_rl_step(out, 5, variant, weights=True)
    write_rollouts(out, 5, variant)
    (out / "logs").mkdir()
    for mine in ("configs", ".podwatch"):
        (out / mine).mkdir()
    (out / "rl.toml").touch()
    for path in prime_rl_layout(out).ahead_of(None):
        shutil.rmtree(path)
    assert {p.name for p in out.iterdir()} == {"configs", ".podwatch", "rl.toml"}


def test_ahead_of_leaves_foreign_names_and_links(out: Path) -> None:
    write_prime_rl_step(out, 5, "B")
    (out / "checkpoints" / "step_9.bad").mkdir()
    (out / "checkpoints" / "step_11").symlink_to("step_5")
    assert prime_rl_layout(out).ahead_of(5) == (out / "broadcasts/step_5",)
    assert prime_rl_layout(out / "nothing").ahead_of(5) == ()


def test_spare_paths_are_by_products_without_a_checkpoint(out: Path) -> None:
    write_prime_rl_step(out, 5, "A")
    for step in (3, 5, 7):
        write_rollouts(out, step)
    (out / "run_default/broadcasts/step_4").mkdir()
    found = prime_rl_layout(out).spare_paths(6)
    assert [(n, str(p.relative_to(out))) for n, p in found] == [
        (3, "rollouts/step_3"),
        (3, "run_default/rollouts/step_3"),
        (4, "run_default/broadcasts/step_4"),
    ]


# -- prime-rl: commands -----------------------------------------------------------------------------------------------


def test_resume_flag_by_variant(out: Path) -> None:
    write_prime_rl_step(out / "a", 10, "A")
    write_prime_rl_step(out / "b", 10, "B")
    assert resume(prime_rl_layout(out / "a"), COMMAND) == (*COMMAND, "--ckpt.resume-step", "10")
    named = (*COMMAND, "--run.name", "mine")
    assert resume(prime_rl_layout(out / "b"), named) == (*named, "--resume.step", "10")
    assert resume(prime_rl_layout(out / "b"), COMMAND, None) == COMMAND


def test_layout_b_of_the_days_between_takes_the_old_flag(out: Path, tmp_path: Path) -> None:
    write_prime_rl_step(out, 10, "B")
    source = tmp_path / "src" / "prime_rl" / "trainer"
    source.mkdir(parents=True)
    (source / "ckpt.py").write_text("def setup(config): ...")
    assert resume(prime_rl_layout(out), COMMAND)[-2:] == ("--ckpt.resume-step", "10")
    (source / "ckpt.py").write_text("def setup(resume: ResumeConfig): ...")
    assert resume(prime_rl_layout(out), COMMAND)[-2:] == ("--resume.step", "10")
    shutil.rmtree(tmp_path / "src")
    command = (*COMMAND, "--ckpt.resume-step", "5")
    assert resume(prime_rl_layout(out), command) == (*COMMAND, "--ckpt.resume-step", "10")


def test_unknown_version_is_an_error_with_a_way_out(out: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resume(prime_rl_layout(out), COMMAND)
    assert "trainer.resume_args" in str(caught.value)
    assert resume(prime_rl_layout(out), COMMAND, None) == COMMAND
    assert resume(prime_rl_layout(out), COMMAND, override=("--at", "{step}")) == (*COMMAND, "--at", "10")
    assert resume(prime_rl_layout(out), COMMAND, override="none") == COMMAND


@pytest.mark.parametrize(
    "flags",
    [
        ("--ckpt.resume-step", "3"),
        ("--ckpt.resume-step=3",),
        ("--ckpt.resume_step", "-1"),
        ("--ckpt.resume_step=-1",),
        ("--resume",),
        ("--resume", "true"),
        ("--resume.step", "3"),
        ("--resume.step=3",),
        ("--resume.dir", "/x/checkpoints/step_3"),
    ],
)
def test_resume_flags_in_the_command_are_removed_and_reported(out: Path, flags: tuple[str, ...]) -> None:
    write_prime_rl_step(out, 10, "A")
    made = prime_rl_layout(out).resume_command((*COMMAND, *flags, "--x", "1"), None, "auto", {})
    assert made.argv == (*COMMAND, "--x", "1")
    assert made.removed == flags


def test_placeholders(out: Path) -> None:
    write_prime_rl_step(out, 10, "A")
    layout = prime_rl_layout(out)
    checkpoint = str(out / "checkpoints/step_10")
    assert resume(layout, ("sh", "-c", "train {resume_args} -o {output_dir}"))[2] == (
        f"train --ckpt.resume-step 10 -o {out}"
    )
    assert resume(layout, ("t", "{resume_args}", "--last")) == ("t", "--ckpt.resume-step", "10", "--last")
    assert resume(layout, ("t", "{resume_args}", "--last"), None) == ("t", "--last")
    assert resume(layout, ("t", "--from", "{checkpoint}")) == ("t", "--from", checkpoint)
    assert resume(layout, ("t", "--from", "{checkpoint}", "--x"), None) == ("t", "--x")
    assert resume(layout, ("t", "--ckpt.resume-step", "{step}")) == ("t", "--ckpt.resume-step", "10")
    made = layout.resume_command(COMMAND, 10, "auto", {})
    assert made.environment["PODWATCH_STEP"] == "10"
    assert made.environment["PODWATCH_CHECKPOINT"] == checkpoint
    assert made.environment["PODWATCH_RESUME_ARGS"] == "--ckpt.resume-step 10"


def test_wandb_goes_on_by_version(out: Path, tmp_path: Path) -> None:
    write_prime_rl_step(out / "a", 10, "A")
    write_prime_rl_step(out / "b", 10, "B")
    a, b = prime_rl_layout(out / "a"), prime_rl_layout(out / "b")
    assert a.wandb_identity() == {}
    for root, run in ((out / "a", "trn1"), (out / "a/run_default", "orc1"), (out / "b", "shr1")):
        target = root / "wandb" / f"run-20260106_101500-{run}"
        target.mkdir(parents=True)
        (root / "wandb" / "latest-run").symlink_to(target.name)
    assert a.wandb_identity() == {"trainer": "trn1", "orchestrator": "orc1"}
    assert b.wandb_identity() == {"shared": "shr1"}

    two = resume(a, COMMAND, wandb=a.wandb_identity())
    assert two[-4:] == ("--trainer.wandb.id", "trn1", "--orchestrator.wandb.id", "orc1")
    later = (*COMMAND, "--wandb.shared", "False")
    assert resume(a, later, wandb=a.wandb_identity()) == (*later, "--ckpt.resume-step", "10")
    shared = a.resume_command(COMMAND, 10, "auto", {"shared": "x1"})
    assert shared.environment["WANDB_SHARED_RUN_ID"] == "x1"
    assert b.resume_command(COMMAND, 10, "auto", {"shared": "x1"}).environment["PRL_RUN_ID"] == "x1"
    for made in (
        a.resume_command(COMMAND, None, "auto", {"shared": "x1"}),
        a.resume_command(COMMAND, 10, "auto", {"shared": "x; rm -rf /"}),
    ):
        assert "WANDB_SHARED_RUN_ID" not in made.environment


def test_target_step(out: Path, tmp_path: Path) -> None:
    layout = prime_rl_layout(out)
    assert layout.target_step(COMMAND) is None
    (tmp_path / "rl.toml").write_text("max_steps = 80\n")
    assert layout.target_step(COMMAND) == 80
    assert layout.target_step(("rl", "@rl.toml")) == 80
    assert layout.target_step((*COMMAND, "--max-steps", "120")) == 120
    assert layout.target_step((*COMMAND, "--max_steps=121")) == 121
    (tmp_path / "rl.toml").write_text("max_steps = [broken")
    assert layout.target_step(COMMAND) is None


def test_first_step_and_progress(out: Path) -> None:
    write_prime_rl_step(out / "a", 10, "A")
    write_prime_rl_step(out / "b", 10, "B")
    write_rollouts(out / "b", 11, "B")
    (out / "b/broadcasts/step_12").mkdir()  # no STABLE yet
    assert prime_rl_layout(out / "a").first_step_after(10) == 10
    assert prime_rl_layout(out / "b").first_step_after(10) == 11
    assert prime_rl_layout(out).first_step_after(10) == 10
    assert {(s.role, s.step) for s in prime_rl_layout(out / "b").progress()} == {
        ("trainer", 10),
        ("orchestrator", 11),
        ("checkpoint", 10),
    }
    assert prime_rl_layout(out / "nothing").progress() == ()


def test_progress_is_also_the_marker_that_was_written_last(out: Path) -> None:
    write_prime_rl_step(out, 10, "B")
    for step in (10, 11, 12):
        marker = out / f"broadcasts/step_{step}/STABLE"
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        os.utime(marker, (1e9 + step, 1e9 + step))
        write_rollouts(out, step, "B")
    (out / "rollouts/step_10/late").touch()
    layout = prime_rl_layout(out)
    shown = [("trainer", 12), ("orchestrator", 12), ("checkpoint", 10)]
    assert [(s.role, s.step) for s in layout.progress()] == shown
    os.utime(out / "broadcasts/step_10/STABLE")
    assert [(s.role, s.step) for s in layout.progress()] == [shown[0], ("trainer", 10), *shown[1:]]


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def hf_verdict(out: Path, step: int = 5) -> tuple[bool, str]:
    layout = hf_layout(out)
    verdict = layout.judge(step, [scan_part(p).found for p in layout.steps()[step]])
    return verdict.whole, verdict.reason


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("trainer_state.json", "trainer_state.json is missing"),
        ("optimizer.pt", "optimizer.pt or"),
        ("scheduler.pt", "scheduler.pt or"),
    ],
)
def test_hf_needs_the_whole_set(out: Path, shards: int, name: str, reason: str) -> None:
    write_hf_step(out, 5, shards=shards)
    assert hf_verdict(out) == (True, "")
    (out / "checkpoint-5" / name).unlink()
    whole, why = hf_verdict(out)
    assert not whole
    assert reason in why


def test_hf_weights_in_their_many_forms(out: Path) -> None:
    write_hf_step(out, 5, shards=3)
    directory = out / "checkpoint-5"
    shard = directory / "model-00002-of-00003.safetensors"
    kept = shard.read_bytes()
    shard.unlink()
    assert "model-00002-of-00003.safetensors is missing" in hf_verdict(out)[1]
    shard.write_bytes((directory / "model-00001-of-00003.safetensors").read_bytes())
    (directory / "trainer_state.json").touch()
    assert "are in no shard" in hf_verdict(out)[1]
    shard.write_bytes(kept)
    (directory / "model.safetensors.index.json").unlink()
    assert "index of the weights is missing" in hf_verdict(out)[1]


def test_hf_state_must_name_this_step_and_no_unfinished_mark(out: Path) -> None:
    write_hf_step(out, 5)
    directory = out / "checkpoint-5"
    (directory / "checkpoint-is-incomplete.txt").touch()
    assert not hf_verdict(out)[0]
    (directory / "checkpoint-is-incomplete.txt").unlink()
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": 6}))
    assert "contains step 6, not 5" in hf_verdict(out)[1]
    (directory / "trainer_state.json").write_text('{"global_step": ')
    assert "is not valid JSON" in hf_verdict(out)[1]
    (directory / "trainer_state.json").write_text("[]")
    assert not hf_verdict(out)[0]


def test_hf_state_older_than_the_weights_does_not_count(out: Path) -> None:
    write_hf_step(out, 5)
    os.utime(out / "checkpoint-5" / "trainer_state.json", (1_700_000_000, 1_700_000_000))
    assert "newer than trainer_state.json" in hf_verdict(out)[1]


def test_hf_fsdp_and_deepspeed(out: Path) -> None:
    write_hf_step(out, 5)
    directory = out / "checkpoint-5"
    (directory / "model.safetensors").unlink()
    (directory / "optimizer.pt").unlink()
    finish(dcp_operations(directory / "pytorch_model_fsdp_0", ranks=2))
    finish(dcp_operations(directory / "optimizer_0", ranks=2))
    (directory / "trainer_state.json").touch()
    assert hf_verdict(out) == (True, "")
    (directory / "optimizer_0" / "__1_0.distcp").unlink()
    assert "optimizer_0: __1_0.distcp is missing" in hf_verdict(out)[1]

    shutil.rmtree(directory / "optimizer_0")
    shutil.rmtree(directory / "pytorch_model_fsdp_0")
    (directory / "scheduler.pt").unlink()
    zero = directory / "global_step5"
    zero.mkdir()
    (zero / "mp_rank_00_model_states.pt").write_bytes(torch_zip_bytes({"dp_world_size": 2}))
    for rank in range(2):
        (zero / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(torch_zip_bytes({"a": 1}))
    assert "latest is missing" in hf_verdict(out)[1]
    (directory / "latest").write_text("global_step5")
    (directory / "trainer_state.json").touch()
    assert hf_verdict(out) == (True, "")
    (zero / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "the optimizer states of rank 1" in hf_verdict(out)[1]


def test_hf_commands_and_names(out: Path) -> None:
    for step in (5, 10):
        write_hf_step(out, step, max_steps=77)
    shutil.copytree(out / "checkpoint-5", out / "tmp-checkpoint-15")
    layout = hf_layout(out)
    assert set(layout.steps()) == {5, 10}
    assert layout.ahead_of(5) == (out / "checkpoint-10",)
    assert relative(layout.ahead_of(None), out) == {"checkpoint-5", "checkpoint-10"}
    command = ("python", "train.py", "--resume_from_checkpoint", "True")
    made = layout.resume_command(command, 5, "auto", {})
    assert made.argv == ("python", "train.py", "--resume_from_checkpoint", str(out / "checkpoint-5"))
    assert made.removed == ("--resume_from_checkpoint", "True")
    assert layout.target_step(command) == 77
    assert layout.target_step((*command, "--max_steps", "30")) == 30
    assert layout.target_step((*command, "--max_steps", "-1")) == 77


# -- custom -----------------------------------------------------------------------------------------------------------


def custom(out: Path, **settings: object) -> Layout:
    return custom_layout(out, CustomLayoutSettings(**settings))  # type: ignore[arg-type]


def test_custom_rules(out: Path) -> None:
    directory = out / "training_state" / "step_5"
    (directory / "model").mkdir(parents=True)
    layout = custom(
        out,
        parts="training_state/step_{step}",
        require=("optimizer.pt", "model/*.pt"),
        not_part=("samples/*",),
        also_ahead=("videos/step_{step}.mp4", "no_step"),
        last="training_info.json",
    )

    def verdict() -> tuple[bool, str]:
        found = layout.judge(5, [scan_part(p).found for p in layout.steps()[5]])
        return found.whole, found.reason

    assert not verdict()[0]
    (directory / "optimizer.pt").write_bytes(torch_zip_bytes({"a": 1}))
    assert "model/*.pt" in verdict()[1]
    (directory / "model" / "w.pt").write_bytes(torch_zip_bytes({"a": 1}))
    assert "training_info.json" in verdict()[1]
    (directory / "training_info.json").write_text('{"step": 5}')
    (directory / "samples").mkdir()
    (directory / "samples" / "broken.json").write_text("{")
    assert verdict() == (True, "")
    judged = layout.judge(5, [scan_part(p).found for p in layout.steps()[5]])
    assert judged.leftovers == ("checkpoint/samples/broken.json",)
    assert judged.ends is SaveEnd.LAST
    (out / "training_state" / "step_latest").symlink_to("step_5")
    assert set(layout.steps()) == {5}
    (out / "videos").mkdir()
    for step in (5, 9):
        (out / "videos" / f"step_{step}.mp4").touch()
    assert relative(layout.ahead_of(5), out) == {"videos/step_9.mp4"}
    (directory / "optimizer.pt").write_bytes(b"PK\x03\x04 cut")
    (directory / "training_info.json").touch()
    assert "optimizer.pt truncated" in verdict()[1]


def test_custom_with_a_dcp_directory(out: Path) -> None:
    layout = custom(out, parts="ckpt/{step}/state")
    finish(dcp_operations(out / "ckpt" / "7" / "state" / "dist"))
    parts = layout.steps()[7]
    assert layout.judge(7, [scan_part(p).found for p in parts]).whole
    assert layout.step_paths(7) == (out / "ckpt" / "7",)
    (out / "ckpt/7/state/dist/.metadata").unlink()
    assert not layout.judge(7, [scan_part(p).found for p in parts]).whole


def test_custom_resume_must_be_told(out: Path) -> None:
    layout = custom(out)
    with pytest.raises(ConfigurationError, match="how a trainer with a custom layout resumes"):
        resume(layout, ("./train.sh",))
    assert resume(layout, ("./train.sh",), override="none") == ("./train.sh",)
    assert resume(layout, ("./train.sh", "--from-step={step}")) == ("./train.sh", "--from-step=10")
    assert resume(layout, ("./train.sh", "--from-step={step}"), None) == ("./train.sh",)


def test_make_layout(out: Path) -> None:
    def settings(name: str) -> Settings:
        return Settings(
            run_id="r",
            trainer=TrainerSettings(layout=name, output_dir=out),  # type: ignore[arg-type]
            checkpoints=CheckpointSettings(custom=CustomLayoutSettings()),
        )

    for name in ("prime-rl", "hf", "custom"):
        layout = make_layout(settings(name))
        assert layout.name == name
        assert layout.steps() == {}
        assert layout.progress() == ()
        assert layout.ahead_of(None) == ()
        assert layout.step_paths(3) == ()
        assert layout.watch_roots()
