"""How many operations the products of a decoder take, and how many a second this machine does at best."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pe_ablation.bench.peers import Peer
from pe_ablation.bench.turns import Way
from pe_ablation.model import GPTConfig

SIDE = 2048  # of a square product that is large enough for any library
LEAST = 4e9  # operations of a call: small products are repeated

Shape = tuple[int, int, int]


def forward(gpt: GPTConfig, length: int) -> dict[str, int]:
    """Operations (a multiplication and an addition are two) of the products of one window's forward pass, by product.

    Attention counts the pairs that a causal mask leaves, L (L + 1) / 2: what the mathematics needs. Who computes masked
    pairs too does more than is counted here. An encoding's own operations, norms and softmax are no products.
    """
    dim, layers = gpt.model_dim, gpt.num_layers
    pairs = length * (length + 1) // 2
    each = {
        "qkv": layers * length * 3 * dim**2,
        "scores": layers * pairs * dim,
        "values": layers * pairs * dim,
        "attention_out": layers * length * dim**2,
        "mlp": layers * length * 2 * dim * gpt.hidden_dim,
        "logits": length * dim * gpt.vocab_size,
    }
    return {name: 2 * count for name, count in each.items()}


def step(gpt: GPTConfig, batch: int, length: int) -> int:
    """Operations of the products of a training step: each product once forwards, twice backwards."""
    return 3 * batch * sum(forward(gpt, length).values())


def shapes(gpt: GPTConfig, tokens: int) -> list[Shape]:
    """(rows, inner, columns): a large square, and what the MLP's first layer does to `tokens` tokens."""
    return [(SIDE, SIDE, SIDE), (tokens, gpt.model_dim, gpt.hidden_dim)]


def ways(asked: Sequence[Shape], others: Sequence[Peer]) -> list[Way]:
    """jax's products of these shapes, and those of `others`, peers by the names that `name` gives; in operations."""
    by_name = {name("torch", shape): shape for shape in asked}
    theirs = [(each, by_name[each.name]) for each in others]
    return [*map(_own, asked), *(each.way(operations(shape), times(shape)) for each, shape in theirs)]


def name(library: str, shape: Shape) -> str:
    rows, inner, columns = shape
    return f"{library}, [{rows},{inner}] x [{inner},{columns}]"


def times(shape: Shape) -> int:
    """How often a call multiplies."""
    return math.ceil(LEAST / (2 * math.prod(shape)))


def operations(shape: Shape) -> float:
    """Of a call."""
    return 2.0 * math.prod(shape) * times(shape)


def _own(shape: Shape) -> Way:
    rows, inner, columns = shape
    random = np.random.default_rng(0)
    left = jnp.asarray(random.standard_normal((rows, inner)), jnp.float32)
    right = jnp.asarray(random.standard_normal((inner, columns)), jnp.float32)
    product: Callable[..., jax.Array] = jax.jit(jnp.matmul)

    def call() -> None:
        for _ in range(times(shape)):
            found = product(left, right)
        jax.block_until_ready(found)

    return Way(name("jax", shape), operations(shape), call)
