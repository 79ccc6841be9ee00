"""Check what a start needs: the program on training's PATH, W&B keys, the layout, the resume command."""

import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from podwatch.checkpoints.command import Command
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.trainers import concerns, make_layout, recognised, site_of
from podwatch.cli.check.report import Level, Line, Sets, failed
from podwatch.config.settings import Settings
from podwatch.domain.errors import PodwatchError
from podwatch.domain.secrets import scrub_argv
from podwatch.system.blocking_calls import in_time
from podwatch.trainer.environment import build_environment

SERVICE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""systemd's default PATH of a system service."""


def command(settings: Settings) -> Iterator[Line]:
    trainer = settings.trainer
    if not trainer.command:
        level: Level = "ok" if trainer.supervise == "attach" else "warn"
        yield Line("command", level, "not set: podwatch can watch a trainer but not start one", "set trainer.command")
        return
    cwd = trainer.cwd or trainer.output_dir.parent
    if not cwd.is_dir():
        yield Line("command", "fail", f"working directory {cwd} not found", "correct trainer.cwd")
        return
    if trainer.user:
        try:
            pwd.getpwnam(trainer.user)
        except KeyError:
            yield Line("command", "fail", f"user {trainer.user} not found", "correct trainer.user")
            return
    environment = _environment(settings)
    yield from _program(trainer.command[0], settings, environment, cwd)
    if Command(trainer.command, cwd).hides_exit_code():
        yield Line("command", "warn", "a pipe hides the exit code of a crash", "start the script with set -o pipefail")


def _environment(settings: Settings) -> dict[str, str]:
    trainer = settings.trainer
    return build_environment(os.environ, trainer.env, trainer.env_file, user=trainer.user)


def _program(program: str, settings: Settings, environment: Mapping[str, str], cwd: Path) -> Iterator[Line]:
    path = environment.get("PATH", "")
    wanted = str(cwd / program) if "/" in program else program
    found = shutil.which(wanted, path=path)
    if found is None:
        fix = "use an absolute path, or set PATH in trainer.env"
        if shutil.which(wanted):
            fix = f"it is in {Path(shutil.which(wanted) or '').parent}, which is not in training's PATH: {fix}"
        yield Line("command", "fail", f"{program} not found", fix)
        return
    yield Line("command", "ok", f"{found}, in {cwd}")
    given = "PATH" in settings.trainer.env or path != os.environ.get("PATH")
    serviceable = "/" in program or given or shutil.which(program, path=SERVICE_PATH) is not None
    if not serviceable and Path("/run/systemd/system").is_dir():
        text = f"{program} is only in this shell's PATH, not in the PATH of a systemd service"
        yield Line("command", "warn", text, f"set PATH in trainer.env, with {Path(found).parent} in it")


def keys(settings: Settings) -> Iterator[Line]:
    """The W&B key: without one, W&B ends training at its start."""
    if not settings.trainer.command:
        return
    environment = _environment(settings)
    mode = environment.get("WANDB_MODE", "")
    host = urlsplit(environment.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    netrc = Path(environment.get("NETRC") or Path(environment.get("HOME", "/root"), ".netrc"))
    try:
        in_netrc = host in netrc.read_text()
    except (OSError, UnicodeDecodeError):
        in_netrc = False
    if mode in ("offline", "disabled", "dryrun"):
        yield Line("wandb", "ok", f"WANDB_MODE={mode}: no key is needed")
    elif environment.get("WANDB_API_KEY") or in_netrc:
        yield Line("wandb", "ok", "key found" + ("" if environment.get("WANDB_API_KEY") else f" (in {netrc})"))
    else:
        text = "training has no W&B key: if it logs to W&B, it fails at its start"
        yield Line("wandb", "warn", text, "put WANDB_API_KEY into trainer.env_file, or WANDB_MODE into trainer.env")


def packages(settings: Settings) -> Iterator[Line]:
    """Warn if podwatch is installed in the trainer's environment: changes there can break podwatch."""
    import importlib.util

    trainer = settings.trainer
    prefixes = {Path(os.path.realpath((trainer.cwd or trainer.output_dir.parent) / ".venv"))}
    if trainer.command:
        program = shutil.which(trainer.command[0], path=_environment(settings).get("PATH"))
        if program is not None:
            prefixes.add(Path(os.path.realpath(Path(program).parent)).parent)
    own = Path(os.path.realpath(sys.prefix))
    shared = [name for name in ("torch", "vllm") if importlib.util.find_spec(name) is not None]
    fix = "install podwatch in its own environment, with `uv tool install podwatch` or pipx"
    if shared:
        yield Line("packages", "warn", f"podwatch shares its environment with {' and '.join(shared)}", fix)
    elif own in prefixes and own != Path("/usr"):
        yield Line("packages", "warn", f"podwatch is installed in the trainer's environment ({own})", fix)
    else:
        yield Line("packages", "ok", f"podwatch has its own environment ({own})")


def layout(settings: Settings, sets: Sets) -> Iterator[Line]:
    """The layout and the reason for it; then the resume command, so that it is tested before a restart needs it."""
    from podwatch.domain.checkpoint import newest_complete

    found = in_time(lambda: make_layout(settings))
    why = found.chosen_because or "set in the configuration"
    variant = f", variant {found.variant}" if found.variant else ""
    yield Line("layout", "ok", f"{found.name}{variant}: {why}")
    others = [r for r in in_time(lambda: recognised(site_of(settings))) if r.layout != found.name]
    if others:
        listed = "; ".join(f"{r.layout}: {r.why}" for r in others)
        certain = any(r.certain for r in others) and not found.chosen_because
        yield Line(
            "layout",
            "warn" if certain else "ok",
            f"other layouts also fit: {listed}",
            "if one of them is right, set [trainer] layout",
        )
    for concern in in_time(lambda: concerns(settings)):
        yield Line(concern.subject, "fail" if concern.certain else "warn", concern.what, concern.fix)
    if settings.trainer.command:
        newest = newest_complete(sets())
        yield from _resume(settings, found, None if newest is None else newest.step)


def _resume(settings: Settings, found: Layout, step: int | None) -> Iterator[Line]:
    trainer = settings.trainer
    tried = 1 if step is None else step
    about = f"from step {tried}" if step is not None else "from an example step (no checkpoint yet)"
    try:
        made = in_time(
            lambda: found.resume_command(trainer.command, tried, trainer.resume_args, found.wandb_identity())
        )
    except PodwatchError as error:
        # without any checkpoint a layout can refuse because it has to read one
        yield failed("resume", error, level="warn" if step is None else "fail", about=f"{about}: ")
        return
    yield Line("resume", "ok", f"{about}: {shlex.join(scrub_argv(made.argv))}")
    if inside := found.resumes_in_script(trainer.command):
        words = shlex.join(scrub_argv(inside))
        text = f"the shell script itself has {words}, and podwatch does not change its text"
        yield Line("resume", "warn", text, "remove that from the script: a fresh start would resume by it")
    if trainer.resume_args == "none":
        yield Line(
            "resume",
            "warn",
            "resume_args is none: the command must find the resume step itself",
            "let your script read the step from the environment variable PODWATCH_STEP",
        )
    elif made.argv == trainer.command and not made.environment:
        fix = "set trainer.resume_args, or let the script read PODWATCH_RESUME_ARGS"
        yield Line("resume", "warn", "podwatch cannot pass the resume step: the command has no place for it", fix)
    if made.removed:
        text = f"podwatch removes resume flags from the command: {' '.join(made.removed)}"
        yield Line("resume", "warn", text, "remove them from trainer.command")
