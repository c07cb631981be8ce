"""A decoder that reads one token at a time and keeps lists of what it has seen, in float64 numpy.

Imports nothing of the package. Weights are those of `gpt2_oracle`, formulas those of `encodings_oracle`, one a layer.
Each layer keeps (index in the text, key, value) of the first S tokens and the last R; whatever is kept is numbered anew
at every step. What gates made of a token stays, kept or not.
"""

import math

import numpy as np
from gpt2_oracle import layer_norm, mlp


def stream(weights, tokens, heads, formulas, *, sinks=0, recent=None, evict="after", rule="in_cache", limit=None,
           embedded=None, first_layer=False):  # fmt: skip
    """tokens [T] -> logits [T,V], and what was kept when each was read: lists of (text index, position shown).

    recent None keeps all. evict "before" makes room for a token before it is read, so it sees one less. `embedded(t)`
    is the position that token t is given at the input (default t). `first_layer` makes the first layer's keys and
    values anew at each step, from tokens at their positions in the cache.
    """
    embedded = embedded or (lambda t: t)
    kept = [[] for _ in weights["layers"]]
    read = [[] for _ in weights["layers"]]
    logits, trace = [], []
    for t, token in enumerate(tokens):
        for each in kept:
            if evict == "before" and recent is not None and len(each) >= sinks + recent:
                del each[sinks]
        shown = positions(kept[0], t, sinks, rule)
        trace.append((list(zip([each[0] for each in kept[0]], shown[:-1], strict=True)), shown[-1]))
        x = formulas[0].embed(weights["embedding"][token], embedded(t))
        for number, (layer, own, formula) in enumerate(zip(weights["layers"], kept, formulas, strict=True)):
            if first_layer and number == 0:
                ranks = zip(own, shown, strict=False)
                own[:] = [(j, *keys_of(weights, layer, formula, tokens[j], at)[1:]) for (j, *_), at in ranks]
            normed = layer_norm(x, *layer["attention_norm"])
            q, k, v = np.split(normed @ layer["qkv"][0] + layer["qkv"][1], 3)
            own.append((t, k, v))
            read[number].append(normed)
            out = attended(q, own, shown, formula, heads, sinks, rule, limit, read[number])
            x = x + out @ layer["attention_out"][0]
            x = x + layer["attention_out"][1]
            x = x + mlp(layer_norm(x, *layer["mlp_norm"]), layer)
        for each in kept:
            if recent is not None and len(each) > sinks + recent:
                del each[sinks]
        logits.append(layer_norm(x, *weights["norm"]) @ weights["embedding"].T)
    return np.asarray(logits), trace


def positions(kept, t, sinks, rule):
    """Positions of the kept tokens and of the one that is read now."""
    if rule == "in_cache":
        return [*range(len(kept) + 1)]
    return [*(each[0] for each in kept), t]


def keys_of(weights, layer, formula, token, position):
    """Query, key and value of the first layer for one token at one position."""
    x = formula.embed(weights["embedding"][token], position)
    return np.split(layer_norm(x, *layer["attention_norm"]) @ layer["qkv"][0] + layer["qkv"][1], 3)


def attended(q, own, shown, formula, heads, sinks, rule, limit, read):
    """The weighted values of one token over what is kept, itself last: [M]. `read`: the inputs of all tokens so far."""
    size = len(q) // heads
    out = np.zeros(len(q))
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores, values = [], []
        for (index, key, value), j in zip(own, shown, strict=True):
            i = shown[-1]
            far = rule == "capped" and j < sinks and i - j > limit
            i, j = (limit, 0) if far else (i, j)
            scores.append(formula.logit(q[part], key[part], i, j, h))
            if formula.gate is not None:
                scores[-1] += sum(formula.gate(x, h) for x in read[index + 1 :])
            values.append(value[part] if formula.value is None else formula.value(value[part], i, j))
        if formula.row is not None:
            scores = formula.row(np.asarray(scores), q[part])
        weights = [math.exp(score - max(scores)) for score in scores]
        out[part] = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
    return out
