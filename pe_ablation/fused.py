"""Attention in one fused kernel: cuDNN's on an NVIDIA GPU, Pallas' splash attention on a TPU.

A kernel serves tokens that attend to themselves, in order, where the encoding's `scores` allow it: NONE as a plain
product; BIAS as features of queries and keys where it falls linearly (`Encoding.decline`), else, by cuDNN alone, as a
tile that the encoding's own hook makes. What a kernel lacks, `lacks` names. Neither has run on its device yet: what is
tested is the same code with jax's own products in cuDNN's place, Pallas' interpreter, and the program that is lowered
for a GPU. Letters: B batch, T tokens, H heads, D head dim.

Sources: jax.nn.dot_product_attention (Dao 2023, arXiv:2307.08691); jax.experimental.pallas.ops.tpu.splash_attention.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation.encodings.base import Encoding, Scores, Tokens

PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}  # kernel -> jax's name of the backend that has it
DTYPES = {"cudnn": ("bfloat16", "float16"), "splash": ("bfloat16", "float32")}
HEAD_DIM = 8  # of cuDNN: what a head dim is a multiple of
WIDEST = 128  # of cuDNN before Hopper: the largest head dim
TILE_LIMIT = 2**28  # H*T*T numbers of a bias, 1 GiB while they are float32
FEATURES_LIMIT = 2**16  # positions that two numbers of 8 bits each hold
BLOCK = 128  # of splash: what a length is a multiple of
LARGEST_BLOCK = 512
VMAPPED_BIAS = (0, 11, 0)  # up to this jax a bias under vmap fails in cuDNN's batching rule
CUDNN: Any = "cudnn"  # tests put `xla`, jax's own products, in its place
INTERPRET = False  # of Pallas' kernel: tests set it


class Call(NamedTuple):
    """What is known of a call of attention before it runs.

    window: in keys, None for all. moved: whether the encoding is shown other positions than 0, 1, 2, ..., and `rows`
    how many rows of them. vmapped: whether other calls ride along. unserved: what else is asked that no kernel does.
    """

    encoding: Encoding
    dtype: Any
    heads: int
    head_dim: int
    length: int
    window: int | None = None
    moved: bool = False
    rows: int = 1
    vmapped: bool = False
    unserved: str | None = None

    @property
    def decline(self) -> np.ndarray | None:
        """What the encoding takes off per token of distance, if features can say it; None: they can't."""
        exact = not self.moved and self.length <= FEATURES_LIMIT
        return self.encoding.decline() if exact and self.encoding.scores is Scores.BIAS else None

    @property
    def tile(self) -> int:
        """How many numbers of a bias are in memory."""
        tiled = self.encoding.scores is Scores.BIAS and self.decline is None
        return self.heads * self.length**2 if tiled else 0


@functools.cache
def kernel() -> str | None:
    """The kernel of jax's default backend, if it has one: cuDNN's needs an NVIDIA GPU of compute capability 8.0."""
    found = {platform: name for name, platform in PLATFORMS.items()}.get(jax.default_backend())
    if found == "cudnn":
        capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))  # of an AMD GPU "gfx942"
        return found if capability.replace(".", "").isdigit() and float(capability) >= 8.0 else None
    return found


def refuse_backend(name: str) -> None:
    """ValueError for a kernel that this process' backend does not have."""
    if name in PLATFORMS and kernel() != name:
        needs = {"cudnn": "an NVIDIA GPU of compute capability 8.0", "splash": "a TPU"}[name]
        raise ValueError(f"implementation: {name!r} needs {needs}, jax runs on {jax.default_backend()!r} here; {_ELSE}")


def refuse(name: str, call: Call) -> None:
    """ValueError, naming what was given, for a call that the kernel lacks something for."""
    if (reason := lacks(name, call)) is not None:
        raise ValueError(f"implementation: {name!r} {reason}; {_ELSE}")


_ELSE = "allowed here: auto, dense, blockwise"


def lacks(name: str, call: Call) -> str | None:
    """Why the kernel cannot serve a call, in words that follow its name; None: it can. The backend is not asked."""
    encoding, kind = call.encoding, type(call.encoding).__name__
    if call.unserved is not None:
        return call.unserved
    if str(jnp.dtype(call.dtype)) not in DTYPES[name]:
        return f"takes the dtypes {', '.join(DTYPES[name])}, given {jnp.dtype(call.dtype)}"
    if name == "cudnn" and (call.head_dim % HEAD_DIM or call.head_dim > WIDEST):
        return f"takes a head dim that is a multiple of {HEAD_DIM} up to {WIDEST}, given {call.head_dim}"
    if name == "splash" and call.length % BLOCK:
        return f"takes lengths that are multiples of {BLOCK}, given {call.length}"
    if encoding.scores not in (Scores.NONE, Scores.BIAS):
        return f"serves encodings whose scores are NONE or BIAS, given {kind}: {encoding.scores.name}"
    if encoding.recentred:
        return f"takes positions once for all tiles, which {kind} is shown anew in each"
    shapes, adds_values = _projected(call)
    if adds_values:
        return f"keeps no weights, to which {kind} adds values"
    if {each.dtype for each in shapes} != {jnp.dtype(call.dtype)}:
        return f"takes queries and keys in {jnp.dtype(call.dtype)}, as values are, which {kind} changes"
    if name == "cudnn" and (width := _padded(shapes[0].shape[-1])) > WIDEST:
        return f"takes vectors of up to {WIDEST} numbers, which {kind} makes {width}"
    return _tile_lacks(name, call) if call.tile else None


