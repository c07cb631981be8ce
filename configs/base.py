"""One decoder to start from: a size by name, then any field; short sweeps to combine.

    pe-ablation launch --config configs/base.py:quick
    pe-ablation launch --config configs/base.py:cpu --config.model=nano --config.model.num_layers=3 --sweep encodings
    pe-ablation launch --config configs/base.py:cpu --sweep encodings,seeds --sweep.seed=0,1 --list

The argument shrinks or grows the same config: the State of the Union addresses as bytes, AdamW, evaluation to 8x.

`quick`: nano, training length 64, 300 steps. Two points, one seed: 2 minutes of processor time, about one minute on two
free CPU cores. Expected, in bits per byte at 64 / 128 / 256 / 512:

    rope            2.55  2.68  4.08  4.38
    alibi           2.88  2.88  2.88  2.88

`cpu`: micro, training length 128, 2,000 steps. Not run yet: no numbers to expect. By estimate (`--dry_run`) 20 minutes
a point on 2 CPU cores.

`gpu`: gpt2_small in bfloat16, training length 1,024, 5,000 steps of 131,072 tokens. Not run: a test checks its shapes.
By estimate 8 GB, and 2.3 hours a point at an assumed 50 TFLOP/s. The corpus, 10 million bytes, is small for it: name a
larger one with `--config.data.source`.

`--config.model=NAME` works on every config file and sets layers, heads and dims: nano, micro (CPU sizes), gpt2_small,
gpt2_medium, gpt2_large, gpt2_xl. Dropout is 0 at every size (GPT-2's own was 0.1); see `--config.model.dropout_embed`.

Sweeps: the plain one is rope and alibi; `encodings` all seven; `rates` three learning rates; `seeds` three seeds;
`sizes` nano and micro. `--sweep A,B` is the product of two.
"""

import ml_collections

from pe_ablation import model
from pe_ablation.sweep import param

# Rates: one below, the config's own, one above.
SIZES = {
    "quick": {"model": "nano", "length": 64, "steps": 300, "batch_tokens": 2048, "rates": (2e-3, 6e-3, 2e-2)},
    "cpu": {"model": "micro", "length": 128, "steps": 2000, "batch_tokens": 4096, "rates": (1e-3, 3e-3, 1e-2)},
    "gpu": {"model": "gpt2_small", "length": 1024, "steps": 5000, "batch_tokens": 2**17, "rates": (2e-4, 6e-4, 2e-3)},
}


def get_config(arg: str = "quick") -> ml_collections.ConfigDict:
    """The config of a size: quick, cpu or gpu."""
    if arg not in SIZES:
        raise ValueError(f"unknown size {arg!r}; allowed: {', '.join(SIZES)}")
    size = SIZES[arg]
    length, steps = size["length"], size["steps"]
    on_gpu = arg == "gpu"
    return ml_collections.ConfigDict(
        {
            "encoding": {"name": "rope"},
            "model": {**model.SIZES[size["model"]], "dtype": "bfloat16" if on_gpu else "float32"},
            "data": {"source": "sotu", "block": length},
            "train": {
                "length": length,
                "steps": steps,
                "batch_tokens": size["batch_tokens"],
                "accumulation": 8 if on_gpu else 1,
                "learning_rate": size["rates"][1],
                "warmup_steps": steps // 10,
                "log_every": 10,
                "checkpoint_every": steps // 2,
            },
            "eval": {
                "lengths": tuple(length * times for times in (1, 2, 4, 8)),
                "protocols": ("targets",),
                "last_k": 32,
                "max_windows": 128,
                "batch_tokens": 2**16 if on_gpu else 4096,
            },
        }
    )


def sweep(arg: str = "quick"):
    """One encoding that fails past the training length and one that holds."""
    del arg
    return param("encoding.name", ["rope", "alibi"])


def sweep_encodings(arg: str = "quick"):
    """All seven."""
    del arg
    return param("encoding.name", ["none", "sinusoidal", "learned", "rope", "alibi", "t5", "transformer_xl"])


def sweep_rates(arg: str = "quick"):
    """The config's learning rate, one below and one above it."""
    return param("train.learning_rate", SIZES[arg]["rates"])


def sweep_seeds(arg: str = "quick"):
    """Three seeds, trained together."""
    del arg
    return param("seed", range(3))


def sweep_sizes(arg: str = "quick"):
    """The two sizes that a CPU trains."""
    del arg
    return param("model", ["nano", "micro"])
