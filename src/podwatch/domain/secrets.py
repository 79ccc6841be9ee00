"""The scrubber: removes secrets from text before podwatch stores, sends or shows it (docs/secrets.md).

Two methods. Values that podwatch *knows* (``register...``, called where a secret is read) are found in every form:
plain, percent-encoded, escaped, hexadecimal, base64, wrapped over lines, cut. Unknown ones are found by one table of
patterns (``_ROWS``, ``_TOKENS``) and by the name before them (``_NAMED``). A pattern can remove harmless text; that is
better than showing a key. But a segment of a file's path is no secret, whatever its form: directories are named by
commits and digests (``/nix/store/<hash>-python3``), and a sentence stays (``InvalidAccessKeyId: The AWS key ...``).

``scrub`` is the entry for text, ``scrub_all`` for structures, ``scrub_argv`` for commands. Findings, events, incidents,
notices and errors call it when they are created, so that no caller can forget it. Time grows with the length of the
text only, whatever the text is: each pattern leaves a character behind for good, or looks a bounded way ahead.
"""

import base64
import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    r"passwords?|passwd|passphrase|pwd|secrets?|apikeys?|credentials?|authorization|authtoken|accesstoken|accesskey"
    r"|privatekey|secretkey"
)
_WEAK = frozenset({"key", "keys", "token", "auth", "cookie", "cookies"})
_QUALIFIES = (
    r"api|access|secret|private|application|app|account|auth|encrypt|encryption|sign|signing|ssh|service|wandb|openai"
    r"|anthropic|hf|huggingface|hub|aws|b2|s3|x|master|license|deploy|storage|shared|gpg|pgp|webhook|bot|slack|discord"
    r"|telegram|github|gitlab|gh|bearer|refresh|session|security|personal|user|jwt|oauth|admin|http|client|server"
    r"|heartbeat|vllm|runpod|vast|lambda|docker|registry|neptune|comet|mlflow|swanlab|clearml|database|db"
)
_AFTER = frozenset({"value", "header", "base64", "b64", "plain", "text", "raw"})


@lru_cache(maxsize=1024)
def name_strength(name: str) -> int:
    """2: values under this name are secret; 1: possibly (``key``, ``token``); 0: no. Underscores, dots, dashes and
    capitals separate words: ``wandb.api-key``, ``HF_TOKEN``, ``apiKey``; ``tokenizer`` and ``max_tokens`` give 0."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[a-z]+|[0-9]+", name)]
    while words and (words[-1].isdigit() or words[-1] in _AFTER):
        words.pop()
    if words[-2:] == ["key", "id"]:
        words.pop()
    if not words:
        return 0
    last = words[-1]
    if re.fullmatch(_ALWAYS, last):
        return 2
    if last not in _WEAK:
        return 0
    qualified = len(words) > 1 and (re.fullmatch(_QUALIFIES, words[-2]) or (name.isupper() and last != "keys"))
    return 2 if qualified else 1


# -- values that are no secrets --------------------------------------------------------------------------------------

_NOTHING = (
    r"(?is:true|false|yes|no|on|off|none|null|nil|undefined|empty|default|auto|[0-9]{1,5}"
    r"|[-+]?[0-9]+\.[0-9]*(?:e[-+]?[0-9]+)?|[-+]?[0-9]+e[-+]?[0-9]+|"
    r"|\$\{?[A-Za-z_][A-Za-z0-9_]*\}?|[<{].*|[*.•xX]+|\[removed\]?.*)"
)
"""A switch, a small number, a reference to a variable, a mask."""
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
"""Value -> monotonic time until which it is known. Each change is atomic and is followed by a new version; a reader
that finds another version builds its index again, so no lock is needed."""
_versions = itertools.count(1)
_version = 0

LIFE_SECONDS: Final = 36 * 3600.0
"""Life of a temporary credential whose end is not known: AWS gives none for longer."""
LINGER_SECONDS: Final = 24 * 3600.0
"""How long a temporary credential stays known after its end: for texts that quote it and are not written yet (log
lines, a failed request), and because this machine's clock can be wrong."""


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
    _learn(values, math.inf)


