"""Rules for engine manifests that their validators miss, as problems in words; empty if a document keeps them all.

Kubernetes: what the API server refuses and a schema cannot say (kubernetes v1.31 `pkg/apis/batch/validation`). Compose
and SkyPilot: values that the schema takes for plain strings. And for every engine, what podwatch needs:
docs/jobs.md.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

PERMANENT = frozenset({64, 65, 77, 78})
"""Exit codes of podwatch that no rerun cures."""
AGAIN = 86
ACTIONS = ("FailJob", "FailIndex", "Ignore", "Count")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE])?")
BYTES = re.compile(r"[0-9]+(b|k|kb|m|mb|g|gb)?", re.IGNORECASE)
DURATION = re.compile(r"([0-9]+(h|m|s|ms))+")
STRATEGIES = ("EAGER_NEXT_REGION",)
"""FAILOVER relaunches on the same cluster while it is up."""

Mapping = dict[str, Any]


# -- Kubernetes


def kubernetes(documents: Sequence[Mapping]) -> list[str]:
    """Problems of the documents of one file, with exactly one Job among them."""
    problems = [f"unknown kind {d.get('kind')!r}" for d in documents if d.get("kind") not in KINDS]
    jobs = [d for d in documents if d.get("kind") == "Job"]
    if len(jobs) != 1:
        return [*problems, f"{len(jobs)} Jobs (expected 1)"]
    spec: Mapping = jobs[0]["spec"]
    pod: Mapping = spec["template"]["spec"]
    claims = {d["metadata"]["name"] for d in documents if d.get("kind") == "PersistentVolumeClaim"}
    problems += [*_failure_policy(spec, pod), *_volumes(pod, claims)]
    for container in pod["containers"]:
        problems += _container(container)
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if grace < 60:
        problems.append("terminationGracePeriodSeconds is below 60 s: too short for a trainer that saves at its end")
    for container in pod["containers"]:
        problems += end_grace(container.get("command", ()), grace)
    return problems


KINDS = ("Job", "PersistentVolumeClaim")


def _failure_policy(spec: Mapping, pod: Mapping) -> Iterator[str]:
    rules: list[Mapping] = spec.get("podFailurePolicy", {}).get("rules", [])
    if not rules:
        yield "no podFailurePolicy: a typo is retried as a machine fault is"
        return
    if len(rules) > 20:
        yield f"{len(rules)} rules (at most 20)"
    if pod.get("restartPolicy") != "Never":
        yield "podFailurePolicy needs restartPolicy: Never"
    if spec.get("podReplacementPolicy") != "Failed":
        yield "podReplacementPolicy is not Failed: the new pod starts beside the old one"
    names = {c["name"] for c in (*pod["containers"], *pod.get("initContainers", ()))}
    for number, rule in enumerate(rules):
        yield from (f"rule {number}: {problem}" for problem in _rule(rule, spec, names))
    stops = {code for rule in rules if rule.get("action") == "FailJob" for code in _codes(rule)}
    counted = {code for rule in rules if rule.get("action") == "Count" for code in _codes(rule)}
    free = {code for rule in rules if rule.get("action") == "Ignore" for code in _codes(rule)}
    if missing := PERMANENT - stops:
        yield f"no FailJob for {sorted(missing)}"
    if AGAIN in stops:
        yield f"FailJob for {AGAIN}: nothing continues the run"
    if AGAIN in free:
        yield f"Ignore for {AGAIN}: retried without limit"
    if 0 in stops | counted | free:
        yield "a rule for 0"
    conditions = [c.get("type") for r in rules if r.get("action") == "Ignore" for c in r.get("onPodConditions", ())]
    if "DisruptionTarget" not in conditions:
        yield "no Ignore for DisruptionTarget: drains and preemptions use up backoffLimit"


def _rule(rule: Mapping, spec: Mapping, names: set[str]) -> Iterator[str]:
    action = rule.get("action")
    if action not in ACTIONS:
        yield f"action {action!r} (expected one of {', '.join(ACTIONS)})"
    if action == "FailIndex" and "backoffLimitPerIndex" not in spec:
        yield "FailIndex needs backoffLimitPerIndex"
    if ("onExitCodes" in rule) == ("onPodConditions" in rule):
        yield "exactly one of onExitCodes and onPodConditions"
    for condition in rule.get("onPodConditions", ()):
        if condition.get("status") not in ("True", "False", "Unknown"):
            yield f"status {condition.get('status')!r} (expected the string True, False or Unknown)"
    codes: Mapping = rule.get("onExitCodes", {})
    if not codes:
        return
    if codes.get("operator") not in ("In", "NotIn"):
        yield f"operator {codes.get('operator')!r} (expected In or NotIn)"
    if codes.get("containerName", next(iter(names))) not in names:
        yield f"no container is called {codes['containerName']!r}"
    values = codes.get("values", [])
    if values != sorted(set(values)) or not values:
        yield "values must be sorted, without duplicates, and not empty"
    if 0 in values and codes.get("operator") == "In":
        yield "0 among values with In"


def _codes(rule: Mapping) -> set[int]:
    codes: Mapping = rule.get("onExitCodes", {})
    return set(codes.get("values", ())) if codes.get("operator") == "In" else set()


def _volumes(pod: Mapping, claims: set[str]) -> Iterator[str]:
    volumes = {v["name"]: v for v in pod.get("volumes", ())}
    mounts = {m["mountPath"]: m["name"] for c in pod["containers"] for m in c.get("volumeMounts", ())}
    yield from (f"no volume is called {name!r}" for name in mounts.values() if name not in volumes)
    shm = volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {})
    if shm.get("medium") != "Memory":
        yield "/dev/shm is not an emptyDir with medium: Memory: it has 64 MiB"
    for name, volume in volumes.items():
        directory: Mapping = volume.get("emptyDir") or {}
        if directory.get("medium", "") not in ("", "Memory"):
            yield f"{name}: medium {directory['medium']!r} (expected Memory)"
        if not QUANTITY.fullmatch(str(directory.get("sizeLimit", 0))):
            yield f"{name}: sizeLimit {directory['sizeLimit']!r} is no quantity"
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in claims:
            yield f"{name}: this file has no claim {claim!r}"


def _container(container: Mapping) -> Iterator[str]:
    yield from job_command(container.get("command", ()))
    if any(not QUANTITY.fullmatch(str(v)) for v in container.get("resources", {}).get("limits", {}).values()):
        yield "resources.limits has a value that is no quantity"
    probe: Mapping = container.get("livenessProbe", {})
    if "httpGet" in probe:
        yield "livenessProbe by httpGet: podwatch listens on 127.0.0.1 only"
    elif probe.get("exec", {}).get("command") != ["podwatch", "status", "--live"]:
        yield "livenessProbe is not `podwatch status --live`"
    if probe.get("timeoutSeconds", 1) < 5:
        yield "livenessProbe.timeoutSeconds is below 5 s"
    names = {variable["name"] for variable in container.get("env", ())}
    for name in ("KUBERNETES_JOB_NAME", "KUBERNETES_POD_UID", "KUBERNETES_NODE_NAME"):
        if name not in names:
            yield f"{name} is not set: the lease cannot recognize the next pod of this Job"


# -- the others


def job_command(words: Sequence[str]) -> Iterator[str]:
    """Problems of an argv that an engine starts without a shell."""
    if list(words[:2]) != ["podwatch", "run"]:
        yield f"the command is {list(words[:3])}, not podwatch itself: the engine's signal does not reach podwatch"
    elif "--job" not in words:
        yield "podwatch run without --job: the job never ends"
    if "--" in words and "--store" not in " ".join(words[: list(words).index("--")]):
        yield "no --store: another machine has nothing to continue from"


def end_grace(words: Sequence[str], engine_seconds: float) -> Iterator[str]:
    """Whether podwatch leaves within the time that the engine gives."""
    found = [int(n) for word in words for n in re.findall(r"recovery\.end_grace=(\d+)s$", word)]
    if len(found) != 1 or not 0.5 * engine_seconds < found[0] < engine_seconds:
        yield f"recovery.end_grace is {found} s (expected one below the engine's {engine_seconds:g} s)"


def shell_command(line: str) -> Iterator[str]:
    """Problems of a command line that an engine gives to a shell."""
    words = line.split()
    if words[:1] != ["exec"]:
        yield "no exec: the shell gets the engine's signal, and podwatch does not"
    yield from job_command([word for word in words if word != "exec"])


def last_command(script: str) -> str:
    """The last line of a script that is no comment."""
    lines = [line.strip() for line in script.splitlines()]
    return [line for line in lines if line and not line.startswith("#")][-1]


def skypilot(document: Mapping, recovery: Mapping) -> list[str]:
    """``recovery``: ``job_recovery`` as SkyPilot parsed it."""
    problems = [*shell_command(last_command(document["run"]))]
    codes = recovery.get("recover_on_exit_codes", [])
    codes = [codes] if isinstance(codes, int) else list(codes)
    if codes != [AGAIN]:
        problems.append(f"recover_on_exit_codes is {codes} (expected [{AGAIN}]): 137 and 65 must not be among them")
    unknown = set(recovery) - {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
    problems += [f"job_recovery has an unknown key {key!r}" for key in sorted(unknown)]
    if recovery.get("strategy") not in STRATEGIES:
        problems.append(f"strategy {recovery.get('strategy')!r} (expected one of {', '.join(STRATEGIES)})")
    if recovery.get("max_restarts_on_errors") != 1:
        problems.append("max_restarts_on_errors is not 1: one lost exit code ends the job, or a typo is tried again")
    problems += [f"secret {name} has a value" for name, value in document.get("secrets", {}).items() if value]
    if any(str(AGAIN) in line and "exit" in line for line in _code_lines(document.get("setup", ""))):
        problems.append(f"setup can end with {AGAIN}: a broken setup is then retried without limit")
    hooks = document.get("config", {}).get("hooks", [])
    if not any("preemption" in h.get("events", ()) and h["run"] == "podwatch preempt" for h in hooks):
        problems.append("no hook runs `podwatch preempt` on preemption")
    return problems


def _code_lines(script: str) -> list[str]:
    return [line.partition("#")[0] for line in script.splitlines()]


def dstack(document: Mapping) -> list[str]:
    """What dstack's own parser accepts, although podwatch then does not work."""
    problems = [*shell_command(document["commands"][-1])]
    if len(document["commands"]) != 1:
        problems.append("several commands are one line with &&: exec must be the only one")
    if document.get("shell") != "bash":
        problems.append("shell is not bash: dash stays above podwatch")
    if set(document.get("retry", {}).get("on_events", ())) != {"no-capacity", "interruption", "error"}:
        problems.append("retry.on_events lacks an event")
    if str(document.get("idle_duration")) not in ("0s", "0"):
        problems.append("idle_duration is not 0s: the next try gets the same instance")
    if not document.get("resources", {}).get("shm_size"):
        problems.append("no shm_size: 64 MiB")
    return problems


