"""A layout and a store that an installed package adds: real commands, with the package on their sys.path."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from podwatch.checkpoints.trainer import all_trainers
from podwatch.config.settings import LAYOUTS
from tests.cli.conftest import ROOT, Machine
from tests.support.checkpoints import safetensors_bytes
from tests.support.package import install

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site-packages"


def podwatch(machine: Machine, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return machine.podwatch(*arguments, PYTHONPATH=f"{ROOT}:{site}")


def config(machine: Machine, layout: str = "shelf", store: str = "shelf://here{}") -> str:
    output = machine.directory / "out"
    for step in (10, 20):
        folder = output / f"shelf_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(safetensors_bytes())
        if step == 10:
            (folder / "DONE").touch()
    path = machine.directory / "podwatch.toml"
    path.write_text(
        f'run_id = "r"\nstate_dir = "{machine.directory}/state"\n[trainer]\nlayout = "{layout}"\n'
        f'output_dir = "{output}"\ncommand = ["{sys.executable}", "-m", "shelf"]\n'
        f'[sync]\nstore = "{store.format(machine.directory / "shelf")}"\n'
    )
    path.chmod(0o600)
    return str(path)


def lines(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Name -> level, text and fix of each line of ``podwatch check``."""
    found: dict[str, str] = {}
    for line in json.loads(result.stdout)["checks"]:
        found[line["name"]] = f"{found.get(line['name'], '')}{line['level']}: {line['text']} {line['fix']}\n"
    return found


def test_both_are_used(machine: Machine, site: Path) -> None:
    install(site)
    file = config(machine)
    listed = podwatch(machine, site, "checkpoints", "--json", "-c", file)
    assert listed.returncode == 0, listed.stderr
    found = {s["step"]: (s["completeness"], s["reason"]) for s in json.loads(listed.stdout)["sets"]}
    assert found[10][0] == "complete", found
    assert "DONE" in found[20][1], found
    checked = lines(podwatch(machine, site, "check", "--json", "-c", file))
    assert checked["layout"] == "ok: shelf: set in the configuration \n", checked
    assert f"--resume {machine.directory}/out/shelf_10" in checked["resume"], checked
    assert f"ok: shelf://here{machine.directory}/shelf is usable" in checked["store"], checked


def test_without_the_package_the_names_are_unknown(machine: Machine, site: Path) -> None:
    result = podwatch(machine, site, "config", "show", "-c", config(machine))
    assert result.returncode == 78
    assert "'shelf' (expected 'auto', 'prime-rl'" in result.stderr
    assert "or a name that an installed package adds" in result.stderr
    assert 'must be "b2://bucket[/prefix]"' in result.stderr
    install(site)
    result = podwatch(machine, site, "config", "show", "-c", config(machine, layout="shelv"))
    assert 'did you mean "shelf"?' in result.stderr


BROKEN = "raise ImportError('libshelf.so not found')\n"


def test_a_package_that_fails_is_named_and_only_where_it_is_used(machine: Machine, site: Path) -> None:
    install(site, "shelf-broken", {"broken.py": BROKEN}, layouts="shelf = broken:KIND", stores="shelf = broken:o")
    file = config(machine)
    told = podwatch(machine, site, "check", "--json", "-c", file)
    failed = "".join(line for line in "".join(lines(told).values()).splitlines(True) if line.startswith("fail: "))
    assert "the package shelf-broken 1.2 cannot be used: its entry point" in failed
    for entry in ("shelf = broken:KIND", "shelf = broken:o"):
        group = "podwatch.layouts" if entry.endswith("KIND") else "podwatch.stores"
        assert f'"{entry}" in {group} raises ImportError: libshelf.so not found' in failed
    result = podwatch(machine, site, "checkpoints", "-c", file)
    assert (result.returncode, "shelf-broken 1.2" in result.stderr) == (78, True), result.stderr

    unrelated = config(machine, layout="hf", store="file:///proc/nowhere")
    checked = lines(podwatch(machine, site, "check", "--json", "-c", unrelated))
    assert "shelf-broken" not in str(checked)
    assert podwatch(machine, site, "checkpoints", "-c", unrelated).returncode == 0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def KIND(site): return object()", "is a function, not a table with parts"),
        ("KIND = {'require': [['a']]}", "is a dict, not a table with parts"),
        (
            "KIND = {'parts': {'checkpoint': 's_{step}'}, 'requires': []}",
            "a table that cannot be read: layout",
        ),
        ("KIND = {'parts': {'checkpoint': 's_{step}'}, 'log': {'errors': [{}]}}", "raises KeyError: 'pattern'"),
        ("import sys; sys.exit(3)", "raises SystemExit: 3"),
    ],
)
def test_a_layout_that_cannot_be_one_is_refused(machine: Machine, site: Path, code: str, said: str) -> None:
    install(site, "shelf-other", {"other.py": code}, layouts="shelf = other:KIND")
    result = podwatch(machine, site, "checkpoints", "-c", config(machine, store=""))
    assert result.returncode == 78, result.stderr
    assert "the package shelf-other 1.2 cannot be used" in result.stderr
    assert said in result.stderr


def test_a_name_of_podwatch_stays_podwatchs(machine: Machine, site: Path) -> None:
    install(site, "shelf-clash", {"clash.py": BROKEN}, layouts="hf = clash:KIND", stores="file = clash:o")
    result = podwatch(machine, site, "checkpoints", "-c", config(machine, layout="hf", store="file:///mnt"))
    assert result.returncode == 78
    assert "'hf' is podwatch's own, but the package shelf-clash 1.2 defines it in podwatch.layouts too" in result.stderr
    assert "'file' is podwatch's own, but the package shelf-clash 1.2" in result.stderr
    # Without these names in the configuration the package has no say.
    assert podwatch(machine, site, "checkpoints", "-c", config(machine, layout="verl", store="")).returncode == 0


def test_two_packages_with_one_name_are_both_named(machine: Machine, site: Path) -> None:
    install(site)
    install(site, "shelf-second", {}, layouts="shelf = podwatch_shelf:LAYOUT")
    result = podwatch(machine, site, "checkpoints", "-c", config(machine))
    assert result.returncode == 78
    assert all(name in result.stderr for name in ("podwatch-shelf 1.2", "shelf-second 1.2", "both define 'shelf'"))


def test_a_store_url_holds_no_credentials(machine: Machine, site: Path) -> None:
    install(site)
    result = machine.podwatch(
        "check", "--json", "-c", config(machine, store=""),
        PYTHONPATH=f"{ROOT}:{site}", PODWATCH_SYNC__STORE="shelf://key:hidden@here/x",
    )  # fmt: skip
    assert "must not contain credentials" in lines(result)["store"]
    assert "hidden" not in result.stdout + result.stderr


def test_the_status_does_not_look_for_packages(machine: Machine, site: Path) -> None:
    install(site)
    code = "import sys\nsys.argv = ['podwatch', 'status']\nfrom podwatch.cli import main\ntry:\n    main()\nfinally:\n"
    unwanted = ("importlib.metadata", "podwatch.config.plugins", "podwatch_shelf")
    code += f"    print([m for m in {unwanted} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={**machine.env, "PYTHONPATH": f"{ROOT}:{site}"},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_the_settings_name_the_registry() -> None:
    assert set(LAYOUTS) == {"auto", *all_trainers()}
