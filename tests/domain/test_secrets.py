"""No secret survives scrubbing, whatever form it takes; ordinary text does."""

import base64
import json
import shlex
import string
import time
import urllib.parse

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from podwatch.domain import secrets
from podwatch.domain.errors import HostError
from podwatch.domain.event import Change, Event, EventName, Incident, Notice, Topic
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.secrets import (
    MASK,
    name_strength,
    register,
    register_argv,
    register_document,
    register_named,
    scrub,
    scrub_all,
    scrub_argv,
)
from tests.support.examples import examples

HEX = "0123456789abcdef"
ALNUM = string.ascii_letters + string.digits
KEYED = st.text(ALNUM, min_size=20, max_size=40)

SHAPED = st.one_of(
    st.text(HEX, min_size=40, max_size=40),
    KEYED.map(lambda s: "hf_" + s),
    st.text(ALNUM + "-_", min_size=20, max_size=48).map(lambda s: "sk-" + s),
    KEYED.map(lambda s: "ghp_" + s),
    KEYED.map(lambda s: "github_pat_" + s),
    KEYED.map(lambda s: "wandb_v1_" + s),
    KEYED.map(lambda s: "glpat-" + s),
    KEYED.map(lambda s: "xoxb-" + s),
    KEYED.map(lambda s: "rpa_" + s),
    KEYED.map(lambda s: f"eyJ{s}.{s}.{s}"),
    st.text(string.ascii_uppercase + string.digits, min_size=16, max_size=16).map(lambda s: "AKIA" + s),
    st.text(ALNUM, min_size=27, max_size=27).map(lambda s: "K005" + s),
    st.text(HEX, min_size=23, max_size=23).map(lambda s: "00" + s),
)
AROUND = st.text(st.characters(codec="utf-8", exclude_characters=ALNUM + "_-+/="), max_size=20)


@settings(max_examples=examples(150))
@given(SHAPED, AROUND, AROUND)
def test_secrets_are_known_by_their_shape(secret: str, before: str, after: str) -> None:
    assert secret not in scrub(before + secret + after)


NAMES = st.sampled_from(
    ["WANDB_API_KEY", "B2_APPLICATION_KEY", "HF_TOKEN", "MY_SECRET", "db_password", "apiKey", "OPENAI_API_KEY_2",
     "wandb.api-key", "x-api-key", "model.wandb.key", "AWS_SECRET_ACCESS_KEY"]
)  # fmt: skip
VALUES = st.text(ALNUM + "!#$%*+-./:<>?@^_~", min_size=1, max_size=40)
FORMS = ["{n}={v}", "export {n}='{v}'", '"{n}": "{v}"', "--{n} x{v}", "--{n}={v}", "++{n}={v}", "{n}: {v}", "{n} = {v}",
         '{{\\"{n}\\": \\"{v}\\"}}', "curl -H '{n}: {v}'", "https://h/x?{n}={v}&z=1", '{n}="{v}']  # fmt: skip


@settings(max_examples=examples(200))
@given(NAMES, VALUES, st.sampled_from(FORMS))
def test_secrets_are_known_by_their_name(name: str, value: str, form: str) -> None:
    marker = "Zq" + value + "qZ"
    assert marker not in scrub(form.format(n=name, v=marker))


SHOWN = ["{{b'{n}': b'{v}'}}", "('{n}', '{v}')", "['t.py', '--{n}', '{v}']", "{n}=SecretStr('{v}')", "{n}: >-\n  {v}",
         "{n}=['{v}', '{v}']", "| {n} | {v} |", "{n} -> {v}", "{n} is {v}", "- name: {n}\n  value: {v}",
         '{{"name": "{n}", "value": "{v}"}}', "\x1b[1m{n}\x1b[0m=\x1b[33m{v}\x1b[0m",
         "'{n}': \x1b[32m'{v}'\x1b[0m"]  # fmt: skip
"""How programs show an environment, a command or a configuration."""


@settings(max_examples=examples(120))
@given(NAMES, st.text(ALNUM, min_size=8, max_size=40), st.sampled_from(SHOWN))
def test_secrets_are_known_by_their_name_as_programs_show_it(name: str, value: str, form: str) -> None:
    marker = "Zq7" + value + "9qZ"
    once = scrub(form.format(n=name, v=marker))
    assert marker not in once
    assert scrub(once) == once


