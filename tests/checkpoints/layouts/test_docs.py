"""docs/layouts.md describes every layout as the code does, and each layout names its sources."""

import re
from pathlib import Path

from podwatch.checkpoints.layouts import KINDS
from podwatch.checkpoints.layouts.base import Kind, Site, Weights
from podwatch.config.settings import CustomLayoutSettings

PAGE = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text()


def section(title: str) -> list[str]:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0].splitlines()


def test_every_layout_is_in_the_table() -> None:
    assert re.findall(r"^\| `([\w-]+)`", "\n".join(section("The layouts")), re.MULTILINE) == list(KINDS)


def test_every_layout_says_where_its_rules_were_read() -> None:
    made = {name: kind.make(Site(Path("/nonexistent"), custom=CustomLayoutSettings())) for name, kind in KINDS.items()}
    assert [name for name, layout in made.items() if not layout.sources] == ["custom"]
    assert all(source.project and source.commit and source.file for one in made.values() for source in one.sources)


def test_whether_it_reshards_is_what_the_code_says() -> None:
    site = Site(Path("/nonexistent"), custom=CustomLayoutSettings())
    for line in section("The layouts"):
        if line.startswith("| `"):
            name, word = line.split("`")[1], line.strip("|").split("|")[-1].split()[0]
            assert word in ("yes", "no", "not")
            if word != "not":
                assert KINDS[name].make(site).reshards == (word == "yes"), name


def test_where_an_inference_server_finds_the_model_is_what_the_code_says() -> None:
    listed = re.findall(r"^- `.*(?:\n  .*)*", "\n".join(section("Weights for inference")), re.MULTILINE)
    assert [" ".join(entry.split()) for entry in listed] == [
        weights_line(kind) for kind in KINDS.values() if kind.weights != Weights()
    ]


def weights_line(kind: Kind) -> str:
    found = kind.weights
    places = ", ".join(f"`{place}`" for place in found.places) or "no such files"
    text = f"- `{kind.name}`: {places}" + (f" ({found.when})" if found.when else "")
    if found.convert:
        return f"{text}. Convert: `{found.convert}`" + (f" ({found.note})" if found.note else "")
    return f"{text}; {found.note}" if found.note else text
