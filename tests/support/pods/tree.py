"""Processes of a trainer's tree."""

from tests.drivers.detection import ProcessIdentity, ProcessRole, ProcessSample


def process(
    pid: int, role: ProcessRole, gpus: tuple[int, ...] = (), cuda: bool | None = None, *, parent: int = 10,
    command: str = "", name: str = "",
) -> ProcessSample:  # fmt: skip
    held = bool(gpus) if cuda is None else cuda
    return ProcessSample(
        ProcessIdentity(pid, pid * 10), parent, name or role.value, command or role.value, role, "S", held,
        frozenset(gpus),
    )  # fmt: skip


LAUNCHER = process(10, ProcessRole.LAUNCHER, parent=1)
SERVER = process(11, ProcessRole.INFERENCE)
ENGINE = process(12, ProcessRole.ENGINE, (0,), parent=11)
ORCHESTRATOR = process(13, ProcessRole.ORCHESTRATOR)
TRAINER = process(14, ProcessRole.TRAINER, (1,))
