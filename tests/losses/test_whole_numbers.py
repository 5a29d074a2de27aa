"""Number level, NTIL and digit entropy against loops over the written text, and against ntloss."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntl_lightning.losses import (
    DigitEntropy,
    EarthMoverPlace,
    NumberLevel,
    Objective,
    token_statistics,
)
from ntl_lightning.numbers.vocabulary import NumberVocabulary
from tests.losses.conftest import assert_hidden_states_give_what_logits_give
from tests.oracles import whole_numbers as oracle

TEXTS = ["<pad>", "a", "b", *"0123456789", "12", "345", ".", ",", "-"]
WIDTH = len(TEXTS)
IDS = {text: i for i, text in enumerate(TEXTS)}
VALUES = {i: float(text) for i, text in enumerate(TEXTS) if text.isdigit()}
VOCABULARY = NumberVocabulary.from_values(
    VALUES, width=WIDTH, marks={IDS[mark]: mark for mark in ".,-"}
)
ROWS = [
    ["a", "1", "2", "3", "b", "4", ".", "5", "a", None, "7"],
    ["-", "1", ",", "2", "3", "4", ".", "0", "5", "a", "0"],
    ["12", "345", "a", "345", ",", "12", "7", "b", "12", ".", "345"],
    ["a", "b", "0", "0", "7", "a", "9", None, "9", "a", "."],
]
NUMBERS, DIGIT_TOKENS = 11, 25
TERMS = [NumberLevel(), EarthMoverPlace(noise=0.0), DigitEntropy()]
JOINED = TERMS[:2]


def labels_of(rows):
    return torch.tensor([[-100 if text is None else IDS[text] for text in row] for row in rows])


def random_logits(labels, seed=0, scale=1.0, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*labels.shape, width, dtype=torch.float64, generator=generator)


def statistics_of(logits, labels, vocabulary=VOCABULARY, quantities=None):
    return token_statistics(
        logits,
        labels,
        torch.tensor(vocabulary.token_ids),
        vocabulary.value_table(),
        forms=vocabulary.forms_table(),
        quantities=quantities,
    )


def values_of(term, logits, labels, vocabulary=VOCABULARY, quantities=None):
    """The term's value at every cell; 0 where there is no label."""
    statistics = statistics_of(logits, labels, vocabulary, quantities)
    found = term.per_position(statistics)
    cells = found.new_zeros(labels.numel()).index_copy(0, statistics.rows, found)
    return cells.view(labels.shape)


def formulas(term, tokens, fixed=None):
    """Position -> function of {position: K scores}, for every value that a row of texts has.

    Args:
        term: The term.
        tokens: A row of texts.
        fixed: The scores that NTIL takes its hard digits from, if not those it is called with.
    """
    values = list(VALUES.values())
    y = {i: float(text) for i, text in enumerate(tokens) if text is not None and text.isdigit()}
    found = {}
    for digits in oracle.written_numbers(tokens):
        first = digits[0][0]
        if isinstance(term, NumberLevel):
            found[first] = lambda z, d=digits: oracle.number_level(z, d, y, values)
        elif isinstance(term, EarthMoverPlace):
            found[first] = lambda z, d=digits: oracle.earth_mover_place(
                fixed or z, d, y, values, at=z
            )
        else:
            for i, place in digits:
                found[i] = lambda z, i=i, p=place: oracle.digit_entropy(z[i], p, y[i], values)
    return found


def scores_of(row):
    """(T, V) -> position -> K scores."""
    return {i: [scores[k] for k in VALUES] for i, scores in enumerate(row.tolist())}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("seed", range(3))
def test_values_equal_the_formula_at_every_written_number(term, seed):
    labels = labels_of(ROWS)
    logits = random_logits(labels, seed, scale=2.0)
    want = torch.zeros(labels.shape, dtype=torch.float64)
    for r, tokens in enumerate(ROWS):
        for i, formula in formulas(term, tokens).items():
            want[r, i] = formula(scores_of(logits[r]))
    assert (want > 0).sum() == (NUMBERS if term.joins_positions else DIGIT_TOKENS)
    torch.testing.assert_close(values_of(term, logits, labels), want, rtol=1e-9, atol=1e-12)
    in_float32 = values_of(term, logits.float(), labels)
    assert in_float32.dtype == torch.float32
    torch.testing.assert_close(in_float32.double(), want, rtol=1e-5, atol=1e-7)


