"""Tasks as pairs of text, and the batches made of them."""

from ntl_lightning.data.benchmarks import GSM8K, SVAMP, MultiRC, RJokes
from ntl_lightning.data.collate import Architecture, Collator, encode
from ntl_lightning.data.datamodule import LabelCoverage, NumberDataModule
from ntl_lightning.data.loader import BatchLoader, StepTotals
from ntl_lightning.data.mathematics import Mathematics
from ntl_lightning.data.order import BatchOrder, TokenBudgetOrder
from ntl_lightning.data.problems import Arithmetic
from ntl_lightning.data.regression import Formula, Friedman, Friedman2, Friedman3, InputRange
from ntl_lightning.data.sources import Example, Mixture, Source, Split
from ntl_lightning.data.tables import Csv, HubDataset, JsonLines, Parquet, RowFilter

__all__ = [
    "GSM8K",
    "SVAMP",
    "Architecture",
    "Arithmetic",
    "BatchLoader",
    "BatchOrder",
    "Collator",
    "Csv",
    "Example",
    "Formula",
    "Friedman",
    "Friedman2",
    "Friedman3",
    "HubDataset",
    "InputRange",
    "JsonLines",
    "LabelCoverage",
    "Mathematics",
    "Mixture",
    "MultiRC",
    "NumberDataModule",
    "Parquet",
    "RJokes",
    "RowFilter",
    "Source",
    "Split",
    "StepTotals",
    "TokenBudgetOrder",
    "encode",
]
