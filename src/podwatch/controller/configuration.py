"""``controller.toml``: what `podwatch controller` may spend, on what, and by which commands. Its own file on its own
machine: whoever can write the store, as every pod can, must not be able to raise a cap or to name a command."""

import hashlib
import os
from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from podwatch.config.problems import ConfigurationProblems, Problem
from podwatch.config.settings import Duration, Section
from podwatch.config.toml_text import parse_toml
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.safe_names import valid_run_id

LONGEST_CALL_SECONDS = 300.0
"""Longest time limit of a provider's command."""
PLACES = (Path("controller.toml"), Path("/etc/podwatch/controller.toml"))


class ProviderConfiguration(Section):
    command: tuple[str, ...] = Field(min_length=1)
    """argv, without a shell; list, create or destroy is appended."""
    env_file: Path | None = None
    """NAME=value lines for the command, such as the provider's key; mode 0600."""
    timeout: Duration = Field(120.0, gt=0, le=LONGEST_CALL_SECONDS)


class ControllerConfiguration(Section):
    """Money is in the provider's currency. ``records``: the file of what was requested and spent. ``first_number``,
    ``spent_before``: where the records before a machine are lost, an operator says with which number they go on, and
    what was spent."""

    run_id: str
    store: str
    provider: ProviderConfiguration
    max_price_per_hour: float = Field(gt=0, le=1e6)
    max_spend_per_day: float = Field(ge=0, le=1e6)
    max_spend_total: float = Field(ge=0, le=1e6)
    max_spend_per_hour: float = Field(1e6, ge=0, le=1e6)
    max_machines_per_day: int = Field(6, ge=0, le=1000)
    max_boot_failures: int = Field(3, ge=1, le=100)
    boot: Duration = Field(1800.0, ge=60, le=86400)
    silent: Duration = Field(900.0, ge=300, le=86400)
    final_save: Duration = Field(900.0, ge=0, le=21600)
    every: Duration = Field(30.0, ge=5, le=3600)
    records: Path | None = None
    first_number: int = Field(1, ge=1, le=10**9)
    spent_before: float = Field(0.0, ge=0, le=1e6)
    paused: bool = False
    digest: str = Field("", exclude=True)
    """Of the file: an edit allows new attempts after boot failures and refusals."""

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, value: str) -> str:
        if value and not valid_run_id(value):
            raise ValueError("is not a valid run id")
        return value

    @property
    def records_path(self) -> Path:
        home = Path("/var/lib/podwatch") if os.geteuid() == 0 else Path.home() / ".local/state/podwatch"
        return self.records or home / f"controller-{self.run_id}.json"


def find_configuration(path: str) -> Path:
    """``path``, or the first of ``PLACES`` that exists. Raises ConfigurationError."""
    place = Path(path) if path else next((one for one in PLACES if one.exists()), None)
    if place is None:
        names = " or ".join(map(str, PLACES))
        raise ConfigurationError("the controller has no configuration", where=names, fix="write it, or pass -c FILE")
    return place


def parse_configuration(text: str, place: Path, store: str = "", run_id: str = "") -> ControllerConfiguration:
    """``text``: of the file ``place``. ``store``, ``run_id``: given on the command line. Raises ConfigurationError,
    which names every problem at once."""
    data = parse_toml(text, place)
    data |= {name: value for name, value in (("store", store), ("run_id", run_id)) if value}
    data["digest"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        return ControllerConfiguration.model_validate(data, context={"directory": str(place.absolute().parent)})
    except ValidationError as error:
        raise ConfigurationProblems(_problems(error, place)) from None


def _problems(error: ValidationError, path: Path) -> list[Problem]:
    found = []
    for one in error.errors(include_url=False, include_input=False):
        key = ".".join(map(str, one["loc"]))
        what = {"extra_forbidden": f"unknown key {key}", "missing": f"{key} is missing"}.get(one["type"], "")
        found.append(Problem(what or f"invalid value for {key}: {one['msg']}", str(path)))
    return found
