"""What every encoding must do to be compared: one battery, for those of the registry and for a file of one's own.

Each check measures how far an encoding is from keeping a promise of the interface, with parameters drawn far from their
initial values, and says what is allowed. Whether the formula is the paper's no battery can tell: that takes an oracle.
"""

import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import attention, encodings
from pe_ablation.attention import Mask, attend
from pe_ablation.encodings import Encoding, Scores, Tokens
from pe_ablation.model import GPTConfig, abstract

H, D, M, L = 2, 8, 16, 16  # heads, head dim, model dim, training length
B, T = 2, 7
V = 13
REACH = 256  # tokens of the run in which parameters must get a gradient
LAST = 2**31 - 1
ORDERED: Any = np.array([[0, 1, 2, 3, 4, 5, 6], [2, 3, 5, 8, 9, 14, 15]], np.int32)
PADDED: Any = np.array([[0, 1, 2, 3, 4, 5, 6], [-1, -1, 0, 1, 2, 3, 4]], np.int32)
EXTREMES = np.array([[-(2**31), -1, 0, 1, 300, 2**30, LAST]] * B, np.int32)
SHIFTS = (1, 8, 300, 4097, 20_000)


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
        return f"{verdict}  {self.name:<44} {self.found:.3g} (allowed {self.allowed:.3g})  {self.note}".rstrip()


class Subject:
    """One encoding with its options, and the programs that several checks share."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None):
        self.name, self.options = name, dict(options or {})
        self.cls = encodings.find(name)
        self.graph, self.parameters = self._drawn(L)

    def _build(self, train_length: int) -> Encoding:
        return encodings.make(
            self.name,
            num_heads=H,
            head_dim=D,
            model_dim=M,
            train_length=train_length,
            rngs=nnx.Rngs(0),
            **self.options,
        )

    def _drawn(self, train_length: int) -> tuple[Any, Any]:
        graph, abstract = nnx.split(nnx.eval_shape(lambda: self._build(train_length)))
        return graph, _random(abstract, self.name)

    @functools.cached_property
    def encoding(self) -> Encoding:
        return nnx.merge(self.graph, self.parameters)

    @functools.cached_property
    def attended(self) -> Callable[..., Any]:
        """Jitted (parameters, q, k, v, positions, window) -> output, gradients of all four under a fixed cotangent."""
        return jax.jit(functools.partial(self._attended, "dense"))

    @functools.cached_property
    def blockwise(self) -> Callable[..., Any]:
        return jax.jit(functools.partial(self._attended, "blockwise"))

    def _attended(self, implementation, parameters, q, k, v, query_positions, key_positions, window):
        def forward(parameters, q, k, v):
            encoding = nnx.merge(self.graph, parameters)
            queries, keys = _with_state(encoding, q, query_positions), _with_state(encoding, k, key_positions)
            return attend(encoding, queries, keys, v, mask=Mask(window=window), implementation=implementation)

        out, pull = jax.vjp(forward, parameters, q, k, v)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))

    def run(self, program: Any, q: Any, k: Any, v: Any, positions: Any, keys: Any = None, window: int = LAST) -> Any:
        """`program` of this subject's parameters."""
        keys = positions if keys is None else keys
        return program(self.parameters, q, k, v, positions, keys, np.int32(window))

    @functools.cached_property
    def scored(self) -> Callable[..., Any]:
        """Jitted (parameters, x, y [B,T,H,D], positions of both) -> unmasked logits [B,H,T,S], embed included."""

        def score(parameters, x, y, query_positions, key_positions):
            encoding = nnx.merge(self.graph, parameters)
            q, k = (
                encoding.embed(each.reshape(*each.shape[:2], M), pos).reshape(each.shape)
                for each, pos in ((x, query_positions), (y, key_positions))
            )
            query, key = encoding.query(q, query_positions), encoding.key(k, key_positions)
            a = jnp.einsum("bthd,bshd->bhts", query, key) * D**-0.5
            sides = _with_state(encoding, q, query_positions), _with_state(encoding, k, key_positions)
            return encoding.logits(a, *sides)

        return jax.jit(score)

    def gpt(self, **changes: Any) -> GPTConfig:
        base = {"vocab_size": V, "num_layers": 2, "num_heads": H, "model_dim": M, "train_length": L}
        return GPTConfig(**{**base, "encoding": self.name, "encoding_options": self.options, **changes})

    @functools.cached_property
    def decoder(self) -> tuple[Any, Any, Callable[..., Any]]:
        """Graph and parameters of a decoder of two layers, and jitted parameters, tokens -> logits."""
        graph, like = nnx.split(abstract(self.gpt()))
        return graph, _random(like, self.name), jax.jit(lambda p, tokens: nnx.merge(graph, p)(tokens))


