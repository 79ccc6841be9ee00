"""The scrubber: removes secrets from text before podwatch stores, sends or shows it (docs/security.md).

Two methods. Values that podwatch *knows* (``register...``, called where a secret is read) are found in every form:
plain, percent-encoded, escaped, hexadecimal, base64, wrapped over lines, cut. Unknown ones are found by one table of
patterns (``_ROWS``, ``_TOKENS``) and by the name before them (``_NAMED``). A pattern can remove harmless text; that is
better than showing a key. But a segment of a file's path is no secret, whatever its form: directories are named by
commits and digests (``/nix/store/<hash>-python3``), and a sentence stays (``InvalidAccessKeyId: The AWS key ...``).

``scrub`` is the entry for text, ``scrub_all`` for structures, ``scrub_argv`` for commands. Findings, events, incidents,
notices and errors call it when they are created, so that no caller can forget it. Time grows with the length of the
text only, whatever the text is: each pattern leaves a character behind for good, or looks a bounded way ahead.

Long because the forms of a known value and the patterns of an unknown one are one subject: what one leaves, the other
must remove.
"""

import base64
import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import quote, quote_plus, unquote, urlsplit

MASK: Final = "[removed]"
MIN_SECRET: Final = 8
"""Characters. A shorter value would match inside ordinary words; it is removed only after a secret name."""

# Patterns are text: ``re`` compiles one at its first use and caches it. Errors import this module, and most commands
# raise none.

# -- names -----------------------------------------------------------------------------------------------------------

_ALWAYS = (
    r"[a-z]*passwords?|passwd|passphrase|pwd|sshpass|dbpass|secrets?|apikeys?|credentials?|authorization|authtoken"
    r"|accesstoken|accesskey|privatekey|secretkey"
)
_WEAK = frozenset({"key", "keys", "token", "auth", "cookie", "cookies", "pass"})
_QUALIFIES = (
    r"api|access|secret|private|application|app|account|auth|encrypt|encryption|sign|signing|ssh|service|wandb|openai"
    r"|anthropic|hf|huggingface|hub|aws|b2|s3|x|master|license|deploy|storage|shared|gpg|pgp|webhook|bot|slack|discord"
    r"|telegram|github|gitlab|gh|bearer|refresh|session|security|personal|user|jwt|oauth|admin|http|client|server"
    r"|heartbeat|vllm|runpod|vast|lambda|docker|registry|neptune|comet|mlflow|swanlab|clearml|database|db|root|smtp"
)
_AFTER = frozenset({"value", "header", "base64", "b64", "plain", "text", "raw"})
_ABOUT = (
    r"paths?|files?|filename|dirs?|directory|folder|ids?|ur[il]s?|endpoint|hosts?|port|names?|user|username|refs?|types?"
    r"|kind|method|mode|format|size|len|length|count|limit|ttl|age|expiry|expires|expiration|seconds|days|version|sock"
    r"|socket|errors?|exception|warning|found|missing|required|enabled|disabled|invalid|expired|provider|manager|helper"
    r"|policy|prompt|index|field|column|mask|heads|dim|rate"
)
"""Last words of names whose value is a place, a count or a statement about the secret: ``HF_TOKEN_PATH``."""


@lru_cache(maxsize=1024)
def name_strength(name: str) -> int:
    """2: values under this name are secret; 1: possibly (``key``, ``token``); 0: no. Underscores, dots, dashes and
    capitals separate words: ``wandb.api-key``, ``HF_TOKEN_READ``, ``apiKey``; ``tokenizer`` and ``max_tokens`` give 0.
    The secret word is in the last dotted part: ``secrets.yaml`` is a file."""
    words = _words(name)
    while words and (words[-1].isdigit() or words[-1] in _AFTER):
        words.pop()
    if words[-2:] == ["key", "id"]:
        words.pop()
    if not words or re.fullmatch(_ABOUT, words[-1]):
        return 0
    first = min(len(_words(name.rpartition(".")[0])), len(words) - 1)
    return max(_strength(name, words[: at + 1], at + 1 == len(words)) for at in range(first, len(words)))


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[a-z]+|[0-9]+", name)]


def _strength(name: str, words: Sequence[str], last: bool) -> int:
    """Of the last of ``words``; ``last``: no other follows in the name."""
    word = words[-1]
    if re.fullmatch(_ALWAYS, word):
        return 2
    if word not in _WEAK:
        return 0
    if len(words) > 1 and (re.fullmatch(_QUALIFIES, words[-2]) or (last and name.isupper() and word != "keys")):
        return 2
    if word == "pass" and len(words) == 1:
        return 2 if last and name.islower() else 0  # PASS: the result of a test
    return 1 if last or name.isupper() else 0


# -- values that are no secrets --------------------------------------------------------------------------------------