def encoded(secret: str) -> dict[str, str]:
    data = secret.encode()
    return {
        "plain": secret,
        "url": urllib.parse.quote(secret, safe=""),
        "form": urllib.parse.quote_plus(secret),
        "json": json.dumps({"a": secret}),
        "json in json": json.dumps(json.dumps({"a": secret})),
        "repr": repr([secret]),
        "shell": shlex.quote(secret),
        "hex": data.hex(),
        "capital hex": data.hex().upper(),
        **{
            f"base64 after {n} bytes": coder(b"x" * n + data + b"y" * n).decode()
            for n in range(4)
            for coder in (base64.b64encode, base64.urlsafe_b64encode)
        },
        "split": secret[: len(secret) // 2] + "\n" + secret[len(secret) // 2 :],
        "split and indented": secret[: len(secret) // 3] + " \r\n   " + secret[len(secret) // 3 :],
        "split and escaped": secret[: len(secret) // 2] + "\\n" + secret[len(secret) // 2 :],
        "coloured": secret[:3] + "\x1b[31m" + secret[3:],
    }


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.text(
        st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("Cc", "Cs", "Zs")),
        min_size=8,
        max_size=40,
    )
)
def test_a_known_value_is_found_in_every_form(secret: str) -> None:
    secrets.forget()
    register(secret)
    for form, text in encoded(secret).items():
        cleaned = scrub(f"it said ({text}) and went on")
        assert text not in cleaned, form
        assert secret not in cleaned.replace("\n", "").replace("\\n", ""), form
        assert MASK in cleaned, form
        assert cleaned.startswith("it said (") or MASK in cleaned[:20]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(ALNUM + "-_+/=", min_size=16, max_size=40), st.integers(12, 40), st.booleans())
def test_a_quotation_that_was_cut_shows_no_half(secret: str, length: int, beginning: bool) -> None:
    assume(len(set(secret)) >= 5)  # lines of one character are no secret, and are everywhere
    secrets.forget()
    register(secret)
    cut = secret[:length] if beginning else secret[-length:]
    cleaned = scrub(f"at the end of a line: {cut}" if beginning else f"{cut} at the beginning of one")
    assert cut not in cleaned
    cleaned = cleaned.replace("=", "")  # what looks like NAME= is judged as that
    assert cleaned in (f"at the end of a line: {MASK}", f"{MASK} at the beginning of one")


def test_base64_leaves_no_more_than_a_byte_at_each_end() -> None:
    register("planted-s3cret-value-0001")
    for n in range(6):
        text = base64.b64encode(b"u" * n + b"planted-s3cret-value-0001" + b"v" * n).decode()
        assert scrub(f"Basic: {text};") == f"Basic: {MASK};"


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=8, max_size=40),
    st.text(max_size=60),
    st.text(max_size=60),
)
def test_known_values_are_removed_wherever_they_stand(secret: str, before: str, after: str) -> None:
    assume(len(secret.strip()) >= 8)  # blanks around a value are no part of it
    secrets.forget()
    register(secret)
    cleaned = scrub(before + secret + after)
    assert secret not in cleaned or secret in MASK


