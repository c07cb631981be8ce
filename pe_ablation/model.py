"""One GPT-2 decoder for every encoding: embed, a scan over stacked blocks, logits.

Letters in shapes: B batch, T tokens, H heads, D head dim, M model dim, V vocabulary, N layers, P pattern length.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from pe_ablation import encodings, fused, gradients
from pe_ablation.attention import (
    IMPLEMENTATIONS,
    PLAIN,
    Distances,
    Dropout,
    LogitScale,
    Mask,
    View,
    attend,
    call_of,
    chosen,
    followed_by,
)
from pe_ablation.cache import Cache, Layer, Past
from pe_ablation.encodings import Encoding, Scores, Tokens
from pe_ablation.encodings.base import INIT_STDDEV
from pe_ablation.positions import Placed

UNROLL = 4  # groups of layers a loop step: a fully rolled scan takes 1.3x as long on CPU, a full unroll long to compile
LOGIT_SCALES = ("none", "log_n", "log_n_beyond", "learned")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

# Decoders by name. GPT-2's layers and dims are those of Radford et al. 2019, Table 2, its heads (64 wide) those of the
# released models; `micro` is minGPT's, `nano` trains in seconds.
SIZES: dict[str, dict[str, int | None]] = {
    name: {"num_layers": layers, "model_dim": dim, "num_heads": heads, "mlp_dim": None}
    for name, (layers, dim, heads) in {
        "nano": (2, 64, 4),
        "micro": (4, 128, 4),
        "gpt2_small": (12, 768, 12),
        "gpt2_medium": (24, 1024, 16),
        "gpt2_large": (36, 1280, 20),
        "gpt2_xl": (48, 1600, 25),
    }.items()
}


class Slot(NamedTuple):
    """One layer of the pattern: an encoding, its options as sorted pairs, and an attention window in tokens."""

    name: str
    options: tuple[tuple[str, Any], ...]
    window: int | None


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The decoder's shape. Raises ValueError, naming the field, for what cannot be built.

    `pattern`: a tuple of (encoding, window) that repeats over the layers, an encoding being a name or {name, options};
    None is every layer the same. Equal encodings of a pattern are one encoding. `sharing`: which of an encoding's
    parameters the layers share: all, none, or as in its paper. `embed_scale` multiplies token embeddings at the input.
    `logit_scale`, for a query that sees n keys and a training length L: none; log_n: ln n / ln L; log_n_beyond: the
    same, at least 1, for a model that was trained without; learned: s_h ln n, one s > 0 a head and layer, at first
    1 / ln L (see `attention.LogitScale`).
    `distances`: how far away encodings are shown keys (see `transforms`); None: as they are. `implementation`: see
    `attention.attend`. `vmapped`: several models are one program, which a fused kernel needs to know.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    model_dim: int
    train_length: int
    encoding: str
    mlp_dim: int | None = None
    encoding_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pattern: tuple | None = None
    sharing: str = "paper"
    embed_scale: float = 1.0
    logit_scale: str = "none"
    dropout_embed: float = 0.0
    dropout_attention: float = 0.0
    dropout_residual: float = 0.0
    dtype: str = "float32"
    remat: bool = False
    implementation: str = "auto"
    distances: Distances | None = None
    vmapped: bool = False

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "num_heads", "model_dim", "train_length", "mlp_dim")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is too small; at least 1")
        if self.model_dim % self.num_heads:
            raise ValueError(f"model_dim: {self.model_dim} is not divisible by num_heads = {self.num_heads}")
        if self.num_layers % len(self.slots):
            raise ValueError(f"pattern: length {len(self.slots)} does not divide num_layers = {self.num_layers}")
        for name in ("dropout_embed", "dropout_attention", "dropout_residual"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not in [0, 1)")
        allowed = {
            "sharing": ("all", "none", "paper"),
            "logit_scale": LOGIT_SCALES,
            "dtype": tuple(DTYPES),
            "implementation": IMPLEMENTATIONS,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; allowed: {', '.join(values)}")
        if self.logit_scale != "none" and self.train_length < 2:
            raise ValueError(f"logit_scale: {self.logit_scale!r} needs a training length of 2 at least: ln 1 is 0")
        names = [slot.name for slot in self.slots]
        if self.encoding not in ("none", *names):
            raise ValueError(
                f"encoding.name: {self.encoding!r}, but no layer of the pattern has it; allowed: none, "
                f"{', '.join(dict.fromkeys(names))}"
            )
        for slot in self.distinct:
            try:
                _check_encoding(self, slot)
            except ValueError as error:
                own = self.pattern is None or str(error).startswith("pattern") or slot.name == self.encoding
                raise ValueError(str(error) if own else f"pattern: {slot.name}: {error}") from None
        if self.implementation in fused.PLATFORMS:
            for slot in self.slots:
                fused.refuse(self.implementation, self.call(slot, self.train_length))

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in dataclasses.fields(self) if "options" not in field.name)
        return hash((self.slots, *(value for value in values if not isinstance(value, tuple | Mapping))))

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """The MLP's width: `mlp_dim`, or 4 M."""
        return 4 * self.model_dim if self.mlp_dim is None else self.mlp_dim

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The pattern, P entries."""
        own = Slot(self.encoding, _pairs(self.encoding_options), None)
        if self.pattern is None:
            return (own,)
        if not self.pattern:
            raise ValueError("pattern: empty; None is every layer the same")
        return tuple(_slot(entry, own, index) for index, entry in enumerate(self.pattern))

    @property
    def distinct(self) -> tuple[Slot, ...]:
        """The different encodings of the pattern, windows aside, in order of appearance."""
        return tuple(dict.fromkeys(slot._replace(window=None) for slot in self.slots))

    @property
    def uses(self) -> tuple[tuple[int, int], ...]:
        """For each slot, which of `distinct` it takes and how many slots before it take the same."""
        which = [self.distinct.index(slot._replace(window=None)) for slot in self.slots]
        return tuple((each, which[:number].count(each)) for number, each in enumerate(which))

    def build_encoding(self, slot: Slot, rngs: nnx.Rngs) -> Encoding:
        return encodings.make(
            slot.name,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            model_dim=self.model_dim,
            train_length=self.train_length,
            rngs=rngs,
            **_mapping(slot.options),
        )

    def abstract_encoding(self, slot: Slot) -> Encoding:
        """One encoding without values."""
        return nnx.eval_shape(lambda: self.build_encoding(slot, nnx.Rngs(0)))

    def together(self, count: int) -> "GPTConfig":
        """Of so many models in one program; ValueError where a kernel of attention by name serves one alone."""
        return dataclasses.replace(self, vmapped=count > 1)

    def call(self, slot: Slot, length: int, *, moved: bool = False, segments: bool = False) -> fused.Call:
        """What a fused kernel is asked for in the layers of a slot, on `length` tokens in order.

        moved: whether the encoding is shown other positions than 0, 1, 2, ...; segments: whether documents are apart.
        """
        views = (PLAIN._replace(query=lambda pos: pos),) if moved else (PLAIN,)
        return call_of(
            self.abstract_encoding(slot),
            jax.ShapeDtypeStruct((1, length, self.num_heads, self.head_dim), DTYPES[self.dtype]),
            length,
            Mask(ordered=True, window=slot.window, segments=segments),
            followed_by(views, () if self.distances is None else self.distances.views()),
            scaled=self.logit_scale != "none",
            dropout=self.dropout_attention,
            vmapped=self.vmapped,
        )

    def attention(self, windows: int, length: int, kernel: str | None, **asked: bool) -> dict[Slot, str]:
        """What attention takes in each slot for so many windows of `length` tokens, where there is this fused kernel.

        `asked` is what `call` is given.
        """

        def taken(slot):
            call = None if kernel is None else self.call(slot, length, **asked)
            return chosen(self.implementation, windows, self.num_heads, length, length, kernel, call)

        return {slot: taken(slot) for slot in dict.fromkeys(self.slots)}


class _Pairs(tuple):
    """Options as sorted pairs that can be hashed; those of an option that is a mapping are such pairs too."""


def _pairs(options: Mapping[str, Any]) -> _Pairs:
    return _Pairs((name, _hashable(value)) for name, value in sorted(options.items()))


def _hashable(value: Any) -> Any:
    return _pairs(value) if isinstance(value, Mapping) else tuple(value) if isinstance(value, list) else value


def _mapping(pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The options that `_pairs` was given."""
    return {name: _mapping(value) if isinstance(value, _Pairs) else value for name, value in pairs}


