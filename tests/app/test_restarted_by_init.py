"""A podwatch that init restarted, because it did not respond, says so."""

import os
import re
import signal
import sys

import pytest

from podwatch.trainer import supervise
from tests.blackbox.conftest import make_rig, nvml_library, rig  # noqa: F401 - fixtures
from tests.support.asking import reasons, running, says, status, wait_reason
from tests.support.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_podwatch_that_init_restarted_after_a_freeze_says_so(rig: Rig) -> None:  # noqa: F811
    daemon = rig.daemon()
    flags = ("--run-dir", str(rig.root / "init"), "--watchdog", "10", "--abort-wait", "1", "--backoff", "0.1")
    (rig.root / "init").mkdir()
    daemon.wrapper = (sys.executable, "-I", "-S", "-E", supervise.__file__, "init", *flags, "--")
    daemon.start()
    trainer = running(daemon, rig)
    frozen = status(daemon)["daemon"]["pid"]
    assert "loop-stalled" not in reasons(daemon)
    seen = len(daemon.events())
    os.kill(frozen, signal.SIGSTOP)
    raised = daemon.wait_event("finding-raised", 40, after=seen, finding="loop-stalled", subject="restarted")
    assert raised["level"] == "warning"
    told = wait_reason(daemon, "loop-stalled")
    assert status(daemon)["daemon"]["pid"] != frozen
    found = re.match(r"podwatch did not respond for (\d+) s, and init restarted it\.", told["summary"])
    assert found is not None, told
    assert int(found[1]) >= 10
    assert "guards it again since" in says(daemon, 1)
    assert (rig.trainer_pid, len(rig.starts)) == (trainer, 1), "training was left alone"
