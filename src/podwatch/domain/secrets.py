"""The scrubber: removes secrets from text before podwatch stores or shows it (docs/secrets.md).

Findings, evidence, events, incidents, notices and errors scrub their own text when they are created, so that no caller
can forget it. Two methods: values that podwatch *knows* (``register``, called where a secret is read), and patterns
that look like a secret. A pattern can remove harmless text; that is better than showing a key. One long file, because
the order of the rules counts.

Covered, for known values of at least 8 characters: the value itself, percent-encoded, JSON-, repr- or shell-escaped,
in hexadecimal, in base64 at any alignment, split by line breaks (with indentation) or terminal colours, and the first
or last 12 of at least 16 characters where a quotation was cut. For unknown values: names (``api_key=...``,
``--x-token ...``, headers), URLs with a password, private key blocks and the key formats of common services. Not
covered: an unknown secret under an ordinary name without a known format, and one that is encrypted, compressed, or
split by other text.

A segment of a file's path is no secret, whatever its form: directories are named by commits and digests
(``/nix/store/<hash>-python3``). Known values, and values of secret names, are removed from paths, too.

Process-wide state: known values are only added, except temporary credentials (``register_temporary``), which are
dropped long after their end: a process that runs for months sees thousands of them. Each change is atomic and is
followed by a new version; a reader that finds another version prepares its patterns again, so no lock is needed.
"""

import base64
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast
from urllib.parse import quote, quote_plus, unquote, urlsplit

MASK: Final = "[removed]"
MIN_SECRET: Final = 8
"""Characters. A shorter value would match inside ordinary words; it is removed only after a secret name."""
_BLOCK = 1 << 15
"""Characters scrubbed at once: 20 ms."""
_CACHED_TEXT = 512
"""Characters. Longer texts are not cached, so that the cache stays below 1 MiB."""


class _Later:
    """Compiles its pattern at the first use: errors import this module, and most commands raise none."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._arguments = pattern, flags

    def __getattr__(self, name: str) -> Any:
        found = getattr(re.compile(*self._arguments), name)
        setattr(self, name, found)
        return found


def _later(pattern: str, flags: int = 0) -> re.Pattern[str]:
    return cast("re.Pattern[str]", _Later(pattern, flags))


# -- secret names ----------------------------------------------------------------------------------------------------

_WORDS = _later(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[a-z]+|[0-9]+")
_ALWAYS = _later(
    r"passwords?|passwd|passphrase|pwd|secrets?|apikeys?|credentials?|authorization|authtoken|accesstoken|accesskey"
    r"|privatekey|secretkey"
)
_WEAK = frozenset({"key", "keys", "token", "auth", "cookie", "cookies"})
_QUALIFIES = _later(
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
    words = [word.lower() for word in _WORDS.findall(name)]
    while words and (words[-1].isdigit() or words[-1] in _AFTER):
        words.pop()
    if len(words) >= 2 and words[-1] == "id" and words[-2] == "key":
        words.pop()
    if not words:
        return 0
    last = words[-1]
    if _ALWAYS.fullmatch(last):
        return 2
    if last not in _WEAK:
        return 0
    qualified = len(words) > 1 and bool(_QUALIFIES.fullmatch(words[-2]) or (name.isupper() and last != "keys"))
    return 2 if qualified else 1


# -- values that are no secrets --------------------------------------------------------------------------------------

_NOTHING = _later(
    r"(?i)true|false|yes|no|on|off|none|null|nil|undefined|empty|default|auto|[0-9]{1,5}|"
    r"[-+]?[0-9]+\.[0-9]*(?:e[-+]?[0-9]+)?|[-+]?[0-9]+e[-+]?[0-9]+|"
)
_PLACEHOLDER = _later(r"\$\{?[A-Za-z_][A-Za-z0-9_]*\}?|[<{].*|[*.•xX]+|\[removed\]?.*", re.S)
_PATH = _later(r"(?:~|\.{1,2})?/.*|[A-Za-z]:\\.*", re.S)
_IDENTIFIERS = _later(r"[A-Za-z_]\w*(?:\.\w+)+")
_WORD = _later(r"[A-Za-z][a-z]{0,10}|[0-9]+")
_URL = _later(r"[A-Za-z][A-Za-z0-9+.\-]{0,20}://")
_CHANGES = _later(r"(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")


def _nothing(value: str) -> bool:
    """Whether it is never a secret: a switch, a small number, a reference to a variable, a mask."""
    return bool(_NOTHING.fullmatch(value) or _PLACEHOLDER.fullmatch(value))


def _looks_random(value: str) -> bool:
    """Whether it contains ten or more mixed letters and digits, and is no word, path or word with a number."""
    if "/" in value or _IDENTIFIERS.fullmatch(value):
        return False
    return any(len(part) >= 10 and len(_CHANGES.findall(part)) >= 2 for part in re.split(r"[^A-Za-z0-9]", value))


def _ordinary(value: str) -> bool:
    """Whether removing it everywhere would make messages unreadable: a path, URL, number, short word, dotted name."""
    shapes = (_PATH, _WORD, _IDENTIFIERS)
    return _nothing(value) or bool(_URL.match(value)) or any(shape.fullmatch(value) for shape in shapes)


# -- known values ----------------------------------------------------------------------------------------------------

_known: dict[str, None] = {}
_temporary: dict[str, float] = {}
"""Value -> monotonic time until which it is known."""
_versions = itertools.count(1)
_version = 0
"""Number of the last change; of two changes at once each has its own."""
_prepared: tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]] = (0, (), (), ())
"""(version it was built from, the forms of all values longest first, the raw values, base64 cores)."""

LIFE_SECONDS: Final = 36 * 3600.0
"""Life of a temporary credential whose end is not known: AWS gives none for longer."""
LINGER_SECONDS: Final = 24 * 3600.0
"""How long a temporary credential stays known after its end: for texts that quote it and are not written yet (log
lines, a failed request), and because this machine's clock can be wrong."""


