"""A program of the training user's exchanges directories for links to root's as fast as it can, while podwatch works.
Bounded by rounds, not by time: what matters is that whatever wins, root's stays root's (promise 9)."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.drivers.paths import HIDDEN, OPERATIONS, as_user
from tests.paths.hostile import Site, T, as_root, fresh, in_memory, made, own, run, saved

pytestmark = [as_root, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: a fast exchange of paths")]
ROUNDS = 15
ATTACKED = ("quarantine", "remove", "restore", "restore deep", "restore over", "trackers", "begin", "record")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("race") / "exchange"
    subprocess.run(["gcc", "-O1", "-o", built, Path(__file__).with_name("exchange.c")], check=True)
    return built


@contextmanager
def exchanging(program: Path, *pairs: tuple[Path, Path]) -> Iterator[None]:
    arguments = [str(path) for pair in pairs for path in pair]
    process = subprocess.Popen([program, str(T), *arguments], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        assert process.poll() is None, "it was at work all the time"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def pairs(site: Site) -> list[tuple[Path, Path]]:
    """Names that podwatch uses, and what T puts there: links, and the directory of root's beside output_dir."""
    found = []
    for spot in ("out/checkpoints", "out/rollouts", "out/run", "out/latest", "out/rollouts/step_9"):
        evil = site.home / ("evil-" + spot.replace("/", "-"))
        evil.symlink_to(site.above)
        found.append((own(evil, T), site.home / spot))
    return [*found, (site.beside, site.home / HIDDEN)]


@pytest.mark.parametrize("name", ATTACKED)
def test_whatever_wins_what_is_roots_stays_roots(program: Path, name: str) -> None:
    with in_memory() as memory, fresh(memory) as site:
        made(site.out / "run")
        with exchanging(program, *pairs(site)):
            for _ in range(ROUNDS):
                run(OPERATIONS[name], site)
                if not (site.out / "checkpoints" / "step_9").exists():
                    _save_again(site)
        site.unharmed()


def _save_again(site: Site) -> object:
    """As the trainer would, with its rights: renamed to its place, wherever that leads now."""
    new = saved(site.out / "new")
    with as_user(T):
        for parent in ("checkpoints", "rollouts"):
            with contextlib.suppress(OSError):
                return new.rename(site.out / parent / "step_9")
    return shutil.rmtree(new)
