"""Encodings made of others, which their options name: the sum of two, and DAPE over a bias."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation.encodings.base import About, Encoding, Scores, Sizes, Tokens
from pe_ablation.encodings.kernels import EXACT, linear


def _part(option: str, name: str, options: Mapping[str, Any] | None, sizes: Sizes, rngs: nnx.Rngs) -> Encoding:
    """The encoding that `option` names, its own options in OPTION_options; ValueError with their paths."""
    from pe_ablation import encodings  # the registry, which names the classes of this file

    try:
        return encodings.make(name, **sizes._asdict(), rngs=rngs, **(options or {}))
    except ValueError as error:
        message = str(error).replace("encoding.options.", f"encoding.options.{option}_options.", 1)
        own = message.startswith(("encoding.", "model_dim"))
        raise ValueError(message if own else f"encoding.options.{option}: {message}") from None


class Sum(Encoding):
    """What two encodings add, in one: embeddings, biases, values; at most one of them may change queries and keys.

    The scores see the queries and keys of that one, and all else as either alone would: rope and alibi give
    (R(i) q_i) . (R(j) k_j) / sqrt(D) - m_h (i - j). `first` and `second` are names as in `encoding.name`, with options
    of their own.
    """

    about: ClassVar[About] = About(
        formula="l_ij = first's + second's - q_i . k_j / sqrt(D)",
        source="that of `first` and that of `second`",
        parameters="first + second",
        beyond=(
            "as its parts: defined where both are; what fails in one of them fails here, unless the other takes the "
            "weight off far keys"
        ),
        cost="that of both; one plain product where that is so of both",
    )
    nested: ClassVar[tuple[str, ...]] = ("first", "second")

    def __init__(
        self,
        sizes: Sizes,
        rngs: nnx.Rngs,
        *,
        first: str = "rope",
        second: str = "alibi",
        first_options: Mapping[str, Any] | None = None,
        second_options: Mapping[str, Any] | None = None,
    ):
        self.first = _part("first", first, first_options, sizes, rngs)
        self.second = _part("second", second, second_options, sizes, rngs)
        parts = self._parts
        if all(part.overrides("query") or part.overrides("key") for part in parts):
            raise ValueError(
                f"encoding.options.second: {first} and {second} both change queries and keys; at most one of them may"
            )
        self.scores = max((part.scores for part in parts), key=list(Scores).index)
        self.shift_invariant = all(part.shift_invariant for part in parts)
        self.recentred = any(part.recentred for part in parts)
        self.span = min((part.span for part in parts if part.span is not None), default=None)
        limits = [part.max_position for part in parts if part.max_position is not None]
        self.max_position = min(limits, default=None)
        names = {"first": self.first, "second": self.second}
        self.per_layer = tuple(f"{which}/{name}" for which, part in names.items() for name in part.per_layer)
        self.widths = tuple(_state_widths(part, sizes) for part in parts)

    @property
    def _parts(self) -> tuple[Encoding, Encoding]:
        return self.first, self.second

    @property
    def reads_positions(self) -> bool:
        return any(part.reads_positions for part in self._parts)

    def overrides(self, hook: str) -> bool:
        return any(part.overrides(hook) for part in self._parts)

    def embed(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        return self.second.embed(self.first.embed(x, pos), pos)

    def query(self, q: jax.Array, pos: jax.Array) -> jax.Array:
        return self.second.query(self.first.query(q, pos), pos)

    def key(self, k: jax.Array, pos: jax.Array) -> jax.Array:
        return self.second.key(self.first.key(k, pos), pos)

    def state(self, x: jax.Array, pos: jax.Array, last: jax.Array | None) -> tuple[jax.Array, jax.Array] | None:
        lasts = self._split(last, 1)
        found = [part.state(x, pos, each) for part, each in zip(self._parts, lasts, strict=True)]
        found = [each for each in found if each is not None]
        if not found:
            return None
        states, carries = zip(*found, strict=True)
        return jnp.concatenate(states, axis=-1), jnp.concatenate(carries, axis=-1)

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        for part, query, key in zip(self._parts, self._own(q), self._own(k), strict=True):
            a = part.logits(a, query, key)
        return a

    def decline(self) -> np.ndarray | None:
        found = [part.decline() for part in self._parts if part.scores is not Scores.NONE]
        known = [each for each in found if each is not None]
        return np.sum(known, axis=0) if known and len(known) == len(found) else None

    def values(self, w: jax.Array, q: Tokens, k: Tokens) -> jax.Array | None:
        each = zip(self._parts, self._own(q), self._own(k), strict=True)
        found = [part.values(w, query, key) for part, query, key in each]
        found = [value for value in found if value is not None]
        return sum(found[1:], found[0]) if found else None

    def _own(self, tokens: Tokens) -> list[Tokens]:
        """The tokens as each part sees them: with its own state."""
        return [tokens._replace(state=state) for state in self._split(tokens.state, 0)]

    def _split(self, x: jax.Array | None, which: int) -> list[jax.Array | None]:
        """States (`which` 0) or carries (1), joined in the last axis, of each part; None of one that has none."""
        if x is None:
            return [None, None]
        first, second = (widths[which] for widths in self.widths)
        return [x[..., :first] if first else None, x[..., first:] if second else None]


def _state_widths(part: Encoding, sizes: Sizes) -> tuple[int, int]:
    """How many numbers a head has of an encoding's state and of its carry."""
    x = jax.ShapeDtypeStruct((1, 1, sizes.model_dim), jnp.float32)
    found = jax.eval_shape(lambda x, pos: part.state(x, pos, None), x, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return (0, 0) if found is None else (found[0].shape[-1], found[1].shape[-1])


class Dape(Encoding):
    """l_ij + B_ij + MLP([l_ij; B_ij]), B the bias of `base`, [;] over the 2H scores and biases of a pair.

    The MLP goes from 2H over `width` LeakyReLUs (slope .01) to H; its last layer has no bias, which would move a whole
    row. It is one per layer, and so are parameters of the base, as in the paper's code.
    Source: Zheng et al. 2024, arXiv:2405.14722.
    """

    about: ClassVar[About] = About(
        formula="l_ij = s_ij + B_ij + MLP([s_ij; B_ij]), s_ij = q_i . k_j / sqrt(D) of all heads, B the bias of `base`",
        source="Zheng et al. 2024, arXiv:2405.14722",
        parameters="(3 * H + 1) * width + base per layer",
        beyond="as its base: defined where that is; far biases reach the MLP at sizes unseen in training",
        cost=(
            "3 H width multiplications a pair of a query and a key, and width numbers in memory; all heads of a pair "
            "at once, so no fused kernel, which has one head at a time"
        ),
    )
    scores = Scores.CONTENT
    nested: ClassVar[tuple[str, ...]] = ("base",)

    def __init__(
        self,
        sizes: Sizes,
        rngs: nnx.Rngs,
        *,
        base: str = "alibi",
        base_options: Mapping[str, Any] | None = None,
        width: int = 32,
    ):
        if width < 1:
            raise ValueError(f"encoding.options.width: {width} is too small; at least 1")
        self.base = _part("base", base, base_options, sizes, rngs)
        if self.base.scores is not Scores.BIAS or any(
            self.base.overrides(hook) for hook in ("embed", "query", "key", "state", "values")
        ):
            raise ValueError(
                f"encoding.options.base: {base} is not only a bias; allowed: what adds a function of the two positions "
                "to the scores and does nothing else, such as alibi, t5, kerple_log, fire"
            )
        self.shift_invariant = self.base.shift_invariant
        self.max_position = self.base.max_position
        self.per_layer = ("base", "of_scores", "of_biases", "inner_bias", "outer")
        heads = sizes.num_heads
        self.of_scores = nnx.Param(linear(rngs, 2 * heads, heads, width))
        self.of_biases = nnx.Param(linear(rngs, 2 * heads, heads, width))
        self.inner_bias = nnx.Param(linear(rngs, 2 * heads, width))
        self.outer = nnx.Param(linear(rngs, width, width, heads))

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        bias = self.base.logits(jnp.zeros((1, *a.shape[1:]), a.dtype), q, k)
        known = jnp.where(jnp.isneginf(a), 0.0, a)  # keys masked beforehand, beside an encoding that orders them
        hidden = jnp.einsum("bhts,hf->bfts", known, self.of_scores[...], precision=EXACT)
        hidden += jnp.einsum("bhts,hf->bfts", bias, self.of_biases[...], precision=EXACT)
        hidden = jax.nn.leaky_relu(hidden + self.inner_bias[...][:, None, None])
        return a + bias + jnp.einsum("bfts,fh->bhts", hidden, self.outer[...], precision=EXACT)