def forget() -> None:
    """Drop all known values: for tests, which share a process."""
    global _prepared, _version
    _known.clear()
    _temporary.clear()
    _version, _prepared = 0, (0, (), (), ())
    _scrubbed.cache_clear()


def register(*values: str) -> None:
    """Add known secrets, which are removed from every text from now on. Values shorter than 8 characters are ignored
    (they are removed only after a secret name). Of a value with several lines (a private key) each long line counts."""
    global _version
    for part in _parts(values):
        if part not in _known:
            _known[part] = None
            _version = next(_versions)


def register_temporary(*values: str, now: float, seconds: float | None = None) -> None:
    """Add credentials that end by themselves in ``seconds`` (None: not known) and are no secret ``LINGER_SECONDS``
    later. A value that is registered again counts from then; one that ``register`` got stays forever. ``now``:
    monotonic seconds, because the wall clock can be set."""
    global _version
    end = now + (LIFE_SECONDS if seconds is None else max(0.0, seconds)) + LINGER_SECONDS
    changed = False
    for part in _parts(values):
        changed |= part not in _temporary
        _temporary[part] = max(end, _temporary.get(part, end))
    for part, until in tuple(_temporary.items()):
        if until < now:
            _temporary.pop(part, None)
            changed = True
    if changed:
        _version = next(_versions)


def _parts(values: Iterable[str]) -> Iterator[str]:
    for value in values:
        for part in {value.strip(), *(line.strip() for line in value.splitlines() if len(line.strip()) >= 16)}:
            if len(part) >= MIN_SECRET and MASK not in part and part not in MASK:
                yield part


