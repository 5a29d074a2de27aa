import math
import re

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from scipy import stats
from sklearn.datasets import make_friedman1, make_friedman2, make_friedman3
from sklearn.linear_model import Ridge

from ntl_lightning.data import Formula, Friedman, Friedman2, Friedman3, InputRange, Source
from ntl_lightning.data.expressions import CONSTANTS, FUNCTIONS, Expression
from ntl_lightning.data.regression import friedman2_mean, friedman3_mean, friedman_mean
from ntl_lightning.numbers.text import NumberFormat


def friedman_table(source: Friedman) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (n, 5) and answers (n,), read back from the texts by position."""
    examples = source.examples()
    inputs = [[int(e.prompt[i : i + 2]) for i in (0, 3, 6, 9, 12)] for e in examples]
    return np.array(inputs), np.array([float(str(e.target)) for e in examples])


# ---- Friedman 1


def test_friedman_mean_is_scikit_learns_friedman1_scaled():
    features, target = make_friedman1(n_samples=200, n_features=5, noise=0.0, random_state=0)
    ours = friedman_mean(100 * features - 0.5)
    np.testing.assert_allclose(ours, 50 + 30 * target, rtol=1e-12)


def test_friedman_texts_have_two_digits_per_input_and_three_per_answer():
    examples = Friedman(num_examples=500, seed=1).examples()
    assert len(examples) == 500
    for index, example in enumerate(examples):
        assert len(example.prompt) == 15
        assert example.prompt[2::3] == "    ="
        assert (example.prompt[0::3] + example.prompt[1::3]).isdigit()
        assert example.target is not None
        assert len(example.target) == 3
        assert example.target.isdigit()
        assert example.origin == f"Friedman[{index}]"


def test_friedman_without_noise_is_the_rounded_formula():
    inputs, answers = friedman_table(Friedman(num_examples=300, seed=2, noise=0.0))
    u = (inputs + 0.5) / 100
    score = 10 * np.sin(np.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2
    score += 10 * u[:, 3] + 5 * u[:, 4]
    np.testing.assert_array_equal(answers, np.rint(50 + 30 * score))


def test_friedman_noise_is_normal_with_the_standard_deviation_asked_for():
    inputs, answers = friedman_table(Friedman(num_examples=4000, seed=3))
    residual = (answers - friedman_mean(inputs)) / 30
    assert stats.kstest(residual, "norm").pvalue > 0.01


def test_friedman_inputs_are_uniform_over_0_to_99():
    inputs, _ = friedman_table(Friedman(num_examples=4000, seed=4))
    for column in inputs.T:
        assert stats.chisquare(np.bincount(column, minlength=100)).pvalue > 0.001


def test_friedman_has_the_known_reference_errors():
    # Known for 500 rows of seed 777: a constant 122.3, ridge R2 0.729, the noise itself 23.9.
    train_inputs, train_answers = friedman_table(Friedman(num_examples=2000, seed=10_000))
    inputs, answers = friedman_table(Friedman(num_examples=500, seed=777))
    assert np.abs(answers - np.median(answers)).mean() == pytest.approx(122.3, abs=0.1)
    assert np.abs(answers - friedman_mean(inputs)).mean() == pytest.approx(23.9, abs=0.5)
    ridge = Ridge().fit(train_inputs, train_answers)
    assert ridge.score(inputs, answers) == pytest.approx(0.729, abs=0.01)


def test_friedman_answers_are_limited_to_0_to_999():
    _, answers = friedman_table(Friedman(num_examples=500, seed=5, noise=1000.0))
    assert answers.min() == 0
    assert answers.max() == 999
    assert 0.1 < np.mean((answers == 0) | (answers == 999)) < 0.9


def test_friedman_depends_on_the_seed_alone():
    assert Friedman(20, seed=6).examples() == Friedman(20, seed=6).examples()
    assert Friedman(20, seed=6).examples() != Friedman(20, seed=7).examples()


def test_friedman_examples_are_the_same_on_every_machine():
    first = Friedman(num_examples=500, seed=777).examples()[:2]
    assert [(e.prompt, e.target) for e in first] == [
        ("90 61 35 38 09=", "489"),
        ("60 45 96 32 19=", "481"),
    ]


def test_friedman_writes_answers_in_the_format_asked_for():
    whole = Friedman(50, seed=8, number_format=NumberFormat()).examples()
    fine = Friedman(50, seed=8, number_format=NumberFormat(decimals=2)).examples()
    for a, b in zip(whole, fine, strict=True):
        assert len(str(b.target).partition(".")[2]) == 2
        assert abs(float(str(a.target)) - float(str(b.target))) <= 0.5
    assert any(not str(b.target).endswith(".00") for b in fine)


def test_friedman_refuses_a_format_without_room():
    with pytest.raises(ValueError, match=r"Friedman\[0\], written by Friedman.number_format: .*"):
        Friedman(50, seed=8, number_format=NumberFormat(width=1)).examples()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_examples": 0, "seed": 0}, r"Friedman.num_examples must be 1 or more, got 0"),
        ({"num_examples": 5, "seed": -1}, r"Friedman.seed must be 0 or more, got -1"),
        ({"num_examples": 5, "seed": 0, "noise": -1.0}, r"Friedman.noise .* got -1.0"),
        ({"num_examples": 5, "seed": 0, "noise": float("nan")}, r"Friedman.noise .* got nan"),
        ({"num_examples": 5, "seed": 0, "noise": float("inf")}, r"Friedman.noise .* got inf"),
    ],
)
def test_friedman_refuses_values_that_describe_no_data(fields, message):
    with pytest.raises(ValueError, match=message):
        Friedman(**fields)


# ---- Friedman 2 and 3


def circuits(source) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (n, 4) and answers (n,) of Friedman 2 or 3, read back from the texts."""
    examples = source.examples()
    inputs = [[float(x) for x in e.prompt.removesuffix("=").split(" ")] for e in examples]
    return np.array(inputs), np.array([float(str(e.target)) for e in examples])


