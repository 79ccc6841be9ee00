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
TEXTS = sorted({ROOT / "README.md", *DOCS.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("examples/**/*.md")})
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MOST_LINES = 70
"""One screen of the README, as a browser shows it."""


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


def test_the_readme_shows_the_present_screen_and_fits_on_one() -> None:
    text = (ROOT / "README.md").read_text()
    assert pages.screened(text) == text, "run `python tools/pages.py`"
    assert "TRAINING IS RUNNING" in text
    assert len(text.splitlines()) <= MOST_LINES


def test_the_index_and_the_site_name_every_page() -> None:
    all_pages = {page.name for page in DOCS.glob("*.md")}
    assert set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == all_pages
    named = {target.partition("#")[0] for target in LINK.findall((DOCS / "README.md").read_text())}
    assert not all_pages - named - {"README.md"}


AVOIDED = re.compile(
    r"\b(?:anew|afresh|nobody|somebody|go(?:es)? on|wish(?:es)?|begun|mend|for ever|sign of life|all the same)\b",
    re.IGNORECASE,
)
"""Words of docs/style.md's right column that have no other meaning on these pages."""


@pytest.mark.parametrize(
    "page", sorted({ROOT / "README.md", *DOCS.glob("*.md")} - {DOCS / "style.md"}), ids=lambda p: p.name
)
def test_no_page_uses_a_word_that_the_style_replaces(page: Path) -> None:
    assert not AVOIDED.findall(page.read_text())


# -- the questions of a bad night: one line of the index, then one section with the command