def register_temporary(*values: str, now: float, seconds: float | None = None) -> None:
    """Add credentials that end by themselves in ``seconds`` (None: not known) and are no secret ``LINGER_SECONDS``
    later. A process that runs for months sees thousands. A value that is registered again counts from then; one that
    ``register`` got stays. ``now``: monotonic seconds, because the wall clock can be set."""
    ended = [value for value, until in tuple(_known.items()) if until < now]
    _learn(values, now + (LIFE_SECONDS if seconds is None else max(0.0, seconds)) + LINGER_SECONDS, ended)


def _learn(values: Iterable[str], until: float, ended: Sequence[str] = ()) -> None:
    global _version
    parts = {part for value in values for part in (value, *(x for x in value.splitlines() if len(x.strip()) >= 16))}
    parts = {part.strip() for part in parts if len(part.strip()) >= MIN_SECRET}
    parts = {part for part in parts if MASK not in part and part not in MASK}
    changed = bool(parts - _known.keys()) or bool(set(ended) - parts)
    for part in parts:
        _known[part] = max(until, _known.get(part, until))
    for value in set(ended) - parts:
        _known.pop(value, None)
    if changed:
        _version = next(_versions)


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
_CUTTABLE = r"(?!\w+://)[^\s\"'{}<>]{16,}"
_WRAPPING = r"(?:\x1b\[[0-9;?]*+[A-Za-z]|\\++[nr]?+|[\s|>\"'\u2500-\u257f]++)++"
"""What stands between the parts of a wrapped text: breaks, also escaped, indentation, quotes, frames, colours."""
_LINES = r"(?:\x1b\[[0-9;?]*+[A-Za-z]|(?:(?<![ \t])[ \t]++)?(?:(?<!\\)\\++[nr]|[\r\n])\s*+)++"
"""The same, for values that contain such characters themselves."""
_BREAK = r"[\r\n\x1b]|\\[nr]"


class _Seed(NamedTuple):
    """Eight characters of ``form`` at ``at``; ``least``: characters that must agree; ``whole``: the base64 text around
    it is removed, because its ends contain parts of the value."""

    form: str
    at: int
    least: int
    whole: bool


_Index = dict[str, list[_Seed]]