TRICKY = st.lists(
    st.sampled_from(
        ["api_key", "=", ": ", '"', "'", "\\", "\n", " ", "--token", "value", "[removed]", "https://", "u:p@", "?", "&",
         "Authorization", "Bearer ", "abcdefgh1234", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----",
         "MIIabc", "x", "]", "}", "password", "-u ", "0" * 40, "/", "/data/", "../",
         "sk-" + "a" * 20, "K005" + "a" * 27]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@settings(max_examples=examples(400))
@given(st.one_of(st.text(max_size=200), TRICKY))
def test_scrubbing_twice_changes_nothing(text: str) -> None:
    once = scrub(text)
    assert scrub(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "12:30:01 SUCCESS Step 80 | Time: 183.22s | Loss: 0.1 | Reward: 0.4",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "/app/outputs/checkpoints/step_40/trainer/__0_0.distcp",
        "uv run rl @ /root/config.toml --ckpt --ckpt.interval 5 --ckpt.resume-step 40",
        "0123456789abcdef" * 4,
        "KeyError: 'model.layers.0.mlp.gate_proj.weight'",
        "Missing key(s) in state_dict: model.layers.0.self_attn.q_proj.weight",
        "step 80 of 200, tokens: 512, max_tokens=4096, pad_token_id=151643, eos_token: <|im_end|>",
        "tokenizer=Qwen/Qwen3-8B tokenizer_path: /root/models/Qwen3 TOKENIZERS_PARALLELISM=false",
        '{"password": true, "api_key": null, "token": ""}',
        "set B2_APPLICATION_KEY in the environment, or api_key = ${WANDB_API_KEY}",
        '"key": "silent-death:gpu0"',
        "http://127.0.0.1:8000/health refuses connections",
        "models--Qwen--Qwen3-8B/snapshots/0060bc56d46589041c1048efd1a397421b1142b5/config.json",
        "/data/0060bc56d46589041c1048efd1a397421b1142b5/outputs/checkpoints",
        "commit 0060bc56d46589041c1048efd1a397421b1142b5",
        "sort_key=reward, primary key: step 00000040, cache_key=checkpoint-40-trainer",
        "podwatch check -u root; ps -u trainer",
        "Missing keys: ['lm_head.key', 'model.layers.0.key.weight'], unused: ['token', 'tokenizer']",
        "| token | count | password | login |",
        "the password is wrong, the token is expired, key: [0.1, 2] key=len(x)",
    ],
)
def test_ordinary_lines_stay(text: str) -> None:
    assert scrub(text) == text


COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEY_ID = "00" + "123456789abcdef01234567"
TOKEN = "ghp_" + "a1B2" * 9
SEGMENTS = [COMMIT, f"podwatch-{COMMIT}", KEY_ID, f"run-{KEY_ID}", "AKIAIOSFODNN7EXAMPLE", "hf_qwen3_8b_rl_run_0012",
            "K005abcXdefGHIjklMNOpqrSTUvwx12", "sk-learn-experiments-2026", TOKEN,
            "0c1k2pz3hdb4vxq5s7mgnfjrlyi8w9a6-python3-3.11.7"]  # fmt: skip
"""Names of directories that have the form of a key, or that are taken for one by people."""
PATHS = ["/nix/store/{}/bin/python", "/nix/store/{}", "~/x/{}/train.py", "~me/{}", "./{}/train.py", "../{}",
         "$HOME/{}/x", "${{HOME}}/{}/x", "PATH=/usr/bin:/nix/store/{}/bin:/opt/{}", "LD_LIBRARY_PATH=/a/{}/lib:/b",
         "file:///x/{}/a.toml", "cannot read '/home/x/{}/a': not found", '"/home/x/{}"', "--config=/home/x/{}/a.toml",
         "@/root/{}/x.toml",
         "-I/opt/{}/include", "(/home/{}/bin/python: not found)", "/home/x/{}:12: error", "\\/nix\\/{}\\/bin",
         "\x1b[32m/nix/{}/x\x1b[0m", "see /data/{}, and more", "s3://bucket/runs/{}/x",
         "a line\\n/nix/{}/x"]  # fmt: skip


@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("path", PATHS)
def test_a_segment_of_a_path_is_no_secret(path: str, segment: str) -> None:
    text = path.format(*[segment] * path.count("{}"))
    assert scrub(text) == text
    assert scrub_argv([text]) == (text,)
    assert scrub_all({"path": text}) == {"path": text}


@pytest.mark.parametrize(
    "text",
    [
        f"checkouts/app-{COMMIT}/bin/python",
        f"@configs/repo-{COMMIT}/x.toml",
        f"sqlite:////srv/repo-{COMMIT}/b.db",
        "docker run -v /run/secrets:/run/secrets:z image",
        "docker run -v /run/secrets:/run/secrets:ro image",
        "PATH=/opt/token:/usr/bin",
        "PYTHONPATH=/opt/secrets:./x",
        "/app/heartbeat/rank0.json",
    ],
)
def test_segments_of_other_paths_stay(text: str) -> None:
    assert scrub(text) == text


B2_KEY = "K005abc/defGHIjklMNOpqrSTUvwx12"


@pytest.mark.parametrize("secret", [COMMIT, KEY_ID, B2_KEY, "AKIAIOSFODNN7EXAMPLE", TOKEN])
@pytest.mark.parametrize(
    "form",
    ["{}", "'{}'", "key {}", "x={}", "{}\n/data", "/app/train.py:{}", "/app/train.py {}", "/app/train.py,{}",
     "/app/a,b={}", "/app/a\0{}", "/app/a;x={}", "path:/data/x,v:{}", "https://x.org/q?{}", "https://x.org/q#{}",
     "me:{}@host/x/y",
     "<Resource>/b/k</Resource><Id>{}</Id>", "{{path:/data/x,v:{}}}", "a/b {}", "/data -> {}", f"{KEY_ID}/{{}}"],
)  # fmt: skip
def test_a_secret_beside_a_path_is_removed(form: str, secret: str) -> None:
    if form.startswith(KEY_ID) and secret == COMMIT:
        return  # what follows a slash has always been taken for the name of a directory
    once = scrub(form.format(secret))
    assert secret not in once
    assert scrub(once) == once


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Credential=AKIAIOSFODNN7EXAMPLE/20260801/us-east-1/s3/aws4_request", "AKIA"),
        (f"https://example.com/x/{TOKEN}/y", "ghp_"),
        (f"example.com/x/{TOKEN}/y", "ghp_"),
        (f"{TOKEN}@github.com/me/repository", "ghp_"),
        (f"me/{TOKEN}", "ghp_"),
        (f'"POST /bots/{TOKEN}/send HTTP/1.1" 200', "ghp_"),
        (f"Max retries exceeded with url: /bots/{TOKEN}/send", "ghp_"),
        ("POST /podwatch/heartbeat/pa55word/trainer", "pa55word"),
        ("https://example.com/podwatch/heartbeat/pa55word/trainer", "pa55word"),
        ("/bots/12345678:" + "A" * 35, "A" * 35),
        ("/data/api_key=pa55word/x", "pa55word"),
        ("--api-key /data/pa55word", "pa55word"),
        (f'"https:\\/\\/{TOKEN}@github.com\\/me\\/repo"', "ghp_"),
        (f"https:/{TOKEN}@github.com/me/repo", "ghp_"),
        (f"https:/example.com/x/{TOKEN}", "ghp_"),
        (f"//{TOKEN}@github.com/me", "ghp_"),
        (f"//a.b.com/x/{TOKEN}", "ghp_"),
        (f"A=/x;B=me/{TOKEN}", "ghp_"),
        (f"A=/x,B=me/{TOKEN}", "ghp_"),
        (f"A=/x&B=me/{TOKEN}", "ghp_"),
        (f"A=/x\0B=me/{TOKEN}\0", "ghp_"),
        (f"/x/a.py:me/{TOKEN}", "ghp_"),
        (f"{{dir:/data,u:me/{TOKEN}}}", "ghp_"),
        ("path=/heartbeat/pa55word", "pa55word"),
        ("curl $URL/heartbeat/pa55word/trainer", "pa55word"),
        (f"localhost:8000/v1/{TOKEN}/x", "ghp_"),
        (f"10.0.0.1/a/{TOKEN}", "ghp_"),
        (f"registry:5000/me/{TOKEN}", "ghp_"),
        (f"[GET] /x/{TOKEN}", "ghp_"),
        (f"\x1b[1mGET\x1b[0m /x/{TOKEN}", "ghp_"),
        (f"Location: /login/{TOKEN}", "ghp_"),
        (f"with url: '/x/{TOKEN}'", "ghp_"),
        (f"scope {KEY_ID}/20260801/us-west-004/s3/aws4_request", KEY_ID),
        (f"/x/{KEY_ID}/K005abcXdefGHIjklMNOpqrSTUvwx12", KEY_ID),
        ("a/password:/hunter2pass", "hunter2pass"),
    ],
)
def test_an_address_or_a_name_is_no_path(text: str, secret: str) -> None:
    assert secret not in scrub(text)


