"""What the pod of each test checks at its end would notice what it is there for."""

import subprocess
from pathlib import Path

import pytest

from tests.support.rig import Rig


def test_a_name_that_no_trainer_made_is_noticed(rig: Rig) -> None:
    """The shell stands for podwatch: what this test makes itself is noted."""
    saved = rig.output / "checkpoints" / "step_5"
    (saved / "trainer").mkdir(parents=True)
    (saved / "trainer" / ".metadata").touch()
    saved.rename(saved.with_name("step_6"))
    rig.nothing_of_podwatch()
    for name in (".podwatch", "checkpoints/step_6/trainer/lock"):
        subprocess.run(["mkdir", str(rig.output / name)], check=True)
        with pytest.raises(AssertionError, match=name):
            rig.nothing_of_podwatch()
        (rig.output / name).rmdir()
    subprocess.run(["touch", str(rig.output / "log")], check=True)
    rig.made_by_others(rig.output / "log")
    rig.nothing_of_podwatch()


def test_what_lay_there_before_podwatch_came_is_not_its_own(rig: Rig) -> None:
    subprocess.run(["mkdir", "-p", str(rig.output / "from" / "before")], check=True)
    rig.daemon()
    rig.nothing_of_podwatch()
    subprocess.run(["mkdir", str(rig.output / "after")], check=True)
    with pytest.raises(AssertionError, match="after"):
        rig.nothing_of_podwatch()
    (rig.output / "after").rmdir()


def test_two_trainers_at_once_are_noticed(rig: Rig) -> None:
    double: Path = rig.control / "double"
    double.write_text("trainer")
    with pytest.raises(AssertionError, match="two were alive"):
        rig.never_two()
    double.unlink()