def register_named(values: Mapping[str, str], *, all_of_it: bool = False) -> None:
    """Register the variables with secret names, and passwords in URLs. ``all_of_it``: the values come from a file for
    secrets, so that a random-looking value is secret under any name except one that ends in ``_ID``."""
    register(*secret_values(values))
    for name, value in values.items():
        register(*url_secrets(value))
        if all_of_it and len(value) >= 16 and not name.upper().endswith("_ID") and _looks_random(value):
            register(value)


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
        if item == shown:
            continue
        value = item if shown == MASK else item.partition("=")[2] if shown.endswith(f"={MASK}") else ""
        if not _ordinary(value):
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


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """The values of an environment that have secret names, except ordinary words and paths."""
    return frozenset(
        value
        for name, value in environment.items()
        if len(value) >= MIN_SECRET
        and not _ordinary(value)
        and ((strength := name_strength(name)) == 2 or (strength == 1 and _looks_random(value)))
    )


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
    found = {password, *(value for name, _, value in pairs if name_strength(name) == 2 and not _nothing(value))}
    return frozenset(form for value in found if value for form in (value, unquote(value)))


def _forms(value: str) -> set[str]:
    """The value as it is written in other formats."""
    escaped, data = json.dumps(value)[1:-1], _bytes(value)
    forms = {
        value,
        quote(data, safe=""),
        quote(data),
        quote_plus(data),
        escaped,
        json.dumps(escaped)[1:-1],
        escaped.replace("/", "\\/"),
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        value.replace("'", "'\"'\"'"),
        data.hex(),
        data.hex().upper(),
    }
    if len(value) >= _CUT_FROM:
        forms |= {value.upper(), value.lower()}
    forms |= {re.sub(r"%[0-9A-F]{2}", lambda m: m[0].lower(), form) for form in forms if "%" in form}
    return forms


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


