"""Log rules that come with podwatch. A rule of the same name in the configuration replaces the one here.

Training logs quote model output, so a rule wants its words where a program's own message begins: behind a log level
that means trouble, or at the start of a line as an exception's name. Words that healthy runs write now and then need a
count. Every pattern is anchored, and quick on any line (a test measures them).
"""

from collections.abc import Sequence

from podwatch.domain.policy import LogRule

_STAMP = r"^[\d\s:.,TZ/+|-]{0,40}"
_WORSE = r"\[?(?:ERROR|CRITICAL|FATAL)\b"
_BAD = _STAMP + r"\[?(?:WARNING|WARN|ERROR|CRITICAL|FATAL)\b"
_NEAR = r".{0,200}?"
"""The words may be this far behind the level: the file and line number, and who speaks, come first."""
_RAISED = r"^(?:[A-Za-z_][\w.]{0,80}: ){0,2}"
"""The last line of a traceback: the exception's name, perhaps that of the one it was wrapped in."""
_C10D = r"^\[[EF]\d{3,4} [^\]]{1,80}\].{0,200}?"
"""PyTorch's own C++ log: ``[E821 12:00:00.123 ProcessGroupNCCL.cpp:616] [Rank 0] ...``"""
_PROGRAM = r"^[a-z][\w./()+-]{0,40}: (?:[^:]{1,80}: ){0,2}"
"""A small program that complains: ``tee: trainer.log: No space left on device``."""
_SHELL = r"^(?:\S{1,60}: line \d+: +)?\d+ "
"""The shell tells how a job of its own ended: ``/bin/bash: line 1: 12345 Killed   uv run rl``."""
_ELASTIC = r"^(?:[EWF]\d{4} [^\]]{1,160}\].{0,200}?|ERROR:torch.{0,200}?|\s*traceback +: )"

_STOPPED = rf"(?:{_BAD}{_NEAR}|{_STAMP}\[?INFO\b[^'\"]{{0,60}}?)"
"""A program that was asked to end may report it as information; model output is quoted, or further behind."""

_DEATH = ("silent-death", "required-child-exited")

