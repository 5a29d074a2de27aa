"""The objective from hidden states against the objective on logits, and off the CPU."""

import dataclasses
import importlib
import math
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ntl_lightning import losses
from ntl_lightning.losses import (
    CrossEntropy,
    ExpectedValue,
    LossTerm,
    Objective,
    Wasserstein,
    token_statistics,
)
from ntl_lightning.numbers import NumberVocabulary

V, D = 23, 6
VOCABULARY = NumberVocabulary.from_values(
    {i: float(i) for i in range(10)}, width=V, marks={10: "."}
)
TERMS = [
    CrossEntropy(),
    Wasserstein(weight=0.7, reweigh=True),
    ExpectedValue(weight=0.2),
]


@dataclasses.dataclass(frozen=True)
class Joined(LossTerm):
    """The squared value of a written number in units of its first place, at its first digit."""

    joins_positions: ClassVar[bool] = True
    averaged_over: str = "whole_numbers"

    def per_position(self, statistics):
        worth = statistics.expected_value() * 10.0 ** (statistics.place - statistics.top_place)
        worth = torch.where(statistics.is_digit, worth, 0.0)
        sums = worth.new_zeros(statistics.num_cells + 1).index_add(0, statistics.run, worth)
        return torch.where(statistics.starts_number, sums[statistics.run].square(), 0.0)


@dataclasses.dataclass(frozen=True)
class Looking(LossTerm):
    """Waits for the device."""

    def per_position(self, statistics):
        return statistics.cross_entropy * statistics.label_values.sum().item()


def every_term():
    """Each that the package offers, with as little said as it allows."""
    kinds = [getattr(losses, name) for name in losses.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, LossTerm)]
    needed = {losses.HLGauss: {"sigma": 0.7}}
    return [kind(**needed.get(kind, {})) for kind in kinds if kind is not LossTerm]


def batch(seed=0, shape=(3, 11), dtype=torch.float64, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, D, dtype=torch.float64, generator=generator)
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator)
    bias = torch.randn(V, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, V, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.4] %= 10
    labels[torch.rand(shape, generator=generator) < ignored] = -100
    tensors = (t.to(dtype).requires_grad_() for t in (hidden, weight, bias))
    return (*tensors, labels)


def both_ways(terms, options=None, logits_options=None, seed=0, **settings):
    """Result and gradients from hidden states and from logits."""
    answers = []
    for way in ("hidden", "logits"):
        hidden, weight, bias, labels = batch(seed, **settings)
        objective = Objective(terms, VOCABULARY)
        if way == "hidden":
            result = objective.from_hidden(hidden, weight, labels, bias, **(options or {}))
        else:
            result = objective(hidden @ weight.T + bias, labels, **(logits_options or {}))
        answers.append((result, torch.autograd.grad(3.0 * result.loss, (hidden, weight, bias))))
    return answers


