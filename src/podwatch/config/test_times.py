"""Times that only tests set: in one TOML file that ``PODWATCH_TEST_TIMES`` names.

    [times]
    "gpu.poll" = "0.1s"      # any setting that is a duration
    "status.watch" = 0.2     # or a name of CONSTANTS

They win over the configuration and the environment; flags win over them. Who can write this file can blind podwatch: it
is read as the configuration is.

What reads settings is imported only where a file is named: `podwatch status --watch` asks for its pause here.
"""

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from podwatch.client.trusted_configuration import read_trusted
from podwatch.domain.errors import ConfigurationError

VARIABLE: Final = "PODWATCH_TEST_TIMES"
CONSTANTS: Final[Mapping[str, float]] = {
    "status.watch": 2.0,  # the pause of `podwatch status --watch`
}
"""Seconds of the times that are no settings and that tests change in another process."""


def seconds(name: str) -> float:
    """The time of this name of ``CONSTANTS``. Reads the file. Raises ConfigurationError if it cannot be used."""
    return read_times(os.environ).get(name, CONSTANTS[name])


def read_times(environ: Mapping[str, str]) -> Mapping[str, float]:
    """Seconds by the name of a setting or constant; empty if the environment names no file. Raises
    ConfigurationError."""
    if not (named := environ.get(VARIABLE)):
        return {}
    path = Path(named)
    return _parsed(read_trusted(path, what="the file of test times"), path)


def setting_times(environ: Mapping[str, str]) -> dict[str, float]:
    """Those of ``read_times`` that are settings."""
    return {name: time for name, time in read_times(environ).items() if name not in CONSTANTS}


@cache
def names() -> tuple[str, ...]:
    """What the file can set: each setting that is a duration, and the constants."""
    from podwatch.config.setting_names import unit_of, walk
    from podwatch.config.units import parse_duration

    durations = [key for key, field in walk() if unit_of(field) is parse_duration]
    return (*durations, *CONSTANTS)


def _parsed(text: str, path: Path) -> dict[str, float]:
    from podwatch.config.problems import ConfigurationProblems, Problem

    try:
        tables = tomllib.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"not valid TOML: {error}", where=str(path), fix="correct it") from error
    given, others = tables.pop("times", {}), tuple(tables)
    problems = [Problem(f'unknown key "{name}"', str(path), "write every time below [times]") for name in others]
    times: dict[str, float] = {}
    for name, value in given.items() if isinstance(given, dict) else ():
        try:
            times[name] = _time(name, value)
        except ValueError as error:
            problems.append(Problem(f'Invalid value for "{name}" in [times]: {error}', str(path)))
        except KeyError:
            problems.append(Problem(f'unknown time "{name}" in [times]', str(path), _suggestion(name)))
    if problems:
        raise ConfigurationProblems(problems)
    return times


def _time(name: str, value: Any) -> float:
    """Seconds. KeyError for an unknown name, ValueError for a value that is no duration."""
    if name not in names():
        raise KeyError(name)
    from podwatch.config.units import parse_duration

    return parse_duration(value)


def _suggestion(name: str) -> str:
    from podwatch.config.setting_names import similar

    close = similar(name, names(), cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else "only settings that are a duration can be set here"
