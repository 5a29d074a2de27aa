"""What a loss costs from hidden states on: output matrix and loss, forward and backward.

    python benchmarks/hidden_cost.py --csv hidden_cost.csv

N positions, D hidden size, V vocabulary, K number tokens; a tenth of the labels are numbers. The
baseline is what one writes without us, `F.cross_entropy(hidden @ weight.T, labels)`. "ours" is
`Objective.from_hidden`, which takes the logits a chunk of rows at a time.

Time. As in `loss_cost.py`; timed are the loss and its gradients in hidden states and weight.

Memory. As in `loss_cost.py`, less the two gradients, which every candidate returns; in units of
one logits tensor, of the dtype that the products are computed in.

Correctness. Before anything is timed, loss and gradients of every candidate are compared with those
of its formula by autograd in float32; one that is too far off ends the program.

Precisions: `float32`, `bfloat16` (hidden states and weight), `mixed` (both float32, under autocast
to bfloat16).
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from loss_cost import NTL_WEIGHT, extra_memory, facts, quartiles, times
from torch import Tensor

from ntl_lightning.losses import CrossEntropy, LossTerm, NumberLevel, Objective, Wasserstein
from ntl_lightning.numbers.vocabulary import NumberVocabulary

SIZES = ((1024, 768, 32_128), (512, 896, 151_936), (1024, 896, 151_936))

Gradients = tuple[Tensor, Tensor]
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From hidden states (N, D), weight (V, D) and labels (N,) to the loss ()."""


@dataclass(frozen=True)
class Setting:
    """One size of the problem."""

    precision: str
    rows: int
    depth: int
    width: int
    numbers: int
    device: str

    @property
    def bytes_of_logits(self) -> int:
        """Size of one logits tensor."""
        return self.rows * self.width * (4 if self.precision == "float32" else 2)

    def problem(self) -> "Problem":
        """The tensors of this size."""
        return Problem(self)


class Problem:
    """Hidden states, output matrix, labels and number tokens; the same for the same setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if setting.precision == "bfloat16" else torch.float32
        hidden = torch.randn(setting.rows, setting.depth, generator=generator)
        weight = torch.randn(setting.width, setting.depth, generator=generator)
        weight = weight.mul_(setting.depth**-0.5)
        number_ids = torch.randperm(setting.width, generator=generator)[: setting.numbers]
        self.number_ids = number_ids.sort().values
        labels = torch.randint(0, setting.width, (setting.rows,), generator=generator)
        num_labels = setting.rows // 10
        chosen = torch.randint(0, setting.numbers, (num_labels,), generator=generator)
        labels[:num_labels] = self.number_ids[chosen]
        self.hidden = hidden.to(setting.device, dtype).requires_grad_()
        self.weight = weight.to(setting.device, dtype).requires_grad_()
        self.labels = labels.to(setting.device)
        self.kept_bytes = self.hidden.nbytes + self.weight.nbytes

    def refill(self) -> None:
        """Nothing is destroyed."""

    def vocabulary(self) -> NumberVocabulary:
        """Number token k of the K is worth k."""
        values = {token_id: float(k) for k, token_id in enumerate(self.number_ids.tolist())}
        return NumberVocabulary.from_values(values, width=self.setting.width)

    def run(self, loss_function: LossFunction) -> tuple[Tensor, Gradients]:
        """Loss () and the gradients of hidden states (N, D) and weight (V, D)."""
        mixed = torch.autocast(self.setting.device, torch.bfloat16)
        with mixed if self.setting.precision == "mixed" else nullcontext():
            loss = loss_function(self.hidden, self.weight, self.labels)
        grad_hidden, grad_weight = torch.autograd.grad(loss, (self.hidden, self.weight))
        return loss.detach(), (grad_hidden, grad_weight)


def plain(problem: Problem, *, upcast: bool) -> LossFunction:
    """All logits at once."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.float() if upcast else logits, labels)

    return loss


def linear_cross_entropy(problem: Problem) -> LossFunction:
    """PyTorch's own, in chunks of the size that it chooses."""
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden, weight, labels, options=options)

    return loss


