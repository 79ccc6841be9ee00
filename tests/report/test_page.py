"""The page at ``/``: what it shows in each state, and that nothing in it is ever HTML but the template."""

import base64
import copy
import hashlib
import html
import html.parser
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.report import html as made
from podwatch.report import page
from podwatch.report.status import build_status
from tests.report import views
from tests.support.examples import examples

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "</pre></title><svg onload=alert(1)>",
    '`podwatch <b>x</b>" onclick="alert(1)`',
    "javascript:alert(1)",
    "&lt;img src=x&gt;",
    "\ud800\x00\x1b[2J\u202e\u2028<a href=//x>",
    "<!--",
    "]]>",
    "{{7*7}}",
    "",
)
_ELEMENTS = (
    "html head meta title link style body p main header h1 span section h2 div ul li strong b code button pre svg rect"
    " path figure figcaption"
    " dl dt dd script"
)
_ATTRIBUTES = (
    "lang charset name content rel href id role class aria-label aria-labelledby aria-hidden data-part data-copy type"
    " viewbox preserveaspectratio width height x y d vector-effect focusable data-stamp"
)
ELEMENTS, ATTRIBUTES = frozenset(_ELEMENTS.split()), frozenset(_ATTRIBUTES.split())
RUNS_CODE = re.compile(r"on\w+|src|srcset|style|srcdoc|formaction|action|xlink:href")


class Read(html.parser.HTMLParser):
    """The elements with their attributes, the text, and whether every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.comments = 0
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in made.VOID | made.SHAPES:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in made.SHAPES
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text.append(data)

    def handle_comment(self, data: str) -> None:
        self.comments += 1

    def handle_pi(self, data: str) -> None:
        self.comments += 1


def shown(view: Any, log: Any = ()) -> str:
    return page.render(build_status(view), incidents=[("a death: restarted", False)], log=log)


def check(text: str) -> Read:
    """Nothing in the page is an element or attribute that the template does not have."""
    read = Read(text)
    assert {name for name, _ in read.elements} <= ELEMENTS
    assert {key for _, given in read.elements for key in given} <= ATTRIBUTES
    assert not any(RUNS_CODE.fullmatch(key) for _, given in read.elements for key in given)
    assert not read.comments
    count = [name for name, _ in read.elements]
    assert (count.count("script"), count.count("style"), count.count("link")) == (1, 1, 1)
    (icon,) = (given["href"] for name, given in read.elements if name == "link")
    assert str(icon).startswith("data:image/svg+xml,<svg ")
    text.encode()
    return read


def poisoned(value: Any, put: Any) -> Any:
    """``value`` with every text in it replaced; machine words included."""
    if isinstance(value, dict):
        return {key: poisoned(one, put) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one, put) for one in value]
    return put() if isinstance(value, str) else value


@pytest.mark.parametrize("name", views.ALL)
def test_every_state_is_a_page_with_the_verdict_first(name: str) -> None:
    text = shown(views.ALL[name](), ["step 85 loss 0.3"])
    read = check(text)
    words = " ".join(read.text)
    assert words.index("TRAINING") < words.index("Needs you") < words.index("State") < words.index("Incidents")
    assert words.index("Incidents") < words.index("Last log lines")
    assert [name for name, _ in read.elements].count("h1") == 1
    assert "step 85 loss 0.3" in words


def test_a_command_to_copy_is_a_button_with_a_name() -> None:
    read = check(shown(views.gave_up()))
    (given, *_) = [given for name, given in read.elements if name == "button"]
    assert given["data-copy"] == "podwatch start"
    assert given["aria-label"] == "Copy podwatch start"


def test_progress_is_per_cent_and_time_to_the_end() -> None:
    document = build_status(views.healthy())
    assert "42\xa0%, ends in 2\xa0h 37\xa0min to 3\xa0h" in page.render(document)
    document["account"] = None
    assert "<dd>42\xa0%<svg" in page.render(views.reworded(document))
    assert "ends in" not in shown(views.gave_up())


def test_every_row_of_the_status_is_on_the_page() -> None:
    for name in views.ALL:
        document = build_status(views.ALL[name]())
        words = " ".join(" ".join(check(page.render(document)).text).split())
        for row in document["rows"]:
            if row["label"] not in ("run", "log", "last death"):
                assert row["label"] in words
                first = row["text"].split("  ")[0].strip().replace("`", "")
                assert first.split(" ")[0] in words


def test_ids_are_unique_and_named_by_headings() -> None:
    read = check(shown(views.after_recovery()))
    ids = [given["id"] for _, given in read.elements if "id" in given]
    assert len(ids) == len(set(ids))
    assert {given["aria-labelledby"] for _, given in read.elements if "aria-labelledby" in given} <= set(ids)


@pytest.mark.parametrize("document", [{}, {"running": True}, {"running": True, "rows": "?", "gpus": "?"}])
def test_a_document_of_another_version_still_renders(document: dict[str, Any]) -> None:
    check(page.render(document))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(sorted(views.ALL)),
    st.lists(st.sampled_from(HOSTILE) | st.text(max_size=30), min_size=1, max_size=20),
)
def test_no_text_is_ever_html(name: str, texts: list[str]) -> None:
    hostile = iter(texts * 1000)

    def put() -> str:
        return next(hostile)

    document = copy.deepcopy(build_status(views.ALL[name]()))
    kept = {key: document[key] for key in ("time",)}
    training = document["training"]["state"]
    document = poisoned(document, put) | kept
    document["training"]["state"] = training
    check(page.render(document, incidents=[(put(), True)], log=texts))


@given(st.text(), st.text())
def test_what_is_escaped_reads_back_as_it_was(text: str, value: str) -> None:
    clean = "".join(c if c.isprintable() or c in made.KEPT else " " for c in text)
    quoted = "".join(c if c.isprintable() or c in made.KEPT else " " for c in value)
    read = Read(made.tag("p", text, title=value))
    assert read.elements == [("p", {"title": quoted})]
    assert "".join(read.text) == clean


def test_the_policy_allows_this_style_and_this_script_only() -> None:
    policy = dict(page.headers())["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    for name in ("style", "script"):
        (text,) = re.findall(rf"<{name}>(.*?)</{name}>", shown(views.healthy()), re.DOTALL)
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
