"""The file of PODWATCH_TEST_TIMES: what it sets, over what, and whose file is believed."""

import json
import os
from pathlib import Path

import pytest

from podwatch.config import trusted_files
from podwatch.config.explain import render_toml, to_json
from podwatch.config.loading import LoadedSettings, load_settings, load_text
from podwatch.config.setting_names import fixed_keys, known_keys
from podwatch.config.test_times import CONSTANTS, names, seconds
from podwatch.domain.errors import ConfigurationError, ExitCode
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.trainer.environment import build_environment
from tests.support.strangers import UID, needs_root

MINIMAL = 'run_id = "r1"\n[trainer]\noutput_dir = "/data/out"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "times.toml"
    path.write_text('[times]\n"gpu.poll" = "100ms"\n"gpu.hold" = 1\n"status.watch" = "0.2s"\n')
    return path


def load(file: Path, text: str = MINIMAL, **environ: str) -> LoadedSettings:
    return load_text(text, None, environ={"PODWATCH_TEST_TIMES": str(file), **environ})


def refused(file: Path, **environ: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(file, **environ)
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    return str(caught.value)


def test_it_wins_over_file_and_environment_and_flags_win_over_it(file: Path) -> None:
    text = MINIMAL + '[gpu]\nhold = "9s"\n'
    settings = load(file, text, PODWATCH_GPU__HOLD="50s", PODWATCH_GPU__RELEASE_WAIT="7s").settings
    assert (settings.gpu.poll, settings.gpu.hold, settings.gpu.release_wait) == (0.1, 1.0, 7.0)
    environ = {"PODWATCH_TEST_TIMES": str(file)}
    flagged = load_text(text, None, environ=environ, overrides={"gpu.hold": "3s"})
    assert flagged.settings.gpu.hold == 3.0
    assert load_text(text, None, environ={}).settings.gpu.hold == 9.0
    assert load_text(text, None, environ={"PODWATCH_TEST_TIMES": ""}).settings.gpu.hold == 9.0


@pytest.mark.parametrize("key", sorted(fixed_keys()))
def test_nothing_else_sets_podwatchs_own_values(key: str, file: Path) -> None:
    """Two pods with different ones would take a run from each other."""
    section, _, name = key.partition(".")
    header = "" if section == "trainer" else f"[{section}]\n"
    value, said = json.dumps("5s"), f'"{name}" in [{section}] is no setting'
    for given, environ, flags in (
        (f"{MINIMAL}{header}{name} = {value}\n", {}, {}),
        (MINIMAL, {f"PODWATCH_{section.upper()}": json.dumps({name: "5s"})}, {}),
        (MINIMAL, {}, {key: "5s"}),
    ):
        for also in ({}, {"PODWATCH_TEST_TIMES": str(file)}):
            with pytest.raises(ConfigurationError) as caught:
                load_text(given, None, environ={**environ, **also}, overrides=flags)
            assert str(caught.value).count(said) == 1
            assert "remove it" in str(caught.value)
            assert "problems" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="unknown setting"):
        load_text(MINIMAL, None, environ={f"PODWATCH_{section.upper()}__{name.upper()}": "5s"})


def test_what_is_no_duration_is_judged_as_a_setting_is(file: Path) -> None:
    file.write_text('[times]\n"end_pod.tries" = 2\n"gpu.release_margin" = "1MB"\n')
    settings = load(file).settings
    assert (settings.end_pod.tries, settings.gpu.release_margin) == (2, 1_000_000)
    file.write_text('[times]\n"end_pod.tries" = 0\n')
    assert 'PODWATCH_TEST_TIMES: Invalid value for "tries" in [end_pod]' in refused(file)


def test_its_values_are_shown_as_its_own_and_the_log_says_so(file: Path) -> None:
    loaded = load(file)
    assert loaded.sources["gpu.hold"] == "PODWATCH_TEST_TIMES"
    assert "(PODWATCH_TEST_TIMES)\nhold = " in render_toml(loaded.settings, loaded.sources)
    assert to_json(loaded.settings, loaded.sources, None)["settings"]["gpu.hold"]["source"] == "PODWATCH_TEST_TIMES"
    assert loaded.warnings[-1].startswith("PODWATCH_TEST_TIMES sets 2 of podwatch's times")
    assert not any("PODWATCH_TEST_TIMES" in text for text in load_text(MINIMAL, None, environ={}).warnings)


