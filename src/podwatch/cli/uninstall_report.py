"""The report of ``podwatch uninstall``: what was removed, what stays and where, as text or JSON."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import clean, print_json
from podwatch.cli.systemd_service import UNITS, Origin, Service, active, ends_training, guard_elsewhere, origin
from podwatch.client.times_and_sizes import size

if TYPE_CHECKING:
    from podwatch.cli.purge_local_data import Item
    from podwatch.config.settings import Settings


def line(item: "Item") -> str:
    """One item: kind, size, path, note."""
    note = f"  ({clean(item.note)})" if item.note else ""
    unstored = f"  NOT IN THE STORE: step {', '.join(map(str, item.unstored))}" if item.unstored else ""
    return f"  {item.kind:<14}{'' if item.bytes is None else size(item.bytes):>9}  {clean(item.path)}{note}{unstored}"


class Report:
    """What was removed and what stays, as text or JSON."""

    def __init__(
        self,
        service: Service,
        settings: "Settings | None",
        config: Path | None,
        problem: str,
        items: "list[Item]",
    ) -> None:
        self.service, self.settings, self.config, self.problem = service, settings, config, problem
        self.items, self.problems = items, list[str]()

    def show(self, *, as_json: bool, purge: bool, planned: bool = False, removed: Sequence[str] = ()) -> None:
        if as_json:
            print_json(self._document(purge=purge, planned=planned, removed=removed))
            return
        lines = []
        if planned:
            files = [p for p in (self.service.dropin, self.service.unit_file) if origin(p) is not Origin.ABSENT]
            lines += [f"would stop and disable {self.service.unit}"] if files else []
            lines += [f"would remove {path}" for path in files]
        if not planned and not removed:
            lines.append(f"podwatch is not installed as a service here ({self.service.unit_file})")
        goes = [item for item in self.items if purge and planned and not item.keep]
        if goes:
            lines += ["would remove for good:", *map(line, goes)]
        if purge and not planned:
            gone = [path for path in removed if not path.startswith(f"{UNITS}/")]
            lines += [f"removed   {path}" for path in gone]
        lines += [f"failed    {clean(problem)}" for problem in self.problems]
        lines += self._training()
        stays = [item for item in self.items if item not in goes]
        lines.append("stays on this machine:")
        lines += [line(replace(i, note=f"{i.note}; {i.keep}".strip("; ")) if purge and i.keep else i) for i in stays]
        lines += [f"  {kind:<14}{'':>9}  {clean(text)}" for kind, text in self._others()]
        if not purge and self.items:
            lines.append("`podwatch uninstall --purge --dry-run` shows what of this podwatch can remove")
        click.echo("\n".join(lines))

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

    def _document(self, *, purge: bool, planned: bool, removed: Sequence[str]) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "service": self.service.unit,
            "dry_run": planned,
            "removed": list(removed),
            "would_remove": [str(i.path) for i in self.items if purge and planned and not i.keep],
            "problems": self.problems,
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
