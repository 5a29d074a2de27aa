import json
import math
import re
from collections import defaultdict
from collections.abc import Hashable
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ntl_lightning.data import Mathematics
from ntl_lightning.data.mathematics import source as source_file
from ntl_lightning.data.mathematics.algebra import polynomial_text
from ntl_lightning.data.mathematics.draws import Draws
from ntl_lightning.data.mathematics.modules import EXTRAPOLATION_MODULES, TRAINING_MODULES
from ntl_lightning.data.mathematics.values import decimal_text, prime_factors, ratio
from ntl_lightning.data.sources import Example
from tests.conftest import ROOT
from tests.oracles import mathematics as oracle

TRAINING = tuple(TRAINING_MODULES)
EXTRAPOLATION = tuple(EXTRAPOLATION_MODULES)
SPLITS = ("train", "val", "interpolate", "extrapolate")
LEVELS = ("easy", "medium", "hard")
SETS = [("train", "easy"), ("train", "medium"), ("train", "hard"), ("interpolate", None)]
PAPERS_MODULES = {
    *("algebra__linear_1d", "algebra__linear_1d_composed"),
    *("algebra__linear_2d", "algebra__linear_2d_composed", "algebra__sequence_next_term"),
    *("arithmetic__add_or_sub", "arithmetic__add_sub_multiple", "arithmetic__mul"),
    *("numbers__div_remainder", "numbers__div_remainder_composed", "numbers__place_value"),
    *("numbers__round_number", "numbers__round_number_composed"),
}
PAPERS_EXTRAPOLATION = {
    *("arithmetic__add_or_sub_big", "arithmetic__add_sub_multiple_longer"),
    *("arithmetic__mixed_longer", "arithmetic__mul_big", "arithmetic__mul_div_multiple_longer"),
    *("numbers__place_value_big", "numbers__round_number_big"),
}

every_module = pytest.mark.parametrize("module", TRAINING)
every_extrapolation = pytest.mark.parametrize("module", EXTRAPOLATION)


def module_of(example: Example) -> str:
    found = re.fullmatch(r"Mathematics\(\w+, (\w+)\)\[\d+\]", example.origin)
    assert found
    return found[1]


def assert_solved(examples: list[Example]) -> None:
    for example in examples:
        answer = oracle.solve(module_of(example), example.prompt)
        assert answer == Fraction(str(example.target)), example


