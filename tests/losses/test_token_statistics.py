import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ntl_lightning.losses import token_statistics

OUTPUTS = ("cross_entropy", "log_partition", "number_logits")


def table_of(number_ids, width):
    table = torch.full((width,), math.nan)
    table[number_ids] = torch.arange(len(number_ids), dtype=torch.float32)
    return table


def plain(logits, labels, number_ids):
    """The same three results by plain PyTorch and autograd."""
    kept = logits.reshape(-1, logits.shape[-1])[labels.reshape(-1) != -100]
    kept_labels = labels.reshape(-1)[labels.reshape(-1) != -100]
    log_probabilities = F.log_softmax(kept, -1)
    return (
        -log_probabilities.gather(-1, kept_labels[:, None]).squeeze(-1),
        kept.logsumexp(-1),
        kept[:, number_ids],
    )


def value_and_gradient(outputs, weights, logits):
    total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    (gradient,) = torch.autograd.grad(total, logits)
    return total.detach(), gradient


@pytest.mark.parametrize("share_ignored", [0.0, 0.2, 0.8, 1.0])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_equal_float64_autograd(share_ignored, overwrite, dtype):
    torch.manual_seed(0)
    shape, width = (5, 29), 101
    truth = (torch.randn(*shape, width, dtype=torch.float64) * 4).requires_grad_()
    labels = torch.randint(0, width, shape)
    labels[torch.rand(shape) < share_ignored] = -100
    if share_ignored == 1.0:
        labels[:] = -100
    number_ids = torch.randperm(width)[:10].sort().values
    n = int((labels != -100).sum())
    weights = [torch.randn(n).double(), torch.randn(n).double(), torch.randn(n, 10).double()]

    want, want_gradient = value_and_gradient(plain(truth, labels, number_ids), weights, truth)
    leaf = truth.detach().to(dtype).requires_grad_()
    statistics = token_statistics(
        leaf * 1.0, labels, number_ids, table_of(number_ids, width), overwrite_logits=overwrite
    )
    outputs = [getattr(statistics, name) for name in OUTPUTS]
    got, got_gradient = value_and_gradient(outputs, [w.to(dtype) for w in weights], leaf)
    tolerance = (
        {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-13}
    )
    torch.testing.assert_close(got.double(), want, **tolerance)
    torch.testing.assert_close(got_gradient.double(), want_gradient, **tolerance)


def test_gradcheck():
    torch.manual_seed(1)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100, 0, 6])
    number_ids = torch.tensor([0, 2, 3])
    table = table_of(number_ids, 7)

    def outputs(z):
        statistics = token_statistics(z, labels, number_ids, table)
        return tuple(getattr(statistics, name) for name in OUTPUTS)

    assert torch.autograd.gradcheck(outputs, (logits,), nondet_tol=1e-12)


