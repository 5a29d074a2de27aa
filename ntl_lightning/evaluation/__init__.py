"""Metrics with a stated rule for invalid answers, and how answers are made."""

from ntl_lightning.evaluation.decoding import Generation, expected_values, generate
from ntl_lightning.evaluation.metrics import NumericMetrics, TermAverages

__all__ = ["Generation", "NumericMetrics", "TermAverages", "expected_values", "generate"]