@pytest.mark.parametrize(
    ("ours", "oracle"), [(friedman2_mean, make_friedman2), (friedman3_mean, make_friedman3)]
)
def test_the_means_are_those_of_scikit_learn(ours, oracle):
    features, target = oracle(n_samples=300, noise=0.0, random_state=0)
    np.testing.assert_allclose(ours(features), target, rtol=1e-12)


@pytest.mark.parametrize("kind", [Friedman2, Friedman3])
def test_answers_are_those_of_the_inputs_as_they_are_written(kind):
    exact = NumberFormat(significant_digits=17)
    inputs, answers = circuits(kind(200, seed=0, noise=0.0, number_format=exact))
    x1, x2, x3, x4 = inputs.T
    reactance = x2 * x3 - 1 / (x2 * x4)
    expected = np.sqrt(x1**2 + reactance**2) if kind is Friedman2 else np.arctan(reactance / x1)
    np.testing.assert_allclose(answers, expected, rtol=1e-12)


def test_the_inputs_of_circuits_are_uniform_over_scikit_learns_domain():
    inputs, _ = circuits(Friedman2(4000, seed=1))
    theirs, _ = make_friedman2(n_samples=4000, random_state=1)
    for ours, oracle in zip(inputs.T, theirs.T, strict=True):
        assert stats.ks_2samp(ours, oracle).pvalue > 0.001


@pytest.mark.parametrize(("kind", "decimals"), [(Friedman2, 0), (Friedman3, 3)])
def test_the_default_noise_is_a_third_of_the_spread_of_the_answers(kind, decimals):
    inputs, answers = circuits(kind(4000, seed=2))
    clean = (friedman2_mean if kind is Friedman2 else friedman3_mean)(inputs)
    residual = (answers - clean) / kind(1, 0).noise
    assert stats.kstest(residual, "norm").pvalue > 0.001
    assert clean.std() / kind(1, 0).noise == pytest.approx(3, rel=0.1)
    assert {len(str(e.target).partition(".")[2]) for e in kind(9, 0).examples()} == {decimals}


def test_the_phase_at_no_resistance_is_the_limit():
    assert friedman3_mean(np.array([[0, 1000, 0.5, 2]])) == pytest.approx(math.pi / 2)


def test_circuits_are_the_same_on_every_machine():
    two, three = Friedman2(2, seed=7).examples(), Friedman3(2, seed=7).examples()
    assert [(e.prompt, e.target, e.origin) for e in two] == [
        ("94.49 1243.3 0.578 9.34=", "668", "Friedman2[0]"),
        ("62.51 1591.3 0.776 3.25=", "1112", "Friedman2[1]"),
    ]
    assert [(e.prompt, e.target, e.origin) for e in three] == [
        ("94.49 1243.3 0.578 9.34=", "1.395", "Friedman3[0]"),
        ("62.51 1591.3 0.776 3.25=", "1.421", "Friedman3[1]"),
    ]
    assert two != Friedman2(2, seed=8).examples()


