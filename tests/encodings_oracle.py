"""Positional encodings and causal attention in plain float64 numpy: loops over queries and keys, from the formulas.

Imports nothing of the package. A `Formula` is what one encoding does to a token at the input (`embed`) and to the
scaled logit of one head for one query and one key (`logit`); of some, also what it makes of the value of a pair
(`value`), of all logits of a query (`row`), and of the tokens between query and key (`gate`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Parameters = Mapping[str, np.ndarray]


class Formula(NamedTuple):
    """embed(x [M], p) -> [M]; logit(q [D], k [D], i, j, head) -> scaled float.

    value(v [D], i, j) -> [D]; row(scores [n], q [D]) -> [n], of the seen keys in the order of their positions;
    gate(x [M], head) -> float, added to a logit for each token after the key, up to the query, x its layer's input;
    mixed([H], i, j) -> [H], what becomes of a pair's logits once all heads have theirs.
    """

    embed: Callable[[np.ndarray, int], np.ndarray]
    logit: Callable[[np.ndarray, np.ndarray, int, int, int], float]
    value: Callable[[np.ndarray, int, int], np.ndarray] | None = None
    row: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    gate: Callable[[np.ndarray, int], float] | None = None
    mixed: Callable[[list[float], int, int], list[float]] | None = None


def sinusoid(position: int, channels: int, interleaved: bool = True) -> np.ndarray:
    """[channels]: sin and cos of position / 10000^(2k/channels)."""
    out = np.zeros(channels)
    for k in range(channels // 2):
        angle = position / 10_000.0 ** (2 * k / channels)
        sin, cos = (2 * k, 2 * k + 1) if interleaved else (k, channels // 2 + k)
        out[sin], out[cos] = math.sin(angle), math.cos(angle)
    return out


def rotated(
    x: np.ndarray,
    position: int,
    base: float = 10_000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
    frequencies: Sequence[float] | None = None,
    magnitude: float = 1.0,
):
    """x [D] with each pair of its first fraction * D dims turned by its own angle, and stretched."""
    dims = round(fraction * len(x))
    out = np.array(x, np.float64)
    for k in range(dims // 2):
        angle = position * (base ** (-2 * k / dims) if frequencies is None else frequencies[k])
        a, b = (2 * k, 2 * k + 1) if interleaved else (k, k + dims // 2)
        out[a] = magnitude * (x[a] * math.cos(angle) - x[b] * math.sin(angle))
        out[b] = magnitude * (x[b] * math.cos(angle) + x[a] * math.sin(angle))
    return out


def alibi_slopes(heads: int) -> list[float]:
    """The reference recipe: a geometric series for a power of two, else that of the power below and every other one of
    the power above."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]
    below = 1 << (heads.bit_length() - 1)
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def t5_bucket(distance: int, num_buckets: int = 32, max_distance: int = 128) -> int:
    """Causal bucket of one distance >= 0."""
    exact = num_buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(exact + int(share * (num_buckets - exact)), num_buckets - 1)


def _dot(q: np.ndarray, k: np.ndarray) -> float:
    return float(q @ k) / math.sqrt(len(q))


def _unchanged(x: np.ndarray, position: int) -> np.ndarray:
    return x


def _plain(q, k, i, j, head) -> float:
    return _dot(q, k)


def none(parameters: Parameters) -> Formula:
    return Formula(_unchanged, _plain)


def sinusoidal(parameters: Parameters, scale: float = 1.0, interleaved: bool = True) -> Formula:
    return Formula(lambda x, p: x + scale * sinusoid(p, len(x), interleaved), _plain)


def learned(parameters: Parameters, rows: int | None = None) -> Formula:
    return Formula(lambda x, p: x + parameters["table"][p], _plain)


def rope(parameters: Parameters, **options: Any) -> Formula:
    return Formula(
        _unchanged,
        lambda q, k, i, j, head: _dot(rotated(q, i, **options), rotated(k, j, **options)),
    )


def _softplus(raw: float) -> float:
    return math.log1p(math.exp(raw))


def _bias(bias: Callable[[int, int, int], float]) -> Formula:
    """Adds bias(i, j, head) to the scaled product."""
    return Formula(_unchanged, lambda q, k, i, j, head: _dot(q, k) + bias(i, j, head))


def alibi(parameters: Parameters, heads: int = 2, learned: bool = False) -> Formula:
    slopes = [_softplus(raw) for raw in parameters["raw"]] if learned else alibi_slopes(heads)
    return _bias(lambda i, j, head: -slopes[head] * (i - j) if head < heads else 0.0)


def t5(parameters: Parameters, num_buckets: int = 32, max_distance: int = 128) -> Formula:
    table = parameters["table"]
    return Formula(
        _unchanged,
        lambda q, k, i, j, head: _dot(q, k) + table[t5_bucket(i - j, num_buckets, max_distance), head],
    )


def transformer_xl(parameters: Parameters, clamp: int | None = None) -> Formula:
    u, v, projection = parameters["u"], parameters["v"], parameters["projection"]

    def logit(q, k, i, j, head):
        far = i - j if clamp is None else min(i - j, clamp)
        relative = sinusoid(far, len(projection), interleaved=False) @ projection[:, head]
        return _dot(q + u[head], k) + _dot(q + v[head], relative)

    return Formula(_unchanged, logit)


