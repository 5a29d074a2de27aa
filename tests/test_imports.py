"""What importing the package costs, and that its public names are there."""

import importlib
import json
import pkgutil
import subprocess
import sys

import pytest

import ntl_lightning

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(ntl_lightning.__path__, "ntl_lightning.")
    if not module.name.endswith("__main__")
)

STEPS = """
import json, sys

def loaded():
    heavy = ("torch", "numpy", "tokenizers", "transformers", "datasets", "lightning", "matplotlib")
    return [name for name in heavy if name in sys.modules]

seen = {}
import ntl_lightning
seen["import ntl_lightning"] = loaded()
import ntl_lightning.losses
from ntl_lightning import NumberVocabulary, Objective
seen["import ntl_lightning.losses"] = loaded()
from ntl_lightning import NumberAwareLM, NumberDataModule
seen["names"] = [
    f"{name.__module__}.{name.__qualname__}"
    for name in (NumberAwareLM, NumberDataModule, NumberVocabulary, Objective)
]
print(json.dumps(seen))
"""


def test_the_losses_load_neither_lightning_nor_transformers_nor_datasets() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, timeout=120
    )
    seen = json.loads(done.stdout)
    assert seen["import ntl_lightning"] == []
    assert not {"lightning", "transformers", "datasets", "matplotlib"} & set(
        seen["import ntl_lightning.losses"]
    )
    assert "torch" in seen["import ntl_lightning.losses"]
    assert seen["names"] == [
        "ntl_lightning.module.NumberAwareLM",
        "ntl_lightning.data.datamodule.NumberDataModule",
        "ntl_lightning.numbers.vocabulary.NumberVocabulary",
        "ntl_lightning.losses.objective.Objective",
    ]
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["ntl_lightning", *MODULES])
def test_every_name_of_all_exists(name: str) -> None:
    module = importlib.import_module(name)
    names = module.__all__
    assert [entry for entry in names if not hasattr(module, entry)] == []
    assert len(set(names)) == len(names)


def test_modules_were_found() -> None:
    assert {"ntl_lightning.cli", "ntl_lightning.losses.terms", "ntl_lightning.data"} <= set(MODULES)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'ntl_lightning' has no attribute 'Losses'"):
        ntl_lightning.Losses  # noqa: B018