def battery(name: str, options: Mapping[str, Any] | None = None) -> Iterator[Result]:
    """Every check of one encoding, in the order of `CHECKS`; those that need what it lacks are left out."""
    subject = Subject(name, options)
    for check in CHECKS:
        try:
            yield from check(subject)
        except Exception as error:  # a hook that raises is a finding about the encoding, not about the battery
            note = f"{type(error).__name__}: {error}".split("\n")[0]
            yield Result(check.__name__.strip("_").replace("_", " "), np.inf, 0.0, note)


def _shapes_and_dtypes(subject: Subject) -> Iterator[Result]:
    encoding, wrong = subject.encoding, []
    for dtype in (jnp.float32, jnp.bfloat16):
        q, k, _ = (x.astype(dtype) for x in _vectors(1))
        query, key = encoding.query(q, ORDERED), encoding.key(k, ORDERED)
        wrong += [] if query.dtype == key.dtype == dtype else [f"query and key of {dtype.__name__}: {query.dtype}"]
        wrong += [] if query.shape == key.shape and query.shape[:3] == q.shape[:3] else [f"query {query.shape}"]
        x = q.reshape(B, T, M)
        embedded = encoding.embed(x, PADDED)
        wrong += [] if embedded.dtype == dtype and embedded.shape == x.shape else [f"embed {embedded.dtype}"]
        wrong += [] if bool((embedded[1, :2] == x[1, :2]).all()) else ["embed adds to an empty slot"]
        queries, keys = _with_state(encoding, q, ORDERED), _with_state(encoding, k, ORDERED)
        logits = encoding.logits(jnp.zeros((B, H, T, T)), queries, keys)
        wrong += [] if logits.dtype == jnp.float32 and logits.shape == (B, H, T, T) else [f"logits {logits.dtype}"]
        added = encoding.values(jnp.ones((B, H, T, T)), queries, keys)
        wrong += [] if added is None or added.shape == (B, T, H, D) else [f"values {added.shape}"]
    yield Result("shapes and dtypes, float32 and bfloat16", len(wrong), 0, "; ".join(wrong))


def _parameter_count(subject: Subject) -> Iterator[Result]:
    if "about" not in vars(subject.cls):
        return
    count = sum(leaf.size for leaf in jax.tree.leaves(subject.parameters))
    expected = _stated(subject.name, subject.options)
    yield Result("as many parameters as its card says", abs(count - expected), 0, f"{count}, card {expected}")


def _stated(name: str, options: Mapping[str, Any]) -> float:
    """The number of parameters that a card states, those of encodings inside it as well."""
    text = re.sub(r"\(shared\)|per layer", "", encodings.find(name).about.parameters)
    parts = {option: _stated(*inner) for option, inner in encodings.nested(name, options).items()}
    sizes = {"H": H, "D": D, "M": M, "L": L}
    return eval(text, {"__builtins__": {}}, {**sizes, **encodings.option_defaults(name), **options, **parts})


def _jit_equals_eager(subject: Subject) -> Iterator[Result]:
    q, k, v = _vectors(2)
    encoding = subject.encoding
    queries, keys = _with_state(encoding, q, ORDERED), _with_state(encoding, k, ORDERED)
    eager = attend(encoding, queries, keys, v, mask=Mask(window=LAST), implementation="dense")
    yield Result("jit equals eager", _apart(subject.run(subject.attended, q, k, v, ORDERED)[0], eager), 1e-5)


