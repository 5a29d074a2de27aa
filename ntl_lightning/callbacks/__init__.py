"""Lightning callbacks that show people what a model of numbers does, and keep its work safe."""

from ntl_lightning.callbacks.checkpoint import LastCheckpoint
from ntl_lightning.callbacks.monitor import MonitorCheck
from ntl_lightning.callbacks.plots import AnswerPlots
from ntl_lightning.callbacks.predictions import PredictionFile
from ntl_lightning.callbacks.report import MetricsReport

__all__ = ["AnswerPlots", "LastCheckpoint", "MetricsReport", "MonitorCheck", "PredictionFile"]
