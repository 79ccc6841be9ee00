"""Loads NVIDIA's library and calls ``nvmlInit``, in a process that can hang or crash instead of podwatch.

Run by path, as ``python -I -S -E nvml_trial_child.py LIBRARY SECONDS DESCRIPTOR``: standard library only, no podwatch
import. It writes one line per stage to DESCRIPTOR: ``loading``; then ``absent TEXT`` (the loader's message), or
``loaded`` and ``answered CODE`` (what ``nvmlInit`` returned). ``nvmlInit`` initializes no GPU, so it is cheap where the
driver keeps none initialized.
"""

import ctypes
import os
import resource
import signal
import sys


def main(library: str, seconds: str, descriptor: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a library that aborts at every trial would fill the disk
    signal.alarm(int(seconds))  # ends a hung trial when podwatch is gone

    def report(line: str) -> None:
        os.write(int(descriptor), f"{line}\n".encode(errors="replace"))

    report("loading")
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        report("absent " + str(error).replace("\n", " ")[:1_000])
        return
    report("loaded")
    init = getattr(nvml, "nvmlInitWithFlags", None)  # the call pynvml uses; missing in drivers before 396
    report(f"answered {init(0) if init is not None else 0}")


main(*sys.argv[1:])
os._exit(0)  # skip the library's own clean-up
