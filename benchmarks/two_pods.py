"""Two pods on one run: the protocol over random schedules on a simulated store and clock, beside what is promised.

``python benchmarks/two_pods.py [--schedules 5000]``: pods freeze (also in the middle of a write), die, are preempted,
lose the store, start twice at once; requests are slow, late and lost. podwatch.sync.lease.protocol runs as it is.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.two_pods import Outcome, run


def one(seed: int) -> Outcome:
    return run(seed, exclusive=seed % 4 == 0)


def longest(values: list[float]) -> str:
    return f"{max(values):.0f} s" if values else "-"


def median(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} s" if values else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(one, range(arguments.schedules), chunksize=20))
    hours = sum(o.hours for o in outcomes)
    problems = [p for o in outcomes for p in o.problems]
    twice = [t for o in outcomes for t in o.twice]
    reasons = Counter(why or "all podwatches ran and reached the store" for _, why in twice)
    knowing = [s for o in outcomes for s in o.knowing]
    back = [b for o in outcomes for b in o.set_back]
    repaired = [s for _, s in back]
    healthy = [o for o in outcomes if not o.twice and not o.refused and not o.takeovers and o.published]
    print(f"{len(outcomes)} schedules, {hours:.0f} simulated hours, in {time.monotonic() - began:.0f} s")
    rows = [
        ("two pods that hold one generation", str(len(problems)), "never"),
        ("spans in which two trained", str(len(twice)), "until the loser reaches the store"),
        *(
            (f"  {why}", f"{n}, longest {longest([s for s, w in twice if (w or why) == why])}", "")
            for why, n in reasons.items()
        ),
        (
            "  of it while both could know",
            f"longest {longest(knowing)}, median {median(knowing)}",
            "a heartbeat or two",
        ),
        ("pointer set back by a writer that was not frozen", str(sum(w != FROZEN for w, _ in back)), "never"),
        ("pointer set back by a frozen one", str(sum(w == FROZEN for w, _ in back)), "once per frozen write"),
        ("  repaired after", f"longest {longest(repaired)}, median {median(repaired)}", "the owner's next heartbeat"),
        ("runs taken over from a pod that vanished", str(sum(o.takeovers for o in outcomes)), ""),
        ("  from first look to training", median([w for o in outcomes for w in o.waited]), "5 min and 100 s (B2)"),
        ("starts refused, the holder being alive", str(sum(o.refused for o in outcomes)), "exit 75"),
        ("trainers stopped because superseded", str(sum(o.superseded for o in outcomes)), ""),
        ("pointers published", str(sum(o.published for o in outcomes)), ""),
    ]
    if healthy:
        alone = sum(o.hours for o in healthy)
        rows.append(("class C calls per hour, nothing wrong", f"{sum(o.lists for o in healthy) / alone:.1f}", "few"))
        rows.append(
            ("class B calls per hour, nothing wrong", f"{sum(o.reads for o in healthy) / alone:.0f}", "about 100 free")
        )
    width = max(len(what) for what, _, _ in rows)
    for what, found, promised in rows:
        print(f"{what:<{width}}  {found:<34}  {promised}".rstrip())
    for problem in problems[:5]:
        print("PROBLEM", problem)
    return 1 if problems else 0


FROZEN = "frozen in the middle of a request"

if __name__ == "__main__":
    raise SystemExit(main())