@lru_cache(maxsize=1)
def _index(version: int) -> tuple[_Index, _Index]:
    """Eight characters -> where in which form they are. One look-up for each character of a text finds all values.
    A seed at every fifth character is in whatever run of twelve. Second: of values that contain what wraps others."""
    index: _Index = {}
    wrapping: _Index = {}
    for value in tuple(_known):
        cores = _cores(value)
        forms = {*_forms(value), *cores}
        forms |= {re.sub(_WRAPPING, "", form) for form in forms}
        for form in (form for form in forms if len(form) >= MIN_SECRET):
            cuttable = (form == value or form in cores) and re.fullmatch(_CUTTABLE, form)
            least = max(_CUT, len(form) // 8) if cuttable else len(form)
            for at in range(0, len(form) - MIN_SECRET + 1, least - MIN_SECRET + 1):
                seed = _Seed(form, at, least, form in cores)
                index.setdefault(form[at : at + MIN_SECRET], []).append(seed)
                if re.search(_WRAPPING, form):
                    wrapping.setdefault(form[at : at + MIN_SECRET], []).append(seed)
    return index, wrapping


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
    index, wrapping = _index(version)
    found = list(_found(text, index))
    if re.search(_BREAK, text):
        for gap, seeds in ((_WRAPPING, index), (_LINES, wrapping)):
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
    """(begin, end, whether it is base64) of each known value."""
    done = 0
    for at in [at for at in range(len(text) - MIN_SECRET + 1) if text[at : at + MIN_SECRET] in index]:
        for seed in index[text[at : at + MIN_SECRET]]:
            begin, end = at - seed.at, at - seed.at + len(seed.form)
            if begin < 0 or not text.startswith(seed.form, begin):
                if seed.least == len(seed.form) or at + MIN_SECRET <= done:
                    continue
                begin, end = _run(text, at, seed)
                if end - begin < seed.least:
                    continue
            done = max(done, end)
            yield begin, end, seed.whole


def _run(text: str, at: int, seed: _Seed) -> tuple[int, int]:
    """The longest run around the seed that is in the value. Inside the value only one that mixes letters and digits
    counts: a password can contain words."""
    form, begin, end = seed.form, at, at + MIN_SECRET
    shift = seed.at - at
    while begin > 0 and begin + shift > 0 and text[begin - 1] == form[begin - 1 + shift]:
        begin -= 1
    while end < len(text) and end + shift < len(form) and text[end] == form[end + shift]:
        end += 1
    inside = begin + shift > 0 and end + shift < len(form) and not seed.whole
    if inside and not re.search(r"[A-Za-z][0-9]|[0-9][A-Za-z]", text[begin:end]):
        return begin, begin
    return begin, end


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

_ROWS: tuple[tuple[tuple[str, ...], str, str], ...] = (
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
        r"(?<![A-Za-z0-9])((?i:Bearer|Basic)\s+)(?![A-Za-z][a-z]+(?![\w.~+/=\-]))[A-Za-z0-9._~+/=\-]{8,}",
        rf"\1{MASK}",
    ),
    (("-u", "-user"), r"((?<!\S)(?:-u|--user|--proxy-user)[ =]+[\"']?[^\s:\"'/]+:)[^\s\"']+", rf"\1{MASK}"),
    (
        ("sig",),  # presigned addresses: who has one can use the address
        r"(?i)((?<=[?&;])(?:signature|sig|x-amz-signature|x-goog-signature|x-oss-signature)=)[^&\s\"'#;]+",
        rf"\1{MASK}",
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
    r"(?<![A-Za-z0-9])(?:(?:hf|gsk|xai|r8|npm|rpa|pypi)[_\-][A-Za-z0-9_\-]{16,}|api_org_[A-Za-z0-9]{16,}"
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
    rf"|{_COLOURS}(?:\\*[\"']\s*+,\s*+(?:\\*[\"']?value\\*[\"']?\s*+:)?"
    rf"|\s*+(?:->|→|\||│)|\s++is\s|\n\s*+value:)\s*+{_OPENS})"
)
_VALUE = r"(?<=\")(?:[^\"\\\n]|\\[^\"'\n])*+|(?<=')(?:[^'\\\n]|\\[^\"'\n])*+|[^\s,;&\"'}\])\\]++"
_NEXT = r"\\*[\"']\s*+,\s*+\\*[bBuUrR]?\\*[\"']"
"""Between two values of a list."""
_SENTENCE = (
    r"(?i:the|an?|is|was|are|not|no|check|see|set|must|cannot|could|should|please|use|expected|invalid|missing|wrong"
    r"|expired|unknown|unable|failed|your?|it|in|of|for|from|to|by|with|required|provided)(?=\s|\Z)"
    r"|[A-Z][a-z]{0,10} +[A-Za-z]+(?![\w:=])"
)
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
            whole = value.match(text, at) or first
            kept += [text[done:at], MASK]
            done = at = whole.end()
            if not listed or (more := following.match(text, at)) is None:
                break
            at = more.end()
    return "".join([*kept, text[done:]]) if kept else text


def _hidden(found: re.Match[str], first: re.Match[str]) -> bool:
    """Strict for ``key: value``, which can be any text; stricter for a name in a list or a table, which often stands
    beside text that is no value of it."""
    name, value, begin = found["name"], first[0], found.start("name")
    if found["equals"] == "=" and found.string[begin - 1 : begin] in ("?", "&"):
        return not _is_nothing(value)
    if found["flag"] is not None or (found["equals"] is not None and (found["dash"] or name.isupper())):
        return _hides(name, value)
    strength = name_strength(name)
    if _is_nothing(value) or not (strength == 2 or _looks_random(value)):
        return False
    if found["equals"] is None:
        return len(value) >= MIN_SECRET and not _is_ordinary(value)
    return not (re.fullmatch(r":\s+", found["equals"]) and re.compile(_SENTENCE).match(first.string, first.start()))


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
            names = {"value": value["name"]} if isinstance(value.get("name"), str) else {}
            return {scrub(str(k)): scrub_field(names.get(k) or str(k), v) for k, v in value.items()}
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