def test_constants_are_no_settings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not CONSTANTS.keys() & set(known_keys())
    assert {"gpu.poll", "recovery.end_grace", "sync.claim_wait", *CONSTANTS} <= set(names())
    assert not {"sync.store", "gpu.floor", "disk.prune_to", "trainer.command", "run_id", "hooks"} & set(names())
    monkeypatch.delenv("PODWATCH_TEST_TIMES", raising=False)
    assert seconds("status.watch") == CONSTANTS["status.watch"]
    monkeypatch.setenv("PODWATCH_TEST_TIMES", str(file))
    assert seconds("status.watch") == 0.2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[times]\n"gpu.pol" = "1s"\n', ('unknown time "gpu.pol"', 'did you mean "gpu.poll"?')),
        ('[times]\n"sync.store" = "1s"\n', ('unknown time "sync.store"',)),
        ('[times]\n"gpu.poll" = "8 parsecs"\n', ('"gpu.poll"', "parsecs", "use ms, s,")),
        ('[times]\n"gpu.poll" = true\n', ('"gpu.poll"',)),
        ('[times]\n"gpu.poll" = "-1s"\n', ('"gpu.poll"',)),
        ('[times]\n"gpu.poll" = "0s"\n', ("PODWATCH_TEST_TIMES", '"poll" in [gpu]', "greater than 0")),
        ('[times.gpu]\npoll = "1s"\n', ('unknown time "gpu"',)),
        ('"gpu.poll" = "1s"\n', ('unknown key "gpu.poll"', "[times]")),
        ("[times\n", ("not valid TOML",)),
        ("[times]\n'gpu.hol' = 1\n'gpu.pol' = 1\n", ("2 problems", "gpu.hold", "gpu.poll")),
    ],
)
def test_what_it_says_wrongly_is_an_error(file: Path, text: str, said: tuple[str, ...]) -> None:
    file.write_text(text)
    message = refused(file)
    assert [word for word in said if word not in message] == []
    assert str(file) in message or "PODWATCH_TEST_TIMES" in message


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    message = refused(file)
    assert str(file) in message
    assert "written by other users" in message


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_is_refused(file: Path, mode: int) -> None:
    """A sticky one too, unless the file is in a directory of its own there."""
    file.parent.chmod(mode)
    message = refused(file)
    assert str(file) in message
    if mode & 0o1000 and os.geteuid() == 0:
        (file.parent / "own").mkdir()
        assert load(file.rename(file.parent / "own" / file.name)).settings.gpu.poll == 0.1
    else:
        assert f"{file.parent} can be written by others (mode {mode:04o})" in message


def test_a_link_counts_by_the_directory_that_it_leads_to(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "open" / "times.toml"
    target.parent.mkdir()
    target.write_text(file.read_text())
    target.parent.chmod(0o777)
    link = tmp_path / "link.toml"
    link.symlink_to(target)
    assert f"{target.parent} can be written by others" in refused(link)
    target.parent.chmod(0o755)
    assert load(link).settings.gpu.poll == 0.1


@needs_root
def test_another_users_file_or_directory_is_refused(file: Path) -> None:
    os.chown(file, UID, -1)
    assert f"belongs to uid {UID}" in refused(file)
    os.chown(file, 0, -1)
    os.chown(file.parent, UID, -1)
    assert f"{file.parent} belongs to uid {UID}" in refused(file)


def test_a_file_that_is_missing_or_no_file_is_refused(file: Path, tmp_path: Path) -> None:
    assert "cannot read the file of test times" in refused(tmp_path / "none.toml")
    assert "not a regular file" in refused(tmp_path)


def test_an_owner_outside_of_a_user_namespace_is_roots_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, ``/`` and ``/tmp`` belong to the overflow uid."""
    texts = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": "         0       1000          1\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    assert trusted_files._is_outside(65534)
    assert not trusted_files._is_outside(1000)
    texts["/proc/self/uid_map"] = "         0          0 4294967295\n"
    assert not trusted_files._is_outside(65534)


def test_training_and_foreign_children_do_not_get_it(file: Path) -> None:
    environ = {"PODWATCH_TEST_TIMES": str(file), "PATH": "/bin"}
    assert "PODWATCH_TEST_TIMES" not in build_environment(environ, {"PODWATCH_TEST_TIMES": str(file)}, None)
    assert "PODWATCH_TEST_TIMES" not in scrubbed_environment(environ)


def test_a_last_good_copy_does_not_hide_a_bad_file_of_times(file: Path, tmp_path: Path) -> None:
    config = tmp_path / "podwatch.toml"
    config.write_text(MINIMAL)
    config.chmod(0o600)
    assert load_settings(config, environ={"PODWATCH_TEST_TIMES": str(file)}).settings.gpu.poll == 0.1
    file.write_text('[times]\n"gpu.pol" = 1\n')
    with pytest.raises(ConfigurationError, match=r"gpu\.pol"):
        load_settings(config, environ={"PODWATCH_TEST_TIMES": str(file)})
