"""The objective: what is averaged, what happens at the edges, and faults that users met."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch

from ntl_lightning.losses import (
    CrossEntropy,
    ExpectedValue,
    LinearWarmup,
    LossTerm,
    NumberLevel,
    Objective,
    SmoothedCrossEntropy,
    TokenStatistics,
    Wasserstein,
)
from ntl_lightning.numbers.vocabulary import NumberVocabulary

UNIFORM_WAS = [4.5, 3.7, 3.1, 2.7, 2.5, 2.5, 2.7, 3.1, 3.7, 4.5]  # label 0..9, uniform digits


def ce_and(term, vocabulary):
    return Objective([CrossEntropy(), term], vocabulary)


def alone(term, vocabulary):
    return Objective([term], vocabulary)


@pytest.mark.parametrize("label", range(10))
def test_uniform_digits_cost_their_mean_distance(label, v15):
    result = alone(Wasserstein(), v15)(torch.zeros(1, 15), torch.tensor([label + 5]))
    assert result.parts["ntl_was"].item() == pytest.approx(UNIFORM_WAS[label], rel=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.3, 2.0])
def test_a_batch_without_numbers_leaves_cross_entropy_alone(weight, v15):
    logits = torch.zeros(1, 3, 15, requires_grad=True)
    result = ce_and(Wasserstein(weight=weight), v15)(logits, torch.tensor([[1, 2, -100]]))
    assert result.loss.item() == pytest.approx(math.log(15), rel=1e-6)
    assert result.parts["ntl_was"].item() == 0
    assert result.counts == {"tokens": 2, "numbers": 0}
    result.loss.backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("term", [Wasserstein(), ExpectedValue()])
def test_a_number_term_alone_without_numbers_is_an_attached_zero(term, v15):
    logits = torch.zeros(1, 3, 15, requires_grad=True)
    loss = alone(term, v15)(logits, torch.tensor([[1, 2, -100]])).loss
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_batch_without_any_label_is_an_attached_zero(v15):
    logits = torch.zeros(2, 3, 15, requires_grad=True)
    result = ce_and(Wasserstein(), v15)(logits, torch.full((2, 3), -100))
    assert result.loss.item() == 0
    assert result.counts == {"tokens": 0, "numbers": 0}
    result.loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_padding_is_not_taken_for_the_number_at_id_zero(v15d):
    logits = torch.zeros(1, 6, 15)
    logits[0, 0, 3] = 40
    labels = torch.tensor([[3, -100, -100, -100, -100, -100]])
    result = alone(Wasserstein(), v15d)(logits, labels)
    assert result.loss.item() == pytest.approx(0, abs=1e-12)


def test_logits_wider_than_the_tokenizer_have_no_numbers_there():
    vocabulary = NumberVocabulary.from_values({i + 5: float(i) for i in range(10)}, width=43)
    logits = torch.zeros(1, 1, 43)
    logits[..., 9] = 1
    logits[..., 15:] = 100
    result = alone(Wasserstein(), vocabulary)(logits, torch.tensor([[9]]))
    assert result.parts["ntl_was"].item() == pytest.approx(2.133419, rel=1e-6)
    with pytest.raises(ValueError, match="logits are 15 wide"):
        alone(Wasserstein(), vocabulary)(torch.zeros(1, 1, 15), torch.tensor([[9]]))


def one_hot(said, width=15, strength=60.0):
    logits = torch.zeros(len(said), width)
    logits[torch.arange(len(said)), torch.tensor(said)] = strength
    return logits


def test_accumulated_micro_batches_weigh_every_number_alike(v15):
    """1 number with loss 9 and 9 numbers with loss 1 average to 1.8, not to 5."""
    objective = alone(Wasserstein(weight=1.0), v15)
    scores = torch.cat([one_hot([14]), one_hot([6] * 9)])  # all mass on 9; on 1
    labels = torch.full((10,), 5)  # 0
    together = scores.clone().requires_grad_()
    result = objective(together, labels)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(1.8, rel=1e-6)

    apart = scores.clone().requires_grad_()
    totals = {"tokens": 10, "numbers": 10}
    losses = []
    for rows in (slice(0, 1), slice(1, 10)):
        loss = objective(apart[rows], labels[rows], denominators=totals).loss
        loss.backward()
        losses.append(loss.item())
    assert sum(losses) == pytest.approx(1.8, rel=1e-6)
    torch.testing.assert_close(apart.grad, together.grad, rtol=1e-6, atol=1e-9)


def test_values_above_256_are_exact_in_bfloat16(v1005):
    def scores(said):
        logits = torch.full((1, 1005), -30.0, dtype=torch.bfloat16)
        logits[0, said + 5] = 30.0
        return logits

    for term, off in ((Wasserstein(), 257.0), (ExpectedValue(), 66049.0)):
        objective = alone(term, v1005).to(torch.bfloat16)
        right = objective(scores(257), torch.tensor([257 + 5])).parts[term.name]
        wrong = objective(scores(258), torch.tensor([1 + 5])).parts[term.name]
        assert right.item() == pytest.approx(0, abs=1e-9)
        assert wrong.item() == pytest.approx(off, rel=1e-6)
        assert right.dtype == torch.float32


@pytest.mark.parametrize("move", ["bfloat16", "half", "to"])
def test_moving_the_objective_to_low_precision_keeps_the_values(move, v1005):
    objective = alone(Wasserstein(), v1005)
    if move == "to":
        objective.to(torch.bfloat16)
    else:
        getattr(objective, move)()
    assert objective.value_table[5 + 999] == 999
    assert objective.value_table.dtype == torch.float32


@pytest.mark.parametrize("term", [Wasserstein(), ExpectedValue()])
def test_bfloat16_logits_cost_what_they_cost_in_float64(term, v15):
    torch.manual_seed(0)
    logits = (torch.randn(2000, 15) * 3).bfloat16()
    labels = torch.randint(5, 15, (2000,))
    objective = alone(term, v15)
    low = objective(logits, labels).statistics
    high = objective(logits.double(), labels).statistics
    difference = (term.per_position(low).double() - term.per_position(high)).abs().max()
    assert difference < 1e-3


def test_values_per_position_stand_where_their_labels_stand(v15):
    logits = torch.zeros(2, 3, 15)
    labels = torch.tensor([[1, 9, -100], [2, 3, -100]])
    statistics = ce_and(Wasserstein(), v15)(logits, labels).statistics
    per_token = torch.zeros(2, 3)
    ntl = Wasserstein().per_position(statistics)
    per_token[labels != -100] = statistics.cross_entropy + 0.3 * torch.where(
        statistics.is_number, ntl, 0.0
    )
    want = torch.tensor([[2.708050, 3.458050, 0], [2.708050, 2.708050, 0]])
    torch.testing.assert_close(per_token, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "label", "said", "want"),
    [
        ({0: 1.0, 1: 10.0, 2: 1000.0}, 0, 2, 999.0),
        ({0: 5.0, 1: 5.0, 2: 6.0}, 0, 1, 0.0),
        ({0: 3.0, 1: 1.0, 2: 2.0}, 0, 2, 1.0),
        ({0: 7.0}, 0, 0, 0.0),
    ],
    ids=["gaps", "doubled values", "unsorted", "a single number token"],
)
def test_distances_are_between_values_not_ranks(values, label, said, want):
    vocabulary = NumberVocabulary.from_values(values, width=4)
    logits = torch.full((1, 4), -math.inf)
    logits[0, said] = 0.0
    result = alone(Wasserstein(), vocabulary)(logits, torch.tensor([label]))
    assert result.parts["ntl_was"].item() == want


@pytest.mark.parametrize(("term", "want"), [(Wasserstein(), 2.5), (ExpectedValue(), 0.25)])
def test_mass_on_text_tokens_costs_nothing_extra_by_default(term, want):
    vocabulary = NumberVocabulary.from_values({i + 5: float(i) for i in range(10)}, width=20)
    result = alone(term, vocabulary)(torch.zeros(1, 20), torch.tensor([9]))
    assert result.parts[term.name].item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("term", "want"),
    [(Wasserstein(reweigh=True), 5.795), (ExpectedValue(reweigh=True), 41.03)],
)
def test_reweighing_makes_text_cost_more_than_the_worst_number(term, want):
    vocabulary = NumberVocabulary.from_values({i + 5: float(i) for i in range(10)}, width=20)
    result = alone(term, vocabulary)(torch.zeros(1, 20), torch.tensor([9]))
    assert result.parts[term.name].item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("factor", "row"),
    [
        (2.0, [0, 1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875, 2]),
        (1.0, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (9.0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_squeezed_distances_go_from_one_to_the_factor(factor, row, v15):
    objective = alone(Wasserstein(squash_factor=factor), v15)
    for said, cost in enumerate(row):
        result = objective(one_hot([said + 5]), torch.tensor([5]))
        assert result.parts["ntl_was"].item() == pytest.approx(cost, abs=1e-6)


def test_squeezing_two_or_one_distances_divides_by_nothing():
    for values, cost in (({0: 3.0, 1: 7.0}, 1.0), ({0: 3.0, 1: 3.0}, 0.0)):
        vocabulary = NumberVocabulary.from_values(values, width=2)
        logits = one_hot([1], width=2)
        result = alone(Wasserstein(squash_factor=4.0), vocabulary)(logits, torch.tensor([0]))
        assert result.parts["ntl_was"].item() == pytest.approx(cost, abs=1e-6)


@pytest.mark.parametrize(
    ("shares", "was", "mse"),
    [({4: 0.5, 6: 0.5}, 1.0, 0.0), ({0: 4 / 9, 9: 5 / 9}, 40 / 9, 0.0)],
)
def test_two_wrong_peaks_fool_the_expected_value_but_not_the_distance(shares, was, mse, v15):
    logits = torch.full((1, 15), -math.inf)
    for value, share in shares.items():
        logits[0, value + 5] = math.log(share)
    label = torch.tensor([10])
    for term, want in ((Wasserstein(), was), (ExpectedValue(), mse)):
        got = alone(term, v15)(logits, label).parts[term.name].item()
        assert got == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_the_default_terms_are_cross_entropy_and_ntl_was():
    from inspect import signature

    from ntl_lightning.module import NumberAwareLM

    default = signature(NumberAwareLM).parameters["loss_terms"].default
    assert default == (CrossEntropy(weight=1.0), Wasserstein(weight=0.3, largest_distance=None))


def test_an_all_number_vocabulary_works():
    vocabulary = NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=10)
    result = alone(Wasserstein(), vocabulary)(torch.zeros(1, 2, 10), torch.tensor([[3, -100]]))
    assert result.parts["ntl_was"].item() == pytest.approx(2.7, rel=1e-6)


def test_averaging_over_tokens_divides_by_all_labels(v15):
    labels = torch.tensor([[9, 1, 2, -100, 3]])
    logits = torch.zeros(1, 5, 15)
    numbers = alone(Wasserstein(weight=1.0), v15)(logits, labels)
    tokens = alone(Wasserstein(weight=1.0, averaged_over="tokens"), v15)(logits, labels)
    assert numbers.loss.item() == pytest.approx(2.5, rel=1e-6)
    assert tokens.loss.item() == pytest.approx(2.5 / 4, rel=1e-6)


def test_a_scheduled_weight_rises_with_the_optimizer_step(v15):
    objective = ce_and(Wasserstein(weight=0.4, schedule=LinearWarmup(steps=4)), v15)
    losses = [
        objective(torch.zeros(1, 15), torch.tensor([9]), step=step).loss.item() - math.log(15)
        for step in (0, 1, 4, 9)
    ]
    assert losses == pytest.approx([0.0, 0.25, 1.0, 1.0], abs=1e-5)


def test_the_value_is_that_of_this_batch_whatever_the_denominators(v15):
    objective = ce_and(Wasserstein(), v15)
    logits, labels = torch.zeros(1, 2, 15), torch.tensor([[9, 1]])
    want = objective(logits, labels).loss.item()
    result = objective(logits, labels, denominators={"tokens": 100, "numbers": 50})
    assert result.value.item() == pytest.approx(want, rel=1e-6)
    assert result.loss.item() == pytest.approx(2 * math.log(15) / 100 + 0.3 * 2.5 / 50, rel=1e-6)


def test_counting_labels_agrees_with_the_result(v15):
    labels = torch.tensor([[9, 1, -100], [5, 14, 2]])
    objective = ce_and(Wasserstein(), v15)
    assert objective.count(labels) == {"tokens": 5, "numbers": 3}
    assert objective(torch.zeros(2, 3, 15), labels).counts == {"tokens": 5, "numbers": 3}


def test_one_micro_batch_without_any_label_among_good_ones_changes_nothing(v15):
    objective = ce_and(Wasserstein(), v15)
    torch.manual_seed(0)
    logits = torch.randn(6, 15)
    labels = torch.tensor([9, 1, 12, 2, 14, 5])
    totals = objective.count(labels)
    good = logits.clone().requires_grad_()
    objective(good, labels).loss.backward()
    parts = logits.clone().requires_grad_()
    nothing = torch.zeros(3, 15, requires_grad=True)
    for piece, piece_labels in (
        (parts[:3], labels[:3]),
        (nothing, torch.full((3,), -100)),
        (parts[3:], labels[3:]),
    ):
        objective(piece, piece_labels, denominators=totals).loss.backward()
    torch.testing.assert_close(parts.grad, good.grad, rtol=1e-6, atol=1e-8)
    assert torch.equal(nothing.grad, torch.zeros_like(nothing))


def test_a_text_batch_has_no_cross_entropy_over_numbers(v15):
    """Averaged over the numbers, of which there are none: 0, not a sum."""
    objective = alone(CrossEntropy(averaged_over="numbers"), v15)
    logits = torch.zeros(50, 15, requires_grad=True)
    result = objective(logits, torch.ones(50, dtype=torch.long))
    assert result.loss.item() == result.parts["cross_entropy"].item() == 0
    result.loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_term_of_weight_zero_is_logged_and_has_no_gradient_even_if_it_overflows(v1005):
    logits = torch.randn(4, 1005, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([5, 6, 7, 8])
    alone_logits = logits.clone().requires_grad_()
    alone(Wasserstein(), v1005)(alone_logits, labels).loss.backward()
    both_logits = logits.clone().requires_grad_()
    objective = Objective([ExpectedValue(power=20.0, weight=0.0), Wasserstein()], v1005)
    result = objective(both_logits, labels)
    result.loss.backward()
    assert result.parts["ntl_l20"].isinf()
    assert result.loss.isfinite()
    torch.testing.assert_close(both_logits.grad, alone_logits.grad)
    assert both_logits.grad.abs().sum() > 0


def test_an_infinite_term_of_weight_zero_does_not_reach_the_logged_loss(v15):
    logits = torch.zeros(1, 15)
    logits[0, 6] = -math.inf
    objective = Objective([CrossEntropy(), SmoothedCrossEntropy(weight=0.0)], v15)
    result = objective(logits, torch.tensor([5]))
    assert result.parts["smoothed_cross_entropy"].isinf()
    assert result.value.item() == pytest.approx(math.log(14), rel=1e-6)
    assert objective.combine(result.parts, 0).item() == pytest.approx(math.log(14), rel=1e-6)


def test_a_single_label_needs_no_dimension(v15):
    objective = Objective([CrossEntropy(), NumberLevel()], v15)
    result = objective(torch.zeros(15), torch.tensor(9))
    assert result.parts["cross_entropy"].item() == pytest.approx(math.log(15), rel=1e-6)
    assert result.parts["number_level"].item() == pytest.approx(0.5 / (4.5 + 4 + 1), rel=1e-6)


@pytest.mark.parametrize("base", [10.0, 0.1])
@pytest.mark.parametrize("term", [Wasserstein, ExpectedValue])
def test_a_weight_by_place_does_not_overflow_on_long_numbers(term, base, v15):
    logits = one_hot([6] * 400, strength=60.0).requires_grad_()
    result = alone(term(place_base=base), v15)(logits, torch.full((400,), 6))
    result.loss.backward()
    assert result.loss.isfinite()
    assert logits.grad.isfinite().all()


@dataclass(frozen=True)
class Mean(LossTerm):
    """A user's term with a matrix product, which autocast would do in bfloat16."""

    def per_position(self, statistics: TokenStatistics) -> torch.Tensor:
        return statistics.number_probabilities @ statistics.number_values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_users_term_is_computed_in_float32_under_autocast(dtype, v1005):
    logits = torch.full((1, 1005), -30.0, dtype=dtype)
    logits[0, 257 + 5] = 30.0
    with torch.autocast("cpu", torch.bfloat16):
        result = Objective([Cubed(), Mean()], v1005)(logits, torch.tensor([257 + 5]))
        inside = result.statistics.expected_value()
    assert result.parts["ntl_cubed"].item() == 0
    assert result.parts["mean"].item() == 257
    assert inside.dtype == torch.float32
    assert inside.item() == 257


