"""docs/layouts.md describes every layout as the code does, and each layout names its sources."""

from pathlib import Path

from podwatch.checkpoints.layouts import KINDS
from podwatch.checkpoints.layouts.base import Kind, Site
from podwatch.config.settings import CustomLayoutSettings

PAGE = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text()


def section(title: str) -> list[str]:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0].splitlines()


def test_every_layout_is_in_the_table() -> None:
    rows = {line.split("|")[1].strip(" `") for line in PAGE.splitlines() if line.startswith("| `")}
    assert rows == set(KINDS)


def test_every_layout_says_where_its_rules_were_read() -> None:
    made = {name: kind.make(Site(Path("/nonexistent"), custom=CustomLayoutSettings())) for name, kind in KINDS.items()}
    assert [name for name, layout in made.items() if not layout.sources] == ["custom"]
    assert all(source.project and source.commit and source.file for one in made.values() for source in one.sources)


def test_whether_it_reshards_is_what_the_code_says() -> None:
    site = Site(Path("/nonexistent"), custom=CustomLayoutSettings())
    for line in section("The layouts"):
        if line.startswith("| `"):
            cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
            word = cells[-1].split()[0]
            assert word in ("yes", "no", "not")
            if word != "not":
                assert KINDS[cells[0]].make(site).reshards == (word == "yes"), cells[0]


def test_where_an_inference_server_finds_the_model_is_what_the_code_says() -> None:
    assert [line for line in section("Weights for inference") if line.startswith("| `")] == [
        weights_row(kind) for kind in KINDS.values()
    ]


def weights_row(kind: Kind) -> str:
    found = kind.weights
    places = ", ".join(f"`{place}`" for place in found.places) or "none"
    convert = f"`{found.convert}`" if found.convert else "none known"
    cells = (": ".join(filter(None, pair)) for pair in ((places, found.when), (convert, found.note)))
    return f"| `{kind.name}` | {' | '.join(cells)} |"
