"""Train language models that understand numbers."""

__version__ = "0.1.0"
