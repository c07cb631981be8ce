"""The table as LaTeX: a tabular in the style of booktabs, to be taken in by \\input; comments say what it shows."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from pe_ablation.tables import DAGGER, METRICS, NULL_TITLES, Frame, notes, select, tables

SPECIAL = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$",
}  # fmt: skip
SIGNS = {"±": "$\\pm$", DAGGER: "$^{\\dagger}$"}
WORDS = {"-": "--", "inf": "$\\infty$", "-inf": "$-\\infty$"}


def escape(text: str) -> str:
    """Plain text as LaTeX: special characters escaped; ± and the dagger as math."""
    return "".join({**SPECIAL, **SIGNS}.get(letter, letter) for letter in text)


def to_latex(rows: pd.DataFrame, *, metric: str = "bits_per_byte", **selection: Any) -> str:
    """All tables of one selection (see `tables.select`), a block of lines per null and training length.

    Needs \\usepackage{booktabs}. Comments, for a caption, state protocol, split, targets, tokens, documents and seeds.
    """
    chosen, part = select(rows, **selection)
    frame: Frame = tables(rows, metric=metric, **chosen._asdict())
    lengths = list(frame.columns)
    about = [f"{METRICS[metric]}, protocol {chosen.protocol}, split {chosen.split} (lower is better)"]
    about += [line.removeprefix("- ") for line in notes(part, chosen)]
    lines = [f"% {line}" for line in about]
    lines += [f"\\begin{{tabular}}{{rlr{'r' * len(lengths)}}}", "\\toprule"]
    lines += [_line(["train length", "encoding", "seeds", *map(str, lengths)])]
    for null, block in frame.groupby(level="null", sort=False):
        if null in NULL_TITLES:
            lines += ["\\midrule", f"\\multicolumn{{{len(lengths) + 3}}}{{l}}{{{_title(NULL_TITLES[null])}}} \\\\"]
        for _, group in block.groupby(level="train_length", sort=False):
            lines.append("\\midrule")
            for (_, length, name, seeds), cells in zip(group.index, group.to_numpy(), strict=True):
                lines.append(_line([str(length), escape(name), str(seeds), *map(_cell, cells)]))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _cell(text: str) -> str:
    """A cell of `tables.table`, word by word: "-" for missing and what isn't finite have signs of their own."""
    return re.sub(rf"[^ ,{DAGGER}]+|{DAGGER}", lambda word: WORDS.get(word[0]) or escape(word[0]), text)


def _title(text: str) -> str:
    return re.sub(r"`(\w+)`", lambda match: f"\\texttt{{{match[1]}}}", text).replace("_", "\\_")
