"""Times and limits that only tests set: in one TOML file that ``PODWATCH_TEST_TIMES`` names.

    [times]
    "gpu.poll" = "0.1s"      # any value of podwatch's own (``settings.FIXED``), or setting that is a duration
    "status.watch" = 0.2     # or a name of CONSTANTS

They win over the configuration and the environment; flags win over them. Who can write this file can blind podwatch: it
is read as the configuration is.

What reads settings is imported only where a file is named: `podwatch status --watch` asks for its pause here.
"""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from podwatch.config.toml_text import parse_toml
from podwatch.config.trusted_files import read_trusted
from podwatch.domain.lease import CLAIM_WAIT_SECONDS

VARIABLE: Final = "PODWATCH_TEST_TIMES"
CONSTANTS: Final[Mapping[str, float]] = {
    "status.watch": 2.0,  # the pause of `podwatch status --watch`
    "controller.claim_wait": CLAIM_WAIT_SECONDS,  # from a controller's claim until it may request a machine
}
"""Seconds of the times that are no settings and that tests change in another process."""


def seconds(name: str) -> float:
    """The time of this name of ``CONSTANTS``. Reads the file. Raises ConfigurationError if it cannot be used."""
    return float(read_times(os.environ).get(name, CONSTANTS[name]))


def read_times(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Values by name, durations in seconds; empty if the environment names no file. Raises
    ConfigurationError."""
    if not (named := environ.get(VARIABLE)):
        return {}
    path = Path(named)
    return _parsed(read_trusted(path, what="the file of test times"), path)


def setting_times(environ: Mapping[str, str]) -> dict[str, Any]:
    """Those of ``read_times`` that are fields of the settings."""
    return {name: time for name, time in read_times(environ).items() if name not in CONSTANTS}


@cache
def names() -> Mapping[str, bool]:
    """What the file can set, and whether it is a duration."""
    from podwatch.config.setting_names import unit_of, walk, walk_fixed
    from podwatch.config.units import parse_duration

    durations = {key: True for key, field in walk() if unit_of(field) is parse_duration}
    fixed = {key: unit_of(field) is parse_duration for key, field in walk_fixed()}
    return {**durations, **fixed, **dict.fromkeys(CONSTANTS, True)}


def _parsed(text: str, path: Path) -> dict[str, Any]:
    from podwatch.config.problems import ConfigurationProblems, Problem

    tables = parse_toml(text, path)
    given, others = tables.pop("times", {}), tuple(tables)
    problems = [Problem(f'unknown key "{name}"', str(path), "write every time below [times]") for name in others]
    times: dict[str, Any] = {}
    for name, value in given.items() if isinstance(given, dict) else ():
        try:
            times[name] = _value(name, value)
        except ValueError as error:
            problems.append(Problem(f'Invalid value for "{name}" in [times]: {error}', str(path)))
        except KeyError:
            problems.append(Problem(f'unknown time "{name}" in [times]', str(path), _suggestion(name)))
    if problems:
        raise ConfigurationProblems(problems)
    return times


def _value(name: str, value: Any) -> Any:
    """Seconds of a duration; anything else as it is, for the settings to judge. KeyError for an unknown name,
    ValueError for a value that is no duration."""
    if not names()[name]:
        return value
    from podwatch.config.units import parse_duration

    return parse_duration(value)


def _suggestion(name: str) -> str:
    from podwatch.config.setting_names import similar

    close = similar(name, list(names()), cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else "only durations and podwatch's own values can be set here"
