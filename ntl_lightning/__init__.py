"""Train language models that understand numbers."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ntl_lightning.data.datamodule import NumberDataModule
    from ntl_lightning.losses.objective import Objective
    from ntl_lightning.module import NumberAwareLM
    from ntl_lightning.numbers.vocabulary import NumberVocabulary

__version__ = "0.1.0"

__all__ = ["NumberAwareLM", "NumberDataModule", "NumberVocabulary", "Objective"]

# Resolved at the first use, so that `import ntl_lightning.losses` does not load lightning.
_HOME = {
    "NumberAwareLM": "ntl_lightning.module",
    "NumberDataModule": "ntl_lightning.data.datamodule",
    "NumberVocabulary": "ntl_lightning.numbers.vocabulary",
    "Objective": "ntl_lightning.losses.objective",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ntl_lightning' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