@pytest.mark.parametrize(("rows", "width", "numbers"), [(3, 17, 5), (101, 1005, 17), (130, 257, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overwrite", [False, True])
def test_low_precision_is_as_exact_as_the_float32_upcast(rows, width, numbers, dtype, overwrite):
    torch.manual_seed(2)
    low = (torch.randn(rows, width) * 3).to(dtype)
    labels = torch.randint(0, width, (rows,))
    low[0, labels[0]] = 30.0  # a confident row: its gradient is the difference of near equals
    number_ids = torch.arange(numbers) * 2
    truth = low.double().requires_grad_()
    naive = low.clone().requires_grad_()
    ours = low.clone().requires_grad_()
    weights = [torch.ones(rows) / rows, torch.zeros(rows), torch.zeros(rows, numbers)]
    want, want_gradient = value_and_gradient(plain(truth, labels, number_ids), weights, truth)
    upcast, upcast_gradient = value_and_gradient(
        plain(naive.float(), labels, number_ids), weights, naive
    )
    statistics = token_statistics(
        ours * 1.0, labels, number_ids, table_of(number_ids, width), overwrite_logits=overwrite
    )
    got, got_gradient = value_and_gradient(
        [getattr(statistics, name) for name in OUTPUTS], weights, ours
    )
    assert statistics.cross_entropy.dtype == torch.float32
    assert got_gradient.dtype == dtype
    assert abs(got - want) <= abs(upcast - want) + 1e-6

    def error(gradient):
        return (gradient.double() - want_gradient).abs().max()

    assert error(got_gradient) <= error(upcast_gradient) + 1e-9


def test_a_sure_row_has_no_gradient_left_in_bfloat16():
    logits = torch.full((1, 5), -40.0, dtype=torch.bfloat16)
    logits[0, 2] = 40.0
    logits.requires_grad_()
    ids = torch.tensor([2, 3])
    token_statistics(
        logits, torch.tensor([2]), ids, table_of(ids, 5)
    ).cross_entropy.sum().backward()
    assert logits.grad.abs().max() < 1e-30


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_huge_and_infinite_logits_give_finite_results(overwrite, dtype):
    """The label's probability underflows in the first row; its cross entropy does not."""
    leaf = torch.tensor([[1e4, -1e4, 0.0, -math.inf], [0.0, -math.inf, -math.inf, 0.0]])
    leaf = leaf.to(dtype).requires_grad_()
    ids = torch.tensor([1, 2])
    statistics = token_statistics(
        leaf * 1, torch.tensor([1, 0]), ids, table_of(ids, 4), overwrite_logits=overwrite
    )
    largest = leaf[0, 0].item()  # bfloat16 has no 10000
    assert statistics.cross_entropy.tolist() == pytest.approx([2 * largest, math.log(2)], rel=1e-6)
    assert statistics.log_partition.tolist() == pytest.approx([largest, math.log(2)], rel=1e-6)
    statistics.cross_entropy.sum().backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0].tolist() == pytest.approx([1, -1, 0, 0])
    assert leaf.grad[1].tolist() == pytest.approx([-0.5, 0, 0, 0.5])


@pytest.mark.parametrize("ignored_rows", [[1], [0, 1, 3]])
def test_a_broken_row_without_label_does_not_reach_the_gradient(ignored_rows):
    logits = torch.zeros(4, 6)
    logits[ignored_rows] = math.nan
    logits.requires_grad_()
    labels = torch.full((4,), 2)
    labels[ignored_rows] = -100
    ids = torch.tensor([2])
    statistics = token_statistics(logits, labels, ids, table_of(ids, 6))
    (statistics.cross_entropy.sum() + statistics.number_logits.sum()).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[ignored_rows] == 0).all()


@pytest.mark.parametrize("ignored", [0, 3])
def test_overwriting_uses_the_memory_of_the_logits(ignored):
    leaf = torch.randn(4, 50, requires_grad=True)
    logits = leaf * 1.0
    address = logits.data_ptr()
    labels = torch.tensor([1, 2, 3, 4])
    labels[:ignored] = -100
    ids = torch.arange(3)
    seen = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    token_statistics(
        logits, labels, ids, table_of(ids, 50), overwrite_logits=True
    ).cross_entropy.sum().backward()
    assert seen == [address]


def test_without_overwriting_the_logits_stay_as_they_were():
    logits = torch.randn(6, 40, requires_grad=True)
    before = logits.detach().clone()
    ids = torch.arange(4)
    token_statistics(logits, torch.arange(6), ids, table_of(ids, 40)).cross_entropy.sum().backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", [0, 3])
def test_a_second_backward_pass_gives_the_same_gradient(dtype, ignored):
    torch.manual_seed(3)
    logits = torch.randn(4, 50).to(dtype).requires_grad_()
    labels = torch.tensor([1, 2, 3, 4])
    labels[:ignored] = -100
    ids = torch.arange(2)
    loss = token_statistics(logits, labels, ids, table_of(ids, 50)).cross_entropy.sum()
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(second, first, rtol=1e-6, atol=1e-7)


def test_a_second_backward_pass_over_overwritten_logits_is_refused():
    logits = torch.randn(2, 5, requires_grad=True) * 1.0
    ids = torch.arange(2)
    loss = token_statistics(
        logits, torch.tensor([0, 1]), ids, table_of(ids, 5), overwrite_logits=True
    ).cross_entropy.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


def test_overwriting_logits_that_the_model_reads_again_is_an_error_not_a_wrong_gradient():
    leaf = torch.randn(2, 5, requires_grad=True)
    ids = torch.arange(2)
    capped = 30 * torch.tanh(leaf / 30)
    capped_output = torch.tanh(leaf)
    token_statistics(
        capped, torch.tensor([0, 1]), ids, table_of(ids, 5), overwrite_logits=True
    ).cross_entropy.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token_statistics(
            capped_output, torch.tensor([0, 1]), ids, table_of(ids, 5), overwrite_logits=True
        ).cross_entropy.sum().backward()


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ((2, 3, 7), (2, 4), r"\(2, 3\), got \(2, 4\)"),
        ((2, 9), (2,), "logits are 9 wide, but the number vocabulary was made for 7"),
    ],
)
def test_shapes_that_disagree_are_named(logits, labels, message):
    ids = torch.arange(2)
    with pytest.raises(ValueError, match=message):
        token_statistics(
            torch.zeros(logits), torch.zeros(labels, dtype=torch.long), ids, table_of(ids, 7)
        )


@pytest.mark.parametrize("label", [7, -1])
def test_a_label_outside_the_vocabulary_is_named(label):
    ids = torch.arange(2)
    with pytest.raises(ValueError, match=f"label {label} is outside the vocabulary of 7 tokens"):
        token_statistics(torch.zeros(2, 7), torch.tensor([0, label]), ids, table_of(ids, 7))


@given(
    st.integers(0, 2**32 - 1),
    st.floats(-1e3, 1e3),
    st.integers(1, 6),
    st.integers(2, 40),
)
@settings(max_examples=40, deadline=None)
def test_a_constant_added_to_all_logits_changes_only_the_log_partition(seed, shift, rows, width):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, width, (rows,), generator=generator)
    ids = torch.arange(0, width, 2)
    before = token_statistics(logits, labels, ids, table_of(ids, width))
    after = token_statistics(logits + shift, labels, ids, table_of(ids, width))
    torch.testing.assert_close(after.cross_entropy, before.cross_entropy, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after.log_partition, before.log_partition + shift)
    torch.testing.assert_close(after.number_mass, before.number_mass, rtol=1e-9, atol=1e-9)


def test_number_mass_is_the_probability_of_all_number_tokens():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    ids = torch.tensor([1, 3])
    statistics = token_statistics(logits, torch.tensor([0]), ids, table_of(ids, 4))
    want = (math.e + 1 / math.e) / (1 + math.e + math.e**2 + 1 / math.e)
    assert statistics.number_mass.item() == pytest.approx(want, rel=1e-6)
