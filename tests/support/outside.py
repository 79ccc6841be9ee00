"""What the product says about its own outside: the only module that knows where the product lists it.

``tests/blackbox/contract.toml`` is compared with what is found here. When a room of the product is replaced, this
module changes and the contract does not.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import click

from podwatch.api import http_endpoints
from podwatch.cli.root import cli
from podwatch.config import settings
from podwatch.config.setting_names import OPERATIONAL, OPERATIONAL_PREFIXES, walk
from podwatch.controller import machines
from podwatch.controller.decide import Action
from podwatch.controller.run_view import ControllerClaim
from podwatch.domain import event, finding, lease, process, snapshot
from podwatch.domain.checkpoint import Completeness, FileEntry, SymlinkEntry
from podwatch.domain.earlier_attempts import BadHost, Host, LastEnd, OpenAttempt, RunVerdict, Suspect
from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import LeaseAction
from podwatch.domain.status_document import Overall, TrainingState
from podwatch.hooks import hook_runner
from podwatch.hooks.occasions import Occasion
from podwatch.job.exit_code import Blame, Outcome
from podwatch.journal import bundle
from podwatch.recovery.state import Phase
from podwatch.report import deliver_notices
from podwatch.report import metrics as exposition
from podwatch.store import documents as stored
from podwatch.store.runs.read import ArchiveRecord
from podwatch.store.verify import Proof
from podwatch.system.endpoint import Endpoint
from tests.support.contract import ROOT, schemas
from tests.support.json_paths import example_paths, paths_of, schema_paths

# -- commands --------------------------------------------------------------------------------------------------------


def commands() -> dict[str, list[str]]:
    """Every command that can be typed, with the names of its options (the long one) and arguments (in capitals).
    ``podwatch`` alone: the options before a command."""
    return dict(_commands(cli, click.Context(cli), ()))


def _commands(command: click.Command, context: click.Context, path: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    if not path or not isinstance(command, click.Group) or command.invoke_without_command:
        yield " ".join(path) or "podwatch", [_parameter(one) for one in command.params]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands(found, click.Context(found, info_name=name, parent=context), (*path, name))


def _parameter(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return parameter.human_readable_name.upper()


# -- names -----------------------------------------------------------------------------------------------------------


def setting_names() -> list[str]:
    """Every key of the configuration, dotted: ``hooks[].name`` for a list of tables."""
    tables = {
        "log_rules": ("log_rules[]", settings.LogRuleSettings),
        "hooks": ("hooks[]", settings.HookSettings),
    }
    found = []
    for key, _ in walk():
        if key in tables:
            prefix, model = tables[key]
            found += [f"{prefix}.{name}" for name, _ in walk(model)]
        else:
            found.append(key)
    return found


def variables() -> list[str]:
    """Environment variables of podwatch that are no settings; a prefix ends with ``*``."""
    return sorted(OPERATIONAL) + [f"{prefix}*" for prefix in OPERATIONAL_PREFIXES]


def finding_kinds() -> list[str]:
    return _values(finding.FindingKind)


def event_names() -> list[str]:
    return _values(event.EventName)


def metric_names() -> set[str]:
    """Families of ``/metrics``, without the endings ``_total`` and ``_info`` that the text format adds."""
    tree = ast.parse(inspect.getsource(exposition))
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {word for word in words if word.startswith("podwatch_") and word.isidentifier()}


def enums() -> dict[str, list[str]]:
    """Sets of words that programs match, by the name that the contract gives them."""
    found: dict[str, type[Enum]] = {
        "overall": Overall,
        "severity": finding.Severity,
        "training state": TrainingState,
        "recovery phase": Phase,
        "desired": snapshot.Desired,
        "supervision": snapshot.Supervision,
        "verdict": finding.Verdict,
        "agreement": finding.Agreement,
        "sensor state": snapshot.SensorState,
        "gpu state": snapshot.GpuState,
        "server health": snapshot.Health,
        "server liveness": snapshot.Liveness,
        "step source": snapshot.ProgressSource,
        "process role": process.ProcessRole,
        "completeness": Completeness,
        "lease": LeaseAction,
        "heartbeat state": lease.HolderState,
        "outcome": Outcome,
        "blame": Blame,
        "proof": Proof,
        "notice topic": event.Topic,
        "notice change": event.Change,
        "controller action": Action,
        "rented machine": machines.RentedState,
    }
    words = {name: _values(kind) for name, kind in found.items()}
    words["layout"] = list(settings.LAYOUTS)
    words["hook occasion"] = list(get_args(settings.HookEvent))
    return words


def _values(kind: type[Enum]) -> list[str]:
    return [str(member.value) for member in kind]


def exit_codes() -> set[int]:
    return {int(code) for code in ExitCode}


def http_requests() -> list[str]:
    """``METHOD /path`` of everything that is served."""
    app: Any = http_endpoints.make_app(None, "token")  # type: ignore[arg-type]
    while not hasattr(app, "routes"):
        app = app._app
    return [f"{method} {route.path}" for route in app.routes for method in sorted(route.methods - {"HEAD"})]


def incident_files() -> list[str]:
    return list(bundle.TABLES)


# -- documents -------------------------------------------------------------------------------------------------------


def documents() -> dict[str, set[str]]:
    """The field paths of each JSON document that leaves the process."""
    found = {name: schema_paths(schema) for name, schema in schemas().items()}
    found["endpoint"] = set(get_type_hints(Endpoint))
    return {**found, **command_documents(), **stored_documents(), **piped_documents()}


def command_documents() -> dict[str, set[str]]:
    """What each command prints with ``--json``, by its words. The page writes "as in the status schema" for some."""
    listed: dict[str, Any] = json.loads((ROOT / "docs/schema/commands.json").read_text())["commands"]
    checkpoint, finding_, pause = (_of_status(path) for path in ("checkpoints.sets[]", "reasons[]", "daemon.pause"))
    incident = _of_status("incident")
    borrowed: dict[str, set[str]] = {
        "checkpoints --json": _below("sets[]", checkpoint),
        "incidents --json": _below("incidents[]", incident),
        "incidents ID --json": incident,
        "replay --json": _below("findings[]", finding_),
        "pause --json": _below("pause", pause),
        "unpause --json": _below("pause", pause),
    }
    noted = {name for name in listed if name in schemas()}
    listed["runs diff A B --json"]["document"]["problems"] = {"RUN": None}  # the page has an example
    found = {name: example_paths(entry["document"]) for name, entry in listed.items() if name not in noted}
    return {name: paths | borrowed.get(name, set()) | _version(name, paths) for name, paths in found.items()}


def _version(name: str, paths: set[str]) -> set[str]:
    """As the page says: every document has ``schema_version``, with these exceptions."""
    bare = "message" in paths or name in ("restart --dry-run --json", "incidents ID --json", "bootstrap")
    return set() if bare else {"schema_version"}


def _of_status(path: str) -> set[str]:
    found = schema_paths(schemas()["status"])
    return {one.removeprefix(f"{path}.") for one in found if one.startswith(f"{path}.")}


def _below(path: str, names: set[str]) -> set[str]:
    return {f"{path}.{name}" for name in names} | {path.removesuffix("[]")}


def stored_documents() -> dict[str, set[str]]:
    """Intent, manifest, exports, pointer, claim, verdict and control.json: from one of each that the product writes,
    with every field."""
    pod = lease.Pod("writer", instance=Instance("provider", "id", "1", "node", "label"))
    claim = lease.Claim(1, "nonce")
    host = Host("machine", "node", ("gpu",))
    verdict = RunVerdict(
        last=LastEnd(65, "gave-up", "reason", "command", 1.0, instance=pod.instance),
        attempt=OpenAttempt("id", 1.0), bad_hosts=(BadHost(host, "reason", 1.0, 2.0),), suspect=Suspect(host, 1),
    )  # fmt: skip
    digest, link = f"sha256:{'0' * 64}", SymlinkEntry("c", "a", "b")
    head = ("run", 1, "save", "writer", 1)
    intent = stored.SaveIntent(*head, 1.0, "dcp", 1, (FileEntry("b", "a", 1, 1),), (link,))
    manifest = stored.SaveManifest(
        *head, 1.0, "dcp", 1, (FileEntry("b", "a", 1, 1, 0o600, hashes=(digest,)),), (link,),
        train_command=("x",), wandb={"run": "x"},
    )  # fmt: skip
    exports = stored.SaveExports("run", 1, "save", 1.0, (FileEntry("b", "a", 1, 1, hashes=(digest,)),), True)
    pointer = stored.RunPointer("run", 1, 1, None, "writer", 1.0, wandb={"run": "x"})
    written = {
        "intent": intent.to_bytes(),
        "manifest": manifest.to_bytes(),
        "exports": exports.to_bytes(),
        "pointer": pointer.to_bytes(),
        "claim": lease.claim_document(claim, pod, "now"),
        "verdict": verdict.to_bytes(),
    }
    found = {name: paths_of(json.loads(data), {"wandb.*"}) for name, data in written.items()}
    found["verdict"] |= paths_of({"last": {"instance": asdict(pod.instance)}})
    archived = ArchiveRecord("run", "latest", 1.0, "host").to_bytes()
    claimed = ControllerClaim("run", "controller", "host", 1, 1.0).to_bytes()
    found["archive"], found["controller claim"] = paths_of(json.loads(archived)), paths_of(json.loads(claimed))
    return {**found, "control": set(lease.Control().to_json())}


def piped_documents() -> dict[str, set[str]]:
    """What an operator's command reads from standard input: a hook, and ``[notify] command``."""
    told: Any = SimpleNamespace(run_id="run", trainer=SimpleNamespace(output_dir="out"))
    occasion = Occasion("checkpoint", "checkpoint:1", 1.0, fields={"x": 1})
    about = {"parts": {"trainer": "path"}}
    notice = event.Notice(
        event.Topic.FINDINGS, event.Change.HAPPENED, finding.Severity.INFO, "title", "text", "key", 1.0, fields={"x": 1}
    )
    free = {"parts.*", "fields.*"}
    return {
        "hook": paths_of(hook_runner.document_of(occasion, "hook", 1, told, about), free),
        "notice": paths_of(deliver_notices.document_of(notice, run_id="run", host="host"), free),
    }
