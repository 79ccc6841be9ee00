"""`--take-over` is executed by the claim that is won: both are recorded together."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from podwatch.daemon.store_wiring import TAKE_OVER, SyncedRun
from podwatch.domain.run_state import WonClaim
from podwatch.recovery import RunFile
from podwatch.recovery.run_file import parse
from podwatch.system.own_directories import Workspace
from tests.support.clock import AutoClock


def test_the_claim_and_the_flag_are_one_edit(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "state").mkdir()
    file = RunFile(tmp_path / "state", Workspace(tmp_path / "out"), "r1", AutoClock())
    parts: Any = SimpleNamespace(file=file)
    unused = cast("Any", None)
    run = SyncedRun(unused, parts, unused, unused, unused, unused, take_over="id")
    assert TAKE_OVER not in file.current.executed
    before = file.current.counter
    run.won(WonClaim(3, "nonce"))
    recorded = parse(file.path.read_bytes())
    assert (recorded.claim, recorded.executed[TAKE_OVER]) == (WonClaim(3, "nonce"), "id")
    assert recorded.counter == before + 1
    file.close()
