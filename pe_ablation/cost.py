"""What each arm cost: parameters, time of a training step, and how much was scored. Numbers come from `report.rows`."""

from typing import Any

import pandas as pd

from pe_ablation.tables import Frame, label, points, select, span, text_grid

HEADER = (
    "train length", "encoding", "parameters", "s/step", "tokens/s", "seeds a program", "train MiB", "score MiB",
    "tokens", "documents",
)  # fmt: skip
NOTE = (
    "Cost. A step is one of the training program, which trains all the seeds that share it; its seconds (median over "
    "the logged intervals but the first, which compiles) and tokens per second are of that program on the machine it "
    "ran on. MiB are what that program takes, and the one that scores the longest length, by the compiler's account "
    "(parameters, optimizer, everything in between). Tokens and documents: what a cell of the table scores, per seed."
)


def to_markdown(rows: pd.DataFrame, **selection: Any) -> str:
    """A row per point of one selection (see `tables.select`); "-" is not recorded, "a-b" the range over its runs."""
    part: Frame = select(rows, **selection)[1]
    part = part[part.null == "none"]
    lines = [_line(group) for group in points(part)]
    return f"{NOTE}\n\n{text_grid([HEADER, *lines], left=(1,))}\n"


def _line(group: Frame) -> tuple[str, ...]:
    first, scored = group.iloc[0], group[group.status == "ok"]
    return (
        str(first.train_length),
        label(first.encoding, first.variant, first["transform"]),
        span(group.parameters),
        span(group.seconds_per_step, "{:.3g}".format),
        span(group.tokens_per_second, lambda value: f"{float(f'{value:.3g}'):,.0f}"),
        span(group.program_seeds, "{:.0f}".format),
        span(group.train_memory_bytes, _mebibytes),
        span(scored[scored.eval_length == scored.eval_length.max()].memory_bytes, _mebibytes),
        span(scored.tokens),
        span(scored.documents),
    )


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f}"
