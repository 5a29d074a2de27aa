import pytest

from ntl_lightning.numbers.vocabulary import NumberVocabulary


@pytest.fixture
def v15():
    """Ids 0 `<pad>`, 1 `a`, 2 `b`, 3 `c`, 4 `.`, 5..14 = `0`..`9`."""
    return NumberVocabulary.from_values({i + 5: float(i) for i in range(10)}, width=15)


@pytest.fixture
def v15d():
    """Ids 0..9 = `0`..`9`, then `<pad>`, `a`, `b`, `c`, `.`."""
    return NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=15)


@pytest.fixture
def v1005():
    """Ids 0..4 text, 5..1004 = `0`..`999`."""
    return NumberVocabulary.from_values({i + 5: float(i) for i in range(1000)}, width=1005)
