"""A cluster that is started before training, and one that is ended after it: both with the whole podwatch."""

import pytest

from tests.support.asking import confirmed, messages, running
from tests.support.rig import Rig, alive

pytestmark = pytest.mark.slow

CLUSTER = (
    "setsid sh -c 'echo $$ >> {0}; exec sleep 600' > /dev/null 2>&1 & while ! kill -0 $(tail -n 1 {0}); do :; done"
)


def test_a_cluster_beside_the_trainer(rig: Rig) -> None:
    pids, also = rig.root / "clusters", rig.root / "also"
    pids.touch()
    daemon = rig.daemon(
        trainer__start_before=[["sh", "-c", f"test -s {also} || test ! -s {pids}"], ["sh", "-c", CLUSTER.format(pids)]],
        trainer__stop_also=[["sh", "-c", f"echo $PODWATCH_RUN_ID:$B2_APPLICATION_KEY >> {also}"], ["false"]],
    ).start()
    running(daemon, rig, step=5)
    seen = len(daemon.events())
    rig.kill("trainer")
    confirmed(daemon, after=seen)
    old, new = [int(line) for line in pids.read_text().split()]
    assert not alive(old), "the first cluster ended with its trainer"
    assert alive(new), "and the second trainer has one of its own"
    assert len(also.read_text().splitlines()) == 1
    warnings = [text for text in messages(daemon, "trainer-stopping") if "stop_also" in text]
    assert warnings == ["trainer.stop_also: false ended with code 1: "], (
        "a command that fails is told, and holds nothing up"
    )

    def planned() -> str:
        said = daemon.command("restart", "--dry-run").stdout
        return "" if said.startswith("not possible") else said  # what the new trainer has just saved settles

    rig.order(wait=True)  # on a slow machine the next save comes before the last one has settled
    plan = daemon.wait_for(planned, 30, "a plan")
    rig.obey()
    assert plan.index("stop also false") < plan.index("prepares  sh -c") < plan.index("command   "), plan
    stopped = daemon.command("stop-training")
    assert stopped.returncode == 0, stopped.stderr
    daemon.wait_for(lambda: not alive(new) and len(also.read_text().splitlines()) == 2, 30, "all of it has ended")