def with_numbers(problem: Problem, *, terms: Sequence[LossTerm]) -> LossFunction:
    """All logits at once, and the objective on them, by autograd and without overwriting them."""
    objective = Objective(terms, problem.vocabulary()).to(problem.setting.device)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return objective(F.linear(hidden, weight), labels).loss

    return loss


def overwritten(problem: Problem, *, terms: Sequence[LossTerm]) -> LossFunction:
    """All logits at once, the gradient over them."""
    objective = Objective(terms, problem.vocabulary()).to(problem.setting.device)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return objective(F.linear(hidden, weight), labels, overwrite_logits=True).loss

    return loss


def ours(
    problem: Problem, *, terms: Sequence[LossTerm], rows_per_chunk: int | None = None
) -> LossFunction:
    """Never more than a chunk of the logits."""
    objective = Objective(terms, problem.vocabulary()).to(problem.setting.device)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return objective.from_hidden(
            hidden, weight, labels, num_labels=len(labels), rows_per_chunk=rows_per_chunk
        ).loss

    return loss


@dataclass(frozen=True)
class Candidate:
    """One way to compute a loss."""

    name: str
    build: Callable[[Problem], LossFunction]
    terms: tuple[LossTerm, ...]
    """The formula."""
    rounds_the_loss: bool = False
    """Sums the loss in the dtype of the products; if not, in float32 at least."""


CE = (CrossEntropy(),)
BOTH = (CrossEntropy(), Wasserstein(weight=NTL_WEIGHT))
WHOLE = (*BOTH, NumberLevel(weight=0.1))

BASELINE = Candidate("head + F.cross_entropy", partial(plain, upcast=False), CE)
UPCAST = Candidate("head + F.cross_entropy of a float32 copy", partial(plain, upcast=True), CE)
LINEAR = Candidate(
    "F.linear_cross_entropy in chunks", linear_cross_entropy, CE, rounds_the_loss=True
)
PEERS = (UPCAST, LINEAR)
OURS_CE = Candidate("ours, CE", partial(ours, terms=CE), CE)


def candidates(rows_per_chunk: Sequence[int]) -> list[Candidate]:
    """All of them; ours with CE + NTL-WAS at the default chunk and at the given ones."""
    chunked = [
        Candidate(
            f"ours, CE + NTL-WAS, {rows} rows a chunk" if rows else "ours, CE + NTL-WAS",
            partial(ours, terms=BOTH, rows_per_chunk=rows),
            BOTH,
        )
        for rows in (None, *rows_per_chunk)
    ]
    return [
        BASELINE,
        *PEERS,
        Candidate("head + ours, CE + NTL-WAS, overwritten", partial(overwritten, terms=BOTH), BOTH),
        OURS_CE,
        *chunked,
        Candidate("ours, CE + NTL-WAS + number level", partial(ours, terms=WHOLE), WHOLE),
    ]


def check(candidate: Candidate, problem: Problem) -> tuple[float, float, float]:
    """Errors of loss and gradients, the gradients' as norms relative to the norm of the truth."""
    exact = Problem(replace(problem.setting, precision="float32"))
    with torch.no_grad():
        exact.hidden.copy_(problem.hidden)
        exact.weight.copy_(problem.weight)
    loss, gradients = problem.run(candidate.build(problem))
    reference = (
        plain(exact, upcast=False)
        if candidate.terms == CE
        else with_numbers(exact, terms=candidate.terms)
    )
    true_loss, truth = exact.run(reference)
    errors = [abs(loss.double() / true_loss.double() - 1).item()]
    for gradient, true in zip(gradients, truth, strict=True):
        difference = gradient.to(torch.float32, copy=True).sub_(true)
        errors.append((difference.norm() / true.norm()).item())
    limits = [1e-5] * 3 if problem.setting.precision == "float32" else [2e-2] * 3
    if candidate.rounds_the_loss and problem.setting.precision != "float32":
        limits[0] = 0.1
    # Written so that NaN fails too.
    if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
        sys.exit(f"{candidate.name} is off in {problem.setting}: {errors}, allowed {limits}")
    return errors[0], errors[1], errors[2]


