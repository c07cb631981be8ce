"""GPT-2 as Hugging Face keeps it: a folder becomes a run directory, and a run directory such a folder.

Their decoder and ours compute the same function and keep the same arrays (a Conv1D kernel is [inputs, outputs] too):
names differ, and that ours are stacked over layers. What would be another function is refused, never approximated.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pe_ablation import atomic, checkpoint, config, data, trained
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.config import EvalConfig, Experiment
from pe_ablation.data.tokenizers import GPT2_IDS, ByteTokenizer
from pe_ablation.encodings.base import INIT_STDDEV
from pe_ablation.gradients import EPSILON
from pe_ablation.model import abstract
from pe_ablation.record import Run

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PREFIX = "transformer."
STACK = "blocks/0/"
WHOLE = {
    "embedding": "wte.weight",
    "encodings/0/table": "wpe.weight",
    "norm/scale": "ln_f.weight",
    "norm/bias": "ln_f.bias",
}
PARTS = {  # of a block: ours below STACK, theirs below h.LAYER
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
HEAD = "lm_head.weight"
_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # the causal mask, which old versions stored
DTYPES = ("F32", "F16", "BF16")

# Fields of config.json that decide the function: the value of one that is left out, and those that we compute.
FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "model_type": (None, ("gpt2",)),
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "layer_norm_epsilon": (EPSILON, (EPSILON,)),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "add_cross_attention": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}
SIZES = {"vocab_size": GPT2_IDS, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}
SHAPE = {"n_layer": "num_layers", "n_head": "num_heads", "n_embd": "model_dim", "n_inner": "mlp_dim"}
DROPOUTS = {"embd_pdrop": "dropout_embed", "attn_pdrop": "dropout_attention", "resid_pdrop": "dropout_residual"}
TOKENIZERS = {GPT2_IDS: "gpt2", ByteTokenizer.vocab_size: "byte"}
OPEN = ("data", "eval", "wandb", "label", "model.dtype", "model.implementation")  # what a folder does not decide


class FolderError(ValueError):
    """A folder that is not GPT-2 as we have it, or a run that is none; the message names path and field."""


def import_folder(folder: str | Path, out: str | Path, overrides: Mapping[str, Any] | None = None) -> Run:
    """Read config.json and model.safetensors (or its shards) of `folder` into the run directory `out`, and return it.

    The run is done, with its checkpoint at step 0; half precision becomes float32. `overrides` (dotted path -> value)
    are fields of the config that the folder leaves open (`OPEN`); data.tokenizer follows from the size of the
    vocabulary unless it is set. Raises FolderError for another function than ours, a vocabulary without a tokenizer,
    tensors that are missing, surplus or of another shape, and weights in another format; ConfigError for what a config
    can't be; RecordError if `out` holds another run. What is there already, whole, is left alone.
    """
    folder = Path(folder)
    fields = _fields(folder)
    experiment = _experiment(folder, fields, overrides or {})
    params = _read(folder, _abstract(experiment, fields["vocab_size"]))
    run = Run.plan(out, dataclasses.replace(experiment, imported=_digest(params)), str(folder))
    if run.status()[0] != "done" or checkpoint.last_step(run.path / "checkpoints") is None:
        _store(run, params)
    return run


def export(run_dir: str | Path, folder: str | Path) -> list[Path]:
    """Write a run as config.json and model.safetensors that transformers' GPT2LMHeadModel loads; returns their paths.

    Weights keep their bits. Raises FolderError, before anything is written, for a run that is no GPT-2 (by field), one
    that isn't trained to its end or diverged, and for a folder that isn't empty.
    """
    run, folder = Run(run_dir), Path(folder)
    experiment = run.experiment
    _refuse_other_functions(run, experiment)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderError(f"{folder}: is not an empty folder; name one that is empty or not there")
    loaded = trained.load(run)
    if not loaded.alive:
        raise FolderError(f"{run.path}: diverged; there is no model to export")
    leaves = _leaves(loaded.params)
    tensors = {f"{PREFIX}{name}": array for path, leaf in leaves.items() for name, array in _named(path, leaf)}
    described = _described(experiment, loaded.tokenizer, len(leaves["encodings/0/table"]))
    scratch = folder / f".{WEIGHTS}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, scratch, metadata={"format": "pt"})  # without it some versions refuse the file
        os.replace(scratch, folder / WEIGHTS)
        atomic.write(folder / CONFIG, [(json.dumps(described, indent=2) + "\n").encode()])
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise FolderError(f"{folder}: cannot write a model here ({error})") from error
    return [folder / CONFIG, folder / WEIGHTS]


def _fields(folder: Path) -> dict[str, Any]:
    """config.json with the defaults of what it leaves out; FolderError where it is none of ours."""
    path = folder / CONFIG
    try:
        given = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FolderError(f"{path}: cannot be read ({error}); expected a folder of a Hugging Face GPT-2") from error
    if not isinstance(given, dict):
        raise FolderError(f"{path}: expected an object of fields, got {given!r}")
    for name, (default, allowed) in FIXED.items():
        if (value := given.get(name, default)) not in allowed:
            raise FolderError(f"{path}: {name}: {value!r}; allowed: {', '.join(map(repr, allowed))}")
    positions = given.get("n_ctx", SIZES["n_positions"])  # files of 2019 have both, later ones n_positions
    fields = {**SIZES, **dict.fromkeys(DROPOUTS, 0.1), "n_positions": positions, **given}
    for name in SIZES:
        value = fields[name]
        if not (type(value) is int and value >= 1) and (name, value) != ("n_inner", None):
            raise FolderError(f"{path}: {name}: {value!r}; allowed: a whole number, at least 1")
    for name in DROPOUTS:
        if not (isinstance(value := fields[name], int | float) and 0 <= value < 1):
            raise FolderError(f"{path}: {name}: {value!r}; allowed: a number in [0, 1)")
    if fields.get("n_ctx", fields["n_positions"]) != fields["n_positions"]:
        raise FolderError(f"{path}: n_ctx: {fields['n_ctx']!r}; allowed: n_positions = {fields['n_positions']}")
    return fields


def _experiment(folder: Path, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> Experiment:
    """What the folder describes, with `overrides` laid over it, and a tokenizer of its vocabulary."""
    for path in overrides:
        if not any(f"{path}.".startswith(f"{each}.") for each in OPEN):
            raise FolderError(f"{path}: is decided by {folder / CONFIG}; allowed: {', '.join(OPEN)}")
    size, length = fields["vocab_size"], fields["n_positions"]
    tokenizer = TOKENIZERS.get(size)
    if tokenizer is None and "data.tokenizer" not in overrides:
        allowed = ", ".join(f"{ids} (data.tokenizer {name!r})" for ids, name in TOKENIZERS.items())
        raise FolderError(
            f"{folder / CONFIG}: vocab_size: {size}; allowed: {allowed}, or that of a data.tokenizer that you set"
        )
    tree = {
        "encoding": {"name": "learned"},
        "model": {ours: fields[theirs] for theirs, ours in (SHAPE | DROPOUTS).items()},
        "data": {"bos": "none", "block": length} | ({} if tokenizer is None else {"tokenizer": tokenizer}),
        "train": {"length": length, "batch_tokens": length},
        "eval": {
            "lengths": (length,),
            "last_k": min(EvalConfig.last_k, length),
            "stride": min(EvalConfig.stride, length),
        },
        "label": folder.absolute().name,
    }
    experiment = config.read(tree, overrides)
    chosen = data.tokenizer(experiment.data)
    if chosen.vocab_size != size:
        raise FolderError(
            f"data.tokenizer: {chosen.name!r} with data.bos = {experiment.data.bos!r} has {chosen.vocab_size} ids; "
            f"allowed: one of the {size} ids that {folder / CONFIG} has as vocab_size"
        )
    return experiment


def _abstract(experiment: Experiment, vocab_size: int) -> Any:
    """The model's parameters without values."""
    gpt = experiment.gpt(vocab_size)
    return nnx.state(abstract(gpt), nnx.Param)