@pytest.mark.parametrize("secret", [KEY_ID, "K005abcXdefGHIjklMNOpqrSTUvwx12", "AKIAIOSFODNN7EXAMPLE", TOKEN])
def test_a_secret_behind_a_known_value_is_removed(secret: str) -> None:
    """What is left of the known value is no beginning of a path."""
    register("mysecretuser01")
    assert secret not in scrub(f"login mysecretuser01/{secret} x")


def test_the_rest_of_a_webhook_behind_a_known_value_is_removed() -> None:
    register("T0WORKSPACE")
    assert "secret" not in scrub("https://hooks.slack.com/services/T0WORKSPACE/B0OTHER/secret")


@pytest.mark.parametrize("segment", SEGMENTS)
def test_a_known_value_is_removed_from_a_path(segment: str) -> None:
    register(segment)
    assert scrub(f"/data/{segment}/train.py") == f"/data/{MASK}/train.py"


@pytest.mark.parametrize("value", ["true", "1", "/root", "gpu0", "7", "abcdefg", "no", ""])
def test_short_values_do_not_ruin_messages(value: str) -> None:
    register(value)
    register_named({"MY_SECRET": value, "WANDB_API_KEY": value}, all_of_it=True)
    text = f"GPU gpu0 of /root/x is true and 17 of abcdefgh: {value}."
    assert scrub(text) == text
    assert scrub(f"password={value}x9!") == f"password={MASK}"


