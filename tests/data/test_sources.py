from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from ntl_lightning.data import Csv, Example, Friedman, JsonLines, Mixture, RowFilter, Source, Split
from ntl_lightning.data.sources import TextTemplate


@dataclass(frozen=True)
class Given(Source):
    """Prompts as they are given, answered by their length; an id is what stands before a colon."""

    prompts: tuple[str, ...]

    def examples(self):
        return [
            Example(p, str(len(p)), f"Given[{i}]", id=p.partition(":")[0] if ":" in p else None)
            for i, p in enumerate(self.prompts)
        ]


def numbered(count, name=""):
    return Given(tuple(f"{name}{i}" for i in range(count)))


def prompts(source):
    return [example.prompt for example in source.examples()]


@pytest.fixture
def said(monkeypatch):
    """What sources report beside warnings."""
    messages = []
    monkeypatch.setattr("ntl_lightning.data.sources.rank_zero_info", messages.append)
    return messages


# ---- Source


def test_a_source_without_examples_cannot_be_made():
    with pytest.raises(TypeError, match="examples"):
        Source()


def test_sources_are_configured_by_class_path(write):
    path = write('{"q": "1+1=", "a": 2}\n')
    parser = ArgumentParser()
    parser.add_argument("--sources", type=list[Source])
    config = parser.parse_object(
        {
            "sources": [
                {
                    "class_path": "ntl_lightning.data.JsonLines",
                    "init_args": {"path": path, "prompt": "q", "target": "a"},
                }
            ]
        }
    )
    (source,) = parser.instantiate_classes(config).sources
    assert source == JsonLines(path, "q", "a")
    assert source.examples() == [Example("1+1=", "2", "data.jsonl:1")]


# ---- Templates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a}", "1"),
        ("{a}+{b b}=", "1+2="),
        ("{a}{a}", "11"),
        ("{{a}} is {a}", "{a} is 1"),
        ("{{{a}}}", "{1}"),
        ("{c:d!r}", "3"),
        ("\\frac{{{a}}}{{{b b}}}\n", "\\frac{1}{2}\n"),
    ],
)
def test_templates_put_values_in(text, expected):
    template = TextTemplate.parse(text, "where")
    assert template.fill({"a": "1", "b b": "2", "c:d!r": "3"}) == expected


def test_values_with_braces_are_not_read_again():
    assert TextTemplate.parse("{a} {b}", "where").fill({"a": "{b}", "b": "}}"}) == "{b} }}"


@pytest.mark.parametrize(
    ("text", "position"), [("{a", 1), ("a}", 2), ("{a} {}", 5), ("{a} {{b}", 8), ("{a{b}}", 1)]
)
def test_braces_without_partners_are_refused(text, position):
    with pytest.raises(ValueError, match=rf"^here: .* at character {position}\b"):
        TextTemplate.parse(text, "here")


@pytest.mark.parametrize("text", ["", "nothing", "{{a}}"])
def test_templates_without_a_field_are_refused(text):
    with pytest.raises(ValueError, match=r"here: .*has no field"):
        TextTemplate.parse(text, "here")


@given(st.text(), st.text(alphabet=st.characters(exclude_characters="{}"), min_size=1), st.text())
def test_any_text_can_be_written_as_a_template(literal, name, value):
    escaped = literal.replace("{", "{{").replace("}", "}}")
    template = TextTemplate.parse(f"{escaped}{{{name}}}{escaped}", "where")
    assert template.fields == [name]
    assert template.fill({name: value}) == literal + value + literal


@given(st.lists(st.tuples(st.text(max_size=3), st.sampled_from("abc"), st.text(max_size=3))))
def test_spans_of_a_template_hold_the_values_of_its_fields(pieces):
    template = TextTemplate((*((text, field) for text, field, _ in pieces), ("end", None)))
    values = {field: value for _, field, value in pieces}
    text = template.fill(values)
    for wanted in ([], ["a"], ["a", "c"]):
        found = [text[a:b] for a, b in template.spans(values, wanted)]
        assert found == [values[field] for _, field, _ in pieces if field in wanted]


# ---- Split

PARTS = {"train": 0.8, "val": 0.1, "test": 0.1}


def test_the_parts_hold_every_example_once_in_its_order():
    source = numbered(1000)
    parts = {part: prompts(Split(source, part)) for part in PARTS}
    assert sorted(chain.from_iterable(parts.values())) == sorted(source.prompts)
    for part in parts.values():
        assert part == sorted(part, key=int)


def test_the_parts_have_about_their_shares():
    # Five standard deviations of a binomial count.
    for part, share in PARTS.items():
        count = len(Split(numbered(10_000), part).examples())
        assert abs(count - 10_000 * share) < 5 * (10_000 * share * (1 - share)) ** 0.5