def _slot(entry: Any, own: Slot, index: int) -> Slot:
    if not (isinstance(entry, tuple | list) and len(entry) == 2):
        raise ValueError(f"pattern[{index}]: expected (encoding, window), got {entry!r}")
    encoding, window = entry
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"pattern[{index}]: window {window!r} is not a number of tokens; at least 1, or None")
    if isinstance(encoding, Mapping):
        if "name" not in encoding or not encoding.keys() <= {"name", "options"}:
            raise ValueError(f"pattern[{index}]: an encoding is a name or {{name, options}}, got {dict(encoding)!r}")
        return Slot(encoding["name"], _pairs(encoding.get("options", {})), window)
    return Slot(encoding, own.options if encoding == own.name else (), window)


def _check_encoding(config: GPTConfig, slot: Slot) -> None:
    """Sizes and options fit the class; an encoding that acts on the input serves every layer or none."""
    abstract = config.abstract_encoding(slot)
    if not abstract.overrides("embed"):
        return
    if len(config.distinct) > 1:
        raise ValueError(f"pattern: {slot.name} acts once, at the input; it cannot be one of several encodings")
    if config.sharing == "none" and jax.tree.leaves(nnx.state(abstract, nnx.Param)):
        raise ValueError(f"sharing: 'none' is not allowed for {slot.name}, whose parameters act once, at the input")


