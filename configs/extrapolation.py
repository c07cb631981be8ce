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

`cpu`: nine arms at training lengths 128 and 512, three seeds, evaluated to 8192 on the last 64 targets of 8 windows,
the learning rate chosen from three for each arm and length with one other seed. 108 runs: 2 hours 9 minutes on 2 CPU
cores that did other work too. Expected, in bits per byte (see experiments/extrapolation), trained at 128 and at 512:

                        128   512   8192          512   2048  8192
    none                3.45  3.47  3.48          3.48  3.49  3.49
    sinusoidal          2.66  4.19  4.43          3.49  3.57  3.89
    sinusoidal_vaswani  2.94  4.07  4.32          3.49  3.62  4.01
    learned             3.05  n/a                 3.48  n/a
    rope                2.18  4.69  4.72          2.29  4.63  4.65
    alibi               2.45  2.45  2.45          2.40  2.40  2.40
    t5                  2.17  2.27  4.18          2.29  2.31  2.50
    t5_2x               2.19  4.48  4.78          2.32  4.60  4.75
    transformer_xl      2.15  2.15  2.16          2.15  2.15  2.16

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
