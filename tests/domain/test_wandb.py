"""Which W&B run goes on: never a mixture, never anything from the store that is not an id."""

from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.run import NAMES, given_in, identity, is_id, valid_ids

PAIR = {"trainer": "t1", "orchestrator": "o1"}


def test_what_is_found_on_disk_replaces_what_was_known_wholly() -> None:
    assert identity(PAIR, {"shared": "s1"}) == {"shared": "s1"}, "the trainer was upgraded: one run now"
    assert identity({"shared": "s1"}, PAIR) == PAIR
    assert identity({"shared": "s1"}, {}) == {"shared": "s1"}, "a new pod: nothing on disk"


def test_half_of_a_pair_on_disk_is_still_the_pair() -> None:
    for name in PAIR.values():
        assert identity(PAIR, {"shared": name}) == PAIR


def test_the_owners_own_id_counts_except_where_two_runs_would_claim_it() -> None:
    assert identity({"shared": "a"}, {"shared": "b"}, {"shared": "mine"}) == {"shared": "mine"}
    assert identity(PAIR, {}, {"shared": "mine"}) == PAIR
    assert given_in({"PRL_RUN_ID": "x", "WANDB_SHARED_RUN_ID": "y"}, ("PRL_RUN_ID", "WANDB_SHARED_RUN_ID")) == {
        "shared": "x"
    }
    assert given_in({"PRL_RUN_ID": "../x"}, ("PRL_RUN_ID",)) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)
IDS = st.dictionaries(st.sampled_from(NAMES), st.text(max_size=8) | st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True))


@given(st.dictionaries(st.sampled_from((*NAMES, "argv")), JSON) | JSON)
def test_whatever_the_store_says_only_ids_come_through(anything: object) -> None:
    assert all(name in NAMES and is_id(value) for name, value in valid_ids(anything).items())


@given(IDS, IDS, IDS)
def test_never_a_mixture(known: dict[str, str], found: dict[str, str], mine: dict[str, str]) -> None:
    mine = {"shared": "m"} if mine else {}
    ids = identity(known, found, mine)
    assert not ({"shared", "trainer"} <= ids.keys() or {"shared", "orchestrator"} <= ids.keys()) or any(
        ids == {k: v for k, v in whole.items() if is_id(v)} for whole in (known, found)
    )
    assert ids in ({}, mine) or any(ids.items() <= whole.items() for whole in (known, found))


def test_what_an_argument_must_not_be() -> None:
    assert not any(is_id(x) for x in ("", "-x", "a b", "a/b", "a\n", "x" * 65, "é", "a;b", "$(x)"))
    assert all(is_id(x) for x in ("3kq7x1pz", "a_b-c", "0" * 64))