def slopes(term, logits):
    """Derivatives of the sum of the term's values, by differences of the formula."""
    want = torch.zeros_like(logits)
    for r, tokens in enumerate(ROWS):
        scores = scores_of(logits[r])
        found = formulas(term, tokens, fixed=scores)
        for digits in oracle.written_numbers(tokens):
            for i, _ in digits:
                formula = found[digits[0][0] if term.joins_positions else i]
                for column, token in enumerate(VALUES):
                    want[r, i, token] = oracle.derivative(formula, i, column)(scores)
    return want


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("seed", range(2))
def test_gradients_equal_those_of_the_formula(term, seed):
    labels = labels_of(ROWS)
    logits = random_logits(labels, seed).requires_grad_()
    want = slopes(term, logits.detach())
    values_of(term, logits, labels).sum().backward()
    torch.testing.assert_close(logits.grad, want, rtol=1e-5, atol=1e-7)
    assert (want.abs().amax((0, 1)) > 0).tolist() == [i in VALUES for i in range(WIDTH)]

    single = logits.detach().float().requires_grad_()
    values_of(term, single, labels).sum().backward()
    torch.testing.assert_close(single.grad.double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "term",
    [NumberLevel(), DigitEntropy(), EarthMoverPlace(relative_weight=0.0, magnitude_weight=0.0)],
)
def test_gradcheck(term):
    labels = labels_of(
        [["-", "1", ",", "12", "7", ".", "5"], ["a", "9", "b", "0", "345", None, "2"]]
    )
    logits = random_logits(labels, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: values_of(term, z, labels), (logits,))


@pytest.mark.parametrize("term", TERMS)
def test_the_average_is_over_numbers_in_all_rows(term):
    labels = labels_of(ROWS)
    logits = random_logits(labels, 1)
    result = Objective([term], VOCABULARY)(logits, labels)
    assert term.averaged_over == ("whole_numbers" if term.joins_positions else "numbers")
    assert result.counts[term.averaged_over] == (NUMBERS if term.joins_positions else DIGIT_TOKENS)
    total = values_of(term, logits, labels).sum() / result.counts[term.averaged_over]
    assert result.parts[term.name].item() == pytest.approx(total.item(), rel=1e-9)
    assert result.loss.item() == pytest.approx(term.weight * total.item(), rel=1e-9)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("rows", [[["a", "b", None]], [[None, None]], [["a", "."]]])
def test_without_a_number_there_is_an_attached_zero(term, rows):
    labels = labels_of(rows)
    logits = random_logits(labels).requires_grad_()
    result = Objective([term], VOCABULARY)(logits, labels)
    assert result.loss.item() == 0
    result.loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("term", TERMS)
def test_an_empty_batch_is_an_attached_zero(term):
    logits = torch.zeros(0, 5, WIDTH, requires_grad=True)
    result = Objective([term], VOCABULARY)(logits, torch.zeros(0, 5, dtype=torch.long))
    assert result.loss.item() == 0
    result.loss.backward()


