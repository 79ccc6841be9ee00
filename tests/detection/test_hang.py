"""What stands still, and what only looks like it."""

from dataclasses import replace

import pytest

from tests.detection.looks import GIB, URL, World, kills, process, world
from tests.drivers.detection import (
    Agreement,
    Desired,
    FindingKind,
    Health,
    InferenceSample,
    Learned,
    Liveness,
    ProcessRole,
    ProgressSample,
    ProgressSource,
    SensorState,
    Severity,
    Snapshot,
    Verdict,
    newest_progress_at,
    observed,
    patience_seconds,
    unobserved,
)

LIMIT = 1500.0


def stands(found: World, *, use: float = 0.0, running: float = 0.0) -> World:
    """Healthy for ten minutes, and then nothing moves."""
    found.poll = 10.0
    found.quiet(600)
    found.stepping = found.generating = False
    found.use = dict.fromkeys(found.use, use)
    for url, sample in found.inference.items():
        found.inference[url] = replace(sample, requests_running=running, requests_waiting=0.0)
    return found


def test_requests_that_get_no_token() -> None:
    finding, took = stands(world(), use=100.0, running=4.0).until_verdict(2 * LIMIT)
    assert finding.kind is FindingKind.HANG
    assert LIMIT - 20 <= took <= LIMIT + 20
    assert "generation tokens" in finding.summary


def test_idle_gpus_with_work_waiting_agree_at_once_and_without_only_later() -> None:
    """Rollouts that wait for their tools look like a stuck orchestrator; only time tells them apart."""
    found = stands(world())
    found.inference[URL] = replace(found.inference[URL], requests_waiting=3.0)
    assert found.until_verdict(2 * LIMIT)[1] <= LIMIT + 20
    assert 1790 <= stands(world()).until_verdict(2 * LIMIT)[1] <= 1830


def test_a_stopped_process_is_named_with_the_command_that_continues_it() -> None:
    found = stands(world())
    found.others = [replace(p, state="T") if p.role is ProcessRole.TRAINER else p for p in found.others]
    finding, _ = found.until_verdict(2 * LIMIT)
    assert "trainer (process 14) is stopped (state T)" in finding.summary
    assert "kill -CONT 14" in finding.summary


def test_a_run_that_never_made_a_step_is_only_reported() -> None:
    """podwatch may be unable to see its steps; everything else stands still too."""
    found = world()
    found.trainer = {"started_at": 1.0}  # the only step was before this start
    found.stepping = False
    found = stands(found, running=4.0)
    found.quiet(2 * 4200)
    (finding,) = (f for f in found.findings if f.kind is FindingKind.HANG)
    assert (finding.subject, finding.verdict) == ("start-up", Verdict.NONE)


def test_a_run_that_is_to_end_is_not_hung() -> None:
    found = stands(world(), use=100.0, running=4.0)
    found.desired = Desired.STOPPED
    found.run(2 * LIMIT)
    assert FindingKind.HANG not in found.kinds()


def test_tool_bound_rollouts_of_half_an_hour_are_no_hang() -> None:
    found = stands(world())
    found.quiet(1750)
    found.generating, found.use = True, {0: 90.0, 1: 0.0}
    found.quiet(60)
    found.stepping, found.use = True, {0: 80.0, 1: 80.0}
    found.quiet(60)


def test_an_evaluation_is_no_hang_and_not_even_a_warning_for_long() -> None:
    found = world()
    found.poll = 10.0
    found.quiet(600)
    found.stepping = False
    found.quiet(2 * LIMIT - 60)
    assert not found.findings
    found.quiet(LIMIT)
    assert [(f.kind, f.severity) for f in found.findings] == [(FindingKind.HANG, Severity.WARNING)]


def test_a_slow_step_is_slow() -> None:
    found = world(Learned(step_seconds=(400.0,) * 9, gap_seconds=(400.0,) * 9))
    found.step_seconds = 1e9
    stands(found, use=0.0, running=4.0).quiet(6 * 400 - 700)


def test_the_gpus_of_others_do_not_keep_a_hang_hidden() -> None:
    found = world(gpu__inference=(0,), gpu__trainer=(1,))
    found.memory[2], found.use[2] = 40 * GIB, 100.0
    stands(found)
    found.use[2] = 100.0
    finding, _ = found.until_verdict(2 * LIMIT)
    assert "confirmed by gpu utilisation" in finding.summary


def test_the_tree_tells_the_trainers_gpus_where_the_configuration_does_not() -> None:
    found = world()
    found.memory[2], found.use[2] = 40 * GIB, 100.0
    stands(found)
    found.use[2] = 100.0
    assert found.until_verdict(2 * LIMIT)
    # Device numbers of /proc that are not NVML's name no GPU: then all of the pod count.
    found = world()
    found.engines, found.others[2] = [process(12, ProcessRole.ENGINE, (5,))], process(14, ProcessRole.TRAINER, (6,))
    stands(found)
    found.use[1] = 100.0
    found.quiet(3 * LIMIT)


