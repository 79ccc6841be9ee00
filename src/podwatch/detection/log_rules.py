"""The log rules that come with podwatch, and the findings for rules that matched often enough. They support verdicts
(``corroborating_signals.logs``) and never cause one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import LogMatch
from podwatch.domain.trainer_log import BAD, NEAR, RAISED, STAMP, LogRule, TrainerLog

# -- rules that come with podwatch -----------------------------------------------------------------------------------
# Those of one trainer are in its layout (``TrainerLog.errors``); here are those of programs that many trainers use. A
# rule of the same name in the configuration replaces the one here. Training logs quote model output, so a rule
# matches its words only where a program's own message begins: after a log level of WARNING or above, or at the start
# of a line as the name of an exception. Words that healthy runs log now and then need a count. Every pattern is
# anchored and fast on any line (a test measures them).

_WORSE = r"\[?(?:ERROR|CRITICAL|FATAL)\b"
_C10D = r"^\[[EF]\d{3,4} [^\]]{1,80}\].{0,200}?"
"""PyTorch's own C++ log: ``[E821 12:00:00.123 ProcessGroupNCCL.cpp:616] [Rank 0] ...``"""
_PROGRAM = r"^[a-z][\w./()+-]{0,40}: (?:[^:]{1,80}: ){0,2}"
"""An error of a command-line program: ``tee: trainer.log: No space left on device``."""
_SHELL = r"^(?:\S{1,60}: line \d+: +)?\d+ "
"""A shell's report of how its job ended: ``/bin/bash: line 1: 12345 Killed   uv run rl``."""
_ELASTIC = r"^(?:[EWF]\d{4} [^\]]{1,160}\].{0,200}?|ERROR:torch.{0,200}?|\s*traceback +: )"

_STOPPED = rf"(?:{BAD}{NEAR}|{STAMP}\[?INFO\b[^'\"]{{0,60}}?)"
"""A program that receives a signal may log it at INFO level; quoted model output does not match."""

_DEATH = ("silent-death", "required-child-exited")

SHIPPED: tuple[LogRule, ...] = (
    LogRule(
        "cuda-error",
        rf"(?:{STAMP}{_WORSE}{NEAR}|{RAISED})(?:CUDA error: |CUDA driver error: |an illegal memory access|"
        r"device-side assert triggered|CUBLAS_STATUS_|CUDNN_STATUS_|cudaError)",
        critical=True,
        says="a CUDA call failed: the process that made it cannot continue",
        fix="read the log lines before it; `podwatch status` explains any XID reported at the same time",
        supports=(*_DEATH, "hang"),
    ),
    LogRule(
        "cuda-out-of-memory",
        rf"(?:{STAMP}{_WORSE}{NEAR}|{RAISED})(?:CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|"
        r"No available memory for the cache blocks)",
        critical=True,
        says="a GPU ran out of memory",
        fix="use smaller micro batches or sequences, or a lower gpu_memory_utilization; `nvidia-smi` shows processes"
        " left over from an earlier start",
        supports=(*_DEATH, "hang"),
    ),
    LogRule(
        "nccl",
        rf"(?:{_C10D}|{BAD}{NEAR}|{RAISED})(?:Watchdog caught collective operation timeout|"
        r"NCCL (?:timeout|watchdog|error|communicator was aborted)|nccl(?:System|Internal|Remote|UnhandledCuda)Error|"
        r"DistBackendError: )",
        critical=True,
        says="a collective operation between GPUs failed or timed out: the ranks wait for each other or end",
        fix="find the rank that stopped first; set NCCL_DEBUG=INFO for details at the next start",
        supports=("hang", "required-child-exited"),
    ),
    LogRule(
        "engine-dead",
        rf"(?:{STAMP}{_WORSE}{NEAR}|{RAISED})(?:EngineDeadError|EngineCore (?:encountered|failed|died)|"
        r"Engine core (?:proc|initialization|process)[^|]{0,60}(?:died|failed)|AsyncLLM output_handler failed)",
        critical=True,
        says="vLLM's engine died; its API server runs for a few more seconds and then ends with exit code 0",
        fix="read the reason some lines before, in the log of the inference server",
        supports=(*_DEATH, "hang"),
    ),
    LogRule(
        "interrupted",
        rf"(?:{RAISED}KeyboardInterrupt\b|(?:{_STOPPED}|{_ELASTIC})(?:"
        # Not torchrun's "Sending process N closing signal SIGTERM": it stops the other ranks after a failure.
        r"[Rr]eceived (?:Signals\.)?(?:SIGINT|SIGTERM|signal (?:2|15)\b|(?:2|15) death signal|interrupt signal)))",
        says="a process of the run received SIGINT or SIGTERM: an operator or another program is stopping it",
        fix="to stop training for good: `podwatch stop-training`; otherwise podwatch restarts it some minutes later",
    ),
    LogRule(
        "too-many-open-files",
        rf"(?:{BAD}{NEAR}|{RAISED}|{_PROGRAM})(?:\[Errno 24\]|Too many open files|EMFILE)",
        critical=True,
        says="a process reached its limit of open files: it cannot open more sockets or files",
        fix="set [trainer] nofile = 65536 (applies at the next start), or `ulimit -n 65536` where training starts",
        supports=(*_DEATH, "hang"),
    ),
    LogRule(
        "files-limit-low",
        rf"{BAD}{NEAR}Found ulimit of \d+ and failed to automatically increase",
        says="vLLM could not raise its limit of open files to the 65,536 that it needs",
        fix="set [trainer] nofile = 65536, or a higher hard limit where the pod is started",
    ),
    LogRule(
        "out-of-memory",
        rf"(?:{STAMP}{_WORSE}{NEAR}|{RAISED})(?:Cannot allocate memory|\[Errno 12\]|MemoryError\b|"
        r"std::bad_alloc|DefaultCPUAllocator: can't allocate)|"
        rf"{_ELASTIC}(?:Signal 9 \(SIGKILL\)|failed \(exitcode: -9\))|{_SHELL}Killed\b",
        critical=True,
        says="a process was killed or could not allocate memory: the machine or the container is out of memory",
        fix="see the memory in `podwatch status`; use a bigger pod, fewer workers, or less of /dev/shm",
        supports=("required-child-exited",),
    ),
    LogRule(
        "bus-error",
        rf"(?:{BAD}{NEAR}|{RAISED})(?:DataLoader worker .{{0,60}}?)?(?:Bus error|SIGBUS)|{_SHELL}Bus error\b",
        critical=True,
        says="a bus error: nearly always because /dev/shm was full",
        fix="enlarge /dev/shm (docker --shm-size, or the pod's setting); delete stale /dev/shm/vllm-* files",
        supports=("required-child-exited",),
    ),
    LogRule(
        "crashed",
        r"^(?:Fatal Python error: |\*\*\* SIG(?:SEGV|ABRT|BUS) \(@|!{3,} Segfault encountered|Segmentation fault\b)",
        critical=True,
        says="a process crashed in native code",
        fix="read the stack after that line for the place",
        supports=("required-child-exited",),
    ),
    LogRule(
        "disk-full",
        rf"(?:{BAD}{NEAR}|{RAISED}|{_PROGRAM})(?:\[enforce fail[^|]{{0,120}}?)?"
        r"(?:\[Errno 28\]|No space left on device|\[Errno 122\]|Disk quota exceeded)",
        critical=True,
        says="a file system is full: the file that was being written is incomplete",
        fix="`podwatch prune --dry-run` shows what podwatch can delete; also check /tmp and /dev/shm",
    ),
    LogRule(
        "context-too-long",
        rf"{BAD}{NEAR}(?:maximum context length is|max_tokens.{{0,40}}too large|longer than the maximum model len)",
        count=50,
        within=600.0,
        says="the inference server refuses requests because they are longer than its context: those rollouts are lost",
        fix="lower seq_len or max_tokens to fit the server's max_model_len",
    ),
)