def _prepare() -> tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Everything to search for; built again when values were added or dropped."""
    global _prepared
    found, version = _prepared, _version
    if found[0] != version:  # the version is read first: a value that is added meanwhile has a later one
        found = _prepared = _made_of((*_known, *(value for value in tuple(_temporary) if value not in _known)), version)
    return found


def _made_of(values: tuple[str, ...], version: int) -> tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    forms: set[str] = set()
    cores: set[str] = set()
    for value in values:
        forms |= _forms(value)
        cores |= _cores(value)
    longest = tuple(sorted((f for f in forms if len(f) >= MIN_SECRET), key=len, reverse=True))
    return version, longest, tuple(sorted(values, key=len, reverse=True)), tuple(sorted(cores))


_BREAKS = tuple(
    re.compile(rf"(?:\x1b\[[0-9;?]*+[A-Za-z]|(?:(?<![ \t])[ \t]++)?(?:(?<!\\)\\++[rn]|[\r\n])[ \t{frame}]*+)+")
    for frame in ("", "|>│┃")
)
"""Line breaks with the indentation around them, without and with the frame that a console draws; colours."""


def _without_known(text: str, forms: Sequence[str], raw: Sequence[str], cores: Sequence[str]) -> str:
    for form in forms:
        if form in text:
            text = text.replace(form, MASK)
    for core in cores:
        if core in text:
            text = _without_encoded(text, core)
    for value in raw:
        if len(value) >= _CUT_FROM and not _URL.match(value):
            text = _without_cut(text, value)
    for breaks in _BREAKS if raw else ():
        if breaks.search(text):
            text = _without_split(text, raw, breaks)
    return text


_CUT_FROM, _CUT_SHOWN = 16, 12
"""Characters. Long values are also searched by their first and last characters: many messages quote only a part of a
line, and the cut can be inside a secret."""


def _without_cut(text: str, value: str) -> str:
    head, tail = value[:_CUT_SHOWN], value[-_CUT_SHOWN:]
    at = text.find(head)
    while at >= 0:
        end = at + len(head)
        while end < len(text) and end - at < len(value) and text[end] == value[end - at]:
            end += 1
        text = f"{text[:at]}{MASK}{text[end:]}"
        at = text.find(head, at + len(MASK))
    at = text.rfind(tail)
    while at >= 0:
        end, begin = at + len(tail), at
        while begin > 0 and end - begin < len(value) and text[begin - 1] == value[begin - 1 - end]:
            begin -= 1
        text = f"{text[:begin]}{MASK}{text[end:]}"
        at = text.rfind(tail, 0, begin)
    return text


_BASE64 = _later(r"[A-Za-z0-9+/_\-]{4,}+={0,2}")


def _without_encoded(text: str, core: str) -> str:
    """Remove the whole base64 text around ``core``, because its ends contain parts of the value."""
    return _BASE64.sub(lambda found: MASK if core in found[0] else found[0], text)


def _without_split(text: str, raw: Sequence[str], breaks: re.Pattern[str]) -> str:
    """Remove known values with line breaks or colours inside."""
    pieces: list[tuple[int, int]] = []
    """The start of each piece between two breaks: (in the joined text, in the text)."""
    joined, at, length = [], 0, 0
    for found in breaks.finditer(text):
        pieces.append((length, at))
        joined.append(text[at : found.start()])
        length += found.start() - at
        at = found.end()
    pieces.append((length, at))
    squeezed = "".join([*joined, text[at:]])
    spans = []
    for value in raw:
        start = squeezed.find(value)
        while start >= 0:
            spans.append((_original(pieces, start), _original(pieces, start + len(value) - 1) + 1))
            start = squeezed.find(value, start + len(value))
    for begin, end in sorted(_merged(spans), reverse=True):
        text = f"{text[:begin]}{MASK}{text[end:]}"
    return text


def _original(pieces: Sequence[tuple[int, int]], offset: int) -> int:
    joined, begin = pieces[bisect_right(pieces, offset, key=lambda piece: piece[0]) - 1]
    return begin + offset - joined


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


# -- patterns of unknown secrets -------------------------------------------------------------------------------------

_SHAPES = _later(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf|gsk|xai|r8|npm|rpa|pypi)[_\-][A-Za-z0-9_\-]{16,}|api_org_[A-Za-z0-9]{16,}"
    r"|(?:sk|pk|rk)[-_][A-Za-z0-9_\-]{16,}|nvapi-[A-Za-z0-9_\-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_\-]{16,}|dckr_pat_[A-Za-z0-9_\-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|xox[abeoprs]-[A-Za-z0-9\-]{10,}|AIza[A-Za-z0-9_\-]{35}|ya29\.[A-Za-z0-9_\-]{20,}|SG\.[A-Za-z0-9_\-.]{30,}"
    r"|eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"
    r"|(?P<telegram>[0-9]{8,10}:[A-Za-z0-9_\-]{35})(?![A-Za-z0-9_\-])"
    r"|AGE-SECRET-KEY-1[A-Z0-9]{50,}"
    # W&B: exactly 40 hex digits, also with its newer prefix, but no path, named commit or named digest
    r"|wandb_v1_[A-Za-z0-9_]{20,}"
    r"|(?<!/)(?<!commit )(?<!revision )(?<!revision=)(?<!sha1 )(?<!sha1=)(?<!sha1:)(?<!sha1: )"
    r"(?P<hex>[0-9a-fA-F]{40})(?![0-9A-Za-z])"
    # B2 application keys: K + 3 digits + 27 of base64, also in "ID/KEY"; key ids: 25 hex digits
    r"|(?:(?<![+/])|(?<=00[0-9a-f]{23}/)|(?<=\[removed\]/))(?P<base64>K[0-9]{3}[A-Za-z0-9+/]{27})(?![A-Za-z0-9+/])"
    r"|(?P<id>00[0-9a-f]{23})(?![0-9A-Za-z])"
    r")"
)
_HINT = _later(
    r"(?i)key|token|secret|passw|passphrase|pwd|credential|auth|bearer|basic\s|cookie|/heartbeat/|://|-----|-u\b|--user"
)
_PEM = _later(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----(?:(?:(?!-----)[\s\S]){0,16384}-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*"
    r"-----|[A-Za-z0-9+/=\s\\|>]{0,16384})"
)
_PEM_END = _later(r"-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----")
_USERINFO = _later(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]{0,20}://)(?:[^/\s:@\"']*:[^/\s\"']+|[^/\s:@\"']{16,})@")
_WEBHOOK = _later(
    r"(?P<where>hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot"
    r"|/heartbeat/)(?:\[removed\]|[^\s\"'?#,)\]])+"
)
_HEADER = _later(
    r"(?i)(?P<name>(?<![A-Za-z0-9])(?:proxy-|x-)?authorization|(?<![A-Za-z0-9])(?:set-)?cookie)"
    r"(?P<between>\\*[\"']?\s*[:=]\s*\\*[\"']?)(?P<value>[^\s\"'\\\[][^\"'\\\r\n}]*)"
)
_SCHEME = _later(r"(?i)(?<![A-Za-z0-9])(?P<scheme>Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{8,}")
_NAME = r"(?P<name>[A-Za-z0-9_.\-]++)"
_VALUE = _later(r"(?<=\")(?:[^\"\\\n]|\\[^\"'\n])*+|(?<=')(?:[^'\\\n]|\\[^\"'\n])*+|[^\s,;&\"'}\])\\]++")
# A name matches as a whole or not at all: matching from each of its letters would take minutes for a long one.
_COLOURS = r"(?:\x1b\[[0-9;]*+m)*+"
_OPENS = (
    rf"{_COLOURS}(?:[A-Za-z_][A-Za-z0-9_.]{{0,40}}+\()?+(?:\[(?!removed\]))?+"
    rf"(?:\\*[bBuUrR]?\\*[\"'])?{_COLOURS}"
)
"""The beginning of a value: its colour, a call or a list around it, and its quote."""
_NAMED = _later(
    rf"(?<![A-Za-z0-9_.\-]){_NAME}\\*[\"']?{_COLOURS}\s*+(?:=>|:=|[=:])(?:\s*+[>|][+-]?[ \t]*+\n)?\s*+{_OPENS}"
)
_FLAG = _later(rf"(?<![A-Za-z0-9_.\-])(?=--?[A-Za-z]){_NAME}(?:\s++(?!-)[\"']?|\\*[\"']\s*+,\s*+\\*[\"'](?!--))")
_BESIDE = _later(
    rf"(?<![A-Za-z0-9_.\-]){_NAME}{_COLOURS}(?:\\*[\"']\s*+,\s*+(?:\\*[\"']?value\\*[\"']?\s*+:)?"
    rf"|\s*+(?:->|→|\||│)|\s++is\s|\n\s*+value:)\s*+{_OPENS}"
)
"""A name with its value beside it: a pair, a cell of a table, an entry of a Kubernetes environment."""
_JUDGED = 512
"""Characters of a value that are examined."""
_NEXT = _later(r"\\*[\"']\s*+,\s*+\\*[bBuUrR]?\\*[\"']")
"""Between two values of a list."""
_LOGIN = _later(r"(?P<before>\blogin\s++\S++\s++password\s++)\S++")
_CURL_USER = _later(r"(?P<flag>(?<!\S)(?:-u|--user|--proxy-user)[ =]+[\"']?)(?P<user>[^\s:\"'/]+:)[^\s\"']+")


_SIGNATURES = frozenset({"signature", "sig", "x-amz-signature", "x-goog-signature", "x-oss-signature"})
"""Of presigned addresses: who has one can use the address."""
_QUERY = _later(r"(?<=[?&;])(?P<name>[A-Za-z0-9_.\-]++)(?P<between>=)(?P<value>[^&\s\"'#;]++)")


def _hidden_in_text(name: str, value: str) -> bool:
    """Like ``_hides`` for a flag or a variable; stricter for ``key: value``, which can be any text."""
    if name.startswith("-") or name.isupper():
        return _hides(name, value)
    strength = name_strength(name)
    return strength > 0 and not _nothing(value) and (strength == 2 or _looks_random(value))


def _hidden_beside(name: str, value: str) -> bool:
    """Stricter still: a name in a list or a table often stands beside text that is no value of it."""
    strength = name_strength(name)
    if len(value) < MIN_SECRET or not strength or _ordinary(value):
        return False
    return strength == 2 or _looks_random(value)


_Hides = Callable[[str, str], bool]
"""Whether the value of this name is masked."""


def _without_values(text: str, before: re.Pattern[str], hidden: _Hides) -> str:
    """Mask each value after a match of ``before`` for which ``hidden(name, value)`` is true. A value that stays can
    itself contain a name and a value."""
    kept, done, at = [], 0, 0
    while found := before.search(text, at):
        at = found.end()
        if not name_strength(found["name"]) or _ends_path(found):
            continue
        listed = found[0].rstrip("\\bBuUrR\"'").endswith("[")
        # The first part decides: judging a long value again for each name in it would take minutes.
        while (first := _VALUE.match(text, at, at + _JUDGED)) and hidden(found["name"], first[0]):
            whole = _VALUE.match(text, at) or first
            kept += [text[done:at], MASK]
            done = at = whole.end()
            if not listed or (more := _NEXT.match(text, at)) is None:
                break
            at = more.end()
    return "".join([*kept, text[done:]]) if kept else text


_NEXT_PATH = _later(r":(?:[~.]{0,2}/|(?:ro|rw|z)\b)")


def _ends_path(found: re.Match[str]) -> bool:
    """Whether the name ends a path, and another path follows a colon: ``PATH=/opt/token:/bin``, a mount."""
    text, (begin, end) = found.string, found.span("name")
    return bool(_NEXT_PATH.match(text, end)) and _is_in_path(text, begin)


def _queried(found: re.Match[str]) -> str:
    name = found["name"].lower()
    hidden = (name_strength(name) or name in _SIGNATURES) and not _nothing(found["value"])
    return f"{found['name']}={MASK}" if hidden else found[0]


def _without_token(found: re.Match[str]) -> str:
    """Without the key of a webhook. A directory named ``heartbeat`` below others is none: in a request it is the first
    segment."""
    text, begin = found.string, found.start()
    if found["where"] == "/heartbeat/" and _left_of(text, begin)[1].count("/") and _is_in_path(text, begin):
        return found[0]
    return f"{found['where']}{MASK}"


def _without_pem(text: str) -> str:
    """Remove private keys, and the rest of one whose first lines were cut off."""
    text = _PEM.sub(MASK, text)
    ends = list(_PEM_END.finditer(text))
    for number, end in reversed(list(enumerate(ends))):
        begin, least = end.start(), ends[number - 1].end() if number else 0
        for line in reversed(re.split(r"(?<=\n)|(?<=\\n)", text[max(least, begin - 4096) : begin])):
            if not re.fullmatch(r"[ \t|>]*[A-Za-z0-9+/=]*[ \t]*(?:\r|\\r)?(?:\n|\\n)?", line):
                break
            begin -= len(line)
        text = f"{text[:begin]}{MASK}{text[end.end() :]}"
    return text


def _without_shapes(text: str) -> str:
    """In blocks of whole lines: one search over a whole log would block the interpreter, and the sensing loop. A
    private key that a block boundary splits is recognized by either end."""
    if len(text) <= _BLOCK:
        return _block_without_shapes(text)
    blocks, at = [], 0
    while at < len(text):
        end = text.rfind("\n", at, at + _BLOCK) + 1 or at + _BLOCK
        blocks.append(_block_without_shapes(text[at:end]))
        at = end
    return "".join(blocks)


def _block_without_shapes(text: str) -> str:
    if _HINT.search(text):
        if "PRIVATE KEY" in text:
            text = _without_pem(text)
        if "://" in text:
            text = _USERINFO.sub(rf"\g<scheme>{MASK}@", text)
        text = _WEBHOOK.sub(_without_token, text)
        text = _HEADER.sub(rf"\g<name>\g<between>{MASK}", text)
        text = _SCHEME.sub(rf"\g<scheme> {MASK}", text)
        text = _CURL_USER.sub(rf"\g<flag>\g<user>{MASK}", text)
        text = _QUERY.sub(_queried, text)
        text = _without_values(text, _NAMED, _hidden_in_text)
        text = _without_values(text, _FLAG, _hides)
        text = _without_values(text, _BESIDE, _hidden_beside)
        text = _LOGIN.sub(rf"\g<before>{MASK}", text)
    while (clean := _SHAPES.sub(_masked, text)) != text:  # what is masked can end a path
        text = clean
    return text


# -- paths -----------------------------------------------------------------------------------------------------------

_FAR = 4096
"""Characters of a path that are examined, because of texts without a space."""
_BETWEEN = _later(r"\x1b\[[0-9;]*m|\\[nrt]|[\s\"'`=:,;&|(<>\[\0]")
"""What separates a path from other text. No closing bracket: a path does not begin behind ``[removed]``."""
_PATH = _later(
    r"(?:@|-[A-Za-z])?(?:~[\w.\-]*|\.{1,2}|\$\w+|\$\{\w+\}|%[A-Za-z])?(?P<slashes>/+)(?:[\w.+\-~%@]*/)*[\w.+\-~%@]*"
)
"""A path whose beginning shows that it is one: ``/``, ``~/``, ``./``, ``$HOME/``, also after ``-I`` or ``@``."""
_RELATIVE = _later(r"@?(?P<first>[\w.+\-~%]+)(?:/[\w.+\-~%@]*)+")
_HOST = _later(r"(?i)[\w\-]+(?:\.[\w\-]+)*\.[a-z]{2,}\.?|localhost|[0-9.]+")
_FILES = _later(r"(?i)(?<![A-Za-z0-9])(?:file|b2|s3|gs):\Z")
_REQUEST = _later(
    r"(?:(?:\b|(?<=[0-9]m))(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT)|(?i:ur[il]|location|referer|target|:path))"
    r"(?:\x1b\[[0-9;]*m|[\s\"'\]:=(,]|\\[nt])+\Z|(?i:\b(?:https?|wss?|ftp)):\Z"
)
"""Before the path of a request, which can contain a key, and before ``str(Path(url))``."""


def _masked(found: re.Match[str]) -> str:
    """A segment of a path stays. The colon of a Telegram token would end a path; ``KEY@`` is a login."""
    text, (begin, end), kind = found.string, found.span(), found.lastgroup
    if kind == "telegram" or text.startswith("@", end) or (kind == "id" and _PAIR.match(text, end)):
        return MASK
    return found[0] if _is_in_path(text, begin) or (kind == "hex" and _is_in_relative_path(text, begin)) else MASK


_PAIR = _later(r"/K[0-9]{3}[A-Za-z0-9+/]{27}")
"""A B2 key behind its id."""


def _left_of(text: str, at: int) -> tuple[str, str]:
    """What is before a path, and the path up to ``at``. JSON can escape its slashes."""
    least = max(0, at - _FAR)
    begin = max((found.end() for found in _BETWEEN.finditer(text, least, at)), default=least)
    return text[max(0, begin - 32) : begin], text[begin:at].replace("\\/", "/")


def _is_in_path(text: str, at: int) -> bool:
    """Whether a path with a plain beginning, or the URL of a file, goes up to ``at``."""
    before, path = _left_of(text, at)
    found = _PATH.fullmatch(path)
    if found is None or _REQUEST.search(before):
        return False
    if found["slashes"] == "//":  # else a host follows, or with "///" a file of this machine
        return bool(_FILES.search(before)) and path.count("/") > 2
    return True


def _is_in_relative_path(text: str, at: int) -> bool:
    """Whether ``at`` is in a relative path, not in its first segment: ``checkouts/repo-<commit>/train.py``."""
    before, path = _left_of(text, at)
    found = _RELATIVE.fullmatch(path)
    return found is not None and not _REQUEST.search(before) and not _HOST.fullmatch(found["first"])


# -- scrubbing -------------------------------------------------------------------------------------------------------


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` with everything that is or looks like a secret replaced by ``[removed]``. Idempotent. ``secrets`` are
    removed in addition to the registered ones."""
    version, forms, raw, cores = _prepare()
    if secrets and (given := frozenset(s for s in secrets if len(s) >= MIN_SECRET and s not in _known)):
        _, more, more_raw, more_cores = _given(given)
        text = _without_known(text, more, more_raw, more_cores)
    if len(text) <= _CACHED_TEXT:
        return _scrubbed(text, version)
    return _without_shapes(_without_known(text, forms, raw, cores))