def test_a_gpu_that_always_says_zero_proves_nothing() -> None:
    found = world()
    found.use = {0: 0.0, 1: 0.0}
    stands(found).quiet(3 * LIMIT)
    assert found.kinds() == {FindingKind.HANG}


def test_liveness_agrees_after_several_failures_and_a_long_weight_update_does_not() -> None:
    found = world()
    found.inference[URL] = replace(found.inference[URL], liveness=Liveness.OK)
    stands(found, use=100.0)
    found.quiet(LIMIT - 300)
    found.inference[URL] = replace(found.inference[URL], liveness=Liveness.TIMEOUT)
    found.quiet(720)
    found.inference[URL] = replace(found.inference[URL], liveness=Liveness.OK)
    found.quiet(20)
    found.inference[URL] = replace(found.inference[URL], liveness=Liveness.UNRESPONSIVE)
    finding, took = found.until_verdict(1500)
    assert 1430 <= took <= 1460, "an update may take 2 x 720 s"
    assert "liveness" in finding.summary


def test_a_server_without_the_route_agrees_with_nothing() -> None:
    found = world()
    found.inference[URL] = replace(found.inference[URL], liveness=Liveness.UNRESPONSIVE)
    stands(found, use=100.0).quiet(3 * LIMIT)


def test_one_of_two_servers_that_hangs_is_enough() -> None:
    found = world()
    other = "http://127.0.0.1:8101"
    found.inference[other] = InferenceSample(other, Health.OK, 200, 4.0, 0.0)
    stands(found, use=100.0, running=4.0)
    found.generating = True
    stuck = found.inference[other]
    for findings in found.turns(2 * LIMIT):
        found.inference[other] = stuck
        if kills(findings):
            break
    assert "confirmed by generation tokens" in kills(found.findings)[0].summary
    assert any(other in e.value for e in found.findings[0].evidence)


def test_a_sleeping_engine_is_not_flat() -> None:
    found = stands(world(), use=100.0, running=4.0)
    found.inference[URL] = replace(found.inference[URL], asleep=True)
    found.quiet(3 * LIMIT)


def test_a_save_excuses_silence_and_not_for_ever() -> None:
    found = stands(world(), use=0.0)
    found.saving = True
    found.quiet(3500)
    assert not found.findings
    finding, took = found.until_verdict(3 * LIMIT)
    assert finding.kind is FindingKind.HANG
    assert took <= 3600 + LIMIT


def test_save_times_are_learned_and_stretch_the_excuse() -> None:
    found = world()
    for _ in range(3):
        found.quiet(20)
        found.saving = True
        found.quiet(30)
        found.saving = False
    found.quiet(4)
    assert found.state.learned.save_seconds == (30.0, 30.0, 30.0)
    slow = World(world().policies, learned=Learned(save_seconds=(2400.0,)))
    stands(slow).saving = True
    slow.quiet(7100)


def test_start_up_patience_grows_with_what_was_seen() -> None:
    def starting(startups: tuple[float, ...]) -> World:
        found = world(Learned(gap_seconds=(60.0,), startups=startups, utilization_works=True))
        found.poll, found.step, found.step_at, found.stepping = 10.0, 0, -1.0, False
        found.use = {0: 0.0, 1: 0.0}
        found.inference.clear()
        return found

    assert 4200 <= starting(()).until_verdict(4300)[1] <= 4220
    starting((2000.0,)).quiet(5900)
    assert starting((2000.0,)).until_verdict(6100)[1] >= 6000


def test_start_up_is_learned_only_by_who_watched_it() -> None:
    found = world()
    found.step, found.step_at, found.stepping = 0, -1.0, False
    found.quiet(300)
    found.stepping = True
    found.quiet(60)
    assert found.state.learned.startups == (300.0,)
    late = world()
    late.now = 7200.0
    late.quiet(60)
    assert late.state.learned.startups == ()


@pytest.mark.parametrize("line", [True, False])
def test_a_finished_run_that_stays_is_ended(line: bool) -> None:
    found = world(max_steps=40)
    found.poll = 10.0
    found.quiet(60)
    found.stepping, found.step, found.step_at = False, 40, found.now
    found.trainer = {"finish_line": line}
    found.use = {0: 0.0, 1: 100.0}  # a collective that spins
    found.run(1200)
    assert [f.verdict for f in found.findings] == ([Verdict.FINISH] if line else [])
    found.run(2600)
    assert [f.verdict for f in found.findings] == [Verdict.FINISH]
    found = world(max_steps=40)
    found.poll = 10.0
    found.quiet(60)
    found.stepping, found.step, found.step_at, found.use = False, 40, found.now, {0: 0.0, 1: 0.0}
    found.run(1000)
    assert [(f.kind, f.verdict) for f in found.findings] == [(FindingKind.FINISHED, Verdict.FINISH)]


