"""``podwatch check``: check the pod before training runs unattended."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, colours, common, json_option, print_json
from podwatch.domain.errors import ConfigurationError, ExitCode

if TYPE_CHECKING:
    from podwatch.cli.check.examine import Line

_TONE = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("check")
@common
@click.option("--throughput", is_flag=True, help="Also measure upload speed: uploads 32 MiB and deletes them.")
@click.option("--notify", is_flag=True, help="Send a test notice to each channel of [notify].")
@click.option("-v", "--verbose", is_flag=True, help="Also show the learned values of this run.")
@json_option
def command(where: Where, throughput: bool, notify: bool, verbose: bool, as_json: bool) -> None:
    """Check this pod before training runs unattended. Exit: 0 ok or warnings, 1 a check failed, 78 configuration."""
    from podwatch.cli.check.examine import Line, examine
    from podwatch.config.loading import load_settings
    from podwatch.config.problems import ConfigurationProblems

    lines: list[Line] = []
    code = int(ExitCode.OK)
    try:
        path = Path(where.config) if where.config else None
        loaded = load_settings(path, environ=os.environ, run=where.run)
    except ConfigurationError as error:
        problems = error.problems if isinstance(error, ConfigurationProblems) else (error,)
        lines += [Line("config", "fail", f"{p.what}{f' ({p.where})' if p.where else ''}", p.fix) for p in problems]
        code = int(error.exit_code)
        for line in lines if not as_json else ():
            _print(line)
    else:
        text = f"{loaded.path or 'environment and flags'}, run {loaded.settings.run_id}"
        results = [Line("config", "ok", text), *(Line("config", "warn", w, "") for w in loaded.warnings)]
        for result in results:
            lines.append(result)
            if not as_json:
                _print(result)
        for result in examine(loaded.settings, throughput=throughput, verbose=verbose, send_notice=notify):
            lines.append(result)
            if not as_json:
                _print(result)
        code = int(ExitCode.FAILED if any(x.level == "fail" for x in lines) else ExitCode.OK)
    if as_json:
        checks = [{"name": x.name, "level": x.level, "text": x.text, "fix": x.fix} for x in lines]
        print_json({"schema_version": 1, "ok": code == 0, "checks": checks})
    raise click.exceptions.Exit(code)


def _print(line: "Line") -> None:
    word = click.style(f"{line.level:<4}", fg=_TONE[line.level], bold=line.level == "fail") if colours() else None
    click.echo(f"{word or f'{line.level:<4}'}  {line.name:<11} {clean(line.text)}")
    if line.fix and line.level != "ok":
        click.echo(f"{'':18}do: {clean(line.fix)}")
