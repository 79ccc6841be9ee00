"""Dead inference servers, judged by their HTTP answers: for engines whose GPU memory cannot be read, and for one of
several servers.

``/health`` was 200 and is now refused or 5xx at every request, or ``/liveness`` fails several times in a row. Neither
alone leads to a restart: a server can be restarted by its own parent, and a long weight update blocks ``/liveness``.
"""

from podwatch.detection import corroborating_signals as also
from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.detection.operator_ends import Wait, announcement, operator_wait
from podwatch.detection.signals import Server
from podwatch.detection.windows import Held
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import ServerKind

MIN_SAMPLES_DOWN = 2
"""Two answers of a sensor that asks every 5 s; they must span at least ``hold``."""


class InferenceDetector:
    name = "inference"
    kinds = (FindingKind.SILENT_DEATH,)
    needs = ("inference", "trainer")
    second = ("engine process", "steps")
    survives_restart = False

    def initial(self) -> None:
        """No state of its own: the recent answers of the servers are in the shared signals."""

    def armed(self, state: None, learned: Learned) -> tuple[str, ...]:
        return tuple(f"inference:{name.partition(':')[2]}" for name in learned.seen if name.startswith("health:"))

    def advance(self, state: None, look: Look) -> DetectorResult[None]:
        trainer = look.trainer
        if trainer is None or not trainer.alive or look.ending or not look.snapshot.inference.ok:
            return DetectorResult(None, look.learned)
        findings = []
        for server in look.signals.servers:
            down, stuck = server.down, server.stuck
            if down.samples >= MIN_SAMPLES_DOWN and down.seconds >= look.policies.gpu.hold:
                findings.append(_judge(server, f"/health is {server.health}", down, look))
            elif stuck.seconds >= also.LIVENESS_WINDOW_SECONDS:
                findings.append(_judge(server, "/liveness fails repeatedly", stuck, look))
        return DetectorResult(None, look.learned, tuple(findings))


DETECTOR = InferenceDetector()


def _judge(server: Server, what: str, held: Held, look: Look) -> Finding:
    assert held.since is not None
    assert look.trainer is not None
    first = Evidence(f"server {server.url}", what, Agreement.AGREES, held.seconds)
    # GPU memory is not used here: the silent-death detector judges it, and a single reading of empty memory during a
    # weight update that blocks /liveness proves nothing.
    second: tuple[Evidence, ...] = (also.engine(look, held.since),)
    if held is not server.stuck:
        # A weight update that reaches its first timeout (720 s in prime-rl) blocks both /liveness and the steps, then
        # continues: the hang detector judges the two together, with its longer limit.
        second = (*second, also.steps(look, held.since, needed=True))
    agreeing = also.agreeing(second)
    wait = operator_wait(look.signals.endings, look.snapshot, look.trainer, held.since) if agreeing else None
    who = "the router" if server.kind is ServerKind.ROUTER else "the inference server"
    summary = f"{who} at {server.url} is dead: {what}"
    return Finding(
        FindingKind.SILENT_DEATH,
        Severity.CRITICAL if agreeing else Severity.WARNING,
        f"{summary} (confirmed by {', '.join(agreeing)})" if agreeing else f"{summary}; no corroborating signal",
        held.since,
        suggestion=_suggestion(agreeing, wait),
        verdict=Verdict.RESTART if agreeing else Verdict.NONE,
        confirmed=bool(agreeing) and wait is None,
        evidence=(first, *second, *also.logs(look, "silent-death")),
        subject=server.url,
    )


def _suggestion(agreeing: list[str], wait: Wait | None) -> str:
    if wait is not None:
        return announcement(wait)
    return "" if agreeing else "podwatch does not restart training; check the inference log"
