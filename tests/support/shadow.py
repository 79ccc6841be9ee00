"""The verdict of the tables on a step, in the words of the layouts' verdict: to compare the two on the same files."""

from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.tables.inspector import Inspector
from podwatch.checkpoints.tables.layout import StepPlaces, TableLayout
from podwatch.checkpoints.tables.rules import CheckpointInspection
from podwatch.checkpoints.tables.special import prime_rl_variant
from podwatch.checkpoints.tables.table import all_tables
from podwatch.checkpoints.tables.templates import forms_of


@dataclass
class Shadow:
    """``inspect`` judges a step as it is on disk now. None: the tables do not list it."""

    inspector: Inspector
    kind: str
    output_dir: Path

    @property
    def layout(self) -> TableLayout:
        name = (prime_rl_variant(self.output_dir) or self.kind) if self.kind == "prime-rl" else self.kind
        return TableLayout(name, all_tables()[name], self.output_dir, inspector=self.inspector)

    def inspect(self, step: int, *, compare: bool = False) -> CheckpointInspection | None:
        """``compare``: with the files of the whole save before it, too."""
        layout = self.layout
        steps = layout.steps()
        if step not in steps:
            return None
        before = self._forms_before(layout, steps, step) if compare else frozenset[str]()
        return self._judge(layout, steps, step, before)

    def _forms_before(self, layout: TableLayout, steps: dict[int, StepPlaces], step: int) -> frozenset[str]:
        for other in sorted((s for s in steps if s != step), key=lambda s: (s > step, abs(s - step))):
            if (found := self._judge(layout, steps, other, frozenset())).whole:
                unlisted = set(found.unlisted)
                return forms_of(n for n in layout.names_of(layout.files_of(steps[other])) if n not in unlisted)
        return frozenset()

    def _judge(
        self, layout: TableLayout, steps: dict[int, StepPlaces], step: int, forms: frozenset[str]
    ) -> CheckpointInspection:
        places = steps[step]
        return self.inspector.inspect(
            layout.table,
            step,
            {part.name: part.path if not part.path.is_file() else part.path.parent for part in places.parts},
            layout.files_of(places),
            trackers=layout.tracker_paths(),
            needed_parts=places.needed_parts,
            doubtful_parts=places.doubtful_parts,
            later=any(other > step for other in steps),
            forms=forms,
            other_forms=forms,
            beside=layout.beside(places.parts[0]),
            twin=places.twin,
        )