def keyed(key: jax.Array, path: str) -> jax.Array:
    """The key of one named part: what two models share under one name starts equal, whatever else they have."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


def _linear(key: jax.Array, path: str, inputs: int, outputs: int, stddev: float, dtype: Any) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.normal(stddev),
        dtype=dtype,
        param_dtype=jnp.float32,
        dot_general=gradients.dot_general,
        rngs=nnx.Rngs(params=keyed(key, path)),
    )


class LayerNorm(nnx.Module):
    """Layer normalisation over M features, computed in float32 and given back in the dtype."""

    def __init__(self, features: int, dtype: Any):
        self.dtype = dtype
        self.scale = nnx.Param(jnp.ones(features, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(features, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return gradients.layer_norm(x, self.scale[...], self.bias[...]).astype(self.dtype)


def _drop(x: jax.Array, rate: float, key: jax.Array | None, path: str) -> jax.Array:
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(keyed(key, path), 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


class Block(nnx.Module):
    """A pre-LN GPT-2 block: x + attention(LN(x)), then x + MLP(LN(x)), with biases and tanh GELU.

    Residual projections start at 0.02 / sqrt(2N), everything else at 0.02 (Radford et al. 2019).
    """

    def __init__(self, config: GPTConfig, key: jax.Array):
        self.config = config
        dim, dtype = config.model_dim, DTYPES[config.dtype]
        residual = INIT_STDDEV / math.sqrt(2 * config.num_layers)
        self.attention_norm = LayerNorm(dim, dtype)
        self.qkv = _linear(key, "qkv", dim, 3 * dim, INIT_STDDEV, dtype)
        self.attention_out = _linear(key, "attention_out", dim, dim, residual, dtype)
        self.mlp_norm = LayerNorm(dim, dtype)
        self.mlp_in = _linear(key, "mlp_in", dim, config.hidden_dim, INIT_STDDEV, dtype)
        self.mlp_out = _linear(key, "mlp_out", config.hidden_dim, dim, residual, dtype)
        if config.logit_scale == "learned":
            start = math.log(math.expm1(1 / math.log(config.train_length)))  # softplus of it is 1 / ln L
            self.logit_scale = nnx.Param(jnp.full(config.num_heads, start, jnp.float32))

    def __call__(
        self,
        x: jax.Array,
        pos: jax.Array,
        encoding: Encoding,
        mask: Mask,
        dropout_key: jax.Array | None,
        *,
        segments: jax.Array | None = None,
        past: Past | None = None,
        views: Sequence[View] = (),
    ) -> tuple[jax.Array, Layer | None]:
        """x [B,T,M], pos int32 [B or 1,T] -> [B,T,M], and what `past` is with these tokens written to it."""
        rate = self.config.dropout_residual
        out, layer = self._attention(x, pos, segments, encoding, mask, dropout_key, past, views)
        x = x + _drop(out, rate, dropout_key, "attention_residual")
        return x + _drop(self._mlp(x), rate, dropout_key, "mlp_residual"), layer

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [B,T,H,D] of normalised input x [B,T,M]."""
        heads = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
        q, k, v = (part.reshape(heads) for part in jnp.split(self.qkv(x.reshape(-1, x.shape[-1])), 3, axis=-1))
        return q, k, v

    def _scale(self) -> LogitScale | None:
        config = self.config
        if config.logit_scale == "none":
            return None
        if config.logit_scale == "learned":
            return LogitScale(jax.nn.softplus(self.logit_scale[...]))
        return LogitScale(1 / math.log(config.train_length), 1.0 if config.logit_scale == "log_n_beyond" else 0.0)

    def _attention(self, x, pos, segments, encoding, mask, dropout_key, past, views):
        normed = self.attention_norm(x)
        q, k, v = self.project(normed)
        state, carry = encoding.state(normed, pos, None if past is None else past.layer.carry) or (None, None)
        keys, values, layer = Tokens(k, pos, state, segments), v, None
        if past is not None:
            layer = past.written(keys, v, carry)
            keys, values = past.followed_by(keys, v)
        rate = self.config.dropout_attention
        dropout = None if dropout_key is None or rate == 0.0 else Dropout(rate, keyed(dropout_key, "attention"))
        out = attend(
            encoding,
            Tokens(q, pos, state, segments),
            keys,
            values,
            mask=mask,
            views=views,
            scale=self._scale(),
            dropout=dropout,
            implementation=self.config.implementation,
            vmapped=self.config.vmapped,
        )
        return self.attention_out(out.reshape(-1, x.shape[-1])).reshape(x.shape), layer

    def _mlp(self, x):
        hidden = self.mlp_in(self.mlp_norm(x).reshape(-1, x.shape[-1]))
        return self.mlp_out(gradients.gelu(hidden)).reshape(x.shape)


