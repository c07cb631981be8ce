"""GPT-2 in plain float64 numpy, one sequence at a time, one layer after the other. Imports nothing of the package.

Weights are a dict: embedding [V,M], position [P,M] or None, norm (scale, bias), and `layers`, each a dict of
attention_norm, qkv, attention_out, mlp_norm, mlp_in, mlp_out: pairs (kernel [inputs, outputs] or scale, bias).
"""

import math
from typing import Any

import numpy as np


def layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def attention(x: np.ndarray, layer: dict[str, Any], heads: int, window: int | None = None) -> np.ndarray:
    """x [T,M], normalised -> [T,M]."""
    length, dim = x.shape
    kernel, bias = layer["qkv"]
    q, k, v = np.split(x @ kernel + bias, 3, axis=-1)
    size = dim // heads
    out = np.zeros((length, dim))
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        for t in range(length):
            first = 0 if window is None else max(0, t - window + 1)
            scores = k[first : t + 1, part] @ q[t, part] / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[t, part] = weights / weights.sum() @ v[first : t + 1, part]
    kernel, bias = layer["attention_out"]
    return out @ kernel + bias


def mlp(x: np.ndarray, layer: dict[str, Any]) -> np.ndarray:
    (inner, inner_bias), (outer, outer_bias) = layer["mlp_in"], layer["mlp_out"]
    return gelu(x @ inner + inner_bias) @ outer + outer_bias


def gpt2(weights: dict[str, Any], tokens: np.ndarray, heads: int, embed_scale: float = 1.0) -> np.ndarray:
    """tokens [T] -> logits [T,V]."""
    x = embed_scale * weights["embedding"][tokens]
    if weights["position"] is not None:
        x = x + weights["position"][: len(tokens)]
    for layer in weights["layers"]:
        x = x + attention(layer_norm(x, *layer["attention_norm"]), layer, heads, layer.get("window"))
        x = x + mlp(layer_norm(x, *layer["mlp_norm"]), layer)
    return layer_norm(x, *weights["norm"]) @ weights["embedding"].T
