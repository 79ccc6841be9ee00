"""The text of a configuration as TOML. The standard library only: `podwatch status` reads two lines of one."""

import re
import tomllib
from pathlib import Path
from typing import Any

from podwatch.domain.errors import ConfigurationError

_AT = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")
_LOCATES = re.compile(r"""(?m)^\s*(state_dir|run_id)\s*=\s*(["'])(.*?)\2""")


def parse_toml(text: str, path: Path | None) -> dict[str, Any]:
    """The parsed document. ConfigurationError with line and column."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = _AT.search(message)
        line, column = (at[1], at[2]) if at and at[1] else (str(len(text.splitlines()) or 1), "1")
        raise ConfigurationError(
            f"not valid TOML: {_AT.sub('', message)}", where=f"{path}:{line}:{column}", fix="correct that line"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        deep = isinstance(error, RecursionError)
        what = "it is nested too deeply" if deep else "it has a number with too many digits"
        raise ConfigurationError(f"not valid TOML: {what}", where=str(path), fix="correct it") from error


def intact_lines(text: str) -> dict[str, str]:
    """run_id and state_dir of text that is no valid TOML: these two lines are usually intact."""
    return {name: value for name, _, value in reversed(_LOCATES.findall(text))}