def _blockwise_equals_dense(subject: Subject) -> Iterator[Result]:
    """More queries than a block holds, a window and padding: values, input and parameter gradients."""
    length = attention.BLOCK + 9
    q, k, v = _vectors(3, length)
    padded = np.stack([np.arange(length), np.maximum(np.arange(length) - 4, -1)]).astype(np.int32)
    dense, blockwise = (subject.run(each, q, k, v, padded, window=40) for each in (subject.attended, subject.blockwise))
    yield Result("blockwise equals dense, values and gradients", _apart(blockwise, dense), 2e-5)


def _empty_slots(subject: Subject) -> Iterator[Result]:
    vectors = _vectors(4)
    empty = (PADDED < 0)[..., None, None]
    clean, poisoned = (subject.run(subject.attended, *_filled(vectors, empty, value), PADDED) for value in (0.0, 1e3))
    yield Result("what empty slots hold reaches nothing", _apart(poisoned, clean), 1e-6)


def _filled(vectors: list[jax.Array], where: np.ndarray, value: float) -> tuple[Any, Any, Any]:
    q, k, v = (jnp.where(where, value, x) for x in vectors)
    return q, k, v


def _key_order(subject: Subject) -> Iterator[Result]:
    q, k, v = _vectors(5)
    order = np.array([3, 0, 6, 2, 5, 1, 4])
    if subject.encoding.state(jnp.zeros((B, T, M)), ORDERED, None) is not None:
        return  # states are made of tokens in time order
    plain, _ = subject.run(subject.attended, q, k, v, ORDERED)
    mixed, _ = subject.run(subject.attended, q, k[:, order], v[:, order], ORDERED, ORDERED[:, order])
    yield Result("the order of slots doesn't matter", _apart(mixed, plain), 1e-5)


def _shift_invariance(subject: Subject) -> Iterator[Result]:
    """Claimed: shifted positions change no seen logit, but for the rounding of angles. Denied: a shift shows."""
    x, y, _ = _vectors(6)
    place = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    seen = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, H, T, T))
    run = functools.partial(subject.scored, subject.parameters, x, y)
    base = np.asarray(run(place, place))[seen]
    if not subject.encoding.shift_invariant:
        moved = np.abs(np.asarray(run(place + 8, place + 8))[seen] - base).max()
        yield Result("not shift invariant, as it says", 1e-3 / max(float(moved), 1e-30), 1, f"moved by {moved:.2g}")
        return
    worst = max(
        np.abs(np.asarray(run(place + shift, place + shift))[seen] - base).max() / (1e-5 + 2e-7 * shift)
        for shift in SHIFTS
    )
    yield Result(f"shift invariant to {SHIFTS[-1]:,}, as it says", float(worst), 2, "in units of 1e-5 + 2e-7 p")


def _scores(subject: Subject) -> Iterator[Result]:
    encoding = subject.encoding
    q, k, _ = _vectors(7)
    other_q, other_k, _ = _vectors(8)
    a, b = (jnp.asarray(np.random.default_rng(seed).standard_normal((B, H, T, T)), jnp.float32) for seed in (9, 10))
    sides = _with_state(encoding, q, ORDERED), _with_state(encoding, k, ORDERED)
    others = _with_state(encoding, other_q, ORDERED), _with_state(encoding, other_k, ORDERED)
    out = encoding.logits(a, *sides)
    by_content = _apart(out, encoding.logits(a, *others))
    by_scores = _apart(out - a, encoding.logits(b, *sides) - b)
    said = f"{encoding.scores.name}: {encoding.scores.value}"
    if encoding.scores is Scores.NONE:
        yield Result("logits do what scores says", _apart(out, a), 0, said)
    elif encoding.scores is Scores.BIAS:
        yield Result("logits do what scores says", max(by_content, by_scores), 1e-5, said)
    else:
        moved = max(by_content, by_scores)
        yield Result("logits do what scores says", 1e-4 / max(moved, 1e-30), 1, f"{said}; moved by {moved:.2g}")


