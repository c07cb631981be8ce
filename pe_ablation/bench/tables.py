"""Lines of Markdown tables: medians with their ranges."""

import statistics
from collections.abc import Iterable, Iterator, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, numbers to the right; an empty line after it."""
    yield _row(titles)
    yield _row([":--", *["---:"] * (len(titles) - 1)])
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(rates: Sequence[float]) -> tuple[str, str]:
    """Cells: the median, and from the least to the greatest."""
    return f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}"


def ratio(one: Sequence[float] | None, other: Sequence[float] | None) -> str:
    """How many times the median of another is a median; - where either is not there."""
    return "-" if one is None or other is None else f"{statistics.median(one) / statistics.median(other):.2f}x"
