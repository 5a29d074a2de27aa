"""What a loss costs: forward and backward on given logits, in time and in memory.

    python benchmarks/loss_cost.py --csv loss_cost.csv

`hidden_cost.py` asks the same from the hidden states on, the product with the output matrix
included.

N positions, V vocabulary, K number tokens, f the share of positions whose label is a number.

Time. In every round each candidate runs once, in random order, in this one process, on the same
values: before each run they are copied afresh into the one buffer of logits, outside the timed
part, because some candidates destroy it. Timed are the loss and `torch.autograd.grad` with respect
to the logits. Vocabulary, tables and lookups that depend on the tokenizer alone are built once
before, ours and the peers'; nothing computed from logits or labels is kept from one run to the
next. Reported are the median, over the rounds, of a candidate's time divided by the baseline's
time in the same round, and its quartiles. On a shared machine these ratios are far more stable
than the times.

Memory. Extra peak memory is the most that exists at once beyond what existed before the loss was
called (the logits and labels, the tables), in units of one logits tensor, the gradient included:
`F.cross_entropy` needs 3, the log-probabilities and the two gradients of its two steps. It is
measured in a fresh process for each candidate and setting. On a CPU it is the rise of the resident
set: one run warms up, the high-water mark is reset, and a second run raises it; the C library is
told to give freed memory back at once. So it counts whatever the operating system had to provide,
not only what PyTorch's allocator knows of. Linux with glibc only; elsewhere it is not measured. On
a GPU it is the rise of `torch.cuda.max_memory_allocated`.

Correctness. Before anything is timed, the loss and the gradient of every candidate are compared
with the reference of its formula (`F.cross_entropy`, plus `ntloss.NTLoss` with `reweigh=False` for
NTL-WAS) on a float32 copy of the logits; a candidate that is too far off ends the program. Losses
with another formula (`reweigh=True`) have no reference here and stand in the table for their cost.
"""

import argparse
import csv
import ctypes
import gc
import multiprocessing
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from ntloss.core import NTLoss
from torch import Tensor

import ntl_lightning
from ntl_lightning.losses import CrossEntropy, LossTerm, Objective, Wasserstein
from ntl_lightning.numbers.vocabulary import NumberVocabulary

NTL_WEIGHT = 0.3
WARM_UP_ROUNDS = 2
_M_MMAP_THRESHOLD = -3  # in malloc.h

Formula = Literal["CE", "CE + NTL-WAS", "another"]
LossFunction = Callable[[Tensor, Tensor], Tensor]
"""From logits (1, N, V) and labels (1, N) to the loss ()."""


@dataclass(frozen=True)
class Setting:
    """One size of the problem."""

    dtype: Literal["float32", "bfloat16"]
    numbers: int
    """K."""
    share: float
    """f."""
    rows: int
    """N."""
    width: int
    """V."""
    device: str

    @property
    def bytes_of_logits(self) -> int:
        """Size of one logits tensor."""
        return self.rows * self.width * getattr(torch, self.dtype).itemsize

    def problem(self) -> "Problem":
        """The tensors of this size."""
        return Problem(self)