SHIPPED: tuple[LogRule, ...] = (
    LogRule(
        "cuda-error",
        rf"(?:{_STAMP}{_WORSE}{_NEAR}|{_RAISED})(?:CUDA error: |CUDA driver error: |an illegal memory access|"
        r"device-side assert triggered|CUBLAS_STATUS_|CUDNN_STATUS_|cudaError)",
        critical=True,
        says="a CUDA call failed: the process that made it cannot go on",
        fix="see the lines before it; if XIDs come with it, `podwatch status` says what they mean",
        supports=(*_DEATH, "hang"),
    ),
    LogRule(
        "cuda-out-of-memory",
        rf"(?:{_STAMP}{_WORSE}{_NEAR}|{_RAISED})(?:CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|"
        r"No available memory for the cache blocks)",
        critical=True,
        says="a GPU ran out of memory",
        fix="smaller micro batches or sequences, or a lower gpu_memory_utilization; what is left over from before shows"
        " in `nvidia-smi`",
        supports=(*_DEATH, "hang"),
    ),
    LogRule(
        "nccl",
        rf"(?:{_C10D}|{_BAD}{_NEAR}|{_RAISED})(?:Watchdog caught collective operation timeout|"
        r"NCCL (?:timeout|watchdog|error|communicator was aborted)|nccl(?:System|Internal|Remote|UnhandledCuda)Error|"
        r"DistBackendError: )",
        critical=True,
        says="a collective operation between GPUs failed or timed out: the ranks wait for each other or end",
        fix="find the rank that stopped first; NCCL_DEBUG=INFO says more at the next start",
        supports=("hang", "required-child-exited"),
    ),
    LogRule(
        "api-connection-errors",
        rf"(?:{_BAD}{_NEAR}|{_RAISED})(?:APIConnectionError|APITimeoutError|openai\.APIConnectionError)",
        count=20,
        within_seconds=600.0,
        says="the orchestrator cannot reach the inference server",
        fix="see whether the server lives: `podwatch status`, and /health by hand",
        supports=("silent-death", "hang"),
    ),
    LogRule(
        "engine-dead",
        rf"(?:{_STAMP}{_WORSE}{_NEAR}|{_RAISED})(?:EngineDeadError|EngineCore (?:encountered|failed|died)|"
        r"Engine core (?:proc|initialization|process)[^|]{0,60}(?:died|failed)|AsyncLLM output_handler failed)",
        critical=True,
        says="vLLM's engine died; its API server goes on for a few seconds and then ends with exit code 0",
        fix="the reason stands some lines before, in the log of the inference server",
        supports=(*_DEATH, "hang"),
    ),
    LogRule(
        "interrupted",
        rf"(?:{_RAISED}KeyboardInterrupt\b|(?:{_STOPPED}|{_ELASTIC})(?:"
        # torchrun's "Sending process N closing signal SIGTERM" is none: it ends the other ranks so when one has failed.
        r"[Rr]eceived (?:Signals\.)?(?:SIGINT|SIGTERM|signal (?:2|15)\b|(?:2|15) death signal|interrupt signal)))",
        says="a process of the run received SIGINT or SIGTERM: an operator, or another program, is ending it",
        fix="`podwatch stop-training` ends training for good; else podwatch starts it again some minutes later",
    ),
    LogRule(
        "too-many-open-files",
        rf"(?:{_BAD}{_NEAR}|{_RAISED}|{_PROGRAM})(?:\[Errno 24\]|Too many open files|EMFILE)",
        critical=True,
        says="a process is at its limit of open files: it cannot open sockets or files any more",
        fix="[trainer] nofile = 65536 (podwatch sets it at the next start), or `ulimit -n 65536` where training starts",
        supports=(*_DEATH, "hang"),
    ),
    LogRule(
        "files-limit-low",
        rf"{_BAD}{_NEAR}Found ulimit of \d+ and failed to automatically increase",
        says="vLLM could not raise its limit of open files, and wants 65,536",
        fix="[trainer] nofile = 65536, or a higher hard limit where the pod is started",
    ),
    LogRule(
        "out-of-memory",
        rf"(?:{_STAMP}{_WORSE}{_NEAR}|{_RAISED})(?:Cannot allocate memory|\[Errno 12\]|MemoryError\b|"
        r"std::bad_alloc|DefaultCPUAllocator: can't allocate)|"
        rf"{_ELASTIC}(?:Signal 9 \(SIGKILL\)|failed \(exitcode: -9\))|{_SHELL}Killed\b",
        critical=True,
        says="a process was killed, or refused memory: the machine or the container is out of it",
        fix="see the memory in `podwatch status`; a bigger pod, fewer workers, or less in /dev/shm",
        supports=("required-child-exited",),
    ),
    LogRule(
        "bus-error",
        rf"(?:{_BAD}{_NEAR}|{_RAISED})(?:DataLoader worker .{{0,60}}?)?(?:Bus error|SIGBUS)|{_SHELL}Bus error\b",
        critical=True,
        says="a bus error: nearly always /dev/shm was full",
        fix="a bigger /dev/shm (docker --shm-size, or the pod's setting); stale /dev/shm/vllm-* may go",
        supports=("required-child-exited",),
    ),
    LogRule(
        "crashed",
        r"^(?:Fatal Python error: |\*\*\* SIG(?:SEGV|ABRT|BUS) \(@|!{3,} Segfault encountered|Segmentation fault\b)",
        critical=True,
        says="a process crashed in native code",
        fix="the stack behind that line says where",
        supports=("required-child-exited",),
    ),
    LogRule(
        "disk-full",
        rf"(?:{_BAD}{_NEAR}|{_RAISED}|{_PROGRAM})(?:\[enforce fail[^|]{{0,120}}?)?"
        r"(?:\[Errno 28\]|No space left on device|\[Errno 122\]|Disk quota exceeded)",
        critical=True,
        says="a file system is full: what was being written is broken",
        fix="`podwatch prune --dry-run` says what can go; /tmp and /dev/shm may be meant too",
    ),
    LogRule(
        "context-too-long",
        rf"{_BAD}{_NEAR}(?:maximum context length is|max_tokens.{{0,40}}too large|longer than the maximum model len)",
        count=50,
        within_seconds=600.0,
        says="the inference server refuses requests because they are longer than its context: those rollouts are lost",
        fix="seq_len and max_tokens against the server's max_model_len",
    ),
)


def effective(own: Sequence[LogRule]) -> tuple[LogRule, ...]:
    """The shipped rules with the owner's: one of the same name replaces ours, in its place."""
    mine = {rule.name: rule for rule in own}
    kept = [mine.pop(rule.name, rule) for rule in SHIPPED]
    return (*kept, *mine.values())