def assert_same(answers, **tolerance):
    (ours, our_gradients), (theirs, their_gradients) = answers
    torch.testing.assert_close(ours.loss, theirs.loss, **tolerance)
    torch.testing.assert_close(our_gradients, their_gradients, **tolerance)
    torch.testing.assert_close(ours.parts, theirs.parts, **tolerance)
    assert ours.counts == theirs.counts
    for field in (
        "cross_entropy",
        "log_partition",
        "number_logits",
        "label_values",
        "label_ids",
    ):
        mine, other = (getattr(r.statistics, field) for r in (ours, theirs))
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.parametrize("rows_per_chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("terms", [TERMS, [*TERMS, Joined()], [Joined()]], ids=len)
def test_hidden_states_give_what_logits_give(terms, rows_per_chunk):
    answers = both_ways(terms, {"rows_per_chunk": rows_per_chunk})
    assert_same(answers, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("terms", [TERMS, [*TERMS, Joined()]], ids=len)
def test_in_float32_hidden_states_are_as_close_to_the_truth_as_logits(terms):
    (ours, our_gradients), (theirs, their_gradients) = both_ways(terms, dtype=torch.float32)
    truth = both_ways(terms)[0][1]
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)

    def error(gradient, true):
        return (gradient.double() - true).abs().max() / true.abs().max()

    for mine, other, true in zip(our_gradients, their_gradients, truth, strict=True):
        assert error(mine, true) < max(1e-6, 1.5 * error(other, true))


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=30)
def test_any_shape_and_chunk_gives_the_same(seed, rows, columns, chunk):
    answers = both_ways(
        [*TERMS, Joined()], {"rows_per_chunk": chunk}, seed=seed, shape=(rows, columns)
    )
    assert_same(answers, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("terms", [TERMS, [*TERMS, Joined()]], ids=len)
def test_denominators_step_and_quantities_mean_the_same(terms):
    quantities = torch.rand(3, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    options = {
        "denominators": {"tokens": 50, "numbers": 20, "whole_numbers": 9},
        "step": 3,
        "quantities": quantities,
    }
    answers = both_ways(terms, options, options)
    assert_same(answers, rtol=1e-10, atol=1e-12)
    without = both_ways(terms)[0][0]
    assert answers[0][0].counts["numbers"] < without.counts["numbers"]
    assert answers[0][0].counts["tokens"] == without.counts["tokens"]


@pytest.mark.parametrize("terms", [TERMS, [*TERMS, Joined()]], ids=len)
def test_no_label_at_all_is_an_attached_zero(terms):
    hidden, weight, bias, labels = batch()
    result = Objective(terms, VOCABULARY).from_hidden(
        hidden, weight, torch.full_like(labels, -100), bias
    )
    assert result.loss.item() == 0
    assert all(part.item() == 0 for part in result.parts.values())
    for gradient in torch.autograd.grad(result.loss, (hidden, weight, bias)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_labels_without_numbers_leave_cross_entropy_alone():
    hidden, weight, bias, labels = batch()
    labels = torch.where(labels < 11, 11, labels)
    result = Objective(TERMS, VOCABULARY).from_hidden(hidden, weight, labels, bias)
    want = torch.nn.functional.cross_entropy(
        (hidden @ weight.T + bias).flatten(0, 1), labels.flatten()
    )
    assert result.loss.item() == pytest.approx(want.item(), rel=1e-12)
    assert result.parts["ntl_was"].item() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("terms", [TERMS, [*TERMS, Joined()]], ids=len)
def test_without_gradients_the_value_is_the_same(mode, terms):
    hidden, weight, bias, labels = batch()
    objective = Objective(terms, VOCABULARY)
    want = objective.from_hidden(hidden, weight, labels, bias).loss
    with mode():
        got = objective.from_hidden(hidden, weight, labels, bias).loss
    assert not got.requires_grad
    assert got.item() == pytest.approx(want.item(), rel=1e-12)


def test_what_a_model_does_behind_its_output_matrix_is_taken_in():
    hidden, weight, bias, labels = batch()
    a = torch.randn(3, 11, 2, dtype=torch.float64, requires_grad=True)
    b = torch.randn(V, 2, dtype=torch.float64, requires_grad=True)
    objective = Objective(TERMS, VOCABULARY)
    inputs = (hidden, weight, bias, a, b)
    got = objective.from_hidden(
        hidden, weight, labels, bias, scale=0.3, soft_cap=2.0, low_rank=(a, b)
    )
    logits = 2.0 * torch.tanh(0.3 * (hidden @ weight.T + bias + a @ b.T) / 2.0)
    want = objective(logits, labels)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(got.loss, inputs),
        torch.autograd.grad(want.loss, inputs),
        rtol=1e-9,
        atol=1e-11,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": (3, 10)}, r"\(3, 11\), got \(3, 10\)"),
        (
            {"weight": (V + 1, D)},
            "output matrix has 24 rows, but the number vocabulary was made for 23",
        ),
    ],
)
def test_shapes_that_disagree_are_named(change, message):
    hidden, weight, _, labels = batch()
    if "labels" in change:
        labels = torch.zeros(change["labels"], dtype=torch.long)
    if "weight" in change:
        weight = torch.zeros(change["weight"], dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        Objective(TERMS, VOCABULARY).from_hidden(hidden, weight, labels)


def test_denominators_without_what_a_term_needs_are_named():
    hidden, weight, _, labels = batch()
    with pytest.raises(ValueError, match="joined is averaged over whole_numbers"):
        Objective([Joined()], VOCABULARY).from_hidden(
            hidden, weight, labels, denominators={"tokens": 3, "numbers": 2}
        )


def test_a_joining_term_that_is_only_logged_costs_no_second_pass(monkeypatch):
    objective_module = importlib.import_module("ntl_lightning.losses.objective")

    def never(*args, **options):
        raise AssertionError("a second pass through the output matrix")

    monkeypatch.setattr(objective_module, "projected_statistics", never)
    logged = dataclasses.replace(Joined(), weight=0.0)
    answers = both_ways([*TERMS, logged], {"rows_per_chunk": 4})
    assert_same(answers, rtol=1e-10, atol=1e-12)
    assert answers[0][0].parts["joined"] > 0
    with pytest.raises(AssertionError, match="second pass"):
        both_ways([*TERMS, Joined()])


@pytest.mark.parametrize("number", [3, 10_000])
def test_a_wrong_number_of_labels_is_named_where_it_can_be_known(number):
    hidden, weight, _, labels = batch()
    with pytest.raises(ValueError, match=f"num_labels={number}, but"):
        Objective(TERMS, VOCABULARY).from_hidden(hidden, weight, labels, num_labels=number)


# Off the CPU, where nobody may look at a tensor's values without waiting for the device.


def do_not_look(monkeypatch):
    """Treat the CPU as a device that is not asked."""
    module = importlib.import_module("ntl_lightning.losses.token_statistics")
    monkeypatch.setattr(module, "can_look", lambda tensor: False)


@pytest.mark.parametrize("known", [False, True], ids=["number unknown", "number known"])
@pytest.mark.parametrize("ignored", [0.1, 0.8])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_device_that_is_not_asked_computes_the_same(
    known, ignored, overwrite, dtype, monkeypatch
):
    terms = [*TERMS, Joined()]
    answers = []
    for asked in (True, False):
        if not asked:
            do_not_look(monkeypatch)
        hidden, weight, bias, labels = batch(2, ignored=ignored)
        labels[0] = -100
        logits = (hidden @ weight.T + bias).to(dtype)
        leaf = logits.detach().requires_grad_()
        result = Objective(terms, VOCABULARY)(
            leaf * 1.0,
            labels,
            overwrite_logits=overwrite,
            num_labels=int((labels != -100).sum()) if known else None,
        )
        answers.append((result, torch.autograd.grad(result.loss, leaf)[0]))
    (want, want_gradient), (got, got_gradient) = answers
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.parts, want.parts, rtol=1e-6, atol=0)
    assert got.counts == want.counts
    torch.testing.assert_close(
        got_gradient,
        want_gradient,
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-9,
        atol=1e-12,
    )
    assert len(got.statistics.rows) == (int(want.counts["tokens"]) if known else labels.numel())


@pytest.mark.parametrize("known", [False, True], ids=["number unknown", "number known"])
def test_a_device_that_is_not_asked_computes_the_same_from_hidden_states(known, monkeypatch):
    want, want_gradients = both_ways([*TERMS, Joined()])[0]
    do_not_look(monkeypatch)
    labels = batch()[-1]
    options = {"num_labels": int((labels != -100).sum())} if known else {}
    got, got_gradients = both_ways([*TERMS, Joined()], options)[0]
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(got_gradients, want_gradients, rtol=1e-10, atol=1e-12)


def test_a_negative_label_that_is_not_the_ignored_one_is_never_taken_for_a_token(monkeypatch):
    do_not_look(monkeypatch)
    hidden, weight, bias, labels = batch()
    labels[0, 0] = -1
    objective = Objective(TERMS, VOCABULARY)
    with pytest.raises((RuntimeError, IndexError), match=r"index out of range|out of bounds"):
        objective(hidden @ weight.T + bias, labels)
    with pytest.raises((RuntimeError, IndexError), match=r"index out of range|out of bounds"):
        objective.from_hidden(hidden, weight, labels, bias)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_without_label_or_number_cannot_spoil_the_others_on_such_a_device(
    broken, monkeypatch
):
    do_not_look(monkeypatch)
    logits = torch.zeros(1, 3, V, dtype=torch.float64)
    logits[0, 0] = broken  # no label
    logits[0, 1, :10] = -math.inf  # a text label: no number is possible
    leaf = logits.requires_grad_()
    labels = torch.tensor([[-100, 12, 4]])
    result = Objective(TERMS, VOCABULARY)(leaf, labels)
    result.loss.backward()
    assert result.loss.isfinite()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[0, 0] == 0).all()