def compose(document: Mapping) -> list[str]:
    problems = []
    for name, service in document["services"].items():
        words = [*_words(service.get("entrypoint")), *_words(service.get("command"))]
        seconds = _seconds(str(service.get("stop_grace_period", "10s")))
        found = [*job_command(words), *end_grace(words, seconds), *_compose_values(service)]
        named = {str(v).split(":")[0] for v in service.get("volumes", ()) if not str(v).startswith(("/", "."))}
        found += [f"no volume is called {v!r}" for v in sorted(named - set(document.get("volumes", {})))]
        problems += [f"{name}: {problem}" for problem in found]
    return problems


def _words(value: Any) -> Iterable[str]:
    return [value] if isinstance(value, str) else value or ()  # a string goes through a shell


def _seconds(duration: str) -> float:
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"([0-9]+)(h|ms|m|s)", duration))


def _compose_values(service: Mapping) -> Iterator[str]:
    if not re.fullmatch(r"on-failure:[1-9][0-9]?", str(service.get("restart"))):
        yield f"restart {service.get('restart')!r} (expected on-failure:N): a typo is otherwise retried without limit"
    if not BYTES.fullmatch(str(service.get("shm_size", ""))):
        yield f"shm_size {service.get('shm_size')!r} is missing or no size"
    if not DURATION.fullmatch(str(service.get("stop_grace_period", ""))):
        yield f"stop_grace_period {service.get('stop_grace_period')!r} is missing or no duration: 10 s"
    if str(service.get("stop_signal", "SIGTERM")) not in ("SIGTERM", "SIGINT"):
        yield f"stop_signal {service['stop_signal']!r}: podwatch knows SIGTERM and SIGINT"
    if (test := list(_words(service.get("healthcheck", {}).get("test")))) != ["CMD", "podwatch", "status", "--live"]:
        yield f"healthcheck is {test}, not `podwatch status --live`"