QUESTIONS = {
    "What does this finding mean": ("runbook.md", "### hang"),
    "Why did it restart, and from this step?": ("runbook.md#why-did-it-restart", "podwatch incidents"),
    "Why did it *not* restart?": ("runbook.md#why-did-it-not-restart", "`podwatch restart`"),
    "What if podwatch crashes?": ("start.md#what-if-podwatch-crashes", "**Slurm does not**"),
    "try it without a GPU": ("../README.md#try-it", "make demo"),
    "list, archive, copy runs": ("runs.md#delete-a-run", "b2 rm --recursive"),
    "What do I lose if this pod dies now?": ("runbook.md#what-do-i-lose-if-this-pod-dies-now", "podwatch sync --wait"),
    "restart podwatch; training": ("runbook.md#restart-podwatch", "`kill -9 PID`"),
    "podwatch itself does not run": ("runbook.md#podwatch-does-not-run", "podwatch -c podwatch.toml run --detach"),
    "The provider takes the machine away": ("maintenance.md#what-if-the-machine-is-taken-away", "`podwatch preempt`"),
    "What does exit code 86": ("runbook.md#exit-codes", "| 86 |"),
    "The store is down": ("runbook.md#the-store-is-down", "podwatch check"),
    "The disk is full": ("runbook.md#disk-no-room", "`podwatch prune --dry-run`"),
    "move to another pod": ("runbook.md#move-to-another-pod", "`podwatch preempt`"),
    "change the configuration while": ("runbook.md#change-the-configuration-while-training-runs", "systemctl reload"),
    "upgrade; uninstall": ("runbook.md#uninstall", "podwatch uninstall --dry-run"),
    "get a notice on my phone": ("notifications.md#what-do-i-copy-for-my-service", "ntfys://ntfy.sh/"),
    "What is stored, and where?": ("sync.md#what-is-in-the-store", "latest.json"),
    "know how much it cost": ("cost.md", "per_hour"),
    "resume on a bare pod": ("bootstrap.md", "podwatch bootstrap"),
    "go back to an older step": ("checkpoints.md#can-i-go-back-to-an-older-step", "podwatch restart --step N"),
    "know whether my trainer is supported": ("start.md#is-my-trainer-supported", "| you set |"),
    "know what happens to training when podwatch": (
        "start.md#how-do-i-run-it-and-what-happens-to-training-when-podwatch-stops",
        "**Stopping the container ends training**",
    ),
    "start a run; stop it": ("start.md#how-do-i-stop-training-for-an-hour-or-for-good", "podwatch stop-training"),
    "It restarts too early": ("detection.md#which-setting-do-i-change", "`hang.floor`"),
    "Why was a checkpoint not uploaded?": ("checkpoints.md#why-is-mine-not-in-the-store", "`podwatch sync --step N`"),
    "know that a checkpoint is safe": ("checkpoints.md#how-do-i-know-that-a-checkpoint-is-safe", "store verify --deep"),
    "know which exit code makes Slurm": ("engines.md#slurm", "`RequeueExit=86`"),
    "know how much podwatch, a hook": ("hooks.md#what-a-hook-cannot-do-to-training", "lowest priority"),
    "only watch for a first week": ("maintenance.md#how-do-i-keep-podwatch-out-of-the-way", '`mode = "observe"`'),
    "read the trainer's log": ("runs.md#what-else-is-kept-of-a-run", "b2 sync"),
    "It says NOT BACKED UP": ("runbook.md#not-backed-up", "`[sync] store`"),
    "The pod is gone": ("runbook.md#move-to-another-pod", "`podwatch run --detach`"),
    "It restarted a run that I ended": ("detection.md#what-if-i-ended-it-myself", "`podwatch stop-training`"),
    "Uploads are slow": ("runbook.md#uploads-slow", "`uplink`"),
    "Two pods train the same run": ("two-pods.md", "`podwatch run --take-over`"),
    "set it up on a rented pod": ("pods.md#runpod", "exec /workspace/podwatch/bin/podwatch"),
    "guard several runs on one pod": (
        "start.md#how-do-i-run-it-and-what-happens-to-training-when-podwatch-stops",
        "`podwatch --run NAME status`",
    ),
    "free a GPU from leftover": ("maintenance.md#how-do-i-free-a-gpu-from-leftover-processes", "podwatch clean --gpu"),
    "guard a trainer that I started": ("attaching.md", "podwatch start --attach PID"),
    "keep a checkpoint from being deleted": ("disk.md#what-is-always-kept", "`podwatch checkpoints pin N`"),
    "see the run, with plots": ("page.md", "ssh -L 9477:127.0.0.1:9477"),
    "know from my laptop": ("runs.md#check-a-run-from-outside", "podwatch runs check"),
    "end the rented machine": ("end-the-pod.md", "[end_pod]"),
    "stop a run on a pod that I cannot reach": ("two-pods.md#controljson", '{"desired": "stopped"'),
    "give podwatch its keys": ("sync.md#b2", "`listFiles`, `readFiles`, `writeFiles`"),
    "podwatch sees no steps": ("layouts.md#where-are-steps-read", "`$PODWATCH_HEARTBEAT_URL`"),
    "choose a store": ("s3.md", "https://ACCOUNT.r2.cloudflarestorage.com"),
    "see all pods in Grafana": ("notifications.md#podwatchs-figures-in-wb", "[wandb]"),
    "get a notice on my phone; not": ("notifications.md#which-notices-and-when", "| `finished` | info |"),
    "Above 85 %, and nothing": ("disk.md#when-does-podwatch-delete", "`podwatch prune --dry-run`"),
    "Two trainers write": ("checkpoints.md#what-if-two-trainers-write-into-one-output_dir", "stops neither"),
    "Will podwatch kill my notebook?": ("security.md#will-podwatch-kill-my-notebook", "the start waits"),
    "train one run on several nodes": ("nodes.md#what-if-each-node-saves-to-a-disk-of-its-own", "a directory that all"),
    "fetch a checkpoint, to a laptop": ("sync.md#how-do-i-get-a-checkpoint-back", "podwatch runs restore RUN --store"),
    "What was never tried": ("runbook.md#what-could-not-be-tried-without-real-hardware", "Backblaze B2"),
}


def section(page: Path, anchor: str) -> str:
    """The text below the heading with this anchor, up to the next heading of its level or above."""
    found: list[str] = []
    level = 0
    for line in page.read_text().splitlines():
        match = re.match(r"(#{1,6}) ", line)
        if match and level and len(match[1]) <= level:
            break
        if match and anchor in anchors(line):
            level = len(match[1])
        if level:
            found.append(line)
    return "\n".join(found)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_index_leads_to_an_answer_in_one_step(question: str) -> None:
    (line,) = [line for line in (DOCS / "README.md").read_text().splitlines() if line.startswith(f"| {question}")]
    target, command = QUESTIONS[question]
    assert f"({target})" in line
    page, _, anchor = target.partition("#")
    answer = section(DOCS / page, anchor) if anchor else (DOCS / page).read_text()  # a page to look a name up in
    assert command in answer
    assert not anchor or len(answer.split()) < 300, "a minute's reading"


# -- the last lines of a Slurm script


def last_lines() -> list[tuple[str, str]]:
    """(page, lines) of every block that ends a job script with podwatch's code."""
    blocks = re.compile(r"^ +code=\$\?\n.*?exit \$code\n", re.M | re.S)
    pages = [DOCS / "engines.md", DOCS / "nodes.md"]
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
    assert [page for page, _ in last_lines()] == ["engines.md", "engines.md", "nodes.md"]


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
