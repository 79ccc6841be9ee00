"""What holds for all tests of checkpoints."""

import pytest


@pytest.fixture(autouse=True)
def inspected_by_one_child(reader_of_the_file: None) -> None:
    """Nearly every test here inspects."""
