from tests.support.small_reserve import small_reserve  # noqa: F401 - a fixture