@pytest.mark.parametrize("terms", [TERMS, [*TERMS, Joined()]], ids=len)
def test_the_terms_trace_without_a_break(terms):
    """One graph: no value is read in Python, no shape depends on one."""
    hidden, weight, bias, labels = batch()
    objective = Objective(terms, VOCABULARY)
    logits = (hidden @ weight.T + bias).detach()
    statistics = objective(logits, labels).statistics
    weights = objective.weights(0)
    totals = objective.count(labels)

    def evaluate(statistics):
        return objective._evaluate(statistics, objective.terms, totals, weights)[0]

    torch._dynamo.reset()
    got = torch.compile(evaluate, fullgraph=True, backend="eager")(statistics)
    fresh = objective(logits, labels).statistics
    torch.testing.assert_close(got, evaluate(fresh), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("term", [*every_term(), Joined()], ids=lambda term: type(term).__name__)
def test_no_term_looks_at_a_value(term, dtype, monkeypatch):
    """Tensors without values have nothing to branch on, to shape others by, or to wait for."""
    do_not_look(monkeypatch)
    terms = [CrossEntropy(), term] if type(term) is not CrossEntropy else [term]
    objective = Objective(terms, VOCABULARY)
    *tensors, labels = batch(dtype=dtype)
    num_labels = int((labels != -100).sum())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        hidden, weight, bias = leaves = [
            mode.from_tensor(tensor.detach()).requires_grad_() for tensor in tensors
        ]
        labels = mode.from_tensor(labels)
        logits = (hidden @ weight.T + bias).detach().requires_grad_()
        losses = [
            objective(logits, labels).loss,
            objective(logits, labels, num_labels=num_labels).loss,
            objective.from_hidden(hidden, weight, labels, bias, num_labels=num_labels).loss,
        ]
        of_logits = [torch.autograd.grad(loss, logits)[0] for loss in losses[:2]]
        gradients = torch.autograd.grad(losses[2], leaves)
    assert {gradient.shape for gradient in of_logits} == {logits.shape}
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]


