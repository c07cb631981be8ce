"""Fused kernels against `dense` where there is none: jax's own products in cuDNN's place, Pallas' interpreter on a CPU,
and the program that is lowered for a GPU. The kernels themselves: gpu_test.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn_calls

from pe_ablation import config, encodings, estimate, evaluate, fused, launch, train, trained
from pe_ablation.attention import PLAIN, Distances, Dropout, LogitScale, Mask, attend, chosen
from pe_ablation.encodings import Tokens
from pe_ablation.model import GPT, GPTConfig
from pe_ablation.record import Run

pytestmark = pytest.mark.usefixtures("quick_compilation")

H, D, M = 3, 8, 24


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def build(name, **options):
    """An encoding with parameters that are all drawn, large enough to be seen."""
    given = {"num_heads": H, "head_dim": D, "model_dim": M, "train_length": 256}
    graph, parameters = nnx.split(encodings.make(name, **given, rngs=nnx.Rngs(0), **options))
    return graph, jax.tree.map(lambda p: p + 0.5 * draw(p.size, *p.shape), parameters)


@pytest.fixture
def here(monkeypatch):
    """Makes a kernel one that this CPU has, in float32 and for whatever device."""

    def make(name):
        monkeypatch.setattr(fused, "kernel", lambda: name)
        monkeypatch.setattr(fused, "CUDNN", "xla")
        monkeypatch.setattr(fused, "INTERPRET", True)
        monkeypatch.setitem(fused.DTYPES, "cudnn", ("float32",))
        return name

    return make


def both(name, options, length, mask, implementation, views=()):
    """(loss, gradients of parameters, q, k, v) of an implementation and of dense."""
    graph, parameters = build(name, **options)
    weight, pos = draw(7, 2, length, H, D), jnp.arange(length)

    def loss(parameters, q, k, v, implementation):
        sides = Tokens(q, pos), Tokens(k, pos)
        run = functools.partial(attend, nnx.merge(graph, parameters), *sides, v, mask=mask, views=views)
        out = run(implementation=implementation)
        return jnp.sum(weight * out), out

    parts = [draw(seed, 2, length, H, D) for seed in range(3)]
    run = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    given = functools.partial(jax.jit(run, static_argnums=4), parameters, *parts)
    return given(implementation), given("dense")


def close(found, wanted):
    (_, out), gradients = found
    (_, dense), expected = wanted
    np.testing.assert_allclose(out, dense, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.abs(theirs).max()))
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=1e-5)


SERVED = [
    ("none", {}, None),
    ("none", {}, 1),
    ("none", {}, 5),
    ("none", {}, 99),
    ("rope", {}, None),
    ("rope", {"interleaved": True, "fraction": 0.5}, 5),
    ("transformer_xl", {}, 5),
    ("alibi", {}, None),
    ("alibi", {}, 5),
    ("alibi", {"heads": 2}, None),
    ("alibi", {"learned": True}, None),
    ("t5", {"num_buckets": 8, "max_distance": 12}, None),
    ("kerple_log", {}, None),
    ("fire", {}, None),
    ("sandwich", {}, None),
    ("sum", {}, 5),
    ("sum", {"second": "t5"}, None),
]


@pytest.mark.parametrize("name, options, window", SERVED)
def test_cudnn_equals_dense_in_values_and_gradients(name, options, window, here):
    close(*both(name, options, 24, Mask(window=window, ordered=True), here("cudnn")))


@pytest.mark.parametrize("name, options, window", [("rope", {}, None), ("alibi", {}, 130), ("sum", {}, None)])
def test_splash_equals_dense_in_values_and_gradients(name, options, window, here):
    close(*both(name, options, 256, Mask(window=window, ordered=True), here("splash")))


@pytest.mark.parametrize("name", ["rope", "alibi", "t5"])
def test_positions_as_a_view_shows_them(name, here):
    """ALiBi is a tile then: how far apart they may be is not known."""
    view = PLAIN._replace(query=lambda pos: 3 * pos, key=lambda pos: 3 * pos)
    close(*both(name, {}, 24, Mask(ordered=True), here("cudnn"), views=(view,)))


@pytest.mark.parametrize("name, options", encodings.instances())
def test_every_encoding_is_served_or_refused_by_name(name, options, here):
    run = functools.partial(both, name, options, 16, Mask(ordered=True), here("cudnn"))
    graph, parameters = build(name, **options)
    if nnx.merge(graph, parameters).scores.name in ("NONE", "BIAS") and name != "xpos":
        close(*run())
    else:
        with pytest.raises(ValueError, match=r"^implementation: 'cudnn' (serves encodings|takes positions)"):
            run()


# Features


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
@pytest.mark.parametrize("heads", [8, 12])
def test_features_are_exact_to_the_last_position(dtype, heads):
    """Products of what the kernel is given, added in float64; 12 heads have slopes that no 8 bits hold."""
    encoding = encodings.make(
        "alibi", num_heads=heads, head_dim=64, model_dim=heads * 64, train_length=8, rngs=nnx.Rngs(0)
    )
    length = fused.FEATURES_LIMIT
    of_query, of_key = fused._features(fused.Call(encoding, dtype, heads, 64, length), 0.125)
    assert of_query.dtype == of_key.dtype == dtype
    slope = np.asarray(of_query[0, 0], np.float64) @ np.asarray(of_key[0, -1, 0], np.float64) * 0.125
    wanted = encoding.decline() * (length - 1)
    np.testing.assert_allclose(slope, wanted, rtol=1e-4 if dtype == jnp.float16 else 2e-7)
    places = np.asarray(of_key[0, :, 0, :2], np.float64).sum(-1)
    np.testing.assert_array_equal(places, np.arange(length))


def test_past_the_last_exact_position_a_bias_is_a_tile():
    encoding = nnx.merge(*build("alibi"))
    call = fused.Call(encoding, jnp.bfloat16, H, D, fused.FEATURES_LIMIT)
    assert call.tile == 0 and call._replace(length=call.length + 1).tile > 0
    assert call._replace(moved=True).tile == H * call.length**2


def test_a_decline_is_what_the_logits_do():
    declining = []
    tokens = Tokens(draw(1, 1, 9, H, D), jnp.arange(9)[None])
    far = np.tril(np.subtract.outer(np.arange(9), np.arange(9)))
    for name, options in encodings.instances():
        encoding = nnx.merge(*build(name, **options))
        if (decline := encoding.decline()) is not None:
            declining.append((name, options))
            out = np.tril(encoding.logits(jnp.zeros((1, H, 9, 9)), tokens, tokens))
            np.testing.assert_allclose(out[0], -decline[:, None, None] * far, rtol=1e-6)
    assert declining == [("alibi", {}), ("sum", {}), ("sum", {"first": "alibi", "second": "transformer_xl"})]


# What is refused


def call(name="none", **changes):
    dtype = changes.pop("dtype", jnp.bfloat16)
    given = {"heads": H, "head_dim": D, "length": 256, **changes}
    return fused.Call(nnx.merge(*build(name)), dtype, **given)


LACKS = [
    ("cudnn", call(dtype=jnp.float32), "takes the dtypes bfloat16, float16, given float32"),
    ("splash", call(dtype=jnp.float16), "takes the dtypes bfloat16, float32, given float16"),
    ("cudnn", call(head_dim=12), "takes a head dim that is a multiple of 8 up to 128, given 12"),
    ("cudnn", call(head_dim=256), "takes a head dim that is a multiple of 8 up to 128, given 256"),
    ("cudnn", call("alibi", head_dim=128), "takes vectors of up to 128 numbers, which ALiBi makes 136"),
    ("splash", call(length=200), "takes lengths that are multiples of 128, given 200"),
    ("cudnn", call("shaw"), "serves encodings whose scores are NONE or BIAS, given Shaw: CONTENT"),
    ("splash", call("cope"), "serves encodings whose scores are NONE or BIAS, given CoPE: ROW"),
    ("cudnn", call("xpos"), "takes positions once for all tiles, which XPos is shown anew in each"),
    ("splash", call("t5"), "takes no additive bias, which T5 has"),
    ("splash", call("alibi", moved=True), "takes no additive bias, which ALiBi has"),
    ("cudnn", call("t5", window=9), "takes no window together with the additive bias of T5, given a window of 9"),
    ("cudnn", call("t5", length=255), "takes even lengths with the additive bias of T5, given 255"),
    ("cudnn", call("t5", moved=True, rows=2), "takes one additive bias for all rows, given 2 rows of positions"),
    ("cudnn", call("t5", vmapped=True), "takes no additive bias where several runs train in one program, up to jax"),
    ("cudnn", call("t5", length=2**14), "takes an additive bias of up to 268,435,456 numbers, given 805,306,368"),
]


@pytest.mark.parametrize("name, asked, reason", LACKS, ids=[reason for *_, reason in LACKS])
def test_what_a_kernel_lacks_is_refused_by_name_and_left_by_auto(name, asked, reason):
    with pytest.raises(ValueError) as refusal:
        chosen("cudnn" if name == "cudnn" else "splash", 1, H, 256, 256, name, asked)
    assert str(refusal.value).startswith(f"implementation: '{name}' {reason}")
    assert str(refusal.value).endswith("; allowed here: auto, dense, blockwise")
    assert chosen("auto", 1, H, 256, 256, name, asked) == "dense"
    assert chosen("auto", 1, H, 2048, 2048, name, asked) == "blockwise"


def test_auto_takes_the_kernel_where_it_serves():
    assert chosen("auto", 1, H, 256, 256, "cudnn", call("t5")) == "cudnn"
    assert chosen("auto", 1, H, 256, 256, "cudnn", call("alibi", vmapped=True, window=9)) == "cudnn"
    assert chosen("auto", 1, H, 256, 256, "splash", call("alibi")) == "splash"
    assert chosen("auto", 1, H, 256, 256) == "dense" and chosen("dense", 1, H, 8, 8, "cudnn", call()) == "dense"


UNSERVED = [
    ({"mask": Mask()}, 8, "serves tokens that attend to themselves, causally and in order"),
    ({"mask": Mask(ordered=True)}, 9, "serves tokens that attend to themselves, causally and in order"),
    ({"mask": Mask(ordered=True, causal=False)}, 8, "serves tokens that attend to themselves, causally and in order"),
    ({"mask": Mask(ordered=True, segments=True)}, 8, "knows no segments"),
    ({"mask": Mask(ordered=True, recent=2)}, 8, "knows no sinks"),
    ({"mask": Mask(ordered=True, window=jnp.int32(2))}, 8, "takes a window that is known before it is compiled"),
    ({"mask": Mask(ordered=True), "views": Distances(3).views()}, 8, "takes one view of positions, given 2"),
    ({"mask": Mask(ordered=True), "scale": LogitScale(1.0)}, 8, "scales no logits by the number of keys"),
    ({"mask": Mask(ordered=True), "dropout": Dropout(0.25, jax.random.key(0))}, 8, "given dropout_attention 0.25"),
]


@pytest.mark.parametrize("given, keys, reason", UNSERVED, ids=[reason for *_, reason in UNSERVED])
def test_what_no_kernel_does_is_refused_by_name_and_left_by_auto(given, keys, reason, here, monkeypatch):
    encoding, name = nnx.merge(*build("none")), here("cudnn")
    q, k, v = (draw(seed, 1, length, H, D) for seed, length in enumerate((8, keys, keys)))
    segment = jnp.zeros((1, 8), jnp.int32)
    sides = Tokens(q, jnp.arange(8), segment=segment), Tokens(k, jnp.arange(keys), segment=segment)
    with pytest.raises(ValueError, match=f"^implementation: 'cudnn' .*{reason}"):
        attend(encoding, *sides, v, **given, implementation=name)
    monkeypatch.setattr(fused, "attend", None)
    out = attend(encoding, *sides, v, **given)
    np.testing.assert_array_equal(out, attend(encoding, *sides, v, **given, implementation="dense"))


def test_a_cpu_has_no_kernel_and_says_so():
    fused.kernel.cache_clear()
    assert fused.kernel() is None
    tokens, encoding = Tokens(jnp.zeros((1, 8, H, D)), jnp.arange(8)), nnx.merge(*build("none"))
    for name, needs in [("cudnn", "an NVIDIA GPU of compute capability 8.0"), ("splash", "a TPU")]:
        with pytest.raises(
            ValueError, match=f"implementation: '{name}' needs {needs}, jax runs on 'cpu' here; allowed"
        ):
            attend(encoding, tokens, tokens, tokens.vec, mask=Mask(ordered=True), implementation=name)


@pytest.mark.parametrize(
    "backend, capability, found",
    [
        ("gpu", "8.0", "cudnn"),
        ("gpu", "12.0", "cudnn"),
        ("gpu", "7.5", None),
        ("gpu", "gfx942", None),
        ("tpu", "", "splash"),
        ("cpu", "", None),
    ],
)
def test_the_kernel_of_a_backend(backend, capability, found, monkeypatch):
    device = type("Device", (), {"compute_capability": capability})
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert fused.kernel.__wrapped__() == found


# Models, runs and launches

SMALL = {"vocab_size": 11, "num_layers": 2, "num_heads": H, "model_dim": M, "train_length": 16}


@pytest.mark.parametrize("pattern", [None, (("rope", 4), ("alibi", None))])
def test_a_model_equals_itself_under_dense(pattern, here):
    here("cudnn")
    given = {**SMALL, "encoding": "rope", "pattern": pattern}
    tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]])
    out = {}
    for implementation in ("auto", "cudnn", "dense"):
        model = GPT(GPTConfig(**given, implementation=implementation), rngs=nnx.Rngs(0))
        out[implementation] = np.asarray(model(tokens))
    np.testing.assert_allclose(out["cudnn"], out["dense"], atol=1e-5)
    np.testing.assert_array_equal(out["cudnn"], out["auto"])
    assert np.abs(out["cudnn"] - out["dense"]).max() > 0, "another path"


def test_a_run_is_trained_and_scored_as_under_dense(tmp_path, here):
    """Two seeds in one program, scored past the training length; the window of a null is left to dense."""
    here("cudnn")
    lengths = {"train.steps": 3, "train.warmup_steps": 1, "eval.lengths": (8, 16), "eval.last_k": 4}
    shape = {"encoding.name": "alibi", "encoding.options": {}, "model.model_dim": 16, "model.dropout_attention": 0.0}
    nats = {}
    for implementation in ("cudnn", "dense"):
        given = {**lengths, **shape, "model.implementation": implementation, "eval.split": "validation"}
        given |= {"data.text.validation": str(tmp_path / "train.txt")}
        asked = [tiny_runs.experiment(tmp_path, given, seed=seed) for seed in (0, 1)]
        runs = [Run.plan(tmp_path / implementation / str(each.seed), each, None) for each in asked]
        summaries = train.fit_pack(asked, [run.path for run in runs])
        assert [each["attention"] for each in summaries] == [implementation] * 2
        evaluate.evaluate_run(runs[0].path)
        cells = {(cell["length"], cell["null"]): cell["nats"] for cell in runs[0].cells()}
        assert cells.keys() == {(8, "none"), (16, "none"), (16, "window_mask")}
        nats[implementation] = [*(each["last"]["nats"] for each in summaries), *cells.values()]
    np.testing.assert_allclose(nats["cudnn"], nats["dense"], rtol=1e-5)
    assert trained.load(runs[0]).config.implementation == "dense"
    assert trained.load(Run(tmp_path / "cudnn" / "0")).config.implementation == "auto"


REFUSED = [
    ({"model.dtype": "float32"}, "takes the dtypes bfloat16, float16, given float32"),
    ({"model.model_dim": 48}, "takes a head dim that is a multiple of 8 up to 128, given 12"),
    ({"encoding.name": "shaw"}, "serves encodings whose scores are NONE or BIAS, given Shaw: CONTENT"),
    ({"model.dropout_attention": 0.1}, "drops no weights, given dropout_attention 0.1"),
    ({"model.logit_scale": "log_n"}, "scales no logits by the number of keys, given a logit scale"),
    ({"positions.name": "documents"}, "knows no segments"),
    ({"model.pattern": (("rope", None), ("t5", 8))}, "takes no window together with the additive bias of T5"),
]
ASKED = {"model": {"dtype": "bfloat16", "implementation": "cudnn"}, "encoding": {"name": "rope"}}


@pytest.mark.parametrize("changes, reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_config_is_refused_by_its_path(changes, reason):
    assert config.read(ASKED).model.implementation == "cudnn"
    with pytest.raises(config.ConfigError) as refusal:
        config.read(ASKED, changes)
    assert str(refusal.value).startswith(f"model.implementation: 'cudnn' {reason}"), refusal.value


def test_several_runs_in_one_program_take_no_bias_by_name():
    point = config.read(ASKED, {"encoding.name": "t5"})
    launch._together([point])
    with pytest.raises(
        config.ConfigError, match=r"^model\.implementation: 'cudnn' takes no additive bias where several"
    ):
        launch._together([point, point])
    launch._together([config.read(ASKED)] * 2)
    gpt = config.read(ASKED, {"encoding.name": "t5", "model.implementation": "auto"}).gpt(258)
    assert list(gpt.attention(1, 64, "cudnn").values()) == ["cudnn"]
    assert list(gpt.together(2).attention(1, 64, "cudnn").values()) == ["dense"]
    assert list(gpt.attention(1, 64, "cudnn", segments=True).values()) == ["dense"]


def test_a_launch_and_a_fit_refuse_another_backend(monkeypatch):
    monkeypatch.setattr(estimate, "_platform", lambda: ("cpu", 1))
    with pytest.raises(config.ConfigError, match=r"^model\.implementation: 'cudnn' runs on gpu, a launch here on cpu"):
        estimate.refuse_platform("cudnn")
    estimate.refuse_platform("auto")
    fused.kernel.cache_clear()
    with pytest.raises(ValueError, match="implementation: 'cudnn' needs an NVIDIA GPU"):
        train.programs(config.read(ASKED), type("Tokenizer", (), {"vocab_size": 258}), 1)


def test_memory_counts_a_bias_and_no_scores(monkeypatch):
    monkeypatch.setattr(estimate, "_platform", lambda: ("gpu", 1))
    scores = lambda **given: estimate._scores(GPTConfig(**SMALL, dtype="bfloat16", **given), 4, 64, 2)  # noqa: E731
    assert scores(encoding="rope") == scores(encoding="alibi") == 0
    assert scores(encoding="t5") == H * 64 * 64 * 8
    assert scores(encoding="shaw") == 8 * 4 * H * 64 * 64 * 2


# The program for a GPU


@pytest.fixture
def lowered(monkeypatch):
    """Text of a program for a GPU that isn't there: what asks the device what it can is told."""
    monkeypatch.setattr(fused, "kernel", lambda: "cudnn")
    monkeypatch.setattr(cudnn_calls, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(cudnn_calls, "check_compute_capability", lambda capability: capability == "8.0")
    monkeypatch.setattr(cudnn_calls, "is_cuda_compute_capability_equal", lambda capability: False)

    def text(name, runs=1, window=None):
        graph, parameters = build(name)
        mask = Mask(ordered=True, window=window)

        def loss(parameters, x):
            tokens = Tokens(x, jnp.arange(16))
            out = attend(
                nnx.merge(graph, parameters), tokens, tokens, x, mask=mask, implementation="cudnn", vmapped=runs > 1
            )
            return jnp.sum(jnp.square(out.astype(jnp.float32)))

        gradient = jax.grad(loss, argnums=(0, 1))
        x = jnp.ones((2, 16, H, D), jnp.bfloat16)
        if runs > 1:
            gradient = jax.vmap(gradient)
            parameters, x = jax.tree.map(lambda each: jnp.stack([each] * runs), (parameters, x))
        return jax.jit(gradient).trace(parameters, x).lower(lowering_platforms=("cuda",)).as_text()

    return text


@pytest.mark.parametrize(
    "name, runs, window, kernels",
    [("rope", 1, 5, "Softmax"), ("rope", 2, None, "Softmax"), ("alibi", 2, 5, "Softmax"), ("t5", 1, None, "ScaleBias")],
)
def test_the_program_for_a_gpu_calls_cudnn_forwards_and_backwards(name, runs, window, kernels, lowered):
    text = lowered(name, runs, window)
    assert f"__cudnn$fmha{kernels}" in text and "Backward" in text
    assert ("ScaleBias" in text) == (kernels == "ScaleBias")
    assert ("dot_general" in text) == (name == "t5"), "that of its table's gradient"
    assert ("sliding_window_length\\22: 5" in text) == (window is not None)


def test_several_runs_with_a_bias_fail_in_this_jax_if_not_refused(lowered, monkeypatch):
    """Once this passes with a newer jax, `VMAPPED_BIAS` can say so."""
    if jax.__version_info__ > fused.VMAPPED_BIAS:
        pytest.skip("a jax in which it may work")
    with pytest.raises(ValueError, match="takes no additive bias where several runs"):
        lowered("t5", 2)
    monkeypatch.setattr(fused, "VMAPPED_BIAS", (0, 0, 0))
    with pytest.raises(TypeError, match="reshape"):
        lowered("t5", 2)


def test_a_library_on_a_cpu_imports_no_kernel():
    import subprocess
    import sys

    code = "import sys, pe_ablation.train; print([each for each in sys.modules if 'splash' in each])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
