"""The decision by ties beside the one in force: whoever judges a pod here gets a difference that nothing explains.

``EXPLAINED`` lists the differences that are meant, each with the facts that must hold for it.
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.domain.process import ProcessRole
from podwatch.trainer import find_trainers
from podwatch.trainer.operator_shells import SHELLS
from podwatch.trainer.rules import FoundTree, PodProcess, SoughtRun, classify_trees, path_tie

if TYPE_CHECKING:
    from podwatch.trainer.find_trainers import Judged, Run
    from podwatch.trainer.process_tree import Process

REPORT = "TEST_TIE_DIFFERENCES"
"""Names the file to which a podwatch that a test started appends its differences."""


def facts(process: "Process") -> PodProcess:
    """Of a tool the look at the pod never says that it names the run; some tests do."""
    role = process.role if process.runs_what_it_says else ProcessRole.OTHER
    return PodProcess(
        process.identity, process.parent_pid, process.name, process.argv, process.exe, process.cwd, process.users,
        process.group, process.session, process.tty, role, process.cuda, process.gpus, process.writes,
        "" if find_trainers.tool(process) or "is this run's" in process.names_run else process.names_run,
        podwatch=process.ours, above_podwatch=process.above_us,
    )  # fmt: skip


def sought(run: "Run") -> SoughtRun:
    return SoughtRun(run.output_dir, run.users, run.checkpoint_dir, run.gpus, tuple(run.command), run.cwd)


@dataclass(frozen=True)
class Difference:
    """One tree, or what is one tree for one decision and several for the other."""

    pids: frozenset[int]
    before: frozenset[tuple[int, str]]
    after: frozenset[tuple[int, str]]
    reasons: tuple[str, ...]
    members: tuple[PodProcess, ...]
    run: SoughtRun

    @property
    def answers(self) -> tuple[str, str]:
        """The strongest answer of each: attach, hold (wait or ask), ignore."""
        strongest = []
        for side in (self.before, self.after):
            said = {answer for _, answer in side}
            strongest.append("attach" if "attach" in said else "hold" if said else "ignore")
        return strongest[0], strongest[1]

    def any(self, check: Callable[[PodProcess], object]) -> bool:
        return any(check(p) for p in self.members)

    @property
    def asks_about_parent(self) -> bool:
        return any("may be part of it" in reason for reason in self.reasons)

    @property
    def tied(self) -> bool:
        return self.any(lambda p: path_tie(p, self.run))


_ROLES = (ProcessRole.LAUNCHER, ProcessRole.TRAINER, ProcessRole.ORCHESTRATOR)


def _is_shell(process: PodProcess) -> bool:
    words = (process.exe, process.name, *process.argv[:1])
    return any(word.rpartition("/")[2].lstrip("-") in SHELLS for word in words)


EXPLAINED: dict[str, Callable[[Difference], bool]] = {
    "a path tie and a training role attach while the trainer still loads": lambda d: (
        d.answers == ("hold", "attach") and d.tied and d.any(lambda p: p.role in _ROLES)
    ),
    "a path tie and a context attach though the script is not known to train": lambda d: (
        d.answers == ("hold", "attach") and d.tied and d.any(lambda p: p.cuda)
    ),
    "a stranger on our GPUs is not asked about: the start waits for the memory that it holds": lambda d: (
        d.answers == ("hold", "ignore") and not d.tied
    ),
    "an interactive shell is no trainer, wherever its output goes": lambda d: (
        d.answers == ("hold", "ignore") and not d.any(lambda p: path_tie(p, d.run) and not _is_shell(p))
    ),
    "neither Python nor a known trainer, and no context: it reads, or its output goes there": lambda d: (
        d.answers == ("hold", "ignore")
        and not d.any(lambda p: p.cuda or p.role in _ROLES or "python" in (p.exe or p.argv[0]))
    ),
    "a kernel's name and a command that contradict each other": lambda d: (
        d.answers[0] == "ignore"
        and not d.any(lambda p: path_tie(p, d.run) and (p.exe or p.name == p.argv[0].rpartition("/")[2][:15]))
    ),
    "what may train is waited for, whatever started it": lambda d: (
        d.answers == ("ignore", "hold")
        and not d.any(lambda p: p.role in (ProcessRole.INFERENCE, ProcessRole.ENGINE))
        and (d.tied or d.any(lambda p: p.role in _ROLES))
    ),
    "a log, a working directory or a repeated command is no tie: podwatch asks": lambda d: (
        d.answers == ("attach", "hold") and not d.tied
    ),
    "a checkpoint open for writing attaches with a training role or a context only": lambda d: (
        d.answers == ("attach", "hold") and not d.any(lambda p: p.cuda or p.role in _ROLES)
    ),
    "a Python program that is not known may be part of the tree: podwatch asks": lambda d: (
        d.answers == ("attach", "hold") and d.asks_about_parent
    ),
    "both hold, and the tree ends below a Python program that is not known": lambda d: d.answers == ("hold", "hold"),
}


def differences(processes: Iterable["Process"], run: "Run", judged: "Judged") -> list[str]:
    """Return, as text, each difference that nothing explains."""
    listed = [facts(p) for p in processes]
    by_pid = {p.pid: p for p in listed}
    trees = classify_trees(listed, sought(run))
    before = {c.launcher.pid: "attach" for c in judged.candidates} | {c.launcher.pid: "hold" for c in judged.pending}
    after = {t.top.pid: "attach" if t.answer == "attach" else "hold" for t in trees}
    return [
        f"{sorted(d.before)} -> {sorted(d.after)}: {[describe(p) for p in d.members]}"
        for d in _compared(before, after, by_pid, trees, sought(run))
        if d.before != d.after and not any(explains(d) for explains in EXPLAINED.values())
    ]


def describe(p: PodProcess) -> str:
    known = (p.cuda and "cuda", *p.writes, p.names_output and "named", p.tty and "tty", p.cwd, p.exe, p.name)
    more = [one for one in known if one]
    return f"{p.pid} of {p.parent_pid}: {' '.join(p.argv)} {more} u{p.users} g{p.group} s{p.session}"


def _compared(
    before: dict[int, str], after: dict[int, str], by_pid: dict[int, PodProcess], trees: tuple[FoundTree, ...],
    run: SoughtRun,
) -> list[Difference]:  # fmt: skip
    """One for each group of processes that either decision joins."""
    tops = before.keys() | after.keys()
    groups: dict[int, set[int]] = {}
    for top in tops:
        outer = top
        pid = top
        while pid in by_pid:
            outer = pid if pid in tops else outer
            pid = by_pid[pid].parent_pid if by_pid[pid].parent_pid != pid else 0
        groups.setdefault(outer, set()).add(top)
    found = []
    for outer, inside in groups.items():
        below, queue = {outer}, [outer]
        while queue:
            pid = queue.pop()
            new = [p.pid for p in by_pid.values() if p.parent_pid == pid and p.pid not in below]
            below.update(new)
            queue += new
        found.append(
            Difference(
                frozenset(inside),
                frozenset((pid, before[pid]) for pid in inside & before.keys()),
                frozenset((pid, after[pid]) for pid in inside & after.keys()),
                tuple(tree.reason for tree in trees if tree.top.pid in inside),
                tuple(by_pid[pid] for pid in sorted(below)),
                run,
            )
        )
    return found


def _is_random() -> bool:
    hypothesis = sys.modules.get("hypothesis")  # a podwatch that a test starts has not loaded it
    return hypothesis is not None and bool(hypothesis.currently_in_test_context())


def install() -> None:
    """From now on each judgement of this process is compared. Random pods are left out: most of them combine facts that
    no kernel shows together, and the decision has properties of its own for them."""
    plain = find_trainers.judge

    def judge(processes: Iterable["Process"], run: "Run") -> "Judged":
        listed = list(processes)
        judged = plain(listed, run)
        if not _is_random() and (found := differences(listed, run, judged)):
            report(found)
        return judged

    find_trainers.judge = judge


def report(found: list[str]) -> None:
    if path := os.environ.get(REPORT):
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in found)
    else:
        raise AssertionError("\n".join(found))
