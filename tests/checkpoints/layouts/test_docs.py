"""docs/layouts.md names every layout, and every source of its rules, as the code does."""

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


def test_every_source_is_named() -> None:
    expected = [row for kind in KINDS.values() if (row := sources_row(kind))]
    assert [line for line in section("Sources") if line.startswith("| `")] == expected


def sources_row(kind: Kind) -> str:
    found: dict[str, list[str]] = {}
    for source in kind.make(Site(Path("/nonexistent"), custom=CustomLayoutSettings())).sources:
        found.setdefault(f"{source.project} {source.commit[:10]}", []).append(f"`{source.file}`")
    text = "; ".join(f"{project}: {', '.join(files)}" for project, files in found.items())
    return f"| `{kind.name}` | {text} |" if found else ""


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
