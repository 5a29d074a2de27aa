from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ntl_lightning.callbacks.figures import (
    digit_at,
    digit_confusion_figure,
    digit_places,
    predicted_against_true_figure,
)

Pairs = list[tuple[Decimal, Decimal]]


def pairs_of(*pairs: tuple[str, str]) -> Pairs:
    return [(Decimal(true), Decimal(predicted)) for true, predicted in pairs]


def drawn_points(figure: Figure) -> list[tuple[float, float]]:
    return [tuple(point) for point in figure.axes[0].collections[0].get_offsets().tolist()]


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def heat_map(figure: Figure, title: str) -> np.ma.MaskedArray:
    axes: list[Axes] = [axes for axes in figure.axes if axes.get_title().startswith(title)]
    assert len(axes) == 1
    return axes[0].images[0].get_array()


def panel_titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.images and axes.get_title()]


@given(st.integers(-(10**30), 10**30), st.integers(-20, 5), st.integers(-25, 40))
def test_digit_at_equals_the_digit_in_fixed_point_notation(
    digits: int, exponent: int, place: int
) -> None:
    value = Decimal(digits).scaleb(exponent)
    whole, _, decimals = f"{abs(value):f}".partition(".")
    if place >= 0:
        expected = whole.zfill(place + 1)[-1 - place]
    else:
        expected = decimals.ljust(-place, "0")[-1 - place]
    assert digit_at(value, place) == int(expected)


@pytest.mark.parametrize(
    ("values", "places", "num_left_out"),
    [
        (["0"], [0], 0),
        (["7", "345"], [0, 1, 2], 0),
        (["7.50"], [-1, 0], 0),
        (["0.125"], [-2, -1, 0], 1),
        (["12345678"], [0, 1, 2, 3, 4, 5], 2),
        (["1e3"], [0, 1, 2, 3], 0),
        (["123456.25"], [-2, -1, 0, 1, 2, 3], 2),
    ],
)
def test_places_start_at_the_decimals_and_end_after_six(
    values: list[str], places: list[int], num_left_out: int
) -> None:
    assert digit_places([Decimal(value) for value in values]) == (places, num_left_out)


def test_digits_are_aligned_at_the_decimal_point_without_the_sign() -> None:
    pairs = pairs_of(("-12", "12.0"), ("7", "70"), ("7", "7"))
    figure = digit_confusion_figure(pairs, [0, 1], "title")
    assert panel_titles(figure) == ["tens: 66.7 % right", "ones: 66.7 % right"]
    ones = heat_map(figure, "ones")
    assert ones[2, 2] == 1
    assert (ones[7, 0], ones[7, 7]) == (0.5, 0.5)
    tens = heat_map(figure, "tens")
    assert tens[1, 1] == 1
    assert (tens[0, 7], tens[0, 0]) == (0.5, 0.5)


def test_rows_add_up_to_one_and_digits_that_do_not_occur_are_blank() -> None:
    figure = digit_confusion_figure(pairs_of(("3", "3"), ("3", "4"), ("5", "3")), [0], "title")
    shares = heat_map(figure, "ones")
    present = [row for row in range(10) if np.isfinite(np.ma.filled(shares[row], np.nan)).all()]
    assert present == [3, 5]
    assert shares[present].sum(axis=1).tolist() == [1.0, 1.0]


def test_places_are_shown_as_numbers_are_written() -> None:
    figure = digit_confusion_figure(pairs_of(("12345.6", "1")), [-1, 0, 1, 2, 3, 4], "title")
    assert [title.partition(":")[0] for title in panel_titles(figure)] == [
        "ten thousands",
        "thousands",
        "hundreds",
        "tens",
        "ones",
        "tenths",
    ]


def test_scatter_has_true_values_on_the_x_axis() -> None:
    figure = predicted_against_true_figure(pairs_of(("1", "2"), ("3", "-4")), [], "title")
    assert drawn_points(figure) == [(1.0, 2.0), (3.0, -4.0)]
    assert figure.axes[0].get_xlabel() == "true value"
    assert figure.axes[0].get_ylabel() == "predicted value"
    assert figure.axes[0].get_xlim() == figure.axes[0].get_ylim()
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == line.get_ydata().tolist()


def test_answers_without_a_number_are_counted_and_marked_at_their_true_value() -> None:
    figure = predicted_against_true_figure(
        pairs_of(("1", "2")), [Decimal(5), Decimal("1e200")], "title"
    )
    assert legend_texts(figure) == ["predicted = true", "answer (1)", "no readable number (2)"]
    assert figure.axes[0].lines[1].get_xdata().tolist() == [5.0]


def test_giant_answers_are_counted_instead_of_drawn() -> None:
    figure = predicted_against_true_figure(pairs_of(("1", "2"), ("3", "1e101")), [], "title")
    assert drawn_points(figure) == [(1.0, 2.0)]
    assert "beyond 1e100, not drawn (1)" in legend_texts(figure)


def test_scale_is_linear_unless_most_values_would_be_one_point() -> None:
    near = pairs_of(*((str(n), str(n + 1)) for n in range(100)))
    assert predicted_against_true_figure(near, [], "").axes[0].get_xscale() == "linear"
    far = [*near, (Decimal(5), Decimal(10**9))]
    axes = predicted_against_true_figure(far, [], "").axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("symlog", "symlog")
    assert "logarithmic beyond" in axes.get_xlabel()


WIDE = pairs_of(*((f"{sign}1e{n}", f"{sign}2e{n}") for n in range(-3, 60) for sign in "+-"))
NARROW = pairs_of(("0.001", "0.002"), ("0.0011", "0.0012"))


@pytest.mark.parametrize(
    "pairs", [[], pairs_of(("7", "7")), pairs_of(("0", "0")), NARROW, WIDE, WIDE[::2], WIDE[1::2]]
)
def test_no_two_tick_labels_overlap_and_all_points_are_inside(pairs: Pairs) -> None:
    figure = predicted_against_true_figure(pairs, [], "val at step 1")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    for side in (axes.xaxis, axes.yaxis):
        low, high = sorted(side.get_view_interval())
        boxes = [
            label.get_window_extent()
            for label, place in zip(side.get_ticklabels(), side.get_ticklocs(), strict=True)
            if low <= place <= high and label.get_text()
        ]
        assert len(boxes) >= 2
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    low, high = axes.get_xlim()
    assert all(low < float(x) < high and low < float(y) < high for x, y in pairs)