@pytest.mark.parametrize("kind", [Friedman2, Friedman3])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_examples": 0, "seed": 0}, "num_examples must be 1 or more, got 0"),
        ({"num_examples": 5, "seed": -1}, "seed must be 0 or more, got -1"),
        ({"num_examples": 5, "seed": 0, "noise": -1.0}, "noise must be a number >= 0, got -1.0"),
    ],
)
def test_circuits_refuse_values_that_describe_no_data(kind, fields, message):
    with pytest.raises(ValueError, match=f"{kind.__name__}.{message}"):
        kind(**fields)


# ---- Formulas


def formula(expression="3*x + sin(y)/2", **fields):
    return Formula(
        **{
            "expression": expression,
            "inputs": {"x": InputRange(0, 99), "y": InputRange(-1, 1, decimals=2)},
            "num_examples": 50,
            "split": "train",
            **fields,
        }
    )


def points(source: Formula) -> list[tuple[float, ...]]:
    return [
        tuple(float(x) for x in re.findall(r"=(-?[0-9.]+)", e.prompt)) for e in source.examples()
    ]


def test_formulas_are_computed_of_the_inputs_as_they_are_written():
    source = formula()
    for example, (x, y) in zip(source.examples(), points(source), strict=True):
        assert float(str(example.target)) == pytest.approx(3 * x + math.sin(y) / 2, abs=0.005001)
    first = source.examples()[0]
    assert re.fullmatch(r"x=\d+, y=-?\d\.\d\d:", first.prompt)
    assert first.origin == "Formula(train)[0]"


def test_inputs_may_have_greek_names():
    source = formula("3*\u03bc", inputs={"\u03bc": InputRange(0, 99)})
    assert [float(str(e.target)) for e in source.examples()] == [3 * x for (x,) in points(source)]


def test_the_prompt_and_the_format_may_be_chosen():
    source = formula(
        template="f({x}; {y}) is",
        number_format=NumberFormat(significant_digits=3, scientific=True),
    )
    for example in source.examples():
        assert re.fullmatch(r"f\(\d+; -?\d\.\d\d\) is", example.prompt)
        assert re.fullmatch(r"-?\d\.\d\de-?\d", str(example.target))


def test_inputs_are_uniform_over_all_values_with_so_many_decimals():
    xs, ys = zip(*points(formula("x", num_examples=4000)), strict=True)
    assert stats.chisquare(np.bincount(np.array(xs, dtype=int), minlength=100)).pvalue > 0.001
    assert {*ys} == {k / 100 for k in range(-100, 101)}
    counts = np.bincount(np.rint(np.array(ys) * 100).astype(int) + 100)
    assert stats.chisquare(counts).pvalue > 0.001


def test_the_ends_of_a_range_are_the_first_and_last_values_inside():
    sets = [held_out(split, InputRange(-0.25, 0.31, 1)) for split in ("train", "val", "test")]
    assert sorted(x for values in sets for x in values) == [-0.2, -0.1, 0.0, 0.1, 0.2, 0.3]


def held_out(split, where):
    """The values of one input that belong to a set, none where that is refused."""
    try:
        return {x for (x,) in points(formula("x", inputs={"x": where}, split=split))}
    except ValueError:
        return set()


def test_the_sets_are_disjoint_whatever_seeds_prompts_and_decimals():
    inputs = {"x": InputRange(0, 60)}
    finer = {"x": InputRange(0, 60, decimals=1)}
    train = {*points(formula("x", inputs=inputs, num_examples=2000))}
    val = {*points(formula("x", inputs=inputs, num_examples=500, split="val", seed=5))}
    test = {*points(formula("2*x", inputs=finer, num_examples=5000, split="test", seed=9))}
    assert not train & val
    assert not train & test
    assert not val & test
    assert len(train | val | test & {(float(x),) for x in range(61)}) == 61


def test_points_and_sets_do_not_depend_on_the_order_in_which_inputs_are_named():
    inputs = formula().inputs
    turned = formula(inputs={name: inputs[name] for name in reversed(inputs)})
    assert {(x, y) for y, x in points(turned)} == {*points(formula())}
    prompts = {"template": "x={x}, y={y}:"}
    assert formula(inputs=turned.inputs, **prompts).examples() == formula().examples()


def test_a_tenth_of_all_points_belongs_to_the_test_set():
    inputs = {"x": InputRange(0, 20_000)}
    test = {*points(formula("x", inputs=inputs, num_examples=40_000, split="test"))}
    assert len(test) == pytest.approx(2000, rel=0.1)