def test_an_example_stays_in_its_part_wherever_it_stands():
    old = numbered(300).prompts
    grown = Given((*reversed(old), *numbered(200, "new ").prompts))
    for part in PARTS:
        before = set(prompts(Split(Given(old), part)))
        assert before == set(prompts(Split(grown, part))) & set(old)


def test_the_hash_is_the_same_on_every_machine():
    """Parts by the definition: the place of an 8-byte BLAKE2b digest on the line from 0 to 1."""
    expected = []
    for prompt in numbered(50).prompts:
        digest = blake2b(f"7 {prompt}".encode(), digest_size=8).hexdigest()
        if int(digest, 16) < 0.3 * 2**64:
            expected.append(prompt)
    assert prompts(Split(numbered(50), "a", shares={"a": 0.3, "b": 0.7}, seed=7)) == expected


def test_equal_prompts_and_equal_ids_are_never_parted():
    twice = Given(numbered(200).prompts * 2)
    grouped = Given(tuple(f"{i % 40}:{i}" for i in range(200)))
    for part in PARTS:
        assert set(Counter(prompts(Split(twice, part))).values()) == {2}
        ids = Counter(example.id for example in Split(grouped, part).examples())
        assert set(ids.values()) == {5}


def test_the_order_of_the_shares_does_not_matter():
    one = Split(numbered(100), "val", shares={"train": 0.7, "val": 0.2, "test": 0.1})
    other = replace(one, shares=dict(reversed(one.shares.items())))
    assert one.examples() == other.examples()


def test_another_seed_gives_another_split():
    one, other = (set(prompts(Split(numbered(1000), "test", seed=seed))) for seed in (0, 1))
    assert len(one & other) < 0.3 * len(one)


def test_a_part_may_be_cut():
    source = numbered(100)
    whole = Split(source, "train").examples()
    assert Split(source, "train", max_examples=7).examples() == whole[:7]


@given(
    names=st.lists(st.text(max_size=3), min_size=1, max_size=5, unique=True),
    sizes=st.lists(st.integers(1, 9), min_size=5, max_size=5),
)
def test_any_shares_cover_every_example_once(names, sizes):
    sizes = sizes[: len(names)]
    shares = {name: size / sum(sizes) for name, size in zip(names, sizes, strict=True)}
    source, found = numbered(60), []
    for name in names:
        with suppress(ValueError):  # A part may be empty, which is refused.
            found += prompts(Split(source, name, shares=shares))
    assert sorted(found) == sorted(source.prompts)


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"Split: none of the 1 examples .* 'val' with share 1e-09"
    ):
        Split(numbered(1), "val", shares={"train": 1 - 1e-9, "val": 1e-9}).examples()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"part": "dev"}, r"Split\.part: 'dev' is none of Split\.shares, which has \{train: 0\.8"),
        ({"shares": {"train": 0.8, "val": 0.1}}, r"add up to 1, got \{train: 0\.8, val: 0\.1\}"),
        ({"shares": {"train": 1.1, "val": -0.1}}, r"Split\.shares must be positive and add up"),
        ({"shares": {"train": float("nan")}}, r"Split\.shares must be positive and add up"),
        ({"shares": {}}, r"Split\.shares must be positive and add up to 1, got \{\}"),
        ({"max_examples": 0}, r"Split\.max_examples must be 1 or more, .* got 0"),
    ],
)
def test_a_split_that_is_none_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Split(**{"source": numbered(1), "part": "train", **settings})


# ---- Mixture


def test_a_mixture_has_its_sources_in_their_proportions():
    mixed = Mixture((numbered(50, "a"), numbered(50, "b")), (3, 1), num_examples=40)
    counts = Counter(prompt[0] for prompt in prompts(mixed))
    assert counts == {"a": 30, "b": 10}
    assert len(set(prompts(mixed))) == 40


def test_a_mixture_is_shuffled_and_reproducible():
    mixture = Mixture((numbered(50, "a"), numbered(50, "b")), (1, 1))
    assert mixture.examples() == mixture.examples()
    assert mixture.examples() != replace(mixture, seed=1).examples()
    first = Counter(prompt[0] for prompt in prompts(mixture)[:50])
    assert min(first["a"], first["b"]) > 10


def test_without_a_number_of_examples_none_comes_twice():
    sources = (numbered(700, "a"), numbered(300, "b"), numbered(900, "c"))
    mixed = prompts(Mixture(sources, (0.7, 0.3, 0.1)))
    assert Counter(prompt[0] for prompt in mixed) == {"a": 700, "b": 300, "c": 100}
    assert max(Counter(mixed).values()) == 1


@pytest.mark.parametrize("wanted", [1, 7, 8, 20, 21])
def test_a_source_that_is_too_small_is_repeated_evenly(wanted):
    mixed = prompts(
        Mixture((numbered(7, "a"), numbered(100, "b")), (1, 1), num_examples=2 * wanted)
    )
    counts = Counter(prompt for prompt in mixed if prompt[0] == "a")
    assert counts.total() == wanted
    assert max(counts.values()) - min([counts[f"a{i}"] for i in range(7)]) <= 1


