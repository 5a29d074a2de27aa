"""Losses from hidden states against plain autograd through all the logits."""

import itertools
import math
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ntl_lightning.losses.projection import (
    OutputProjection,
    attach_gradients,
    default_rows_per_chunk,
    projected_gradients,
    projected_statistics,
)


def only_cross_entropy(rows, cross_entropy, log_partition, number_logits):
    """The gradients of the sum of all cross entropies."""
    return torch.ones_like(cross_entropy), None, None


class Problem:
    """Leaves of a small head, labels, number tokens, and a loss in all three statistics."""

    def __init__(
        self,
        seed=0,
        *,
        dtype=torch.float64,
        rows=37,
        depth=11,
        width=53,
        numbers=7,
        bias=False,
        rank=0,
        scale=1.0,
        soft_cap=None,
    ):
        generator = torch.Generator().manual_seed(seed)

        def leaf(*shape, spread=1.0):
            values = torch.randn(*shape, dtype=torch.float64, generator=generator) * spread
            return values.to(dtype).requires_grad_()

        self.hidden = leaf(rows, depth)
        self.weight = leaf(width, depth, spread=2 / depth**0.5)
        self.bias = leaf(width) if bias else None
        self.low_rank = (leaf(rows, rank), leaf(width, rank)) if rank else None
        self.scale, self.soft_cap = scale, soft_cap
        self.labels = torch.randint(0, width, (rows,), generator=generator)
        self.number_ids = torch.randperm(width, generator=generator)[:numbers]
        self.values = torch.randn(numbers, dtype=torch.float64, generator=generator)
        self.label_values = torch.randn(rows, dtype=torch.float64, generator=generator)
        self.is_number = torch.rand(rows, generator=generator) < 0.5

    def cast(self, dtype):
        """The same values in another dtype."""
        other = object.__new__(Problem)
        vars(other).update(vars(self))
        for name in ("hidden", "weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(other, name, tensor.detach().to(dtype).requires_grad_())
        if self.low_rank is not None:
            other.low_rank = tuple(t.detach().to(dtype).requires_grad_() for t in self.low_rank)
        return other

    @property
    def leaves(self):
        found = (self.hidden, self.weight, self.bias, *(self.low_rank or ()))
        return [tensor for tensor in found if tensor is not None and tensor.requires_grad]

    @property
    def projection(self):
        return OutputProjection(self.weight, self.bias, self.scale, self.soft_cap, self.low_rank)

    def small_loss(self, rows, cross_entropy, log_partition, number_logits):
        """Cross entropy, NTL-WAS and squared log partition, as sums over all rows' count."""
        distances = (self.values - self.label_values[rows, None]).abs().to(number_logits.dtype)
        wasserstein = (number_logits.softmax(-1) * distances).sum(-1) * self.is_number[rows]
        total = cross_entropy + 0.3 * wasserstein + 0.01 * log_partition.square()
        return total.sum() / max(1, len(self.labels))

    def logits(self):
        logits = F.linear(self.hidden, self.weight, self.bias)
        if self.low_rank is not None:
            logits = logits + self.low_rank[0] @ self.low_rank[1].T
        logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def plain(self):
        """The loss by autograd through all logits, in float32 at least."""
        logits = self.logits()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.small_loss(slice(None), *statistics_of(logits, self))

    def chunked(self, rows_per_chunk=None, small_loss=None):
        """The loss as it is under test."""
        small_loss = small_loss or self.small_loss
        total = torch.zeros((), dtype=torch.float64)

        def small_gradients(rows, *statistics):
            assert torch.is_grad_enabled()
            assert not any(tensor.requires_grad for tensor in statistics)
            leaves = [tensor.requires_grad_() for tensor in statistics]
            loss = small_loss(rows, *leaves)
            total.add_(loss.detach())
            return torch.autograd.grad(loss, leaves, allow_unused=True)

        gradients = projected_gradients(
            self.hidden,
            self.projection,
            self.labels,
            self.number_ids,
            small_gradients,
            rows_per_chunk=rows_per_chunk,
        )
        return attach_gradients(total, gradients, self.hidden, self.projection)

    def statistics(self, rows_per_chunk=None):
        return projected_statistics(
            self.hidden,
            self.projection,
            self.labels,
            self.number_ids,
            rows_per_chunk=rows_per_chunk,
        )


def relative_error(got, want):
    """Of the root mean square."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def statistics_of(logits, problem):
    """Cross entropy, log partition and number logits from all logits."""
    cross_entropy = F.cross_entropy(logits, problem.labels, reduction="none")
    return cross_entropy, logits.logsumexp(-1), logits[:, problem.number_ids]


def assert_equal_to_plain(problem, tolerance, rows_per_chunk=None, truth=None):
    truth = truth or problem
    want = truth.plain()
    got = problem.chunked(rows_per_chunk)
    assert got.item() == pytest.approx(want.item(), rel=tolerance, abs=tolerance / 100)
    wanted = torch.autograd.grad(want, truth.leaves, allow_unused=True)
    for mine, true, leaf in zip(
        torch.autograd.grad(got, problem.leaves), wanted, problem.leaves, strict=True
    ):
        assert (mine.dtype, mine.shape) == (leaf.dtype, leaf.shape)
        largest = true.abs().max() if true.numel() else 0
        assert ((mine.double() - true).abs() <= 10 * tolerance * largest).all()


OPTIONS = [
    {"bias": bias, "rank": rank, "scale": scale, "soft_cap": soft_cap}
    for bias, rank, scale, soft_cap in itertools.product(
        (False, True), (0, 3), (1.0, 0.3), (None, 1.5)
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows_per_chunk", [None, 5])
def test_value_and_gradients_equal_autograd_through_all_logits(options, rows_per_chunk):
    assert_equal_to_plain(Problem(**options), 1e-12, rows_per_chunk)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float32_is_exact_to_its_digits(options):
    exact = Problem(**options)
    single = exact.cast(torch.float32)
    assert_equal_to_plain(single, 1e-6, 8, truth=single.cast(torch.float64))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 20),
    depth=st.integers(1, 9),
    width=st.integers(1, 40),
    share=st.floats(0, 1),
    rows_per_chunk=st.integers(1, 25),
    options=st.sampled_from(OPTIONS),
)
def test_every_shape_and_chunk_gives_the_same(
    seed, rows, depth, width, share, rows_per_chunk, options
):
    problem = Problem(
        seed, rows=rows, depth=depth, width=width, numbers=int(share * width), **options
    )
    assert_equal_to_plain(problem, 1e-11, rows_per_chunk)
    whole = problem.statistics()
    for cut, uncut in zip(problem.statistics(rows_per_chunk), whole, strict=True):
        torch.testing.assert_close(cut, uncut, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_statistics_alone_equal_those_of_all_logits(options):
    problem = Problem(**options)
    wanted = statistics_of(problem.logits().detach(), problem)
    for got, want in zip(problem.statistics(rows_per_chunk=5), wanted, strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_without_rows_the_loss_is_zero_and_attached():
    problem = Problem(rows=0, bias=True, rank=2)
    loss = problem.chunked()
    assert loss.item() == 0
    for gradient, leaf in zip(
        torch.autograd.grad(loss, problem.leaves), problem.leaves, strict=True
    ):
        assert gradient.shape == leaf.shape
        assert (gradient == 0).all()
    assert [tuple(tensor.shape) for tensor in problem.statistics()] == [(0,), (0,), (0, 7)]


def test_a_part_of_the_loss_may_have_no_gradient():
    problem = Problem()

    def only_numbers(rows, cross_entropy, log_partition, number_logits):
        return number_logits.square().sum()

    got = torch.autograd.grad(problem.chunked(10, only_numbers), problem.leaves)
    want = torch.autograd.grad(
        problem.logits()[:, problem.number_ids].square().sum(), problem.leaves
    )
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    class Recomputed(torch.autograd.Function):
        """Anew in every backward pass, because gradcheck runs several."""

        @staticmethod
        def forward(ctx, *leaves):
            ctx.save_for_backward(*leaves)
            return self_loss(*leaves)

        @staticmethod
        def backward(ctx, incoming):
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in ctx.saved_tensors]
                return torch.autograd.grad(self_loss(*leaves), leaves, incoming)

    problem = Problem(rows=5, depth=3, width=7, numbers=3, bias=True, rank=2, soft_cap=2.0)

    def self_loss(hidden, weight, bias, a, b):
        problem.hidden, problem.weight, problem.bias = hidden, weight, bias
        problem.low_rank = a, b
        return problem.chunked(2)

    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in problem.leaves)
    assert torch.autograd.gradcheck(Recomputed.apply, leaves)


# What a training loop does with the loss.


def test_a_factor_before_the_backward_pass_reaches_every_gradient():
    problem = Problem(bias=True, rank=2)
    (0.25 * problem.chunked(10)).backward()
    wanted = torch.autograd.grad(problem.plain(), problem.leaves)
    for leaf, want in zip(problem.leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, 0.25 * want, rtol=1e-11, atol=1e-13)


def test_two_losses_add_up():
    problem = Problem()
    (problem.chunked(10) + problem.chunked(7)).backward()
    problem.chunked().backward()
    (want,) = torch.autograd.grad(problem.plain(), [problem.weight])
    torch.testing.assert_close(problem.weight.grad, 3 * want, rtol=1e-11, atol=1e-13)


def test_a_tied_weight_gets_both_of_its_gradients():
    problem = Problem()
    tokens = torch.arange(len(problem.labels)) % len(problem.weight)
    wanted = []
    for way in (problem.plain, problem.chunked):
        problem.hidden = torch.tanh(problem.weight[tokens])
        wanted.append(torch.autograd.grad(way(), problem.weight)[0])
    torch.testing.assert_close(wanted[1], wanted[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_given_away_not_copied(dtype):
    problem = Problem(dtype=dtype, bias=True, rank=2)
    gradients = projected_gradients(
        problem.hidden,
        problem.projection,
        problem.labels,
        problem.number_ids,
        only_cross_entropy,
    )
    addresses = [t.data_ptr() for t in vars(gradients).values()]
    loss = attach_gradients(torch.tensor(1.0), gradients, problem.hidden, problem.projection)
    del gradients
    (2 * loss).backward()
    assert [leaf.grad.data_ptr() for leaf in problem.leaves] == addresses


def test_a_second_backward_pass_is_refused():
    loss = Problem().chunked()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second backward pass .* compute the loss again"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "a", "b"])
def test_what_is_frozen_gets_no_gradient_and_no_memory(frozen):
    problem = Problem(bias=True, rank=2)
    a, b = problem.low_rank
    named = vars(problem) | {"a": a, "b": b}
    named[frozen].requires_grad_(False)
    gradients = projected_gradients(
        problem.hidden,
        problem.projection,
        problem.labels,
        problem.number_ids,
        only_cross_entropy,
    )
    assert [name for name, value in vars(gradients).items() if value is None] == [frozen]
    assert_equal_to_plain(problem, 1e-12, 10)


def test_nothing_that_is_given_is_changed():
    problem = Problem(bias=True, rank=2, soft_cap=2.0)
    before = [leaf.detach().clone() for leaf in problem.leaves]
    problem.chunked(10).backward()
    assert all(map(torch.equal, problem.leaves, before))


# Extremes.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", [0, 1])
def test_huge_logits_give_exact_and_finite_results(dtype, label):
    """Logits of +1e4 and -1e4: the label's probability is 1, or has underflowed."""
    weight = torch.tensor([[100.0], [-100.0], [0.0]], dtype=dtype, requires_grad=True)
    hidden = torch.tensor([[100.0]], dtype=dtype, requires_grad=True)
    labels, number_ids = torch.tensor([label]), torch.tensor([1, 2])
    largest = (hidden * weight[:1]).item()  # bfloat16 has no 10000
    projection = OutputProjection(weight)
    statistics = projected_statistics(hidden, projection, labels, number_ids)
    assert statistics[0].item() == 2 * largest * label
    assert statistics[1].item() == largest
    assert statistics[2].tolist() == [[-largest, 0.0]]
    gradients = projected_gradients(hidden, projection, labels, number_ids, only_cross_entropy)
    assert gradients.weight.flatten().tolist() == [100 * label, -100 * label, 0]
    assert gradients.hidden.item() == 200 * label


def test_huge_logits_cost_no_digits_of_the_cross_entropy():
    """Two tokens share the probability; float32 has no digits behind the point of 1e6."""
    weight, hidden = torch.full((2, 1), 1e3), torch.full((1, 1), 1e3)
    statistics = projected_statistics(
        hidden, OutputProjection(weight), torch.tensor([0]), torch.tensor([1])
    )
    assert statistics[0].item() == pytest.approx(math.log(2), rel=1e-7)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_bias_of_minus_infinity_is_the_least_logit_and_has_no_gradient(soft_cap):
    problem = Problem(bias=True, soft_cap=soft_cap)
    excluded = (problem.labels[0] + 1) % 53
    problem.number_ids = problem.number_ids[problem.number_ids != excluded][:3]
    problem.values = problem.values[:3]
    problem.labels[problem.labels == excluded] = problem.labels[0]
    with torch.no_grad():
        problem.bias[excluded] = -math.inf
    loss = problem.chunked(10)
    assert loss.item() == pytest.approx(problem.plain().item(), rel=1e-12)
    gradients = torch.autograd.grad(loss, problem.leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[1][excluded].abs().max() == 0
    assert gradients[2][excluded] == 0


# Low precision.


def large(dtype, **options):
    """Large enough that errors average out; 4 chunks by default."""
    return Problem(rows=1024, depth=64, width=1000, numbers=20, **options).cast(dtype)


def assert_statistics_are_as_exact_as_logits(problem, exact):
    ours = problem.statistics()
    naive = statistics_of(problem.logits().float(), problem)
    truth = statistics_of(exact.logits(), problem)
    for mine, other, true in zip(ours, naive, truth, strict=True):
        assert mine.dtype == torch.float32
        assert relative_error(mine, true) <= 1.05 * relative_error(other, true)


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "rank": 4}, {"scale": 0.25, "soft_cap": 2.0}],
    ids=["plain", "bias and low rank", "scale and soft cap"],
)
def test_bfloat16_is_as_exact_as_all_logits_upcast_to_float32(options):
    problem = large(torch.bfloat16, **options)
    exact = problem.cast(torch.float64)
    truth = torch.autograd.grad(exact.plain(), exact.leaves)
    naive_gradients = torch.autograd.grad(problem.plain(), problem.leaves)
    gradients = torch.autograd.grad(problem.chunked(), problem.leaves)
    assert_statistics_are_as_exact_as_logits(problem, exact)
    for leaf, mine, other, true in zip(
        problem.leaves, gradients, naive_gradients, truth, strict=True
    ):
        assert mine.dtype == torch.bfloat16
        # What is summed over chunks is rounded at each of the 4.
        allowed = 1.5 if len(leaf) == 1000 else 1.05
        assert relative_error(mine, true) <= allowed * relative_error(other, true)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_products_and_sums_the_gradients_in_float32(dtype):
    problem = large(torch.float32, bias=True, rank=4)
    exact = problem.cast(torch.float64)
    truth = torch.autograd.grad(exact.plain(), exact.leaves)
    with torch.autocast("cpu", dtype):
        naive = problem.plain()
        ours = problem.chunked()
        assert_statistics_are_as_exact_as_logits(problem, exact)
    naive_gradients = torch.autograd.grad(naive, problem.leaves)
    gradients = torch.autograd.grad(ours, problem.leaves)
    digits = torch.finfo(dtype).eps
    for mine, other, true in zip(gradients, naive_gradients, truth, strict=True):
        assert mine.dtype == torch.float32
        error = relative_error(mine, true)
        assert digits / 100 < error < 2 * digits  # not computed in float32
        assert error <= 1.15 * relative_error(other, true)