def test_a_term_that_looks_at_a_value_is_found(monkeypatch):
    do_not_look(monkeypatch)
    *_, labels = batch()
    logits = torch.zeros(*labels.shape, V)
    objective = Objective([Looking()], VOCABULARY)
    with (
        pytest.raises(DataDependentOutputException),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        objective(mode.from_tensor(logits), mode.from_tensor(labels))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_a_gpu(dtype):
    hidden, weight, bias, labels = (t.detach().cuda() for t in batch(dtype=dtype))
    num_labels = int((labels != -100).sum())
    objective = Objective([*every_term(), Joined()], VOCABULARY).cuda()
    tensors = [t.requires_grad_() for t in (hidden, weight, bias)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        objective.from_hidden(
            tensors[0], tensors[1], labels, tensors[2], num_labels=num_labels
        ).loss.backward()
        logits = (hidden @ weight.T + bias).detach().requires_grad_()
        objective(logits, labels).loss.backward()
        objective(logits, labels, num_labels=num_labels).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_statistics_can_be_taken_without_knowing_how_tokens_are_written():
    ids = torch.arange(10)
    table = torch.full((V,), math.nan)
    table[ids] = ids.float()
    statistics = token_statistics(torch.zeros(1, 2, V), torch.tensor([[3, 12]]), ids, table)
    assert statistics.label_index.tolist() == [3, 0]
    assert statistics.is_number.tolist() == [True, False]
    with pytest.raises(ValueError, match=r"forms=vocabulary\.forms_table"):
        _ = statistics.place
