"""Fused kernels on the device that has them, against `dense` there: values and gradients in bfloat16.

Skipped elsewhere; fused_test.py holds the code around them on a CPU. Both sides round: bfloat16 keeps 8 bits, so that a
weight or a value is off by up to 2^-9 of itself, and an output or a gradient, a sum of many such, by a few times that
of the largest. Allowed is 2^-6 of the largest entry; a wrong mask, scale or bias is off by its own size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_ablation import encodings, fused
from pe_ablation.attention import Mask, attend
from pe_ablation.encodings import Tokens

B, T, H, D = 2, 256, 12, 64
TOLERANCE = 2.0**-6

on_gpu = pytest.mark.skipif(fused.kernel() != "cudnn", reason="no GPU")
on_tpu = pytest.mark.skipif(fused.kernel() != "splash", reason="no TPU")


def measured(name, window, implementation):
    """The output, then gradients of the encoding's parameters, q, k and v; all but parameters are bfloat16."""
    sizes = {"num_heads": H, "head_dim": D, "model_dim": H * D, "train_length": T}
    graph, parameters = nnx.split(encodings.make(name, **sizes, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(draw.standard_normal((B, T, H, D)), jnp.bfloat16) for _ in range(4))
    mask = Mask(ordered=True, window=window)

    def loss(parameters, q, k, v):
        sides = Tokens(q, jnp.arange(T)), Tokens(k, jnp.arange(T))
        out = attend(nnx.merge(graph, parameters), *sides, v, mask=mask, implementation=implementation)
        return jnp.sum((weight * out).astype(jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(parameters, q, k, v)
    return [np.asarray(each, np.float32) for each in (out, *jax.tree.leaves(gradients))]


def close(name, window, implementation):
    for ours, dense in zip(measured(name, window, implementation), measured(name, window, "dense"), strict=True):
        assert np.isfinite(ours).all()
        assert np.abs(ours - dense).max() <= TOLERANCE * np.abs(dense).max()


@on_gpu
@pytest.mark.parametrize(
    "name, window",
    [("none", None), ("none", 1), ("none", 100), ("rope", None), ("alibi", None), ("alibi", 100)]
    + [(name, None) for name in ("t5", "kerple_log", "fire", "sandwich", "sum")],
)
def test_cudnn_equals_dense(name, window):
    close(name, window, "cudnn")


@on_gpu
@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_several_runs_equal_each_alone(name):
    """Two runs in one program, as `vmap` makes it of training, and each of them by itself."""
    encoding = encodings.make(name, num_heads=H, head_dim=D, model_dim=H * D, train_length=T, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, B, T, H, D)), jnp.bfloat16)

    def loss(x, vmapped):
        tokens, mask = Tokens(x, jnp.arange(T)), Mask(ordered=True)
        out = attend(encoding, tokens, tokens, x, mask=mask, implementation="cudnn", vmapped=vmapped)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    both = jax.jit(jax.vmap(jax.grad(functools.partial(loss, vmapped=True))))(x)
    alone = jnp.stack([jax.jit(jax.grad(functools.partial(loss, vmapped=False)))(each) for each in x])
    assert float(jnp.abs(both - alone).max()) <= TOLERANCE * float(jnp.abs(alone).max())


@on_tpu
@pytest.mark.parametrize("name, window", [("none", None), ("none", 100), ("rope", None), ("alibi", None), ("sum", 100)])
def test_splash_equals_dense(name, window):
    close(name, window, "splash")
