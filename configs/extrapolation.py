"""Train short, evaluate long: encodings of one decoder on the State of the Union addresses.

    pe-ablation launch --config configs/extrapolation.py:quick
    pe-ablation report runs/extrapolation-quick

`quick`: 2 layers, width 64, 4 heads, byte tokens, training length 64, evaluated to 1024 (16x) on the last 32 targets of
128 windows. Seven points, one seed: 6 to 8 minutes on 2 CPU cores. Expected, in bits per byte at 64 / 128 / 256 / 1024:

    none            3.24  3.35  3.42  3.46
    sinusoidal      2.83  3.81  3.79  3.85
    learned         2.32  n/a
    rope            2.11  2.47  5.25  5.42
    alibi           2.34  2.35  2.35  2.35
    t5              2.22  2.41  2.95  4.03
    transformer_xl  2.08  2.08  2.08  2.09

`cpu`: nine arms at training lengths 128 and 512, three seeds, evaluated to 8192, the learning rate chosen from three
for each arm and length with one other seed. Not run yet as a whole: no numbers to expect.

    pe-ablation launch --config configs/extrapolation.py:cpu --select lr --workers 2
    pe-ablation report runs/extrapolation-cpu --select lr

Sweeps: the plain one is the whole study of a size; `arms` has the nine arms, `rates` the learning rates, `seeds` three
seeds (`--sweep arms,seeds`: the product). The second arms are `sinusoidal_vaswani` (scale 1, embeddings times sqrt(M))
and `t5_2x` (buckets to twice the training length, the last of which never train).
"""

import ml_collections

from pe_ablation.sweep import chain, param, prod

# Token embeddings start at a deviation of 0.02; a sinusoid of this amplitude has the same root mean square.
MATCHED_SCALE = 0.02 * 2**0.5
SIZES = {
    "quick": {
        "lengths": (64,),
        "rates": (6e-3,),
        "seeds": (0,),
        "scale": MATCHED_SCALE,
        "heads": 4,
        "train": {"steps": 800, "batch_tokens": 2048, "warmup_steps": 80, "checkpoint_every": 400},
        "eval": {"lengths": (64, 128, 256, 512, 1024), "last_k": 32, "max_windows": 128},
    },
    "cpu": {
        "lengths": (128, 512),
        "rates": (2e-3, 5e-3, 1.2e-2),
        "seeds": (0, 1, 2),
        "scale": 0.1,
        "heads": 4,
        "train": {"steps": 1800, "batch_tokens": 512, "warmup_steps": 180, "checkpoint_every": 600},
        "eval": {"lengths": (128, 256, 512, 1024, 2048, 4096, 8192), "last_k": 64, "max_windows": 8},
    },
}


def size(arg: str) -> dict:
    """The numbers of a size by name."""
    if arg not in SIZES:
        raise ValueError(f"unknown size {arg!r}; allowed: {', '.join(SIZES)}")
    return SIZES[arg]


def get_config(arg: str = "quick") -> ml_collections.ConfigDict:
    """The shared part of every point of a sweep; `arg` is the size: quick or cpu."""
    chosen = size(arg)
    longest = max(chosen["lengths"])
    return ml_collections.ConfigDict(
        {
            "model": {"num_layers": 2, "num_heads": chosen["heads"], "model_dim": 64},
            "data": {"source": "sotu", "block": longest},
            "train": {"length": longest, "learning_rate": chosen["rates"][0], "log_every": 10, **chosen["train"]},
            "eval": {"protocols": ("targets",), **chosen["eval"]},
        }
    )


def arm(name: str, label: str = "", *, embed_scale: str = "1", **options) -> dict:
    """One encoding with its options as an overlay; `label` names it in tables where the encoding's name doesn't."""
    return {
        "encoding.name": name,
        "encoding.options": options,
        "model.embed_scale": embed_scale,
        "label": label,
    }


def seven(scale: float, length: int) -> list[dict]:
    """The seven encodings, each as an ablation would enter it; T5's last bucket lies inside the training length."""
    return [
        arm("none"),
        arm("sinusoidal", scale=scale),
        arm("learned"),
        arm("rope"),
        arm("alibi"),
        arm("t5", max_distance=min(128, length)),
        arm("transformer_xl"),
    ]


def nine(scale: float, length: int) -> list[dict]:
    """The seven and the second arms: the sinusoid as Vaswani et al. enter it, and T5 with buckets that never train."""
    vaswani = arm("sinusoidal", "sinusoidal_vaswani", embed_scale="sqrt_d", scale=1.0)
    return [*seven(scale, length), vaswani, arm("t5", "t5_2x", max_distance=2 * length)]


def sweep(arg: str = "quick"):
    """The whole study of a size: every arm at every training length, rate and seed; `quick` has the seven at one."""
    chosen = size(arg)
    arms = seven if arg == "quick" else nine
    at_lengths = [prod(param("train.length", [length]), arms(chosen["scale"], length)) for length in chosen["lengths"]]
    return prod(chain(*at_lengths), sweep_rates(arg), param("seed", chosen["seeds"]))


def sweep_arms(arg: str = "quick"):
    """All nine arms at the longest training length of a size."""
    chosen = size(arg)
    return nine(chosen["scale"], max(chosen["lengths"]))


def sweep_rates(arg: str = "quick"):
    """The learning rates of a size."""
    return param("train.learning_rate", size(arg)["rates"])


def sweep_seeds(arg: str = "quick"):
    """Three seeds."""
    del arg
    return param("seed", range(3))
