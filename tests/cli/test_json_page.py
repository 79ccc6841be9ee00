"""docs/schema/commands.json against what the commands print, for the shapes that no schema holds."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from podwatch.cli import controller, evaluation, hooks, training
from podwatch.config.loading import load_text
from podwatch.controller.loop import Look
from podwatch.daemon.commands import Commands
from podwatch.domain.errors import ExitCode, RemoteError
from podwatch.hooks import start_child
from podwatch.hooks.hook_runner import HookLine
from podwatch.policy.bootstrap import StartFile, StartRecord
from podwatch.policy.evaluation import Result
from podwatch.policy.exit_code import Blame, Outcome, Verdict
from podwatch.policy.hooks import Occasion
from podwatch.policy.replacement import Action, Decision
from tests.cli.test_docs_commands import parse, words

COMMANDS = json.loads((Path(__file__).parents[2] / "docs/schema/commands.json").read_text())["commands"]
HOOK = '[[hooks]]\nname = "say"\non = ["checkpoint"]\ncommand = ["sh", "-c", "cat; exit 3"]\n'
FREE = ("document", "metrics", "settings")
"""Documents that another page describes, or whose keys are the user's."""


def note(command: str) -> str:
    return str(COMMANDS[command]["note"])


def promised(command: str) -> set[str]:
    """The names in the command's document."""
    return names(COMMANDS[command]["document"], free=())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_can_be_typed(command: str) -> None:
    parse(words(command))


def names(document: Any, free: tuple[str, ...] = FREE) -> set[str]:
    if isinstance(document, list):
        return set().union(*(names(item, free) for item in document))
    if not isinstance(document, dict):
        return set()
    inner = (names(value, free) for key, value in document.items() if key not in free)
    return set(document).union(*inner) - {"schema_version"}


def test_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Verdict(ExitCode.DO_NOT_RUN, Outcome.GAVE_UP, "The command fails.", Blame.COMMAND).to_dict()
    monkeypatch.setattr(training, "ask_status", lambda *_: {"running": True, "run_id": "r", "end": end})
    done = CliRunner().invoke(training.wait, ["--json"])
    assert names(json.loads(done.stdout)) == promised("wait --json")
    assert done.exit_code == ExitCode.DO_NOT_RUN


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "podwatch.toml"
    path.write_text(
        f'run_id = "r"\nstate_dir = "{tmp_path}/state"\n[trainer]\nlayout = "dcp"\n'
        f'output_dir = "{tmp_path}/out"\n{HOOK}'
    )
    (tmp_path / "out").mkdir()
    return path


def test_hooks_list(config: Path) -> None:
    hook = load_text(config.read_text(), config, environ={}).settings.hooks[0]
    told: list[Any] = []
    desk = SimpleNamespace(clock=SimpleNamespace(wall=lambda: 1.0), emit=told.append)
    line = HookLine(hook, desk)  # type: ignore[arg-type]
    line._report(Occasion("checkpoint", "checkpoint:1", 1.0, step=1), start_child.Result(3), 1, None)
    document = hooks._document(hook, {"failures": 1, "last": dict(line._last)})
    assert names({"hooks": [document]}) == promised("hooks list --json")
    assert document["last"]["exit_code"] == told[0].fields["exit_code"] == 3
    done = CliRunner().invoke(hooks.command, ["list", "-c", str(config), "--json"])
    assert json.loads(done.stdout)["hooks"] == [{**document, "failures": 0, "last": None}]
    line._report(Occasion("checkpoint", "checkpoint:1", 1.0, step=1), start_child.Result(3), 1, 10.0)
    assert line._last["retry_in_seconds"] == 10.0
    assert "retry_in_seconds" in note("hooks list --json")


def test_hooks_run(config: Path) -> None:
    done = CliRunner().invoke(hooks.command, ["run", "say", "-c", str(config), "--json"])
    document = json.loads(done.stdout)
    assert names(document) == promised("hooks run NAME --json")
    assert json.loads(document["output"]) == document["document"]
    assert (document["ok"], done.exit_code) == (False, 1)


async def test_eval() -> None:
    async def request(_: object) -> list[Any]:
        return [SimpleNamespace(step=5)]

    daemon = SimpleNamespace(_evaluations=SimpleNamespace(request=request, when=""))
    answer = await Commands.evaluate(daemon, {"steps": [5]})  # type: ignore[arg-type]
    assert names(answer) == promised("eval --json")
    assert answer["steps"] == [5]


def test_eval_table() -> None:
    row = Result(5, "save", ok=True, wall=1.0, metrics={"a.b": 0.5})
    document = {"metric": None, "results": [evaluation._document(row, best=True, at="t")]}
    assert names(document) == promised("eval table --json")


def test_controller(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for found in (Look(Decision(Action.CREATE, "dead")), RemoteError("no answer", transient=True)):
        controller._Reporter(as_json=True)(found)
        said.append(json.loads(capsys.readouterr().out))
    assert names(said[0]) == promised("controller --json")
    listed, rest = note("controller --json").split("only ")
    assert all(re.search(rf"\b{action}\b", listed) for action in Action)
    assert names(said[1]) == set(re.findall(r"\w+", rest)) - {"and"}


def test_bootstrap() -> None:
    file = StartFile("/x/podwatch.toml", "a-podwatch.toml", "0" * 64, 1)
    record = StartRecord("r", "/x", file, (file,), (("/y", "large"),), {"mode": "act"})
    assert names(json.loads(record.to_bytes())) == promised("bootstrap")
