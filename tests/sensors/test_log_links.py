"""Lines of logs and metrics come out in status, bundles and the store, so root reads no file that T only points at.
The user T owns output_dir; podwatch is root."""

import os
from pathlib import Path

import pytest

from podwatch.app.backup.evidence import LogEnds, configs
from podwatch.checkpoints.command import Command
from podwatch.config.env_files import read_env_file
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.run import StartRecord
from podwatch.recovery.start_plan import changed_configs, config_digests
from podwatch.sensors import log_tail
from tests.support.other_users import T, as_root, enterable, own

SECRET = "Step 1 | loss 0.1 secret\n"
pytestmark = as_root


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """output_dir of T, and a file of root's that looks like a log."""
    enterable(tmp_path)
    out = tmp_path / "home" / "out"
    (out / "logs").mkdir(parents=True)
    (out / "logs" / "trainer.log").write_text("Step 5\n")
    (tmp_path / "roots").mkdir(mode=0o700)
    for name in ("trainer.log", "trainer.log.1", "secret.toml"):
        (tmp_path / "roots" / name).write_text(SECRET)
    return own(tmp_path / "home", T) / "out"


def sources(out: Path) -> log_tail.Sources:
    return log_tail.Sources(out, ("logs/*.log", str(out / "logs" / "*.log")), (out / "extra.log",))


def seen(out: Path) -> tuple[str, str]:
    """(everything that was read, every problem), by the sensor and for the store."""
    news = log_tail.look(sources(out), {}, from_end=False)
    stored = LogEnds(1 << 20).read(sources(out), "host")
    lines = "\n".join(line.text for item in news for line in (*item.lines, *item.old))
    return lines + "".join(a.data.decode() for a in stored), " ".join(item.error for item in news)


def link(place: Path, target: Path) -> None:
    if place.is_dir():
        place.rename(place.with_name("moved"))
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    os.chown(place, T, T, follow_symlinks=False)


@pytest.mark.parametrize("name", ["logs/trainer.log", "logs/other.log", "logs", "extra.log", "logs/trainer.log.1"])
def test_a_link_to_a_file_of_roots(out: Path, tmp_path: Path, name: str) -> None:
    link(out / name, tmp_path / "roots" / ("" if name == "logs" else name.rpartition("/")[2]))
    if name in ("logs/other.log", "extra.log"):
        (out / name).unlink()
        link(out / name, tmp_path / "roots" / "trainer.log")
    read, problems = seen(out)
    assert "secret" not in read
    if name == "extra.log":
        assert "does not follow a symbolic link to a file of user 0" in problems


def test_a_hard_link_to_a_file_of_roots(out: Path, tmp_path: Path) -> None:
    os.link(tmp_path / "roots" / "trainer.log", out / "logs" / "planted.log")
    read, problems = seen(out)
    assert "Step 5" in read
    assert "secret" not in read
    assert "hard link to a file of user 0" in problems


def test_links_of_the_training_are_read(out: Path) -> None:
    link(out / "logs" / "latest.log", out / "logs" / "trainer.log")
    link(out / "extra.log", out / "logs" / "trainer.log")
    assert "Step 5" in seen(out)[0]


@pytest.mark.parametrize("what", ["fifo", "link"])
def test_exchanged_between_the_look_and_the_opening(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    real = log_tail.open_file

    def flip(path: str, *, shown: bool) -> int:
        place = Path(path)
        if place.name == "trainer.log" and place.is_file() and not place.is_symlink():
            place.unlink()
            os.mkfifo(place) if what == "fifo" else link(place, tmp_path / "roots" / "trainer.log")
        return real(path, shown=shown)

    monkeypatch.setattr(log_tail, "open_file", flip)
    news = log_tail.look(sources(out), {}, from_end=False)
    assert not any(item.lines or item.old for item in news)
    assert any(item.error for item in news)


def test_what_a_rotated_log_was_is_not_read_through_a_link(out: Path, tmp_path: Path) -> None:
    log = out / "logs" / "trainer.log"
    first = log_tail.known(log_tail.look(sources(out), {}, from_end=False))
    log.rename(tmp_path / "roots" / "trainer.log.1")
    log.write_text("Step 6\n")
    own(log, T)
    with (tmp_path / "roots" / "trainer.log.1").open("a") as file:
        file.write(SECRET)
    os.chown(tmp_path / "roots" / "trainer.log.1", 0, 0)
    link(out / "logs" / "trainer.log.1", tmp_path / "roots" / "trainer.log.1")
    news = log_tail.look(sources(out), first, from_end=False)
    assert [line.text for item in news for line in item.lines] == ["Step 6"]


def test_files_that_a_command_names(out: Path, tmp_path: Path) -> None:
    (out / "run.toml").write_text("a = 1\n")
    own(out / "run.toml", T)
    link(out / "planted.toml", tmp_path / "roots" / "secret.toml")
    os.mkfifo(out / "fifo.toml")
    command = ["train", "@", "run.toml", "planted.toml", "--x=fifo.toml", str(tmp_path / "roots" / "secret.toml")]
    found = dict(config_digests(command, out))
    assert set(found) == {str(out / "run.toml"), str(tmp_path / "roots" / "secret.toml")}, "named by the operator"
    assert [
        a.name.partition("-")[2] for a in configs([str(out / n) for n in ("run.toml", "planted.toml", "fifo.toml")])
    ] == ["run.toml"]
    (tmp_path / "roots" / "sound.toml").write_text("a = 1\n")
    (out / "sound.toml").hardlink_to(tmp_path / "roots" / "sound.toml")
    assert Command(["rl", "@", "sound.toml"], out).documents == [{"a": 1}]
    assert Command(["rl", "@", "sound.toml"], out, shown=True).documents == [], "it would be shown"
    record = StartRecord("s", 0.0, (), "", config_digests=tuple(found.items()))
    assert changed_configs(record) == ()
    (out / "run.toml").unlink()
    os.mkfifo(out / "run.toml")
    assert changed_configs(record) == (str(out / "run.toml"),)


def test_an_environment_file(out: Path, tmp_path: Path) -> None:
    real = tmp_path / "roots" / ".env"
    real.write_text("A=b\n")
    real.chmod(0o600)
    assert read_env_file(real) == {"A": "b"}
    link(out / ".env", real)
    with pytest.raises(ConfigurationError, match="another user could replace"):
        read_env_file(out / ".env")
    (out / ".env").unlink()
    os.mkfifo(out / ".env", 0o600)
    with pytest.raises(ConfigurationError, match="another user could replace"):
        read_env_file(out / ".env")
