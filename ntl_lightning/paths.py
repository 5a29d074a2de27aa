"""Paths and names as users write them in a configuration."""

import os
import re

__all__ = ["expand_path"]

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expand_path(text: str | os.PathLike[str], where: str) -> str:
    """Expand `~`, `$NAME` and `${NAME}` in a path or hub name.

    Args:
        text: What the user wrote, e.g. `${DATA}/train.jsonl`, or a path object.
        where: The configuration key it was written at; named in the error.

    Returns:
        The text with the home folder and every environment variable put in.

    Raises:
        ValueError: If a variable is not set; an unexpanded name would only fail later, as a
            missing file.

    >>> os.environ["NTL_DOCTEST"] = "/data"
    >>> expand_path("${NTL_DOCTEST}/train.jsonl", "data.train.path")
    '/data/train.jsonl'
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in os.environ:
            raise ValueError(
                f"{where}: the environment variable {name} in {text!r} is not set. "
                f"Set it (export {name}=...) or write the path out."
            )
        return os.environ[name]

    return os.path.expanduser(_VARIABLE.sub(value, os.fspath(text)))
