"""The example check examples/checks/verify_model.py, as a process, on directories that are whole and that are not."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "checks" / "verify_model.py"
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + PLAIN


def safetensors(path: Path, *names: str) -> None:
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]} for n, name in enumerate(names)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8 * len(names)))


def write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))


def model(root: Path, template: str | None = WITH_TOOLS) -> Path:
    """A directory as Hugging Face's libraries save one, with two files of weights."""
    root.mkdir()
    write(root / "config.json", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    safetensors(root / "model-00001-of-00002.safetensors", "a", "b")
    safetensors(root / "model-00002-of-00002.safetensors", "c")
    files = {"a": 1, "b": 1, "c": 2}
    index = {name: f"model-0000{number}-of-00002.safetensors" for name, number in files.items()}
    write(root / "model.safetensors.index.json", {"metadata": {"total_size": 24}, "weight_map": index})
    write(root / "tokenizer.json", {"version": "1.0"})
    write(root / "tokenizer_config.json", {} if template is None else {"chat_template": template})
    return root


def check(directory: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(PROGRAM), str(directory), *options], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_whole_directory_is_usable(tmp_path: Path) -> None:
    root = model(tmp_path / "model")
    assert check(root, "--tools") == (0, f"{root}: usable, with tools\n")


def cut(root: Path) -> None:
    file = root / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def cut_in_the_header(root: Path) -> None:
    file = root / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:20])


def without_a_tensor(root: Path) -> None:
    safetensors(root / "model-00001-of-00002.safetensors", "a")


def outside(root: Path) -> None:
    write(root / "model.safetensors.index.json", {"weight_map": {"a": "../other/model.safetensors"}})


def without_weights(root: Path) -> None:
    for file in root.glob("*safetensors*"):
        file.unlink()


def with_half_a_config(root: Path) -> None:
    (root / "config.json").write_text('{"model_type": "qw')


def without_a_tokenizer(root: Path) -> None:
    (root / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (cut, "its header says"),
        (cut_in_the_header, "or cut (20 bytes)"),
        (without_a_tensor, "lacks 1 tensors of the index, for example b"),
        (outside, "outside the directory"),
        (without_weights, "has no weights"),
        (with_half_a_config, "config.json: not valid JSON"),
        (without_a_tokenizer, "tokenizer_config.json: does not exist"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, break_it: Callable[[Path], None], words: str) -> None:
    root = model(tmp_path / "model")
    break_it(root)
    code, said = check(root)
    assert (code, words in said) == (1, True), said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("template", "options", "code"), [(PLAIN, (), 0), (PLAIN, ("--tools",), 1), (None, (), 1), (None, ("--tools",), 1)]
)
def test_the_chat_template(tmp_path: Path, template: str | None, options: tuple[str, ...], code: int) -> None:
    assert check(model(tmp_path / "model", template), *options)[0] == code


def test_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    root = model(tmp_path / "model", None)
    (root / "chat_template.jinja").write_text(WITH_TOOLS)
    assert check(root, "--tools")[0] == 0


def test_weights_of_another_format_are_a_warning(tmp_path: Path) -> None:
    root = model(tmp_path / "model")
    without_weights(root)
    (root / "pytorch_model.bin").write_bytes(b"x")
    assert check(root)[0] == 10


def test_no_directory(tmp_path: Path) -> None:
    assert check(tmp_path / "missing") == (1, f"{tmp_path / 'missing'}: no such directory\n")


def test_rendered_by_transformers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="transformers is not installed: make test-trainers")
    pytest.importorskip("transformers", reason="transformers is not installed: make test-trainers")
    for name, template, code in (("whole", WITH_TOOLS, 0), ("mentions", "{# tools #}" + PLAIN, 1)):
        root = model(tmp_path / name, template)
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(root / "tokenizer.json"))
        write(
            root / "tokenizer_config.json",
            {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"},
        )
        done, said = check(root, "--tools", "--render")
        assert done == code, said
        assert code == 0 or "leaves the tools out" in said