@pytest.mark.parametrize(
    "value",
    [
        "training",
        "Disabled",
        "/root/.secrets/key.json",
        "http://127.0.0.1:8000",
        "disabled.by.default",
        "12345678",
        "${OTHER_VARIABLE}",
        "$HF_TOKEN",
    ],
)
def test_words_paths_addresses_and_numbers_are_ordinary_even_under_a_telling_name(value: str) -> None:
    register_named({"API_KEY": value, "SSH_KEY": value}, all_of_it=True)
    assert scrub(f"cannot read {value} today") == f"cannot read {value} today"


def test_flags_and_variables_in_a_text() -> None:
    for text in ("login --token=tok_abc x", "login --token tok_abc x", "TOKEN=tok_abc x", "export KEY='tok_abc' x"):
        assert "tok_abc" not in scrub(text)
        assert scrub(text).endswith(" x")


def test_what_is_ordinary_is_removed_beside_its_name() -> None:
    assert scrub("db_password=training api_key: 123456") == f"db_password={MASK} api_key: {MASK}"


@pytest.mark.parametrize(
    "value", ["bad\udc80\udcffbytes", "lone\ud800surrogate", "removed]", "[removed", "nul\0and\x1b1"]
)
def test_values_that_are_no_text_harm_nothing(value: str) -> None:
    """Whatever an environment holds, the guard must be able to report."""
    register(value)
    register_named({"API_KEY": value}, all_of_it=True)
    once = scrub(f"a {value} b [removed] c")
    assert scrub(once) == once
    assert value not in once or value in MASK


def test_a_value_inside_a_long_stretch_of_base64_takes_no_time() -> None:
    register("planted-value-1")
    inside = base64.b64encode(b"x" * 300_000 + b"planted-value-1" + b"y" * 300_000).decode()
    began = time.process_time()
    assert scrub(inside) == MASK
    assert time.process_time() - began < 10


def test_what_an_environment_tells() -> None:
    register_named({"HF_TOKEN": "abcdefg9", "HOME": "/root/home", "KEY": "x"})
    assert scrub("abcdefg9 in /root/home, x") == f"{MASK} in /root/home, x"
    run, plain = "q1w2e3r4t5z6u7i8o9", "a9s8d7f6g5h4j3k2l1y0"
    register_named({"WANDB_PROJECT": "night-run-of-august", "WANDB_RUN_ID": run, "PLAIN": plain}, all_of_it=True)
    assert scrub("project night-run-of-august, run q1w2e3r4t5z6u7i8o9, a9s8d7f6g5h4j3k2l1y0") == (
        f"project night-run-of-august, run q1w2e3r4t5z6u7i8o9, {MASK}"
    )
    register_named({"DATABASE": "postgres://me:aPassw0rdOfMine@db/x"})
    assert scrub("login with aPassw0rdOfMine failed") == f"login with {MASK} failed"


def test_what_a_document_tells() -> None:
    register_document(
        {
            "wandb": {"api_key": "Planted-Document-Key", "project": "my-project-x"},
            "list": [{"hf_token": "Planted2Token"}],
        }
    )
    assert scrub("Planted-Document-Key my-project-x Planted2Token") == f"{MASK} my-project-x {MASK}"


