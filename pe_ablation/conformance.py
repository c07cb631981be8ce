"""What every encoding must do to be compared: one battery, for those of the registry and for a file of one's own.

Each check measures how far an encoding is from keeping a promise of the interface, with parameters drawn far from their
initial values, and says what is allowed. Whether the formula is the paper's no battery can tell: that takes an oracle.
"""

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import attention, encodings
from pe_ablation.attention import Mask, attend, centred
from pe_ablation.cache import Cache
from pe_ablation.encodings import Encoding, Scores, Tokens, distance
from pe_ablation.model import GPTConfig, abstract

H, D, M = 2, 8, 16  # heads, head dim, model dim
B, T = 2, 7
PAD = 9
LONG = 2 * attention.BLOCK + PAD  # tokens: two blocks of queries and a part of a third
L = LONG  # training length
TEXT = 12  # tokens of a decoder's texts, of which there are as many
V = 13
LAST = 2**31 - 1
NARROW = 40  # a window
ORDERED: Any = np.array([[0, 1, 2, 3, 4, 5, 6], [2, 3, 5, 8, 9, 14, 15]], np.int32)
EXTREMES: Any = np.array([[-(2**31), -1, 0, 1, 300, 2**30, LAST]] * B, np.int32)
PLAIN: Any = np.broadcast_to(np.arange(LONG, dtype=np.int32), (B, LONG))
PADDED: Any = np.pad(PLAIN[:, :-PAD], [(0, 0), (PAD, PAD)], constant_values=-1)
PADDED = np.stack([PADDED[0, PAD:], PADDED[1, :-PAD]])  # the first row on the right, the second on the left
FAR = 64 * L - LONG
SHIFTS = (1, 8, 300, 4097, 20_000)
PIECES = ((5, *[1] * 7), (5, 4, 3), (1,) * TEXT)


class Result(NamedTuple):
    """One check: how far off it was, in a unit of its own, and how far it may be."""

    name: str
    found: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.found <= self.allowed)

    def __str__(self) -> str:
        verdict = "ok    " if self.ok else "FAILED"
        return f"{verdict}  {self.name:<45} {self.found:.3g} (allowed {self.allowed:.3g})  {self.note}".rstrip()


class Run(NamedTuple):
    """Tokens that attend to themselves: q, k, v [B,LONG,H,D], the layer's input x [B,LONG,M], positions [B,LONG].

    Keys and values lie in the slots of `order`; the gradients are those of the output times `cotangent`.
    """

    vectors: tuple[Any, ...]
    cotangent: Any
    pos: Any = PLAIN
    order: Any = np.arange(LONG)
    window: Any = LAST


