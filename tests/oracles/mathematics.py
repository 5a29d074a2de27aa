"""A solver of mathematics problems that starts from the text: a parser, fractions, elimination.

It shares nothing with the generators. What it can read is what the original data set's files hold:
the forms below were collected from there.
"""

import re
from fractions import Fraction
from functools import cache
from itertools import pairwise

NUMBER = r"-?\d+(?:\.\d+)?"
FIELDS = {
    "a": NUMBER,
    "b": NUMBER,
    "expression": r"[-+*/() 0-9]+",
    "dividend": r"[-+*/() 0-9a-z]+?",
    "divisor": r"[-+*/() 0-9a-z]+",
    "integer": r"\d+",
    "terms": rf"{NUMBER}(?:, {NUMBER})+",
    "equations": r"[-+* 0-9a-z]+ = [-+* 0-9a-z]+(?:, [-+* 0-9a-z]+ = [-+* 0-9a-z]+)?",
    "unknown": r"[a-z]",
    "value": rf"(?:{NUMBER}|[a-z])",
    "place": r"[a-z ]+",
    "nearest": r"(?:integer|10+|ten(?: thousand)?|one (?:hundred|(?:hundred )?thousand|million))",
    "places": r"(?:\d|zero|one|two|three|four|five|six|seven)",
    "name": r"[a-z]",
    "letter": r"[a-z]",
    "text": r"[-+*/() 0-9a-z.]+",
    "order": r"(?:first|second|third)",
}

SUMS = [
    *("{a} + {b}", "{a}+{b}", "Add together {a} and {b}.", "Add {a} and {b}."),
    *("Calculate {a} + {b}.", "Put together {a} and {b}.", "Sum {a} and {b}."),
    *("Total of {a} and {b}.", "What is {a} + {b}?", "What is {a} plus {b}?"),
    "Work out {a} + {b}.",
]
DIFFERENCES = [
    *("{a} - {b}", "Calculate {a} - {b}.", "Subtract {b} from {a}.", "What is {a} - {b}?"),
    *("What is {a} minus {b}?", "What is {a} take away {b}?", "What is {b} less than {a}?"),
    "Work out {a} - {b}.",
]
DISTANCES = [
    *("What is the difference between {a} and {b}?", "What is the distance between {a} and {b}?"),
]
PRODUCTS = [
    *("{a} * {b}", "{a} times {b}", "{a}*{b}", "Calculate {a}*{b}.", "Multiply {a} and {b}."),
    *("Product of {a} and {b}.", "What is the product of {a} and {b}?", "What is {a} times {b}?"),
    "Work out {a} * {b}.",
]
EXPRESSIONS = [
    *("{expression}", "Calculate {expression}.", "Evaluate {expression}."),
    *("What is the value of {expression}?", "What is {expression}?"),
]
SEQUENCES = [
    *("What comes next: {terms}?", "What is next in {terms}?"),
    "What is the next term in {terms}?",
]
REMAINDERS = [
    "Calculate the remainder when {dividend} is divided by {divisor}.",
    "What is the remainder when {dividend} is divided by {divisor}?",
]
ACCURACIES = [
    "the nearest {nearest}",
    *("{places} decimal place", "{places} decimal places", "{places} dp", "{places} dps"),
]
ROUNDINGS = [
    *(f"Round {{value}} to {accuracy}." for accuracy in ACCURACIES),
    *(f"What is {{value}} rounded to {accuracy}?" for accuracy in ACCURACIES),
]
LINEAR = ["Solve {equations} for {unknown}."]
PLACES = ["What is the {place} digit of {integer}?"]
FORMS = {
    "algebra__linear_1d": LINEAR,
    "algebra__linear_1d_composed": LINEAR,
    "algebra__linear_2d": LINEAR,
    "algebra__linear_2d_composed": LINEAR,
    "algebra__sequence_next_term": SEQUENCES,
    "arithmetic__add_or_sub": [*SUMS, *DIFFERENCES, *DISTANCES],
    "arithmetic__add_or_sub_big": [*SUMS, *DIFFERENCES, *DISTANCES],
    "arithmetic__add_sub_multiple": EXPRESSIONS,
    "arithmetic__add_sub_multiple_longer": EXPRESSIONS,
    "arithmetic__mixed_longer": EXPRESSIONS,
    "arithmetic__mul": PRODUCTS,
    "arithmetic__mul_big": PRODUCTS,
    "arithmetic__mul_div_multiple_longer": EXPRESSIONS,
    "numbers__div_remainder": REMAINDERS,
    "numbers__div_remainder_composed": REMAINDERS,
    "numbers__place_value": PLACES,
    "numbers__place_value_big": PLACES,
    "numbers__round_number": ROUNDINGS,
    "numbers__round_number_big": ROUNDINGS,
    "numbers__round_number_composed": ROUNDINGS,
}
"""The last sentence of a question, by module."""
SENTENCES = [
    "Let {name} = {text}.",
    "Let {name} be {text}.",
    "Let {name}({letter}) = {text}.",
    "Let {name}({letter}) be the {order} derivative of {text}.",
    "Suppose {equations}.",
]
"""The sentences before it."""