def test_noise_is_normal_and_leaves_the_inputs_as_they_are():
    clean, noisy = formula(num_examples=3000), formula(num_examples=3000, noise=2.0)
    assert points(clean) == points(noisy)
    pairs = zip(clean.examples(), noisy.examples(), strict=True)
    residual = [float(str(b.target)) - float(str(a.target)) for a, b in pairs]
    assert stats.kstest(np.array(residual) / 2, "norm").pvalue > 0.001


def test_equal_fields_give_equal_formulas_and_seeds_differ():
    assert formula(seed=1).examples() == formula(seed=1).examples()
    assert formula(seed=1).examples() != formula(seed=2).examples()
    assert formula(num_examples=7).examples() == formula().examples()[:7]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_examples": 0}, "Formula.num_examples must be 1 or more"),
        ({"seed": -1}, "Formula.seed must be 0 or more"),
        ({"noise": math.inf}, "Formula.noise must be a number >= 0, got inf"),
        ({"inputs": {}}, "Formula.inputs is empty"),
        ({"inputs": {"2x": InputRange(0, 1)}}, "'2x' is no name"),
        ({"inputs": {"lambda": InputRange(0, 1)}}, "'lambda' is no name"),
        (
            {"inputs": {"\u00b5": InputRange(0, 1)}, "expression": "3*\u00b5"},
            r"'\u00b5' \('\\xb5'\) is read as '\u03bc' \('\\u03bc'\) in an expression",
        ),
        ({"inputs": {"sin": InputRange(0, 1)}}, "'sin' has a meaning already"),
        ({"inputs": {"pi": InputRange(0, 1)}}, "'pi' has a meaning already"),
        ({"template": "{x}="}, r"every input in braces .* \{x\}, \{y\}, got '\{x\}='"),
        ({"template": "{x} {y} {z}"}, "no other field"),
        ({"expression": "x + z"}, "Formula.expression: 'z' is not allowed"),
    ],
)
def test_formulas_refuse_values_that_describe_no_data(fields, message):
    with pytest.raises(ValueError, match=message):
        formula(**fields)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1/(x - x)", "inf"), ("log(x - 9)", "nan"), ("9**9**9**x", "inf"), ("exp(x*1000)", "inf")],
)
def test_a_formula_that_is_not_finite_somewhere_names_the_point(expression, value):
    inputs = {"x": InputRange(0, 3)}
    with pytest.raises(ValueError, match=rf"is {value} at x=\d, and not finite at \d+ of 50"):
        formula(expression, inputs=inputs).examples()


def test_an_answer_without_room_is_named():
    with pytest.raises(ValueError, match=r"Formula\(train\)\[\d+\], written by Formula.number_f"):
        formula(number_format=NumberFormat(width=1)).examples()


def test_a_set_without_points_is_refused():
    # One point belongs to one set.
    split = "val" if held_out("test", InputRange(3, 3)) else "test"
    with pytest.raises(ValueError, match=rf"Formula\.split: none of 65536 points .* to {split}"):
        formula("x", inputs={"x": InputRange(3, 3)}, split=split).examples()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low": math.nan, "high": 1}, "must be finite, got nan and 1"),
        ({"low": 0, "high": math.inf}, "must be finite"),
        ({"low": 2, "high": 1}, "no number with 0 decimals lies from 2 to 1"),
        ({"low": 0.2, "high": 0.8}, "no number with 0 decimals"),
        ({"low": 0, "high": 1, "decimals": 16}, "decimals must be from 0 to 15, got 16"),
        ({"low": 0, "high": 1, "decimals": -1}, "decimals must be from 0 to 15, got -1"),
        ({"low": 0, "high": 1e15, "decimals": 2}, "more digits than float64 holds"),
    ],
)
def test_ranges_without_a_value_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        InputRange(**fields)


@given(st.integers(-(2**53), 2**53), st.integers(0, 15))
def test_the_value_of_an_input_is_the_float_of_its_text(step, decimals):
    where = InputRange(0, 0, decimals)
    assert where.values(np.array([step]))[0] == pytest.approx(float(where.text(step)), rel=1e-15)
    assert len(where.text(step).partition(".")[2]) == decimals