@pytest.mark.parametrize("term", TERMS)
def test_positions_left_out_and_stand_ins_change_no_number(term):
    labels = labels_of(ROWS)
    answers = []
    for view in ("all", "numbers", "stand-ins"):
        logits = random_logits(labels, 4).requires_grad_()
        statistics = statistics_of(logits, labels)
        seen = {
            "all": lambda s: s,
            "numbers": lambda s: s.at(s.is_number.nonzero().squeeze(-1)),
            "stand-ins": lambda s: s.with_stand_ins(),
        }[view](statistics)
        found = term.per_position(seen)
        assert found.shape == seen.label_ids.shape
        found = torch.where(seen.is_number, found, 0.0)
        cells = found.new_zeros(labels.numel()).index_copy(0, seen.rows, found)
        cells.square().sum().backward()
        answers.append((cells.detach(), logits.grad))
    assert (answers[0][0] > 0).any()
    for values, gradient in answers[1:]:
        torch.testing.assert_close(values, answers[0][0], rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, answers[0][1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("term", [*TERMS, EarthMoverPlace()])
def test_traces_without_a_graph_break(term):
    labels = labels_of(ROWS)
    statistics = statistics_of(random_logits(labels), labels)

    def evaluate(number_logits):
        return term.per_position(replace(statistics, number_logits=number_logits))

    compiled = torch.compile(evaluate, fullgraph=True, backend="eager")
    torch.manual_seed(0)
    want = evaluate(statistics.number_logits)
    torch.manual_seed(0)
    assert torch.equal(compiled(statistics.number_logits), want)


def spell(text):
    """A row of one-character tokens."""
    return labels_of([list(text)])


def sure(labels, said, strength=math.inf):
    """All mass on the characters that are said, row by row."""
    logits = torch.full((*labels.shape, WIDTH), -strength)
    for r, row in enumerate(said):
        for i, character in enumerate(row):
            logits[r, i, IDS[character]] = 0.0
    return logits


def cost(term, truth, said, dtype=torch.float32):
    """What saying one number costs where the label is another, written alike."""
    assert len(truth) == len(said)
    labels = spell(truth)
    return values_of(term, sure(labels, [said]).to(dtype), labels).sum().item()


@pytest.mark.parametrize(
    ("truth", "said", "loss"),
    [
        ("5", "5", 0.0),
        ("5", "4", 1 / 10),
        ("120", "130", 10 / 251),
        ("1.20", "1.30", 0.1 / 2.51),
        ("1,200", "1,300", 100 / 2501),
        ("-12", "-18", 6 / 31),
        ("0", "3", 3 / 4),
        ("100", "099", 1 / 200),
        ("0.05", "0.00", 5 / 6),
        (".5", ".4", 0.1 / 1.0),
    ],
)
def test_number_level_is_the_relative_error_in_units_of_the_last_place(truth, said, loss):
    assert cost(NumberLevel(), truth, said) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("truth", "said", "loss"),
    [
        ("5", "5", 0.0),
        ("5", "4", 1 + 0.2 * 1 / 6 + 0.2 * math.log(6 / 5)),
        ("120", "130", 1.2 / 3 + 0.2 * 10 / 131 + 0.2 * math.log(131 / 121)),
        ("1.2", "1.3", 1 / 1.2 / 2 + 0.2 * 0.1 / 2.3 + 0.2 * math.log(2.3 / 2.2)),
        ("1,200", "1,300", 1.44 / 4 + 0.2 * 100 / 1301 + 0.2 * math.log(1301 / 1201)),
        ("-12", "-18", 3.0 + 0.2 * 6 / 19 + 0.2 * math.log(19 / 13)),
        ("0", "3", 3 + 0.2 * 3 / 4 + 0.2 * math.log(4)),
        (".5", ".4", 1 / 1.2 + 0.2 * 0.1 / 1.5 + 0.2 * math.log(1.5 / 1.4)),
    ],
)
def test_earth_mover_place_adds_its_three_parts(truth, said, loss):
    assert cost(EarthMoverPlace(noise=0.0), truth, said) == pytest.approx(loss, rel=1e-5)


def test_digit_entropy_weighs_each_digit_by_its_place():
    labels = spell("1,234.56")
    found = values_of(DigitEntropy(), torch.zeros(1, 8, WIDTH), labels)[0]
    one = math.log(2) / len(VALUES)
    weights = [8, 0, 6, 4, 2, 0, 1.02**-2, 1.02**-3]
    assert found.tolist() == pytest.approx([one * w for w in weights], rel=1e-5)


@st.composite
def texts_written_alike(draw, count):
    """Numbers with the decimal point at the same place."""
    form = draw(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})?", fullmatch=True))
    digits = st.sampled_from("0123456789")
    return ["".join(c if c == "." else draw(digits) for c in form) for _ in range(count)]


@given(texts_written_alike(3))
@settings(max_examples=60)
def test_number_level_is_below_1_and_0_where_right_and_grows_with_the_distance(texts):
    truth, one, _ = texts
    near, far = (cost(NumberLevel(), truth, said, torch.float64) for said in texts[1:])
    assert 0 <= near < 1
    assert (near == 0) == (float(one) == float(truth))
    y, a, b = (float(text) for text in texts)
    if (a - y) * (b - y) > 0 and abs(a - y) * 1.001 < abs(b - y):
        assert near < far


