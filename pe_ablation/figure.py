"""The two figures: extrapolation curves and loss by position. Numbers come from `tables.summary` and run records."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from pe_ablation import record
from pe_ablation.tables import DAGGER, ORDER, Frame, label, named_after, presentation, select, summary

# Of the names in ORDER. The first seven are Okabe and Ito's colours (2008), told apart by the colour-blind; their
# yellow is too faint for a line on white. The others are as far from those and from each other as they can be.
COLOURS = (
    "#4D4D4D", "#E69F00", "#CC79A7", "#0072B2", "#009E73", "#D55E00", "#56B4E9", "#0000F0", "#7800C0", "#604878",
    "#F00048", "#F00000", "#00A800", "#D87860", "#F000F0", "#C078F0", "#3078F0", "#F00090",
)  # fmt: skip
MARKERS = (
    "o", "D", "*", "s", "^", "v", "P", "X", "p", "h", "<", ">", "d", "8", "H", (4, 1, 0), (6, 1, 0), (3, 1, 0),
)  # fmt: skip
SPARE_COLOURS = ("#332288", "#882255", "#8C6D1F", "#117733", "#999933", "#661100", "#6699CC")
SPARE_MARKERS = ("X", "p", "h", "<", ">", "d", "8")
NULL_LINES = {"window_mask": (0, (4, 2)), "window_recompute": (0, (1, 1.6))}
NULL_NAMES = {
    "window_mask": "null: last train-length keys",
    "window_recompute": "null: fresh train-length context",
}
INK, FAINT = "#222222", "#8A8A8A"
SIZE, SMALL = 9.0, 8.0  # points
PANEL = (4.3, 3.5)  # inches
BELOW = 0.7  # inches below a panel: its axis and five rows of a legend
ROW = 0.17  # inches of a further row
NAMES = 15  # how many fit beside a panel of usual height
MANY = 12  # arms past which the nulls' lines are left out
SHADES = (("white", 0.4), ("black", 0.4), ("white", 0.6))  # of a family's colour: what is mixed in, and how much
Target = Any  # a path or an open binary file, as matplotlib takes it
Marker = Any  # a name or (points, style, angle), as matplotlib takes it
Looks = dict[str, tuple[str, Marker]]  # label -> colour, marker


def curves(
    rows: pd.DataFrame,
    path: Target,
    *,
    protocol: str = "targets",
    split: str | None = None,
    settings: str | None = None,
) -> Figure:
    """Draw bits per byte over evaluation length, a panel per training length, and save it as png to `path`.

    A colour and marker per arm; both nulls dashed and dotted in the arm's colour; a band from the lowest to the highest
    seed. A point is drawn only where every planned seed was scored with a finite number; what is left out is named.
    Where it depends on parameters that never trained its marker is open, and the arm's name has a dagger. Of many arms
    the panels are taller, and the nulls are left out.
    """
    chosen, part = select(rows, protocol=protocol, split=split, settings=settings)
    choice = chosen._asdict()
    shown: Frame = summary(rows, null="none", **choice)
    many = shown.groupby("train_length").label.nunique().max() > MANY
    others = () if many else NULL_LINES
    frames: dict[str, Frame] = {"none": shown} | {null: summary(rows, null=null, **choice) for null in others}
    trained = sorted(part.train_length.unique())
    looks = _looks(shown.label.unique())
    figure, axes = _panels(len(trained), PANEL[1] * max(1.0, len(shown.label.unique()) / NAMES))
    for axis, train_length in zip(axes, trained, strict=True):
        panel = {null: frame[frame.train_length == train_length] for null, frame in frames.items()}
        _draw_panel(axis, panel, looks, train_length)
        axis.set_xlabel("evaluation length (tokens)")
    _share_limits(axes)
    gap = 0.062 * ((PANEL[1] + BELOW) / figure.get_figheight())
    for axis, train_length in zip(axes, trained, strict=True):
        _name_lines(axis, shown[shown.train_length == train_length], looks, gap)
    axes[0].set_ylabel(f"bits per byte ({chosen.protocol}, {chosen.split})")
    nulls = [null for null in others if len(frames[null])]
    untrained = bool((shown.untrained & np.isfinite(shown["mean"])).any())
    _legend(figure, _styles(nulls, int(shown.seeds.max()), untrained, many))
    save(figure, path)
    return figure


def positions(
    rows: pd.DataFrame,
    runs_dir: str | os.PathLike[str],
    path: Target,
    *,
    protocol: str = "blocks",
    split: str | None = None,
    settings: str | None = None,
) -> Figure:
    """Draw bits per byte over the target's position in its window and save it as png to `path`.

    `rows` are those of `runs_dir`, which holds the sums per position. A panel per training length, each arm at its
    longest scored length; sums over documents and seeds, in bins that grow by a quarter octave. Raises ValueError if
    nothing was scored.
    """
    chosen, part = select(rows, protocol=protocol, split=split, settings=settings)
    part = part[(part.null == "none") & (part.status == "ok")]
    if part.empty:
        raise ValueError(f"{runs_dir}: no scored cell of protocol {protocol!r}; add it to eval.protocols and evaluate")
    arms = zip(part.encoding, part.variant, part["transform"], strict=True)
    part = part.assign(label=[label(*each) for each in arms])
    part = part.loc[sorted(part.index, key=lambda at: presentation(part.loc[at]))]
    names, trained = part.label.unique(), sorted(part.train_length.unique())
    looks = _looks(names)
    rows_below = math.ceil((len(names) + 1) / _columns(len(trained)))
    figure, axes = _panels(len(trained), PANEL[1] + ROW * max(0, rows_below - 5))
    ticks = [2**power for power in range(int(math.log2(part.eval_length.max())) + 1)]
    for axis, train_length in zip(axes, trained, strict=True):
        for name, own in part[part.train_length == train_length].groupby("label", sort=False):
            centres, values = _by_position(own[own.eval_length == own.eval_length.max()], Path(runs_dir))
            colour, marker = looks[name]
            axis.plot(centres, values, color=colour, marker=marker, markevery=4, **_line(marker))
        _dress(axis, train_length, ticks)
        axis.set_xlabel("position in the window (tokens)")
    _share_limits(axes)
    axes[0].set_ylabel(f"bits per byte ({chosen.protocol}, {chosen.split})")
    _legend(figure, [_handle(*looks[name], name) for name in names])
    save(figure, path)
    return figure


def _by_position(cells: Frame, root: Path) -> tuple[np.ndarray, np.ndarray]:
    """(bin centres in positions from 1, bits per byte) pooled over documents and seeds of one arm and length."""
    nats, size = 0.0, 0.0
    for row in cells.itertuples():
        run = record.Run(root / str(row.run))
        stored = next(cell for cell in run.cells() if cell["key"] == row.key)
        arrays = run.arrays(stored)
        nats, size = nats + arrays["nats"].sum(axis=0), size + arrays["bytes"].sum(axis=0)
    nats, size = np.asarray(nats), np.asarray(size)
    edges = np.unique(np.round(2.0 ** np.arange(0, math.log2(len(nats)) + 0.5, 0.25)).astype(int) - 1)
    edges = edges[(edges == 0) | (edges < 0.87 * len(nats))]  # no sliver of a bin at the end
    binned_nats, binned_size = np.add.reduceat(nats, edges), np.add.reduceat(size, edges)
    ends = np.append(edges[1:], len(nats))
    filled = binned_size > 0
    centres = np.sqrt((edges + 1.0) * ends)
    return centres[filled], binned_nats[filled] / binned_size[filled] / math.log(2)


def _looks(labels: Sequence[str]) -> Looks:
    """Colour and marker per label: known encodings keep theirs in every figure, others take the spare ones in turn.

    Where others are too many for that, those named after a known encoding have shades of its colour.
    """
    looks: Looks = {name: (COLOURS[at], MARKERS[at]) for at, name in enumerate(ORDER)}
    others = [name for name in labels if name not in looks]
    kin = {name: named_after(name.split(" ")[0]) for name in others} if len(others) > len(SPARE_COLOURS) else {}
    for at, name in enumerate(name for name in others if kin.get(name) is None):
        looks[name] = (SPARE_COLOURS[at % len(SPARE_COLOURS)], SPARE_MARKERS[at % len(SPARE_MARKERS)])
    for family in dict.fromkeys(each for each in kin.values() if each is not None):
        colour, own = looks[family]
        markers = [marker for marker in MARKERS if marker != own]
        for at, name in enumerate(name for name in others if kin[name] == family):
            looks[name] = (_mixed(colour, *SHADES[at % len(SHADES)]), markers[at % len(markers)])
    return looks


def _mixed(colour: str, other: str, share: float) -> str:
    """A colour with a share of another in it."""
    red, green, blue = ((1 - share) * a + share * b for a, b in zip(to_rgb(colour), to_rgb(other), strict=True))
    return to_hex((red, green, blue))


def _panels(count: int, height: float = PANEL[1]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(PANEL[0] * count + 0.9, height + BELOW), layout="constrained", dpi=200)
    axes = figure.subplots(1, count, squeeze=False, sharey=True)[0]
    return figure, list(axes)


def _draw_panel(axis: Axes, frames: dict[str, Frame], looks: Looks, train_length: int) -> None:
    for name, group in frames["none"].groupby("label", sort=False):
        colour, marker = looks[name]
        means = group["mean"].where(np.isfinite(group["mean"]))  # a line breaks at NaN
        over = 4 if means.isna().any() else 3  # a curve that ends early starts among all the others
        axis.plot(group.eval_length, means, color=colour, marker=marker, label=name, zorder=over, **_line(marker))
        if group.untrained.any():
            hollow = _line(marker) | {"markeredgecolor": colour, "markerfacecolor": "white", "markeredgewidth": 1.1}
            places, heights = group.eval_length[group.untrained], means[group.untrained]
            axis.plot(places, heights, linestyle="none", marker=marker, zorder=over, **hollow)
        if (group.n > 1).any():
            axis.fill_between(group.eval_length, group.low, group.high, color=colour, alpha=0.18, lw=0, zorder=1)
        for null in (null for null in NULL_LINES if null in frames):
            other = frames[null][frames[null].label == name]
            if np.isfinite(other["mean"]).any():
                curve = pd.concat([group[group.eval_length == train_length], other])
                means = curve["mean"].where(np.isfinite(curve["mean"]))
                style = {"linestyle": NULL_LINES[null], "lw": 1.1, "alpha": 0.75, "zorder": 2}
                axis.plot(curve.eval_length, means, color=colour, **style)
    _dress(axis, train_length, sorted(frames["none"].eval_length.unique()))


def _dress(axis: Axes, train_length: int, ticks: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    plain(axis, f"trained at {train_length} tokens")
    if len(ticks) > 9:
        axis.tick_params(axis="x", rotation=45)
    axis.axvline(train_length, color=FAINT, lw=0.9, zorder=0)
    axis.grid(axis="y", color="#E6E6E6", lw=0.6)
    axis.set_axisbelow(True)


def plain(axis: Axes, title: str) -> None:
    """The look of every panel: a title on the left, no frame, small dark text."""
    axis.tick_params(colors=INK, labelsize=SMALL, length=3)
    axis.set_title(title, fontsize=SIZE, color=INK, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)
    for name in (axis.xaxis.label, axis.yaxis.label):
        name.set(size=SIZE, color=INK)


def _share_limits(axes: Sequence[Axes]) -> None:
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    axes[0].set_ylim(low, high)


def _name_lines(axis: Axes, frame: Frame, looks: Looks, gap: float) -> None:
    """Names at the right ends of the lines, spread so that none overlap; arms that end early below, with the reason.

    `gap` is how far apart, as a share of the axis.
    """
    longest = frame.eval_length.max()
    reach, early = [], []
    for name, group in frame.groupby("label", sort=False):
        known = group[np.isfinite(group["mean"])]
        if len(known) and known.eval_length.max() == longest:
            hole = f" ({_ending(group, known)} in between)" if len(known) < len(group) else ""
            reach.append((float(known["mean"].iloc[-1]), str(name), (DAGGER if known.untrained.any() else "") + hole))
        else:
            early.append((str(name), _ending(group, known)))
    low, high = axis.get_ylim()
    height = (high - low) * gap
    top = low + height * (len(early) + 0.5) if early else low
    reach.sort()
    spots = spread([value for value, *_ in reach], height, top, high)
    for (value, name, mark), spot in zip(reach, spots, strict=True):
        _name(axis, name + mark, looks[name], spot, value)
    for at, (name, reason) in enumerate(reversed(early)):
        _name(axis, f"{name}: {reason}", looks[name], low + height * (at + 0.3))


def _name(axis: Axes, text: str, look: tuple[str, Marker], spot: float, value: float | None = None) -> None:
    """Marker and text right of the axis at height `spot`, tied to the line's end at `value` if there is one."""
    place, (colour, marker) = axis.get_yaxis_transform(), look
    if value is not None:
        axis.plot([1.0, 1.03], [value, spot], transform=place, color=colour, lw=0.8, alpha=0.6, clip_on=False)
    axis.plot([1.045], [spot], transform=place, color=colour, marker=marker, clip_on=False, **_line(marker))
    axis.text(1.068, spot, text, transform=place, color=colour, va="center", ha="left", fontsize=SMALL)