@lru_cache(maxsize=2048)
def _scrubbed(text: str, version: int) -> str:
    """Cached, because most findings have the same text at each turn, and a status document the same names; it has up
    to a thousand strings. ``version``, that of the known values, invalidates the cache when a value is added or
    dropped."""
    _, forms, raw, cores = _prepare()
    clean = _without_shapes(_without_known(text, forms, raw, cores))
    return text if clean == text else clean


@lru_cache(maxsize=4)
def _given(values: frozenset[str]) -> tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    return _made_of(tuple(values), 0)


def scrub_all(value: Any) -> Any:
    """``value`` with every string scrubbed, keys included, and values under secret keys removed. Other objects become
    their scrubbed text."""
    kind = type(value)  # first the types of JSON, exactly: a status document has hundreds of values
    if kind is str:
        return scrub(value)
    if value is None or kind is int or kind is float or kind is bool:
        return value
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return scrub(value)
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
    """``value`` scrubbed, or removed if ``name`` is a secret name."""
    if name_strength(name) == 2:
        match value:
            case bool() | float() | None:
                return value
            case str() | int() | bytes():
                return value if _nothing(str(value)) else MASK
            case list() | tuple() | set() | frozenset():
                return [scrub_field(name, item) for item in value]
            case Mapping():
                return {scrub(str(k)): scrub_field(str(k) if _is_said(v) else name, v) for k, v in value.items()}
    return scrub_all(value)


