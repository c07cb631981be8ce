"""The battery passes what is right and finds what is wrong, with the check that is about it."""

import math
import textwrap

import pytest

from pe_ablation import cli, conformance

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

HEAD = """
import jax, jax.numpy as jnp
from flax import nnx
from pe_ablation.encodings import About, Encoding, Scores, distance


class Mine(Encoding):
"""


def written(tmp_path, body):
    """A user's file with one class, from its body."""
    path = tmp_path / "mine.py"
    path.write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    "))
    return f"{path}:Mine"


def test_one_of_the_registry_keeps_everything(capsys):
    assert cli.main(["encodings", "--check", "t5"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("t5: all kept\n") and out.count("ok  ") >= 20 and "FAILED" not in out


BY_QUERY_SLOT = """
    scores = Scores.CONTENT
    def logits(self, a, q, k):
        return a * (1 + 0.01 * jnp.arange(a.shape[2])[:, None])
"""
BY_KEY_SLOT = """
    scores = Scores.BIAS
    def logits(self, a, q, k):
        return a + 0.1 * jnp.arange(a.shape[-1])
"""
STATE_OF_ALL = """
    scores = Scores.CONTENT
    def state(self, x, pos, last):
        s = jnp.broadcast_to(x.mean(axis=(1, 2))[:, None, None, None], (*x.shape[:2], 2, 1))
        return s, s[:, -1]
    def logits(self, a, q, k):
        return a * (1 + jnp.swapaxes(q.state, 1, 2))
"""
TABLE = """
def __init__(self, sizes, rngs):
    self.table = nnx.Param(jnp.ones((4, sizes.num_heads)))
"""
WRONG = {
    "weights squared": ("values are linear in the weights", conformance._linear_values, """
        def values(self, w, q, k):
            return jnp.einsum("bhts,bshd->bthd", w**2, k.vec)
    """),
    "another dtype": ("shapes and dtypes, float32 and bfloat16", conformance._shapes_and_dtypes, """
        def query(self, q, pos):
            return q.astype(jnp.float32)
    """),
    "a state without heads": ("shapes and dtypes, float32 and bfloat16", conformance._shapes_and_dtypes, """
        def state(self, x, pos, last):
            return x[:, :, None].astype(jnp.float32), x[:, -1, None].astype(jnp.float32)
    """),
    "empty slots are embedded": ("nothing is added to an empty slot", conformance._shapes_and_dtypes, """
        def embed(self, x, pos):
            return x + 1
    """),
    "a name of nothing": (
        "what is one per layer is there", conformance._parameter_count,
        'per_layer = ("tabel",)' + TABLE,
    ),
    "another number of parameters": (
        "as many parameters as its card says", conformance._parameter_count,
        'about = About("", "", "3 * H", "")' + TABLE,
    ),
    "what a trace does": ("jit equals eager", conformance._jit_equals_eager, """
        def logits(self, a, q, k):
            return a + 0.1 * isinstance(a, jax.core.Tracer)
    """),
    "scores that say nothing is done": ("logits do what scores says", conformance._scores, """
        def logits(self, a, q, k):
            return a - 0.1 * distance(q, k)[:, None]
    """),
    "a bias that reads vectors": ("logits do what scores says", conformance._scores, """
        scores = Scores.BIAS
        def logits(self, a, q, k):
            return a + 0.1 * q.vec.sum(axis=-1).swapaxes(1, 2)[..., None]
    """),
    "a bias that multiplies": ("logits do what scores says", conformance._scores, """
        scores = Scores.BIAS
        def logits(self, a, q, k):
            return 1.01 * a
    """),
    "a bias of nothing": ("a bias is added", conformance._scores, """
        scores = Scores.BIAS
        def logits(self, a, q, k):
            return a + 0.0
    """),
    "another decline": ("a bias declines as it says", conformance._scores, """
        scores = Scores.BIAS
        def logits(self, a, q, k):
            return a - 0.1 * distance(q, k)[:, None]
        def decline(self):
            return jnp.full(2, 0.2)
    """),
    "content that is not read": ("logits do what scores says", conformance._scores, """
        scores = Scores.CONTENT
        def logits(self, a, q, k):
            return a - 0.1 * distance(q, k)[:, None]
    """),
    "an order that does not matter": ("logits do what scores says", conformance._scores, """
        scores = Scores.ROW
        def logits(self, a, q, k):
            return 2 * a
    """),
    "an order that ends nowhere": ("a key moves none behind it", conformance._scores, """
        scores = Scores.ROW
        def logits(self, a, q, k):
            return a + jax.nn.sigmoid(a).sum(axis=-1, keepdims=True)
    """),
    "a claim of shift invariance": ("shift invariant to 20,000, as it says", conformance._shift_invariance, """
        scores = Scores.BIAS
        def logits(self, a, q, k):
            return a - 0.01 * q.pos[:, None, :, None] * distance(q, k)[:, None]
    """),
    "a denial of it": ("not shift invariant, as it says", conformance._shift_invariance, """
        shift_invariant = False
    """),
    "a logarithm of nothing": ("finite for every pair of int32 positions", conformance._finite, """
        def __init__(self, sizes, rngs):
            self.s = nnx.Param(jnp.ones(1))
        def query(self, q, pos):
            return q * (self.s[...] + 0 * jnp.sqrt(pos[:, :, None, None] * 1.0))
    """),
    "an exponential": ("finite at 64 times the training length", conformance._finite, """
        scores = Scores.BIAS
        def logits(self, a, q, k):
            return a + jnp.exp(0.01 * k.pos)[:, None, None]
    """),
    "a repeated row": ("NaN past its positions, never a repeated row", conformance._finite, """
        max_position = 300
        def embed(self, x, pos):
            return x + jnp.where(pos >= 0, jnp.clip(pos, 0, 299) / 300, 0)[..., None]
    """),
    "a number of queries": ("blockwise equals dense, values and gradients", conformance._blockwise_and_seeds, """
        scores = Scores.CONTENT
        def logits(self, a, q, k):
            return a * (1 + 0.01 * a.shape[2])
    """),
    "the first seed of all": ("vmapped seeds equal a loop", conformance._blockwise_and_seeds, """
        scores = Scores.BIAS
        def __init__(self, sizes, rngs):
            self.raw = nnx.Param(jnp.ones(1))
        def logits(self, a, q, k):
            @jax.custom_batching.custom_vmap
            def first(x):
                return x

            @first.def_vmap
            def _(size, batched, x):
                return jnp.broadcast_to(x[:1], x.shape), True

            return a - first(jax.lax.stop_gradient(self.raw[...])) * distance(q, k)[:, None]
    """),
    "positions in the vectors' dtype": ("bfloat16 costs precision alone", conformance._low_precision, """
        def query(self, q, pos):
            return q * jnp.cos(pos.astype(q.dtype))[:, :, None, None]
    """),
    "slots instead of positions of queries": (
        "padding changes no value and no gradient", conformance._padding, BY_QUERY_SLOT,
    ),
    "values of no weight": ("an empty slot's output is 0", conformance._padding, """
        def values(self, w, q, k):
            return jnp.ones((w.shape[0], w.shape[2], 2, 8)) + 0 * w.sum()
    """),
    "inputs of empty slots": ("what empty slots hold reaches nothing", conformance._empty_slots, STATE_OF_ALL),
    "gradients into empty slots": ("no gradient reaches an empty slot", conformance._empty_slots, STATE_OF_ALL),
    "slots instead of positions of keys": (
        "the order of keys is that of positions", conformance._key_order, BY_KEY_SLOT,
    ),
    "a parameter that does nothing": (
        "every parameter gets a gradient in 265 tokens", conformance._gradients, TABLE,
    ),
    "rows that do not learn": ("entries without a gradient are not read", conformance._gradients, """
        scores = Scores.BIAS
        def __init__(self, sizes, rngs):
            self.table = nnx.Param(jnp.arange(8.0).reshape(4, 2))
        def logits(self, a, q, k):
            rows = self.table[...]
            rows = jnp.concatenate([rows[:2], jax.lax.stop_gradient(rows[2:])])
            return a + jnp.moveaxis(rows[distance(q, k) % 4], 3, 1)
    """),
    "slots where a cache is": ("a token at a time gives the whole", conformance._decoding, BY_KEY_SLOT),
    "a look at later tokens": ("no token depends on a later one", conformance._causality, STATE_OF_ALL),
    "what was built before": ("per layer equals shared on copied parameters", conformance._sharing, """
        scores = Scores.BIAS
        built = 0
        def __init__(self, sizes, rngs):
            Mine.built += 1
            self.times = Mine.built
            self.raw = nnx.Param(jnp.ones(1))
        def logits(self, a, q, k):
            return a - 0.1 * self.times * self.raw[...] * distance(q, k)[:, None]
    """),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_found(tmp_path, fault):
    name, check, body = WRONG[fault]
    found = {each.name: each for each in check(conformance.Subject(written(tmp_path, body)))}
    assert name in found and not found[name].ok, found


def test_every_check_can_fail():
    assert {check for _, check, _ in WRONG.values()} == set(conformance.CHECKS)


def test_a_hook_that_raises_is_a_finding_and_the_rest_goes_on(tmp_path):
    subject = conformance.Subject(written(tmp_path, "def query(self, q, pos):\n    raise RuntimeError('mine')\n"))
    one, two = conformance.results(subject, (conformance._jit_equals_eager, conformance._scores))
    assert (one.found, one.note) == (math.inf, "RuntimeError: mine") and two.ok


def test_what_is_not_finite_is_named(tmp_path):
    """A power of the distance that is not defined at 0: the values, and the gradient of its parameter."""
    body = """
        scores = Scores.BIAS
        def __init__(self, sizes, rngs):
            self.power = nnx.Param(jnp.ones(()))
        def logits(self, a, q, k):
            return a - jnp.asarray(distance(q, k), jnp.float32)[:, None] ** -jnp.abs(self.power[...])
    """
    found = next(conformance._finite(conformance.Subject(written(tmp_path, body))))
    assert not found.ok and found.note.startswith("not: values, gradient of power")


def test_the_command_says_how_many_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conformance, "CHECKS", (conformance._scores, conformance._key_order))
    name = written(tmp_path, "def logits(self, a, q, k):\n    return a + 0.1 * jnp.arange(a.shape[-1])\n")
    assert cli.main(["encodings", "--check", name]) == 1
    assert capsys.readouterr().out.endswith(f"{name}: 2 failed\n")
    assert cli.main(["encodings", "--check", "ropes"]) == 2
