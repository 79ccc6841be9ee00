"""Files that people put into a finished checkpoint: a merged export, the result of an evaluation. It stays whole."""

from pathlib import Path

import pytest

from tests.drivers.checkpoints import open_layout
from tests.support.layout_checks import age, verdict
from tests.support.layout_makers import run
from tests.support.layout_makers.core import MAKERS

ADDED = {
    "hf": ("eval_results.json", "all_results.json", "README.md", "generation_config.json"),
    "verl-fsdp": ("actor/huggingface/model.safetensors.index.json", "actor/huggingface/config.json", "eval.json"),
    "verl-critic": ("actor/huggingface/tokenizer.json",),
    "verl-megatron-new": ("actor/huggingface/tokenizer.json", "eval.json"),
    "verl-megatron-old": ("actor/huggingface/tokenizer.json",),
    "verl-sft": ("huggingface/config.json",),
    "megatron": ("eval.json",),
    "torchtitan": ("eval.json",),
    "dcp": ("eval.json",),
    "nemo": ("eval.json",),
    "prime-rl-a": ("eval.json",),
}


@pytest.mark.parametrize(("name", "file"), [(n, f) for n, files in ADDED.items() for f in files if n in MAKERS])
def test_what_is_added_later_does_not_make_it_incomplete(name: str, file: str, tmp_path: Path) -> None:
    kind, maker = MAKERS[name]
    run(maker(tmp_path, 10))
    age(tmp_path, 7200)
    layout = open_layout(kind, tmp_path)
    assert verdict(layout, 10).whole
    target = next(p.path for p in layout.steps()[10] if p.required) / file
    target.parent.mkdir(exist_ok=True)
    target.write_text("{}")
    found = verdict(layout, 10)
    assert found.whole, found.reason