def slurm(script: str) -> list[str]:
    """A batch script; the Slurm suite runs it."""
    problems = []
    lines = [line.strip() for line in script.splitlines() if line.strip() and not line.startswith("# ")]
    options = " ".join(line.removeprefix("#SBATCH").partition("#")[0] for line in lines if line.startswith("#SBATCH"))
    body = [line.partition(" #")[0].strip() for line in lines if not line.startswith("#")]
    for wanted in ("--requeue", "--open-mode=append"):
        if wanted not in options.split():
            problems.append(f"no {wanted}")
    if "--signal=B:" in options:
        problems.append("--signal=B: reaches the batch script and not the step in which podwatch runs")
    if any(line.startswith("trap") for line in body):
        problems.append("a trap in the batch script: the script then outlives its step")
    steps = [line for line in body if "podwatch" in line]
    if len(steps) != 1 or not steps[0].startswith("srun ") or steps[0].endswith("&"):
        problems.append("podwatch is not one srun step in the foreground")
    elif "--kill-on-bad-exit=1" not in steps[0].split():
        problems.append("no --kill-on-bad-exit=1: one node's end leaves the others waiting")
    elif body[body.index(steps[0]) + 1 :] != ["exit $?"]:
        problems.append("the code of podwatch is not the code of the job")
    return problems
