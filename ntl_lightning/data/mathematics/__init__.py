"""Problems of DeepMind's mathematics data set, made from a seed."""

from ntl_lightning.data.mathematics.source import Mathematics

__all__ = ["Mathematics"]