def original(assets, name: str) -> dict[str, list[tuple[str, str]]]:
    """Questions and answers of one of the original's files, by module."""
    rows = defaultdict(list)
    with (assets / f"data/mathematics_dataset/{name}.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            rows[row["module"]].append((row["question"], row["answer"]))
    return rows


ORIGINAL_FILES = ("train-easy", "train-medium", "train-hard", "interpolate", "extrapolate")


def file_of(split: str, difficulty: str | None) -> str:
    return f"{split}-{difficulty}" if difficulty else split


# ---- Answers


def test_modules_are_those_of_the_paper():
    assert set(TRAINING) == PAPERS_MODULES
    assert set(EXTRAPOLATION) == PAPERS_EXTRAPOLATION


@every_module
def test_answers_in_training_are_those_of_an_independent_solver(module):
    for difficulty in LEVELS:
        assert_solved(Mathematics(80, "train", (module,), difficulty).examples())


@every_module
def test_answers_in_interpolation_are_those_of_an_independent_solver(module):
    assert_solved(Mathematics(60, "interpolate", (module,)).examples())


@every_extrapolation
def test_answers_in_extrapolation_are_those_of_an_independent_solver(module):
    assert_solved(Mathematics(300, "extrapolate", (module,)).examples())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_module
def test_ten_thousand_answers_are_those_of_an_independent_solver(module):
    for difficulty, seed in product(LEVELS, (1, 2)):
        assert_solved(Mathematics(1500, "train", (module,), difficulty, seed).examples())
    assert_solved(Mathematics(1000, "interpolate", (module,), seed=3).examples())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_extrapolation
def test_ten_thousand_extrapolations_are_those_of_an_independent_solver(module):
    assert_solved(Mathematics(10_000, "extrapolate", (module,), seed=4).examples())


@pytest.mark.parametrize("name", ORIGINAL_FILES)
def test_the_solver_agrees_with_the_original_data_set(assets, name):
    for module, rows in original(assets, name).items():
        for question, answer in rows:
            assert oracle.solve(module, question) == Fraction(answer), (module, question)


def test_the_solver_refuses_what_it_cannot_read():
    for question in ("Solve x**2 = 4 for x.", "What is 3 ^ 4?", "Solve 3*x = y for x."):
        with pytest.raises((ValueError, KeyError)):
            oracle.solve("algebra__linear_1d", question)
    with pytest.raises(ValueError, match="too few terms"):
        oracle.solve("algebra__sequence_next_term", "What is next in 1, 4, 8?")


# ---- Likeness with the original


def test_questions_have_the_forms_of_the_original_all_of_them_and_no_other(assets):
    def forms_of(problems: list[tuple[str, str]]) -> tuple[dict[str, set[str]], set[str]]:
        asked, told = defaultdict(set), set()
        for module, question in problems:
            *before, last = oracle.forms(module, question)
            asked[oracle.FORMS[module][0]].add(last)
            told.update(before)
        return asked, told

    theirs = forms_of(
        [
            (module, question)
            for name in ORIGINAL_FILES
            for module, rows in original(assets, name).items()
            for question, _ in rows
        ]
    )
    examples = Mathematics(300, "train", seed=1).examples()
    examples += Mathematics(50, "extrapolate").examples()
    ours = forms_of([(module_of(example), example.prompt) for example in examples])
    assert ours == theirs
    asked, told = ours
    assert asked == {forms[0]: set(forms) for forms in oracle.FORMS.values()}
    assert told == set(oracle.SENTENCES)


def test_polynomials_are_written_as_in_the_original(assets):
    told = [
        oracle.matched(sentence, oracle.SENTENCES)[1]
        for name in ORIGINAL_FILES
        for rows in original(assets, name).values()
        for question, _ in rows
        for sentence in oracle.sentences(question)[:-1]
    ]
    num_compared = 0
    for fields in told:
        letter, text = fields.get("letter", ""), fields.get("text", "")
        if not letter or set(re.findall("[a-z(]", text)) - {letter}:
            continue
        polynomial = oracle.Known().parse(text, letter)
        if len(polynomial) < 1 + len(re.findall(" [-+] ", text)) or re.search(r"/\d+\*", text):
            continue  # Its terms are not collected.
        powers = {dict(key).get(letter, 0): value for key, value in polynomial.items()}
        coefficients = [powers.get(power, Fraction(0)) for power in range(max(powers) + 1)]
        ours = [ratio(c.numerator, c.denominator) for c in coefficients]
        assert polynomial_text(ours, letter) == text
        num_compared += 1
    assert num_compared > 700


def measures(question: str, answer: str) -> dict[str, float]:
    """What is compared of a problem with the original's."""
    numbers = re.findall(r"\d+(?:\.\d+)?", question)
    value = float(answer)
    return {
        "characters": len(question),
        "size of the answer": math.copysign(math.log10(1 + abs(value)), value),
        "characters of the answer": len(answer),
        "numbers": len(numbers),
        "characters of a number": sum(map(len, numbers)) / len(numbers) if numbers else 0.0,
        "sentences": len(oracle.sentences(question)),
        "defined": question.count("Let "),
        "supposed": question.count("Suppose "),
        "derivatives": question.count("derivative"),
        "brackets": question.count("("),
        "products": question.count("*"),
        "quotients": question.count("/"),
        "decimal": "." in answer,
    }


@pytest.mark.parametrize(("split", "difficulty"), [*SETS, ("extrapolate", None)])
def test_lengths_sizes_and_contents_are_distributed_as_in_the_original(assets, split, difficulty):
    for module, rows in original(assets, file_of(split, difficulty)).items():
        examples = Mathematics(150, split, (module,), difficulty, seed=5).examples()
        theirs = [measures(*row) for row in rows]
        ours = [measures(example.prompt, str(example.target)) for example in examples]
        for name in theirs[0]:
            samples = [[m[name] for m in sample] for sample in (theirs, ours)]
            test = stats.ks_2samp(*samples, method="asymp")
            # Of nearly eight hundred such tests, none should come near this by chance.
            assert test.pvalue > 1e-5, (module, name)


@pytest.mark.parametrize("split", SPLITS)
def test_questions_and_answers_are_as_short_as_in_the_original(split):
    examples = Mathematics(40, split, seed=6).examples()
    assert max(len(e.prompt) for e in examples) <= 160
    assert max(len(str(e.target)) for e in examples) <= 30


def test_levels_are_thirds_of_the_range_of_training():
    random = np.random.default_rng(0)
    ranges = [(3, 16 / 3), (16 / 3, 23 / 3), (23 / 3, 10)]
    for level, (low, high) in zip(LEVELS, ranges, strict=True):
        source = Mathematics(1000, "train", ("numbers__place_value",), level)
        integers = [int(re.findall(r"\d+", e.prompt)[0]) for e in source.examples()]
        expected = random.uniform(low, high, 10_000) + np.log10(random.uniform(size=10_000))
        assert stats.ks_2samp(np.log10(integers), expected).pvalue > 0.001


def test_interpolation_is_no_harder_than_training_and_extrapolation_is():
    def longest(split: str, module: str) -> int:
        examples = Mathematics(300, split, (module,)).examples()
        return max(int(re.findall(r"\d+", e.prompt)[0]) for e in examples)

    def most_operations(split: str, module: str) -> tuple[int, int]:
        examples = Mathematics(150, split, (module,)).examples()
        counts = [len(re.findall(r"\d+", e.prompt)) - 1 for e in examples]
        return min(counts), max(counts)

    assert longest("interpolate", "numbers__place_value") <= 10**8 + 2
    assert longest("extrapolate", "numbers__place_value_big") > 10**11
    assert most_operations("train", "arithmetic__add_sub_multiple") == (3, 6)
    assert most_operations("extrapolate", "arithmetic__add_sub_multiple_longer") == (9, 11)


# ---- Sets


def problem(example: Example) -> Hashable:
    """What a question asks, read from its text, whatever its wording and letters."""
    module = module_of(example)
    *before, last = oracle.sentences(example.prompt)
    known = oracle.Known()
    for sentence in before:
        known.read(sentence)

    def value(text: str) -> Fraction:
        return oracle.constant(known.parse(text))

    form, fields = oracle.matched(last, oracle.FORMS[module])
    if form in oracle.SUMS or form in oracle.PRODUCTS:
        sign = "+" if form in oracle.SUMS else "*"
        return sign, frozenset(map(Fraction, fields.values()))
    if form in oracle.DISTANCES:
        return "-", *sorted(map(Fraction, fields.values()), reverse=True)
    if form in oracle.DIFFERENCES:
        return "-", Fraction(fields["a"]), Fraction(fields["b"])
    if form in oracle.LINEAR:
        return known.collected(fields["equations"], fields["unknown"])
    if form in oracle.REMAINDERS:
        return "mod", value(fields["dividend"]), value(fields["divisor"])
    if form in oracle.ROUNDINGS:
        return "round", value(fields["value"]), oracle.power_of_ten(fields)
    return tuple(fields.values())


@pytest.mark.parametrize("module", [*TRAINING, *EXTRAPOLATION])
def test_no_problem_is_in_two_sets_whatever_seed_wording_and_letters(module):
    splits = ["extrapolate"] if module in EXTRAPOLATION else SPLITS[:3]
    family = re.sub("_big$|_longer$|_composed$", "", module)
    drawn = {split: set() for split in SPLITS}
    for split, seed in product(splits, (1, 2)):
        level = "easy" if split in ("train", "val") else None
        drawn[split] |= set(
            map(problem, Mathematics(200, split, (module,), level, seed).examples())
        )
    if module != family and family in TRAINING:
        for split, level in (("train", "hard"), ("val", "hard"), ("interpolate", None)):
            drawn[split] |= set(map(problem, Mathematics(200, split, (family,), level).examples()))
    for one, other in combinations(SPLITS, 2):
        assert drawn[one].isdisjoint(drawn[other])


def test_without_the_sets_problems_would_be_shared():
    # The test above would fail: two seeds of one set do share problems, in other words.
    modules = ("numbers__div_remainder", "arithmetic__mul", "algebra__linear_2d_composed")
    for module in modules:
        one, other = (Mathematics(800, "val", (module,), "easy", s).examples() for s in (1, 2))
        assert set(map(problem, one)) & set(map(problem, other))
        assert {e.prompt for e in one} != {e.prompt for e in other}


@pytest.mark.parametrize(
    "module", ["arithmetic__mul", "algebra__linear_1d", "numbers__round_number"]
)
def test_hard_and_easy_problems_and_extrapolation_share_no_question_with_other_sets(module):
    train = {
        example.prompt
        for level in (None, *LEVELS)
        for example in Mathematics(600, "train", (module,), level).examples()
    }
    for split in ("val", "interpolate"):
        test = {e.prompt for e in Mathematics(300, split, (module,), seed=3).examples()}
        assert len(test) == 300
        assert train.isdisjoint(test)


@pytest.mark.parametrize("split", SPLITS)
def test_no_question_comes_twice(split):
    questions = [e.prompt for e in Mathematics(40, split, seed=7).examples()]
    assert len(set(questions)) == len(questions) == 40 * (7 if split == "extrapolate" else 13)


def test_no_question_comes_twice_where_there_are_few():
    source = Mathematics(3000, "train", ("numbers__place_value",), "easy")
    assert len({e.prompt for e in source.examples()}) == 3000


def test_seven_tenths_of_all_problems_are_for_training():
    module = TRAINING_MODULES["numbers__div_remainder"]
    draws = Draws(0)
    tenths = [source_file.tenth(module.draw(draws, None).content) for _ in range(5000)]
    assert stats.chisquare(np.bincount(tenths, minlength=10)).pvalue > 0.001
    assert {split: len(tenths) for split, tenths in source_file.TENTHS.items()} == {
        **{"train": 7, "val": 1, "interpolate": 1, "extrapolate": 1}
    }
    assert sorted(t for tenths in source_file.TENTHS.values() for t in tenths) == [*range(10)]


# ---- Reproducibility


@pytest.mark.parametrize("split", SPLITS)
def test_equal_fields_give_equal_examples_and_seeds_differ(split):
    examples = Mathematics(5, split, seed=8).examples()
    assert examples == Mathematics(5, split, seed=8).examples()
    others = Mathematics(5, split, seed=9).examples()
    assert not {e.prompt for e in examples} & {e.prompt for e in others}


def test_more_examples_and_other_modules_leave_examples_as_they_are():
    both = Mathematics(20, "train", ("arithmetic__mul", "numbers__place_value")).examples()
    assert both[20:23] == Mathematics(3, "train", ("numbers__place_value",)).examples()
    assert [e.origin for e in both[19:21]] == [
        "Mathematics(train, arithmetic__mul)[19]",
        "Mathematics(train, numbers__place_value)[0]",
    ]


def test_problems_are_the_same_on_every_machine():
    examples = Mathematics(1, "train").examples() + Mathematics(1, "extrapolate").examples()
    assert [(e.prompt, e.target) for e in examples] == [
        ("Solve 15966 + 2507 = -377*v for v.", "-49"),
        ("Let z be 99/21 + 12/42. Solve 4*n - z = -25 for n.", "-5"),
        ("Solve -4*a - 5*t - 28 = -a, 2*a + 2*t = -12 for a.", "-1"),
        (
            "Suppose -6*z = -4*z - 6. Suppose -3*n - 3*q - 2*q = 156, -260 = 5*n - z*q. Let "
            "v be (-197)/(-13) - (-8)/n. Solve -m - v = -4*s, 3*m - s = -7 - 5 for m.",
            "-3",
        ),
        ("What is next in 41936, 41934, 41932, 41930, 41928, 41926?", "41924"),
        ("1+315.8", "316.8"),
        ("What is (-204 - -209) + (1 - 0) + -12?", "-6"),
        ("Product of -34.9 and -3078.", "107422.2"),
        ("What is the remainder when 5168044 is divided by 208?", "76"),
        ("Let p = 29 - 8. Calculate the remainder when p is divided by 11.", "10"),
        ("What is the units digit of 1500?", "0"),
        ("What is -0.000050891 rounded to 6 decimal places?", "-0.000051"),
        (
            "Let f = -53.9 + 58. Let g = -643 + 646.4. Let y = g - f. What is y rounded to "
            "zero dps?",
            "-1",
        ),
        ("Subtract 68688417820.164 from 8.5251.", "-68688417811.6389"),
        ("Calculate (8 + 15 - 17 - (-2 + -1 + -1 - (-3 - 13))) + 3 + -2 + 1 - -114.", "110"),
        (
            "What is the value of (1/3*(-11664)/96 - ((23912/(-240))/61 + 0 + 4/30)) + (2 - -3)?",
            "-34",
        ),
        ("Calculate 0.17*-4495.6847.", "-764.266399"),
        ("What is 681*1*((-3)/12)/((-4263)/(-5684))*6/(-9)*(-18)/(-8)*4/6?", "227"),
        ("What is the billions digit of 466318475550?", "6"),
        ("Round -0.0000025237684248 to seven dps.", "-0.0000025"),
    ]


# ---- Errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_examples": 0}, r"Mathematics.num_examples must be 1 or more, got 0"),
        ({"seed": -1}, r"Mathematics.seed must be 0 or more, got -1"),
        ({"modules": ()}, r"Mathematics.modules must be a list of modules, got \(\)"),
        (
            {"modules": "arithmetic__mul"},
            r"Mathematics.modules must be a list .* 'arithmetic__mul'",
        ),
        (
            {"modules": ("arithmetic__mul", "arithmetic__mul")},
            "Mathematics.modules names arithmetic__mul twice",
        ),
        (
            {"modules": ("arithmetic__mul_big",)},
            "arithmetic__mul_big is not a module of train, which has algebra__linear_1d, ",
        ),
        (
            {"modules": ("arithmetic__mul",), "split": "extrapolate"},
            "arithmetic__mul is not a module of extrapolate, which has arithmetic__add_or_sub_big",
        ),
        (
            {"split": "interpolate", "difficulty": "easy"},
            "Mathematics.difficulty: easy has no effect on interpolate",
        ),
        (
            {"split": "extrapolate", "difficulty": "hard"},
            "Mathematics.difficulty: hard has no effect on extrapolate",
        ),
    ],
)
def test_values_that_describe_no_problems_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Mathematics(**{"num_examples": 5, "split": "train", **fields})


