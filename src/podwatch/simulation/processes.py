"""Entry points of the simulated processes, and the scripts that give them prime-rl's names in the process list (a
console script's name is its process name). Standard library only."""

import sys
from pathlib import Path

PROGRAMS = ("rl", "inference", "orchestrator", "torchrun")
_SCRIPT = """\
import sys
sys.path.insert(0, {source!r})
from podwatch.simulation.processes import main
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
    from podwatch.simulation.run_files import load_run

    with open("/proc/self/comm", "w") as file:  # noqa: PTH123 - set the name as a console script has it
        file.write(program[:15])
    if argv[:1] == ["-m"]:
        argv = argv[2:]
    config = load_run(argv)
    if program == "rl":
        from podwatch.simulation import launcher

        return launcher.main(config, argv, Path(sys.argv[0]).absolute().parent)
    if program == "inference":
        from podwatch.simulation import inference

        return inference.serve(config)
    if program == "orchestrator":
        from podwatch.simulation import orchestrator

        return orchestrator.main(config)
    from podwatch.simulation import trainer

    return trainer.main(config)