class GPT(nnx.Module):
    """Token ids to next-token logits. Parameters are float32; blocks are stacked [N/P, ...], one stack a pattern slot.

    `encodings` holds one encoding for each distinct entry of the pattern: what its layers share as it is, what is one
    per layer stacked [layers that use it, ...].
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        key = rngs.params()
        groups = config.num_layers // len(config.slots)
        self.embedding = nnx.Param(
            INIT_STDDEV * jax.random.normal(keyed(key, "embedding"), (config.vocab_size, config.model_dim), jnp.float32)
        )
        layer_keys = [keyed(key, f"block_{layer}") for layer in range(config.num_layers)]
        self.blocks = nnx.List(
            _stacked(functools.partial(Block, config), layer_keys[slot :: len(config.slots)])
            for slot in range(len(config.slots))
        )
        self.encodings = nnx.List([_layered(config, each, keyed(key, each.name), groups) for each in config.distinct])
        self.norm = LayerNorm(config.model_dim, DTYPES[config.dtype])

    @property
    def max_position(self) -> int | None:
        """How many positions the model has; None: any number."""
        limits = [each.max_position for each in self.encodings]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def absolute(self) -> bool:
        """Whether positions enter at the input, so that keys and values of every layer hold them."""
        return any(each.overrides("embed") for each in self.encodings)

    @property
    def shift_invariant(self) -> bool:
        """Whether nothing depends on a position but through the distance of two."""
        stepped = self.config.distances is not None and self.config.distances.group is not None
        return not stepped and all(each.shift_invariant for each in self.encodings)

    @property
    def row(self) -> bool:
        """Whether an encoding orders all keys of a query."""
        return any(each.scores is Scores.ROW for each in self.encodings)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        views: Sequence[View] = (),
        placed: Placed | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """tokens int32 [B,T], positions int32 [T] or [B or 1,T] (default 0..T-1) -> logits float32 [B,T,V].

        `placed`: the encoding is shown the tokens at these positions instead, and nobody sees other segments; neither
        `positions` nor `views` go with it. Without `dropout_key` nothing is dropped. Outside a trace, ids past the
        vocabulary and positions past the encoding's table raise ValueError; inside one they give NaN.
        """
        mask = dataclasses.replace(mask or Mask(), ordered=positions is None)
        pos = jnp.arange(tokens.shape[1], dtype=jnp.int32) if positions is None else jnp.asarray(positions, jnp.int32)
        pos = pos[None] if pos.ndim == 1 else pos
        if placed is None:
            x = self.embed(tokens, pos, dropout_key)
            return self._logits(self._layers(x, pos, mask, views, dropout_key)[0])
        if positions is not None or views:
            raise ValueError("placed: goes without positions and views of one's own")
        mask = dataclasses.replace(mask, segments=placed.segments is not None)
        x = self.embed(tokens, placed.positions, dropout_key)
        return self._logits(self._layers(x, pos, mask, (placed.view(),), dropout_key, segments=placed.segments)[0])

    def decode(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache,
        *,
        mask: Mask | None = None,
        views: Sequence[View] = (),
        embed_positions: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """The tokens that follow a cache: int32 [B,T] at positions [B,T] (-1: no token) -> logits [B,T,V], the cache.

        They attend to the cache and to each other, then are written: what they push out, they still see. `mask` is what
        the cache keeps, unless given. `embed_positions` are what an encoding added at the input is shown, if not
        `positions`. Outside a trace, a token that has no place raises ValueError, in one its logits are NaN.
        """
        pos = jnp.asarray(positions, jnp.int32)
        cache.refuse_overflow(pos)
        x = self.embed(tokens, pos if embed_positions is None else embed_positions)
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        x = jnp.where(cache.fits(pos)[:, :, None], x, jnp.nan)
        x, layers = self._layers(x, pos, mask or Mask(sinks=cache.sinks, recent=cache.recent), views, None, cache)
        return self._logits(x), cache.followed_by(tokens, pos, layers)

    def cache(
        self, batch: int, slots: int, *, sinks: int = 0, recent: int | None = None, dtype: Any = jnp.float32
    ) -> Cache:
        """An empty cache for `batch` rows of `slots` tokens; keys and values are kept in `dtype`.

        With `recent`, slots = sinks + recent and the oldest token but the sinks makes place for a new one.
        """
        config = self.config
        groups = config.num_layers // len(config.slots)
        shape = (groups, batch, slots, config.num_heads, config.head_dim)

        def layer(which: int) -> Layer:
            normed = jax.ShapeDtypeStruct((batch, 1, config.model_dim), DTYPES[config.dtype])
            pos = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
            encoding = self._encoding_of(which)
            found = jax.eval_shape(lambda x, pos: encoding.state(x, pos, None), normed, pos)
            keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
            if found is None:
                return Layer(keys, values, None, None)
            state, carry = found
            states = jnp.zeros((*shape[:3], *state.shape[2:]), state.dtype)
            return Layer(keys, values, states, jnp.zeros((groups, *carry.shape), carry.dtype))

        layers = tuple(layer(which) for which, _ in config.uses)
        return Cache.empty(layers, batch, slots, sinks, recent)

    def embed(self, tokens: jax.Array, pos: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """The first block's input [B,T,M] of int32 tokens [B,T] at positions [B or 1,T]."""
        config = self.config
        refuse_tokens(tokens, config.vocab_size)
        refuse_positions(pos, self.max_position)
        rows = jnp.where(tokens < 0, config.vocab_size, tokens)  # a negative index would count from the end
        x = jnp.take(self.embedding[...], rows, axis=0, mode="fill", fill_value=jnp.nan) * config.embed_scale
        x = jnp.where((pos >= 0)[..., None], x, 0.0).astype(DTYPES[config.dtype])
        return _drop(self.encodings[0].embed(x, pos), config.dropout_embed, dropout_key, "embed")

    def first_layer(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B,T,H,D] of the first block for its input [B,T,M]."""
        graph, state = nnx.split(self.blocks[0])
        block = nnx.merge(graph, jax.tree.map(lambda p: p[0], state))
        return block.project(block.attention_norm(x))[1:]

    def _logits(self, x):
        x = self.norm(x)
        return jnp.einsum("btm,vm->btv", x, self.embedding[...].astype(x.dtype), preferred_element_type=jnp.float32)

    def _encoding_of(self, which):
        """One layer's encoding of those that are alike."""
        graph, own, shared = _per_layer(self.config, self.config.distinct[which], self.encodings[which])
        return nnx.merge(graph, jax.tree.map(lambda p: p[0], own), shared)

    def _layers(self, x, pos, mask, views, dropout_key, cache=None, segments=None):
        config = self.config
        views = followed_by(views, () if config.distances is None else config.distances.views())
        groups = config.num_layers // len(config.slots)
        block_defs, block_states = zip(*(nnx.split(block) for block in self.blocks), strict=True)
        parts = [_per_layer(config, *each) for each in zip(config.distinct, self.encodings, strict=True)]
        stacks = [jax.tree.map(lambda p: p.reshape(groups, -1, *p.shape[1:]), own) for _, own, _ in parts]

        past = None if cache is None else functools.partial(Past, pos=cache.pos, source=cache.source(pos))

        def group(x, scanned):
            index, blocks, own, kept = scanned
            layers = []
            for number, (which, copy) in enumerate(config.uses):
                graph, _, shared = parts[which]
                encoding = nnx.merge(graph, jax.tree.map(lambda p, copy=copy: p[copy], own[which]), shared)
                layer = index * len(config.slots) + number
                key = None if dropout_key is None else jax.random.fold_in(dropout_key, layer)
                block = nnx.merge(block_defs[number], blocks[number])
                own_past = None if past is None else past(kept[number])
                narrowed = mask.narrowed(config.slots[number].window)
                x, written = block(x, pos, encoding, narrowed, key, segments=segments, past=own_past, views=views)
                layers.append(written)
            return x, tuple(layers)

        body = jax.checkpoint(group) if config.remat else group
        kept = None if cache is None else cache.layers
        scanned = (jnp.arange(groups), block_states, stacks, kept)
        return jax.lax.scan(body, x, scanned, unroll=min(groups, UNROLL))


