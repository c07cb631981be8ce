"""Train short, evaluate long: seven encodings of one decoder on the State of the Union addresses.

    pe-ablation launch --config configs/extrapolation.py:quick
    pe-ablation report runs/extrapolation-quick

`quick`: 2 layers, width 64, 4 heads, byte tokens, training length 64, evaluated to 1024 (16x) on the last 32 targets of
128 windows. Seven points, one seed: 6 to 7 minutes on 2 CPU cores. Expected, in bits per byte at 64 / 128 / 256 / 1024:

    none            3.24  3.35  3.42  3.46
    sinusoidal      2.83  3.82  3.79  3.84
    learned         2.33  n/a
    rope            2.12  2.45  5.23  5.22
    alibi           2.33  2.33  2.34  2.34
    t5              2.20  2.38  2.98  3.96
    transformer_xl  2.08  2.08  2.08  2.08

Sweeps: the plain one is the seven encodings; `arms` adds `sinusoidal_vaswani` (scale 1, embeddings times sqrt(M)) and
`t5_128` (buckets past the training length, which never train); `seeds` has three seeds each; `lengths` has two training
lengths.
"""

import ml_collections

LENGTH = 64

# Token embeddings start at a deviation of 0.02; a sinusoid of this amplitude has the same root mean square.
MATCHED_SCALE = 0.02 * 2**0.5


def get_config(arg: str = "quick") -> ml_collections.ConfigDict:
    """The shared part of every point of a sweep; `arg` is the size: quick."""
    if arg != "quick":
        raise ValueError(f"unknown size {arg!r}; allowed: quick")
    return ml_collections.ConfigDict(
        {
            "model": {"num_layers": 2, "num_heads": 4, "model_dim": 64},
            "data": {"source": "sotu", "block": LENGTH},
            "train": {
                "steps": 800,
                "batch_tokens": 2048,
                "learning_rate": 6e-3,
                "warmup_steps": 80,
                "log_every": 10,
                "checkpoint_every": 400,
            },
            "eval": {
                "lengths": (64, 128, 256, 512, 1024),
                "protocols": ("targets",),
                "last_k": 32,
                "max_windows": 128,
            },
        }
    )


def arm(name: str, label: str = "", *, length: int = LENGTH, embed_scale: str = "1", **options) -> dict:
    """One encoding with its options as an overlay; `label` names it in tables where the encoding's name doesn't."""
    return {
        "encoding.name": name,
        "encoding.options": options,
        "model.embed_scale": embed_scale,
        "label": label,
        "train.length": length,
    }


def seven(length: int):
    """The seven encodings, each as an ablation would enter it; T5's last bucket lies inside the training length."""
    yield arm("none", length=length)
    yield arm("sinusoidal", length=length, scale=MATCHED_SCALE)
    yield arm("learned", length=length)
    yield arm("rope", length=length)
    yield arm("alibi", length=length)
    yield arm("t5", length=length, max_distance=min(128, length))
    yield arm("transformer_xl", length=length)


def sweep(arg: str = "quick"):
    """The seven encodings at the training length."""
    del arg
    yield from seven(LENGTH)


def sweep_arms(arg: str = "quick"):
    """The seven encodings and the second arms: the sinusoid at scale 1, and T5 with buckets that never train."""
    yield from sweep(arg)
    yield arm("sinusoidal", "sinusoidal_vaswani", embed_scale="sqrt_d", scale=1.0)
    yield arm("t5", "t5_128", max_distance=128)


def sweep_lengths(arg: str = "quick"):
    """The seven encodings at half the training length and at the whole, on the same tokens."""
    del arg
    for length in (LENGTH // 2, LENGTH):
        yield from seven(length)


def sweep_seeds(arg: str = "quick"):
    """The seven encodings with three seeds each, trained together."""
    for overlay in sweep(arg):
        for seed in range(3):
            yield {**overlay, "seed": seed}