def test_an_unknown_module_is_refused_with_all_that_are_known():
    with pytest.raises(ValueError, match="there is no module 'arithmetic__div'") as error:
        Mathematics(5, "train", ("arithmetic__div",))
    assert all(name in str(error.value) for name in PAPERS_MODULES | PAPERS_EXTRAPOLATION)


def test_more_problems_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(source_file, "_PATIENCE", 30)
    message = (
        r"num_examples asks for 9000 of each module, but no more than \d+ easy problems of val "
        r"were found for numbers__place_value. Ask for fewer, or for another difficulty"
    )
    with pytest.raises(ValueError, match=message):
        Mathematics(9000, "val", ("numbers__place_value",), "easy").examples()


# ---- Random numbers


seeds = st.integers(0, 2**64 - 1)


@given(seeds, st.floats(-1, 22), st.booleans(), st.integers(0, 3), st.integers(1, 60))
def test_integers_are_within_their_entropy(seed, entropy, signed, min_abs, coprime_to):
    integer = Draws(seed).integer(entropy, signed=signed, min_abs=min_abs, coprime_to=coprime_to)
    share = np.prod([1 - 1 / p for p in range(2, 61) if coprime_to % p == 0 and is_prime(p)])
    assert min_abs <= abs(integer) <= (10**entropy + min_abs) / share / (1 + signed) + 2
    assert math.gcd(integer, coprime_to) == 1
    assert signed or integer >= 0


