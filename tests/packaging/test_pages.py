"""The pages: a complete runbook, the README's screen, an index that names every page, and no link to nowhere."""

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from podwatch.config.setting_names import walk
from podwatch.domain.finding import FindingKind
from tools import pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXTS = sorted({*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("examples/**/*.md")})
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    inside = False
    for line in text.splitlines():
        inside ^= line.startswith("```")
        match = re.match(r"#{1,6} (.*)", line)
        if inside or match is None:
            continue
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {name if not i else f"{name}-{i}" for name, count in found.items() for i in range(count + 1)}


def broken(page: Path, text: str) -> list[str]:
    """The links of this page that lead nowhere."""
    found = []
    for target in LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)):
        if re.match(r"[a-z+]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not broken(page, page.read_text())


def test_each_page_that_a_message_or_an_example_names_exists() -> None:
    sources = [p for top in ("src", "config", "examples", "systemd", "docs/schema") for p in (ROOT / top).rglob("*.*")]
    texts = [
        p.read_text() for p in sources if p.suffix in {".py", ".toml", ".json", ".yaml", ".yml", ".sh", ".service"}
    ]
    named = {name for text in texts for name in re.findall(r"\bdocs/([\w-]+\.md)", text)}
    assert len(named) > 10
    assert {name for name in named if not (DOCS / name).exists()} == set()


def test_a_broken_link_is_found() -> None:
    text = "[a](runbook.md#hang) [b](runbook.md#hung) [c](gone.md) [d](https://example.org/x) `[e](code)`"
    assert broken(DOCS / "README.md", text) == ["runbook.md#hung", "gone.md"]


def test_the_runbook_is_complete_and_as_the_code_is() -> None:
    text = pages.PAGE.read_text()
    assert not pages.problems(text)
    assert pages.rendered(text) == text, "run `python tools/pages.py`"


def test_an_entry_that_is_missing_empty_or_stale_is_found() -> None:
    text = pages.PAGE.read_text()
    entry = re.search(r"^### hang\n.*?(?=^### )", text, re.MULTILINE | re.DOTALL)
    assert entry is not None
    assert pages.problems(text.replace(entry[0], "")) == ["hang: no entry"]
    assert pages.problems(text.replace("### hang\n", "### hangs\n")) == ["hang: no entry", "hangs: no such finding"]
    assert "hang: 'meaning' is empty" in pages.problems(text.replace(entry[0], pages.skeleton(FindingKind.HANG)))
    meaning = entry[0].split("\n\n")[2]
    assert pages.problems(text.replace(f"{meaning}\n\n", "", 1)) == ["hang: 'meaning' is empty"]
    stale = pages.problems(text.replace(pages.facts(FindingKind.HANG), "*info*"))
    assert len(stale) == 1
    assert "line of facts" in stale[0]
    assert pages.problems(text.replace("| 86 |", "| 87 |")) == ["exit code 86: no row", "exit code 87: no such code"]
    again = pages.rendered(text.replace(entry[0], ""))
    assert pages.problems(again) == [f"hang: {part!r} is empty" for part in pages.PARTS]


def test_every_finding_has_a_severity() -> None:
    assert not [kind for kind, found in pages.severities().items() if not found]


def test_the_readme_shows_the_present_screen() -> None:
    text = (ROOT / "README.md").read_text()
    assert pages.screened(text) == text, "run `python tools/pages.py`"
    assert "TRAINING IS RUNNING" in text


def test_the_index_and_the_site_name_every_page() -> None:
    all_pages = {page.name for page in DOCS.glob("*.md")}
    assert set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == all_pages
    named = {target.partition("#")[0] for target in LINK.findall((DOCS / "README.md").read_text())}
    assert not all_pages - named - {"README.md"}


# -- the last lines of a Slurm script


def last_lines() -> list[tuple[str, str]]:
    """(page, lines) of every block that ends a job script with podwatch's code."""
    blocks = re.compile(r"^ +code=\$\?\n.*?exit \$code\n", re.M | re.S)
    pages = [DOCS / "jobs.md", DOCS / "nodes.md"]
    return [(page.name, textwrap.dedent(block)) for page in pages for block in blocks.findall(page.read_text())]


@pytest.mark.parametrize(("page", "lines"), last_lines(), ids=[page for page, _ in last_lines()])
def test_a_finished_job_is_0_and_only_86_runs_again(page: str, lines: str) -> None:
    again = "99" if "code=99" in lines else "86 submitted"
    for code, expected in (("0", "0"), ("65", "65"), ("86", again)):
        script = f"sbatch() {{ submitted=' submitted'; }}; trap 'echo $?$submitted' EXIT; (exit {code})\n{lines}"
        job = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1"}
        ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=job, timeout=30)
        assert ran.stdout.strip() == expected, (code, ran.stderr)


def test_all_three_scripts_have_been_found() -> None:
    assert [page for page, _ in last_lines()] == ["jobs.md", "jobs.md", "nodes.md"]


# -- settings: a page that gives a default gives the real one

NAMED = re.compile(r"`([a-z_]+\.[a-z_.]+)`(?:\]\([^)]*\))? \((\d[\d.]*) ?(s|min|h|%|GiB|MB)?(?!\w)[^()]*\)")
UNITS = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "%": 0.01, "GiB": float(1 << 30), "MB": 1e6}


def defaults_named(text: str) -> list[tuple[str, float, float]]:
    """(setting, the default as the page gives it, the default of the code)."""
    known = dict(walk())
    found = [m for m in NAMED.finditer(text) if m[1] in known]
    return [(m[1], float(m[2]) * UNITS[m[3]], float(known[m[1]].default)) for m in found]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_a_default_that_a_page_gives_is_that_of_the_code(page: Path) -> None:
    assert [one for one in defaults_named(page.read_text()) if one[1] != pytest.approx(one[2])] == []


def test_a_wrong_default_is_found() -> None:
    text = "`gpu.hold` (8 s), [`hang.floor`](x) (24 min), `trainer.nofile` (65535)"
    assert [said == real for _, said, real in defaults_named(text)] == [True, False, False]
