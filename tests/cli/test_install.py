"""What ``podwatch install`` would write, whose files it replaces, where it refuses. tests/suites/systemd runs it."""

import os
import shlex
from pathlib import Path

import pytest

from podwatch.cli import install_plan, offline, systemd_service
from podwatch.config.env_files import env_lines
from podwatch.config.loading import load_settings
from podwatch.domain.errors import ConfigurationError, HostError, UsageError

BASE = 'run_id = "r"\nstate_dir = "{root}/state"\n[trainer]\noutput_dir = "{root}/work/outputs"\n'
needs_root = pytest.mark.root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path


def plan(
    root: Path, text: str = BASE, *, name: str = "", command: tuple[str, ...] = ("/opt/podwatch",)
) -> install_plan.Plan:
    config = root / "podwatch.toml"
    config.write_text(text.replace("{root}", str(root)))
    config.chmod(0o600)
    settings = load_settings(config, environ={}).settings
    return install_plan.plan_install(settings, config, list(command), name=name)


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
    first, _, rest = unit.partition("\n")
    assert f"{first}\n" == systemd_service.SIGNATURE
    assert rest.replace("ExecStart=/opt/podwatch run", "") == shipped.replace(
        "ExecStart=/usr/local/bin/podwatch run", ""
    )
    assert made.service.unit == "podwatch"


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
        install_plan.plan_install(settings, config, ["/opt/podwatch"])
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
        install_plan.quote("a\nExecStartPre=/bin/evil")


# -- the store's key


STORE = BASE + '[sync]\nstore = "b2://my-bucket"\n'
KEY = {"B2_APPLICATION_KEY_ID": "0014711", "B2_APPLICATION_KEY": "K001-one-two-three"}


def planned_key(root: Path, monkeypatch: pytest.MonkeyPatch, text: str, **environ: str) -> dict[str, str] | None:
    monkeypatch.setattr(systemd_service, "ETC", root)
    config = root / "podwatch.toml"
    config.write_text(text.replace("{root}", str(root)))
    config.chmod(0o600)
    return install_plan.key_for_service(load_settings(config, environ={}).settings, systemd_service.Service(), environ)


def test_the_key_of_the_shell_becomes_a_file_that_the_service_reads(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = planned_key(root, monkeypatch, STORE, **KEY, HOME="/root")
    assert key == KEY
    (root / "podwatch.env").write_text(env_lines(key, "podwatch install"))
    (root / "podwatch.env").chmod(0o600)
    assert systemd_service.variables_of(root / "podwatch.env") == KEY
    assert planned_key(root, monkeypatch, STORE, B2_APPLICATION_KEY_ID="x", B2_APPLICATION_KEY="y") is None


def test_without_a_key_anywhere_nothing_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned_key(root, monkeypatch, STORE) == {}
    assert planned_key(root, monkeypatch, STORE, B2_APPLICATION_KEY="half of it") == {}
    (root / "podwatch.env").write_text("PODWATCH_MODE=observe\n")
    (root / "podwatch.env").chmod(0o600)
    assert planned_key(root, monkeypatch, STORE, **KEY) == {}, "the operator's file stays"
    assert planned_key(root, monkeypatch, BASE) is None


def test_a_key_that_the_trainer_s_environment_file_has_is_enough(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "train.env").write_text("".join(f"{name}={value}\n" for name, value in KEY.items()))
    (root / "train.env").chmod(0o600)
    text = STORE.replace("[trainer]", '[trainer]\nenv_file = "{root}/train.env"')
    assert planned_key(root, monkeypatch, text) is None


def test_an_s3_store_needs_no_key_in_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = STORE.replace("b2://", "s3://")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(root / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(root / "credentials"))
    assert planned_key(root, monkeypatch, text) is None, "AWS's tools can find one elsewhere"
    shell = {"AWS_ACCESS_KEY_ID": "AKID-1234567", "AWS_SECRET_ACCESS_KEY": "one-two-three"}
    assert planned_key(root, monkeypatch, text, **shell) == shell
    assert planned_key(root, monkeypatch, text + 's3_profile = "lab"\n') is None


@needs_root
def test_commands_that_are_typed_find_the_key_of_the_run_s_service(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_service, "ETC", root)
    monkeypatch.setattr(systemd_service, "UNITS", root / "units")
    for name in KEY:
        monkeypatch.delenv(name, raising=False)
    made = plan(root, STORE)
    settings = load_settings(root / "podwatch.toml", environ={}).settings
    (root / "podwatch.env").write_text("".join(f"{name}={value}\n" for name, value in KEY.items()))
    (root / "podwatch.env").chmod(0o600)
    assert offline.store_access(settings) is None, "a file of no service"
    made.service.dropin.parent.mkdir(parents=True)
    made.service.dropin.write_text(made.files[1][1].replace("# Run: r\n", "# Run: another\n"))
    assert offline.store_access(settings) is None, "the key of another run"
    made.service.dropin.write_text(made.files[1][1])
    found = offline.store_access(settings)
    assert found is not None
    assert (found.key_id, found.key) == tuple(KEY.values())


# -- whose file it is


@needs_root
def test_an_upgrade_replaces_what_podwatch_wrote_and_nothing_else(root: Path) -> None:
    file, link = root / "podwatch.service", root / "link.service"
    assert systemd_service.origin(file) is systemd_service.Origin.ABSENT
    file.write_text(systemd_service.SIGNATURE + "[Service]\nRestart=no\n")
    assert systemd_service.origin(file) is systemd_service.Origin.OURS
    file.write_text("[Service]\nExecStart=/bin/other\n")
    assert systemd_service.origin(file) is systemd_service.Origin.FOREIGN
    link.symlink_to(file)
    assert systemd_service.origin(link) is systemd_service.Origin.FOREIGN
    link.unlink()
    link.symlink_to("/dev/null")
    assert systemd_service.origin(link) is systemd_service.Origin.FOREIGN, "a masked unit"
    os.chown(file, 65534, 65534)
    assert systemd_service.origin(file) is systemd_service.Origin.FOREIGN


@needs_root
def test_the_drop_in_names_its_run_and_configuration(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_service, "UNITS", root / "units")
    made = plan(root)
    assert made.service.installed_for() == ("", "")
    for path, text in made.files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert systemd_service.origin(path) is systemd_service.Origin.OURS
    assert made.service.installed_for() == ("r", f"{root}/podwatch.toml")


# -- without systemd


@pytest.mark.skipif(systemd_service.BOOTED.is_dir(), reason="systemd runs here")
def test_without_systemd_there_are_two_other_ways(machine) -> None:
    done = machine.podwatch("install")
    assert done.returncode == 69
    assert done.stderr.count("\n") == 1
    assert "systemd does not run here" in done.stderr
    assert "run --detach" in done.stderr
    assert "process 1" in done.stderr


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
