"""The conformance suite on other people's S3 servers, and their differences as podwatch finds them out."""

from tests.stores.test_conformance import *  # noqa: F403
from tests.suites.s3.conftest import Running


def test_what_is_found_out(store: ObjectStore, foreign: Running) -> None:  # noqa: F405
    store.check()
    assert {name: store.features[name] for name in foreign.expected} == foreign.expected
