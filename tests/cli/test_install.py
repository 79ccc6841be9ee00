"""What ``podwatch install`` would write, and where it refuses. That it runs is the business of tests/suites/systemd."""

import os
import shlex
from pathlib import Path

import pytest

from podwatch.cli import install
from podwatch.config.loading import load_settings
from podwatch.domain.errors import ConfigurationError, HostError, UsageError

BASE = 'run_id = "r"\nstate_dir = "{root}/state"\n[trainer]\noutput_dir = "{root}/work/outputs"\n'
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the configuration must belong to root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path


def plan(
    root: Path, text: str = BASE, *, name: str = "", command: tuple[str, ...] = ("/opt/podwatch",)
) -> install.Plan:
    config = root / "podwatch.toml"
    config.write_text(text.replace("{root}", str(root)))
    config.chmod(0o600)
    settings = load_settings(config, environ={}).settings
    return install.plan_install(settings, config, list(command), name=name)


def line(text: str, key: str) -> str:
    return [found for found in text.splitlines() if found.startswith(f"{key}=")][-1].partition("=")[2]


@needs_root
def test_unit_and_dropin(root: Path) -> None:
    made = plan(root)
    (unit_path, unit), (dropin_path, dropin) = made.files
    assert unit_path == Path("/etc/systemd/system/podwatch.service")
    assert dropin_path == Path("/etc/systemd/system/podwatch.service.d/10-paths.conf")
    assert line(unit, "ExecStart") == "/opt/podwatch run"
    assert line(dropin, "ExecStart") == f"/opt/podwatch --config {root}/podwatch.toml run"
    assert line(dropin, "ReadWritePaths").split() == [f"{root}/work", f"{root}/state"]
    assert made.make == (root / "state",)
    shipped = (Path(__file__).parents[2] / "systemd/podwatch.service").read_text()
    assert unit.replace("ExecStart=/opt/podwatch run", "") == shipped.replace(
        "ExecStart=/usr/local/bin/podwatch run", ""
    )


@needs_root
def test_an_instance_takes_its_name_from_systemd(root: Path) -> None:
    made = plan(root, name="night-2")
    assert [str(path) for path, _ in made.files] == [
        "/etc/systemd/system/podwatch@.service",
        "/etc/systemd/system/podwatch@night-2.service.d/10-paths.conf",
    ]
    assert line(made.files[0][1], "ExecStart") == "/opt/podwatch --run %i run"
    with pytest.raises(UsageError, match="not a valid service name"):
        plan(root, name="a b")


@needs_root
def test_every_place_podwatch_writes_is_named_once(root: Path) -> None:
    for directory in ("ckpt", "nas", "real"):
        (root / directory).mkdir()
    (root / "work/outputs").symlink_to(root / "real/outputs")
    text = BASE + f'checkpoint_dir = "{root}/ckpt/run"\n[sync]\nstore = "file://{root}/nas/podwatch"\n'
    made = plan(root, text)
    wanted = [root / "work", root / "real", root / "ckpt", root / "state", root / "nas/podwatch"]
    assert line(made.files[1][1], "ReadWritePaths").split() == [str(path) for path in wanted]
    assert made.make == (root / "state", root / "nas/podwatch")

    below = BASE + f'checkpoint_dir = "{root}/work/outputs/more/run"\n'
    (root / "work/outputs").unlink()
    (root / "work/outputs/more").mkdir(parents=True)
    assert line(plan(root, below).files[1][1], "ReadWritePaths").split() == [f"{root}/work", f"{root}/state"]


@needs_root
def test_directly_below_the_root_the_whole_disk_is_not_opened(root: Path) -> None:
    text = BASE.replace("{root}/work/outputs", "/podwatch-test-outputs")
    made = plan(root, text)
    paths = line(made.files[1][1], "ReadWritePaths").split()
    assert paths == ["/podwatch-test-outputs", "/.podwatch", f"{root}/state"]
    assert [str(path) for path in made.make[:2]] == paths[:2]


@needs_root
@pytest.mark.parametrize(
    ("gone", "text"),
    [("work", BASE), ("nas", BASE + '[sync]\nstore = "file://{root}/nas/deep/store"\n')],
)
def test_a_place_that_is_missing_is_said_before_systemd_fails_on_it(root: Path, gone: str, text: str) -> None:
    if gone == "work":
        (root / "work").rmdir()
    with pytest.raises(HostError) as caught:
        plan(root, text)
    assert gone in caught.value.where
    assert caught.value.fix.startswith("create it (mkdir -p ")


@needs_root
def test_a_configuration_of_somebody_else_is_refused(root: Path) -> None:
    plan(root)
    config = root / "podwatch.toml"
    settings = load_settings(config, environ={}).settings
    os.chown(config, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to root") as caught:
        install.plan_install(settings, config, ["/opt/podwatch"])
    assert caught.value.fix == f"chown root {config}"


@needs_root
def test_odd_names_stay_one_word(root: Path) -> None:
    odd = root / 'my "100%" $HOME dir'
    odd.mkdir()
    text = BASE.replace("{root}/work/outputs", str(odd / "outputs").replace('"', '\\"'))
    made = plan(root, text, command=("/opt/my venv/bin/python", "-m", "podwatch", "$x"))
    words = shlex.split(line(made.files[1][1], "ReadWritePaths"))
    assert words[0] == str(odd).replace("%", "%%")
    assert line(made.files[0][1], "ExecStart") == '"/opt/my venv/bin/python" -m podwatch $$x run'
    with pytest.raises(ConfigurationError, match="control characters"):
        install.quote("a\nExecStartPre=/bin/evil")


@needs_root
def test_the_store_s_key_is_asked_for(root: Path) -> None:
    text = BASE + '[sync]\nstore = "b2://my-bucket"\n'
    if not Path("/etc/podwatch/podwatch.env").exists():
        assert "B2_APPLICATION_KEY_ID" in plan(root, text).notes[0]
    assert plan(root).notes == ()


@pytest.mark.skipif(install.BOOTED.is_dir(), reason="systemd runs here")
def test_without_systemd_there_are_two_other_ways(machine) -> None:
    done = machine.podwatch("install")
    assert done.returncode == 69
    assert done.stderr.count("\n") == 1
    assert "systemd does not run here" in done.stderr
    assert "run --detach" in done.stderr


@needs_root
def test_dry_run_needs_no_systemd_and_writes_nothing(machine, root: Path) -> None:
    config = root / "podwatch.toml"
    config.write_text(BASE.replace("{root}", str(root)))
    config.chmod(0o600)
    done = machine.podwatch("-c", str(config), "install", "--dry-run", PODWATCH_RUN_ID="not-the-service's")
    assert done.returncode == 0, done.stderr
    assert "would write /etc/systemd/system/podwatch.service" in done.stdout
    assert f"would create {root}/state" in done.stdout
    assert not (root / "state").exists()
    bad = machine.podwatch("-c", str(root / "nothing.toml"), "install", "--dry-run")
    assert bad.returncode == 78