class Problem:
    """Logits, labels and number tokens of a setting; always the same for the same setting."""

    kept_bytes = 0
    """Of the results, what is no extra memory."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        generator = torch.Generator().manual_seed(0)
        self.number_ids = (
            torch.randperm(setting.width, generator=generator)[: setting.numbers].sort().values
        )
        is_text = torch.ones(setting.width, dtype=torch.bool)
        is_text[self.number_ids] = False
        text_ids = is_text.nonzero().squeeze(-1)

        labels = text_ids[torch.randint(len(text_ids), (setting.rows,), generator=generator)]
        positions = torch.randperm(setting.rows, generator=generator)
        positions = positions[: round(setting.share * setting.rows)]
        labels[positions] = self.number_ids[
            torch.randint(setting.numbers, (len(positions),), generator=generator)
        ]
        self.labels = labels.unsqueeze(0).to(setting.device)

        dtype = getattr(torch, setting.dtype)
        source = torch.empty(1, setting.rows, setting.width, dtype=dtype)
        self._source = source.normal_(0, 3, generator=generator).to(setting.device)
        self.logits = torch.empty_like(self._source).requires_grad_()
        """(1, N, V) to be refilled before each run."""
        self.refill()

    def refill(self) -> None:
        """Undo what a candidate did to the logits."""
        self.logits.detach().copy_(self._source)

    def vocabulary(self) -> NumberVocabulary:
        """The number tokens as our package takes them; token k of the K is worth k."""
        values = {token_id: float(k) for k, token_id in enumerate(self.number_ids.tolist())}
        return NumberVocabulary.from_values(values, width=self.setting.width)

    def tokens(self) -> list[str]:
        """The vocabulary as ntloss reads it from a tokenizer."""
        tokens = [f"<text {i}>" for i in range(self.setting.width)]
        for k, token_id in enumerate(self.number_ids.tolist()):
            tokens[token_id] = str(k)
        return tokens

    def run(self, loss_function: LossFunction) -> tuple[Tensor, Tensor]:
        """Loss () and gradient (1, N, V)."""
        loss = loss_function(self.logits, self.labels)
        (gradient,) = torch.autograd.grad(loss, self.logits)
        return loss.detach(), gradient


# Candidates.


class _Tokenizer:
    """What ntloss asks of a tokenizer whose digits are all there."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._vocabulary = {token: i for i, token in enumerate(tokens)}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def add_tokens(self, tokens: Sequence[str]) -> int:
        return 0

    def __len__(self) -> int:
        return len(self._vocabulary)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def plain(problem: Problem) -> LossFunction:
    return cross_entropy


def upcast(problem: Problem) -> LossFunction:
    """As the loss functions of transformers do it."""
    return lambda logits, labels: cross_entropy(logits.float(), labels)


def with_ntloss(problem: Problem, *, reweigh: bool) -> LossFunction:
    tokenizer = _Tokenizer(problem.tokens())
    digits_only = problem.setting.numbers == 10
    peer = NTLoss(tokenizer, digit_level=digits_only, reweigh=reweigh)  # type: ignore[arg-type]
    return lambda logits, labels: cross_entropy(logits, labels) + NTL_WEIGHT * peer(logits, labels)


def ours(problem: Problem, *, terms: Sequence[LossTerm], overwrite: bool) -> LossFunction:
    objective = Objective(terms, problem.vocabulary()).to(problem.setting.device)
    return lambda logits, labels: objective(logits, labels, overwrite_logits=overwrite).loss


def integration(problem: Problem) -> LossFunction:
    """Ours as the loss function of a Hugging Face Trainer, its counting of the labels included."""
    import tempfile

    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from ntl_lightning.integrations.transformers import NumberAwareLoss

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=problem.setting.width,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    # The logits are aligned with the labels here, and nobody reads them after the loss.
    loss = NumberAwareLoss(BOTH, problem.vocabulary(), shift_labels=False, overwrite_logits=True)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), report_to="none", use_cpu=problem.setting.device == "cpu"
    )
    trainer = Trainer(model=model, args=arguments, compute_loss_func=loss)
    loss.attach(trainer)

    def call(logits: Tensor, labels: Tensor) -> Tensor:
        batches = iter([{"labels": labels}])
        _, num_items = trainer.get_batch_samples(batches, 1, labels.device)
        return loss((logits,), labels, num_items)

    return call


def compiled(problem: Problem) -> LossFunction:
    return torch.compile(cross_entropy)


