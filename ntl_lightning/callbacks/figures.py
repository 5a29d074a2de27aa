"""Pictures of answers against true values. Nothing here touches pyplot or any global state."""

import math
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator

__all__ = ["digit_at", "digit_confusion_figure", "digit_places", "predicted_against_true_figure"]

_LARGEST_DRAWN = 1e100
_MOST_PLACES = 6
_PLACE_NAMES = {
    -2: "hundredths",
    -1: "tenths",
    0: "ones",
    1: "tens",
    2: "hundreds",
    3: "thousands",
    4: "ten thousands",
    5: "hundred thousands",
}


def digit_at(value: Decimal, place: int) -> int:
    """The digit of |value| that counts 10^place; 0 beyond its first and last digit.

    >>> [digit_at(Decimal("-305.27"), place) for place in (3, 2, 1, 0, -1, -2, -3)]
    [0, 3, 0, 5, 2, 7, 0]
    """
    parts = value.as_tuple()
    from_the_right = place - int(parts.exponent)
    if not 0 <= from_the_right < len(parts.digits):
        return 0
    return parts.digits[-1 - from_the_right]


def digit_places(values: Sequence[Decimal]) -> tuple[list[int], int]:
    """Which powers of ten to compare digits at: from the smallest, at most six.

    Args:
        values: The true values, at least one.

    Returns:
        The exponents in ascending order, from hundredths at the lowest, and how many places of the
        values are left out.

    >>> digit_places([Decimal("12.5"), Decimal("7")])
    ([-1, 0, 1], 0)
    """
    normal = [value.normalize() for value in values]
    lowest = min(0, *(int(value.as_tuple().exponent) for value in normal))
    highest = max(0, *(value.adjusted() for value in normal))
    places = range(max(lowest, -2), highest + 1)
    return list(places[:_MOST_PLACES]), highest + 1 - lowest - len(places[:_MOST_PLACES])


def predicted_against_true_figure(
    pairs: Sequence[tuple[Decimal, Decimal]], unread: Sequence[Decimal], title: str
) -> Figure:
    """Scatter of predicted against true values with the line on which they are equal.

    Both axes have the same limits. Their scale is linear around 0 and logarithmic beyond where a
    linear one would squeeze most values into a point.

    Args:
        pairs: (true, predicted) of the answers with a number.
        unread: The true values of the answers without one; ticks at the lower edge. All values are
            within float64; beyond 1e100 they are counted instead of drawn.
        title: Title of the figure; its lines should have at most 70 characters.
    """
    true, predicted = (
        np.array([float(pair[side]) for pair in pairs], dtype=float) for side in (0, 1)
    )
    missed = np.array([float(value) for value in unread], dtype=float)
    drawn = (np.abs(true) <= _LARGEST_DRAWN) & (np.abs(predicted) <= _LARGEST_DRAWN)
    missed_drawn = missed[np.abs(missed) <= _LARGEST_DRAWN]

    figure = Figure(figsize=(6.4, 7.2), layout="constrained")
    axes = figure.add_subplot()
    every_value = np.concatenate([true[drawn], predicted[drawn], missed_drawn])
    axes.set(xlabel="true value", ylabel="predicted value")
    low, high = _set_scale(axes, every_value)
    axes.plot([low, high], [low, high], color="0.6", linewidth=1, label="predicted = true")
    axes.scatter(
        true[drawn],
        predicted[drawn],
        s=14,
        alpha=max(0.3, min(0.7, 60 / max(1, len(pairs)))),
        linewidths=0,
        color="tab:blue",
        label=f"answer ({int(drawn.sum())})",
        zorder=2,
    )
    if len(missed):
        axes.plot(
            missed_drawn,
            np.full(len(missed_drawn), 0.015),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker="|",
            markersize=9,
            color="tab:red",
            label=f"no readable number ({len(missed)})",
        )
    if not drawn.all():
        axes.plot([], [], " ", label=f"beyond 1e100, not drawn ({int((~drawn).sum())})")
    axes.set(xlim=(low, high), ylim=(low, high), box_aspect=1)
    legend = figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    figure.suptitle(title, fontsize="medium")
    return figure