def test_float16_gradients_too_small_for_it_wait_for_the_factor_of_a_gradient_scaler():
    """Without the factor all of them would round to zero."""
    problem = large(torch.float32)
    problem.hidden = problem.hidden.detach().half().requires_grad_()
    exact = problem.cast(torch.float64)
    truth = torch.autograd.grad(exact.plain(), exact.leaves)

    def small_share(rows, *statistics):
        return problem.small_loss(rows, *statistics) / 2**20

    with torch.autocast("cpu", torch.float16):
        loss = problem.chunked(small_loss=small_share)
    gradients = torch.autograd.grad(2.0**20 * loss, problem.leaves)
    assert [gradient.dtype for gradient in gradients] == [torch.float16, torch.float32]
    for mine, true in zip(gradients, truth, strict=True):
        assert relative_error(mine, true) < 2 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize(
    ("hidden", "weight", "products"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_different_dtypes_meet_in_their_common_one(hidden, weight, products):
    problem = Problem(rank=2)
    problem.hidden = problem.hidden.detach().to(hidden).requires_grad_()
    problem.weight = problem.weight.detach().to(weight).requires_grad_()
    problem.low_rank = tuple(t.detach().to(weight).requires_grad_() for t in problem.low_rank)
    exact = problem.cast(torch.float64)
    truth = torch.autograd.grad(exact.plain(), exact.leaves)
    gradients = torch.autograd.grad(problem.chunked(10), problem.leaves)
    assert problem.statistics()[0].dtype == products
    for mine, true, leaf in zip(gradients, truth, problem.leaves, strict=True):
        assert mine.dtype == leaf.dtype
        assert relative_error(mine, true) < 2 * max(
            torch.finfo(leaf.dtype).eps, torch.finfo(products).eps
        )


# Cost.


class Watch(TorchDispatchMode):
    """Counts matrix products with more than `width` columns or rows, and keeps the largest size."""

    def __init__(self, width):
        super().__init__()
        self.width, self.products, self.largest = width, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products += 1
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("frozen", "products"), [(False, 3), (True, 2)])
def test_a_chunk_costs_the_products_of_a_head_and_no_more_memory_than_its_logits(
    dtype, frozen, products
):
    problem = Problem(dtype=dtype, rows=64, depth=4, width=2000)
    problem.weight.requires_grad_(not frozen)
    with Watch(2000) as watch:
        problem.chunked(8).backward()
    assert watch.products == 8 * products
    assert watch.largest == 8 * 2000


@pytest.mark.parametrize("options", [{}, {"bias": True, "rank": 2, "soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_value_is_looked_at(dtype, options):
    """Tensors without values have nothing to branch on, to shape others by, or to wait for."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        problem = Problem(**options).cast(dtype)
        for name, value in vars(problem).items():
            if isinstance(value, torch.Tensor):
                setattr(problem, name, mode.from_tensor(value))
        problem.statistics(10)
        gradients = torch.autograd.grad(problem.chunked(10), problem.leaves)
    assert [g.shape for g in gradients] == [leaf.shape for leaf in problem.leaves]


@pytest.mark.parametrize(
    ("num_rows", "rows_per_chunk"),
    [(0, 1), (1, 1), (511, 511), (512, 256), (1000, 334), (1024, 256), (2048, 256), (9001, 1126)],
)
def test_chunks_are_even_eight_at_most_and_of_256_rows_at_least(num_rows, rows_per_chunk):
    assert default_rows_per_chunk(num_rows) == rows_per_chunk


# Weights in pieces on several ranks.


def on_one_of_two_ranks(rank, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    problem = Problem(rank, bias=True, rank=2)
    alike = Problem(5, bias=True, rank=2)
    sharded = [alike.weight, alike.bias, alike.low_rank[1]]
    sharded = [distribute_tensor(t.detach(), mesh, [Shard(0)]).requires_grad_() for t in sharded]
    problem.weight, problem.bias, _ = sharded
    problem.low_rank = problem.low_rank[0], sharded[2]
    whole = problem.projection.gathered()
    plain = [whole.weight, whole.bias, whole.low_rank[1]]
    assert all(type(tensor) is torch.Tensor for tensor in plain)
    problem.weight, problem.bias, problem.low_rank = whole.weight, whole.bias, whole.low_rank
    loss = problem.chunked(10)
    loss.backward()
    result = {
        "loss": loss.detach(),
        "hidden": problem.hidden.grad,
        "weights": [tensor.grad.full_tensor() for tensor in sharded],
        "pieces": [tuple(tensor.grad.to_local().shape) for tensor in sharded],
    }
    torch.save(result, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_a_sharded_weight_gives_what_a_whole_one_gives(tmp_path):
    context = torch.multiprocessing.spawn(
        on_one_of_two_ranks, args=(str(tmp_path),), nprocs=2, join=False
    )
    deadline = time.monotonic() + 120
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    wanted = []
    for rank in range(2):
        got = torch.load(f"{tmp_path}/{rank}.pt")
        problem = Problem(rank, bias=True, rank=2)
        alike = Problem(5, bias=True, rank=2)
        problem.weight, problem.bias = alike.weight, alike.bias
        problem.low_rank = problem.low_rank[0], alike.low_rank[1]
        loss = problem.plain()
        leaves = [problem.hidden, problem.weight, problem.bias, alike.low_rank[1]]
        hidden, *weights = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(got["loss"], loss.detach())
        torch.testing.assert_close(got["hidden"], hidden, rtol=1e-11, atol=1e-13)
        wanted.append((got["weights"], weights))
        assert got["pieces"] == [((27, 26)[rank], 11), ((27, 26)[rank],), ((27, 26)[rank], 2)]
    mean = [(first + second) / 2 for first, second in zip(*(w for _, w in wanted), strict=True)]
    for gathered, _ in wanted:
        torch.testing.assert_close(gathered, mean, rtol=1e-11, atol=1e-13)


def test_ordinary_tensors_are_already_gathered():
    projection = Problem(bias=True, rank=2).projection
    gathered = projection.gathered()
    assert gathered.weight is projection.weight
    assert gathered.bias is projection.bias
    assert gathered.low_rank[0] is projection.low_rank[0]


# Mistakes.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5)}, r"must be \(V, D\), got the shape \(5,\)"),
        ({"bias": torch.zeros(4)}, r"must be \(5,\) as the output matrix has 5 rows, got \(4,\)"),
        (
            {"low_rank": (torch.zeros(2, 3), torch.zeros(5, 4))},
            r"low_rank must be \(N, r\) and \(5, r\), got \(2, 3\) and \(5, 4\)",
        ),
        ({"scale": 0.0}, "scale must be finite and not 0, got 0.0"),
        ({"scale": math.nan}, "scale must be finite and not 0, got nan"),
        ({"soft_cap": 0.0}, "soft_cap must be positive and finite or None, got 0.0"),
        ({"soft_cap": math.inf}, "soft_cap must be positive and finite or None, got inf"),
    ],
)
def test_a_head_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        OutputProjection(**({"weight": torch.zeros(5, 3)} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden": torch.zeros(2, 4)},
            r"hidden states must be \(N, 3\) as the output matrix is \(5, 3\), got \(2, 4\)",
        ),
        (
            {"hidden": torch.zeros(1, 2, 3)},
            r"hidden states must be \(N, 3\) .* got \(1, 2, 3\)",
        ),
        (
            {"label_ids": torch.zeros(3, dtype=torch.long)},
            r"label_ids must be \(2,\), one for each hidden state, got \(3,\)",
        ),
        (
            {
                "projection": OutputProjection(
                    torch.zeros(5, 3), low_rank=(torch.zeros(3, 1), torch.zeros(5, 1))
                )
            },
            r"low_rank must begin with \(2, r\), one row for each hidden state, got \(3, 1\)",
        ),
        ({"rows_per_chunk": 0}, "rows_per_chunk must be 1 or more, got 0"),
    ],
)
def test_inputs_that_disagree_are_named(change, message):
    arguments = {
        "hidden": torch.zeros(2, 3),
        "projection": OutputProjection(torch.zeros(5, 3)),
        "label_ids": torch.zeros(2, dtype=torch.long),
        "number_ids": torch.zeros(0, dtype=torch.long),
    } | change
    with pytest.raises(ValueError, match=message):
        projected_statistics(**arguments)
