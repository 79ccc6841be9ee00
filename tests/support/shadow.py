"""The tables in the shadow of the layouts: the verdict of both on the same files, and why it can differ.

``PODWATCH_SHADOW_TABLES=1`` compares every verdict that a test below tests/checkpoints asks for.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.tables.inspector import Inspector
from podwatch.checkpoints.tables.layout import StepPlaces, TableLayout
from podwatch.checkpoints.tables.rules import CheckpointInspection
from podwatch.checkpoints.tables.special import prime_rl_variant
from podwatch.checkpoints.tables.table import all_tables
from podwatch.checkpoints.tables.templates import forms_of
from tests.drivers.checkpoints import Judgement

EXPLAINED = (
    (
        r".*: (?:commit|last|none) / no \(.* is missing, which the save before has\)",
        "a save has every form of file that the save before had: for the layouts only where nothing marks the end",
    ),
    (
        r".*, link .*latest.*: last / no \(.* is empty or garbled: it is being written\)",
        "a tracker behind a link is not read: no trainer writes one, and links lead out",
    ),
    (
        r"megatron(?:-legacy)?, save 3 .*: last / no \(.* is newer than latest_checkpointed_iteration.txt: .*\)",
        "a step that is saved again below the tracker's is being overwritten: the layouts call the mixture whole",
    ),
    (
        r"hf-deepspeed, older .*/latest: last / no \(.*mp_rank_00_model_states.pt is newer than latest: .*\)",
        "rank 0 writes latest after its own files, for HF too: the layouts do not ask it there",
    ),
    (
        r"verl-automodel, \w+ global_step_20/model/consolidated/.*: last / no \(model/consolidated: .*\)",
        "an index of weights and its shards are whole wherever they are, also in an export that no resume reads",
    ),
)
"""What differs, as ``case, moment: the layouts' verdict / the tables' verdict``, and why."""
ENDS = {"commit": "commit", "last-file": "last", "none": "none"}


def is_explained(difference: str) -> bool:
    return any(re.fullmatch(pattern, difference) for pattern, _ in EXPLAINED)


@dataclass
class Shadow:
    """``inspect`` judges a step as it is on disk now. None: the tables do not list it."""

    inspector: Inspector
    kind: str
    output_dir: Path
    checkpoint_dir: Path | None = None
    command: Sequence[str] = ()

    @property
    def layout(self) -> TableLayout:
        name, place = self._variant(), self.checkpoint_dir
        return TableLayout(name, all_tables()[name], self.output_dir, checkpoint_dir=place, inspector=self.inspector)

    def _variant(self) -> str:
        """The table of the same trainer that fits its command, or the files on disk."""
        words = " ".join(self.command)
        if self.kind == "prime-rl":
            found = prime_rl_variant(self.output_dir, self.checkpoint_dir)
            return f"{found}-nccl" if found == "prime-rl-2025" and "nccl" in words else found or self.kind
        if self.kind == "skyrl":
            late = "async_dist_ckpt_save=true" in words
            return "skyrl-async" if "fully_async" in words else "skyrl-late" if late else self.kind
        if self.kind == "openrlhf" and ("estimator" in words or "--critic_pretrain" in words):
            no_critic = "estimator" in words and "gae" not in words
            return "openrlhf-without-critic" if no_critic else "openrlhf-with-critic"
        return self.kind

    def difference(self, old: Judgement | None, step: int) -> str:
        """Empty where both say the same: whether it is whole, and what shows the end of the save."""
        new = self.inspect(step, compare=True)
        one = ENDS[old.marker.value] if old is not None and old.whole else "no"
        other = new.end.value if new is not None and new.whole else "no"
        if one == other:
            return ""
        refused: Judgement | CheckpointInspection | None = new if other == "no" else old
        return f"{one} / {other} ({refused.reason if refused is not None else 'not listed'})"

    def inspect(self, step: int, *, compare: bool = False) -> CheckpointInspection | None:
        """``compare``: with the files of the whole save before it, too."""
        layout = self.layout
        steps = layout.steps()
        if step not in steps:
            return None
        before = self._forms_before(layout, steps, step) if compare else frozenset[str]()
        return self._judge(layout, steps, step, before)

    def _forms_before(self, layout: TableLayout, steps: Mapping[int, StepPlaces], step: int) -> frozenset[str]:
        for other in sorted((s for s in steps if s != step), key=lambda s: (s > step, abs(s - step))):
            if (found := self._judge(layout, steps, other, frozenset())).whole:
                unlisted = set(found.unlisted)
                return forms_of(n for n in layout.names_of(layout.files_of(steps[other])) if n not in unlisted)
        return frozenset()

    def _judge(
        self, layout: TableLayout, steps: Mapping[int, StepPlaces], step: int, forms: frozenset[str]
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