_NOTHING = (
    r"(?is:true|false|yes|no|on|off|none|null|nil|undefined|empty|default|auto|[0-9]{1,5}"
    r"|[-+]?[0-9]+\.[0-9]*(?:e[-+]?[0-9]+)?|[-+]?[0-9]+e[-+]?[0-9]+|"
    r"|\$\{[a-z_]\w*\}?|(?-i:\$[A-Z_][A-Z0-9_]*)|<[a-z _\-]*>?|\{\{.*|\{(?:\w*:)?|[*.•xX]+|\[removed\]?.*)"
)
"""A switch, a small number, a reference to a variable, a placeholder, a mask. The end of one can be cut off."""
_ORDINARY = (
    r"(?s:(?:~|\.{1,2})?/.*|[A-Za-z]:\\.*|[A-Za-z][a-z]{0,10}|[0-9]+|[A-Za-z][A-Za-z0-9+.\-]{0,20}://.*"
    r"|(?P<dotted>[A-Za-z_]\w*(?:\.\w+)+))"
)
"""A path, a word, a number, a URL, a dotted name."""


_RANDOM = r"(?<![A-Za-z0-9])(?=[A-Za-z0-9]{10})[A-Za-z0-9]*?(?:[A-Za-z][0-9]++[A-Za-z]|[0-9][A-Za-z]++[0-9])"


def _is_nothing(value: str) -> bool:
    return bool(re.fullmatch(_NOTHING, value))


def _looks_random(value: str) -> bool:
    """Whether it contains ten or more mixed letters and digits, and is no path."""
    return "/" not in value and re.search(_RANDOM, value) is not None


def _is_ordinary(value: str) -> bool:
    """Whether removing it everywhere would make messages unreadable. A web token is dotted, too, but looks random."""
    found = re.fullmatch(_ORDINARY, value)
    return _is_nothing(value) or bool(found and not (found["dotted"] and _looks_random(value)))


# -- known values ----------------------------------------------------------------------------------------------------

_known: dict[str, float] = {}
"""Value -> version at which it was registered last; infinite for one that stays for good. Each change is atomic and is
followed by a new version; a reader that finds another version builds its index again, so no lock is needed."""
_versions = itertools.count(1)
_version = 0

MOST_TEMPORARY: Final = 96
"""An id, a key and a token of 32 rotations: more than a day where a service renews them each hour, so that texts that
quote one and are not written yet (log lines, a failed request) still find it."""


def forget() -> None:
    """Drop all known values: for tests, which share a process."""
    global _version
    _known.clear()
    _version = next(_versions)


def known_version() -> int:
    """Another number whenever a value was added or dropped."""
    return _version


def register(*values: str) -> None:
    """Add known secrets, which are removed from every text from now on. Values shorter than 8 characters are ignored
    (they are removed only after a secret name). Of a value with several lines (a private key) each long line counts."""
    _learn(values, temporary=False)


def register_temporary(*values: str) -> None:
    """Add credentials that end by themselves, of which a process that runs for months sees thousands: the last
    ``MOST_TEMPORARY`` stay known. One that ``register`` got stays for good."""
    _learn(values, temporary=True)


def _learn(values: Iterable[str], *, temporary: bool) -> None:
    global _version
    parts = {part for value in values for part in (value, *(x for x in value.splitlines() if len(x.strip()) >= 16))}
    parts = {part.strip() for part in parts if len(part.strip()) >= MIN_SECRET}
    parts = {part for part in parts if MASK not in part and part not in MASK}
    changed = bool(parts - _known.keys())
    version = next(_versions)
    for part in parts:
        _known[part] = max(version if temporary else math.inf, _known.get(part, 0))
    if not changed:
        return
    ending = sorted((at, value) for value, at in tuple(_known.items()) if at < math.inf)
    for _, value in ending[:-MOST_TEMPORARY]:
        _known.pop(value, None)
    _version = version


def register_named(values: Mapping[str, str], *, all_of_it: bool = False) -> None:
    """Register the variables with secret names, and passwords in URLs. ``all_of_it``: the values come from a file for
    secrets, so that a random-looking value is secret under any name except one that ends in ``_ID``."""
    for name, value in values.items():
        strength, random = name_strength(name), _looks_random(value)
        named = (strength == 2 or (strength == 1 and random)) and not _is_ordinary(value)
        by_look = all_of_it and random and len(value) >= 16 and not name.upper().endswith("_ID")
        register(*url_secrets(value), value if named or by_look else "")