def test_our_default_on_a_real_vocabulary_of_large_numbers_stays_near_cross_entropy(
    real_tokenizer,
):
    """GPT-2 has number tokens up to 67 million; digits alone are counted unless asked."""
    tokenizer = real_tokenizer("gpt2")
    vocabulary = NumberVocabulary.from_tokenizer(tokenizer)
    label = tokenizer.convert_tokens_to_ids("5")
    logits = torch.zeros(1, vocabulary.width, requires_grad=True)
    result = ce_and(Wasserstein(), vocabulary)(logits, torch.tensor([label]))
    assert 0 < result.parts["ntl_was"] <= 10 * result.parts["cross_entropy"]
    result.loss.backward()
    assert logits.grad.abs().max() < 2


@dataclass(frozen=True)
class Cubed(LossTerm):
    """A user's own term."""

    name: ClassVar[str] = "ntl_cubed"
    weight: float = 0.1
    averaged_over: Literal["numbers", "tokens"] = "numbers"

    def per_position(self, statistics: TokenStatistics) -> torch.Tensor:
        return (statistics.expected_value() - statistics.label_values).abs() ** 3


def test_a_users_own_term_takes_part(v15):
    logits = torch.zeros(1, 15, requires_grad=True)
    result = ce_and(Cubed(), v15)(logits, torch.tensor([9]))
    assert result.parts["ntl_cubed"].item() == pytest.approx(0.125, rel=1e-5)
    assert result.loss.item() == pytest.approx(math.log(15) + 0.0125, rel=1e-6)
    result.loss.backward()
    assert logits.grad.abs().sum() > 0


