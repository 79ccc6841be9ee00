"""The examples for engines, each judged by its engine's own validator and by the lint of what that one misses.

Every rule has a mutated manifest that must be caught: by the validator, or by the lint where the validator is silent.
"""

import copy
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.suites.engines import lint

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "engines"
TOOLS = ROOT / ".venv-engines" / "bin"
SKY = ROOT / ".venv-engines-sky" / "bin" / "python"
DSTACK = ROOT / ".venv-engines-dstack" / "bin" / "python"
yaml = pytest.importorskip("yaml", reason="needs the validators: make test-engines")
OLDEST, NEWEST = "1.31", "1.37"
"""podFailurePolicy is stable from 1.31; 1.37 is the newest schema of kubernetes-validate 1.37.0."""

Change = Callable[[dict[str, Any]], object]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def ask(command: Sequence[str | Path], home: Path) -> subprocess.CompletedProcess[str]:
    """Run a validator with an empty home and no network proxy of ours."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
    return subprocess.run(list(map(str, command)), env=environ, cwd=home, capture_output=True, text=True, timeout=120)


def written(directory: Path, name: str, found: Sequence[dict[str, Any]]) -> Path:
    path = directory / name
    path.write_text(yaml.safe_dump_all(found))
    return path


# -- Kubernetes


def kube_validate(path: Path, home: Path, version: str = OLDEST) -> str:
    """Empty if it is valid."""
    done = ask([TOOLS / "kubernetes-validate", "--strict", "-k", version, path], home)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def job_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    return next(d for d in found if d["kind"] == "Job")


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "kubernetes-job-pvc.yaml"])
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes(name: str, version: str, tmp_path: Path) -> None:
    assert kube_validate(EXAMPLES / name, tmp_path, version) == ""
    assert lint.kubernetes(documents(name)) == []


def pod(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def rules(job: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = job["spec"]["podFailurePolicy"]["rules"]
    return found


def container(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod(job)["containers"][0]
    return found


SCHEMA: dict[str, Change] = {
    "misspelt policy": lambda j: j["spec"].update(podFailurePolcy=j["spec"].pop("podFailurePolicy")),
    "code as text": lambda j: rules(j)[0]["onExitCodes"].update(values=["65"]),
    "condition without status": lambda j: rules(j)[1]["onPodConditions"][0].pop("status"),
    "misspelt probe": lambda j: container(j)["livenessProbe"].update(periodSecond=3),
}
SILENT: dict[str, Change] = {
    "action Fail": lambda j: rules(j)[0].update(action="Fail"),
    "operator Is": lambda j: rules(j)[0]["onExitCodes"].update(operator="Is"),
    "zero among the codes": lambda j: rules(j)[0]["onExitCodes"]["values"].insert(0, 0),
    "codes not sorted": lambda j: rules(j)[0]["onExitCodes"]["values"].reverse(),
    "code twice": lambda j: rules(j)[0]["onExitCodes"]["values"].append(78),
    "restartPolicy OnFailure": lambda j: pod(j).update(restartPolicy="OnFailure"),
    "no restartPolicy": lambda j: pod(j).pop("restartPolicy"),
    "FailIndex alone": lambda j: rules(j)[0].update(action="FailIndex"),
    "foreign container": lambda j: rules(j)[0]["onExitCodes"].update(containerName="trainer"),
    "codes and conditions": lambda j: rules(j)[0].update(onPodConditions=rules(j)[1]["onPodConditions"]),
    "pods replaced while they terminate": lambda j: j["spec"].update(podReplacementPolicy="TerminatingOrFailed"),
    "21 rules": lambda j: rules(j).extend(copy.deepcopy(rules(j)[2]) for _ in range(18)),
    "32GiB": lambda j: pod(j)["volumes"][0]["emptyDir"].update(sizeLimit="32GiB"),
    "medium memory": lambda j: pod(j)["volumes"][0]["emptyDir"].update(medium="memory"),
    "unknown kind": lambda j: j.update(kind="Jobb"),
    "typo not final": lambda j: rules(j)[0]["onExitCodes"].update(values=[64, 77, 78]),
    "86 final": lambda j: rules(j)[0]["onExitCodes"]["values"].append(86),
    "86 without limit": lambda j: rules(j)[2].update(action="Ignore"),
    "drains counted": lambda j: rules(j).pop(1),
    "probe by plugin": lambda j: container(j)["livenessProbe"]["exec"].update(
        command=["podwatch", "status", "--plugin"]
    ),
    "probe by HTTP": lambda j: container(j).update(livenessProbe={"httpGet": {"port": 9477}, "timeoutSeconds": 10}),
    "probe with 1 s": lambda j: container(j)["livenessProbe"].pop("timeoutSeconds"),
    "through a shell": lambda j: container(j).update(command=["sh", "-c", "podwatch run --job"]),
    "without --job": lambda j: container(j)["command"].remove("--job"),
    "without a store": lambda j: container(j)["command"].remove("--store=b2://my-bucket"),
    "grace of 30 s": lambda j: pod(j).pop("terminationGracePeriodSeconds"),
    "no end_grace": lambda j: container(j)["command"].remove("--set=recovery.end_grace=110s"),
    "end_grace above the engine's": lambda j: pod(j).update(terminationGracePeriodSeconds=100),
    "no identity": lambda j: container(j)["env"].pop(0),
    "no such volume": lambda j: container(j)["volumeMounts"][1].update(name="other"),
}


@pytest.mark.parametrize("name", SCHEMA)
def test_kubernetes_mutated_is_caught_by_the_schema(name: str, tmp_path: Path) -> None:
    found = documents("kubernetes-job.yaml")
    SCHEMA[name](job_of(found))
    assert kube_validate(written(tmp_path, "job.yaml", found), tmp_path) != ""


@pytest.mark.parametrize("name", SILENT)
def test_kubernetes_mutated_is_caught_by_the_lint(name: str) -> None:
    found = documents("kubernetes-job.yaml")
    SILENT[name](job_of(found))
    assert lint.kubernetes(found) != []


def test_the_schema_is_silent_about_what_the_lint_is_for(tmp_path: Path) -> None:
    """A validator that learns a rule makes ours unnecessary."""
    for name in ("action Fail", "operator Is", "zero among the codes", "restartPolicy OnFailure", "32GiB"):
        found = documents("kubernetes-job.yaml")
        SILENT[name](job_of(found))
        assert kube_validate(written(tmp_path, "job.yaml", found), tmp_path) == "", name


# -- SkyPilot


def sky_parses(paths: Sequence[Path], home: Path) -> list[dict[str, Any]]:
    """For each file ``recovery`` (job_recovery as SkyPilot parsed it) or ``error``; one process for all of them."""
    done = ask([SKY, Path(__file__).with_name("ask_sky.py"), *paths], home)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_skypilot(tmp_path: Path) -> None:
    (said,) = sky_parses([EXAMPLES / "skypilot.yaml"], tmp_path)
    assert "recovery" in said, said
    assert lint.skypilot(documents("skypilot.yaml")[0], said["recovery"]) == []


SKY_CAUGHT: dict[str, Change] = {
    "unknown key": lambda d: d.update(runn=d.pop("run")),
    "code above 255": lambda d: d["resources"]["job_recovery"].update(recover_on_exit_codes=[386]),
    "unknown event": lambda d: d["config"]["hooks"][0].update(events=["evicted"]),
}
SKY_SILENT: dict[str, Change] = {
    "misspelt codes": lambda d: d["resources"]["job_recovery"].update(
        recover_on_exit_code=d["resources"]["job_recovery"].pop("recover_on_exit_codes")
    ),
    "137 among the codes": lambda d: d["resources"]["job_recovery"].update(recover_on_exit_codes=[86, 137]),
    "65 among the codes": lambda d: d["resources"]["job_recovery"].update(recover_on_exit_codes=[65, 86]),
    "the same cluster again": lambda d: d["resources"]["job_recovery"].update(strategy="FAILOVER"),
    "no second chance": lambda d: d["resources"]["job_recovery"].pop("max_restarts_on_errors"),
    "no exec": lambda d: d.update(run=d["run"].replace("exec podwatch", "podwatch")),
    "setup ends with 86": lambda d: d.update(setup="nvidia-smi || exit 86\n" + d["setup"]),
    "a key in the file": lambda d: d["secrets"].update(B2_APPLICATION_KEY="K00secret"),
    "no hook": lambda d: d["config"].update(hooks=[]),
}


def test_skypilot_mutated_is_caught(tmp_path: Path) -> None:
    """By SkyPilot where it can; where it is silent, by the lint."""
    paths, changed = [], []
    for number, change in enumerate({**SKY_CAUGHT, **SKY_SILENT}.values()):
        found = documents("skypilot.yaml")
        change(found[0])
        changed.append(found[0])
        paths.append(written(tmp_path, f"{number}.yaml", found))
    for name, document, said in zip([*SKY_CAUGHT, *SKY_SILENT], changed, sky_parses(paths, tmp_path), strict=True):
        if name in SKY_CAUGHT:
            assert "error" in said, f"SkyPilot accepts {name}: the lint must catch it"
        else:
            assert "recovery" in said, f"SkyPilot catches {name}: {said}"
            assert lint.skypilot(document, said["recovery"]) != [], name


# -- dstack


def dstack_says(path: Path, home: Path) -> str:
    """Empty if it is valid."""
    done = ask([DSTACK, Path(__file__).with_name("ask_dstack.py"), path], home)
    return "" if (done.returncode, done.stdout.strip()) == (0, "task") else done.stdout + done.stderr


def test_dstack(tmp_path: Path) -> None:
    assert dstack_says(EXAMPLES / "dstack.yml", tmp_path) == ""
    assert lint.dstack(documents("dstack.yml")[0]) == []


DSTACK_CAUGHT: dict[str, Change] = {
    "unknown key": lambda d: d.update(comands=d["commands"]),
    "unknown event": lambda d: d["retry"].update(on_events=["preemption"]),
    "wrong size": lambda d: d["resources"].update(shm_size="32 gigs"),
    "unknown policy": lambda d: d.update(spot_policy="cheap"),
}
DSTACK_SILENT: dict[str, Change] = {
    "the image's shell": lambda d: d.pop("shell"),
    "no exec": lambda d: d.update(commands=[d["commands"][0].removeprefix("exec ")]),
    "another command after it": lambda d: d["commands"].append("echo done"),
    "spot only": lambda d: d["retry"].update(on_events=["interruption"]),
    "the same instance again": lambda d: d.pop("idle_duration"),
    "64 MiB": lambda d: d["resources"].pop("shm_size"),
}


@pytest.mark.parametrize("name", [*DSTACK_CAUGHT, *DSTACK_SILENT])
def test_dstack_mutated_is_caught(name: str, tmp_path: Path) -> None:
    found = documents("dstack.yml")
    {**DSTACK_CAUGHT, **DSTACK_SILENT}[name](found[0])
    says = dstack_says(written(tmp_path, "task.yml", found), tmp_path)
    assert says != "" if name in DSTACK_CAUGHT else lint.dstack(found[0]) != []


# -- compose


def compose_says(path: Path, home: Path) -> str:
    """Empty if it is valid by the compose-spec schema that check-jsonschema ships."""
    done = ask([TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path], home)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_compose(tmp_path: Path) -> None:
    assert compose_says(EXAMPLES / "compose.yaml", tmp_path) == ""
    assert lint.compose(documents("compose.yaml")[0]) == []


def service(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["services"]["train"]
    return found


COMPOSE_CAUGHT: dict[str, Change] = {
    "unknown key": lambda d: service(d).update(restrat="no"),
    "grace as a number": lambda d: service(d).update(stop_grace_period=120),
    "device without capabilities": lambda d: service(d)["deploy"]["resources"]["reservations"]["devices"][0].pop(
        "capabilities"
    ),
}
COMPOSE_SILENT: dict[str, Change] = {
    "restart on-fail": lambda d: service(d).update(restart="on-fail"),
    "restart without limit": lambda d: service(d).update(restart="on-failure"),
    "always": lambda d: service(d).update(restart="always"),
    "through a shell": lambda d: service(d).update(entrypoint=[], command="podwatch run --job"),
    "another signal": lambda d: service(d).update(stop_signal="SIGKILL"),
    "32 gigs": lambda d: service(d).update(shm_size="32 gigs"),
    "no grace": lambda d: service(d).pop("stop_grace_period"),
    "unhealthy on a warning": lambda d: service(d)["healthcheck"].update(
        test=["CMD", "podwatch", "status", "--plugin"]
    ),
    "no such volume": lambda d: d.update(volumes={}),
    "end_grace above the engine's": lambda d: service(d).update(stop_grace_period="1m"),
}


@pytest.mark.parametrize("name", [*COMPOSE_CAUGHT, *COMPOSE_SILENT])
def test_compose_mutated_is_caught(name: str, tmp_path: Path) -> None:
    found = documents("compose.yaml")
    {**COMPOSE_CAUGHT, **COMPOSE_SILENT}[name](found[0])
    says = compose_says(written(tmp_path, "compose.yaml", found), tmp_path)
    assert says != "" if name in COMPOSE_CAUGHT else lint.compose(found[0]) != []


# -- Slurm


def test_slurm() -> None:
    assert lint.slurm((EXAMPLES / "slurm.sbatch").read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("srun --kill-on-bad-exit=1 podwatch", "podwatch"),
        ("podwatch.toml\n", "podwatch.toml &\nwait\n"),
        ("--kill-on-bad-exit=1 ", ""),
        ("exit $? ", "echo done"),
        ("#SBATCH --requeue", "#SBATCH --no-requeue"),
        ("--signal=TERM", "--signal=B:TERM"),
        ("srun --kill", "trap 'kill $!' TERM\nsrun --kill"),
    ],
)
def test_slurm_mutated_is_caught(old: str, new: str) -> None:
    script = (EXAMPLES / "slurm.sbatch").read_text()
    assert old in script
    assert lint.slurm(script.replace(old, new)) != []