def _stacked(build: Callable[[jax.Array], nnx.Module], keys: list[jax.Array]) -> Any:
    """One module whose parameters are those of `build(key)` for each key, stacked on a leading axis."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: build(keys[0])))
    return nnx.merge(graph, jax.vmap(lambda key: nnx.state(build(key)))(jnp.stack(keys)))


def _layered(config: GPTConfig, slot: Slot, key: jax.Array, groups: int) -> Encoding:
    """An encoding with the parameters that are one per layer stacked on a leading axis."""
    layers = groups * [which for which, _ in config.uses].count(config.distinct.index(slot))
    keys = [keyed(key, f"layer_{layer}") for layer in range(layers)]
    stacked = _stacked(lambda each: config.build_encoding(slot, nnx.Rngs(params=each)), keys)
    graph, own, shared = _per_layer(config, slot, stacked)
    return nnx.merge(graph, own, jax.tree.map(lambda p: p[0], shared))


def _per_layer(config: GPTConfig, slot: Slot, encoding: Encoding):
    """(graph, state that is one per layer, state that the layers share) under `config.sharing`."""
    names = {"all": (), "none": ("",), "paper": encoding.per_layer}[config.sharing]

    def own(path, _):
        return any(f"/{'/'.join(path)}/".startswith(f"/{name}/" if name else "/") for name in names)

    return nnx.split(encoding, own, ...)


def refuse_tokens(tokens: Any, vocab_size: int) -> None:
    """ValueError for a concrete id outside 0..V-1; traced ids pass."""
    if isinstance(tokens, Tracer) or not np.size(tokens):
        return
    ids = np.asarray(tokens)  # numpy's own: a reduction of a jax array would be traced where the rest of a call is
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary 0..{vocab_size - 1}")


def refuse_positions(positions: Any, max_position: int | None) -> None:
    """ValueError for a concrete position past the encoding's last; traced positions pass."""
    if max_position is None or isinstance(positions, Tracer) or not np.size(positions):
        return
    last = int(np.asarray(positions).max())
    if last >= max_position:
        raise ValueError(f"position {last} is past the encoding's {max_position} positions (0..{max_position - 1})")


def abstract(config: GPTConfig) -> GPT:
    """A decoder whose parameters have shapes and no values."""
    return nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))


def max_position(config: GPTConfig) -> int | None:
    """How many positions a decoder of this shape has; None: any number."""
    return abstract(config).max_position


def count_parameters(config: GPTConfig) -> int:
    """How many parameters the decoder has, without building it."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(abstract(config), nnx.Param)))