def _tile_lacks(name, call):
    kind = type(call.encoding).__name__
    if name == "splash":
        return f"takes no additive bias, which {kind} has: only a fixed slope a head, at positions 0 to 65,535"
    if call.window is not None:
        return f"takes no window together with the additive bias of {kind}, given a window of {call.window}"
    if call.length % 2:
        return f"takes even lengths with the additive bias of {kind}, given {call.length}"
    if call.rows > 1:
        return f"takes one additive bias for all rows, given {call.rows} rows of positions"
    if call.vmapped and jax.__version_info__ <= VMAPPED_BIAS:
        upto = ".".join(map(str, VMAPPED_BIAS))
        return f"takes no additive bias where several runs train in one program, up to jax {upto}, given {kind}"
    if call.tile > TILE_LIMIT:
        return f"takes an additive bias of up to {TILE_LIMIT:,} numbers, given {call.tile:,} (heads x length^2)"
    return None


def _projected(call):
    """Shapes of what the encoding makes of a query and a key, and whether it adds to the weighted values."""
    graph, state = nnx.split(call.encoding)

    def hooks(state, vec, pos, weights):
        encoding, tokens = nnx.merge(graph, state), Tokens(vec, pos)
        return (encoding.query(vec, pos), encoding.key(vec, pos)), encoding.values(weights, tokens, tokens)

    vec = jax.ShapeDtypeStruct((1, 2, call.heads, call.head_dim), call.dtype)
    weights = jax.ShapeDtypeStruct((1, call.heads, 2, 2), jnp.float32)
    shapes, values = jax.eval_shape(hooks, state, vec, jax.ShapeDtypeStruct((1, 2), jnp.int32), weights)
    if call.decline is not None:
        extra = _features(call, 1.0)[0].shape[-1]
        shapes = tuple(jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + extra), x.dtype) for x in shapes)
    return shapes, values is not None


def attend(name: str, call: Call, query: jax.Array, key: jax.Array, v: jax.Array, sides: tuple[Tokens, Tokens]):
    """Softmax attention, as the encoding projected them, of query and key [B,T,H,D'] over v [B,T,H,D] -> [B,T,H,D].

    `sides` are the tokens of both at the positions that the encoding is shown, for the hook that makes a bias. Of a
    call that the kernel does not lack anything for. Logits and softmax are float32, weights and a tile v's dtype.
    """
    bias, scale = None, call.head_dim**-0.5
    if name == "splash":  # which has no scale of its own
        query, scale = query * jnp.asarray(scale, query.dtype), 1.0
    if call.decline is not None:
        of_query, of_key = _features(call, scale)
        query = jnp.concatenate([query, jnp.broadcast_to(of_query, (*query.shape[:3], of_query.shape[-1]))], axis=-1)
        key = jnp.concatenate([key, jnp.broadcast_to(of_key, (*key.shape[:3], of_key.shape[-1]))], axis=-1)
    elif call.tile:
        zeros = jnp.zeros((1, call.heads, call.length, call.length), jnp.float32)
        one = (side._replace(vec=side.vec[:1]) for side in sides)
        bias = call.encoding.logits(zeros, *one).astype(v.dtype)
    window = None if call.window is None or call.window >= call.length else call.window
    if name == "splash":
        return _splash(query, key, v, window)
    width = _padded(query.shape[-1])
    out = jax.nn.dot_product_attention(
        _widened(query, width),
        _widened(key, width),
        _widened(v, width),
        bias,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=CUDNN,
    )
    return out[..., : v.shape[-1]]


def _padded(width: int) -> int:
    return -(-width // HEAD_DIM) * HEAD_DIM


def _widened(x, width):
    return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])


def _features(call, scale):
    """[1,1,H,6] of queries and [1,T,1,6] of keys, whose product times the scale is m_h j: -m_h (i - j) but for what all
    keys of a query share, which softmax does not see.

    bfloat16 has 8 bits, and so has each of j = 256 hi + lo and of the three parts of a slope; their products are exact.
    """
    rest = call.decline.astype(np.float64) / scale
    parts = []
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16).astype(np.float64))
        rest = rest - parts[-1]
    j = np.arange(call.length)
    of_key = np.stack([j // 256 * 256, j % 256] * 3, axis=-1)
    of_query = np.repeat(np.stack(parts, axis=-1), 2, axis=-1)
    return jnp.asarray(of_query, call.dtype)[None, None], jnp.asarray(of_key, call.dtype)[None, :, None]


def _splash(query, key, v, window):
    """Of queries that are scaled already; [B,T,H,D'] and v [B,T,H,D] -> [B,T,H,D]."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = query.shape[1:3]
    seen = masks.CausalMask((length, length))
    if window is not None:
        seen = masks.LocalMask((length, length), (window - 1, 0), 0)
    size = max(size for size in range(BLOCK, LARGEST_BLOCK + 1, BLOCK) if length % size == 0)
    forward = {"block_q": size, "block_kv": size, "block_kv_compute": size}
    of_keys = {"block_q_dkv": size, "block_kv_dkv": size, "block_kv_dkv_compute": size}
    sizes = splash.BlockSizes(**forward, **of_keys, block_q_dq=size, block_kv_dq=size)  # pyright: ignore
    run = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([seen] * heads), block_sizes=sizes, interpret=INTERPRET
    )
    out: Any = jax.vmap(run)(*(x.swapaxes(1, 2) for x in (query, key, v)))
    return out.swapaxes(1, 2).astype(v.dtype)