def register_address(url: str) -> None:
    """Register a notification address, most of which contain keys: the whole URL, user and password, and every word
    with a digit outside the host of a web address. Words without a digit are ordinary text ("webhooks")."""
    lead, _, rest = url.partition("://")
    scheme = lead.rpartition(" ")[2]
    url = url[len(lead) - len(scheme) :]  # without the severity that can stand before it
    place, _, path = rest.partition("/")
    user, at, host = place.rpartition("@")
    searched = f"{'' if scheme in ('http', 'https') else host}/{path}"
    words = [word for word in re.split(r"[/?&=:,#]", searched) if any(c.isdigit() for c in word)]
    words += user.split(":") if at else []
    register(url, *words, *(unquote(word) for word in words))


def register_argv(argv: Sequence[str]) -> None:
    """Register the values of a command's secret flags."""
    for item, shown in zip(argv, scrub_argv(argv), strict=True):
        register(*url_secrets(item))
        value = item if shown == MASK else item.partition("=")[2] if shown.endswith(f"={MASK}") else ""
        if item != shown and not _is_ordinary(value):
            register(value)


def register_document(value: object, name: str = "") -> None:
    """Register the secrets in a configuration: strings under secret names, and passwords in URLs."""
    match value:
        case str():
            register_named({name: value})
        case Mapping():
            for key, item in value.items():
                register_document(item, f"{name}.{key}")
        case list() | tuple():
            for item in value:
                register_document(item, name)


def url_secrets(url: str) -> frozenset[str]:
    """The password of ``scheme://user:password@host`` and secret query values, as written and decoded."""
    if "://" not in url or ("@" not in url and "?" not in url):
        return frozenset()
    try:
        parts = urlsplit(url)
        password, query = parts.password or "", parts.query
    except ValueError:
        return frozenset()
    pairs = (pair.partition("=") for pair in query.split("&"))
    found = {password, *(value for name, _, value in pairs if name_strength(name) == 2 and not _is_nothing(value))}
    return frozenset(form for value in found if value for form in (value, unquote(value)))


# -- finding known values --------------------------------------------------------------------------------------------

_CUT = 12
"""Characters of a known value of at least 16 that are removed on their own: messages quote a part of a line, and the
cut can be inside a secret."""
_FILL = r"|>\"'\u2500-\u257f"
_BETWEEN = rf"(?:\x1b\[[0-9;?]*+[A-Za-z]|\\++[nr]?+|[\s{_FILL}]++)++"
"""What can stand between the parts of a wrapped text: breaks, also escaped, indentation, quotes, frames, colours."""
_WRAPPING = rf"(?<![\s\\{_FILL}])(?=(?:[^\S\r\n]|[\\{_FILL}])*+(?:[\r\n\x1b]|(?<=\\)[nr])){_BETWEEN}"
"""The same with a break in it: blanks inside a line separate words."""
_LINES = r"(?:\x1b\[[0-9;?]*+[A-Za-z]|(?:(?<![ \t])[ \t]++)?(?:(?<!\\)\\++[nr]|[\r\n])\s*+)++"
"""The same, for values that contain such characters themselves."""
_BREAK = r"[\r\n\x1b]|\\[nr]"


class _Seed(NamedTuple):
    """Eight characters of ``form`` at ``at``. ``least``: characters that must agree inside the form; 0: all of it.
    ``whole``: the base64 text around it is removed, because its ends contain parts of the value."""

    form: str
    at: int
    least: int
    whole: bool


_Index = dict[str, dict[str, list[_Seed]]]


@lru_cache(maxsize=1)
def _index(version: int) -> tuple[tuple[str, _Index], ...]:
    """Eight characters -> what must follow from there -> where in which form that is. One look-up for each character of
    a text finds all values. First the index for text as it is, then those for text without its wrapping, with the
    pattern of the wrapping."""
    plain: _Index = {}
    stripped: _Index = {}
    wrapping: _Index = {}
    for value in tuple(_known):
        cores = _cores(value)
        forms = _forms(value) | cores
        for form in forms | {re.sub(_BETWEEN, "", form) for form in forms}:
            spaced = re.search(_BETWEEN, form)
            for start, seed in _seeds(form, value, cores):
                for index, belongs in ((plain, True), (wrapping, spaced), (stripped, not spaced and form not in forms)):
                    if belongs:
                        index.setdefault(start[:MIN_SECRET], {}).setdefault(start, []).append(seed)
    return ("", plain), (_WRAPPING, plain), (_BETWEEN, stripped), (_LINES, wrapping)


