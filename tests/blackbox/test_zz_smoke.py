import pytest, time, json
from tests.support.asking import published, running, status
from tests.support.rig import Rig
from pathlib import Path

@pytest.mark.slow
def test_one(rig: Rig, elsewhere: Path) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}").start()
    running(daemon, rig, step=5)
    published(daemon, 40)
    print([ (e["podwatch_event"], e.get("event") or e.get("message")) for e in daemon.events()][-30:])
    print(sorted(str(p.relative_to(elsewhere)) for p in elsewhere.rglob("*") if p.is_file()))
    daemon.stop()
    daemon.start()
    newest = rig.saved[-1]
    time.sleep(3)
    published(daemon, 60, step=rig.saved[-1])
    print([ (e["podwatch_event"], e.get("event") or e.get("message")) for e in daemon.events()][-30:])
    print(json.dumps(status(daemon)["sync"])[:1500])