def _leaves(params: Any) -> dict[str, Any]:
    """Parameters by path in tree order, without nnx's closing /value."""
    return {path.removesuffix("/value"): leaf for path, leaf in checkpoint.named(params).items()}


def _names(path: str, leaf: Any) -> list[str]:
    """What they call the parameter that we have at `path`: one name, or one a layer."""
    if path in WHOLE:
        return [WHOLE[path]]
    part, kind = path.removeprefix(STACK).split("/")
    own = f"{PARTS[part]}.{'bias' if kind == 'bias' else 'weight'}"
    return [f"h.{layer}.{own}" for layer in range(leaf.shape[0])]


def _named(path: str, leaf: Any) -> list[tuple[str, np.ndarray]]:
    """A parameter as theirs: (name, array) for all of it, or for each layer."""
    whole = np.asarray(leaf)
    return list(zip(_names(path, leaf), whole[None] if path in WHOLE else whole, strict=True))


def _read(folder: Path, abstract: Any) -> Any:
    """The parameters in `folder`, float32, shaped as `abstract`."""
    leaves = _leaves(abstract)
    shapes = {
        name: leaf.shape if path in WHOLE else leaf.shape[1:]
        for path, leaf in leaves.items()
        for name in _names(path, leaf)
    }
    with _opened(folder) as tensors:
        if HEAD in tensors:
            shapes[HEAD] = shapes[WHOLE["embedding"]]
        _refuse_other_tensors(folder, tensors, shapes)
        values = []
        for path, leaf in leaves.items():
            parts = [tensors[name].value() for name in _names(path, leaf)]
            values.append(parts[0] if path in WHOLE else np.stack(parts))
        params = jax.tree.unflatten(jax.tree.structure(abstract), values)
        if bad := [path for path, leaf in _leaves(params).items() if not np.isfinite(leaf).all()]:
            raise FolderError(f"{folder}: weights that are not finite: {', '.join(bad)}")
        if HEAD in tensors and not np.array_equal(tensors[HEAD].value(), _leaves(params)["embedding"]):
            raise FolderError(f"{folder}: {HEAD} differs from wte.weight; allowed: the same weights, or none")
    return params


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of an opened file: its header now, its values when they are asked for."""

    file: Any
    name: str

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) as the file has them."""
        header = self.file.get_slice(self.name)
        return header.get_dtype(), tuple(header.get_shape())

    def value(self) -> np.ndarray:
        """float32; bfloat16, too, is a type that numpy knows once jax is imported."""
        return self.file.get_tensor(self.name).astype(np.float32)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[dict[str, _Tensor]]:
    """The tensors of a folder by name, without prefix; buffers that are no weights are left out."""
    found: dict[str, _Tensor] = {}
    with contextlib.ExitStack() as opened:
        for path in _files(folder):
            try:
                file = opened.enter_context(safe_open(path, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise FolderError(f"{path}: cannot be read as safetensors ({error})") from error
            for name in file.keys():  # noqa: SIM118 (not a dict)
                own = name.removeprefix(PREFIX)
                if own in found:
                    raise FolderError(f"{path}: {name}: there twice, with and without {PREFIX!r} or in two files")
                if not _BUFFER.fullmatch(own):
                    found[own] = _Tensor(file, name)
        yield found


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or its shards."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise FolderError(f"{folder / INDEX}: cannot be read ({error!r}); expected weight_map") from error
        if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise FolderError(f"{folder / INDEX}: weight_map: {outside[0]!r}; allowed: names of files in {folder}")
        return [folder / name for name in names]
    other = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".h5", ".msgpack", ".ckpt", ".pt"))
    raise FolderError(
        f"{folder}: has no {WEIGHTS}" + (f", only {', '.join(other)}" if other else "") + f"; allowed: {WEIGHTS}, or "
        f"shards with {INDEX} (transformers writes them: model.save_pretrained(DIR))"
    )


