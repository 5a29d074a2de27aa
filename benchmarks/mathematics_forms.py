"""How like the original mathematics data set our problems are, as a table.

    python benchmarks/mathematics_forms.py FOLDER

FOLDER holds files of the original package: train-easy.jsonl, train-medium.jsonl, train-hard.jsonl,
interpolate.jsonl and extrapolate.jsonl, with module, question and answer. Every cell has the
original first and ours second; a triple is the 10 %, 50 % and 90 % quantile.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from ntl_lightning.data import Mathematics

FILES = {
    "train-easy": ("train", "easy"),
    "train-medium": ("train", "medium"),
    "train-hard": ("train", "hard"),
    "interpolate": ("interpolate", None),
    "extrapolate": ("extrapolate", None),
}

NUMBER = re.compile(r"\d+(?:\.\d+)?")

Problem = tuple[str, str]
"""Question and answer."""


def original(folder: Path) -> dict[tuple[str, str], dict[str, list[Problem]]]:
    """Problems by set and module, and then by file."""
    problems: dict[tuple[str, str], dict[str, list[Problem]]] = defaultdict(dict)
    for name, (split, _) in FILES.items():
        with (folder / f"{name}.jsonl").open(encoding="utf-8") as file:
            for row in map(json.loads, file):
                found = problems[split, row["module"]].setdefault(name, [])
                found.append((row["question"], row["answer"]))
    return problems


def ours(module: str, names: Iterable[str], count: int) -> list[Problem]:
    """So many problems of a module like those of each file."""
    return [
        (example.prompt, str(example.target))
        for name in names
        for split, difficulty in [FILES[name]]
        for example in Mathematics(count, split, (module,), difficulty).examples()
    ]


def quantiles(values: Sequence[int]) -> str:
    """Of 10, 50 and 90 %."""
    return " ".join(f"{value:.0f}" for value in np.quantile(values, [0.1, 0.5, 0.9]))


def share(values: Sequence[bool]) -> str:
    """In per cent."""
    return f"{100 * np.mean(values):.0f} %"


def digits(text: str) -> int:
    """How many there are."""
    return sum(character.isdigit() for character in text)


COLUMNS: dict[str, Callable[[list[Problem]], str]] = {
    "characters of the question": lambda rows: quantiles([len(q) for q, _ in rows]),
    "digits of its numbers": lambda rows: quantiles(
        [digits(number) for q, _ in rows for number in NUMBER.findall(q)]
    ),
    "numbers in it": lambda rows: quantiles([len(NUMBER.findall(q)) for q, _ in rows]),
    "digits of the answer": lambda rows: quantiles([digits(a) for _, a in rows]),
    "negative answers": lambda rows: share([a.startswith("-") for _, a in rows]),
    "answers with decimals": lambda rows: share(["." in a for _, a in rows]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Our problems against the original's.")
    parser.add_argument("folder", type=Path, help="the original's files")
    parser.add_argument(
        "--count", type=int, default=300, help="our problems for each file and module (300)"
    )
    options = parser.parse_args()

    print(f"| set | module | {' | '.join(COLUMNS)} |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    for (split, module), files in original(options.folder).items():
        theirs = [problem for problems in files.values() for problem in problems]
        mine = ours(module, files, options.count)
        cells = [f"{column(theirs)} / {column(mine)}" for column in COLUMNS.values()]
        print(f"| {split} | `{module}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