def _is_said(value: Any) -> bool:
    """Whether a value below a secret name is no secret: a user, a host, a path, a number."""
    return isinstance(value, int | float) or (isinstance(value, str) and _ordinary(value))


_IS_FLAG = _later(r"--[A-Za-z][A-Za-z0-9_.\-]*(?:=.*)?|-[A-Za-z]", re.S)
_USER_FLAGS = frozenset({"-u", "--user", "--proxy-user"})


def scrub_argv(argv: Sequence[str], mask: str = MASK) -> tuple[str, ...]:
    """A command without its secrets, for display: ``--x-key S``, ``--x-key=S``, ``KEY=S``, ``++wandb.key=S``,
    ``-u user:S``. The number of items stays the same. Never use it for a command that is executed or compared."""
    shown: list[str] = []
    before = ""
    for item in argv:
        name, equals, value = item.partition("=")
        if before and not _IS_FLAG.fullmatch(item) and _hides(before, item):
            shown.append(mask)
        elif before in _USER_FLAGS and ":" in item and "/" not in item:
            shown.append(f"{item.partition(':')[0]}:{mask}")
        elif equals and not re.search(r"\s", name) and _hides(name, value):
            shown.append(f"{name}={mask}")
        else:
            shown.append(scrub(item) if mask == MASK else scrub(item).replace(MASK, mask))
        before = item if item.startswith(("-", "+")) and not equals else ""
    return tuple(shown)


def _hides(name: str, value: str) -> bool:
    """Whether to mask this value of a command. Rather too much than too little, because the command is only shown."""
    strength = name_strength(name)
    if not strength or _nothing(value):
        return False
    if strength == 2 or name.isupper() or (name.lower().endswith("token") and not value.isdigit()):
        return True
    return len(value) >= MIN_SECRET and not _ordinary(value)