_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven"]
_NEAREST = {
    **{"integer": 0, "ten": 1, "one hundred": 2, "one thousand": 3, "ten thousand": 4},
    **{"one hundred thousand": 5, "one million": 6},
    **{str(10**power): power for power in range(1, 7)},
}
_PLACES = [
    *("units", "tens", "hundreds"),
    *(
        f"{prefix}{group}"
        for group in ("thousands", "millions", "billions", "trillions")
        for prefix in ("", "ten ", "hundred ")
    ),
]
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\*\*|[-+*/()a-z]")

ORDERS = {"first": 1, "second": 2, "third": 3}

Polynomial = dict[tuple[tuple[str, int], ...], Fraction]
"""Coefficients of products of letters: `3*x**2 - 1` is {(("x", 2),): 3, (): -1}."""


@cache
def pattern(form: str) -> re.Pattern[str]:
    """The regular expression of a form."""
    pieces = re.split(r"\{(\w+)\}", form)
    texts = [
        f"(?P<{piece}>{FIELDS[piece]})" if place % 2 else re.escape(piece)
        for place, piece in enumerate(pieces)
    ]
    return re.compile("".join(texts))


def matched(text: str, forms: list[str]) -> tuple[str, dict[str, str]]:
    """The one form that a text has, and its fields."""
    found = [(form, match) for form in forms if (match := pattern(form).fullmatch(text))]
    if len(found) != 1:
        raise ValueError(f"{text!r} has {len(found)} of the forms")
    form, match = found[0]
    return form, match.groupdict()


def sentences(question: str) -> list[str]:
    """All sentences of a question; the last one asks."""
    return re.split(r"(?<=\.) (?=[A-Z])", question)


def forms(module: str, question: str) -> list[str]:
    """The forms of all sentences of a question."""
    *before, last = sentences(question)
    return [matched(one, SENTENCES)[0] for one in before] + [matched(last, FORMS[module])[0]]


def solve(module: str, question: str) -> Fraction:
    """The answer to a question."""
    *before, last = sentences(question)
    known = Known()
    for sentence in before:
        known.read(sentence)
    form, fields = matched(last, FORMS[module])
    if form in SUMS:
        return Fraction(fields["a"]) + Fraction(fields["b"])
    if form in DIFFERENCES:
        return Fraction(fields["a"]) - Fraction(fields["b"])
    if form in DISTANCES:
        return abs(Fraction(fields["a"]) - Fraction(fields["b"]))
    if form in PRODUCTS:
        return Fraction(fields["a"]) * Fraction(fields["b"])
    if form in EXPRESSIONS:
        return constant(known.parse(fields["expression"]))
    if form in SEQUENCES:
        return next_term([Fraction(term) for term in fields["terms"].split(", ")])
    if form in REMAINDERS:
        return constant(known.parse(fields["dividend"])) % constant(known.parse(fields["divisor"]))
    if form in LINEAR:
        return known.solved(fields["equations"])[fields["unknown"]]
    if form in PLACES:
        return Fraction(fields["integer"][-1 - _PLACES.index(fields["place"])])
    return rounded(constant(known.parse(fields["value"])), power_of_ten(fields))


def power_of_ten(fields: dict[str, str]) -> int:
    """What a question asks to round to."""
    if "nearest" in fields:
        return _NEAREST[fields["nearest"]]
    places = fields["places"]
    return -(int(places) if places.isdigit() else _WORDS.index(places))


def rounded(value: Fraction, power: int) -> Fraction:
    """To a multiple of a power of ten; halves away from zero."""
    unit = Fraction(10) ** power
    steps = (abs(value) / unit + Fraction(1, 2)).__floor__()
    return steps * unit * (-1 if value < 0 else 1)


def next_term(terms: list[Fraction]) -> Fraction:
    """Of the polynomial of least degree through all; there must be a term more than it needs."""
    if not any(terms):
        return Fraction(0)
    if len(terms) < 2:
        raise ValueError("too few terms to tell")
    return terms[-1] + next_term([b - a for a, b in pairwise(terms)])


def constant(polynomial: Polynomial) -> Fraction:
    if polynomial.keys() - {()}:
        raise ValueError(f"{polynomial} is not known")
    return polynomial.get((), Fraction(0))


def power_of(letter: str, power: int = 1) -> tuple[tuple[str, int], ...]:
    return ((letter, power),) if power else ()


def derivative(polynomial: Polynomial, letter: str) -> Polynomial:
    """Of a polynomial in this letter alone."""
    powers = {key: dict(key).get(letter, 0) for key in polynomial}
    return {
        power_of(letter, powers[key] - 1): powers[key] * value
        for key, value in polynomial.items()
        if powers[key]
    }


def product(left: Polynomial, right: Polynomial) -> Polynomial:
    total: Polynomial = {}
    for first, a in left.items():
        for second, b in right.items():
            powers = dict(first)
            for letter, power in second:
                powers[letter] = powers.get(letter, 0) + power
            key = tuple(sorted(powers.items()))
            total[key] = total.get(key, Fraction(0)) + a * b
    return total


