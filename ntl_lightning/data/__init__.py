"""Tasks as pairs of text, and the batches made of them."""

from ntl_lightning.data.collate import Architecture, Collator, encode
from ntl_lightning.data.datamodule import LabelCoverage, NumberDataModule
from ntl_lightning.data.loader import BatchLoader, BatchOrder, StepTotals
from ntl_lightning.data.mathematics import Mathematics
from ntl_lightning.data.problems import Arithmetic, Friedman
from ntl_lightning.data.sources import GSM8K, Csv, Example, JsonLines, Source

__all__ = [
    "GSM8K",
    "Architecture",
    "Arithmetic",
    "BatchLoader",
    "BatchOrder",
    "Collator",
    "Csv",
    "Example",
    "Friedman",
    "JsonLines",
    "LabelCoverage",
    "Mathematics",
    "NumberDataModule",
    "Source",
    "StepTotals",
    "encode",
]