@dataclass(frozen=True)
class Row:
    """One candidate in one setting; a line of the CSV."""

    precision: str
    rows: int
    depth: int
    width: int
    numbers: int
    device: str
    candidate: str
    milliseconds: float
    ratio: float
    ratio_quartile_1: float
    ratio_quartile_3: float
    ratio_to_our_cross_entropy: float
    extra_memory: float | None
    loss_error: float
    grad_hidden_error: float
    grad_weight_error: float


def measure(
    setting: Setting, compared: Sequence[Candidate], rounds: int, threads: int
) -> list[Row]:
    """All there is to know about the candidates in one setting."""
    if setting.precision == "float32":
        compared = [candidate for candidate in compared if candidate is not UPCAST]
    memory = {candidate: extra_memory(candidate, setting, threads) for candidate in compared}
    problem = setting.problem()
    errors = {candidate: check(candidate, problem) for candidate in compared}
    functions = {candidate: candidate.build(problem) for candidate in compared}
    seconds = times(functions, problem, rounds)
    rows = []
    for candidate in compared:
        first, median, third = quartiles(seconds[candidate], seconds[BASELINE])
        rows.append(
            Row(
                **asdict(setting),
                candidate=candidate.name,
                milliseconds=1e3 * statistics.median(seconds[candidate]),
                ratio=median,
                ratio_quartile_1=first,
                ratio_quartile_3=third,
                ratio_to_our_cross_entropy=quartiles(seconds[candidate], seconds[OURS_CE])[1],
                extra_memory=memory[candidate],
                loss_error=errors[candidate][0],
                grad_hidden_error=errors[candidate][1],
                grad_weight_error=errors[candidate][2],
            )
        )
    return rows


def markdown(rows: Sequence[Row], about: dict[str, str]) -> str:
    """The facts, then one table for each setting."""
    lines = [f"- {name}: {value}" for name, value in about.items()]
    for row in rows:
        if row.candidate == BASELINE.name:
            lines += [
                "",
                f"{row.precision}, N = {row.rows}, D = {row.depth}, V = {row.width}, "
                f"K = {row.numbers}",
                "",
                "| candidate | time, median (quartiles) | to ours, CE | extra memory "
                "| error of loss, gradients of hidden and weight |",
                "|---" * 5 + "|",
            ]
        memory = "not measured" if row.extra_memory is None else f"{row.extra_memory:.3f}"
        lines.append(
            f"| {row.candidate} | {row.ratio:.3f} ({row.ratio_quartile_1:.3f} to "
            f"{row.ratio_quartile_3:.3f}) | {row.ratio_to_our_cross_entropy:.3f} | {memory} "
            f"| {row.loss_error:.0e}, {row.grad_hidden_error:.1e}, {row.grad_weight_error:.1e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time and memory of output matrix and loss, against F.cross_entropy."
    )
    parser.add_argument("--rounds", type=int, default=15, help="after 2 to warm up (15)")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16", "mixed"])
    parser.add_argument(
        "--size", nargs=3, type=int, action="append", metavar=("N", "D", "V"), help="repeatable"
    )
    parser.add_argument("--numbers", nargs="+", type=int, default=[10], help="K (10)")
    parser.add_argument("--rows-per-chunk", nargs="*", type=int, default=[96])
    parser.add_argument(
        "--leave-out",
        nargs="*",
        default=[],
        choices=[candidate.name for candidate in PEERS],
        metavar="CANDIDATE",
        help=f"of {', '.join(repr(candidate.name) for candidate in PEERS)}",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write the results here too")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    about = facts(options.rounds, options.threads, options.device)
    rows: list[Row] = []
    for precision, size, numbers in product(
        options.precision, options.size or SIZES, options.numbers
    ):
        setting = Setting(precision, *size, numbers, options.device)
        print(setting, file=sys.stderr)
        compared = [
            candidate
            for candidate in candidates(options.rows_per_chunk)
            if candidate.name not in options.leave_out
        ]
        rows += measure(setting, compared, options.rounds, options.threads)
    print(markdown(rows, about))
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            records = [asdict(row) | about for row in rows]
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)


if __name__ == "__main__":
    main()