def _seeds(form: str, value: str, cores: set[str]) -> Iterator[tuple[str, _Seed]]:
    """Each with the characters that must stand at its place. Both ends and, of the value itself, every fifth character
    inside, so that one is in whatever run of twelve. Not one repeated character, and none twice: lines of dashes would
    take minutes."""
    if len(form) < MIN_SECRET:
        return
    whole, last = form in cores, len(form) - MIN_SECRET
    cuttable = len(form) >= 16 and (whole or not re.match(r"\w+://", value))
    least = (max(_CUT, len(form) // 8) if whole or form == value else len(form)) if cuttable else 0
    step = max(1, least - MIN_SECRET + 1)
    inside = {form[at : at + MIN_SECRET]: at for at in range(step, last, step) if cuttable}
    for at in (0, *([last] if cuttable else []), *(at for octet, at in inside.items() if len(set(octet)) > 1)):
        yield form[at : at + (_CUT if least and at == 0 else MIN_SECRET)], _Seed(form, at, least, whole)


def _forms(value: str) -> set[str]:
    """The value as it is written in other formats."""
    escaped, data = json.dumps(value)[1:-1], _bytes(value)
    forms = {value, quote(data, safe=""), quote(data), quote_plus(data), escaped, json.dumps(escaped)[1:-1]}
    forms |= {escaped.replace("/", "\\/"), json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    forms |= {value.replace("'", "'\"'\"'"), data.hex(), data.hex().upper()}
    if len(value) >= 16:
        forms |= {value.upper(), value.lower()}
    return forms | {re.sub(r"%[0-9A-F]{2}", lambda m: m[0].lower(), form) for form in forms if "%" in form}


def _cores(value: str) -> set[str]:
    """The base64 text of the value at each of the three alignments, without the characters that its context changes."""
    data, cores = _bytes(value), set[str]()
    for offset, first in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(b"\0" * offset + data).decode()
        core = encoded[first : 8 * (offset + len(data)) // 6]
        cores |= {core, core.replace("+", "-").replace("/", "_")}
    return cores


def _bytes(value: str) -> bytes:
    """``value`` as bytes; an environment can contain bytes that are not valid text."""
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeError:
        return value.encode("utf-8", "surrogatepass")


def _without_known(text: str, version: int) -> str:
    (_, plain), *others = _index(version)
    found = list(_found(text, plain))
    if re.search(_BREAK, text):
        for gap, seeds in others:
            if seeds:
                found += _wrapped(text, gap, list(_found(re.sub(gap, "", text), seeds)))
    kept, done = [], 0
    for begin, end, whole in sorted(found):
        if begin >= done:
            more = _base64_until(text[done:begin][::-1], 0) if whole else 0
            kept += [text[done : begin - more], MASK]
        if end > done:
            done = _base64_until(text, end) if whole else end
    return "".join([*kept, text[done:]])


def _base64_until(text: str, at: int) -> int:
    found = re.compile(r"[A-Za-z0-9+/_\-]*+={0,2}").match(text, at)
    return found.end() if found else at


def _found(text: str, index: _Index) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, whether it is base64) of each known value. No part is looked for again where one was."""
    done, tried = 0, dict[str, int]()
    for at in [at for at in range(len(text) - MIN_SECRET + 1) if text[at : at + MIN_SECRET] in index]:
        before = done  # of several forms that begin here, the longest run counts
        starts = index[text[at : at + MIN_SECRET]]
        for seed in (seed for start, seeds in starts.items() if text.startswith(start, at) for seed in seeds):
            form = seed.form
            if seed.at == 0 and at < done and not seed.whole and not text.startswith(form[: done - at + 1], at):
                continue  # it ends no later than what was found
            begin, end = at - seed.at, at - seed.at + len(form)
            if begin < 0 or not text.startswith(form, begin):
                if not seed.least or at + MIN_SECRET <= before or at + MIN_SECRET <= tried.get(form, 0):
                    continue
                if not _may_count(text, at, seed):
                    continue
                begin, end = _run(text, at, seed)
                tried[form] = end
                if not _counts(text[begin:end], seed, begin - at + seed.at):
                    continue
            done = max(done, end)
            yield begin, end, seed.whole


def _may_count(text: str, at: int, seed: _Seed) -> bool:
    """Whether a run to the end is long enough: quicker than looking for the whole run."""
    return seed.at + MIN_SECRET < len(seed.form) or text.endswith(seed.form[-_CUT:], 0, at + MIN_SECRET)


def _run(text: str, at: int, seed: _Seed) -> tuple[int, int]:
    """The longest run around the seed that is in the form."""
    form = seed.form
    before = _agreeing(text[max(0, at - seed.at) : at][::-1], form[: seed.at][::-1])
    return at - before, at + _agreeing(text[at : at + len(form) - seed.at], form[seed.at :])


def _agreeing(one: str, other: str) -> int:
    """How many characters at the beginning are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _counts(run: str, seed: _Seed, begin: int) -> bool:
    """Whether this part, at ``begin`` of the form, is removed. One from inside a value only if it mixes letters and
    digits: a password can contain words."""
    if begin == 0 or begin + len(run) == len(seed.form):
        return len(run) >= _CUT
    return len(run) >= seed.least and (seed.whole or re.search(r"[A-Za-z][0-9]|[0-9][A-Za-z]", run) is not None)


def _wrapped(text: str, gap: str, found: Sequence[tuple[int, int, bool]]) -> Iterator[tuple[int, int, bool]]:
    """What was found in the text without its wrapping, as places in ``text``, if a break is inside."""
    starts, shifts = [0], [0]
    for one in re.finditer(gap, text) if found else ():
        starts.append(one.start() - shifts[-1])
        shifts.append(shifts[-1] + one.end() - one.start())
    for begin, end, whole in found:
        first = begin + shifts[bisect_right(starts, begin) - 1]
        last = end - 1 + shifts[bisect_right(starts, end - 1) - 1]
        if re.search(_BREAK, text[first:last]):
            yield first, last + 1, whole


# -- unknown secrets -------------------------------------------------------------------------------------------------

_OF_BEARER = (
    r"(?i:authentication|authorization|authenticate|credentials?|challenge|required|requests?|security|training"
    r"|expected|missing|provided|supported|rejected)"
)
_ENDS = r"(?![\w~+/=\-]|\.\w)"


def _without_query_value(found: re.Match[str]) -> str:
    """Signed addresses, too: who has one can use the address."""
    signed = re.fullmatch(r"(?i)(?:x-[a-z]+-)?sig(?:nature)?", found["name"])
    secret = (signed or name_strength(found["name"])) and not _is_nothing(found["value"])
    return f"{found[1]}{MASK}" if secret else found[0]


_ROWS: tuple[tuple[tuple[str, ...], str, str | Callable[[re.Match[str]], str]], ...] = (
    # (what a text must contain in small letters, the pattern, what replaces it)
    (("://",), r"([A-Za-z][A-Za-z0-9+.\-]{0,20}://)(?:[^/\s:@\"']*:[^/\s\"']+|[^/\s:@\"']{16,})@", rf"\1{MASK}@"),
    (
        ("hooks.slack.com", "discord", "api.telegram.org"),
        r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot)"
        r"(?:\[removed\]|[^\s\"'?#,)\]])+",
        rf"\1{MASK}",
    ),
    (
        ("authorization", "cookie"),
        r"(?i)((?<![A-Za-z0-9])(?:(?:proxy-|x-)?authorization|(?:set-)?cookie)\\*[\"']?\s*[:=]\s*\\*[\"']?)"
        r"[^\s\"'\\\[][^\"'\\\r\n}]*",
        rf"\1{MASK}",
    ),
    (
        ("bearer", "basic"),
        rf"(?<![A-Za-z0-9])((?i:Bearer\s+)(?!{_OF_BEARER}{_ENDS})|(?i:Basic\s+)(?![A-Za-z][a-z]+{_ENDS}))"
        r"[A-Za-z0-9._~+/=\-]{8,}",
        rf"\1{MASK}",
    ),
    (("-u", "-user"), r"((?<!\S)(?:-u|--user|--proxy-user)[ =]+[\"']?[^\s:\"'/]+:)[^\s\"']+", rf"\1{MASK}"),
    (
        ("=",),  # a query, which ends where an address does; in JSON of Go its & is \u0026
        r"((?:[?&;]|\\u0026)(?P<name>[\w.\-]{1,64})=)(?P<value>(?:[^&\s\"'#;\\]|\\(?!\\{0,8}[\"'nrt]|u0026))+)",
        _without_query_value,
    ),
    (("login",), r"(\blogin\s++\S++\s++password\s++)\S++", rf"\1{MASK}"),
    ((":",), r"(?<![A-Za-z0-9])[0-9]{8,10}:[A-Za-z0-9_\-]{35}(?![A-Za-z0-9_\-])", MASK),  # Telegram
    (
        ("/k0", ":k0"),  # a B2 key behind its id
        r"(?:00[0-9a-f]{23}|\[removed\])[/:]K0[0-9]{2}[A-Za-z0-9+/]{27}(?![A-Za-z0-9+/])",
        MASK,
    ),
)

_TOKENS = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=[0-9;\[]m)|(?<=%[0-9A-Fa-f]{2})|(?<=\\x[0-9a-f]{2})|(?<=\\u[0-9a-f]{4}))"
    r"(?:(?:hf|gsk|xai|r8|npm|rpa|pypi)[_\-][A-Za-z0-9_\-]{16,}|api_org_[A-Za-z0-9]{16,}"
    r"|(?:sk|pk|rk)[-_][A-Za-z0-9_\-]{16,}|nvapi-[A-Za-z0-9_\-]{16,}|wandb_v1_[A-Za-z0-9_]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_\-]{16,}|dckr_pat_[A-Za-z0-9_\-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AGE-SECRET-KEY-1[A-Z0-9]{50,}"
    r"|xox[abeoprs]-[A-Za-z0-9\-]{10,}|AIza[A-Za-z0-9_\-]{35}|ya29\.[A-Za-z0-9_\-]{20,}|SG\.[A-Za-z0-9_\-.]{30,}"
    r"|eyJ[A-Za-z0-9]{8,}+\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"
    # W&B: exactly 40 hex digits, but no named commit or digest, and no path
    r"|(?<!/)(?<!commit )(?<!revision )(?<!revision=)(?<!sha1 )(?<!sha1=)(?<!sha1:)(?<!sha1: )"
    r"(?P<hex>[0-9a-fA-F]{40})(?![0-9A-Za-z])"
    # B2: keys are K, 3 digits and 27 of base64; key ids 25 hex digits
    r"|(?<![+/])K[0-9]{3}[A-Za-z0-9+/]{27}(?![A-Za-z0-9+/])|00[0-9a-f]{23}(?![0-9A-Za-z]))"
)
_SEGMENTS = r"(?:\\*+/[\w.+\-~%@]*+)"
_AT_PATH = r"(?:\A|(?<=[\s\"'`=:,;&|(<>\[\0])|(?<=\\[nrt])|(?<=[0-9]m))"
"""Before a path, also after a break that is escaped and after a colour. It does not begin behind ``[removed]``."""
_PATH = (
    rf"{_AT_PATH}(?:@|-[A-Za-z])?(?:~[\w.\-]*+|\.{{1,2}}|\$\w++|\$\{{\w++\}}|%[A-Za-z])?(?!\\*+/heartbeat\\*+/)"
    rf"(?:(?:(?<=file:)|(?<=b2:)|(?<=s3:)|(?<=gs:))//[\w.+\-~%@]*+|//(?=/)|(?!\\*+/\\*+/)){_SEGMENTS}++"
)
"""A path whose beginning shows that it is one: ``/``, ``~/``, ``./``, ``$HOME/``, also after ``-I`` or ``@``."""
_REQUEST = (
    r"(?:(?:(?<![A-Za-z])|(?<=[0-9]m))(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT)"
    r"|(?i:ur[il]|location|referer|target|:path))(?:\x1b\[[0-9;]*+m|[\s\"'\]:=(,]|\\[nt])++\.{0,2}\\*+/(?!heartbeat/)"
    r"|(?i:https?|wss?|ftp):\\*+/"
)
"""Before the path of a request, which can contain a key."""
_HEARTBEAT = r"(?P<heartbeat>(?<!\\)\\*+/heartbeat\\*+/)(?:\[removed\]|[^\s\"'?#,)\]])+"
_UNKNOWN = rf"(?P<kept>{_REQUEST}|{_PATH})|{_HEARTBEAT}|{_TOKENS}"


