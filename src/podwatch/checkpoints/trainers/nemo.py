"""NeMo 2: AutoResume takes the newest ``*-last``; an export ``*-end`` stops the next start."""

from collections.abc import Sequence

from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(
        add=None,
        ask="NeMo 2 programs choose in Python how to resume, so podwatch does not know an argument for it",
        example='["resume.resume_from_path={checkpoint}"] for NeMo-Run, or to "none" with AutoResume, which takes'
        " the newest *-last (podwatch moves everything newer than the chosen step to quarantine)",
    )


def recognise(site: Site) -> Recognition | None:
    layout = TableLayout(TRAINER, site)
    for step in layout.steps():
        path = layout.step_paths(step)[0]
        if (path / "weights").is_dir():
            return Recognition("nemo", f"checkpoints/{path.name} contains weights/", certain=True)
    seen = program(site.command, site.working_directory)
    if seen.name == "nemo" and seen.arguments[:1] in (("llm",), ("vlm",), ("multimodal",)):
        return Recognition("nemo", f"the command runs nemo {seen.arguments[0]}", certain=True)
    return None


WEIGHTS = Weights(
    convert='python -c \'from nemo.collections import llm; llm.export_ckpt(path="CHECKPOINT", target="hf",'
    ' output_path="TARGET")\'',
    note="for the architectures that NeMo can export",
)


TRAINER = Trainer("nemo", _preset)
KIND = Kind("nemo", lambda site: TableLayout(TRAINER, site), recognise, weights=WEIGHTS)