@pytest.mark.parametrize(
    ("name", "strength"),
    [
        ("WANDB_API_KEY", 2), ("apiKey", 2), ("--wandb.api-key", 2), ("++wandb.key", 2), ("x-key", 2), ("HF_TOKEN", 2),
        ("B2_APPLICATION_KEY_ID", 2), ("password", 2), ("client_secret", 2), ("key", 1), ("token", 1), ("sort_key", 1),
        ("tokenizer", 0), ("max_tokens", 0), ("pad_token_id", 0), ("KeyError", 0), ("keyboard", 0), ("monkey", 0),
        ("HF_TOKEN_READ", 2), ("OPENAI_API_KEY_PROD", 2), ("DB_PASSWORD_MAIN", 2), ("GITHUB_TOKEN_ORG", 2),
        ("SECRET_KEY_BASE", 2), ("AWS_CREDENTIALS_JSON", 2), ("SSH_PRIVATE_KEY_PEM", 2), ("dbPasswordMain", 2),
        ("AWS_SECRET_ACCESS_KEY_PROD", 2), ("AWS_ACCESS_KEY_ID_PROD", 2), ("TOKEN_HF", 1), ("PGPASSWORD", 2),
        ("SSHPASS", 2), ("DB_PASS", 2), ("MYSQL_ROOT_PASS", 2), ("pass", 2), ("PASS", 0), ("PASS_RATE", 0),
        ("HF_TOKEN_PATH", 0), ("PASSWORD_FILE", 0), ("SSH_AUTH_SOCK", 0), ("num_key_value_heads", 0),
        ("secrets.yaml", 0), ("SecretNotFound", 0), ("secretKeyRef", 0), ("token-classification", 0),
        ("secret_path", 0), ("api_key_file", 0), ("", 0), ("_", 0), ("7", 0),
    ],
)  # fmt: skip
def test_names(name: str, strength: int) -> None:
    assert name_strength(name) == strength


def test_urls_and_headers() -> None:
    for text in (
        "https://user:pa55word@example.com/x",
        "https://user:pa55word@with@ats@example.com/x",
        "redis://:pa55word@h:1/0",
        "https://pa55wordpa55word@github.com/x",
        "Authorization: Basic pa55wordpa55",
        "authorization: Custom pa55word, more",
        "{'Authorization': 'Token pa55word'}",
        "Cookie: session=pa55word; a=b",
        "curl -u me:pa55word https://h",
        "https://hooks.slack.com/services/T0/B0/pa55word",
        "https://discord.com/api/webhooks/1/pa55word",
        "https://h/x?signature=1&access_token=pa55word#f",
        "GET /heartbeat/pa55word/trainer",
        "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=pa55word",
        "https://a.blob.core.windows.net/c?sv=1&sig=pa55word",
        "machine api.wandb.ai\n  login user\n  password pa55word",
    ):
        assert "pa55word" not in scrub(text), text


KEY_LINES = [
    "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC" * 2,
    "BKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj" * 2,
    "MzEfYyjiWA4R4/M2bS1+fWIcPm15j9==",
]


@pytest.mark.parametrize("join", ["\n", "\r\n", "\\n", "\n    ", "\n| "])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("last", [4, 5])
def test_private_keys_whole_or_cut(join: str, first: int, last: int) -> None:
    lines = ["-----BEGIN RSA PRIVATE KEY-----", *KEY_LINES, "-----END RSA PRIVATE KEY-----"]
    shown = lines[first:last]
    if first and last == 4:
        return  # neither end is there: nothing says that it is a key
    cleaned = scrub("before: " + join + join.join(shown) + join + "after, all of it")
    assert not any(line in cleaned for line in KEY_LINES)
    assert cleaned.startswith("before: ")
    assert cleaned.endswith(", all of it")


def test_a_private_key_that_is_known_is_found_line_by_line() -> None:
    register("-----BEGIN PRIVATE KEY-----\n" + "\n".join(KEY_LINES) + "\n-----END PRIVATE KEY-----")
    for line in KEY_LINES:
        assert scrub(f"x {line} y") == f"x {MASK} y"


# -- commands ---------------------------------------------------------------------------------------------------------