@given(texts_written_alike(3))
@settings(max_examples=60)
def test_earth_mover_place_is_0_where_right_and_its_parts_grow_with_the_distance(texts):
    truth, one, _ = texts
    assert (cost(EarthMoverPlace(noise=0.0), truth, one) == 0) == (one == truth)
    y, a, b = (float(text) for text in texts)
    for key in ("relative_weight", "magnitude_weight"):
        off = dict.fromkeys(("distance_weight", "relative_weight", "magnitude_weight"), 0.0)
        part = EarthMoverPlace(noise=0.0, **{**off, key: 1.0})
        near, far = (cost(part, truth, said, torch.float64) for said in texts[1:])
        assert (near == 0) == (a == y)
        if (a - y) * (b - y) > 0 and abs(a - y) * 1.001 < abs(b - y):
            assert near < far


def test_number_level_does_not_see_two_errors_that_cancel():
    labels = spell("5")
    both_sides = sure(labels, ["4"])
    both_sides[0, 0, IDS["6"]] = 0.0
    assert values_of(NumberLevel(), both_sides, labels).sum() == pytest.approx(0, abs=1e-7)
    assert values_of(EarthMoverPlace(), both_sides, labels).sum() > 1


def test_digit_entropy_goes_to_0_for_a_sure_digit_and_also_for_a_wrong_one_far_below_0():
    labels = spell("4")
    right, wrong = torch.zeros(1, 1, WIDTH), torch.full((1, 1, WIDTH), -90.0)
    right[..., IDS["4"]] = 40.0
    wrong[..., IDS["9"]] = -40.0
    assert 0 < values_of(DigitEntropy(), right, labels).sum() < 1e-12
    assert 0 < values_of(DigitEntropy(), wrong, labels).sum() < 1e-12
    assert values_of(DigitEntropy(), wrong + 80, labels).sum() > 1


