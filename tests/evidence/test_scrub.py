"""No secret survives scrubbing; ordinary text does."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.evidence import scrub, secret_values

HEX = "0123456789abcdef"
ALNUM = string.ascii_letters + string.digits

SHAPED = st.one_of(
    st.text(HEX, min_size=40, max_size=40),
    st.text(ALNUM, min_size=20, max_size=40).map(lambda s: "hf_" + s),
    st.text(ALNUM + "-_", min_size=20, max_size=48).map(lambda s: "sk-" + s),
    st.text(ALNUM, min_size=27, max_size=27).map(lambda s: "K005" + s),
    st.text(HEX, min_size=23, max_size=23).map(lambda s: "00" + s),
)
AROUND = st.text(st.characters(codec="utf-8", exclude_characters=ALNUM + "_-+/="), max_size=20)


@settings(deadline=None, max_examples=80)
@given(SHAPED, AROUND, AROUND)
def test_secrets_are_known_by_their_shape(secret: str, before: str, after: str) -> None:
    assert secret not in scrub(before + secret + after)


NAMES = st.sampled_from(
    ["WANDB_API_KEY", "B2_APPLICATION_KEY", "HF_TOKEN", "MY_SECRET", "db_password", "apiKey", "OPENAI_API_KEY_2"]
)
VALUES = st.text(ALNUM + "!#$%*+-./:<>?@^_~", min_size=1, max_size=40)


@settings(deadline=None, max_examples=80)
@given(NAMES, VALUES, st.sampled_from(["{n}={v}", "export {n}='{v}'", '"{n}": "{v}"', "--{n} x{v}", "--{n}={v}"]))
def test_secrets_are_known_by_their_name(name: str, value: str, form: str) -> None:
    marker = "Zq" + value + "qZ"
    assert marker not in scrub(form.format(n=name, v=marker))


@settings(deadline=None, max_examples=80)
@given(st.text(min_size=6, max_size=40), st.text(max_size=60), st.text(max_size=60))
def test_given_values_are_removed_wherever_they_stand(secret: str, before: str, after: str) -> None:
    cleaned = scrub(before + secret + after, [secret])
    assert secret not in cleaned or secret in "[removed]"


@settings(deadline=None, max_examples=80)
@given(st.text(max_size=200))
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
    ],
)
def test_ordinary_lines_stay(text: str) -> None:
    assert scrub(text) == text


def test_urls_and_headers() -> None:
    assert "pa55" not in scrub("https://user:pa55word@example.com/x")
    assert "abcdefgh1234" not in scrub("Authorization: Bearer abcdefgh1234")


def test_values_of_an_environment() -> None:
    assert secret_values({"HF_TOKEN": "abcdefg", "HOME": "/root/home", "KEY": "x"}) == {"abcdefg"}