def _finite(subject: Subject) -> Iterator[Result]:
    encoding = subject.encoding
    last = encoding.max_position
    positions = EXTREMES if last is None else np.minimum(EXTREMES, last - 1)
    x, y, v = _vectors(11)

    def total(parameters, x, y):
        out = subject.scored(parameters, x, y, positions, positions)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(subject.parameters, x, y)
    yield Result("finite for every pair of int32 positions", _not_finite((out, gradients)), 0, "values and gradients")
    if last is None:
        far = ORDERED + 64 * L - T
        yield Result(
            "finite at 64 times the training length", _not_finite(subject.run(subject.attended, x, y, v, far)), 0
        )
        return
    past = encoding.embed(jnp.zeros((1, 2, M)), jnp.array([[last - 1, last]]))
    wrong = not bool(jnp.isfinite(past[0, 0]).all() & jnp.isnan(past[0, 1]).all())
    yield Result("NaN past its positions, never a repeated row", int(wrong), 0, f"{last} positions")


def _decoding(subject: Subject) -> Iterator[Result]:
    """Prefill 5 and 7 single steps, 5 + 4 + 3, 12 single steps: the logits of the whole."""
    graph, parameters, whole = subject.decoder
    tokens = _ids(12)
    expected = whole(parameters, tokens)
    step = jax.jit(lambda p, *rest: nnx.merge(graph, p).decode(*rest))
    worst = 0.0
    for sizes in ((5, *[1] * 7), (5, 4, 3), (1,) * 12):
        cache, found, at = nnx.merge(graph, parameters).cache(B, 16), [], 0
        for size in sizes:
            places = np.broadcast_to(np.arange(at, at + size, dtype=np.int32), (B, size))
            logits, cache = step(parameters, tokens[:, at : at + size], places, cache)
            found.append(logits)
            at += size
        worst = max(worst, _apart(jnp.concatenate(found, axis=1), expected))
    yield Result("a token at a time gives the whole", worst, 1e-4)


def _causality(subject: Subject) -> Iterator[Result]:
    graph, parameters, _ = subject.decoder
    tokens = jnp.arange(T)[None] + 1

    def logit(parameters, place):
        return nnx.merge(graph, parameters)(tokens)[0, place, 0]

    gradient = jax.jit(jax.grad(logit))
    leaks = [jnp.abs(gradient(parameters, place)["embedding"][...][place + 2 : T + 1]).max() for place in range(T - 1)]
    yield Result("no token depends on a later one", float(max(leaks)), 0)


def _seeds(subject: Subject) -> Iterator[Result]:
    graph, parameters, whole = subject.decoder
    other = _random(parameters, "another seed")
    tokens = _ids(T)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), parameters, other)
    batched = jax.jit(jax.vmap(lambda p: nnx.merge(graph, p)(tokens)))(stacked)
    yield Result(
        "vmapped seeds equal a loop", _apart(batched, jnp.stack([whole(p, tokens) for p in (parameters, other)])), 1e-5
    )


def _sharing(subject: Subject) -> Iterator[Result]:
    """One encoding for each layer, with copies of the shared parameters, is the shared one."""
    config = subject.gpt()
    if subject.encoding.overrides("embed") or not jax.tree.leaves(subject.parameters):
        return
    shared, own = (GPTConfig(**{**vars(config), "sharing": each}) for each in ("all", "none"))
    graphs = {}
    for each in (shared, own):
        graphs[each.sharing] = nnx.split(abstract(each))
    parameters = _random(graphs["all"][1], subject.name)
    copied = jax.tree.map(
        lambda leaf, like: jnp.stack([leaf] * 2) if leaf.shape != like.shape else leaf, parameters, graphs["none"][1]
    )
    tokens = _ids(T)
    one, two = (
        jax.jit(lambda p, graph=graphs[name][0]: nnx.merge(graph, p)(tokens))(values)
        for name, values in (("all", parameters), ("none", copied))
    )
    yield Result("per layer equals shared on copied parameters", _apart(two, one), 1e-5)


