"""The meaning of an NVIDIA driver XID for a training run, and the fix.

Source: NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, "Resolution Bucket (Immediate
Action)", columns A100 to GB200); the buckets are noted at each group. Codes that it calls unused are left out: an
unknown code is reported with its number.
"""

from dataclasses import dataclass
from enum import StrEnum


class XidAction(StrEnum):
    """The remedy."""

    NOTHING = "nothing"
    """For the record only (bucket IGNORE)."""
    APPLICATION = "application"
    """A fault of the program, or of the driver below it: the program dies, the GPU is healthy (RESTART_APP)."""
    RESET = "reset"
    """The GPU does not work correctly until it is reset (RESET_GPU)."""
    REBOOT = "reboot"
    """Only a reboot of the machine helps, on a rented pod another machine (RESTART_BM, RESTART_VM)."""
    HARDWARE = "hardware"
    """A cable, a link or the board (CHECK_MECHANICALS, WORKFLOW_NVLINK*): the owner of the machine must inspect it."""


@dataclass(frozen=True, slots=True)
class Xid:
    code: int
    what: str
    action: XidAction


_APPLICATION = {
    8: "the GPU stopped processing",
    11: "a command stream was corrupt",
    13: "a graphics engine exception (an illegal instruction or address in a kernel)",
    25: "a command stream was illegal",
    31: "a page fault in GPU memory (an illegal address)",
    32: "a command stream was corrupt",
    39: "a copy engine exception",
    40: "a copy engine exception",
    41: "a copy engine exception",
    60: "a video processor exception",
    68: "a video decoder exception",
    69: "a graphics engine class error",
    70: "a copy engine exception",
    71: "a copy engine exception",
    72: "a copy engine exception",
    75: "a copy engine exception",
    76: "a copy engine exception",
    77: "a copy engine exception",
    80: "data sent to the GPU was corrupt",
    85: "a copy engine exception",
    94: "an uncorrectable memory error, contained to one program",
}
# Bucket IGNORE too, but the channel is gone: the program that owned it fails (43, 44), or another XID explains it (45).
_ENDED = {
    43: "a program's work on the GPU was stopped because of its own fault",
    44: "a fault during a context switch",
    45: "a program's work was cleaned up after an earlier error",
}
_NOTHING = {
    37: "a firmware message",
    38: "a firmware message",
    63: "a memory row was remapped, or will be at the next reset",
    66: "an illegal access by the driver",
    67: "an illegal access by the driver",
    92: "many single-bit ECC errors, all corrected",
    93: "the board's InfoROM storage is worn (not fatal)",
    106: "a test message",
    107: "a test message",
    108: "an NVLink translation error at the other end",
    121: "an error on the link to the CPU, corrected",
    137: "an NVLink access without privilege",
    141: "an error on a fast path of CUDA",
    152: "an error of another engine",
    153: "an error of another engine",
    157: "a resource could not be retired",
    160: "a memory channel was retired",
    161: "a memory channel could not be retired",
}
_RESET = {
    46: "the GPU stopped processing",
    48: "an uncorrectable (double-bit) ECC error",
    62: "the GPU's own controller halted",
    64: "a memory row could not be remapped",
    95: "an uncorrectable memory error that was not contained: every program on the GPU is affected",
    109: "a context switch timed out",
    110: "a security fault",
    119: "the GPU's system processor (GSP) does not answer",
    120: "the GPU's system processor (GSP) failed",
    136: "a link could not be trained",
    140: "an unrecovered ECC error",
    143: "the GPU could not be initialised",
    154: "the driver reports that the GPU needs a recovery action",
    155: "an NVLink error",
    156: "a faulty resource is to be retired",
    158: "a fatal timeout of the GPU",
    171: "an uncorrectable error in device memory",
    172: "an uncorrectable error in on-chip memory",
}
_REBOOT = {79: "the GPU has fallen off the bus", 151: "a key could not be changed (confidential computing)"}
_HARDWARE = {
    54: "auxiliary power is not connected to the board",
    74: "an NVLink error",
    **dict.fromkeys(range(144, 151), "an NVLink error"),
}

TABLE: dict[int, Xid] = {
    code: Xid(code, what, action)
    for action, group in (
        (XidAction.APPLICATION, _APPLICATION | _ENDED),
        (XidAction.NOTHING, _NOTHING),
        (XidAction.RESET, _RESET),
        (XidAction.REBOOT, _REBOOT),
        (XidAction.HARDWARE, _HARDWARE),
    )
    for code, what in group.items()
}

_FIX = {
    XidAction.NOTHING: "nothing to do",
    XidAction.APPLICATION: "the program fails and the GPU is healthy: check the trainer's log; if this repeats on one"
    " GPU only, move to another machine",
    XidAction.RESET: "stop training and reset the GPU (`nvidia-smi --gpu-reset`), or reboot the pod; on a rented pod"
    " move to another machine",
    XidAction.REBOOT: "restarting training cannot repair it: reboot the pod or move to another machine",
    XidAction.HARDWARE: "report it to the provider of the machine (NVLink, power, cables); on a rented pod move to"
    " another machine",
}


def meaning(code: int) -> Xid:
    """The meaning of ``code``. One that is not in the catalogue counts as a program fault, the mildest class that is
    still reported."""
    return TABLE.get(code, Xid(code, "not in NVIDIA's catalogue", XidAction.APPLICATION))


def fix(action: XidAction) -> str:
    return _FIX[action]
