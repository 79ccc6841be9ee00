"""Fixtures of this room. Each judgement of a pod is compared with the decision by ties."""

from tests.support import shadow_ties
from tests.support.pod import pod  # noqa: F401 - a fixture

shadow_ties.install()
