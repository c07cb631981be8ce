"""RoPE past its training length without training: one model under every transform at 2x, 4x and 8x.

    pe-ablation launch --config configs/rope_scaling.py:cpu
    pe-ablation transforms --run runs/rope_scaling-cpu --length 4096
    pe-ablation report runs/rope_scaling-cpu

`cpu`: 2 layers, width 128, 2 heads of 64 dims, byte tokens of the State of the Union addresses, training length 512,
2,000 steps of 2,048 tokens, one seed; evaluated to 4,096 (8x) on the last 64 targets of 16 windows. Transforms with a
factor are tried at 2, 4 and 8 whatever the length, so that each is seen below, at and past its nominal window. 16
minutes on 2 CPU cores. Expected, in bits per byte at 512 / 1024 / 2048 / 4096 (see experiments/rope_scaling):

    none             1.89  3.01  3.69  4.45
    pi:factor=8      5.58  5.57  5.57  5.56
    ntk:factor=8     1.95  1.97  2.87  3.78
    yarn:factor=8    1.95  1.94  1.95  1.96
    rerope           1.89  1.90  1.91  1.93
"""

import ml_collections

LENGTH, FACTORS = 512, (2, 4, 8)
BY_FACTOR = ("pi", "ntk", "ntk_by_parts", "yarn", "yarn:ramp=paper", "llama3")
OTHERS = ("dynamic_ntk", "base:base=500000", "clip", "rerope", "self_extend", "log_n", "yarn:factor=8+log_n")


def get_config(arg: str = "cpu") -> ml_collections.ConfigDict:
    """The one model, and what it is scored under; `cpu` is the only size."""
    if arg != "cpu":
        raise ValueError(f"unknown size {arg!r}; allowed: cpu")
    return ml_collections.ConfigDict(
        {
            "encoding": {"name": "rope"},
            "model": {"num_layers": 2, "num_heads": 2, "model_dim": 128},
            "data": {"source": "sotu", "block": LENGTH},
            "train": {
                "length": LENGTH,
                "steps": 2000,
                "batch_tokens": 2048,
                "learning_rate": 4e-3,
                "warmup_steps": 200,
                "checkpoint_every": 1000,
            },
            "eval": {
                "lengths": tuple(LENGTH * each for each in (1, *FACTORS)),
                "nulls": ("window_recompute",),
                "last_k": 64,
                "max_windows": 16,
                "batch_tokens": 8192,
                "transforms": ("none", *scaled(), *OTHERS),
            },
        }
    )


def scaled() -> list[str]:
    """Every transform that has a factor, at each of them."""
    return [_with(name, factor) for name in BY_FACTOR for factor in FACTORS]


def _with(name: str, factor: int) -> str:
    base, *fields = name.split(":")
    return ":".join([base, f"factor={factor}", *fields])