def p_rope(parameters: Parameters, p: float = 0.75, reversed: bool = False, partial: bool = False,
           base: float = 10_000.0, interleaved: bool = False) -> Formula:  # fmt: skip
    if partial:
        return rope(parameters, fraction=p, base=base, interleaved=interleaved)

    def turned(x, position):
        pairs = len(x) // 2
        kept = math.floor(p * pairs)
        full = rotated(x, position, base, interleaved=interleaved)
        out = np.array(x, np.float64)
        for k in range(pairs - kept, pairs) if reversed else range(kept):
            for each in (2 * k, 2 * k + 1) if interleaved else (k, k + pairs):
                out[each] = full[each]
        return out

    return Formula(_unchanged, lambda q, k, i, j, head: _dot(turned(q, i), turned(k, j)))


def zeta(k: int, dims: int) -> float:
    return (2 * k + 0.4 * dims) / (1.4 * dims)


def xpos(parameters: Parameters, scale_base: float = 512.0, base: float = 10_000.0,
         interleaved: bool = False) -> Formula:  # fmt: skip
    def logit(q, k, i, j, head):
        """Each pair's share of the product, in two dims, times its power of the distance."""
        q, k, dims = rotated(q, i, base, interleaved=interleaved), rotated(k, j, base, interleaved=interleaved), len(q)
        total = 0.0
        for n in range(dims // 2):
            a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + dims // 2)
            total += (q[a] * k[a] + q[b] * k[b]) * zeta(n, dims) ** ((i - j) / scale_base)
        return total / math.sqrt(dims)

    return Formula(_unchanged, logit)


def shaw(parameters: Parameters, clip: int = 16, values: bool = True) -> Formula:
    keys, vectors = parameters["keys"], parameters.get("vectors")
    return Formula(
        _unchanged,
        lambda q, k, i, j, head: _dot(q, k + keys[min(i - j, clip)]),
        value=(lambda v, i, j: v + vectors[min(i - j, clip)]) if values else None,
    )


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def cope_places(scores, limit: float = math.inf) -> list[float]:
    """Gates of a key and of all after it, added up."""
    return [min(sum(sigmoid(each) for each in scores[n:]), limit) for n in range(len(scores))]


def cope(parameters: Parameters, count: int | None = None, gate_scale: bool = True,
         after_scale: bool = False) -> Formula:  # fmt: skip
    table = parameters["table"]

    def row(scores, q):
        size = math.sqrt(len(q))
        places = cope_places(scores if gate_scale else scores * size, len(table) - 1)
        out = []
        for score, place in zip(scores, places, strict=True):
            low, high = math.floor(place), math.ceil(place)
            between = (place - low) * (q @ table[high]) + (1 - (place - low)) * (q @ table[low])
            out.append(score + between if after_scale else (score * size + between) / size)
        return np.asarray(out)

    return Formula(_unchanged, _plain, row=row)


def fox(parameters: Parameters, bias: float = 0.0) -> Formula:
    weight, b = parameters["gate"], parameters["bias"]
    return Formula(_unchanged, _plain, gate=lambda x, head: math.log(sigmoid(float(x @ weight[:, head]) + b[head])))


def kerple_log(parameters: Parameters) -> Formula:
    scale, rate = parameters["scale"], parameters["rate"]
    return _bias(lambda i, j, head: -_softplus(scale[head]) * math.log(1 + _softplus(rate[head]) * (i - j)))


def kerple_power(parameters: Parameters) -> Formula:
    scale, power = parameters["scale"], parameters["power"]

    def bias(i, j, head):
        return -_softplus(scale[head]) * float(i - j) ** (2 / (1 + math.exp(-power[head])))

    return _bias(bias)


def fire_share(i: int, j: int, c: float, threshold: float) -> float:
    """The distance as FIRE scales it."""
    return math.log(c * (i - j) + 1) / math.log(c * max(i, threshold) + 1)


def fire(parameters: Parameters, hidden_layers: int = 1, width: int = 32, threshold: int = 512) -> Formula:
    c, reach = _softplus(parameters["rate"][0]), threshold * _softplus(parameters["reach"][0])

    def bias(i, j, head):
        share = fire_share(i, j, c, reach)
        hidden = [max(0.0, parameters["inner"][f] * share + parameters["inner_bias"][f]) for f in range(width)]
        if hidden_layers == 2:
            middle = [sum(hidden[f] * parameters["middle"][f, g] for f in range(width)) for g in range(width)]
            hidden = [max(0.0, middle[g] + parameters["middle_bias"][g]) for g in range(width)]
        return sum(hidden[f] * parameters["outer"][f, head] for f in range(width))

    return _bias(bias)


def sandwich_sum(distance: int, dbar: int = 128, first: int = 1) -> float:
    """Sum of cosines of a distance, dbar / 2 of them."""
    return sum(math.cos(distance / 10_000.0 ** (2 * k / dbar)) for k in range(first, first + dbar // 2))


def sandwich(parameters: Parameters, dbar: int = 128, first: int = 1, heads: int = 2) -> Formula:
    return _bias(lambda i, j, head: (sandwich_sum(i - j, dbar, first) - dbar / 2) / (8 * (head + 1) / heads))


def _below(parameters: Parameters, part: str) -> Parameters:
    return {path.removeprefix(f"{part}/"): value for path, value in parameters.items() if path.startswith(f"{part}/")}


def summed(
    parameters: Parameters,
    first: str = "rope",
    second: str = "alibi",
    first_options: Mapping[str, Any] | None = None,
    second_options: Mapping[str, Any] | None = None,
) -> Formula:
    """What each adds to the product, and to the input."""
    one = FORMULAS[first](_below(parameters, "first"), **(first_options or {}))
    two = FORMULAS[second](_below(parameters, "second"), **(second_options or {}))
    return Formula(
        lambda x, p: one.embed(x, p) + two.embed(x, p) - x,
        lambda q, k, i, j, head: one.logit(q, k, i, j, head) + two.logit(q, k, i, j, head) - _dot(q, k),
    )


def dape(
    parameters: Parameters, base: str = "alibi", base_options: Mapping[str, Any] | None = None, width: int = 32
) -> Formula:
    rule = FORMULAS[base](_below(parameters, "base"), **(base_options or {}))

    def mixed(scores, i, j):
        heads = range(len(scores))
        nothing = np.zeros(1)
        biases = [rule.logit(nothing, nothing, i, j, head) for head in heads]
        hidden = [
            sum(scores[h] * parameters["of_scores"][h, f] + biases[h] * parameters["of_biases"][h, f] for h in heads)
            + parameters["inner_bias"][f]
            for f in range(width)
        ]
        active = [value if value > 0 else 0.01 * value for value in hidden]
        return [scores[h] + biases[h] + sum(active[f] * parameters["outer"][f, h] for f in range(width)) for h in heads]

    return Formula(_unchanged, _plain, mixed=mixed)


FORMULAS = {
    "none": none,
    "sinusoidal": sinusoidal,
    "learned": learned,
    "rope": rope,
    "alibi": alibi,
    "t5": t5,
    "transformer_xl": transformer_xl,
    "p_rope": p_rope,
    "xpos": xpos,
    "shaw": shaw,
    "cope": cope,
    "fox": fox,
    "kerple_log": kerple_log,
    "kerple_power": kerple_power,
    "fire": fire,
    "sandwich": sandwich,
    "sum": summed,
    "dape": dape,
}


def visible(i: int, j: int, window: int | None = None) -> bool:
    """Whether a query at i sees a key at j: both real, the key not later, and among the last `window` keys."""
    return i >= 0 and j >= 0 and j <= i and (window is None or i - j < window)


def logits(formula: Formula, q, k, query_positions, key_positions, window: int | None = None, x=None) -> np.ndarray:
    """q [B,T,H,D], k [B,S,H,D], positions [B,T] and [B,S] -> [B,H,T,S], -inf where a key is not seen.

    x [B,S,M]: of a formula with gates, the inputs of all tokens, as the keys are.
    """
    batch, queries, heads, _ = q.shape
    out = np.full((batch, heads, queries, k.shape[1]), -np.inf)
    for b, t, s in np.ndindex(batch, queries, k.shape[1]):
        i, j = int(query_positions[b, t]), int(key_positions[b, s])
        if visible(i, j, window):
            scores = [formula.logit(q[b, t, h], k[b, s, h], i, j, h) for h in range(heads)]
            if formula.gate is not None:
                between = [n for n, position in enumerate(key_positions[b]) if j < position <= i]
                scores = [score + sum(formula.gate(x[b, n], h) for n in between) for h, score in enumerate(scores)]
            out[b, :, t, s] = scores if formula.mixed is None else formula.mixed(scores, i, j)
    if formula.row is not None:
        for b, h, t in np.ndindex(batch, heads, queries):
            seen = [s for s in np.argsort(key_positions[b]) if out[b, h, t, s] > -np.inf]
            out[b, h, t, seen] = formula.row(out[b, h, t, seen], q[b, t, h])
    return out


def softmax(row: np.ndarray) -> np.ndarray:
    """Softmax of one row with -inf in it; zeros where all of it is -inf."""
    if not np.isfinite(row).any():
        return np.zeros_like(row)
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def attention(formula: Formula, q, k, v, query_positions, key_positions, window: int | None = None, x=None):
    """As `logits`, with v [B,S,H,D] -> [B,T,H,D]."""
    scores = logits(formula, q, k, query_positions, key_positions, window, x)
    out = np.zeros(q.shape)
    for b, h, t in np.ndindex(scores.shape[:3]):
        for s, weight in enumerate(softmax(scores[b, h, t])):
            i, j = int(query_positions[b, t]), int(key_positions[b, s])
            if weight > 0:
                out[b, t, h] += weight * (v[b, s, h] if formula.value is None else formula.value(v[b, s, h], i, j))
    return out
