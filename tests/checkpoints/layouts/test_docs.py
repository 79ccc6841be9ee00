"""docs/layouts.md names every layout, and every source of its rules, as the code does."""

from pathlib import Path

from podwatch.checkpoints.layouts import KINDS
from podwatch.checkpoints.layouts.base import Site
from podwatch.config.settings import CustomLayoutSettings

PAGE = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text()


def test_every_layout_is_in_the_table() -> None:
    rows = {line.split("|")[1].strip(" `") for line in PAGE.splitlines() if line.startswith("| `")}
    assert rows == set(KINDS)


def test_every_source_is_named() -> None:
    site = Site(Path("/nonexistent"), custom=CustomLayoutSettings())
    expected = [
        f"| `{kind.name}` | {s.project} | `{s.file}` | {s.commit[:10]} |"
        for kind in KINDS.values()
        for s in kind.make(site).sources
    ]
    table = PAGE.split("## Sources")[1].splitlines()
    assert [line for line in table if line.startswith("| `")] == expected


def test_whether_it_reshards_is_what_the_code_says() -> None:
    site = Site(Path("/nonexistent"), custom=CustomLayoutSettings())
    for line in PAGE.split("## Sources")[0].splitlines():
        if line.startswith("| `"):
            cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
            word = cells[-1].split()[0]
            assert word in ("yes", "no", "not")
            if word != "not":
                assert KINDS[cells[0]].make(site).reshards == (word == "yes"), cells[0]
