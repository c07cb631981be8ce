"""Entries of an encoding's parameters that training never moved, such as buckets of distances past the training length.

Adam's second moment of such an entry is exactly 0: no gradient reached it, or none for so many steps that float32 has
forgotten it. A number that depends on one is a number about its initial value.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pe_ablation import checkpoint

SECOND_MOMENT = re.compile(r"optimizer/(?:.+/)?nu/(encodings/.+)")
Entries = Mapping[str, np.ndarray]


def find(directory: Path, step: int, params: Any) -> Entries | None:
    """For the parameters of encodings that have such entries: bool arrays of where they are, by path.

    Empty if every entry was trained; None, unknown, if the checkpoint of `step` holds no second moments of them.
    """
    wanted = {name for name in checkpoint.named(params) if name.startswith("encodings/")}
    if not wanted:
        return {}
    found = checkpoint.load_leaves(directory, step, lambda name: SECOND_MOMENT.fullmatch(name) is not None)
    zero = {SECOND_MOMENT.sub(r"\1", name): moment == 0 for name, moment in found.items()}
    if not wanted <= zero.keys():
        return None
    return {name: where for name, where in zero.items() if where.any()}


def changed(params: Any, entries: Entries) -> Any:
    """`params` with other values in these entries: each moved by its own amount, so that no symmetry hides it."""
    draw = np.random.default_rng(0)
    moved = {name: np.where(where, draw.uniform(0.5, 1.5, where.shape), 0.0) for name, where in entries.items()}
    leaves = [
        leaf + moved[name].astype(leaf.dtype) if name in moved else leaf
        for name, leaf in checkpoint.named(params).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
