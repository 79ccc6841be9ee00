"""The report of ``podwatch uninstall``: what was removed, what stays and where, as text or JSON."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import clean, print_json
from podwatch.cli.systemd_service import Origin, Service, active, ends_training, guard_elsewhere, origin
from podwatch.client.times_and_sizes import size

if TYPE_CHECKING:
    from podwatch.cli.local_data import Item
    from podwatch.config.settings import Settings


def line(item: "Item") -> str:
    """One item: kind, size, path, note."""
    note = f"  ({clean(item.note)})" if item.note else ""
    return f"  {item.kind:<14}{'' if item.bytes is None else size(item.bytes):>9}  {clean(item.path)}{note}"


class Report:
    """What was removed and what stays, as text or JSON."""

    def __init__(self, service: Service, settings: "Settings | None", config: Path | None, problem: str) -> None:
        self.service, self.settings, self.config, self.problem = service, settings, config, problem
        self.items: list[Item] = []
        if settings is not None:
            from podwatch.cli.local_data import local_data

            self.items = local_data(settings, service, os.environ)

    def show(self, *, as_json: bool, planned: bool = False, removed: Sequence[str] = ()) -> None:
        if as_json:
            print_json(self._document(planned=planned, removed=removed))
            return
        lines = []
        if planned and self._files():
            lines += [f"would stop and disable {self.service.unit}"]
            lines += [f"would remove {path}" for path in self._files()]
        if not planned and not removed:
            lines.append(f"podwatch is not installed as a service here ({self.service.unit_file})")
        lines += self._training()
        lines += ["stays on this machine:", *map(line, self.items)]
        lines += [f"  {kind:<14}{'':>9}  {clean(text)}" for kind, text in self._others()]
        click.echo("\n".join([*lines, *self._how_to_remove_data()]))

    def _files(self) -> list[Path]:
        """The files of the service."""
        return [p for p in (self.service.dropin, self.service.unit_file) if origin(p) is not Origin.ABSENT]

    def _how_to_remove_data(self) -> list[str]:
        ours = [i for i in self.items if i.ours and i.kind in ("run-directory", "state", "runtime")]
        if not ours:
            return []
        lines = ["after the end of training, this removes podwatch's own directories of this run:"]
        lines.append(f"  rm -r {' '.join(shlex.quote(str(i.path)) for i in ours)}")
        if steps := sorted({step for item in ours for step in item.complete_steps}):
            which = ", ".join(map(str, steps))
            lines.append(
                f"  their quarantine has complete checkpoints (step {which}): see first whether `podwatch store ls` has"
                " them, or bring them back with `podwatch quarantine return`"
            )
        return lines

    def _training(self) -> list[str]:
        if self.settings is None:
            return []
        run_id, unit = self.settings.run_id, f"podwatch-train-{self.settings.run_id}"
        guard = guard_elsewhere(run_id, self.settings.state_dir, self.service.unit)
        if guard:
            what = "it and training" if ends_training(guard) else "it, and training continues"
            return [f"podwatch guards the run without a service: kill {guard} ends {what}"]
        text = self._running()
        if not text or active(self.service.unit):
            return []
        how = f"systemctl stop {unit}" if active(f"{unit}.service") else "kill that pid"
        return [f"{text}; it continues, without podwatch. To end it: {how}"]

    def _running(self) -> str:
        from podwatch.cli.clean import running_training

        return "" if self.settings is None else running_training(self.settings)

    def _others(self) -> list[tuple[str, str]]:
        """What podwatch never removes: (kind, text)."""
        known = {item.path for item in self.items}
        others = []
        if self.config is not None and self.config not in known:
            others.append(("configuration", str(self.config)))
        if self.problem:
            others.append(("state", f"not known: {self.problem}"))
        if self.settings is not None:
            env_file = self.settings.trainer.env_file
            if env_file is not None and env_file not in known:
                others.append(("key-file", f"{env_file}  (training's own; it can hold secrets)"))
            others.append(("checkpoints", f"{self.settings.trainer.output_dir}  (training's own)"))
            if self.settings.sync.store:
                others.append(("store", f"{self.settings.sync.store}  (objects of the run {self.settings.run_id})"))
        others.append(("program", f"{sys.prefix}  ({_how_to_remove(sys.prefix)})"))
        return others

    def _document(self, *, planned: bool, removed: Sequence[str]) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "service": self.service.unit,
            "dry_run": planned,
            "removed": list(removed),
            "would_remove": [str(path) for path in self._files()] if planned else [],
            "items": [item.to_dict() for item in self.items],
            "others": [{"kind": kind, "text": text} for kind, text in self._others()],
            "training": self._running() or None,
        }


def _how_to_remove(prefix: str) -> str:
    if "/uv/tools/" in prefix:
        return "uv tool uninstall podwatch"
    if "/pipx/" in prefix:
        return "pipx uninstall podwatch"
    return f"{prefix}/bin/pip uninstall podwatch"
