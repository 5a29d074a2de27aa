"""Arithmetic expressions as a user writes them, evaluated on arrays without running any code."""

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CONSTANTS", "FUNCTIONS", "Expression"]

Values = NDArray[np.float64]

FUNCTIONS: dict[str, Callable[[Values], Values]] = {
    "abs": np.abs,
    "arctan": np.arctan,
    "cos": np.cos,
    "exp": np.exp,
    "log": np.log,
    "log10": np.log10,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}
CONSTANTS = {"pi": math.pi}

_OPERATORS: dict[type[ast.operator], Callable[[Values, Values], Values]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    # Of float64, so that a tower of powers is infinite at once, not an integer without end.
    ast.Pow: np.power,
}
_LONGEST, _DEEPEST = 2000, 100


@dataclass(frozen=True)
class Expression:
    """An expression of numbers, names, `+ - * / **`, brackets and `FUNCTIONS` of one argument.

    >>> half = Expression.parse("-sin(pi * x) / 2", names=["x"], where="Formula.expression")
    >>> half({"x": np.array([0.0, 0.5])}).tolist()
    [-0.0, -0.5]
    """

    text: str
    """As it was written."""
    tree: ast.expr
    """Its syntax tree, which holds nothing that `parse` does not know."""

    @classmethod
    def parse(cls, text: str, names: Collection[str], where: str) -> "Expression":
        """Read an expression; no part of it is ever run as Python.

        Args:
            text: In Python's notation.
            names: What may stand in it beside `CONSTANTS`.
            where: The configuration key it was written at, for messages.

        Raises:
            ValueError: If it is no expression, or has a part that is not allowed; the message
                names the part.
        """
        if len(text) > _LONGEST:
            raise ValueError(
                f"{where} has {len(text)} characters, but may have {_LONGEST}. Shorten it."
            )
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"{where}: {text!r} is no expression ({error}). Write it like 3*x + sin(y)/2."
            ) from error
        _check(tree, text.strip(), names, where, depth=0)
        return cls(text, tree)

    def __call__(self, values: Mapping[str, Values]) -> Values:
        """Evaluate it in float64, which may give infinities and NaN.

        Args:
            values: Of the names, float64 of one shape.

        Returns:
            Float64 of that shape.
        """
        shape = np.broadcast_shapes(*(value.shape for value in values.values()))
        with np.errstate(all="ignore"):
            return np.broadcast_to(_value(self.tree, values), shape)


def _check(node: ast.AST, text: str, names: Collection[str], where: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError(
            f"{where} is nested more than {_DEEPEST} levels deep (a sum counts its terms). "
            "Shorten it."
        )
    parts: list[ast.AST] = []
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            try:
                is_allowed = math.isfinite(float(number))
            except OverflowError:
                is_allowed = False
        case ast.Name(id=name):
            is_allowed = name in names or name in CONSTANTS
        case ast.BinOp(left=left, op=op, right=right):
            is_allowed = type(op) in _OPERATORS
            parts = [left, right]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            is_allowed = True
            parts = [operand]
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            is_allowed = name in FUNCTIONS and not isinstance(argument, ast.Starred)
            parts = [argument]
        case _:
            is_allowed = False
    if not is_allowed:
        part = ast.get_source_segment(text, node) or text
        is_caret = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor)
        hint = " Write ** for a power." if is_caret else ""
        raise ValueError(
            f"{where}: {part!r} is not allowed in {text!r}.{hint} An expression has finite "
            f"numbers, the inputs {', '.join(names)}, {', '.join(CONSTANTS)}, + - * / **, "
            f"brackets, and the functions {', '.join(FUNCTIONS)} of one argument."
        )
    for child in parts:
        _check(child, text, names, where, depth + 1)


def _value(node: ast.expr, values: Mapping[str, Values]) -> Values:
    match node:
        case ast.Constant(value=int() | float() as number):
            return np.asarray(float(number))
        case ast.Name(id=name):
            return values[name] if name in values else np.asarray(CONSTANTS[name])
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.UnaryOp(operand=operand):
            return -_value(operand, values)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return FUNCTIONS[name](_value(argument, values))
    raise AssertionError(f"parse lets no {type(node).__name__} pass")
