"""Take secrets out of text before it is kept or shown (promise 11).

Two nets: values that we *know* are secret (given explicitly), and shapes that look like one. A shape may take out
something harmless (a 40-digit hash beside the word "wandb"); it is better to lose that than to keep a key.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

MASK: Final = "[removed]"
MIN_SECRET: Final = 6
"""Shorter known values are not searched for: replacing every "1" would make a log unreadable."""

# Bounded, because an unbounded run of word characters is tried from each of its letters: minutes for a long one.
_NAME = r"[A-Za-z0-9_.\-]{0,40}(?:API[_-]?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)[A-Za-z0-9_]*"
_VALUE = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&\"'}\])]+)"
_RULES: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    # NAME=value, --name value, "name": "value"
    (
        re.compile(rf"(?i)(?P<name>{_NAME})(?P<between>[\"']?\s*[=:]\s*)(?P<value>{_VALUE})"),
        lambda m: f"{m['name']}{m['between']}{MASK}",
    ),
    (
        re.compile(rf"(?i)(?P<name>--{_NAME})(?P<between>\s+)(?P<value>(?!-){_VALUE})"),
        lambda m: f"{m['name']}{m['between']}{MASK}",
    ),
    (re.compile(r"(?i)(?<![A-Za-z0-9])(Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{8,}"), rf"\1 {MASK}"),
    # user:password@ in a URL
    (re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]{0,20}://)[^/\s:@]+:[^/\s@]+@"), rf"\g<scheme>{MASK}@"),
    (re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{16,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_\-]{16,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{20,}|(?<![A-Za-z0-9])github_pat_[A-Za-z0-9_]{20,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"), MASK),
    # W&B: exactly 40 hex digits, also with its newer prefix
    (re.compile(r"(?<![A-Za-z0-9])wandb_v1_[A-Za-z0-9_]{20,}"), MASK),
    (re.compile(r"(?<![0-9A-Za-z])[0-9a-fA-F]{40}(?![0-9A-Za-z])"), MASK),
    # B2 application keys: K + 3 digits + 27 of base64; key ids: 25 hex digits, or 12 for the master key id
    (re.compile(r"(?<![A-Za-z0-9+/])K[0-9]{3}[A-Za-z0-9+/]{27}(?![A-Za-z0-9+/])"), MASK),
    (re.compile(r"(?<![0-9A-Za-z])00[0-9a-f]{23}(?![0-9A-Za-z])"), MASK),
)


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` with everything that is, or looks like, a secret replaced by ``[removed]``. Idempotent."""
    for secret in sorted({s for s in secrets if len(s) >= MIN_SECRET}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


_SECRET_NAME = re.compile(r"(?i)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)")


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """The values of an environment whose names say that they are secret: to be given to ``scrub``."""
    return frozenset(v for k, v in environment.items() if _SECRET_NAME.search(k) and len(v) >= MIN_SECRET)
