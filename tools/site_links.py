"""A hook of mkdocs: a link out of docs/ has no page in the site, so the site shows the file's path instead."""

import re

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)]*)\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    return _OUTSIDE.sub(lambda m: f"`{m[2]}`" if m[1].strip("`") in m[2] else f"{m[1]} (`{m[2]}`)", markdown)
