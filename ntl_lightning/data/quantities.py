"""Numbers that are no quantities, such as ids and categories: where they stand in a target.

Between the ids 17 and 18 there is no distance that would mean anything. Labels marked here are
learnt by cross entropy alone, and the number losses pass them over.
"""

import re
from collections.abc import Sequence

__all__ = ["compile_patterns", "matched_spans", "quantity_tokens"]


def compile_patterns(patterns: Sequence[str], where: str) -> tuple[re.Pattern[str], ...]:
    """Regular expressions as a user wrote them.

    Args:
        patterns: In the syntax of Python's `re`.
        where: Their configuration key, for messages.

    Raises:
        ValueError: If one is no regular expression, or there is a text where a list is wanted.
    """
    if isinstance(patterns, str):
        raise ValueError(f"{where} must be a list of regular expressions, got {patterns!r} alone")
    compiled = []
    for number, pattern in enumerate(patterns):
        try:
            compiled.append(re.compile(pattern))
        except (re.error, OverflowError) as error:
            raise ValueError(
                f"{where}[{number}]: {pattern!r} is no regular expression: {error}. Write it as "
                "for Python's re; a backslash before a character takes it as it stands"
            ) from error
    return tuple(compiled)


def matched_spans(pattern: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    r"""Start and end of what a pattern finds in a text: its groups, or where it has none, all.

    >>> matched_spans(re.compile(r"id (\d+)"), "id 17 has 4, id 8 has 30")
    [(3, 5), (16, 17)]
    """
    groups = range(1, pattern.groups + 1) if pattern.groups else (0,)
    spans = [match.span(group) for match in pattern.finditer(text) for group in groups]
    # A group that had no part in the match begins and ends at -1.
    return [(start, end) for start, end in spans if start < end]


def quantity_tokens(
    text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[bool]:
    """Which tokens of a text count as quantities, should they be numbers.

    A token counts unless it shares a character with a span that is no white space: those that
    reach beyond a span do not count, those that merely begin with the blank behind it do.

    Args:
        text: The text.
        offsets: Start and end of every token in it.
        spans: Start and end of what is no quantity; they may overlap.

    >>> quantity_tokens("17 345", [(0, 2), (2, 4), (4, 6)], [(0, 3)])
    [False, True, True]
    """
    marked = bytearray(len(text))
    for start, end in spans:
        marked[start:end] = bytes(not character.isspace() for character in text[start:end])
    return [1 not in marked[start:end] for start, end in offsets]