def is_prime(integer: int) -> bool:
    return integer > 1 and all(integer % k for k in range(2, integer))


def test_integers_are_uniform():
    draws = Draws(1)
    small = [draws.integer(1.0) + 5 for _ in range(5500)]
    assert stats.chisquare(np.bincount(small, minlength=11)).pvalue > 0.001
    large = [draws.integer(22.0, signed=False) for _ in range(5000)]
    assert stats.kstest([n / 1e22 for n in large], "uniform").pvalue > 0.001
    assert stats.chisquare(np.bincount([n % 10 for n in large], minlength=10)).pvalue > 0.001


def test_an_integer_without_a_common_factor_with_zero_is_one():
    draws = Draws(2)
    assert {draws.integer(3.0, coprime_to=0) for _ in range(50)} == {-1, 1}
    assert {draws.integer(3.0, signed=False, coprime_to=0) for _ in range(50)} == {1}


def test_shares_follow_the_dirichlet_distribution():
    draws = Draws(3)
    shares = np.array([draws.shares([1, 0, 3]) for _ in range(4000)])
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert not shares[:, 1].any()
    assert stats.kstest(shares[:, 2], stats.beta(3, 1).cdf).pvalue > 0.001
    lucky = np.array([draws.shares([0, 0]) for _ in range(4000)])
    assert stats.chisquare(lucky.sum(axis=0)).pvalue > 0.001


