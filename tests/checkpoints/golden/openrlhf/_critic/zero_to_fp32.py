# left out of this fixture
