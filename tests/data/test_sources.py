import pytest

from ntl_lightning.data.sources import Source


def test_a_source_without_examples_cannot_be_made():
    with pytest.raises(TypeError, match="examples"):
        Source()
