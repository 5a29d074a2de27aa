import pytest

from ntl_lightning.paths import expand_path


def test_home_and_variables_are_put_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("NTL_X", "data")
    assert expand_path("~/$NTL_X/${NTL_X}.csv", "key") == "/home/ada/data/data.csv"


def test_an_unset_variable_is_named_with_its_key(monkeypatch):
    monkeypatch.delenv("NTL_MISSING", raising=False)
    with pytest.raises(ValueError, match=r"data.train.path: .*NTL_MISSING"):
        expand_path("${NTL_MISSING}/x.csv", "data.train.path")
