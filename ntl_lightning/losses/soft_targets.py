"""Losses whose target is a distribution over the number tokens."""

from ntl_lightning.losses.distributions import gaussian_target

__all__ = ["gaussian_target"]
