"""What may not appear and what must stay, as data: known values as terminals, consoles and encoders wrap them, values
of an environment file, and sentences and paths that only look like a secret."""

import base64
import hashlib
import json
import re
import textwrap
import time
import urllib.parse
from collections.abc import Callable

import pytest

from podwatch.domain.secrets import MASK, register, register_named, scrub, scrub_all

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


RANDOM = "".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(19))
"""1216 characters, as temporary credentials have."""


@pytest.mark.parametrize(
    ("secret", "part"),
    [
        ('P@ss "w0rd" <2026>!', 'P@ss "w0rd" <2'),
        ('P@ss "w0rd" <2026>!', '0rd" <2026>!'),
        ("correct horse battery staple 42!", "correct horse batte"),
        ("correct horse battery staple 42!", "ry staple 42!"),
        ("{curly's} b|r\\ace 2026", "{curly's} b|r"),
        (RANDOM, RANDOM[:140]),
        (RANDOM, RANDOM[:12]),
        (RANDOM, RANDOM[-12:]),
        (RANDOM, RANDOM[300:470]),
        ("0" * 12 + "abcdefgh" + "0" * 12, "0" * 12),
        ("key ends with -" + "-" * 16, "-" * 12),
    ],
)  # fmt: skip
def test_the_ends_of_every_known_value_are_removed(secret: str, part: str) -> None:
    register(secret)
    for text in (f"url: {part}", f"error near {part}...", json.dumps([f"near {part}"])):
        clean = scrub(text)
        assert part not in clean
        assert MASK in clean


@pytest.mark.parametrize(
    ("secret", "text", "stays"),
    [
        ("step100loss2", "step 100\nloss 2.1", True),
        ("gpu0memory80", "gpu 0\r\nmemory 80", True),
        ("step100loss2", "step100\n  loss2", False),
        ("correct horse battery staple 42!", "correct horse\nbattery staple\n42!", False),
        ("correct horse battery staple 42!", "| correct horse |\n| battery staple 42! |", False),
        ('P@ss "w0rd" <2026>!', 'P@ss\n"w0rd" <2026>!', False),
    ],
)
def test_blanks_are_wrapping_only_beside_a_break(secret: str, text: str, stays: bool) -> None:
    register(secret)
    clean = scrub(f"it says {text}; bye")
    assert (clean == f"it says {text}; bye") is stays
    if not stays:
        assert clean == f"it says {MASK}; bye" if "|" not in text else "staple" not in clean


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
    "PASSWORD=${NAME} TOKEN=$TOKEN SECRET=<your secret> KEY={{ key }}",
    "bearer authentication is required, Bearer authorization. Bearer credentials: none",
    "PASS: tests/x.py; PASS_RATE=abc; second pass: reading the tokens",
    "secrets.yaml: parse error; HF_TOKEN_PATH=there; SSH_AUTH_SOCK=agent; num_key_value_heads=many",
    "/run/secrets/api_key: permission denied; https://h/x?page=2;sort=name",
    "step 100, loss 2.1",
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
        *((f"{name}=hunter2xZ", "hunter2xZ") for name in
          ("HF_TOKEN_READ", "DB_PASSWORD_MAIN", "SECRET_KEY_BASE", "PGPASSWORD", "SSHPASS", "MYSQL_ROOT_PASS", "pass")),
        ("https://h/x?token=abc,def123&y=1", "def123"),
        ("https://h/x?access_token=abc)def123", "def123"),
        ("https://h/x?api_key=ab}cd]ef123", "ef123"),
        ("https://h/x?api_key=ab\\cd123", "cd123"),
        ("https://h/x?a=1;token=hunter2x", "hunter2x"),
        ("https://h/x?a=1&amp;token=hunter2x", "hunter2x"),
        ('{"u":"https://h/x?a=1\\u0026token=hunter2x"}', "hunter2x"),
        ('{"u":"https://h/x?sv=1\\u0026sig=abcDEF%2F"}', "abcDEF"),
        ('{"u":"https://h/x?X-Amz-Credential=AKIA%2F1\\u0026X-Amz-Signature=fe5f80f77d"}', "fe5f80"),
        ('{"u":"https://h/x?X-Amz-Date=1\\u0026X-Amz-Signature=fe5f80f77d\\u0026z=1"}', "fe5f80"),
        *((f"{before}{token}", token) for token in ("hf_QwErTyUiOpAsDfGhJkLzXcVb", "0123456789abcdef" * 2 + "01234567")
          for before in ("failed\\n", "x:\\t", "\x1b[1;32m", "\\u001b[36m", "\\x1b[0m", "\x1b[m", "%3D", "u\\u003d")),
        ("password: not hunter2x", "hunter2x"),
        ("password: is now hunter2x", "hunter2x"),
        ("passphrase: Correct horse battery staple", "Correct"),
        ("secret: Hello World", "Hello"),
        ("Bearer supersecrettoken", "supersecrettoken"),
        ("bearer Supersecrettoken.", "Supersecrettoken"),
        ("PASSWORD=$ecretPassw0rd", "ecretPassw0rd"),
        ("PASSWORD={abc123$%x", "abc123"),
        ("PASSWORD=<abc123$%x>", "abc123"),
        ("┃ DB_PASSWORD ┃ hunter2x ┃", "hunter2x"),
        ("║ DB_PASSWORD ║ hunter2x ║", "hunter2x"),
        ('{"Name":"DB_PASSWORD","Value":"hunter2x"}', "hunter2x"),
        ("- name: DB_PASSWORD\r\n  value: hunter2x", "hunter2x"),
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
         "-" * 80 + "\n", "0" * 60 + "\n", "ab" * 40 + "\n", "checkpoint-prefix- ", "checkpoint ", "?a=b\\", "&token=",
         "password: not ", "password: the a ", " \\", '"\n',
         "step 12 loss=0.3 token /a/b\n", "a@://", "-----END PRIVATE KEY-----\n", "A" * 64 + "\n"]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_a_long_text_of_any_kind_takes_time_in_proportion(unit: str) -> None:
    """Of the processor: at most 32 times for 8 times the text, or little. A look at each known value for each character
    would take seconds."""
    register(SECRET, "token-" + "-" * 30 + "end1", "x" + "0" * 38 + "y", "x1" + "ab" * 20 + "y")
    register(*(f"checkpoint-prefix-{n}-{RANDOM[n : n + 40]}" for n in range(50)))

    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        began = time.process_time()
        scrub(text)
        return time.process_time() - began

    if seconds(1 << 17) >= 0.25:
        small, large = (min(seconds(length) for _ in range(2)) for length in (1 << 14, 1 << 17))
        assert large < max(32 * small, 0.25)


def test_fields_of_a_pair_are_found_in_any_case() -> None:
    assert scrub_all({"Name": "DB_PASSWORD", "Value": "hunter2x"}) == {"Name": "DB_PASSWORD", "Value": MASK}