def test_what_is_left_out_and_repeated_is_said(said):
    sources = (numbered(50, "a"), numbered(10, "b"), numbered(10, "c"), numbered(25, "d"))
    Mixture(sources, (1, 1, 1, 1), num_examples=100).examples()
    assert said == [
        "Mixture: 25 examples from the 50 of sources[0] (Given), 25 are left out.",
        "Mixture: 25 examples from the 10 of sources[1] (Given), each 2 or 3 times.",
        "Mixture: 25 examples from the 10 of sources[2] (Given), each 2 or 3 times.",
        "Mixture: 25 examples from the 25 of sources[3] (Given), each once.",
    ]


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    num_examples=st.integers(200, 400),
)
def test_the_counts_of_a_mixture_are_its_exact_shares_rounded(weights, num_examples):
    sources = tuple(numbered(30, f"{i} ") for i in range(len(weights)))
    mixed = prompts(Mixture(sources, tuple(weights), num_examples=num_examples))
    counts = Counter(prompt.split()[0] for prompt in mixed)
    assert len(mixed) == num_examples
    for i, weight in enumerate(weights):
        assert abs(counts[str(i)] - num_examples * weight / sum(weights)) < 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": (1,)}, "a weight for every source, got 2 sources and 1 weights"),
        ({"sources": (), "weights": ()}, "a weight for every source, got 0 sources"),
        ({"weights": (1, 0)}, r"Mixture\.weights\[1\] must be a positive number, got 0"),
        ({"weights": (float("nan"), 1)}, r"Mixture\.weights\[0\] must be .* got nan"),
        ({"num_examples": 0}, r"Mixture\.num_examples must be 1 or more"),
        ({"seed": -1}, r"Mixture\.seed must be 0 or more, got -1"),
    ],
)
def test_a_mixture_that_is_none_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Mixture(**{"sources": (numbered(1), numbered(2)), "weights": (1, 1), **settings})


def test_a_source_that_gives_nothing_to_a_mixture_is_named():
    with pytest.raises(
        ValueError, match=r"Mixture\.sources\[1\] has 5 examples and gives 0 of 3\."
    ):
        Mixture((numbered(5), numbered(5)), (100, 1), num_examples=3).examples()
    with pytest.raises(
        ValueError, match=r"Mixture\.sources\[0\] has 0 examples and gives 0 of 0\."
    ):
        Mixture((numbered(0), numbered(5)), (1, 1)).examples()


# ---- Sources within sources


@pytest.mark.filterwarnings("ignore:.*no row that comes to it")
def test_sources_are_nested_in_a_configuration(write):
    path = write("q,n,level\na,1,easy\nb,2,hard\nc,3,easy\n", "t.csv")
    content = yaml.safe_load(
        f"""
        - class_path: ntl_lightning.data.Mixture
          init_args:
            weights: [2, 1]
            num_examples: 30
            sources:
              - class_path: ntl_lightning.data.Split
                init_args:
                  part: train
                  shares: {{train: 0.9, val: 0.1}}
                  source:
                    class_path: ntl_lightning.data.Csv
                    init_args:
                      path: {path}
                      prompt: q
                      target: n
                      filters:
                        - {{column: level, one_of: [easy, 1, true]}}
                        - {{column: n, at_most: 3}}
              - class_path: ntl_lightning.data.Friedman
                init_args: {{num_examples: 10, seed: 3}}
        """
    )
    parser = ArgumentParser()
    parser.add_argument("--train", type=list[Source])
    (source,) = parser.instantiate_classes(parser.parse_object({"train": content})).train
    filters = (RowFilter("level", one_of=("easy", 1, True)), RowFilter("n", at_most=3))
    table = Csv(path, "q", "n", filters=filters)
    split = Split(table, "train", shares={"train": 0.9, "val": 0.1})
    assert source == Mixture((split, Friedman(10, seed=3)), (2, 1), num_examples=30)
    assert {prompt for prompt in prompts(source) if len(prompt) == 1} <= {"a", "c"}


def test_a_part_is_split_again_with_another_seed_only():
    inner = {"a": 0.5, "b": 0.5}
    for source in (Split(numbered(2000), "train"), Split(numbered(2000), "test")):
        with pytest.raises(ValueError, match=r"Split\.seed: .* seed 0 already"):
            Split(source, "a", shares=inner)
        with pytest.raises(ValueError, match=r"Split\.seed: .* seed 0 already"):
            Split(Mixture((source,), (1.0,)), "a", shares=inner)
        parts = [len(prompts(Split(source, part, shares=inner, seed=1))) for part in "ab"]
        assert sum(parts) == len(prompts(source))
        assert min(parts) > 0.4 * sum(parts)
