"""Ours against the package itself, and against hand-computed values where the package is wrong."""

from fractions import Fraction
from functools import cache, partial

import ntloss as package
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger
from tokenizers import Tokenizer, decoders, models
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from ntl_lightning.integrations import ntloss as ours
from tests.integrations.tiny import DIGITS, WORDS, tiny_tokenizer

logger.remove()

NUMBERS = ["-7", "0.5", "12", "345", "007", "+3", ".25", "9.", "999"]
WIDTH = len(WORDS) + len(DIGITS)
WIDTH_WITH_NUMBERS = WIDTH + len(NUMBERS)
POINT = WORDS.index(".")


def digit(value):
    return len(WORDS) + value


def double_huber(predicted, true, reduction="mean"):
    """Huber's loss with another delta; the package's float32 targets do not go with float64."""
    return functional.huber_loss(predicted, true.to(predicted), reduction=reduction, delta=0.7)


def lopsided(predicted, true, reduction="mean"):
    """Too much costs three times as much as too little."""
    error = predicted - true
    loss = torch.where(error > 0, 3 * error, -error)
    return loss if reduction == "none" else loss.mean()


def lopsided_the_other_way(predicted, true, reduction="mean"):
    return lopsided(true, predicted, reduction)


OPTIONS = {
    "WAS": ("NTLoss", {}),
    "WAS, numbers of any length": ("NTLoss", {"digit_level": False}),
    "WAS squashed": ("NTLoss", {"squash_factor": 2.5}),
    "WAS squashed, numbers of any length": (
        "NTLoss",
        # The package keeps its distances in float32; with this factor they are exact there.
        {
            "squash_factor": 1 + 1005.75 / 64,
            "digit_level": False,
            "vocab_size": WIDTH_WITH_NUMBERS,
        },
    ),
    "MSE": ("NTLossDotProduct", {}),
    "MSE, numbers of any length": ("NTLossDotProduct", {"digit_level": False}),
    "MAE": ("NTLossDotProduct", {"loss_function": functional.l1_loss}),
    "Huber": ("NTLossDotProduct", {"loss_function": double_huber}),
    "lopsided": ("NTLossDotProduct", {"loss_function": lopsided}),
    "lopsided the other way": ("NTLossDotProduct", {"loss_function": lopsided_the_other_way}),
    "number level": ("NumberLevelLoss", {}),
    "number level, floats": ("NumberLevelLoss", {"float_level": True, "vocab_size": WIDTH}),
}


def any_length(options):
    return not options.get("digit_level", True)


@cache
def both(name, reweigh):
    """Ours and the package's, each with a tokenizer of its own."""
    cls, options = OPTIONS[name]
    words = [*WORDS, *DIGITS, *(NUMBERS if any_length(options) else [])]
    return tuple(
        getattr(module, cls)(tiny_tokenizer(words), reweigh=reweigh, **options)
        for module in (ours, package)
    )


def value_and_gradient(loss, logits, labels, direction, **arguments):
    logits = logits.clone().requires_grad_()
    value = loss(logits, labels, **arguments)
    (value * direction[: value.numel()].view(value.shape)).sum().backward()
    return value.detach(), logits.grad


