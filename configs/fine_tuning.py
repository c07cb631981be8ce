"""A trained RoPE goes on: as it is, at another length under a transform, or without positions (DroPE).

    pe-ablation launch --config configs/rope_scaling.py:cpu
    pe-ablation launch --config configs/fine_tuning.py:cpu --config.start.run=runs/rope_scaling-cpu/rope-L512-8d749c59
    pe-ablation report runs/fine_tuning-cpu

`cpu`: from the model of configs/rope_scaling.py, 400 more steps of 2,048 tokens, a fifth as long again. The launch
says of each arm which arrays are copied, dropped and new. Arms: `rope_more` (nothing changes), `rope_pi` and
`rope_yarn` (scaled by 4 and trained at 2,048 tokens; Chen et al. 2023, arXiv:2306.15595; Peng et al. 2024,
arXiv:2309.00071), `none_dropped` (the rotation is left out, at the old length; Gelberg et al. 2025, arXiv:2512.12167)
and `alibi_instead` (another encoding in its place). 9 minutes on 2 CPU cores with `--workers 2`. Expected, in bits per
byte at 512 / 1024 / 2048 / 4096 (see experiments/fine_tuning):

    rope_more        1.89  3.20  3.84  4.59
    rope_pi          1.93  1.94  1.94  4.52
    rope_yarn        1.88  1.88  1.89  3.32
    none_dropped     3.42  3.43  3.43  3.44
    alibi_instead    2.92  2.92  2.92  2.92

`start.run` names a finished run, or a point, of which each seed takes its own. It must be set.
"""

import ml_collections
from ml_collections.config_dict import required_placeholder

LENGTH, LONGER = 512, 2048


def get_config(arg: str = "cpu") -> ml_collections.ConfigDict:
    """The shared part of the arms; `cpu` is the only size."""
    if arg != "cpu":
        raise ValueError(f"unknown size {arg!r}; allowed: cpu")
    return ml_collections.ConfigDict(
        {
            "start": {"run": required_placeholder(str)},
            "model": {"num_layers": 2, "num_heads": 2, "model_dim": 128},
            "data": {"source": "sotu", "block": LONGER},
            "train": {
                "length": LENGTH,
                "steps": 400,
                "batch_tokens": 2048,
                "learning_rate": 2e-3,
                "warmup_steps": 40,
                "checkpoint_every": 200,
            },
            "eval": {
                "lengths": (512, 1024, 2048, 4096),
                "nulls": ("window_recompute",),
                "last_k": 64,
                "max_windows": 16,
                "batch_tokens": 8192,
            },
        }
    )


def arm(label: str, encoding: str, length: int = LENGTH, transform: str = "none") -> dict:
    """One way to go on, as an overlay."""
    return {"label": label, "encoding.name": encoding, "train.length": length, "start.transform": transform}


def sweep(arg: str = "cpu"):
    """All five arms."""
    del arg
    return [
        arm("rope_more", "rope"),
        arm("rope_pi", "rope", LONGER, "pi"),
        arm("rope_yarn", "rope", LONGER, "yarn"),
        arm("none_dropped", "none"),
        arm("alibi_instead", "alibi"),
    ]