class Subject:
    """One encoding with its options, and the programs that several checks share."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None):
        self.name, self.options = name, dict(options or {})
        self.cls = encodings.find(name)
        self.graph, self.like = nnx.split(nnx.eval_shape(self.build))
        self.parameters = _random(self.like, f"{name.rpartition(':')[2]}{self.options}")
        self.attended = jax.jit(functools.partial(self._attended, "dense"))
        self.blockwise = jax.jit(jax.vmap(functools.partial(self._attended, "blockwise"), (0, None), axis_size=2))
        self.scored = jax.jit(self._scored)

    def build(self) -> Encoding:
        sizes = {"num_heads": H, "head_dim": D, "model_dim": M, "train_length": L}
        return encodings.make(self.name, **sizes, rngs=nnx.Rngs(0), **self.options)

    @functools.cached_property
    def encoding(self) -> Encoding:
        return nnx.merge(self.graph, self.parameters)

    def _attended(self, implementation: str, parameters: Any, run: Run) -> tuple[Any, Any]:
        """The output, and gradients of the parameters and the four vectors. `blockwise` takes stacked parameters."""

        def forward(parameters, vectors):
            encoding, (*projected, x) = nnx.merge(self.graph, parameters), vectors
            q, k, v = (encoding.embed(each.reshape(x.shape), run.pos).reshape(each.shape) for each in projected)
            queries = Tokens(q, run.pos, _state(encoding, x, run.pos))
            keys, values = jax.tree.map(lambda each: each[:, run.order], (queries._replace(vec=k), v))
            return attend(encoding, queries, keys, values, mask=Mask(window=run.window), implementation=implementation)

        out, pull = jax.vjp(forward, parameters, run.vectors)
        return out, pull(run.cotangent)

    @functools.cached_property
    def padded(self) -> dict[int, tuple[Any, Any]]:
        """By window, what several checks compare with."""
        run = _padded(_run())
        return {window: self.attended(self.parameters, run._replace(window=window)) for window in (LAST, NARROW)}

    def hooks(self, parameters: Any, vectors: Any, query: Any, key: Any) -> tuple[Any, Any]:
        """(unmasked logits [B,H,T,S], what is added to the values), everything by the hooks alone.

        Of an encoding that is given all keys of a query, 0 for those that the query does not see.
        """
        encoding, (q, k, x, weights) = nnx.merge(self.graph, parameters), vectors
        query, key = jnp.asarray(query), jnp.asarray(key)
        q, k = (encoding.embed(each.reshape(x.shape), pos).reshape(each.shape) for each, pos in ((q, query), (k, key)))
        sides = _side(encoding, q, x, query), _side(encoding, k, x, key)
        shown = centred(query, key) if encoding.recentred else (query, key)
        a = jnp.einsum("bthd,bshd->bhts", encoding.query(q, shown[0]), encoding.key(k, shown[1])) * D**-0.5
        added = encoding.values(weights, *sides)
        if encoding.scores is not Scores.ROW:
            return encoding.logits(a, *sides), added
        seen = Mask().tile(*sides)[:, None]
        return jnp.where(seen, encoding.logits(jnp.where(seen, a, -jnp.inf), *sides), 0.0), added

    def _scored(self, parameters: Any, vectors: Any, query: Any, key: Any) -> tuple[Any, Any]:
        """`hooks`, and gradients of the parameters and the vectors."""
        out, pull = jax.vjp(lambda own, given: self.hooks(own, given, query, key), parameters, vectors)
        return out, pull(jax.tree.map(jnp.cos, out))

    def gpt(self, **changes: Any) -> GPTConfig:
        base = {"vocab_size": V, "num_layers": 2, "num_heads": H, "model_dim": M, "train_length": L}
        return GPTConfig(**{**base, "encoding": self.name, "encoding_options": self.options, **changes})

    @functools.cached_property
    def decoder(self) -> tuple[Any, Any]:
        """Graph and parameters of a decoder of two layers."""
        graph, like = nnx.split(abstract(self.gpt()))
        return graph, _random(like, "decoder")

    @functools.cached_property
    def whole(self) -> Callable[..., Any]:
        """Jitted parameters of the decoder, tokens -> logits."""
        return jax.jit(lambda parameters, tokens: nnx.merge(self.decoder[0], parameters)(tokens))


Check = Callable[[Subject], Iterator[Result]]


def battery(name: str, options: Mapping[str, Any] | None = None) -> Iterator[Result]:
    """Every check of one encoding, in the order of `CHECKS`."""
    return results(Subject(name, options), CHECKS)


def results(subject: Subject, checks: Sequence[Check]) -> Iterator[Result]:
    """What some checks find; those that need what the encoding lacks are left out."""
    for check in checks:
        try:
            yield from check(subject)
        except Exception as error:  # a hook that raises is a finding about the encoding, not about the battery
            note = f"{type(error).__name__}: {error}".split("\n")[0]
            yield Result(check.__name__.strip("_").replace("_", " "), np.inf, 0.0, note)


def _shapes_and_dtypes(subject: Subject) -> Iterator[Result]:
    wrong = [each for dtype in (jnp.float32, jnp.bfloat16) for each in _wrong_hooks(subject.encoding, jnp.dtype(dtype))]
    yield Result("shapes and dtypes, float32 and bfloat16", len(wrong), 0, "; ".join(wrong))
    if subject.encoding.overrides("embed"):
        x, pos = np.ones((B, 3, M), np.float32), np.array([[-1, 0, 1], [-1, -1, 0]])
        added = np.asarray(subject.encoding.embed(jnp.asarray(x), jnp.asarray(pos)))[pos < 0] - 1
        yield Result("nothing is added to an empty slot", float(np.abs(added).max()), 0)


def _wrong_hooks(encoding: Encoding, dtype: np.dtype) -> Iterator[str]:
    """What hooks give that is not what the interface says, from their shapes alone."""

    def hooks(vec, x, a, pos):
        side = Tokens(vec, pos, _state(encoding, x, pos))
        found = {"query": encoding.query(vec, pos), "key": encoding.key(vec, pos), "embed": encoding.embed(x, pos)}
        kept = dict(zip(("state", "carry"), encoding.state(x, pos, None) or (), strict=False))
        added = encoding.values(a, side, side)
        return found | kept | {"logits": encoding.logits(a, side, side)} | ({} if added is None else {"values": added})

    scores = (B, H, T, T)
    given = [((B, T, H, D), dtype), ((B, T, M), dtype), (scores, jnp.float32), ((B, T), jnp.int32)]
    found = jax.eval_shape(hooks, *(jax.ShapeDtypeStruct(*each) for each in given))
    width = {name: each.shape[-1] for name, each in found.items()}
    shapes = {"query": (B, T, H, width["query"]), "key": (B, T, H, width["query"]), "embed": (B, T, M)}
    shapes |= {"state": (B, T, H, width.get("state")), "carry": (B, H, width.get("carry"))}
    shapes |= {"logits": scores, "values": (B, T, H, D)}
    for name, each in found.items():
        if each.shape != shapes[name] or each.dtype != (dtype if name in ("query", "key", "embed") else jnp.float32):
            yield f"{name} of {dtype}: {each.dtype}{list(each.shape)}"


def _parameter_count(subject: Subject) -> Iterator[Result]:
    """As many as stated; those that are one per layer are there."""
    paths = ["/".join(map(str, path)) + "/" for path, _ in nnx.to_flat_state(subject.like)]
    unknown = [name for name in subject.encoding.per_layer if not _there(subject.encoding, name, paths)]
    yield Result("what is one per layer is there", len(unknown), 0, ", ".join(unknown))
    if "about" in vars(subject.cls):
        count = sum(leaf.size for leaf in jax.tree.leaves(subject.like))
        expected = _stated(subject.name, subject.options)
        yield Result("as many parameters as its card says", abs(count - expected), 0, f"{count}, card {expected}")


def _there(encoding: Encoding, name: str, paths: list[str]) -> bool:
    """Whether a name of `per_layer` stands for parameters, or for those that other options would give."""
    found = functools.reduce(lambda part, each: getattr(part, each, ""), name.split("/"), encoding)
    return any(path.startswith(f"{name}/") for path in paths) or found is None or isinstance(found, Encoding)


def _stated(name: str, options: Mapping[str, Any]) -> float:
    """The number of parameters that a card states, those of encodings inside it as well."""
    text = re.sub(r"\(shared\)|per layer", "", encodings.find(name).about.parameters)
    parts = {option: _stated(*inner) for option, inner in encodings.nested(name, options).items()}
    sizes = {"H": H, "D": D, "M": M, "L": L}
    return eval(text, {"__builtins__": {}}, {**sizes, **encodings.option_defaults(name), **options, **parts})


def _jit_equals_eager(subject: Subject) -> Iterator[Result]:
    asked = subject.parameters, _few(), ORDERED, ORDERED
    yield Result("jit equals eager", _apart(subject.scored(*asked)[0], subject.hooks(*asked)), 2e-6)


def _scores(subject: Subject) -> Iterator[Result]:
    encoding, (q, k, x, _) = subject.encoding, _few()
    a, b = (jnp.asarray(_numbers(seed, B, H, T, T)) for seed in (9, 10))
    sides = _side(encoding, q, x, ORDERED), _side(encoding, k, x, ORDERED)
    others = _side(encoding, k, 2 * x, ORDERED), _side(encoding, q, 2 * x, ORDERED)
    out = encoding.logits(a, *sides)
    added, by_content = _largest(out - a), _largest(out - encoding.logits(a, *others))
    by_scores = _apart(out - a, encoding.logits(b, *sides) - b)
    name, said = "logits do what scores says", f"{encoding.scores.name}: {encoding.scores.value}"
    if encoding.scores is Scores.NONE:
        yield Result(name, added, 0, said)
    elif encoding.scores is Scores.BIAS:
        yield Result(name, by_scores if by_content == 0 else np.inf, 5e-6, said)
        yield _at_least("a bias is added", added, 1e-3)
        if (decline := encoding.decline()) is not None:
            seen = np.tril(np.ones((T, T), bool))
            wanted = -np.asarray(decline)[:, None, None] * np.asarray(distance(*sides))[:, None]
            yield Result("a bias declines as it says", _largest(np.where(seen, out - a - wanted, 0.0)), 1e-5)
    elif encoding.scores is Scores.CONTENT:
        yield _at_least(name, max(by_content, by_scores), 1e-3, said)
    else:
        moved = np.abs(np.asarray(encoding.logits(a.at[..., 3].add(1.0), *sides) - out)).max(axis=(0, 1, 2))
        yield _at_least(name, float(moved[:3].min()), 1e-4, said)
        yield Result("a key moves none behind it", float(moved[4:].max()), 0)


def _linear_values(subject: Subject) -> Iterator[Result]:
    """Weights are given up to a factor for each query, so what is added to the values has that factor too."""
    encoding, (q, k, x, _) = subject.encoding, _few()
    one, other = (jnp.asarray(np.abs(_numbers(seed, B, H, T, T))) for seed in (14, 15))
    sides = _side(encoding, q, x, ORDERED), _side(encoding, k, x, ORDERED)
    both, first, second = (encoding.values(each, *sides) for each in (2 * one + other, one, other))
    if both is not None and first is not None and second is not None:
        yield Result("values are linear in the weights", _apart(both, 2 * first + second), 1e-5)


def _shift_invariance(subject: Subject) -> Iterator[Result]:
    """Claimed: shifted positions change no seen logit, but for the rounding of angles. Denied: a shift shows."""
    place = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    seen = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, H, T, T))

    def logits(shift):
        return np.asarray(subject.scored(subject.parameters, _few(), place + shift, place + shift)[0][0])[seen]

    encoding, base = subject.encoding, logits(0)
    if not encoding.shift_invariant:
        moved = _largest(logits(8 if encoding.max_position else SHIFTS[-1]) - base)
        yield _at_least("not shift invariant, as it says", moved, 1e-2)
        return
    rounded = 2e-7 if any(encoding.overrides(hook) for hook in ("embed", "query", "key")) else 0.0
    allowed = {shift: 2e-5 + rounded * shift + 1e-5 * np.abs(base) for shift in SHIFTS}
    with np.errstate(invalid="ignore"):  # infinities that are everywhere: the check of finite values is about them
        worst = max(_largest((logits(shift) - base) / each) for shift, each in allowed.items())
    yield Result(f"shift invariant to {SHIFTS[-1]:,}, as it says", worst, 1, "in units of float32's rounding")


def _finite(subject: Subject) -> Iterator[Result]:
    last = subject.encoding.max_position
    positions = EXTREMES if last is None else np.minimum(EXTREMES, last - 1)
    found = subject.scored(subject.parameters, _few(), positions, positions)
    where = _not_finite_in(found, ("q", "k", "the input", "the weights"))
    yield Result("finite for every pair of int32 positions", _not_finite(found), 0, where)
    if last is None:
        far = subject.attended(subject.parameters, _run()._replace(pos=PLAIN + FAR))
        where = _not_finite_in(far, ("q", "k", "v", "the input"))
        yield Result("finite at 64 times the training length", _not_finite(far), 0, where)
        return
    past = np.asarray(subject.encoding.embed(jnp.zeros((1, 2, M)), jnp.array([[last - 1, last]])))
    wrong = not (np.isfinite(past[0, 0]).all() and np.isnan(past[0, 1]).all())
    yield Result("NaN past its positions, never a repeated row", int(wrong), 0, f"{last} positions")


def _blockwise_and_seeds(subject: Subject) -> Iterator[Result]:
    """Two seeds under one vmap and in blocks, against each of them alone and dense; padding, and a window."""
    seeds = subject.parameters, _random(subject.like, "another seed")
    stacked = jax.tree.map(lambda *each: np.stack(each), *seeds)
    run, wanted = _padded(_run()), subject.padded
    found = {window: subject.blockwise(stacked, run._replace(window=window)) for window in wanted}
    one, other = (jax.tree.map(lambda x, seed=seed: x[seed], jax.device_get(found)) for seed in (0, 1))
    yield Result(
        "blockwise equals dense, values and gradients", max(_off(one[each], wanted[each]) for each in wanted), 1e-5
    )
    yield Result("vmapped seeds equal a loop", _off(other[LAST], subject.attended(seeds[1], run)), 1e-5)


def _low_precision(subject: Subject) -> Iterator[Result]:
    """Numbers that bfloat16 holds, computed in it and in float32, at positions that it does not hold."""
    far = 0 if subject.encoding.max_position else FAR
    run = _padded(_run())._replace(pos=np.where(PADDED < 0, PADDED, PADDED + far))
    vectors, cotangent = jax.tree.map(lambda each: each.astype(jnp.bfloat16), (run.vectors, run.cotangent))
    found = subject.attended(subject.parameters, run._replace(vectors=vectors, cotangent=cotangent))
    kept = {each.dtype for each in (found[0], *found[1][1])} == {jnp.dtype(jnp.bfloat16)}
    apart = _apart(found, subject.attended(subject.parameters, run)) if kept else np.inf
    yield Result("bfloat16 costs precision alone", apart, 4e-2, "values and gradients")


def _padding(subject: Subject) -> Iterator[Result]:
    """A row padded on the right and one padded on the left, against the same tokens with others behind them."""
    worst, filled = 0.0, 0.0
    cotangent = np.where(_like(PLAIN < LONG - PAD, _run().cotangent), _run().cotangent, 0)
    for window, (out, (parameters, vectors)) in subject.padded.items():
        run = _run()._replace(window=window, cotangent=cotangent)
        plain, (expected, gradients) = subject.attended(subject.parameters, run)
        found = _unpadded(out), (parameters, [_unpadded(each) for each in vectors])
        wanted = jax.device_get(plain)[:, :-PAD], (expected, [each[:, :-PAD] for each in jax.device_get(gradients)])
        worst = max(worst, _off(found, wanted))
        filled = max(filled, _largest(np.asarray(out)[PADDED < 0]))
    yield Result("padding changes no value and no gradient", worst, 1e-5)
    yield Result("an empty slot's output is 0", filled, 0)


def _empty_slots(subject: Subject) -> Iterator[Result]:
    """NaN in the vectors of empty slots, and large numbers in their inputs."""
    found = subject.attended(subject.parameters, _padded(_run(), np.nan, 1e3))
    yield Result("what empty slots hold reaches nothing", _apart(found, subject.padded[LAST]), 0)
    into = max(_largest(np.asarray(each)[PADDED < 0]) for each in found[1][1])
    yield Result("no gradient reaches an empty slot", into, 0)


def _key_order(subject: Subject) -> Iterator[Result]:
    order = np.random.default_rng(5).permutation(LONG)
    mixed = subject.attended(subject.parameters, _padded(_run())._replace(order=order))
    yield Result("the order of keys is that of positions", _off(mixed, subject.padded[LAST]), 1e-5)


def _gradients(subject: Subject) -> Iterator[Result]:
    """At the start of training. Entries without a gradient are such that a step of 0.001 changes nothing."""
    if not jax.tree.leaves(subject.like):
        return
    initial = jax.tree.unflatten(jax.tree.structure(subject.like), jax.tree.leaves(nnx.split(subject.build())[1]))
    out, (gradients, _) = subject.attended(initial, _run())
    none = jax.tree.map(lambda each: np.abs(each) <= 1e-6 * np.abs(each).max(), jax.device_get(gradients))
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(none)}
    dead = [name for name, each in flat.items() if each.all()]
    yield Result(f"every parameter gets a gradient in {LONG} tokens", len(dead), 0, ", ".join(dead))
    if any(each.any() for each in flat.values()):
        moved = jax.tree.map(lambda value, each: np.where(each, value + 1e-3, value), jax.device_get(initial), none)
        apart = _largest(subject.attended(moved, _run())[0] - out)
        yield Result("entries without a gradient are not read", apart, 1e-6)


def _decoding(subject: Subject) -> Iterator[Result]:
    """Prefill 5 and 7 single steps, 5 + 4 + 3, 12 single steps: the logits of the whole, whatever is in empty slots.

    Pieces of several tokens have room for as many as the longest: two programs do for all.
    """
    graph, parameters = subject.decoder
    tokens, places = _texts(), np.broadcast_to(np.arange(TEXT, dtype=np.int32), (TEXT, TEXT))
    step = jax.jit(lambda parameters, *rest: nnx.merge(graph, parameters).decode(*rest))
    empty = _poisoned(nnx.merge(graph, parameters).cache(TEXT, TEXT + PIECES[0][0]))

    def read(sizes):
        cache = empty
        for size, start in zip(sizes, np.cumsum((0, *sizes)), strict=False):
            room = [(0, 0), (0, 0 if size == 1 else PIECES[0][0] - size)]
            piece = slice(start, start + size)
            padded = np.pad(tokens[:, piece], room), np.pad(places[:, piece], room, constant_values=-1)
            logits, cache = step(parameters, *padded, cache)
            yield np.asarray(logits)[:, :size]

    expected = subject.whole(parameters, tokens)
    worst = max(_apart(np.concatenate(list(read(sizes)), axis=1), expected) for sizes in PIECES)
    yield Result("a token at a time gives the whole", worst, 2e-5)


def _poisoned(cache: Cache) -> Cache:
    """An empty cache with NaN in its slots."""
    layers = [jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), each) for each in cache.layers]
    kept = [layer._replace(carry=each.carry) for layer, each in zip(layers, cache.layers, strict=True)]
    return dataclasses.replace(cache, layers=tuple(kept))


def _causality(subject: Subject) -> Iterator[Result]:
    """Row t of two batches has the same tokens up to t and others from there on."""
    parameters, tokens = subject.decoder[1], _texts()
    same = np.tril(np.ones((TEXT, TEXT), bool))
    plain, changed = (subject.whole(parameters, each) for each in (tokens, np.where(same, tokens, (tokens + 5) % V)))
    yield Result("no token depends on a later one", _largest((np.asarray(changed) - np.asarray(plain))[same]), 0)


def _sharing(subject: Subject) -> Iterator[Result]:
    """With the same values in every layer it does not matter which of them are stored once."""
    if subject.encoding.overrides("embed") or not jax.tree.leaves(subject.like):
        return
    paper, tokens = subject.decoder[1], _texts()
    others = {sharing: nnx.split(abstract(subject.gpt(sharing=sharing))) for sharing in ("all", "none")}
    once = _fitted(paper, others["all"][1])
    graph, like = others["all" if _sizes(paper) == _sizes(others["none"][1]) else "none"]
    found = jax.jit(lambda parameters: nnx.merge(graph, parameters)(tokens))(_fitted(once, like))
    wanted = subject.whole(_fitted(once, paper), tokens)
    yield Result("per layer equals shared on copied parameters", _apart(found, wanted), 1e-5)


def _fitted(parameters: Any, like: Any) -> Any:
    """The parameters as `like` stores them: one copy a layer, or those of the first layer."""

    def fit(leaf, like):
        return leaf if leaf.ndim == like.ndim else np.stack([leaf] * 2) if leaf.ndim < like.ndim else leaf[0]

    return jax.tree.map(fit, jax.device_get(parameters), like)


def _sizes(tree: Any) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(tree)]


ALONE: tuple[Check, ...] = (
    _shapes_and_dtypes,
    _parameter_count,
    _jit_equals_eager,
    _scores,
    _linear_values,
    _shift_invariance,
    _finite,
    _blockwise_and_seeds,
    _low_precision,
    _padding,
    _empty_slots,
    _key_order,
    _gradients,
)
IN_A_DECODER: tuple[Check, ...] = (_decoding, _causality, _sharing)
CHECKS = ALONE + IN_A_DECODER


def _random(abstract: Any, name: str) -> Any:
    """Values for every parameter, deviation 0.4, scales about 1: every term of a formula shows."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    leaves = [
        (1.0 if "scale" in path else 0.0) + 0.4 * random.standard_normal(leaf.shape)
        for path, leaf in nnx.to_flat_state(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), [jnp.asarray(leaf, jnp.float32) for leaf in leaves])


