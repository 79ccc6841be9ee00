"""What every benchmark here shares: how to time, how to read a process, how to say a figure with its limit."""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")


def parser(text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--quick", action="store_true", help="smaller and shorter, for a first look")
    return made


def machine() -> str:
    """The figures are worth little without it: cores, load, Python."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f}, Python {sys.version.split()[0]}"


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mib(pid: int | str = "self", field: str = "VmRSS") -> float:
    """A field of /proc/PID/status in MiB; VmHWM is the peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(share * 1000) // 1000) - 1))]


def spread(values: Sequence[float], unit: str, scale: float = 1.0) -> str:
    p50, p95, top = statistics.median(values), percentile(values, 0.95), max(values)
    return f"p50 {p50 * scale:.1f} {unit}, p95 {p95 * scale:.1f} {unit}, max {top * scale:.1f} {unit}"


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


class Figures:
    """Prints each figure beside its limit; ``code`` is 1 if one misses."""

    def __init__(self, title: str) -> None:
        self.code = 0
        print(f"{title} ({machine()})")

    def line(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def at_most(self, what: str, value: float, limit: float, unit: str) -> None:
        self._judge(what, value, limit, unit, value <= limit, "limit")

    def at_least(self, what: str, value: float, limit: float, unit: str) -> None:
        self._judge(what, value, limit, unit, value >= limit, "goal")

    def _judge(self, what: str, value: float, limit: float, unit: str, good: bool, word: str) -> None:
        self.code = self.code if good else 1
        verdict = "ok" if good else "MISSED"
        print(f"  {verdict:6} {what}: {value:.4g} {unit} ({word} {limit:g}, {value / limit:.2f} of it)", flush=True)
