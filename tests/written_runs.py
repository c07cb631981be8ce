"""Runs that are written, not trained: random parameters large enough that context matters, over a small text."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import config
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.model import GPT
from pe_ablation.record import Run

BOS, EOS, VOCABULARY = 256, 257, 258


def text(size, seed=0):
    return np.random.default_rng(seed).integers(97, 123, size).astype(np.uint8).tobytes()


RAGGED = (text(30, 1), text(47, 2), text(33, 3))


def experiment(folder, documents=RAGGED, **overrides):
    """A small config over `documents` in `folder`; overrides by path with __ for the dots."""
    texts = folder / "text"
    texts.mkdir(parents=True, exist_ok=True)
    for index, content in enumerate(documents):
        (texts / f"{index}.txt").write_bytes(content)
    base = {
        "encoding": {"name": "rope"},
        "model": {"num_layers": 2, "num_heads": 2, "model_dim": 8},
        "data": {
            "source": "text",
            "block": 8,
            "cache_dir": str(folder / "cache"),
            "text": {"train": str(texts), "validation": str(texts)},
        },
        "train": {"length": 8, "steps": 4, "batch_tokens": 8, "warmup_steps": 1},
        "eval": {"lengths": [8, 12], "last_k": 4, "spacing": 6, "stride": 3, "batch_tokens": 48},
    }
    return config.read(base, {name.replace("__", "."): value for name, value in overrides.items()})


def parameters(gpt, seed=0):
    """Random parameters of a model, far from their initial values: means 0 and 1 (norms), deviation 0.3."""
    draw = np.random.default_rng(seed)
    abstract = nnx.state(nnx.eval_shape(lambda: GPT(gpt, rngs=nnx.Rngs(0))), nnx.Param)
    make = lambda path, leaf: (  # noqa: E731
        0.3 * draw.standard_normal(leaf.shape) + ("scale" in jax.tree_util.keystr(path))
    ).astype(np.float32)
    return jax.tree_util.tree_map_with_path(make, abstract)


def written(path, asked, *, alive=True, step=None, seed=0, params=None):
    """A run directory as training leaves it, with random parameters."""
    run = Run.plan(path, asked, None, "digest")
    params = parameters(asked.gpt(VOCABULARY), seed) if params is None else params
    with Checkpoints(run.path / "checkpoints") as checkpoints:
        state = {"params": params, "alive": jnp.bool_(alive), "step": jnp.int32(0)}
        checkpoints.save(asked.train.steps if step is None else step, state, {"position": 0})
    run.finish({"status": "ok" if alive else "diverged", "parameters": 1})
    return run
