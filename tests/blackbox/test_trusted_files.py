"""Another user of the machine chooses which file podwatch reads as its configuration, or as a file of its secrets: by a
directory of theirs, a link, a name in a shared directory. Nothing of it is used, and the message names the place.

Needs root: what the other user has made is made here in their name.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.strangers import UID, needs_root

pytestmark = needs_root

REFUSED = 78


class Machine:
    """``etc`` is root's; ``home`` is the other user's; ``shared`` is like /tmp; ``open`` is root's with mode 0777."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, mode in (("etc", 0o755), ("home", 0o755), ("shared", 0o1777), ("open", 0o777)):
            (root / name).mkdir()
            (root / name).chmod(mode)
        os.chown(root / "home", UID, UID)
        self.env_file = self.write(root / "etc" / "env", "TOKEN=of-nobody-0123456789\n", 0o600)
        self.real = self.config(root / "etc" / "podwatch.toml")

    def write(self, path: Path, text: str, mode: int = 0o644) -> Path:
        path.write_text(text)
        path.chmod(mode)
        return path

    def config(self, path: Path, more: str = "", env_file: Path | None = None) -> Path:
        """A configuration of root's."""
        return self.write(path, f"""
run_id = "r"
state_dir = "{self.root}/state"
{more}
[trainer]
output_dir = "{self.root}/out"
command = ["true"]
env_file = "{env_file or self.env_file}"
""")  # fmt: skip

    def link(self, path: Path, target: Path | str, uid: int = UID) -> Path:
        path.symlink_to(target)
        os.lchown(path, uid, uid)
        return path

    def podwatch(self, *words: str, cwd: Path | None = None, **environ: str) -> "subprocess.CompletedProcess[str]":
        usual = {"PATH": os.environ["PATH"], "HOME": str(self.root), "PODWATCH_RUNTIME_DIR": str(self.root / "run")}
        command = [sys.executable, "-m", "podwatch", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd or "/", env=usual | environ
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def in_their_directory(machine: Machine) -> Path:
    return machine.config(machine.root / "home" / "podwatch.toml")


def their_link_to_roots_file(machine: Machine) -> Path:
    return machine.link(machine.root / "home" / "podwatch.toml", machine.real)


def roots_link_in_their_directory(machine: Machine) -> Path:
    return machine.link(machine.root / "home" / "podwatch.toml", machine.real, uid=0)


def below_their_directory(machine: Machine) -> Path:
    """Root's directory, which they can rename."""
    (machine.root / "home" / "conf").mkdir()
    return machine.config(machine.root / "home" / "conf" / "podwatch.toml")


def through_their_link_to_a_directory(machine: Machine) -> Path:
    machine.link(machine.root / "home" / "conf", machine.root / "etc")
    return machine.root / "home" / "conf" / "podwatch.toml"


def by_a_link_of_roots_into_their_directory(machine: Machine) -> Path:
    machine.config(machine.root / "home" / "podwatch.toml")
    return machine.link(machine.root / "etc" / "link.toml", machine.root / "home" / "podwatch.toml", uid=0)


def by_a_link_that_passes_their_directory(machine: Machine) -> Path:
    """It leads back into root's directory; the name ``back`` is theirs."""
    machine.link(machine.root / "home" / "back", machine.root / "etc")
    return machine.link(machine.root / "etc" / "link.toml", "../home/back/podwatch.toml", uid=0)


def back_out_of_their_directory(machine: Machine) -> Path:
    """With ``..``: what lies above is root's, what is entered is a name that they can replace."""
    (machine.root / "home" / "conf").mkdir()
    return machine.root / "home" / "conf" / ".." / ".." / "etc" / "podwatch.toml"


def their_link_in_a_shared_directory(machine: Machine) -> Path:
    return machine.link(machine.root / "shared" / "podwatch.toml", machine.real)


def a_hard_link_in_a_shared_directory(machine: Machine) -> Path:
    os.link(machine.real, machine.root / "shared" / "podwatch.toml")
    return machine.root / "shared" / "podwatch.toml"


def their_directory_in_a_shared_one(machine: Machine) -> Path:
    (machine.root / "shared" / "conf").mkdir()
    os.chown(machine.root / "shared" / "conf", UID, UID)
    return machine.link(machine.root / "shared" / "conf" / "podwatch.toml", machine.real)


def roots_file_that_they_moved_into_a_shared_directory(machine: Machine) -> Path:
    """From a directory of theirs, where root's program had written it."""
    moved = machine.config(machine.root / "home" / "log")
    return moved.rename(machine.root / "shared" / "podwatch.toml")


def in_a_directory_that_everybody_writes(machine: Machine) -> Path:
    return machine.config(machine.root / "open" / "podwatch.toml")


def in_a_directory_that_a_group_writes(machine: Machine) -> Path:
    (machine.root / "open").chmod(0o775)
    return in_a_directory_that_everybody_writes(machine)


HOSTILE = [
    in_their_directory, their_link_to_roots_file, roots_link_in_their_directory, below_their_directory,
    through_their_link_to_a_directory, by_a_link_of_roots_into_their_directory, by_a_link_that_passes_their_directory,
    back_out_of_their_directory, their_link_in_a_shared_directory, a_hard_link_in_a_shared_directory,
    their_directory_in_a_shared_one, roots_file_that_they_moved_into_a_shared_directory,
    in_a_directory_that_everybody_writes, in_a_directory_that_a_group_writes,
]  # fmt: skip
hostile = pytest.mark.parametrize("place", HOSTILE, ids=lambda one: one.__name__)


@hostile
def test_a_configuration_that_another_user_could_choose(machine: Machine, place: Callable[[Machine], Path]) -> None:
    path = place(machine)
    done = machine.podwatch("-c", str(path), "config", "validate")
    said = done.stdout + done.stderr
    assert done.returncode == REFUSED, said
    assert str(machine.root) in said, "it names the place"
    assert "another user" in said, said


def test_it_is_not_found_in_the_current_directory_either(machine: Machine) -> None:
    their_link_to_roots_file(machine)
    assert machine.podwatch("check", cwd=machine.root / "home").returncode == REFUSED


@pytest.mark.parametrize(
    "place",
    [in_their_directory, their_link_to_roots_file, a_hard_link_in_a_shared_directory],
    ids=lambda one: one.__name__,
)
def test_a_file_of_secrets_that_another_user_could_choose(machine: Machine, place: Callable[[Machine], Path]) -> None:
    """The file that [trainer] env_file names is read in the same way."""
    machine.write(machine.real, "TOKEN=chosen-by-them-0123456789\n", 0o600)
    path = place(machine)
    if path.is_file() and not path.is_symlink() and not path.samefile(machine.real):
        machine.write(path, "TOKEN=chosen-by-them-0123456789\n", 0o600)
    config = machine.config(machine.root / "etc" / "other.toml", env_file=path)
    done = machine.podwatch("-c", str(config), "check", "--json")
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "another user" in said, said
    assert "chosen-by-them" not in said


def test_what_only_root_can_have_put_there_is_used(machine: Machine) -> None:
    """Also through links of root's, and in a directory of root's in a shared one with the sticky bit."""
    (machine.root / "shared" / "roots").mkdir()
    shared = machine.config(machine.root / "shared" / "roots" / "podwatch.toml")
    inside = machine.link(machine.root / "etc" / "link.toml", "podwatch.toml", uid=0)
    linked = machine.link(machine.root / "shared" / "roots" / "link.toml", machine.real, uid=0)
    for path in (machine.real, shared, inside, linked, machine.root / "etc" / ".." / "etc" / "podwatch.toml"):
        done = machine.podwatch("-c", str(path), "config", "validate")
        assert done.returncode == 0, done.stderr


def test_a_loop_of_links_ends(machine: Machine) -> None:
    loop = machine.link(machine.root / "etc" / "a", "b", uid=0)
    machine.link(machine.root / "etc" / "b", "a", uid=0)
    assert machine.podwatch("-c", str(loop), "config", "validate").returncode == REFUSED


@pytest.mark.parametrize("their", ["home", "home/lib", "shared"])
@pytest.mark.parametrize("command", ["config validate", "run --set mode=x"])
def test_modules_of_another_user_are_not_imported(machine: Machine, their: str, command: str) -> None:
    """By an entry of PYTHONPATH that they own, below a directory that they own, or to which they can add names; neither
    by the command nor by the process in which `podwatch run` loads the configuration."""
    entry = machine.root / their
    entry.mkdir(exist_ok=True)
    for module in ("tomllib", "pathlib", "pickle", "subprocess"):
        (entry / f"{module}.py").write_text(f"open({str(machine.root / 'ran')!r}, 'w')\nraise SystemExit(99)\n")
    done = machine.podwatch("-c", str(machine.real), *command.split(), PYTHONPATH=f":{entry}:", cwd=entry)
    assert done.returncode == (0 if "validate" in command else REFUSED), done.stderr
    assert not (machine.root / "ran").exists()
    assert "PYTHONPATH" in done.stderr
    assert str(entry) in done.stderr


@pytest.mark.parametrize("their", ["program", "packages"])
def test_a_python_of_another_user_is_not_run(machine: Machine, their: str) -> None:
    """[wandb] python, which ``check`` and the daemon would run; nor root's that imports their packages."""
    place = machine.root / ("home" if their == "program" else "etc") / "bin"
    place.mkdir()
    python = machine.write(place / "python", f"#!/bin/sh\ntouch {machine.root}/ran\necho 0.19.0\n", 0o755)
    packages = place.parent / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    os.chown(packages, UID, UID)
    config = machine.config(
        machine.root / "etc" / "other.toml", more=f'wandb.enabled = true\nwandb.python = "{python}"'
    )
    done = machine.podwatch("-c", str(config), "check", "--json")
    (line,) = [line for line in json.loads(done.stdout)["checks"] if line["name"] == "wandb run"]
    assert line["level"] == "fail", line
    assert "another user" in line["text"]
    assert not (machine.root / "ran").exists()
