"""XIDs and throttled clocks."""

from podwatch.detection.warnings import meaning, xids
from podwatch.domain.finding import Finding, Severity, Verdict
from podwatch.domain.snapshot import GpuSample, HostSample, Snapshot, XidEvent, observed
from tests.drivers.detection import RuleAlone, judging

POLICIES = judging(gpu__inference=(0,), gpu__trainer=(1,))


class Desk:
    def __init__(self) -> None:
        self.rule = RuleAlone("gpu-health")
        self.now = 0.0
        self.xids: tuple[XidEvent, ...] = ()
        self.throttled: tuple[str, ...] = ()
        self.findings: dict[str, Finding] = {}

    def run(self, seconds: float) -> set[str]:
        end = self.now + seconds
        while self.now < end:
            gpus = tuple(
                GpuSample(i, f"u{i}", "H100", throttled=throttled)
                for i, throttled in ((0, self.throttled), (1, ()), (2, ()))
            )
            snapshot = Snapshot(
                at=self.now, wall=self.now, gpus=observed(gpus, self.now),
                host=observed(HostSample(1, 1, xids=self.xids, xids_watched=True), self.now),
            )  # fmt: skip
            self.findings = {f.key: f for f in self.rule.ask(snapshot, POLICIES)}
            assert all(f.verdict is Verdict.NONE for f in self.findings.values())
            self.now += 10.0
        return set(self.findings)


def test_health_is_silence() -> None:
    assert Desk().run(600.0) == set()


def test_a_programs_fault_is_a_warning_for_an_hour() -> None:
    desk = Desk()
    desk.xids = (XidEvent(0, 31, 0.0), XidEvent(0, 31, 20.0))
    assert desk.run(60.0) == {"gpu-fault:gpu0-xid31"}
    finding = desk.findings["gpu-fault:gpu0-xid31"]
    assert finding.severity is Severity.WARNING
    assert "2 times" in finding.summary
    assert desk.run(3700.0) == set()


def test_what_needs_a_reset_is_critical_and_lasts() -> None:
    desk = Desk()
    desk.xids = (XidEvent(1, 79, 0.0), XidEvent(0, 95, 0.0), XidEvent(None, 119, 0.0))
    assert desk.run(2 * 3600.0) == {"gpu-fault:gpu1-xid79", "gpu-fault:gpu0-xid95", "gpu-fault:xid119"}
    assert {f.severity for f in desk.findings.values()} == {Severity.CRITICAL}


def test_what_is_to_be_ignored_and_other_peoples_gpus_are_not_told() -> None:
    desk = Desk()
    desk.xids = (XidEvent(0, 63, 0.0), XidEvent(0, 92, 0.0), XidEvent(2, 79, 0.0))
    assert desk.run(60.0) == set()


def test_throttling_is_told_when_it_lasts() -> None:
    desk = Desk()
    desk.throttled = ("hw-thermal",)
    assert desk.run(300.0) == set()
    desk.throttled = ()
    desk.run(30.0)
    desk.throttled = ("hw-thermal",)
    assert desk.run(300.0) == set(), "a break begins the five minutes anew"
    assert desk.run(20.0) == {"gpu-throttled:gpu0"}
    assert "heat" in desk.findings["gpu-throttled:gpu0"].summary
    desk.throttled = ()
    assert desk.run(60.0) == {"gpu-throttled:gpu0"}
    assert desk.run(60.0) == set()


def test_the_table_of_xids() -> None:
    assert len(xids()) == 71
    assert "reboot the pod" in meaning(79).fix
    assert "reset the GPU" in meaning(48).fix
    assert "provider" in meaning(74).fix
    assert meaning(63).severity is None
    assert (meaning(999).fix, meaning(999).severity) == (meaning(13).fix, Severity.WARNING)
    for known in xids().values():
        assert known.what
        assert known.fix
        assert (known.shown > 0) == (known.severity is not None)