def effective(own: Sequence[LogRule], trainers: Iterable[TrainerLog] = ()) -> tuple[LogRule, ...]:
    """The rules that come with podwatch and the configured ones (``own``), which replace those of the same name."""
    mine = {rule.name: rule for rule in own}
    kept = [mine.pop(rule.name, rule) for rule in shipped(trainers)]
    return (*kept, *mine.values())


def shipped(trainers: Iterable[TrainerLog]) -> tuple[LogRule, ...]:
    """``SHIPPED`` and the known errors of ``trainers``."""
    return (*SHIPPED, *(rule for trainer in trainers for rule in trainer.errors))


# -- detector --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogRulesState:
    """The raised rules, with the time they were raised. A rule stays raised until its window contains no match."""

    raised: tuple[tuple[str, float], ...] = ()


class LogRulesDetector:
    name = "log-rules"
    kinds = (FindingKind.LOG_RULE,)
    needs = ("logs",)
    second: tuple[str, ...] = ()
    survives_restart = False

    def initial(self) -> LogRulesState:
        return LogRulesState()

    def armed(self, state: LogRulesState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: LogRulesState, look: Look) -> DetectorResult[LogRulesState]:
        reading = look.snapshot.logs
        if not reading.ok or reading.value is None:
            return DetectorResult(state, look.learned)
        if not reading.value:
            return DetectorResult(state if not state.raised else LogRulesState(), look.learned)
        rules = {rule.name: rule for rule in look.policies.log_rules}
        raised = dict(state.raised)
        findings = []
        for match in reading.value:
            rule = rules.get(match.rule)
            if rule is None:
                continue
            if not look.trains:
                continue
            if match.count >= rule.count or (match.count and match.rule in raised):
                raised.setdefault(match.rule, match.first_at)
                findings.append(_found(rule, match, look.snapshot.at))
            else:
                raised.pop(match.rule, None)
        seen = {match.rule for match in reading.value}
        return DetectorResult(
            LogRulesState(tuple(sorted((name, at) for name, at in raised.items() if name in seen))),
            look.learned,
            tuple(findings),
        )


DETECTOR = LogRulesDetector()


def _found(rule: LogRule, match: LogMatch, at: float) -> Finding:
    who = f"the {match.role}'s log" if match.role else "the trainer's log"
    times = f"{match.count} times in {rule.within / 60:.0f} minutes" if match.count > 1 else "once"
    return Finding(
        FindingKind.LOG_RULE,
        Severity.CRITICAL if rule.critical else Severity.WARNING,
        f"{rule.says or f'log rule {rule.name}'} ({rule.name}, {times} in {who}): {match.line}",
        match.first_at,
        suggestion=rule.fix,
        evidence=(Evidence(f"log: {rule.name}", match.line, Agreement.AGREES, max(0.0, at - match.first_at)),),
        subject=rule.name,
    )