def linear_sum(left: Polynomial, right: Polynomial, factor: int | Fraction) -> Polynomial:
    """Left + factor * right."""
    total = dict(left)
    for key, value in right.items():
        total[key] = total.get(key, Fraction(0)) + factor * value
    return {key: value for key, value in total.items() if value}


class Known:
    """What the sentences read so far have told."""

    def __init__(self) -> None:
        self.values: dict[str, Fraction] = {}
        self.functions: dict[str, tuple[str, Polynomial]] = {}

    def read(self, sentence: str) -> None:
        form, fields = matched(sentence, SENTENCES)
        if form.startswith("Suppose"):
            self.values |= self.solved(fields["equations"])
        elif "letter" not in fields:
            self.values[fields["name"]] = constant(self.parse(fields["text"]))
        else:
            letter = fields["letter"]
            polynomial = self.parse(fields["text"], letter)
            for _ in range(ORDERS.get(fields.get("order", ""), 0)):
                polynomial = derivative(polynomial, letter)
            if {name for key in polynomial for name, _ in key} - {letter}:
                raise ValueError(f"{sentence!r} has letters that are not known")
            self.functions[fields["name"]] = letter, polynomial

    def solved(self, equations: str) -> dict[str, Fraction]:
        """The one solution of linear equations."""
        rows: dict[str, Polynomial] = {}
        for equation in equations.split(", "):
            left, right = map(self.parse, equation.split(" = "))
            row = linear_sum(left, right, -1)
            for letter, other in rows.items():
                row = linear_sum(row, other, -row.get(power_of(letter), Fraction(0)))
            ((letter, power), *others), *_ = (key for key in row if key)
            if power != 1 or others:
                raise ValueError(f"{equation!r} is not linear")
            key = power_of(letter)
            row = linear_sum({}, row, 1 / row[key])
            for name, other in rows.items():
                rows[name] = linear_sum(other, row, -other.get(key, Fraction(0)))
            rows[letter] = row
        return {
            letter: -constant(linear_sum(row, {power_of(letter): Fraction(1)}, -1))
            for letter, row in rows.items()
        }

    def collected(
        self, equations: str, unknown: str
    ) -> frozenset[frozenset[tuple[Fraction, Fraction, Fraction]]]:
        """What equations say: no order, and each with both signs, as its sides can be exchanged.

        Of each the coefficients of this unknown and of the other one, and the constant.
        """
        rows = []
        for equation in equations.split(", "):
            left, right = map(self.parse, equation.split(" = "))
            row = linear_sum(left, right, -1)
            first, last = (row.pop(key, Fraction(0)) for key in (power_of(unknown), ()))
            other = sum(row.values(), Fraction(0))
            rows.append(frozenset([(first, other, last), (-first, -other, -last)]))
        return frozenset(rows)

    def parse(self, text: str, free: str = "") -> Polynomial:
        """An expression; letters that are not known stay, and so does the free one."""
        if re.sub(r"\s", "", _TOKEN.sub("", text)):
            raise ValueError(f"{text!r} has characters of no expression")
        tokens = [*_TOKEN.findall(text), ""]
        value = self._sum(tokens, free)
        if tokens != [""]:
            raise ValueError(f"{text!r} goes on after an expression")
        return value

    def _sum(self, tokens: list[str], free: str) -> Polynomial:
        total = self._product(tokens, free)
        while tokens[0] in ("+", "-"):
            sign = 1 if tokens.pop(0) == "+" else -1
            total = linear_sum(total, self._product(tokens, free), sign)
        return total

    def _product(self, tokens: list[str], free: str) -> Polynomial:
        total = self._signed(tokens, free)
        while tokens[0] in ("*", "/"):
            if tokens.pop(0) == "*":
                total = product(total, self._signed(tokens, free))
            else:
                total = linear_sum({}, total, 1 / constant(self._signed(tokens, free)))
        return total

    def _signed(self, tokens: list[str], free: str) -> Polynomial:
        if tokens[0] == "-":
            tokens.pop(0)
            return linear_sum({}, self._signed(tokens, free), -1)
        total = self._atom(tokens, free)
        if tokens[0] == "**":
            tokens.pop(0)
            factor, total = total, {(): Fraction(1)}
            for _ in range(int(tokens.pop(0))):
                total = product(total, factor)
        return total

    def _atom(self, tokens: list[str], free: str) -> Polynomial:
        token = tokens.pop(0)
        if token == "(":
            value = self._sum(tokens, free)
            if tokens.pop(0) != ")":
                raise ValueError("a bracket is not closed")
            return value
        if token[0].isdigit():
            return linear_sum({}, {(): Fraction(token)}, 1)
        if tokens[0] == "(":
            letter, polynomial = self.functions[token]
            argument = self._atom(tokens, free)
            total: Polynomial = {}
            for key, value in polynomial.items():
                term = {(): value}
                for _ in range(dict(key).get(letter, 0)):
                    term = product(term, argument)
                total = linear_sum(total, term, 1)
            return total
        if token != free and token in self.values:
            return linear_sum({}, {(): self.values[token]}, 1)
        return {power_of(token): Fraction(1)}