@pytest.mark.parametrize("term", JOINED)
def test_a_constant_on_all_logits_changes_nothing(term):
    labels = labels_of(ROWS)
    logits = random_logits(labels, 5)
    shifts = 30 * random_logits(labels, 6, width=1)
    torch.testing.assert_close(
        values_of(term, logits + shifts, labels), values_of(term, logits, labels), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("term", TERMS)
@given(order=st.permutations(range(WIDTH)), seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_renaming_token_ids_changes_nothing(term, order, seed):
    labels = labels_of(ROWS)
    logits = random_logits(labels, seed)
    new_id = {old: new for new, old in enumerate(order)}
    renamed = NumberVocabulary.from_values(
        {new_id[i]: value for i, value in VALUES.items()},
        width=WIDTH,
        marks={new_id[IDS[mark]]: mark for mark in ".,-"},
    )
    new_labels = torch.tensor([[new_id.get(i, -100) for i in row] for row in labels.tolist()])
    torch.testing.assert_close(
        values_of(term, logits[..., list(order)], new_labels, renamed),
        values_of(term, logits, labels),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["7", "0" * 60, "9" * 60, "1" + "0" * 300, "0." + "0" * 50 + "3"])
def test_extreme_logits_and_long_numbers_stay_finite(term, dtype, text):
    labels = torch.cat([spell(text)] * 4)
    logits = random_logits(labels, 7).to(dtype)
    logits[1] = logits[1].sign() * 1e4
    logits[2] = -math.inf
    logits[2, :, IDS["3"]] = 0.0  # the label itself is impossible
    logits[3] = logits[3].masked_fill(logits[3] < 0, -math.inf)
    logits[3, :, [IDS["0"], IDS["1"]]] = -2e4
    logits.requires_grad_()
    values = values_of(term, logits, labels)
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    values.sum().backward()
    assert logits.grad.isfinite().all()
    assert (values.sum(-1) > 0).any()


@pytest.mark.parametrize("digits", [12, 30, 60, 300])
def test_the_leading_digits_of_a_long_number_count_in_full(digits):
    truth, said = "7" + "3" * (digits - 1), "4" + "9" * (digits - 1)
    x, y = int(said), int(truth)
    assert cost(NumberLevel(), truth, said) == pytest.approx((y - x) / (x + y + 1), rel=1e-6)
    whole = EarthMoverPlace(noise=0.0, distance_weight=0.0, relative_weight=1.0)
    want = (y - x) / (y + 1) + 0.2 * math.log((y + 1) / (x + 1))
    assert cost(whole, truth, said) == pytest.approx(want, rel=1e-5)


def largest_slope(truth, seed, scale, vocabulary, ids):
    labels = torch.tensor([[ids[c] for c in truth]])
    logits = random_logits(labels, seed, scale, vocabulary.width).float().requires_grad_()
    values_of(NumberLevel(), logits, labels, vocabulary).sum().backward()
    return logits.grad.abs().max().item()


@given(
    st.from_regex(r"[0-9]{1,40}(\.[0-9]{1,10})?", fullmatch=True),
    st.integers(0, 2**31),
    st.sampled_from([0.1, 1.0, 3.0, 10.0]),
)
def test_the_gradient_of_number_level_is_at_most_a_half(truth, seed, scale):
    assert largest_slope(truth, seed, scale, VOCABULARY, IDS) <= 0.5 + 1e-6


def test_the_gradient_of_number_level_comes_close_to_a_half():
    labels = spell("1" + "0" * 8)
    logits = sure(labels, ["0" * 9], strength=60.0)
    logits[0, 0, IDS["9"]] = -math.log(8)  # the mean is the label: 9 with 1/9
    logits[0, 1, IDS["1"]] = -8.0  # but for a little
    logits.requires_grad_()
    values_of(NumberLevel(), logits, labels).sum().backward()
    assert 0.4 < logits.grad.abs().max() < 0.5


SIGNED_IDS = {c: i for i, c in enumerate("0123456789.")}
SIGNED = NumberVocabulary.from_values(
    {**{i: float(i) for i in range(10)}, 11: -999.0, 12: -3.0, 13: 0.5, 14: 999.0},
    width=16,
    marks={10: "."},
)


@given(
    st.from_regex(r"[0-9]{1,20}(\.[0-9]{1,5})?", fullmatch=True),
    st.integers(0, 2**31),
    st.sampled_from([0.1, 1.0, 3.0, 10.0]),
)
def test_number_tokens_with_a_sign_keep_the_gradient_of_number_level_below_2(truth, seed, scale):
    assert largest_slope(truth, seed, scale, SIGNED, SIGNED_IDS) <= 2


@pytest.mark.parametrize("term", [NumberLevel(), EarthMoverPlace(noise=0.0)])
def test_a_token_with_a_sign_of_its_own_is_a_number_by_itself(term):
    labels = torch.tensor([[12, -100, 13]])  # -3 and 0.5

    def said(*ids):
        logits = torch.full((1, 3, 16), -math.inf)
        logits[0, [0, 1, 2], list(ids)] = 0.0
        return values_of(term, logits, labels, SIGNED)[0].tolist()

    assert said(12, 0, 13) == [0.0, 0.0, 0.0]
    plus_three, _, nothing = said(3, 0, 0)
    minus_one_off, *_ = said(11, 0, 13)
    if isinstance(term, NumberLevel):
        assert plus_three == pytest.approx(6 / 7)
        assert nothing == pytest.approx(0.5 / 1.5)
        assert minus_one_off == pytest.approx(996 / 1003)
    else:
        assert plus_three == pytest.approx(6 + 0.2 * 6 / 4 + 0.2 * math.log(1 + 6 / 4))
        assert nothing == pytest.approx(0.5 + 0.2 * 0.5 / 1.5 + 0.2 * math.log(1.5))


@pytest.mark.parametrize("term", TERMS)
def test_a_number_with_a_digit_that_is_no_quantity_is_passed_over(term):
    labels = spell("123a45.6")
    quantities = torch.ones_like(labels, dtype=torch.bool)
    logits = random_logits(labels)
    whole = values_of(term, logits, labels)
    quantities[0, 1] = False
    rest = values_of(term, logits, labels, quantities=quantities)
    assert (rest[0, :3] == 0).all()
    assert torch.equal(rest[0, 3:], whole[0, 3:])
    assert (whole[0, [0, 4]] > 0).all()


@pytest.mark.parametrize("term", TERMS)
def test_marks_and_signs_only_say_where_the_digits_stand(term):
    plain, marked = spell("1234567.8"), spell("-1,234,567.8")
    digits = [i for i, c in enumerate("-1,234,567.8") if c not in "-,"]
    logits = random_logits(marked, 8)
    found = values_of(term, logits, marked)[0, digits]
    torch.testing.assert_close(found, values_of(term, logits[:, digits], plain)[0])


@pytest.mark.parametrize("term", TERMS)
def test_numbers_in_one_row_and_in_other_rows_do_not_mix(term):
    labels = labels_of(ROWS)
    logits = random_logits(labels, 9)
    together = values_of(term, logits, labels)
    for r, row in enumerate(ROWS):
        alone = values_of(term, logits[r : r + 1], labels[r : r + 1])[0]
        torch.testing.assert_close(alone, together[r], rtol=1e-12, atol=0)
        for digits in oracle.written_numbers(row):
            cut = slice(digits[0][0], digits[-1][0] + 1)
            part = values_of(term, logits[r : r + 1, cut], labels[r : r + 1, cut])[0]
            torch.testing.assert_close(part, together[r, cut], rtol=1e-12, atol=0)


def test_all_tokens_of_the_labels_value_are_right_for_digit_entropy():
    values = {i: float(i) for i in range(10)} | {10: 5.0}
    doubled = NumberVocabulary.from_values(values, width=11)
    logits = torch.full((1, 1, 11), -math.inf)
    logits[..., [5, 10]] = 3.0
    found = values_of(DigitEntropy(), logits, torch.tensor([[5]]), doubled).sum()
    assert found.item() == pytest.approx(2 / 11 * math.log1p(math.exp(-3.0)), rel=1e-5)


def test_the_noise_is_gumbel_noise():
    """With noise 1 the likeliest digit is drawn from the softmax."""
    labels = torch.full((1, 8000), IDS["0"])
    labels[:, 1::2] = IDS["a"]
    logits = torch.full((1, 8000, WIDTH), -math.inf)
    logits[..., IDS["0"] : IDS["9"]] = 0.0
    logits[..., IDS["9"]] = math.log(9)
    term = EarthMoverPlace(
        noise=1.0, distance_weight=0.0, relative_weight=1.0, magnitude_weight=0.0
    )
    torch.manual_seed(0)
    found = values_of(term, logits, labels).sum() / 4000
    want = 0.5 * 9 / 10 + 0.5 * sum(x / (x + 1) for x in range(9)) / 9
    assert found.item() == pytest.approx(want, abs=0.01)


def test_the_noise_comes_from_the_global_generator_and_can_be_switched_off():
    labels = labels_of(ROWS)

    def gradient(term, seed):
        logits = random_logits(labels, 2, scale=0.1).requires_grad_()
        torch.manual_seed(seed)
        values_of(term, logits, labels).sum().backward()
        return logits.grad

    noisy, quiet = EarthMoverPlace(), EarthMoverPlace(noise=0.0)
    assert torch.equal(gradient(noisy, 0), gradient(noisy, 0))
    assert not torch.equal(gradient(noisy, 0), gradient(noisy, 1))
    assert torch.equal(gradient(quiet, 0), gradient(quiet, 1))


class TinyTokenizer:
    """What ntloss asks of a tokenizer."""

    def get_vocab(self):
        return {text: i for i, text in enumerate(DIGIT_TEXTS)}

    def add_tokens(self, tokens):
        return 0

    def convert_tokens_to_ids(self, token):
        return self.get_vocab()[token]

    def __len__(self):
        return len(DIGIT_TEXTS)


DIGIT_TEXTS = ["<pad>", "a", *"0123456789", "."]
DIGIT_IDS = {text: i for i, text in enumerate(DIGIT_TEXTS)}
DIGITS = NumberVocabulary.from_values(
    {i: float(text) for i, text in enumerate(DIGIT_TEXTS) if text.isdigit()},
    width=len(DIGIT_TEXTS),
    marks={DIGIT_IDS["."]: "."},
)


def number_level_both(texts, seed, float_level=False, scale=1.0, logits=None):
    """Ours, that of ntloss, and x + y in units of the last place, at the first digits."""
    import ntloss

    labels = torch.tensor([[DIGIT_IDS[c] for c in text] for text in texts])
    if logits is None:
        logits = random_logits(labels, seed, scale, len(DIGIT_TEXTS))
    theirs = ntloss.NumberLevelLoss(TinyTokenizer(), float_level=float_level, reweigh=False)
    q = torch.softmax(logits[..., 2:12], -1)
    sums = []
    for r, text in enumerate(texts):
        for digits in oracle.written_numbers(list(text)):
            unit = digits[-1][1]
            x_and_y = [
                (float((q[r, i] * torch.arange(10)).sum()) + int(text[i])) * 10 ** (place - unit)
                for i, place in digits
            ]
            sums.append(math.fsum(x_and_y))
    ours = values_of(NumberLevel(), logits.float(), labels, DIGITS)
    theirs = theirs(logits.float(), labels, reduction="none")
    return ours[ours > 0], theirs[ours > 0], torch.tensor(sums)


@pytest.mark.parametrize("seed", range(3))
def test_integers_cost_what_they_do_in_ntloss_but_for_the_unit(seed):
    texts = ["12a345a7", "9876543a", "a1a22a33", "10000001"]
    ours, theirs, size = number_level_both(texts, seed)
    assert len(ours) == 8
    torch.testing.assert_close(ours, theirs * size / (size + 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_large_integers_cost_the_same_as_in_ntloss(seed):
    texts = ["1234567890123a", "a9876543210000"]
    ours, theirs, _ = number_level_both(texts, seed)
    assert len(ours) == 2
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_decimals_cost_what_they_do_in_ntloss_at_the_float_level_but_for_the_unit(seed):
    texts = ["12.34a5.6", "a0.001a10"]
    ours, theirs, size = number_level_both(texts, seed, float_level=True)
    assert len(ours) == 4
    torch.testing.assert_close(ours, theirs * size / (size + 1), rtol=1e-5, atol=1e-6)


def test_a_label_of_zero_has_a_gradient_here_and_next_to_none_in_ntloss():
    import ntloss

    labels = torch.tensor([[DIGIT_IDS["0"]]])
    gradients = []
    theirs = ntloss.NumberLevelLoss(TinyTokenizer(), reweigh=False)
    for loss in (
        lambda z: values_of(NumberLevel(), z, labels, DIGITS).sum(),
        lambda z: theirs(z, labels),
    ):
        logits = torch.zeros(1, 1, len(DIGIT_TEXTS), requires_grad=True)
        loss(logits).backward()
        gradients.append(logits.grad.abs().max().item())
    assert gradients[0] > 0.01
    assert gradients[1] < 1e-6


def test_ntloss_reads_some_numbers_otherwise():
    """As the documentation of `NumberLevel` says: 1.2.3, and numbers of more than 20 digits."""
    sure_zero = torch.zeros(1, 5, len(DIGIT_TEXTS))
    ours, theirs, _ = number_level_both(["1.2.3"], 0, float_level=True)
    assert len(ours) == 0
    labels = torch.tensor([[DIGIT_IDS[c] for c in "1.2.3"]])
    import ntloss

    loss = ntloss.NumberLevelLoss(TinyTokenizer(), float_level=True, reweigh=False)
    assert loss(sure_zero, labels) > 0
    ours, theirs, _ = number_level_both(["1" + "0" * 24], 0)
    assert abs(ours - theirs) > 0.05


@pytest.mark.parametrize("term", [*TERMS, EarthMoverPlace(noise=0.0, distance_weight=0.5)])
def test_from_hidden_states_the_value_and_the_gradient_are_the_same(term):
    labels = labels_of(ROWS)
    assert_hidden_states_give_what_logits_give(term, VOCABULARY, labels, rows_per_chunk=7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "EarthMoverPlace.temperature must be a positive number, got 0.0"),
        ({"place_base": -1.2}, "EarthMoverPlace.place_base must be a positive number, got -1.2"),
        ({"noise": -0.1}, "EarthMoverPlace.noise must be 0 or more, got -0.1"),
        ({"relative_weight": math.nan}, "EarthMoverPlace.relative_weight must be 0 or more"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        EarthMoverPlace(**settings)


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (NumberLevel(), "number_level"),
        (EarthMoverPlace(), "ntil"),
        (DigitEntropy(), "digit_entropy"),
    ],
)
def test_the_log_name_says_which_loss_it_is(term, name):
    assert term.name == name
