"""What may not appear and what must stay, as data: known values as terminals, consoles and encoders wrap them, values
of an environment file, and sentences and paths that only look like a secret."""

import base64
import json
import re
import textwrap
import time
import urllib.parse
from collections.abc import Callable

import pytest

from podwatch.domain.secrets import MASK, register, register_named, scrub

SECRET = "planted-Wandb-5f3a9c/0042+Zq81xT77uV"
ESCAPED = "planted\"Quote\\5f3a9c 0042'Zq81xT77uV"
"""A value that JSON, repr and percent-encoding write in another way."""


def pieces(text: str, width: int) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)]


def in_base64(secret: str, before: int, width: int) -> str:
    encoded = base64.b64encode(b"u" * before + secret.encode() + b"v" * 40).decode()
    return "\n".join(pieces(encoded, width))


WRAPPINGS: dict[str, Callable[[list[str]], str]] = {
    "terminal": "\n".join,
    "carriage return": "\r\n".join,
    "indented": "\n      ".join,
    "quoted mail": "\n> ".join,
    "escaped": "\\n".join,
    "escaped twice": "\\\\n".join,
    "shell": " \\\n".join,
    "concatenated": lambda parts: "('" + "'\n '".join(parts) + "')",
    "panel": lambda parts: "\n".join(f"│ {part:<40} │" for part in parts),
    "heavy panel": lambda parts: "\n".join(f"┃ {part:<40} ┃" for part in parts),
    "ascii table": lambda parts: "\n".join(f"| {part:<40} |" for part in parts),
    "table": lambda parts: "\n".join(f"│ {'key' if n == 0 else '':<9} │ {p:<40} │" for n, p in enumerate(parts)),
    "colours": lambda parts: "\n".join(f"\x1b[31m{part}\x1b[0m" for part in parts),
    "blank lines": "\n\n".join,
    "tabs": "\n\t".join,
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("width", [3, 7, 9, 11, 13, 20])
def test_a_known_value_that_is_wrapped_keeps_no_part(wrapping: str, width: int) -> None:
    register(SECRET)
    text = f"it says {WRAPPINGS[wrapping](pieces(SECRET, width))}; bye"
    clean = scrub(text)
    assert not any(part in clean for part in pieces(SECRET, width) if len(part) > 2)
    assert clean.startswith("it says")
    assert clean.endswith("; bye")
    assert MASK in clean


ENCODERS: dict[str, Callable[[str], str]] = {
    "base64": lambda s: base64.b64encode(s.encode()).decode(),
    "url-safe base64": lambda s: base64.urlsafe_b64encode(s.encode()).decode(),
    "base64 of more": lambda s: base64.b64encode(b"user:" + s.encode() + b":rest-of-it").decode(),
    "hex": lambda s: s.encode().hex(),
    "HEX": lambda s: s.encode().hex().upper(),
    "percent": lambda s: urllib.parse.quote(s, safe=""),
    "form": urllib.parse.quote_plus,
    "json": lambda s: json.dumps(s)[1:-1],
    "json in json": lambda s: json.dumps(json.dumps(s))[3:-3],
    "repr": lambda s: repr(s)[1:-1],
}


@pytest.mark.parametrize("secret", [SECRET, ESCAPED])
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("width", [10, 16, 76, 200])
def test_an_encoded_value_that_is_wrapped_keeps_no_middle(secret: str, encoder: str, width: int) -> None:
    """Of base64, what belongs to its neighbours can stay at either end."""
    register(secret)
    encoded = ENCODERS[encoder](secret)
    clean = scrub("\n".join(pieces(encoded, width)))
    joined = re.sub(r"\s", "", encoded)
    first, last = (12, 24) if encoder == "base64 of more" else (0, 6)
    middle = [joined[at : at + 6] for at in range(first, len(joined) - last, 6)]
    assert not any(part in clean for part in middle)


@pytest.mark.parametrize("before", [0, 1, 2, 30, 55, 56, 57, 58, 120])
@pytest.mark.parametrize("width", [64, 76])
def test_base64_in_columns_shows_nothing_of_a_value_inside(before: int, width: int) -> None:
    register(SECRET)
    clean = scrub(in_base64(SECRET, before, width))
    whole = base64.b64encode(b"u" * before + SECRET.encode() + b"v" * 40).decode()
    first = -(-before * 4 // 3)
    inside = whole[first + 2 : first + len(SECRET) * 4 // 3 - 3]
    assert not any(inside[at : at + 8] in clean for at in range(len(inside) - 8))


@pytest.mark.parametrize("part", [SECRET[:12], SECRET[:20], SECRET[-12:], SECRET[5:20], SECRET[14:26], SECRET[9:-4]])
@pytest.mark.parametrize("form", ["{}", "'{}...", "... {} ...", "x{}\u2026", "key={}", "{}\n"])
def test_a_part_of_a_known_value_is_removed(part: str, form: str) -> None:
    register(SECRET)
    assert part not in scrub(form.format(part))


DOTTED = {
    "json web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "token of another kind": "v2.local.QAxIpVe-ECVNI1z4xQbm_qQYomyT3h8FtV8bxkz8pBJWkT8f7HtlOpbroPDEZUKop",
    "Lambda key": "secret_my-pod_0123456789abcdef0123456789abcdef.AbCdEfGh12345678IjKlMnOp12345678",
    "Lambda key, plain name": "secret_pod_0123456789abcdef0123456789abcdef.AbCdEfGh12345678IjKlMnOp12345678",
    "SendGrid's shape": "XX.ngeVfQFYQlKU0ufo8x5d1A.TwL2iGABf9DHoTf09kqeF8tAmbihYzrnopKc1s5cr",
    "Discord's shape": "MTk4NjIyNDgzNDcxOTI1MjQ4.Cl2FMQ.ZnCjm1XVW7vRze4b7Cq4se7kKWs",
    "bytes": "a1b2c3d4e5f6a7b8.c9d0e1f2a3b4c5d6",
}


@pytest.mark.parametrize("kind", DOTTED)
@pytest.mark.parametrize("name", ["ANY_SETTING", "LAMBDA_API_KEY", "SERVICE", "token"])
def test_a_dotted_value_of_the_environment_file_is_known(kind: str, name: str) -> None:
    value = DOTTED[kind]
    register_named({name: value}, all_of_it=True)
    assert scrub(f"it said {value} twice") == f"it said {MASK} twice"
    assert value.rpartition(".")[2] not in scrub(f"rejected: {value.rpartition('.')[2]}")


@pytest.mark.parametrize(
    "value",
    ["podwatch.domain.secrets", "torch.optim.AdamW", "api.wandb.ai", "model.layers.12.key",
     "run.2026.08.01", "Qwen.Qwen3.8B.Instruct", "trainer_v2.config.Settings"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["ANY_SETTING", "API_KEY"])
def test_a_dotted_name_is_no_secret(name: str, value: str) -> None:
    register_named(
        {name: value, "OTHER": "2.4.1+cu121", "HOST": "eu-central-1.example.com", "IP": "10.0.0.12"}, all_of_it=True
    )
    value += " 2.4.1+cu121 eu-central-1.example.com 10.0.0.12"
    assert scrub(f"cannot import {value} today") == f"cannot import {value} today"


SENTENCES = [
    "InvalidAccessKeyId: The AWS Access Key Id you provided does not exist in our records.",
    "botocore.errorfactory.InvalidAccessKeyId: The key is not known",
    "ExpiredToken: The provided token has expired.",
    "Invalid credentials: check the key and its rights",
    "wrong password: Incorrect username or password",
    "MissingSecret: no secret is given",
    "SecretNotFound: the secret does not exist; Password: Please type it again",
    "The API key is missing, and the token of this user is not valid",
    "a token, a key, a password and a secret walk into a bar",
    "tokens per second: 4096, key frames: 12, secret santa",
    "the password is required; the api key was rejected by the server",
    "Cookie jar is empty, basic training, bearer of news",
    "Basic checks pass. Bearer tokens work.",
    "author: me, authority: none, monkey: yes, keynote: today",
    "commit 0060bc56d46589041c1048efd1a397421b1142b5 (HEAD -> main)",
    "git checkout 0060bc5 && ls /nix/store/0060bc56d46589041c1048efd1a397421b1142b5-python3/bin",
    "/data/0060bc56d46589041c1048efd1a397421b1142b5 and ./0060bc56d46589041c1048efd1a397421b1142b5/x",
    "cat: /run/secrets/api_key: Permission denied",
    "open /etc/podwatch/token: no such file or directory",
    "ls: cannot access '/root/.ssh/key': No such file",
    "step_00000000000000000000000000000000000000000040.pt",
    "https://example.com/docs/keys?page=2&sort=name#token",
    "-u is a flag, --user too",
    "https://github.com/x/y/commit/0060bc56d46589041c1048efd1a397421b1142b5",
]


@pytest.mark.parametrize("text", SENTENCES)
def test_a_sentence_and_a_path_stay(text: str) -> None:
    register(SECRET)
    assert scrub(text) == text


@pytest.mark.parametrize(
    "text", ["\n".join(textwrap.wrap(" ".join(SENTENCES[:3]), width)) for width in range(20, 90, 7)]
)
def test_wrapped_sentences_stay(text: str) -> None:
    register(SECRET, "correct-horse-battery-staple")
    assert MASK not in scrub(text)


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("password: hunter2", "hunter2"),
        ("password: swordfish", "swordfish"),
        ("password: Swordfish\nnext line", "Swordfish"),
        ("password: 'The AWS'", "The AWS"),
        ("PASSWORD: The first", "The"),
        ("password=The first", "The"),
        ("user: me password: Swordfish host: x", "Swordfish"),
        ("api_key: Abc1def2Ghi3 is it", "Abc1def2Ghi3"),
        ("/run/secrets/api_key:hunter2pass", "hunter2pass"),
        ("/run/secrets.env:API_KEY=hunter2pass", "hunter2pass"),
        ("https://h/x?token=training&z=1", "training"),
        ("x-eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N", "dozjgNryP4J3jVmNHl0w5N"),
    ],
)  # fmt: skip
def test_a_value_behind_its_name_goes(text: str, gone: str) -> None:
    assert gone not in scrub(text)


UNITS = ["eyJ-", "eyJa.", "/token:/", "key=a ", "a=b ", "password: the ", "$a", "/heartbeat/", "GET /", "a\\n", "\\n",
         "| ", "K000", "0" * 40 + " ", "sk-", "1234567890:", "\x1b[1m", "file://", "\\/", "key.", "-key ", "urlurl",
         SECRET, SECRET[:12] + " ", SECRET[:11], base64.b64encode(SECRET.encode()).decode(), "key", "key=", "\\", '"',
         "step 12 loss=0.3 token /a/b\n", "a@://", "-----END PRIVATE KEY-----\n", "A" * 64 + "\n"]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_of_any_text_takes_time_in_proportion(unit: str) -> None:
    """Of the processor: at most 32 times for 8 times the text, or little."""
    register(SECRET)

    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        began = time.process_time()
        scrub(text)
        return time.process_time() - began

    if seconds(1 << 19) >= 1.0:
        small, large = (min(seconds(length) for _ in range(2)) for length in (1 << 16, 1 << 19))
        assert large < max(32 * small, 1.0)
