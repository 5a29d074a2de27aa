"""What a problem of the mathematics data set costs to make, ours against the original package.

    python benchmarks/problem_generation.py --original ORIGINAL/bin/python --csv problems.csv

ORIGINAL is an environment of its own: the package needs numpy==1.23.5 and sympy==1.5.1, and with
these Python 3.11 at most.

    python3.11 -m venv ORIGINAL
    ORIGINAL/bin/pip install numpy==1.23.5 sympy==1.5.1 mathematics_dataset==1.0.1

Without `--original` only ours is timed. In every round each module makes so many questions, by
`Mathematics(...).examples()` here and by `generate.sample_from_module` there, which both keep to
the same lengths; ours also refuses questions of other sets and those it has made before. Timed is
the processor time of the one thread that works, imports not included. Composed problems on which
the original fails with an AttributeError, about one in 20,000, are tried again. Reported are the
medians over the rounds, and the median and quartiles of their ratio in the same round.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loss_cost import facts, quartiles

from ntl_lightning.data import Mathematics
from ntl_lightning.data.mathematics.modules import EXTRAPOLATION_MODULES, TRAINING_MODULES

MODULES = {
    "train": tuple(TRAINING_MODULES),
    "interpolate": tuple(TRAINING_MODULES),
    "extrapolate": tuple(EXTRAPOLATION_MODULES),
}

ORIGINAL = """
import json, random, sys, time
import numpy
from mathematics_dataset import generate
seed, count, modules = json.loads(sys.argv[1])
random.seed(seed)
numpy.random.seed(seed)
generate.FLAGS(["generate"])
generate.init_modules()
seconds = []
for regime, name in modules:
    module = generate.filtered_modules[regime][name]
    start = time.process_time()
    made = 0
    while made < count:
        try:
            generate.sample_from_module(module)
        except AttributeError:
            continue
        made += 1
    seconds.append(time.process_time() - start)
print(json.dumps(seconds))
"""


@dataclass(frozen=True)
class Row:
    """One module, or the mean of all in a set."""

    split: str
    module: str
    microseconds: float
    """Of a question of ours."""
    original_microseconds: float | None
    ratio: float | None
    """The original's time divided by ours."""
    ratio_quartile_1: float | None
    ratio_quartile_3: float | None


def our_seconds(modules: Sequence[tuple[str, str]], count: int, seed: int) -> list[float]:
    """Processor time of each module for so many questions."""
    seconds = []
    for split, module in modules:
        start = time.process_time()
        Mathematics(count, split, (module,), seed=seed).examples()
        seconds.append(time.process_time() - start)
    return seconds


def original_seconds(
    python: Path, modules: Sequence[tuple[str, str]], count: int, seed: int
) -> list[float]:
    """The same of the original package, in a process of its own."""
    done = subprocess.run(
        [python, "-c", ORIGINAL, json.dumps([seed, count, modules])],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{python} cannot run the original package:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def row(
    split: str, module: str, ours: Sequence[float], theirs: Sequence[float] | None, count: int
) -> Row:
    """From the seconds of each round."""
    mine = 1e6 * statistics.median(ours) / count
    if theirs is None:
        return Row(split, module, mine, None, None, None, None)
    first, median, third = quartiles(theirs, ours)
    return Row(split, module, mine, 1e6 * statistics.median(theirs) / count, median, first, third)


def measure(python: Path | None, rounds: int, count: int) -> list[Row]:
    """All modules, and after each set its mean."""
    modules = [(split, module) for split, names in MODULES.items() for module in names]
    ours, theirs = [], []
    for seed in range(rounds):
        print(f"round {seed + 1}", file=sys.stderr)
        ours.append(our_seconds(modules, count, seed))
        if python is not None:
            theirs.append(original_seconds(python, modules, count, seed))
    rows = []
    for split in MODULES:
        places = [place for place, (one, _) in enumerate(modules) if one == split]
        for place in places:
            rows.append(
                row(
                    *modules[place],
                    [seconds[place] for seconds in ours],
                    [seconds[place] for seconds in theirs] or None,
                    count,
                )
            )
        means = [
            [statistics.fmean(seconds[place] for place in places) for seconds in measured]
            for measured in (ours, theirs)
        ]
        rows.append(row(split, f"mean of {len(places)}", means[0], means[1] or None, count))
    return rows


def markdown(rows: Sequence[Row], about: dict[str, str]) -> str:
    """The facts and the table."""
    lines = [
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
        "| set | module | ours, µs a question | original, µs | original / ours (quartiles) |",
        "|---|---|---|---|---|",
    ]
    for one in rows:
        theirs, ratio = "", ""
        if one.ratio is not None:
            theirs = f"{one.original_microseconds:.0f}"
            ratio = f"{one.ratio:.1f} ({one.ratio_quartile_1:.1f} to {one.ratio_quartile_3:.1f})"
        lines.append(
            f"| {one.split} | {one.module} | {one.microseconds:.0f} | {theirs} | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time of mathematics problems, against the original package."
    )
    parser.add_argument(
        "--original", type=Path, metavar="PYTHON", help="the python that has the original package"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=200, help="questions a module (200)")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write the results here too")
    options = parser.parse_args()

    about = facts(options.rounds, threads=1, device="cpu", measured=["data/mathematics"])
    rows = measure(options.original, options.rounds, options.count)
    print(markdown(rows, about))
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            records = [asdict(one) | about for one in rows]
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)


if __name__ == "__main__":
    main()