@pytest.mark.parametrize("reweigh", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=20)
@given(data=st.data())
def test_values_and_gradients_are_the_packages(name, reweigh, data):
    mine, theirs = both(name, reweigh)
    width = WIDTH_WITH_NUMBERS if any_length(OPTIONS[name][1]) else WIDTH
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    # More digits and points than chance has, so that there are long numbers.
    token = st.one_of(st.integers(digit(0), width - 1), st.integers(0, width - 1), st.just(POINT))
    ignored = data.draw(st.sampled_from([-100, 0, digit(3)]))
    labels = data.draw(st.lists(st.one_of(token, st.just(ignored)), min_size=rows * length,
                                max_size=rows * length))  # fmt: skip
    labels = torch.tensor(labels).view(rows, length)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    random = partial(torch.rand, generator=generator, dtype=torch.float64)
    scale = data.draw(st.sampled_from([0.1, 3.0, 20.0]))
    logits = (random(rows, length, width) - 0.5) * 2 * scale
    weights = None
    if data.draw(st.booleans()):
        weights = random(rows, length) * (random(rows, length) > 0.3)
    arguments = {
        "loss_weights": weights,
        "reduction": data.draw(st.sampled_from(["mean", "sum", "none"])),
        "ignore_index": ignored,
    }
    numbers = torch.isin(labels, torch.tensor(mine.vocabulary.token_ids)) & (labels != ignored)
    anything = numbers.any() if weights is None else weights[numbers].any()
    direction = random(rows * length)
    value, gradient = value_and_gradient(mine, logits, labels, direction, **arguments)
    if not anything:
        assert not value.any()
        assert not gradient.any()
        return
    if isinstance(mine, ours.NumberLevelLoss) and not theirs(logits, labels, **arguments).any():
        # The weights of the numbers' first digits are all 0; the package's 0 has no graph either.
        assert not value.any()
        return
    expected, expected_gradient = value_and_gradient(theirs, logits, labels, direction, **arguments)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
    size = expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6 * size + 1e-12)


@pytest.mark.parametrize("reweigh", [True, False])
@pytest.mark.parametrize("function", [functional.huber_loss, functional.smooth_l1_loss])
def test_the_huber_losses_of_torch_are_the_packages_in_float32(function, reweigh):
    """In float64 the package's backward raises."""
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(2, 9, WIDTH), torch.randint(0, WIDTH, (2, 9))
    direction = torch.ones(18)
    found, expected = (
        value_and_gradient(
            module.NTLossDotProduct(tiny_tokenizer(), reweigh=reweigh, loss_function=function),
            logits,
            labels,
            direction,
        )
        for module in (ours, package)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["MSE", "MSE, numbers of any length"])
def test_predicted_numbers_and_their_mass_are_the_packages(name):
    mine, theirs = both(name, True)
    width = WIDTH_WITH_NUMBERS if any_length(OPTIONS[name][1]) else WIDTH
    logits = 3 * torch.randn(2, 5, width, dtype=torch.float64)
    for found, expected in zip(
        mine.predict_numbers(logits), theirs.predict_numbers(logits), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_the_defaults_reweigh_as_those_of_the_package_do():
    logits, labels = torch.zeros(1, 1, WIDTH), torch.tensor([[digit(4)]])
    tokenizer = tiny_tokenizer()
    assert ours.NTLoss(tokenizer)(logits, labels).item() == pytest.approx(5.795)
    assert ours.NTLossDotProduct(tokenizer)(logits, labels).item() == pytest.approx(41.03)
    assert ours.NTLoss(tokenizer, reweigh=False)(logits, labels).item() == pytest.approx(2.5)
    loss = ours.NTLossDotProduct(tokenizer, reweigh=False)
    assert loss(logits, labels).item() == pytest.approx(0.25)
    assert loss.forward(logits, labels) == loss(logits, labels)


# Where the package is wrong


LOSSES = ["NTLoss", "NTLossDotProduct", "NumberLevelLoss"]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("cls", LOSSES)
def test_without_a_number_the_loss_is_zero_and_connected_to_the_graph(cls, reduction):
    labels = torch.tensor([[3, 4, -100]])
    logits = torch.randn(1, 3, WIDTH, requires_grad=True)
    assert not getattr(package, cls)(tiny_tokenizer())(logits, labels).requires_grad
    loss = getattr(ours, cls)(tiny_tokenizer())(logits, labels, reduction=reduction)
    assert loss.shape == ((1, 3) if reduction == "none" else ())
    assert not loss.any()
    loss.sum().backward()
    assert not logits.grad.any()


@pytest.mark.parametrize("cls", LOSSES)
def test_weights_of_zero_give_zero_connected_to_the_graph(cls):
    labels, weights = torch.tensor([[digit(3), 4]]), torch.tensor([[0.0, 1.0]])
    logits = torch.randn(1, 2, WIDTH, requires_grad=True)
    loss = getattr(ours, cls)(tiny_tokenizer())(logits, labels, loss_weights=weights)
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_the_tokenizer_stays_as_it_is(real_tokenizer_folder, name):
    from transformers import AutoTokenizer

    def reading(tokenizer):
        ids = tokenizer("The answer is 1234.5").input_ids
        return ids, tokenizer.decode(ids), tokenizer.get_added_vocab()

    tokenizer = AutoTokenizer.from_pretrained(real_tokenizer_folder(name))
    before = reading(tokenizer)
    loss = ours.NTLoss(tokenizer)
    assert loss.tokenizer is tokenizer
    assert reading(tokenizer) == before
    package.NTLoss(tokenizer)
    assert reading(tokenizer) != before


def test_a_digit_with_a_space_mark_is_a_number():
    words = [*WORDS, *DIGITS, *(f"▁{digit}" for digit in DIGITS)]
    logits, labels = torch.zeros(1, 1, len(words)), torch.tensor([[words.index("▁4")]])
    arguments = tiny_tokenizer(words), None, True, False
    assert package.NTLoss(*arguments)(logits, labels) == 0
    assert ours.NTLoss(*arguments)(logits, labels).item() == pytest.approx(2.5)


def test_a_digit_with_a_space_mark_begins_a_number():
    words = [*WORDS, *DIGITS, *(f"▁{digit}" for digit in DIGITS)]
    loss = ours.NumberLevelLoss(tiny_tokenizer(words), reweigh=False)
    answers = torch.tensor([[words.index("1"), words.index("▁2"), words.index("3")]])
    labels = torch.tensor([[words.index("2"), words.index("▁2"), words.index("7")]])
    logits = torch.full((1, 3, len(words)), -60.0).scatter(-1, answers.unsqueeze(-1), 60.0)
    found = loss(logits, labels, reduction="none")
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 4 / 50, 0.0]]))


