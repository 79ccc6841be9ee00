"""How many healthy hours pass without a restart being asked for?

    python benchmarks/false_restarts.py --hours 10000 --jobs 2

Generates healthy runs of every shape in tests/support/pods (slow steps, evaluations, saves, weight updates, sleeping
engines, tool-bound rollouts, restarts by a person, shared and foreign GPUs, partial sensors, hung NVML, stalls,
suspend, clock jumps, restarts of podwatch, engines and servers that are replaced, operators who end a run in every way
that takes up to a minute) and puts every snapshot through the detectors. Without an event in N hours
the rate is below 3/N with 95 % confidence (rule of three): 10,000 hours bound it at 3e-4 an hour. The hours are
simulated: they say what the rules do with the oddities that the generator knows, not what a machine can invent.
"""

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import machine
from tests.support.pods.shapes import SHAPES
from tests.support.pods.watching import Night, healthy_night

CHUNK_HOURS = 20.0
"""Long enough for every rare thing to meet every other, short enough to spread over the processes."""


def night_of(seed: int, hours: float, ends: float) -> Night:
    shape = SHAPES[seed % len(SHAPES)]
    if ends != 1.0:  # and quick starts: else these hours hold little else
        shape = replace(shape, person=shape.person * ends, reload=shape.reload * ends, load=(20.0, 60.0))
    return healthy_night(seed, hours, shape)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1000.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ends", type=float, default=1.0, help="so much more often runs end and engines are replaced")
    parser.add_argument("--quick", action="store_true", help="one short run of each shape, for a first look")
    args = parser.parse_args()
    chunk = 3.0 if args.quick else CHUNK_HOURS
    runs = len(SHAPES) if args.quick else max(1, round(args.hours / chunk))
    print(f"healthy hours ({machine()})")
    began = time.monotonic()
    nights: dict[str, list[Night]] = {shape.name: [] for shape in SHAPES}
    done = told = 0.0
    with ProcessPoolExecutor(args.jobs) as pool:
        for seed, night in enumerate(
            pool.map(partial(night_of, hours=chunk, ends=args.ends), range(args.seed, args.seed + runs)), args.seed
        ):
            nights[SHAPES[seed % len(SHAPES)].name].append(night)
            done += night.hours
            if done >= told + 1000.0:
                told = done
                print(f"  {done:.0f} h after {time.monotonic() - began:.0f} s", flush=True)
            for shape, run, at, said in night.false:
                print(f"  FALSE VERDICT: {shape}, seed {run}, {at:.0f} s: {said}", flush=True)
    took = time.monotonic() - began
    for name, found in nights.items():
        warnings: Counter[str] = Counter()
        for night in found:
            warnings.update(night.warnings or {})
        turns = sum(n.turns for n in found) or 1
        said = ", ".join(f"{kind} {count / turns:.2%}" for kind, count in warnings.most_common(4))
        false = sum(len(n.false) for n in found)
        print(f"  {name:46} {sum(n.hours for n in found):7.0f} h  {false} false  turns with: {said or 'nothing'}")
    hours, every = runs * chunk, [n for found in nights.values() for n in found]
    turns, false = sum(n.turns for n in every), sum(len(n.false) for n in every)
    ended, replaced = sum(n.ended for n in every), sum(n.replaced for n in every)
    print(f"in them {ended} runs were ended by an operator and {replaced} engines replaced")
    print(f"{hours:.0f} healthy hours, {turns} turns in {took:.0f} s ({took * args.jobs / turns * 1e6:.0f} us a turn)")
    if not false:
        print(f"no false verdict: the rate is below {3 / hours:.1e} an hour (95 %, rule of three)")
        return 0
    print(f"{false} FALSE VERDICTS")
    return 1


if __name__ == "__main__":
    sys.exit(main())