def test_a_hole_in_the_view_is_no_silence() -> None:
    found = stands(world(), use=0.0, running=4.0)
    found.quiet(1300)
    found.readings["gpus"] = unobserved(SensorState.BLIND, found.now, "hangs")
    found.readings["inference"] = unobserved(SensorState.BLIND, found.now, "hangs")
    found.quiet(1000)
    found.readings.clear()
    found.quiet(1400)
    assert found.until_verdict(100)[0].kind is FindingKind.HANG


def test_a_router_that_answers_says_nothing_about_its_engines() -> None:
    found = world()
    found.inference[URL] = replace(found.inference[URL], generation_tokens_total=None, requests_running=None)
    found.quiet(60)
    found.memory[0] = 0
    found.quiet(60)
    (health,) = (e for e in found.findings[0].evidence if e.signal == "health")
    assert (health.agreement, "router" in health.value) == (Agreement.UNAVAILABLE, True)
    engine = "http://127.0.0.1:8100"
    found.inference[engine] = InferenceSample(engine, Health.OK, generation_tokens_total=0.0)
    found.memory[0] = 60 * GIB
    found.quiet(60)
    found.memory[0] = 0
    found.inference[engine] = InferenceSample(engine, Health.REFUSED)
    assert "health" in found.until_verdict(20)[0].summary


def test_gpus_that_spin_confirm_nothing_but_two_hours_of_it_are_critical() -> None:
    """A collective that waits for a rank, and no request in flight: told, never restarted."""
    found = stands(world(), use=100.0)
    found.quiet(1600)
    assert [(f.severity, f.confirmed) for f in found.findings if f.kind is FindingKind.HANG] == [
        (Severity.WARNING, False)
    ]
    found.quiet(5700)
    assert [(f.severity, f.verdict) for f in found.findings if f.kind is FindingKind.HANG] == [
        (Severity.CRITICAL, Verdict.NONE)
    ]


def test_one_start_of_five_hours_does_not_make_the_next_wait_for_fifteen() -> None:
    policy = world().policies
    assert patience_seconds(Learned(startups=(600.0, 1800.0)), policy) == 3 * 1800.0
    assert patience_seconds(Learned(startups=(5 * 3600.0,)), policy) == 7 * 3600.0


def test_a_server_without_requests_neither_agrees_nor_disagrees() -> None:
    finding, _ = stands(world()).until_verdict(2 * LIMIT)
    (tokens,) = [e for e in finding.evidence if e.signal == "generation tokens"]
    assert (tokens.value, tokens.agreement) == ("no request is running", Agreement.UNAVAILABLE)


class Pinged(World):
    """A trainer of which podwatch knows only checkpoints, every two hours, and that requests the heartbeat URL."""

    pinged_at = 0.0
    pinging = True

    def snapshot(self) -> Snapshot:
        if self.pinging:
            self.pinged_at = self.now
        saved, number = self.now - self.now % 7200, 10 * int(self.now // 7200)
        samples = [ProgressSample(ProgressSource.HEARTBEAT, "trainer", self.pinged_at)]
        if number and self.pinging:
            samples.append(ProgressSample(ProgressSource.CHECKPOINT, "trainer", saved, number))
        if number and not self.pinging:
            samples.append(self.last)
        self.last = samples[-1]
        self.readings["progress"] = observed(tuple(samples), self.now)
        return super().snapshot()


def test_pings_are_progress_between_checkpoints() -> None:
    """After the first checkpoint pings counted no more: a hang was reported 25 min after each save."""
    found = Pinged(world().policies)
    found.poll = 10.0
    found.quiet(5 * 7200)
    found.pinging, found.generating, found.use = False, False, {0: 0.0, 1: 0.0}
    finding, took = found.until_verdict(2 * LIMIT)
    assert finding.kind is FindingKind.HANG
    assert took <= 1830, "its limit is that of pings, not six times the two hours between saves"
    early = Pinged(world().policies, learned=Learned(gap_seconds=(20.0,)))
    early.poll = 10.0
    early.quiet(60)
    assert newest_progress_at(early.state) == early.pinged_at, "and before the first checkpoint"
    stepping = stands(world())
    ping = ProgressSample(ProgressSource.HEARTBEAT, "trainer", 0.0)
    line = ProgressSample(ProgressSource.STEP_LINE, "trainer", stepping.step_at, stepping.step)
    for _ in range(300):
        stepping.readings["progress"] = observed((line, replace(ping, at=stepping.now)), stepping.now)
        stepping.run(10.0)
    assert [f.kind for f in stepping.findings] == [FindingKind.HANG], "beside step lines any process can send pings"