@pytest.mark.parametrize("between", [-100, "▁.", "a"])
def test_only_a_bare_point_joins_digits(between):
    # The point has id 0: what has no label must not be taken for it.
    words = [".", "▁.", *WORDS[:8], *DIGITS]
    if isinstance(between, str):
        between = words.index(between)
    loss = ours.NumberLevelLoss(tiny_tokenizer(words), float_level=True, reweigh=False)
    logits, one = torch.zeros(1, 3, len(words)), words.index("1")
    joined = loss(logits, torch.tensor([[one, 0, one]]), reduction="none")
    apart = loss(logits, torch.tensor([[one, between, one]]), reduction="none")
    assert joined.count_nonzero() == 1
    assert apart.count_nonzero() == 2


def test_logits_may_be_wider_than_the_tokenizer():
    logits = torch.zeros(1, 1, WIDTH + 28)
    logits[..., digit(4)] = 1.0
    logits[..., WIDTH:] = 100.0
    labels = torch.tensor([[digit(4)]])
    loss = ours.NTLoss(tiny_tokenizer(), reweigh=False)
    assert loss(logits, labels).item() == pytest.approx(2.133419, abs=1e-6)
    # The width may also change from call to call.
    assert loss(logits[..., :WIDTH], labels).item() == pytest.approx(2.133419, abs=1e-6)
    with pytest.raises(ValueError, match="vocab"):
        package.NTLoss(tiny_tokenizer(), reweigh=False)(logits, labels)


@pytest.mark.parametrize(
    ("cls", "label", "answer", "right", "packages"),
    [
        ("NTLoss", 257, 257, 0.0, 0.0),
        ("NTLossDotProduct", 257, 257, 0.0, 1.0),
        ("NTLoss", 1, 258, 257.0, 256.0),
        ("NTLossDotProduct", 1, 258, 66049.0, 66049.0),
    ],
)
def test_bfloat16_logits_leave_the_values_exact(cls, label, answer, right, packages):
    words = [*WORDS, *map(str, range(1000))]
    logits = torch.full((1, 1, len(words)), -30.0, dtype=torch.bfloat16)
    logits[..., len(WORDS) + answer] = 30.0
    labels = torch.tensor([[len(WORDS) + label]])
    arguments = tiny_tokenizer(words), None, False, False
    found = getattr(ours, cls)(*arguments)(logits, labels)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(right, abs=1e-12)
    theirs = getattr(package, cls)(*arguments)(logits, labels)
    assert theirs.item() == pytest.approx(packages, abs=1e-12)