def test_all_ways_to_cut_a_total_are_equally_likely():
    draws = Draws(4)
    for total, count, ways in ((3, 2, 4), (3, 4, 20), (0, 3, 1)):
        counts = defaultdict(int)
        for _ in range(200 * ways):
            parts = draws.parts(total, count)
            assert sum(parts) == total
            counts[tuple(parts)] += 1
        assert len(counts) == ways
        assert ways == 1 or stats.chisquare([*counts.values()]).pvalue > 0.001


def test_orders_and_samples_are_equally_likely():
    draws = Draws(5)
    orders, samples = defaultdict(int), defaultdict(int)
    for _ in range(2400):
        items = [1, 2, 3]
        draws.shuffle(items)
        orders[tuple(items)] += 1
        samples[tuple(draws.sample(4, 2))] += 1
    assert (len(orders), len(samples)) == (6, 12)
    assert stats.chisquare([*orders.values()]).pvalue > 0.001
    assert stats.chisquare([*samples.values()]).pvalue > 0.001


# ---- Values


@given(st.integers(-(10**12), 10**12), st.integers(-6, 12))
def test_decimals_are_written_exactly_and_without_needless_zeros(digits, places):
    text = decimal_text(digits, places)
    assert Fraction(text) == digits * Fraction(10) ** -places
    assert re.fullmatch(r"0|-?(?:[1-9]\d*|0(?=\.))(?:\.\d*[1-9])?", text)


@given(st.integers(1, 10**6))
def test_prime_factors_multiply_to_the_integer(integer):
    factors = prime_factors(integer)
    assert math.prod(prime**power for prime, power in factors) == integer
    assert all(is_prime(prime) for prime, _ in factors if prime < 1000)


# ---- Documentation


PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_page_shows_problems_as_they_are():
    assert all(f"`{module}`" in PAGE for module in PAPERS_MODULES | PAPERS_EXTRAPOLATION)
    rows = re.findall(r"^\| `(\w+)`(?:, `\w+`)* \| (.+[.?)]) \| (-?[\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 12
    for module, question, answer in rows:
        assert oracle.solve(module, question.replace("\\*", "*")) == Fraction(answer)


def test_the_sources_of_the_page_make_examples():
    sources = re.findall(r"data\.Mathematics\n +init_args: (\{.+\})", PAGE)
    assert len(sources) == 7
    for text in sources:
        fields = yaml.safe_load(text)
        fields["modules"] = tuple(fields.get("modules", ())) or None
        assert Mathematics(**{**fields, "num_examples": 1}).examples()
