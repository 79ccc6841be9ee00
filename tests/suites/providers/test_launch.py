"""SkyPilot and dstack as providers (create = launch), with a stand-in for each command line: its words as each accepts
them are tried in tests/suites/engines."""

import json
import sys
from pathlib import Path

import pytest

from tests.suites.providers.conftest import LABEL, Command, _environment

# Keeps {name: status} in a file. `broken` in its directory: what every call prints, before it ends with 1.
STAND_IN = f"""#!{sys.executable}
import json, sys
from pathlib import Path
here = Path(__file__).parent
state = json.loads((here / "state").read_text())
words = sys.argv[1:]
(here / "calls").open("a").write(json.dumps(words) + "\\n")
if (here / "broken").exists():
    print((here / "broken").read_text())
    sys.exit(int((here / "broken").read_text() == "fails"))
if words[0] == "status":
    print(json.dumps([{{"name": name, "status": status}} for name, status in state.items()]))
if words[0] == "ps":
    runs = [{{"run_spec": {{"run_name": name}}, "status": status, "submitted_at": "2026-11-23T10:00:00Z",
             "latest_job_submission": {{"job_provisioning_data": {{"price": 0.9}}}}}} for name, status in state.items()]
    print(json.dumps({{"project": "main", "runs": runs}}))
if words[0] in ("launch", "apply"):
    name = words[words.index("--cluster" if words[0] == "launch" else "-n") + 1]
    state[name] = "INIT" if words[0] == "launch" else "submitted"
if words[0] in ("down", "stop"):
    state.pop(words[-1], None)
(here / "state").write_text(json.dumps(state))
"""


@pytest.fixture(params=["skypilot", "dstack"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Command:
    name = request.param
    environment = _environment(tmp_path / "home")
    (tmp_path / "home" / ".sky").mkdir()
    (tmp_path / "home" / ".sky" / "user_hash").write_text("abc123\n")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / {"skypilot": "sky", "dstack": "dstack"}[name]
    program.write_text(STAND_IN)
    program.chmod(0o755)
    (program.parent / "state").write_text("{}")
    config = tmp_path / f"{name}.toml"
    config.write_text("price_per_hour = 0.8\n" * (name == "skypilot") + '[environment]\nPOD_RUN = "run1"\n')
    environment |= {"PATH": f"{program.parent}:/usr/bin:/bin", f"{name.upper()}_CONFIG": str(config)}
    return Command(f"{name}.py", environment, config)


def directory(engine: Command) -> Path:
    return Path(engine.environment["PATH"].split(":")[0])


def calls(engine: Command) -> list[list[str]]:
    return [json.loads(line) for line in (directory(engine) / "calls").read_text().splitlines()]


def test_life(engine: Command) -> None:
    sky = engine.program == "skypilot.py"
    (directory(engine) / "state").write_text('{"podwatch-run1-v2-7": "UP", "mine": "UP", "podwatch-run1": "UP"}')
    account = "skypilot:abc123:local" if sky else "dstack:main"
    assert engine.list() == (0, {"version": 1, "account": account, "complete": True, "instances": []})
    assert len(engine.list("run1-v2")[1]["instances"]) == 1
    code, made = engine.create(1.0, PODWATCH_LABEL=LABEL)
    assert (code, made["id"], made["price_per_hour"]) == (0, "podwatch-run1-7", 0.8 if sky else 1.0)
    (launch,) = [words for words in calls(engine) if words[0] in ("launch", "apply")]
    assert {"--env=POD_RUN=run1", f"--env=PODWATCH_LABEL={LABEL}"} < set(launch)
    assert engine.create()[1]["id"] == "podwatch-run1-7"
    assert sum(words[0] in ("launch", "apply") for words in calls(engine)) == 1
    (instance,) = engine.list()[1]["instances"]
    assert (instance["label"], instance["state"]) == (LABEL, "pending")
    assert engine.destroy("podwatch-run1-7", "podwatch:run1:8") == (65, "")
    assert engine.destroy("podwatch-run1-7")[0] == 0
    assert engine.list()[1]["instances"] == []


def test_life_of_a_machine_with_the_tag_of_its_store(engine: Command) -> None:
    label = "podwatch:run1:7:sabcd234"
    request = {"version": 1, "run_id": "run1", "generation": 7, "label": label, "max_price_per_hour": 1.0}
    code, out = engine.run("create", {**request, "environment": {}})
    assert (code, out["id"]) == (0, "podwatch-run1-7-sabcd234")
    assert engine.run("create", {**request, "environment": {}})[0] == 0, "the same one again"
    other = {**request, "label": "podwatch:run1:7:szyxw765", "environment": {}}
    assert engine.run("create", other)[1]["id"] == "podwatch-run1-7-szyxw765", "another store's"
    assert [one["label"] for one in engine.list()[1]["instances"]] == [label, other["label"]]
    assert engine.destroy("podwatch-run1-7-sabcd234", "podwatch:run1:7") == (65, "")
    assert engine.destroy("podwatch-run1-7-sabcd234", label)[0] == 0
    assert [one["label"] for one in engine.list()[1]["instances"]] == [other["label"]]


@pytest.mark.parametrize("said", ["fails", "", "no clusters", "{}", "[7]", "null", '{"runs": []}', '[{"name": 1}]'])
def test_a_list_that_cannot_be_read_is_an_error(engine: Command, said: str) -> None:
    (directory(engine) / "broken").write_text(said)
    assert engine.list() == (69, "")
    assert engine.create() == (69, "")


def test_price_and_names(engine: Command) -> None:
    if engine.program == "skypilot.py":
        assert engine.create(0.7) == (3, "")
        (Path(engine.environment["HOME"]) / ".sky" / "user_hash").unlink()
        assert engine.list() == (69, "")  # another machine's SkyPilot knows no clusters
    else:
        label = "podwatch:Run_1:7"
        request = {"version": 1, "run_id": "Run_1", "generation": 7, "label": label, "max_price_per_hour": 1.0}
        assert engine.run("create", {**request, "environment": {}}) == (65, "")
        assert not [words for words in calls(engine) if words[0] == "apply"]