def test_a_vocabulary_of_digits_alone_is_allowed():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def digits_alone():
        vocabulary = {word: i for i, word in enumerate(DIGITS)}
        backend = Tokenizer(models.WordLevel(vocabulary))
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    logits, labels = torch.zeros(1, 2, 10), torch.tensor([[3, -100]])
    assert ours.NTLoss(digits_alone())(logits, labels).item() == pytest.approx(2.7)
    with pytest.raises(ValueError, match="not a number"):
        package.NTLoss(digits_alone())


def test_only_ascii_numbers_are_numbers():
    odd = ["inf", "nan", "-inf", "Infinity", "1e400", "1_000", "٣", "３", "1e5", "²", "Ⅷ"]
    words = [*WORDS, *DIGITS, *odd]
    logits, labels = torch.zeros(1, 1, len(words)), torch.tensor([[digit(4)]])
    arguments = tiny_tokenizer(words), None, False, False
    assert ours.NTLoss(*arguments)(logits, labels).item() == pytest.approx(2.5)
    assert package.NTLoss(*arguments)(logits, labels).item() > 1000


def test_values_that_swamp_every_other_loss_are_told_of():
    words = [*WORDS, *DIGITS, "1500000000000000"]
    with pytest.warns(UserWarning, match="unbounded"):
        ours.NTLoss(tiny_tokenizer(words), digit_level=False)


def test_squashing_a_single_distance_and_squashing_by_one_are_finite():
    words = [*WORDS, "1", "2"]
    logits, labels = torch.zeros(1, 1, len(words)), torch.tensor([[words.index("1")]])
    arguments = tiny_tokenizer(words), None, False, False
    assert package.NTLoss(*arguments, squash_factor=3.0)(logits, labels).isnan()
    assert ours.NTLoss(*arguments, squash_factor=3.0)(logits, labels) == 0.5
    loss = ours.NTLoss(tiny_tokenizer(), reweigh=False, squash_factor=1.0)
    logits, labels = torch.zeros(1, 1, WIDTH), torch.tensor([[digit(4)]])
    assert loss(logits, labels).item() == pytest.approx(0.9)


@pytest.mark.parametrize("length", [21, 60, 400])
def test_numbers_of_any_length_are_exact(length):
    torch.manual_seed(0)
    logits = torch.randn(1, length, WIDTH, dtype=torch.float64)
    digits = torch.randint(0, 10, (length,))
    labels = digits[None] + len(WORDS)
    expected = (logits[0, :, len(WORDS) :].softmax(-1) * torch.arange(10)).sum(-1).tolist()
    predicted = true = Fraction(0)
    for guess, value in zip(expected, digits.tolist(), strict=True):
        predicted, true = 10 * predicted + Fraction(guess), 10 * true + value
    right = float(abs(predicted - true) / (predicted + true))
    mine = ours.NumberLevelLoss(tiny_tokenizer(), reweigh=False)(logits, labels)
    theirs = package.NumberLevelLoss(tiny_tokenizer(), reweigh=False)(logits, labels)
    assert mine.item() == pytest.approx(right, rel=1e-6)
    assert theirs.item() != pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_zeros_cost_nothing_where_the_answer_is_sure(dtype):
    logits = torch.full((1, 60, WIDTH), -1e4, dtype=dtype)
    logits[..., digit(0)] = 1e4
    logits.requires_grad_()
    loss = ours.NumberLevelLoss(tiny_tokenizer())(logits, torch.full((1, 60), digit(0)))
    loss.backward()
    assert loss == 0
    assert logits.grad.isfinite().all()


