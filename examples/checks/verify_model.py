#!/usr/bin/env python3
"""Whether a local model directory can be trained and served: a command for a hook on `check` (docs/hooks.md), offline.

    verify_model.py DIRECTORY [--tools] [--render]

Reads config.json, the tokenizer, the headers of every safetensors file and the list of tensors that names them.
--tools: the chat template must handle tools. --render: transformers loads the tokenizer from the directory alone and
renders a conversation, with a tool if --tools is given, so that a template that only mentions tools is found.

Exit code 0: usable; 1: not usable, every problem on a line; 10: probably, the last line says what was not checked.
"""

import argparse
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_MOST = 100_000_000
"""Bytes of a safetensors header; the format's own limit."""
TOOL = {
    "type": "function",
    "function": {
        "name": "podwatch_probe",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError with the path."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


def tensors_of(path: Path) -> set[str]:
    """The names of the tensors in a safetensors file whose data is all there. Raises ValueError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_MOST + 1
            if length > min(HEADER_MOST, size - 8):
                raise ValueError(f"{path}: no safetensors file, or cut ({size} bytes)")
            header = json.loads(file.read(length))
        ends = {name: int(about["data_offsets"][1]) for name, about in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (KeyError, IndexError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: its header cannot be read: {error!r}") from error
    needed = 8 + length + max(ends.values(), default=0)
    if size != needed:
        raise ValueError(f"{path}: has {size} bytes, its header says {needed}")
    return set(ends)


def weight_problems(directory: Path) -> Iterator[str]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not named:
            yield f"{index}: has no weight_map"
            return
        for name in sorted({str(file) for file in named.values()}):
            if Path(name).name != name:
                yield f"{index}: names a file outside the directory: {name}"
                continue
            try:
                missing = {tensor for tensor, file in named.items() if file == name} - tensors_of(directory / name)
            except ValueError as error:
                yield str(error)
                continue
            if missing:
                yield f"{directory / name}: lacks {len(missing)} tensors of the index, for example {min(missing)}"
    elif (directory / "model.safetensors").exists():
        try:
            if not tensors_of(directory / "model.safetensors"):
                yield f"{directory / 'model.safetensors'}: holds no tensor"
        except ValueError as error:
            yield str(error)
    elif not list(directory.glob("*.bin")):
        yield f"{directory}: has no weights (model.safetensors, or model.safetensors.index.json)"


def templates(directory: Path) -> dict[str, str]:
    """Name -> text; the name is empty where there is only one."""
    file = directory / "chat_template.jinja"
    try:
        if file.exists():
            return {"": file.read_text(encoding="utf-8")}
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from error
    found = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        return {str(one.get("name")): str(one.get("template")) for one in found if isinstance(one, dict)}
    return {"": found} if isinstance(found, str) else {}


def tokenizer_problems(directory: Path, *, tools: bool) -> Iterator[str]:
    if not (directory / "tokenizer_config.json").exists():
        yield f"{directory / 'tokenizer_config.json'}: does not exist"
        return
    try:
        found = templates(directory)
    except ValueError as error:
        yield str(error)
        return
    vocabulary = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    if not any((directory / name).exists() for name in vocabulary):
        yield f"{directory}: has no vocabulary ({', '.join(vocabulary)})"
    if not found:
        yield f"{directory}: its tokenizer has no chat template; is it a base model?"
    elif tools and "tool_use" not in found and not any("tools" in text for text in found.values()):
        yield f"{directory}: its chat template does not handle tools; use an instruct model, or set chat_template"


def render_problems(directory: Path, *, tools: bool) -> Iterator[str]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Is it raining in Bern?"}],
            tools=[TOOL] if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # the library raises errors of every kind
        yield f"{directory}: transformers cannot use its tokenizer: {error!r}"
        return
    if "raining in Bern" not in text:
        yield f"{directory}: its chat template leaves the conversation out"
    if tools and TOOL["function"]["name"] not in text:  # type: ignore[index]
        yield f"{directory}: its chat template leaves the tools out"


def problems(directory: Path, *, tools: bool) -> Iterator[str]:
    """What makes this model directory unusable; empty if nothing was found."""
    if not directory.is_dir():
        yield f"{directory}: no such directory"
        return
    try:
        config = read_json(directory / "config.json")
        if not config.get("model_type"):
            yield f"{directory / 'config.json'}: names no model_type"
    except ValueError as error:
        yield str(error)
    try:
        yield from weight_problems(directory)
    except ValueError as error:
        yield str(error)
    yield from tokenizer_problems(directory, tools=tools)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tools", action="store_true", help="the chat template must handle tools")
    parser.add_argument("--render", action="store_true", help="render a conversation with transformers")
    given = parser.parse_args()
    found = list(problems(given.directory, tools=given.tools))
    if given.render and not found:
        try:
            import transformers  # noqa: F401
        except ImportError:
            print("usable as far as its files show; not rendered: transformers is not installed")
            return 10
        found = list(render_problems(given.directory, tools=given.tools))
    if found:
        print(*found, sep="\n")
        return 1
    if not list(given.directory.glob("*.safetensors")):
        print("usable as far as its files show; its weights are no safetensors files, so they were not checked")
        return 10
    print(f"{given.directory}: usable" + (", with tools" if given.tools else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
