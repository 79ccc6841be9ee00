"""`--take-over` is executed by the claim that is made: both are recorded together."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from podwatch.app.backup.run_side import TAKE_OVER, RunSide
from podwatch.domain.lease import Claim, Pod
from podwatch.domain.run_state import WonClaim
from podwatch.recovery import RunFile
from podwatch.recovery.run_file import parse
from podwatch.system.own_directories import Workspace
from tests.support.clock import AutoClock


def test_the_claim_and_the_flag_are_one_edit(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "state").mkdir()
    file = RunFile(tmp_path / "state", Workspace(tmp_path / "out"), "r1", AutoClock())
    parts: Any = SimpleNamespace(file=file, layout=SimpleNamespace(table=SimpleNamespace(identity=())))
    unused = cast("Any", None)
    pod = Pod("w", "machine", "boot")
    run = RunSide(unused, parts, unused, unused, unused, unused, pod=pod, take_over="id")
    assert TAKE_OVER not in file.current.executed
    before = file.current.counter
    run.claimed(Claim(3, "nonce"))
    recorded = parse(file.path.read_bytes())
    assert (recorded.claim, recorded.executed[TAKE_OVER]) == (WonClaim(3, "nonce", "boot"), "id")
    assert recorded.counter == before + 1
    again = RunSide(unused, parts, unused, unused, unused, unused, pod=pod)
    assert again.last_claim() == Claim(3, "nonce")
    other = RunSide(unused, parts, unused, unused, unused, unused, pod=Pod("w", "machine", "boot", process="b:1:1:1"))
    assert other.last_claim() is None, "of another attempt of a job, which may live"
    file.close()