def _numbers(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    """float32, normal; bfloat16 holds them too."""
    drawn = scale * np.random.default_rng(seed).standard_normal(shape)
    return drawn.astype(jnp.bfloat16).astype(np.float32)


def _run() -> Run:
    """|q| |k| is about sqrt(D)."""
    vectors = (_numbers(seed, B, LONG, H, D, scale=scale) for seed, scale in enumerate((0.6, 0.6, 1.0)))
    return Run((*vectors, _numbers(3, B, LONG, M)), _numbers(4, B, LONG, H, D))


def _few() -> tuple[jax.Array, ...]:
    """q, k [B,T,H,D], x [B,T,M] and weights [B,H,T,T]."""
    shapes = ((0.6, T, H, D), (0.6, T, H, D), (1.0, T, M), (1.0, H, T, T))
    return tuple(jnp.asarray(_numbers(seed, B, *shape, scale=scale)) for seed, (scale, *shape) in enumerate(shapes))


def _texts() -> Any:
    """Tokens [TEXT,TEXT]."""
    return np.random.default_rng(13).integers(0, V, (TEXT, TEXT)).astype(np.int32)


def _padded(run: Run, fill: float = 0.0, inputs: float = 0.0) -> Run:
    """All but the last PAD tokens at the places of PADDED; what empty slots hold of q, k, v and of x."""

    def moved(each, fill):
        return np.where(_like(PADDED < 0, each), np.float32(fill), np.stack([each[0], np.roll(each[1], PAD, axis=0)]))

    fills = (fill, fill, fill, inputs)
    vectors = tuple(moved(each, into) for each, into in zip(run.vectors, fills, strict=True))
    return run._replace(vectors=vectors, pos=PADDED, cotangent=moved(run.cotangent, 0.0))


def _unpadded(x: jax.Array) -> np.ndarray:
    """The tokens of what came of a padded run."""
    return np.stack([np.asarray(x)[0, :-PAD], np.asarray(x)[1, PAD:]])


def _like(where: np.ndarray, x: np.ndarray) -> np.ndarray:
    return where.reshape(*where.shape, *[1] * (x.ndim - 2))


def _state(encoding: Encoding, x: jax.Array, pos: jax.Array) -> jax.Array | None:
    found = encoding.state(x, pos, None)
    return None if found is None else found[0]


def _side(encoding: Encoding, vec: jax.Array, x: jax.Array, pos: Any) -> Tokens:
    """Tokens with the state that an encoding makes of the layer's input x."""
    return Tokens(vec, jnp.asarray(pos), _state(encoding, x, jnp.asarray(pos)))


def _largest(x: Any) -> float:
    return float(np.abs(np.asarray(x, np.float32)).max())


def _at_least(name: str, found: float, wanted: float, note: str = "") -> Result:
    """A check of something that has to show."""
    return Result(name, wanted / max(found, 1e-30), 1, f"{note}; {found:.2g}".strip("; "))


@np.errstate(invalid="ignore")
def _apart(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of each leaf, or 1; infinite for NaN."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    arrays = ([np.asarray(each, np.float32) for each in pair] for pair in pairs)
    gaps = [float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in arrays]
    return max((np.inf if np.isnan(gap) else gap for gap in gaps), default=0.0)


def _off(found: Any, wanted: Any) -> float:
    """Two results of attention; gradients of parameters, whose sums over all pairs of tokens cancel, count a tenth."""
    (out, (parameters, vectors)), (expected, (theirs, gradients)) = found, wanted
    return max(_apart((out, vectors), (expected, gradients)), 0.1 * _apart(parameters, theirs))


def _not_finite_in(found: tuple[Any, tuple[Any, Any]], names: Sequence[str]) -> str:
    """Which of the values and of the gradients of parameters and of the vectors that `names` names are not."""
    out, (parameters, vectors) = found
    gradients = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(parameters)}
    parts = {"values": out} | {f"gradient of {name}": leaf for name, leaf in gradients.items()}
    parts |= {f"gradient of {name}": leaf for name, leaf in zip(names, vectors, strict=True)}
    wrong = [name for name, leaf in parts.items() if _not_finite(leaf)]
    return f"not: {', '.join(wrong)}" if wrong else "values and gradients"


def _not_finite(tree: Any) -> int:
    return sum(int((~np.isfinite(np.asarray(leaf))).sum()) for leaf in jax.tree.leaves(tree))