def configured(text: str) -> Source:
    """The source that this part of a configuration describes."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--source", type=Source)
    parsed = parser.parse_object({"source": yaml.safe_load(text)})
    return parser.instantiate_classes(parsed).source


def test_a_formula_is_named_in_a_configuration():
    source = configured(
        """
        class_path: ntl_lightning.data.Formula
        init_args:
          expression: 3*x + sin(y)/2
          inputs:
            x: {low: 0, high: 99}
            y: {low: -1.0, high: 1.0, decimals: 2}
          num_examples: 50
          split: train
        """
    )
    assert source == formula()


@pytest.mark.parametrize("kind", [Friedman, Friedman2, Friedman3])
def test_a_format_in_a_configuration_keeps_nothing_of_the_default_one(kind):
    source = configured(
        f"""
        class_path: ntl_lightning.data.{kind.__name__}
        init_args: {{num_examples: 50, seed: 0, number_format: {{decimals: 1}}}}
        """
    )
    assert source == kind(50, seed=0, number_format=NumberFormat(decimals=1))


# ---- Expressions


def parsed(text):
    return Expression.parse(text, ["x", "y"], "Formula.expression")


# Only expressions that Python's own numbers can follow.
numbers = st.floats(-3, 3, allow_subnormal=False).map(lambda v: repr(round(v, 3)))
expressions = st.recursive(
    st.sampled_from(["x", "y", "pi"]) | numbers.map(lambda v: f"({v})"),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner)
        | st.builds(
            "{}({})".format, st.sampled_from(["sin", "cos", "arctan", "tanh", "abs"]), inner
        )
        | st.builds("(-{})".format, inner)
        | st.builds("{} ** 2".format, inner)
    ),
    max_leaves=8,
)
PYTHON = {"sin": math.sin, "cos": math.cos, "arctan": math.atan, "tanh": math.tanh, "abs": abs}


@given(expressions, st.floats(-3, 3), st.floats(-3, 3))
def test_expressions_are_worth_what_python_says(text, x, y):
    ours = parsed(text)({"x": np.array([x]), "y": np.array([y])})
    try:
        # The oracle: Python itself, on texts made above.
        python = eval(text, {"__builtins__": {}}, {**PYTHON, "pi": math.pi, "x": x, "y": y})
    except OverflowError:
        return
    assert ours.tolist() == pytest.approx([python], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_the_math_module(name):
    oracle = {"abs": abs, "arctan": math.atan}.get(name) or getattr(math, name)
    xs = np.array([0.25, 1.0, 2.5])
    ours = parsed(f"{name}(x)")({"x": xs, "y": xs})
    assert ours.tolist() == pytest.approx([oracle(x) for x in xs], rel=1e-12)


def test_an_expression_without_inputs_has_their_shape():
    two = np.zeros(2)
    assert parsed("2**-1 + 1e1")({"x": two, "y": two}).tolist() == [10.5, 10.5]
    assert parsed("pi")({"x": two, "y": two}).tolist() == [CONSTANTS["pi"]] * 2


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("z + 1", "'z'"),
        ("sin", "'sin'"),
        ("sin(x, y)", r"'sin\(x, y\)'"),
        ("sin(*x)", r"'sin\(\*x\)'"),
        ("sin(x=x)", r"'sin\(x=x\)'"),
        ("max(x)", r"'max\(x\)'"),
        ("x.real", "'x.real'"),
        ("x[0]", r"'x\[0\]'"),
        ("__import__('os').system('true')", r"\"__import__\('os'\).system\('true'\)\""),
        ("(lambda: 1)()", r"'\(lambda: 1\)\(\)'"),
        ("[x for x in y]", r"'\[x for x in y\]'"),
        ("x if y else 1", "'x if y else 1'"),
        ("x // 2", "'x // 2'"),
        ("x % 2", "'x % 2'"),
        ("3*x^2", r"'3\*x\^2' is not allowed .* Write \*\* for a power\."),
        ("x < y", "'x < y'"),
        ("x and y", "'x and y'"),
        ("not x", "'not x'"),
        ("~x", "'~x'"),
        ("+x", r"'\+x'"),
        ("(x := 2)", "'x := 2'"),
        ("'x'", "\"'x'\""),
        ("f'{x}'", "'{x}'"),
        ("True", "'True'"),
        ("None", "'None'"),
        ("2j", "'2j'"),
        ("1e999", "'1e999'"),
        ("9" * 400, "'999"),
        ("x = 2", "is no expression"),
        ("3 +", "is no expression"),
        ("", "is no expression"),
        ("x; y", "is no expression"),
        ("x\0", "is no expression"),
        ("3 x", "is no expression"),
        ("(" * 500 + "x" + ")" * 500, "is no expression"),
        ("-" * 900 + "x", "nested more than 100 levels|is no expression"),
        ("+".join("x" * 150), "nested more than 100 levels"),
        ("x" * 2001, "has 2001 characters, but may have 2000"),
    ],
)
def test_what_is_not_allowed_is_named(text, part):
    with pytest.raises(ValueError, match=rf"^Formula.expression.*{part}"):
        parsed(text)