def _refuse_other_tensors(folder: Path, tensors: Mapping[str, _Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    problems = [f"{name}: missing" for name in shapes if name not in tensors]
    problems += [f"{name}: surplus" for name in tensors if name not in shapes]
    for name in shapes.keys() & tensors.keys():
        dtype, shape = tensors[name].kind
        if shape != shapes[name]:
            problems.append(f"{name}: shape {list(shape)}; by {CONFIG} {list(shapes[name])}")
        if dtype not in DTYPES:
            problems.append(f"{name}: {dtype}; allowed: {', '.join(DTYPES)}")
    if problems:
        raise FolderError(f"{folder}: its tensors are not those of its {CONFIG}:\n  " + "\n  ".join(sorted(problems)))


def _digest(params: Any) -> str:
    """sha256 (hex) over paths, shapes and float32 values, whatever file they came from."""
    state = hashlib.sha256()
    for path, leaf in _leaves(params).items():
        state.update(f"{path} {leaf.shape}\n".encode())
        state.update(np.ascontiguousarray(leaf, "<f4").data)
    return state.hexdigest()


def _store(run: Run, params: Any) -> None:
    """Checkpoint and result, as training leaves them."""
    run.start()
    try:
        with Checkpoints(run.path / "checkpoints") as checkpoints:
            checkpoints.save(0, {"params": params, "alive": jnp.bool_(True), "step": jnp.int32(0)}, {"trained": False})
        parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
        run.finish({"status": "ok", "steps": 0, "tokens": 0, "parameters": parameters, "last": None})
    except BaseException:
        run.close("failed", traceback.format_exc())
        raise


def _refuse_other_functions(run: Run, experiment: Experiment) -> None:
    """FolderError, by field, for a run that GPT-2's code would compute otherwise."""
    model = experiment.model
    allowed = {
        "encoding.name": (experiment.encoding.name, "learned"),
        "model.pattern": (model.pattern, None),
        "model.embed_scale": (model.embed_scale, "1"),
        "model.logit_scale": (model.logit_scale, "none"),
    }
    for path, (given, wanted) in allowed.items():
        if given != wanted:
            raise FolderError(f"{run.path}: {path}: {given!r} is not GPT-2; allowed: {wanted!r}")


def _described(experiment: Experiment, tokenizer: data.Tokenizer, positions: int) -> dict[str, Any]:
    """config.json of a run: every field that decides the function, written out."""
    model = experiment.model
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{name: default or allowed[0] for name, (default, allowed) in FIXED.items()},
        "vocab_size": tokenizer.vocab_size,
        "n_positions": positions,
        **{theirs: getattr(model, ours) for theirs, ours in (SHAPE | DROPOUTS).items()},
        "initializer_range": INIT_STDDEV,
        "bos_token_id": tokenizer.eos if tokenizer.bos is None else tokenizer.bos,
        "eos_token_id": tokenizer.eos,
    }
