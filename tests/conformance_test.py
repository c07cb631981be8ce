"""The battery passes what is right and finds what is wrong, with the check that is about it."""

import math

import pytest

from pe_ablation import cli, conformance

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

HEAD = """
import jax.numpy as jnp
from flax import nnx
from pe_ablation.encodings import Encoding, Scores, distance


class Mine(Encoding):
"""


def written(tmp_path, body):
    """A user's file with one class, from its indented body."""
    path = tmp_path / "mine.py"
    path.write_text(HEAD + body)
    return f"{path}:Mine"


def results(name, *checks):
    subject = conformance.Subject(name)
    return {result.name: result for check in checks for result in check(subject)}


def test_one_of_the_registry_keeps_everything(capsys):
    assert cli.main(["encodings", "--check", "t5"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("t5: all kept\n") and out.count("ok  ") >= 14 and "FAILED" not in out


WRONG = {
    "a claim of shift invariance": (
        "    scores = Scores.BIAS\n    def logits(self, a, q, k):\n"
        "        return a - 0.01 * q.pos[:, None, :, None] * distance(q, k)[:, None]\n",
        conformance._shift_invariance, "shift invariant to 20,000, as it says",
    ),
    "a denial of it": (
        "    shift_invariant = False\n", conformance._shift_invariance, "not shift invariant, as it says",
    ),
    "scores that say nothing is done": (
        "    def logits(self, a, q, k):\n        return a - 0.1 * distance(q, k)[:, None]\n",
        conformance._scores, "logits do what scores says",
    ),
    "slots instead of positions": (
        "    scores = Scores.BIAS\n    def logits(self, a, q, k):\n        return a + 0.1 * jnp.arange(a.shape[-1])\n",
        conformance._key_order, "the order of slots doesn't matter",
    ),
    "slots where a cache is": (
        "    scores = Scores.BIAS\n    def logits(self, a, q, k):\n        return a + 0.1 * jnp.arange(a.shape[-1])\n",
        conformance._decoding, "a token at a time gives the whole",
    ),
    "a look at later tokens": (
        "    def state(self, x, pos, last):\n        s = jnp.broadcast_to(x.mean(axis=(1, 2))[:, None, None, None],"
        " (*x.shape[:2], 2, 1))\n        return s, s[:, -1]\n    scores = Scores.CONTENT\n"
        "    def logits(self, a, q, k):\n        return a * (1 + jnp.swapaxes(q.state, 1, 2))\n",
        conformance._causality, "no token depends on a later one",
    ),
    "a logarithm of nothing": (
        "    scores = Scores.BIAS\n    def logits(self, a, q, k):\n"
        "        return a - jnp.sqrt(distance(q, k)[:, None].astype(jnp.float32))\n"
        "    def __init__(self, sizes, rngs):\n        self.s = nnx.Param(jnp.ones(1))\n"
        "    def query(self, q, pos):\n        return q * (self.s[...] + 0 * jnp.sqrt(pos[:, :, None, None] * 1.0))\n",
        conformance._finite, "finite for every pair of int32 positions",
    ),
    "a parameter that does nothing": (
        "    def __init__(self, sizes, rngs):\n        self.idle = nnx.Param(jnp.ones(3))\n",
        conformance._gradients, "every parameter gets a gradient in 256 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_found(tmp_path, fault):
    body, check, name = WRONG[fault]
    found = results(written(tmp_path, body), check)
    assert name in found and not found[name].ok, found


def test_a_hook_that_raises_is_a_finding_and_the_rest_goes_on(tmp_path, monkeypatch):
    name = written(tmp_path, "    def query(self, q, pos):\n        raise RuntimeError('mine')\n")
    monkeypatch.setattr(conformance, "CHECKS", (conformance._jit_equals_eager, conformance._scores))
    one, two = conformance.battery(name)
    assert (one.found, one.note) == (math.inf, "RuntimeError: mine") and two.ok


def test_the_command_says_how_many_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conformance, "CHECKS", (conformance._scores, conformance._key_order))
    body = "    def logits(self, a, q, k):\n        return a + 0.1 * jnp.arange(a.shape[-1])\n"
    name = written(tmp_path, body)
    assert cli.main(["encodings", "--check", name]) == 1
    assert capsys.readouterr().out.endswith(f"{name}: 2 failed\n")
    assert cli.main(["encodings", "--check", "ropes"]) == 2