PLANTED = st.text(ALNUM + "!#%*+./:?@^~ ", min_size=8, max_size=30).map(lambda s: f"Zq{s}qZ")
HIDING = st.sampled_from(
    [("--wandb.api-key", "{}"), ("--x-key={}",), ("HF_TOKEN={}",), ("KEY={}",), ("wandb.api_key={}",),
     ("++wandb.key={}",), ("-H", "Authorization: Bearer {}"), ("--header", "X-Api-Key: {}"),
     ("--password", "{}"), ("--token", "{}"), ("+trainer.logger.wandb_api_key={}",), ("--hub_token", "{}"),
     ("--auth-token={}",), ("-u", "me:{}")]
)  # fmt: skip
HARMLESS = st.sampled_from(
    [
        "python",
        "train.py",
        "--ckpt",
        "--seed",
        "7",
        "--max-tokens",
        "4096",
        "@",
        "run.toml",
        "--output-dir",
        "/out",
        "--tokenizer",
        "Qwen/Qwen3",
    ]
)


@settings(max_examples=examples(300))
@given(st.lists(HARMLESS, max_size=4), HIDING, PLANTED, st.lists(HARMLESS, max_size=4))
def test_argv_is_scrubbed_as_a_list(before: list[str], form: tuple[str, ...], planted: str, after: list[str]) -> None:
    items = [item.format(planted) for item in form]
    if "-u" in items and "/" in planted:
        return  # a path on the other side of a colon
    # What may take the planted value as its own value must not stand directly before it.
    argv = [*before, *items, *after]
    shown = scrub_argv(argv)
    assert len(shown) == len(argv)
    assert planted not in "\0".join(shown)
    assert planted.strip() not in shlex.join(shown)
    assert list(shown[: len(before)]) == before
    assert list(shown[len(argv) - len(after) :]) == after


def test_argv_without_secrets_is_what_it_was() -> None:
    argv = ("torchrun", "--nproc-per-node", "8", "train.py", "--max-tokens", "4096", "--tokenizer", "x/y", "--sort-key",
            "reward",            "--api-key-file", "/root/k", "--api-key", "--verbose", "a=b")  # fmt: skip
    assert scrub_argv(argv) == argv


def test_the_values_of_a_command_are_known_from_then_on() -> None:
    register_argv(
        [
            "train",
            "--wandb.api-key",
            "Planted Argv Value",
            "++x.token=Planted-Too-99",
            "--seed",
            "12345678",
            "http://a:Pl4ntedUrl@h",
        ]
    )
    assert scrub("Planted Argv Value, Planted-Too-99, Pl4ntedUrl, 12345678") == f"{MASK}, {MASK}, {MASK}, 12345678"


# -- nothing that is made can forget it -------------------------------------------------------------------------------


def test_whatever_is_told_is_scrubbed_when_it_is_made() -> None:
    register("planted-value-1")
    leak = "planted-value-1 WANDB_API_KEY=x1y2"
    made: list[object] = [
        Finding(
            FindingKind.GAVE_UP,
            Severity.CRITICAL,
            leak,
            0.0,
            leak,
            subject=leak,
            evidence=(Evidence("s", leak, Agreement.AGREES),),
        ),
        Event(EventName.GAVE_UP, 0.0, leak, fields={"text": leak, "api_key": "x1y2", "step": 4}),
        Incident(1, "hang", 0.0, leak, json.dumps([{"value": leak}]), resolution=leak),
        Notice(Topic.GAVE_UP, Change.OPENED, Severity.CRITICAL, leak, leak, leak, 0.0, fields={"text": leak}),
    ]
    error = HostError(leak, where=leak, fix=leak)
    made += [vars(error), str(error), repr(error)]
    for thing in made:
        assert "planted" not in repr(thing)
        assert "x1y2" not in repr(thing)
    incident = made[2]
    assert isinstance(incident, Incident)
    assert json.loads(incident.evidence) == [{"value": f"{MASK} WANDB_API_KEY={MASK}"}]


