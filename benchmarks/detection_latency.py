"""From the blow to the verdict, for every fault the simulated pods know, with default settings; and what the documented
rules of others give on the same traces, with the false alarms they raise on healthy ones.

    python benchmarks/detection_latency.py --deaths 40 --jobs 2 --svg docs/figures/detection.svg

The moment of the blow is spread over the phases of a step and between two polls. Fails if a fault is missed, found
later than its bound, or something else is done first.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import machine, percentile
from benchmarks.measuring.peers_rules import RULES, Peers
from benchmarks.measuring.plot import histogram, svg
from podwatch.domain.finding import Verdict
from tests.support.pods.deaths import FAULTS, SEEN_TO_END, SILENT
from tests.support.pods.shapes import SHAPES
from tests.support.pods.watching import Caught, catch, healthy_night

HORIZON = 3 * 3600.0
"""Seconds after the blow in which a peer's alarm counts; the user's own second night took this long."""


@dataclass(frozen=True, slots=True)
class Death:
    caught: Caught
    peers: dict[str, float | None]


def one(task: tuple[int, int]) -> Death:
    """One fault, one seed: podwatch's verdict, and on the same trace the first alarm of each rule after the blow."""
    number, seed = task
    fault = FAULTS[number]
    peers = Peers(fault.shape.inference)
    caught, struck = catch(fault, seed, beside=peers.look, horizon=HORIZON)
    first = {name: next((at - struck for at in alarms if at >= struck), None) for name, alarms in peers.alarms.items()}
    return Death(caught, first)


def caught_alone(task: tuple[int, int, bool]) -> Caught:
    """podwatch alone. Where ``pidfds`` is false the end of a process shows only at the next look, as on a kernel before
    5.3."""
    number, seed, pidfds = task
    return catch(FAULTS[number], seed, pidfds=pidfds)[0]


def line(what: str, caught: list[Caught], goal: str) -> float:
    """Prints one line of times; their p95."""
    times = [c.seconds for c in caught if c.seconds is not None]
    worst = percentile(times, 0.95)
    middle, longest = statistics.median(times), max(times)
    print(f"{what}: {len(times)} deaths, p50 {middle:.1f} s, p95 {worst:.1f} s, max {longest:.1f} s{goal}")
    return worst


def silent_deaths(deaths: int, run: Callable[[list[tuple[int, int, bool]]], list[Caught]]) -> int:
    """Prints the times of those that are seen to end and of those that are found by memory; 1 if a goal is missed."""

    def caught(bound: object, pidfds: bool) -> list[Caught]:
        numbers = [number for number, fault in enumerate(FAULTS) if fault.bound is bound]
        return run([(number, seed, pidfds) for number in numbers for seed in range(deaths)])

    quick, slow, late = caught(SEEN_TO_END, True), caught(SILENT, True), caught(SEEN_TO_END, False)
    print("\nsilent deaths, seconds from the fall of the memory to the verdict:")
    print(histogram([c.seconds for c in (*quick, *slow) if c.seconds is not None], 0.5))
    missed = line("engine seen to end", quick, " (goal: p95 <= 5 s)") > 5.0
    missed = line("by memory (hold)", slow, " (goal: p95 <= 12 s)") > 12.0 or missed
    line("engine seen to end, at the next look only (no pidfd)", late, "")
    return 1 if missed or not all(c.good for c in (*quick, *slow)) else 0


def false_alarms(task: tuple[int, float]) -> dict[str, int]:
    """podwatch's verdicts and the peers' alarms on the same healthy traces."""
    seed, hours = task
    # Nobody restarts it by hand: a program of theirs would be stopped together with the job.
    shape = replace(SHAPES[seed % len(SHAPES)], person=0.0)
    peers = Peers(shape.inference)
    night = healthy_night(seed, hours, shape, beside=peers.look)
    return {"podwatch": len(night.false)} | {name: len(alarms) for name, alarms in peers.alarms.items()}


def short(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=8, help="of each fault")
    parser.add_argument("--healthy", type=float, default=170.0, help="hours for the peers' false alarms")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="write the plot there")
    parser.add_argument("--silent", action="store_true", help="silent deaths only, and no peers: some minutes")
    parser.add_argument("--quick", action="store_true", help="two of each fault, for a first look")
    args = parser.parse_args()
    deaths, healthy = (2, 51.0) if args.quick else (args.deaths, args.healthy)
    began = time.monotonic()
    print(f"detection times ({machine()})")
    if args.silent:
        with ProcessPoolExecutor(args.jobs) as pool:
            return silent_deaths(deaths, lambda tasks: list(pool.map(caught_alone, tasks)))
    tasks = [(number, seed) for number in range(len(FAULTS)) for seed in range(deaths)]
    each = max(1.0, healthy / len(SHAPES))
    with ProcessPoolExecutor(args.jobs) as pool:
        found = list(pool.map(one, tasks))
        alarms = list(pool.map(false_alarms, [(seed, each) for seed in range(len(SHAPES))]))
    rows: dict[str, list[Death]] = {f.name: [] for f in FAULTS}
    for death in found:
        rows[death.caught.fault].append(death)
    print("\n" + f"{'fault':42} {'found':>7} {'p50':>8} {'p95':>8} {'max':>8} {'bound':>8}"
          + "".join(f" {name:>18}" for name in RULES))  # fmt: skip
    for fault in FAULTS:
        got = rows[fault.name]
        times = [d.caught.seconds for d in got if d.caught.seconds is not None]
        line = f"{fault.name:42} {len(times):3}/{len(got):<3}"
        for value in (statistics.median(times), percentile(times, 0.95), max(times)) if times else (None,) * 3:
            line += f" {short(value):>8}"
        line += f" {short(max(d.caught.bound for d in got)):>8}"
        for name in RULES:
            seen = [v for d in got if (v := d.peers[name]) is not None]
            text = f"{short(statistics.median(seen))} {len(seen)}/{len(got)}" if seen else "never"
            line += f" {text:>18}"
        print(line + ("   (told, not acted on)" if fault.verdict is Verdict.NONE else ""))
    hours = each * len(SHAPES)
    print(f"\nfalse alarms in {hours:.0f} healthy hours, no restart by a person in them: "
          + "; ".join(f"{name} {sum(a[name] for a in alarms)}" for name in ("podwatch", *RULES)))  # fmt: skip
    bad = [d.caught for d in found if not d.caught.good]
    for miss in bad:
        what = miss.wrong or f"after {short(miss.seconds)}, bound {short(miss.bound)}"
        print(f"  MISSED: {miss.fault}, seed {miss.seed}: {what}")
    with ProcessPoolExecutor(args.jobs) as pool:
        missed = silent_deaths(deaths, lambda tasks: list(pool.map(caught_alone, tasks)))
    if args.svg:
        args.svg.parent.mkdir(parents=True, exist_ok=True)
        args.svg.write_text(svg([
            (name, [d.caught.seconds for d in got if d.caught.seconds is not None],
             max(d.caught.bound for d in got),
             {rule: [v for d in got if (v := d.peers[rule]) is not None] for rule in RULES})
            for name, got in rows.items()
        ]))  # fmt: skip
        print(f"plot: {args.svg}")
    print(f"{len(found)} deaths, {len(bad)} missed or late; {time.monotonic() - began:.0f} s")
    return 1 if bad or missed else 0


if __name__ == "__main__":
    sys.exit(main())