def test_the_losses_read_what_the_docstring_says():
    """12.34 is two numbers, or with float_level the one number 1234; 1.2.3 then 123."""
    labels = torch.tensor([[digit(1), digit(2), POINT, digit(3), digit(4), 3, digit(5), POINT]])
    logits = torch.zeros(1, 8, WIDTH)

    def numbers(float_level):
        loss = ours.NumberLevelLoss(tiny_tokenizer(), float_level=float_level, reweigh=False)
        return loss(logits, labels, reduction="none")

    def error(predicted, true):
        return abs(predicted - true) / (predicted + true)

    apart = torch.tensor([[error(49.5, 12), 0, 0, error(49.5, 34), 0, 0, error(4.5, 5), 0]])
    joined = torch.tensor([[error(4999.5, 1234), 0, 0, 0, 0, 0, error(4.5, 5), 0]])
    torch.testing.assert_close(numbers(False), apart)
    torch.testing.assert_close(numbers(True), joined)


def test_wordpieces_within_a_word_are_number_tokens():
    pieces = {name: i for i, name in enumerate(["[UNK]", *DIGITS, *(f"##{d}" for d in DIGITS)])}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    labels = torch.tensor([fast("42").input_ids])
    assert fast.convert_ids_to_tokens(labels[0]) == ["4", "##2"]
    loss = ours.NTLoss(fast, reweigh=False)
    losses = loss(torch.zeros(1, 2, len(pieces)), labels, reduction="none")
    # All digits are equally likely; their mean distances from 4 and from 2.
    torch.testing.assert_close(losses, torch.tensor([[2.5, 3.1]]))


# What is refused


def test_a_tokenizer_that_lacks_a_digit_is_refused_and_left_alone():
    tokenizer = tiny_tokenizer([*WORDS, *DIGITS[:7]])
    with pytest.raises(ValueError, match="lacks 7, 8, 9; use digit_level=False"):
        ours.NTLoss(tokenizer)
    assert len(tokenizer) == len(WORDS) + 7


LOGITS, LABELS = torch.zeros(1, 2, WIDTH), torch.full((1, 2), digit(4))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((LOGITS[0], LABELS[0]), ValueError, r"logits must be \(B, T, V\) and not empty"),
        ((LOGITS[:, :0], LABELS[:, :0]), ValueError, r"not empty, got \(1, 0, 20\)"),
        ((LOGITS.long(), LABELS), TypeError, "logits must be floats, got torch.int64"),
        ((LOGITS, LABELS.int()), TypeError, "labels must be int64, got torch.int32"),
        ((LOGITS, LABELS[:, :1]), ValueError, r"labels must be \(B, T\) = \(1, 2\), got \(1, 1\)"),
        ((LOGITS, LABELS, torch.ones(2)), ValueError, r"loss_weights must be .* got \(2,\)"),
        ((LOGITS, LABELS, -torch.ones(1, 2)), ValueError, "must not be negative"),
        ((LOGITS, LABELS, None, "average"), ValueError, "one of mean, sum, none, got 'average'"),
        ((LOGITS[..., :-1], LABELS), ValueError, "19 wide, but the tokenizer has a number token"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ours.NTLoss(tiny_tokenizer())(*arguments)


def test_a_given_width_is_checked_and_must_hold_the_number_tokens():
    loss = ours.NTLossDotProduct(tiny_tokenizer(), vocab_size=WIDTH + 1)
    with pytest.raises(ValueError, match="20 wide, but vocab_size is 21; leave it out"):
        loss.predict_numbers(LOGITS)
    with pytest.raises(ValueError, match="only 15 wide"):
        ours.NTLoss(tiny_tokenizer(), vocab_size=15)


@pytest.mark.parametrize("factor", [0.5, True])
def test_a_squash_factor_below_one_is_refused(factor):
    with pytest.raises(ValueError, match="squash_factor"):
        ours.NTLoss(tiny_tokenizer(), squash_factor=factor)