def _ending(group: Frame, known: Frame) -> str:
    """Why a curve stops: 'n/a past 64', or the status alone if nothing is there."""
    beyond = group[~group.eval_length.isin(known.eval_length)]
    reasons = [status if status != "ok" else "not finite" for status in beyond.sort_values("eval_length").status]
    reason = ", ".join(dict.fromkeys(reasons))
    if not len(known):
        return reason
    gaps = (beyond.eval_length < known.eval_length.max()).any()
    return reason if gaps else f"{reason} past {known.eval_length.max()}"


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending `values` moved as little as a sweep up and one down need to lie `gap` apart within [low, high]."""
    spots = list(values)
    for at in range(len(spots)):
        spots[at] = max(spots[at], low if at == 0 else spots[at - 1] + gap)
    for at in reversed(range(len(spots))):
        spots[at] = min(spots[at], high if at == len(spots) - 1 else spots[at + 1] - gap)
    return spots


def _line(marker: Marker = "") -> dict[str, Any]:
    return {
        "lw": 1.7,
        "markersize": 8 if isinstance(marker, tuple) else {"*": 8, "P": 6.5}.get(marker, 5),
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def _handle(colour: str, marker: Marker, name: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, label=name, **_line(marker))


def _styles(nulls: Sequence[str], seeds: int, untrained: bool, many: bool) -> list[Line2D]:
    """Legend entries of line styles: full context, the nulls that are there, open markers, and the band of seeds.

    Of many arms it says where the nulls are.
    """
    entries = [Line2D([], [], color=INK, lw=1.7, label="all keys")] if nulls else []
    entries += [Line2D([], [], color=INK, lw=1.1, linestyle=NULL_LINES[null], label=NULL_NAMES[null]) for null in nulls]
    if many:
        entries.append(Line2D([], [], lw=0, label=f"more than {MANY} arms: nulls are in the tables"))
    if untrained:
        text = f"{DAGGER} open: reads untrained parameters"
        entries.append(Line2D([], [], color=INK, lw=0, marker="o", markersize=5, markerfacecolor="white", label=text))
    band = Line2D([], [], color=FAINT, lw=7, alpha=0.3, label=f"range of {seeds} seeds")
    return [*entries, band] if seeds > 1 else entries


def _legend(figure: Figure, entries: Sequence[Line2D]) -> None:
    """What the lines mean, once, below all panels."""
    trained = Line2D([], [], color=FAINT, lw=0.9, marker="|", markersize=9, linestyle="none", label="training length")
    figure.legend(
        handles=[*entries, trained],
        loc="outside lower center",
        ncols=_columns(round((figure.get_figwidth() - 0.9) / PANEL[0])),
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
    )


def _columns(panels: int) -> int:
    """Of a legend below so many panels."""
    return max(2, round((PANEL[0] * panels + 0.9) / 2.2))


def save(figure: Figure, path: Target, form: str = "png") -> None:
    """Write a figure as png or svg: the same bytes for the same figure, so without a date."""
    with matplotlib.rc_context({"svg.hashsalt": "pe_ablation"}):
        figure.savefig(path, format=form, facecolor="white", metadata={"Date": None} if form == "svg" else None)
