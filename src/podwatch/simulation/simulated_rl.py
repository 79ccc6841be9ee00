"""The simulated ``rl``: starts inference, orchestrator and trainer, and watches them as prime-rl does.

That is: only a child that ends with a code other than 0 counts as a failure, and the run is finished when orchestrator
and trainer have ended. The end of an inference server with code 0 is ignored.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from podwatch.simulation.run_files import RunConfig, load_run, say


def launch(config: RunConfig, argv: Sequence[str], bin_dir: Path) -> int:
    """0 when orchestrator and trainer both ended with 0, else 1."""
    _check_directory(config)
    commands = {
        "inference": [sys.executable, "-S", str(bin_dir / "inference"), *argv],
        "orchestrator": [sys.executable, "-S", str(bin_dir / "orchestrator"), *argv],
        "trainer": [sys.executable, "-S", str(bin_dir / "torchrun"), "-m", "prime_rl.trainer.rl.train", *argv],
    }
    children: dict[str, subprocess.Popen[bytes]] = {}
    errors: list[str] = []
    for role, command in commands.items():
        log = config.log(role)
        log.parent.mkdir(parents=True, exist_ok=True)
        say("INFO", f"Starting {role} process")
        if role == "trainer":
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            threading.Thread(target=_tee, args=(child, log), daemon=True).start()
        else:
            with log.open("wb") as file:
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        children[role] = child
        threading.Thread(target=_watch, args=(role, child, errors), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: errors.append("terminated"))
    while not errors and any(children[role].poll() is None for role in ("orchestrator", "trainer")):
        time.sleep(0.05)
    for error in errors:
        say("ERROR", error)
    for child in children.values():
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + 10
    for child in children.values():
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if errors:
        return 1
    say("SUCCESS", "RL training finished!")
    return 0


def _watch(role: str, child: "subprocess.Popen[bytes]", errors: list[str]) -> None:
    code = child.wait()
    if code != 0:
        errors.append(f"{role} process failed with exit code {code}")


def _tee(child: "subprocess.Popen[bytes]", log: Path) -> None:
    """Copy the trainer's lines to its log and to this process's output."""
    assert child.stdout is not None
    with log.open("wb", buffering=0) as file:
        for line in child.stdout:
            file.write(line)
            try:
                os.write(1, line)
            except OSError:
                continue


def _check_directory(config: RunConfig) -> None:
    """Refuse a directory that was used before at a fresh start, as prime-rl does."""
    if config.resume_step is None and config.output_dir.is_dir() and any(config.output_dir.iterdir()):
        raise SystemExit(f"FileExistsError: {config.output_dir} is not empty; pass --clean or --resume")


# -- entry points of all simulated processes -------------------------------------------------------------------------


# Their scripts have prime-rl's names, because a console script's name is its process name. Standard library only.

PROGRAMS = ("rl", "inference", "orchestrator", "torchrun")
_SCRIPT = """\
import sys
sys.path.insert(0, {source!r})
from podwatch.simulation.simulated_rl import main
raise SystemExit(main({program!r}, sys.argv[1:]))
"""


def write_programs(bin_dir: Path) -> None:
    """Write ``bin/rl`` and the others; they need no installed package and no site directory."""
    bin_dir.mkdir(parents=True, exist_ok=True)
    source = str(Path(__file__).parents[2])
    for program in PROGRAMS:
        (bin_dir / program).write_text(_SCRIPT.format(source=source, program=program))


def launch_command(bin_dir: Path) -> list[str]:
    """The start of the command; flags of the run follow."""
    return [sys.executable, "-S", str(bin_dir / "rl")]


def main(program: str, argv: list[str]) -> int:
    """Run one role."""
    with open("/proc/self/comm", "w") as file:  # noqa: PTH123 - set the name as a console script has it
        file.write(program[:15])
    if argv[:1] == ["-m"]:
        argv = argv[2:]
    config = load_run(argv)
    if program == "rl":
        return launch(config, argv, Path(sys.argv[0]).absolute().parent)
    if program == "inference":
        from podwatch.simulation.simulated_inference_server import serve

        return serve(config)
    if program == "orchestrator":
        from podwatch.simulation.simulated_orchestrator import orchestrate

        return orchestrate(config)
    from podwatch.simulation.simulated_trainer import train

    return train(config)