def _masked(found: re.Match[str]) -> str:
    if found["kept"] or (found["hex"] and _is_in_relative_path(found.string, found.start())):
        return found[0]
    return f"{found['heartbeat'] or ''}{MASK}"


def _is_in_relative_path(text: str, at: int) -> bool:
    """Whether ``at`` is in a relative path, not in its first segment: ``checkouts/repo-<commit>/train.py``."""
    path = re.split(r"\\[nrt]|[^\w.+\-~%@/]", text[max(0, at - 256) : at])[-1].removeprefix("@")
    first, slash, _ = path.partition("/")
    return bool(first and slash) and not re.fullmatch(r"(?i)(?:[\w\-]+\.)+[a-z]{2,}\.?|localhost|[0-9.]+", first)


_PEM_BEGIN = (
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----(?:(?:(?!-----)[\s\S]){0,16384}-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*"
    r"-----|[A-Za-z0-9+/=\s\\|>]{0,16384})"
)
_PEM_END = r"-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----"


def _without_pem(text: str) -> str:
    """Remove private keys, and the rest of one whose first lines were cut off."""
    pieces = re.split(_PEM_END, re.sub(_PEM_BEGIN, MASK, text))
    for number, piece in enumerate(pieces[:-1]):
        begin = len(piece)
        for line in reversed(re.split(r"(?<=\n)|(?<=\\n)", piece[-4096:])):
            if not re.fullmatch(r"[ \t|>]*[A-Za-z0-9+/=]*[ \t]*(?:\r|\\r)?(?:\n|\\n)?", line):
                break
            begin -= len(line)
        pieces[number] = piece[:begin]
    return MASK.join(pieces)


# -- values behind a name --------------------------------------------------------------------------------------------

_TELLING = r"(?i:key|token|secret|pass|pwd|credential|auth|cookie)"
_COLOURS = r"(?:\x1b\[[0-9;]*+m)*+"
_OPENS = rf"{_COLOURS}(?:[A-Za-z_][A-Za-z0-9_.]{{0,40}}+\()?+(?:\[(?!removed\]))?+(?:\\*[bBuUrR]?\\*[\"'])?{_COLOURS}"
"""The beginning of a value: its colour, a call or a list around it, and its quote."""
_NAMED = (
    # a path, if another follows: PATH=/opt/token:/bin, a mount
    rf"{_PATH}(?=:(?:[~.]{{0,2}}/|(?:ro|rw|z)\b))"
    # A name matches as a whole or not at all: matching from each of its letters would take minutes for a long one.
    rf"|(?<![A-Za-z0-9_.\-])(?=[A-Za-z0-9_.\-]*?{_TELLING})(?P<name>(?P<dash>-)?+[A-Za-z0-9_.\-]++)(?:"
    rf"(?P<equals>\\*[\"']?{_COLOURS}\s*+(?:=>|:=|[=:])(?:\s*+[>|][+-]?[ \t]*+\n)?\s*+{_OPENS})"
    r"|(?(dash)(?P<flag>\s++(?!-)[\"']?|\\*[\"']\s*+,\s*+\\*[\"'](?!--))|(?!))"
    # beside it: a pair, a cell of a table, an entry of a Kubernetes environment
    rf"|{_COLOURS}(?:\\*[\"']\s*+,\s*+(?:\\*[\"']?(?i:value)\\*[\"']?\s*+:)?"
    rf"|\s*+(?:->|→|[|│┃║])|\s++is\s|\r?\n\s*+(?i:value):)\s*+{_OPENS})"
)
_VALUE = r"(?<=\")(?:[^\"\\\n]|\\[^\"'\n])*+|(?<=')(?:[^'\\\n]|\\[^\"'\n])*+|[^\s,;&\"'}\])\\]++"
_NEXT = r"\\*[\"']\s*+,\s*+\\*[bBuUrR]?\\*[\"']"
"""Between two values of a list."""
_SENTENCE = (
    r"(?i:the|an?|is|was|are|not|no|check|see|set|must|cannot|could|should|please|use|expected|invalid|incorrect|missing"
    r"|wrong|expired|unknown|unable|failed|your?|it|in|of|for|from|to|by|with|required|provided|permission"
    r"|operation|connection)(?=\s|\Z)"
    r"(?P<value>(?:[ \t]++[A-Za-z'\-]++){0,8}[ \t]++[A-Za-z]*+(?:[0-9]++[A-Za-z]|(?<=[A-Za-z])[0-9])[^\s,;\"']*+)?"
)
"""Also not one with a word of letters and digits: ``password: not hunter2x``."""
_JUDGED = 128
"""Characters of a value that are examined: judging a long value again for each name in it would take minutes."""


def _without_named(text: str) -> str:
    """Mask each value behind a secret name. A value that stays can itself contain a name and a value."""
    search, value, following = (re.compile(pattern) for pattern in (_NAMED, _VALUE, _NEXT))
    kept, done, at = [], 0, 0
    while found := search.search(text, at):
        at = found.end()
        if not found["name"] or not name_strength(found["name"]):
            continue
        listed = found[0].rstrip("\\bBuUrR\"'").endswith("[")
        while (first := value.match(text, at, at + _JUDGED)) and _hidden(found, first):
            said = _sentence(found, first)
            whole = value.match(text, at) or first
            kept += [text[done:at], MASK]
            done = at = max(whole.end(), said.end() if said else 0)
            if not listed or (more := following.match(text, at)) is None:
                break
            at = more.end()
    return "".join([*kept, text[done:]]) if kept else text


def _hidden(found: re.Match[str], first: re.Match[str]) -> bool:
    """Strict for ``key: value``, which can be any text; stricter for a name in a list or a table, which often stands
    beside text that is no value of it."""
    name, value = found["name"], first[0]
    if found["flag"] is not None or (found["equals"] is not None and (found["dash"] or name.isupper())):
        return _hides(name, value)
    strength = name_strength(name)
    if _is_nothing(value) or not (strength == 2 or _looks_random(value)):
        return False
    if found["equals"] is None:
        return len(value) >= MIN_SECRET and not _is_ordinary(value)
    said = _sentence(found, first)
    return not (said and said["value"] is None) and not (name == "pass" and re.fullmatch(r":\s+", found["equals"]))


def _sentence(found: re.Match[str], first: re.Match[str]) -> re.Match[str] | None:
    """What begins like a sentence behind ``key: ``."""
    at = first.start()
    prose = re.fullmatch(r":\s+", found["equals"] or "")
    return re.compile(_SENTENCE).match(first.string, at, at + _JUDGED) if prose else None


def _hides(name: str, value: str) -> bool:
    """Whether to mask this value of a command. Rather too much than too little, because the command is only shown."""
    strength = name_strength(name)
    if not strength or _is_nothing(value):
        return False
    if strength == 2 or name.isupper() or (name.lower().endswith("token") and not value.isdigit()):
        return True
    return len(value) >= MIN_SECRET and not _is_ordinary(value)


# -- scrubbing -------------------------------------------------------------------------------------------------------

_BLOCK = 1 << 15
"""Characters scrubbed at once: 20 ms."""
_CACHED_TEXT = 512
"""Characters. Longer texts are not cached, so that the cache stays below 1 MiB."""


def scrub(text: str) -> str:
    """``text`` with everything that is or looks like a secret replaced by ``[removed]``. Idempotent."""
    return _cached(text, _version) if len(text) <= _CACHED_TEXT else _scrubbed(text, _version)


def _scrubbed(text: str, version: int) -> str:
    """In blocks of whole lines: one search over a whole log would block the interpreter, and the sensing loop. A
    private key that a block boundary splits is recognized by either end."""
    text = _without_known(text, version) if _known else text
    blocks, at = [], 0
    while at < len(text):
        end = text.rfind("\n", at, at + _BLOCK) + 1 if len(text) - at > _BLOCK else 0
        end = end or at + _BLOCK
        blocks.append(_without_unknown(text[at:end]))
        at = end
    return "".join(blocks)


@lru_cache(maxsize=2048)
def _cached(text: str, version: int) -> str:
    """Most findings have the same text at each turn, and a status document the same names; it has up to a thousand
    strings. ``version`` invalidates the cache when a value is added or dropped."""
    clean = _scrubbed(text, version)
    return text if clean == text else clean


def _without_unknown(text: str) -> str:
    """Repeated, because what is masked can end another name or path."""
    for _ in range(4):
        clean = _once_without_unknown(text)
        if clean == text:
            break
        text = clean
    return text


def _once_without_unknown(text: str) -> str:
    small = text.lower()
    if "private key" in small:
        text = _without_pem(text)
    for hints, pattern, masked in _ROWS:
        if any(hint in small for hint in hints):
            text = re.sub(pattern, masked, text)
    if re.search(_TELLING, text):
        text = _without_named(text)
    return re.sub(_UNKNOWN, _masked, text)


def scrub_all(value: Any) -> Any:
    """``value`` with every string scrubbed, keys included, and values under secret keys removed. Other objects become
    their scrubbed text."""
    match value:
        case str():
            return scrub(value)
        case None | bool() | int() | float():
            return value
        case Mapping():
            small = {str(k).lower(): v for k, v in value.items()}
            named = {"value": small["name"]} if isinstance(small.get("name"), str) else {}
            return {scrub(str(k)): scrub_field(named.get(str(k).lower()) or str(k), v) for k, v in value.items()}
        case list() | tuple() if any(isinstance(v, str) and v.startswith("-") for v in value) and all(
            isinstance(v, str) for v in value
        ):
            return list(scrub_argv(value))
        case list() | tuple() if len(value) == 2 and isinstance(value[0], str):
            return [scrub(value[0]), scrub_field(value[0], value[1])]
        case list() | tuple() | set() | frozenset():
            return [scrub_all(v) for v in value]
    return scrub(str(value))


def scrub_field(name: str, value: Any) -> Any:
    """``value`` scrubbed, or removed if ``name`` is a secret name. Below one, a user, a host, a path and a number stay
    under their own names."""
    if name_strength(name) < 2:
        return scrub_all(value)
    match value:
        case str() | int() | bytes() if not isinstance(value, bool):
            return value if _is_nothing(str(value)) else MASK
        case list() | tuple() | set() | frozenset():
            return [scrub_field(name, item) for item in value]
        case Mapping():
            said = {k: isinstance(v, int | float) or (isinstance(v, str) and _is_ordinary(v)) for k, v in value.items()}
            return {scrub(str(k)): scrub_field(str(k) if said[k] else name, v) for k, v in value.items()}
    return scrub_all(value)


def scrub_argv(argv: Sequence[str], mask: str = MASK) -> tuple[str, ...]:
    """A command without its secrets, for display: ``--x-key S``, ``--x-key=S``, ``KEY=S``, ``++wandb.key=S``,
    ``-u user:S``. The number of items stays the same. Never use it for a command that is executed or compared."""
    shown: list[str] = []
    before = ""
    for item in argv:
        name, equals, value = item.partition("=")
        if (
            before
            and not re.fullmatch(r"(?s)--[A-Za-z][A-Za-z0-9_.\-]*(?:=.*)?|-[A-Za-z]", item)
            and _hides(before, item)
        ):
            shown.append(mask)
        elif before in ("-u", "--user", "--proxy-user") and ":" in item and "/" not in item:
            shown.append(f"{item.partition(':')[0]}:{mask}")
        elif equals and not re.search(r"\s", name) and _hides(name, value):
            shown.append(f"{name}={mask}")
        else:
            shown.append(scrub(item) if mask == MASK else scrub(item).replace(MASK, mask))
        before = item if item.startswith(("-", "+")) and not equals else ""
    return tuple(shown)
