"""How many healthy hours pass without a restart being asked for?

    python benchmarks/false_restarts.py --hours 10000 --jobs 2

Generates healthy runs with saves, evaluations, slow steps, weight swaps, sleeping engines, blind sensors and stalls
of our own loop, and puts every snapshot through the detectors. Without an event in N hours the rate is below 3/N with
95 % confidence (rule of three): 10,000 hours bound it at 3e-4 an hour. The hours are simulated; they say what the
rules do with the oddities that the generator knows, not what a machine can invent.
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from podwatch.domain.finding import Verdict
from podwatch.domain.policy import DetectionPolicy
from podwatch.judgement.watch import advance, initial
from tests.judgement.pod import Pod

STEP_SECONDS = (2.0, 20.0, 60.0, 200.0, 300.0, 600.0)
CHUNK_HOURS = 50.0


def one(seed: int) -> tuple[int, int, int]:
    """One run: (turns, verdicts that would act, warnings)."""
    policy = DetectionPolicy(inference_gpus=(0,))
    state = initial(policy)
    turns = acting = warnings = 0
    for snapshot in Pod(seed, step_seconds=STEP_SECONDS[seed % len(STEP_SECONDS)]).snapshots(CHUNK_HOURS):
        state, findings = advance(state, snapshot, policy)
        turns += 1
        acting += any(f.verdict is not Verdict.NONE for f in findings)
        warnings += bool(findings)
    return turns, acting, warnings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=500.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="100 hours, for a first look")
    args = parser.parse_args()
    runs = max(1, round((100.0 if args.quick else args.hours) / CHUNK_HOURS))
    began = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        results = list(pool.map(one, range(args.seed, args.seed + runs)))
    hours = runs * CHUNK_HOURS
    turns, acting, warnings = (sum(column) for column in zip(*results, strict=True))
    print(f"{hours:.0f} healthy hours, {turns} turns, {time.monotonic() - began:.0f} s")
    print(f"turns with a verdict that acts: {acting}; with a warning: {warnings} ({warnings / turns:.3%})")
    if not acting:
        print(f"false restarts: below {3 / hours:.1e} an hour (95 %, rule of three)")
    return 1 if acting else 0


if __name__ == "__main__":
    sys.exit(main())