def _set_scale(axes: Axes, values: np.ndarray) -> tuple[float, float]:
    """Choose the scale of both axes and their common limits for finite values (N,)."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    sizes = np.abs(values[values != 0])
    # Logarithmic where half of the values would share less than 2 % of a linear axis.
    if len(sizes) and np.median(sizes) < 0.01 * sizes.max():
        smallest = math.floor(math.log10(float(np.quantile(sizes, 0.05))))
        decades = math.log10(float(sizes.max())) - smallest
        linear_up_to = 10.0**smallest
        step = math.ceil(decades / 5)
        powers = [10.0 ** (smallest + step * n) for n in range(1, math.ceil(decades / step) + 1)]
        margin = 10 ** max(0.3, 0.03 * decades)
        low = low * margin if low < 0 else -linear_up_to / 2
        high = high * margin if high > 0 else linear_up_to / 2
        # Wide enough for labels at 0 and at the first powers beside it.
        scale = {"linthresh": linear_up_to, "linscale": max(1.0, decades / 8)}
        axes.set_xscale("symlog", **scale)
        axes.set_yscale("symlog", **scale)
        ticks = [t for t in (*(-p for p in powers[::-1]), 0.0, *powers) if low <= t <= high]
        for side, name in ((axes.xaxis, "true"), (axes.yaxis, "predicted")):
            side.set_major_locator(FixedLocator(ticks))
            side.set_minor_locator(NullLocator())
            side.set_label_text(f"{name} value (logarithmic beyond \u00b1{linear_up_to:g})")
        return low, high
    margin = 0.05 * (high - low) or max(1.0, 0.1 * abs(high))
    return low - margin, high + margin


def digit_confusion_figure(
    pairs: Sequence[tuple[Decimal, Decimal]], places: Sequence[int], title: str
) -> Figure:
    """One heat map per place: of each true digit, which digits were predicted.

    The values are aligned at the decimal point, missing digits at either end are zeros, the sign
    is ignored. Each row adds up to 100 %, cells below 0.5 % have no text; rows of digits that do
    not occur are grey.

    Args:
        pairs: (true, predicted), at least one.
        places: Exponents of the powers of ten, ascending; the figure shows them as one writes
            them, the largest first.
        title: Title of the figure.
    """
    columns = min(3, len(places))
    rows = math.ceil(len(places) / columns)
    figure = Figure(
        figsize=(max(6.4, 4 * columns + 1.2), 4.6 * rows + 0.8),
        layout=ConstrainedLayoutEngine(h_pad=0.1, compress=True),
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    colours = colormaps["Blues"].with_extremes(bad="0.88")
    for place, axes in zip(reversed(places), panels, strict=False):
        counts = np.zeros((10, 10))
        for true, predicted in pairs:
            counts[digit_at(true, place), digit_at(predicted, place)] += 1
        occurrences = counts.sum(axis=1, keepdims=True)
        shares = np.divide(
            counts, occurrences, out=np.full((10, 10), np.nan), where=occurrences > 0
        )
        image = axes.imshow(shares, cmap=colours, vmin=0, vmax=1)
        for row, column in zip(*np.nonzero(counts), strict=True):
            percent = f"{100 * shares[row, column]:.0f}"
            if percent != "0":
                colour = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, percent, ha="center", va="center", fontsize=7, color=colour)
        axes.set_title(f"{_PLACE_NAMES.get(place, f'10^{place}')}: {_right(counts)} right", size=10)
        axes.set(xticks=range(10), yticks=range(10), xlabel="predicted digit", ylabel="true digit")
        axes.tick_params(labelsize=8)
    for axes in panels[len(places) :]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=panels.tolist(), shrink=0.8, aspect=30)
    bar.set_label("share of the true digit (cells: percent)")
    figure.suptitle(title, fontsize="medium")
    return figure


def _right(counts: np.ndarray) -> str:
    return f"{100 * np.trace(counts) / counts.sum():.1f} %"
