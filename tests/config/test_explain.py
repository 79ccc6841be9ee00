import json
import tomllib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.config.explain import mask_argv, render_reference, render_toml, to_json, to_toml
from podwatch.config.loading import load_text
from podwatch.config.setting_names import known_keys, walk
from tests.support.examples import examples

MINIMAL = 'run_id = "r1"\n[trainer]\noutput_dir = "/data/out"\n'
DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_docs_list_every_key_with_default_and_meaning() -> None:
    assert DOCS.read_text().endswith(render_reference()), "renew docs/configuration.md from render_reference()"


def test_every_key_has_a_meaning() -> None:
    assert [key for key, field in walk() if len(field.description or "") < 10] == []


def test_what_is_shown_loads_again_to_the_same() -> None:
    text = (
        MINIMAL + 'layout = "custom"\ncommand = ["a \\"b\\"", "ü\\t"]\nenv = { A = "1" }\n'
        '[checkpoints.custom]\nrequire = ["x/*"]\n[gpu]\nhold = "1.5s"\n[disk]\ncapacity = "1234567B"\n'
    )
    loaded = load_text(text, None, environ={}, overrides={"hang.floor": "30m"})
    again = load_text(render_toml(loaded.settings, loaded.sources), None, environ={})
    assert again.settings == loaded.settings


def test_without_sources_only_what_differs_from_the_default_is_live() -> None:
    loaded = load_text(MINIMAL + '[gpu]\nhold = "3s"\n', None, environ={})
    live = tomllib.loads(render_toml(loaded.settings))
    assert live["gpu"] == {"hold": "3s"}
    assert live["sync"] == {}


def test_nothing_secret_is_shown() -> None:
    loaded = load_text(
        MINIMAL + 'command = ["rl", "--wandb.api-key", "hush", "--token=hush", "http://a:hush@b"]\n',
        None,
        environ={"PODWATCH_TRAINER__ENV__MY_TOKEN": "hush"},
    )
    shown = render_toml(loaded.settings, loaded.sources) + json.dumps(to_json(loaded.settings, loaded.sources, None))
    assert "hush" not in shown
    assert "MY_TOKEN" in shown


def test_json_has_every_key_and_its_source() -> None:
    loaded = load_text(MINIMAL, None, environ={"PODWATCH_GPU__HOLD": "1s"})
    shown = to_json(loaded.settings, loaded.sources, None)
    assert set(shown["settings"]) == set(known_keys())
    assert shown["settings"]["gpu.hold"]["value"] == "1s"
    assert shown["settings"]["gpu.hold"]["source"] == "environment"


def test_argv_masks_the_value_only() -> None:
    assert mask_argv(["x", "--api-key", "v", "--flag", "KEY=v"]) == ["x", "--api-key", "***", "--flag", "KEY=***"]


@settings(deadline=None, max_examples=examples(100))
@given(st.dictionaries(st.text(max_size=5), st.lists(st.text())))
def test_toml_literals_are_toml(value: dict[str, list[str]]) -> None:
    def whole(text: str) -> str:
        return text.encode("utf-8", "ignore").decode()

    clean = {whole(key): [whole(text) for text in texts] for key, texts in value.items()}
    assert tomllib.loads(f"x = {to_toml(clean)}")["x"] == clean
