"""By what the pure rooms judge: sections of the settings in force, and what the trainer's command adds to them."""

import json
from collections.abc import Mapping
from typing import Any, Self, cast

from pydantic import BaseModel, ConfigDict

from podwatch.config.settings import ResourceSettings, Section, TrainingHealthSettings
from podwatch.domain.thresholds import DetectionPolicy, DiskPolicy, LogRule


class Policies(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    detection: DetectionPolicy = DetectionPolicy()
    disk: DiskPolicy = DiskPolicy()
    resources: ResourceSettings = ResourceSettings()
    training: TrainingHealthSettings = TrainingHealthSettings()
    log_rules: tuple[LogRule, ...] = ()
    save_interval_steps: int | None = None
    """Steps between saves as configured in the command; None if it does not say."""

    def for_recording(self) -> dict[str, Any]:
        """As JSON, without what judges nothing: a URL can hold a password."""
        data = self.model_dump_json(exclude={"training": {"metrics_file", "metrics_url"}})
        return cast("dict[str, Any]", json.loads(data))

    @classmethod
    def of_recording(cls, data: Mapping[str, Any]) -> Self:
        """The policies of a recording. What a later podwatch added to them is ignored. Raises ValueError."""
        known = dict(data)
        for name, kind in (("resources", ResourceSettings), ("training", TrainingHealthSettings)):
            if isinstance(given := known.get(name), Mapping):
                known[name] = _known(kind, given)
        return cls.model_validate(known)


def _known(kind: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in kind.model_fields}