def _gradients(subject: Subject) -> Iterator[Result]:
    """An entry without a gradient over 256 tokens is one that no logit there depends on."""
    config = subject.gpt(num_layers=1, train_length=REACH)
    graph, like = nnx.split(abstract(config))
    parameters = _random(like, subject.name)
    own = {path: leaf[...] for path, leaf in nnx.to_flat_state(parameters) if path[0] == "encodings"}
    if not own:
        return
    tokens = jnp.asarray(np.random.default_rng(12).integers(0, V, (1, REACH)), jnp.int32)
    total = jax.jit(lambda p: jnp.sum(jnp.sin(3.0 * nnx.merge(graph, p)(tokens))))
    found = {path: leaf[...] for path, leaf in nnx.to_flat_state(jax.jit(jax.grad(total))(parameters))}
    dead, moved = [], 0.0
    base = total(parameters)
    for path, gradient in found.items():
        if path[0] != "encodings":
            continue
        rows = (
            jnp.abs(gradient).reshape(gradient.shape[0], -1).max(axis=-1) if gradient.ndim else jnp.abs(gradient)[None]
        )
        none = np.asarray(rows <= 1e-6 * jnp.abs(gradient).max())
        dead += [".".join(map(str, path))] * bool(none.all())
        if none.any() and not none.all():
            change = none.reshape(-1, *[1] * (gradient.ndim - 1))
            other = _with(parameters, path, jnp.where(change, own[path] + 1.0, own[path]))
            moved = max(moved, abs(float(total(other) - base)))
    yield Result("every parameter gets a gradient in 256 tokens", len(dead), 0, ", ".join(dead))
    yield Result("rows without a gradient are not read", moved, 1e-4)


CHECKS: tuple[Callable[[Subject], Iterator[Result]], ...] = (
    _shapes_and_dtypes,
    _parameter_count,
    _jit_equals_eager,
    _blockwise_equals_dense,
    _empty_slots,
    _key_order,
    _shift_invariance,
    _scores,
    _finite,
    _decoding,
    _causality,
    _seeds,
    _sharing,
    _gradients,
)


def _random(abstract: Any, name: str) -> Any:
    """Values for every parameter, deviation 0.4, scales about 1: every term of a formula shows."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    leaves = [
        (1.0 if "scale" in path else 0.0) + 0.4 * random.standard_normal(leaf.shape)
        for path, leaf in nnx.to_flat_state(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), [jnp.asarray(leaf, jnp.float32) for leaf in leaves])


def _with(parameters: Any, path: tuple, value: jax.Array) -> Any:
    """`parameters` with another value at one path."""
    leaves = [value if each == path else leaf[...] for each, leaf in nnx.to_flat_state(parameters)]
    return jax.tree.unflatten(jax.tree.structure(parameters), leaves)


def _vectors(seed: int, length: int = T) -> list[jax.Array]:
    """q, k, v float32 [B,length,H,D]; |q| |k| is about sqrt(D)."""
    draw = np.random.default_rng(seed).standard_normal
    return [jnp.asarray(scale * draw((B, length, H, D)), jnp.float32) for scale in (0.6, 0.6, 1.0)]


def _ids(length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(13).integers(0, V, (B, length)), jnp.int32)


def _with_state(encoding: Encoding, vec: jax.Array, pos: Any) -> Tokens:
    """Tokens with the state that an encoding makes of them, taken as the block's input."""
    pos = jnp.asarray(pos)
    found = encoding.state(vec.reshape(*vec.shape[:2], M), pos, None)
    return Tokens(vec, pos, None if found is None else found[0])


def _apart(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of each leaf, or 1; infinite for NaN."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    gaps = [float(jnp.abs(a - b).max() / jnp.maximum(1.0, jnp.abs(b).max())) for a, b in pairs]
    return max(np.inf if np.isnan(gap) else gap for gap in gaps)


def _not_finite(tree: Any) -> int:
    return sum(int((~jnp.isfinite(leaf)).sum()) for leaf in jax.tree.leaves(tree))