def test_documents_are_scrubbed_by_key_and_by_value() -> None:
    register("planted-value-1")
    document = {
        "api_key": "abc",
        "a": ["planted-value-1", {"b": "--token x1y2"}],
        "api_keys": ["x1y2", None],
        "pin_secret": 123456789,
        "env": [{"name": "HF_TOKEN", "value": "x1y2"}, ["HF_TOKEN", "x1y2"]],
        "argv": ["t.py", "--api-key", "x1y2"],
        "credentials": {"user": "max", "one": "a1b2-c3d4"},
        "n": 3,
        "planted-value-1": None,
        "ok": True,
    }
    assert scrub_all(document) == {
        "api_key": MASK,
        "a": [MASK, {"b": f"--token {MASK}"}],
        "api_keys": [MASK, None],
        "pin_secret": MASK,
        "env": [{"name": "HF_TOKEN", "value": MASK}, ["HF_TOKEN", MASK]],
        "argv": ["t.py", "--api-key", MASK],
        "credentials": {"user": "max", "one": MASK},
        "n": 3,
        MASK: None,
        "ok": True,
    }


def test_a_value_registered_later_is_found_in_a_text_that_was_scrubbed_before() -> None:
    text = "the value is planted-value-1"
    assert scrub(text) == text
    register("planted-value-1")
    assert scrub(text) == f"the value is {MASK}"


@pytest.mark.parametrize(
    "unit",
    ["a", "a-", "key", "api_key=", "-", "key: ", "://", " ", "--key ", "\\", "-----BEGIN PRIVATE KEY-----",
     "-----END PRIVATE KEY-----\n", "A" * 20 + "\n", "authorization: ", "a@://", "key='", "basic  ", "?a", "-u ", "x\n",
     "key, ", "key=", "key is ", "login a ", "key=a(", "key=['", "key\x1b[1m", "key: >\n", "'key', '", "\x1b[", "[ ",
     "a:/", "eyJ", "%41", "/", "/a", "a/", "/" + "0" * 40, "a-" + "0" * 40 + "/",
     "sk-" + "a" * 16 + "/", "Cookie: ", '\\"', "key = "],
)  # fmt: skip
@pytest.mark.parametrize("end", ["", "key", "\napi_key=x -----END PRIVATE KEY-----"])
def test_no_text_takes_long(unit: str, end: str) -> None:
    """Time grows with the length, not with its square: of the processor, at most 40 times for 8 times the text."""
    register("planted-value-1")

    def seconds(length: int) -> float:
        text = unit * (length // len(unit)) + end
        began = time.process_time()
        scrub(text)
        return time.process_time() - began

    if seconds(40_000) >= 0.25:
        small, large = (min(seconds(length) for _ in range(2)) for length in (5_000, 40_000))
        assert large < max(40 * small, 0.25)


# -- credentials that end --------------------------------------------------------------------------------------------


def test_the_last_temporary_credentials_stay_known_and_older_ones_are_dropped() -> None:
    for rotation in range(300):
        secrets.register_temporary(f"{rotation:04d}-temporary-{rotation:04d}")
        for known in {max(0, rotation - secrets.MOST_TEMPORARY + 1), rotation}:
            assert scrub(f"key {known:04d}-temporary-{known:04d} refused") == f"key {MASK} refused"
    assert len(secrets._known) == secrets.MOST_TEMPORARY
    assert MASK not in scrub("key 0001-temporary-0001 refused")


def test_a_credential_that_is_still_used_and_a_permanent_one_stay_known() -> None:
    register("permanent-secret-1")
    secrets.register_temporary("permanent-secret-1", "promoted-secret-1", "ended-secret-1")
    register("promoted-secret-1")
    for rotation in range(2 * secrets.MOST_TEMPORARY):
        secrets.register_temporary(f"{rotation:04d}-temporary-{rotation:04d}", "used-secret-1")
    shown = scrub("permanent-secret-1 promoted-secret-1 used-secret-1 ended-secret-1")
    assert shown == f"{MASK} {MASK} {MASK} ended-secret-1"
    register(*(f"{number:04d}-permanent" for number in range(secrets.MOST_TEMPORARY)))
    secrets.register_temporary("late-secret-1")
    assert scrub("used-secret-1 late-secret-1") == f"{MASK} {MASK}"


def test_a_value_that_replaces_a_dropped_one_is_found() -> None:
    """The number of known values stays the same."""
    for number in range(secrets.MOST_TEMPORARY):
        secrets.register_temporary(f"first-secret-{number}")
    assert scrub("first-secret-0 second-secret-1") == f"{MASK} second-secret-1"
    secrets.register_temporary("second-secret-1")
    assert scrub("first-secret-0 second-secret-1") == f"first-secret-0 {MASK}"