def test_a_users_own_term_is_scheduled(v15):
    term = Cubed(weight=1.0, schedule=LinearWarmup(steps=2))
    objective = ce_and(term, v15)
    label = torch.tensor([9])
    losses = [objective(torch.zeros(1, 15), label, step=s).loss.item() for s in (0, 1, 2)]
    assert [loss - math.log(15) for loss in losses] == pytest.approx([0, 0.0625, 0.125], abs=1e-5)


@dataclass(frozen=True)
class Averaged(LossTerm):
    """A mistake: one value for all positions."""

    def per_position(self, statistics: TokenStatistics) -> torch.Tensor:
        return statistics.cross_entropy.mean()


def test_a_term_that_returns_something_else_than_one_value_per_position_is_refused(v15):
    with pytest.raises(ValueError, match=r"one value for each of the 2 positions, got .* \(\)"):
        alone(Averaged(), v15)(torch.zeros(2, 15), torch.tensor([9, 9]))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([], "loss_terms is empty"),
        ([Wasserstein(), Wasserstein(weight=1.0)], "more than one term called 'ntl_was'"),
        ([CrossEntropy(weight=-1.0)], "weight of cross_entropy must be 0 or more, got -1.0"),
        ([Wasserstein(weight=math.nan)], "weight of ntl_was must be 0 or more, got nan"),
        ([Wasserstein(averaged_over="number")], "averaged_over of ntl_was .* got 'number'"),
    ],
)
def test_objectives_that_make_no_sense_are_refused(terms, message, v15):
    with pytest.raises(ValueError, match=message):
        Objective(terms, v15)


def test_whether_numbers_are_needed_is_known(v15):
    assert ce_and(Wasserstein(), v15).needs_numbers
    assert not ce_and(Wasserstein(weight=0.0), v15).needs_numbers
    assert not alone(CrossEntropy(), v15).needs_numbers
