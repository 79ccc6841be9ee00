"""A dead inference server, by its own answers: for engines whose memory nobody can read, or one of several servers.

``/health`` that was 200 is refused or 503 without a break, or ``/liveness`` fails several times in a row. Neither
kills alone: a server may be restarted by its own parent, and a long weight update holds ``/liveness`` up.
"""

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import ServerKind
from podwatch.judgement.detectors import second as also
from podwatch.judgement.detectors.base import Look, Turn
from podwatch.judgement.detectors.window import Held
from podwatch.judgement.endings import Wait, announcement, operator_wait
from podwatch.judgement.learned import Learned
from podwatch.judgement.signals import Server

MIN_SAMPLES_DOWN = 2
"""Two answers of a sensor that asks every 5 s; ``hold`` is the time they must span at the least."""


class InferenceDetector:
    name = "inference"
    kinds = (FindingKind.SILENT_DEATH,)
    needs = ("inference", "trainer")
    second = ("engine process", "steps")
    survives_restart = False

    def initial(self) -> None:
        """What servers did lately is in the shared signals."""

    def armed(self, state: None, learned: Learned) -> tuple[str, ...]:
        return tuple(f"inference:{name.partition(':')[2]}" for name in learned.seen if name.startswith("health:"))

    def advance(self, state: None, look: Look) -> Turn[None]:
        trainer = look.trainer
        if trainer is None or not trainer.alive or look.ending or not look.snapshot.inference.ok:
            return Turn(None, look.learned)
        findings = []
        for server in look.signals.servers:
            down, stuck = server.down, server.stuck
            if down.samples >= MIN_SAMPLES_DOWN and down.seconds >= look.policies.detection.hold_seconds:
                findings.append(_judge(server, f"/health is {server.health}", down, look))
            elif stuck.seconds >= also.LIVENESS_WINDOW_SECONDS:
                findings.append(_judge(server, "/liveness fails again and again", stuck, look))
        return Turn(None, look.learned, tuple(findings))


DETECTOR = InferenceDetector()


def _judge(server: Server, what: str, held: Held, look: Look) -> Finding:
    assert held.since is not None
    assert look.trainer is not None
    first = Evidence(f"server {server.url}", what, Agreement.AGREES, held.seconds)
    # Memory that stays away together with a server is the silent-death detector's; one empty look at it, while a weight
    # update holds /liveness up, is nothing.
    second: tuple[Evidence, ...] = (also.engine(look, held.since),)
    if held is not server.stuck:
        # A weight update that runs into its first timeout (720 s, facts/prime-rl.md section 4) holds up both /liveness
        # and the steps, and goes on: the two together are the hang detector's, with its longer limit.
        second = (*second, also.steps(look, held.since, needed=True))
    agreeing = also.agreeing(second)
    wait = operator_wait(look.signals.endings, look.snapshot, look.trainer, held.since) if agreeing else None
    who = "the router" if server.kind is ServerKind.ROUTER else "the inference server"
    summary = f"{who} at {server.url} is dead: {what}"
    return Finding(
        FindingKind.SILENT_DEATH,
        Severity.CRITICAL if agreeing else Severity.WARNING,
        f"{summary} ({', '.join(agreeing)} agrees)" if agreeing else f"{summary}; no second signal agrees",
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
    return "" if agreeing else "not restarting; look at the inference log"