def compiled_with_ntl(problem: Problem) -> LossFunction:
    """Plain PyTorch under torch.compile; the rows with a number are found outside of it."""
    device = problem.setting.device
    number_ids = problem.number_ids.to(device)
    values = torch.arange(problem.setting.numbers, dtype=torch.float32, device=device)
    value_table = torch.full((problem.setting.width,), torch.nan, device=device)
    value_table[number_ids] = values

    @torch.compile
    def loss(logits: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        rows = logits.view(-1, logits.shape[-1])
        q = torch.softmax(rows[positions][:, number_ids], -1)
        distances = (values - value_table[labels.view(-1)[positions]].unsqueeze(-1)).abs()
        return cross_entropy(logits, labels) + NTL_WEIGHT * (q * distances).sum(-1).mean()

    def call(logits: Tensor, labels: Tensor) -> Tensor:
        is_number = ~value_table[labels.view(-1)].isnan()
        return loss(logits, labels, is_number.nonzero().squeeze(-1))

    return call


@dataclass(frozen=True)
class Candidate:
    """One way to compute a loss."""

    name: str
    formula: Formula
    build: Callable[[Problem], LossFunction]
    """Everything that depends on the vocabulary alone is done here, and not timed."""
    low_precision: bool = False
    """Computes in the dtype of the logits; if not, in float32 at least."""
    only_for: str | None = None
    """The dtype it is for; None: all."""


BOTH = (CrossEntropy(), Wasserstein(weight=NTL_WEIGHT))

CE = Candidate("F.cross_entropy", "CE", plain, low_precision=True)
CE_UPCAST = Candidate("F.cross_entropy of a float32 copy", "CE", upcast, only_for="bfloat16")
CE_NTLOSS = Candidate(
    "F.cross_entropy + ntloss, reweigh off",
    "CE + NTL-WAS",
    partial(with_ntloss, reweigh=False),
    low_precision=True,
)
CE_NTLOSS_REWEIGHED = Candidate(
    "F.cross_entropy + ntloss, reweigh on",
    "another",
    partial(with_ntloss, reweigh=True),
    low_precision=True,
)
OURS_NEW_BUFFER = Candidate(
    "ours, CE + NTL-WAS, new buffer", "CE + NTL-WAS", partial(ours, terms=BOTH, overwrite=False)
)
OURS_OVERWRITTEN = Candidate(
    "ours, CE + NTL-WAS, overwritten", "CE + NTL-WAS", partial(ours, terms=BOTH, overwrite=True)
)
OURS_CE_OVERWRITTEN = Candidate(
    "ours, CE, overwritten", "CE", partial(ours, terms=(CrossEntropy(),), overwrite=True)
)
INTEGRATION = Candidate("ours in the Hugging Face Trainer", "CE + NTL-WAS", integration)
COMPILED_CE = Candidate("torch.compile, CE", "CE", compiled, low_precision=True)
COMPILED_NTL = Candidate(
    "torch.compile, CE + gathered NTL-WAS", "CE + NTL-WAS", compiled_with_ntl, low_precision=True
)

CANDIDATES = (
    CE,
    CE_UPCAST,
    CE_NTLOSS,
    CE_NTLOSS_REWEIGHED,
    OURS_NEW_BUFFER,
    OURS_OVERWRITTEN,
    OURS_CE_OVERWRITTEN,
    INTEGRATION,
)
COMPILED = (COMPILED_CE, COMPILED_NTL)

BASELINES: tuple[tuple[Candidate, tuple[Candidate, ...] | None], ...] = (
    (CE, None),
    (CE_UPCAST, None),
    (OURS_CE_OVERWRITTEN, (OURS_OVERWRITTEN,)),
)
"""What the others are divided by, one table each; and by which of them (None: all)."""


# Measuring.


def references(problem: Problem) -> dict[Formula, tuple[Tensor, Tensor]]:
    """Formula -> loss and gradient by autograd, on a float32 copy of the logits."""
    answers: dict[Formula, tuple[Tensor, Tensor]] = {}
    for candidate in (CE, CE_NTLOSS):
        problem.refill()
        logits = problem.logits.detach().to(torch.float32, copy=True).requires_grad_()
        loss = candidate.build(problem)(logits, problem.labels)
        (gradient,) = torch.autograd.grad(loss, logits)
        answers[candidate.formula] = loss.detach(), gradient
    return answers


def check(
    functions: Mapping[Candidate, LossFunction], problem: Problem
) -> dict[Candidate, tuple[float, float]]:
    """Errors of loss and gradient, of the candidates whose formula has a reference.

    The loss's is relative, the gradient's relative to the largest element. One that is too large
    ends the program.
    """
    expected = references(problem)
    found = {}
    for candidate, function in functions.items():
        if candidate.formula not in expected:
            continue
        problem.refill()
        loss, gradient = problem.run(function)
        true_loss, true_gradient = expected[candidate.formula]
        difference = gradient.to(torch.float32, copy=True).sub_(true_gradient).abs_().max()
        error = (
            abs(loss.double() / true_loss.double() - 1).item(),
            (difference / true_gradient.abs().max()).item(),
        )
        if problem.setting.dtype == "float32":
            limits = (1e-5, 1e-5)
        elif candidate.low_precision:
            limits = (5e-2, 5e-2)
        else:
            # A bfloat16 gradient has 8 bits.
            limits = (1e-5, 2**-8)
        # Written so that NaN fails too.
        if not (error[0] <= limits[0] and error[1] <= limits[1]):
            sys.exit(
                f"{candidate.name} does not compute {candidate.formula} in {problem.setting}: "
                f"errors of loss and gradient {error}, allowed {limits}"
            )
        found[candidate] = error
    return found


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def times(
    functions: Mapping[Any, Callable[..., Tensor]], problem: Any, rounds: int
) -> dict[Any, list[float]]:
    """Seconds of each candidate in each round."""
    seconds: dict[Any, list[float]] = {candidate: [] for candidate in functions}
    order = random.Random(0)
    for number in range(WARM_UP_ROUNDS + rounds):
        for candidate in order.sample(list(functions), len(functions)):
            problem.refill()
            synchronize(problem.setting.device)
            start = time.perf_counter()
            result = problem.run(functions[candidate])
            synchronize(problem.setting.device)
            elapsed = time.perf_counter() - start
            # Not before the clock is read: giving the gradient back is not part of the loss.
            del result
            if number >= WARM_UP_ROUNDS:
                seconds[candidate].append(elapsed)
    return seconds


def _resident_bytes(field: Literal["VmRSS", "VmHWM"]) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_extra_memory(candidate: Any, setting: Any, threads: int) -> float:
    """Extra peak memory in logits tensors; for a process that does nothing else."""
    torch.set_num_threads(threads)
    if setting.device == "cpu":
        # By default glibc keeps freed blocks, up to a size that grows with what was freed before.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    problem = setting.problem()
    loss_function = candidate.build(problem)
    problem.run(loss_function)
    problem.refill()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        problem.run(loss_function)
        peak = torch.cuda.max_memory_allocated()
    else:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        before = _resident_bytes("VmRSS")
        problem.run(loss_function)
        peak = _resident_bytes("VmHWM")
    return (peak - before - problem.kept_bytes) / setting.bytes_of_logits


def extra_memory(candidate: Any, setting: Any, threads: int) -> float | None:
    """Extra peak memory in logits tensors, from a fresh process; None where not measured."""
    if setting.device == "cpu" and platform.libc_ver()[0] != "glibc":
        return None
    # The server has imported the peers and never computed anything; its children are as fresh.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ntloss"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_extra_memory, candidate, setting, threads).result()


# Reporting.


@dataclass(frozen=True)
class Row:
    """One candidate in one setting against one baseline; a line of the CSV."""

    setting: Setting
    candidate: str
    baseline: str
    milliseconds: float
    ratio: float
    ratio_quartile_1: float
    ratio_quartile_3: float
    extra_memory: float | None
    loss_error: float | None
    gradient_error: float | None


def quartiles(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    """Quartiles of the ratios, round by round."""
    ratios = [one / other for one, other in zip(mine, base, strict=True)]
    return statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3


def measure(
    setting: Setting, candidates: Sequence[Candidate], rounds: int, threads: int
) -> list[Row]:
    """All there is to know about the candidates in one setting."""
    candidates = [c for c in candidates if c.only_for in (None, setting.dtype)]
    memory = {candidate: extra_memory(candidate, setting, threads) for candidate in candidates}
    torch.compiler.reset()  # it gives up silently on what was compiled for many settings before
    problem = Problem(setting)
    functions = {candidate: candidate.build(problem) for candidate in candidates}
    found = check(functions, problem)
    seconds = times(functions, problem, rounds)
    rows = []
    for baseline, compared in BASELINES:
        if baseline not in candidates:
            continue
        for candidate in candidates if compared is None else compared:
            first, median, third = quartiles(seconds[candidate], seconds[baseline])
            loss_error, gradient_error = found.get(candidate, (None, None))
            rows.append(
                Row(
                    setting=setting,
                    candidate=candidate.name,
                    baseline=baseline.name,
                    milliseconds=1e3 * statistics.median(seconds[candidate]),
                    ratio=median,
                    ratio_quartile_1=first,
                    ratio_quartile_3=third,
                    extra_memory=memory[candidate],
                    loss_error=loss_error,
                    gradient_error=gradient_error,
                )
            )
    return rows


def facts(
    rounds: int,
    threads: int,
    device: str,
    measured: Sequence[str] = ("losses", "numbers/vocabulary.py"),
) -> dict[str, str]:
    """What one has to know to judge or repeat the run; `measured` is the code that is timed."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break

    def git(*arguments: str) -> str:
        folder = Path(ntl_lightning.__file__).parent
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", *measured)
    return {
        "CPU": f"{cpu}, {os.cpu_count()} cores",
        "GPU": torch.cuda.get_device_name() if device == "cuda" else "not used",
        "threads": str(threads),
        "load before (1 min)": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "",
        "rounds": str(rounds),
        "versions": ", ".join(
            [f"Python {platform.python_version()}"]
            + [f"{package} {version(package)}" for package in ("torch", "ntloss", "transformers")]
        ),
        "commit": (git("rev-parse", "--short", "HEAD") or "unknown")
        + (" with changes" if changed else ""),
        "command": shlex.join(["python", *sys.argv]),
    }


def markdown(rows: Sequence[Row], about: dict[str, str]) -> str:
    """The facts, then one table for each dtype and baseline."""
    lines = [f"- {name}: {value}" for name, value in about.items()]

    def key(row: Row) -> tuple[str, int, str]:
        return row.setting.dtype, row.setting.width, row.baseline

    for dtype, width, baseline in dict.fromkeys(map(key, rows)):
        here = [row for row in rows if key(row) == (dtype, width, baseline)]
        settings = list(dict.fromkeys(row.setting for row in here))
        size = settings[0]
        lines += [
            "",
            f"{dtype}, N = {size.rows}, V = {width}; time as a multiple of {baseline}, "
            "median (quartiles)",
            "",
            "| candidate | "
            + " | ".join(f"K={s.numbers} f={s.share:g}" for s in settings)
            + " | extra memory | gradient error |",
            "|---" * (len(settings) + 3) + "|",
        ]
        for name in dict.fromkeys(row.candidate for row in here):
            mine = [row for row in here if row.candidate == name]
            cells = [
                f"{r.ratio:.3f} ({r.ratio_quartile_1:.3f} to {r.ratio_quartile_3:.3f})"
                for r in mine
            ]
            memory = [r.extra_memory for r in mine if r.extra_memory is not None]
            extremes = [f"{amount:.2f}" for amount in (min(memory), max(memory))] if memory else []
            cells.append(" to ".join(dict.fromkeys(extremes)) or "not measured")
            error = [r.gradient_error for r in mine if r.gradient_error is not None]
            cells.append(f"{max(error):.0e}" if error else "no reference")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[Row], about: dict[str, str]) -> None:
    records = []
    for row in rows:
        record = asdict(row)
        records.append(record.pop("setting") | record | about)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time and memory of losses on given logits, as multiples of F.cross_entropy."
    )
    parser.add_argument("--rounds", type=int, default=15, help="after 2 to warm up (15)")
    parser.add_argument("--rows", type=int, default=1024, help="N, positions (1024)")
    parser.add_argument(
        "--width", type=int, nargs="+", default=[32_128], help="V, vocabularies (32128)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile too (a C++ compiler)")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write the results here too")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    about = facts(options.rounds, options.threads, options.device)
    rows: list[Row] = []
    candidates = CANDIDATES + (COMPILED if options.compile else ())
    sizes = product(options.width, ("float32", "bfloat16"), (10, 1000), (0.1, 0.5))
    for width, dtype, numbers, share in sizes:
        setting = Setting(dtype, numbers, share, options.rows, width, options.device)
        print(setting, file=sys.stderr)
        rows += measure(setting, candidates, options.rounds, options.threads)
    print(markdown(rows, about))
    if options.csv:
        write_csv(options.csv, rows, about)


if __name__ == "__main__":
    main()
