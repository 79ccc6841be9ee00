"""Fixtures of this room."""

from tests.support.pod import pod  # noqa: F401 - a fixture
