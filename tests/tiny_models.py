"""Small decoders far from their initial values, for tests that hold them against something."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation.model import GPT, GPTConfig

TINY = GPTConfig(vocab_size=13, num_layers=2, num_heads=2, model_dim=8, train_length=16, encoding="none")
LINEARS = ("qkv", "attention_out", "mlp_in", "mlp_out")


def tiny(**changes):
    return dataclasses.replace(TINY, **changes)


@functools.cache
def abstract_parts(config):
    """(graph, shapes) of a decoder, by the text of its configuration, which a mapping of options keeps from hashing."""
    return nnx.split(nnx.eval_shape(lambda: GPT(eval(config), rngs=nnx.Rngs(0))))


def perturbed(config, seed=0):
    """(graph, parameters) of a decoder far from its initial values: every bias and scale matters."""
    random = np.random.default_rng(seed)
    graph, abstract = abstract_parts(repr(config))

    def draw(path, p):
        centre = 1.0 if "scale" in path else 0.0
        return jnp.asarray(centre + 0.3 * random.standard_normal(p.shape), jnp.float32)

    flat = [(path, draw(path, leaf)) for path, leaf in nnx.to_flat_state(abstract)]
    filled = jax.tree.unflatten(jax.tree.structure(abstract), [value for _, value in flat])
    return graph, filled


def by_path(parameters):
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(parameters)}


@functools.cache
def forward(graph):
    """Jitted parameters, tokens -> logits."""
    return jax.jit(lambda parameters, tokens: nnx.merge(graph, parameters)(tokens))


def ids(config, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape), jnp.int32)


def for_gpt2(config, parameters):
    """The weights that the oracle reads, in float64, layer by layer."""
    flat = {path: value.astype(np.float64) for path, value in by_path(parameters).items()}
    period = len(config.slots)

    def layer(number):
        def pair(name, first):
            path = f"blocks/{number % period}/{name}"
            return flat[f"{path}/{first}"][number // period], flat[f"{path}/bias"][number // period]

        linears = {name: pair(name, "kernel") for name in LINEARS}
        norms = {name: pair(name, "scale") for name in ("attention_norm", "mlp_norm")}
        return linears | norms | {"window": config.slots[number % period].window}

    return {
        "embedding": flat["embedding"],
        "position": flat.get("encodings/0/table"),
        "norm": (flat["norm/scale"], flat["norm/bias"]),
        "layers": [layer(number) for number in range(config.num_layers)],
    }
