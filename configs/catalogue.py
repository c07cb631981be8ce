"""The catalogue: every encoding of the registry, its named variants, and what is apart from encodings, at one scale.

    pe-ablation launch --config configs/catalogue.py:cpu --workers 2
    pe-ablation report runs/catalogue-cpu

`cpu`: 2 layers, width 64, 4 heads, byte tokens of the State of the Union addresses, training length 128, 1,500 steps of
2,048 tokens, one seed; evaluated to 2,048 (16x) on the last 64 targets of 32 windows, under both nulls. 32 arms:
49 minutes on 2 CPU cores. Expected, in bits per byte at 128 / 256 / 2048 (all of them in experiments/catalogue):

    none          3.29  3.39  3.47        transformer_xl  1.97  1.97  1.98        kerple_power  2.01  2.01  2.01
    sinusoidal    2.83  3.75  3.80        p_rope          2.02  3.63  5.22        fire          2.04  2.04  2.62
    learned       2.36  n/a               xpos            2.04  2.45  2.56        sandwich      2.04  2.04  2.06
    rope          2.01  3.88  5.45        shaw            2.02  2.02  2.09        sum           2.02  2.51  2.54
    alibi         2.22  2.22  2.22        cope            2.02  2.99  5.12        dape          2.00  2.00  2.00
    t5            2.11  2.20  4.04        fox             2.03  2.03  2.03        kerple_log    2.08  2.08  2.08

Sweeps: the plain one is all of it; `encodings` one arm for each registered name, `variants` what papers and their code
do differently, `axes` positions, logit scale and patterns over layers under one encoding, RoPE.
"""

import ml_collections

from pe_ablation import encodings
from pe_ablation.sweep import chain

LENGTH, TIMES = 128, (1, 2, 4, 8, 16)
# What an ablation would enter: a sinusoid as large as token embeddings at the start (deviation 0.02), and the last
# bucket of T5 inside the training length. All other options are the defaults.
ENTERED = {"sinusoidal": {"scale": 0.02 * 2**0.5}, "t5": {"max_distance": LENGTH}}


def get_config(arg: str = "cpu") -> ml_collections.ConfigDict:
    """The shared part of every arm; `cpu` is the only size."""
    if arg != "cpu":
        raise ValueError(f"unknown size {arg!r}; allowed: cpu")
    return ml_collections.ConfigDict(
        {
            "model": {"num_layers": 2, "num_heads": 4, "model_dim": 64},
            "data": {"source": "sotu", "block": LENGTH},
            "train": {
                "length": LENGTH,
                "steps": 1500,
                "batch_tokens": 2048,
                "learning_rate": 5e-3,
                "warmup_steps": 150,
                "checkpoint_every": 500,
            },
            "eval": {"lengths": tuple(LENGTH * each for each in TIMES), "last_k": 64, "max_windows": 32},
        }
    )


def arm(name: str, label: str = "", *, fields: dict | None = None, **options) -> dict:
    """One encoding with its options, and with other fields of the config by dotted path."""
    return {"encoding.name": name, "encoding.options": options, "label": label, **(fields or {})}


def sweep(arg: str = "cpu"):
    """All arms."""
    return chain(sweep_encodings(arg), sweep_variants(arg), sweep_axes(arg))


def sweep_encodings(arg: str = "cpu"):
    """Every registered encoding."""
    del arg
    return [arm(name, **ENTERED.get(name, {})) for name in encodings.names()]


def sweep_variants(arg: str = "cpu"):
    """Where papers, their code and later work differ: one option each."""
    del arg
    return [
        arm("alibi", "alibi_learned", learned=True),
        arm("alibi", "alibi_half", heads=2),
        arm("rope", "rope_partial", fraction=0.25),
        arm("p_rope", "p_rope_reversed", reversed=True),
        arm("shaw", "shaw_keys", values=False),
        arm("fire", "fire_deep", hidden_layers=2),
        arm("cope", "cope_after", after_scale=True),
        arm("dape", "dape_kerple", base="kerple_log"),
    ]


def sweep_axes(arg: str = "cpu"):
    """RoPE under other positions, logit scales and patterns: half of the layers without positions, or with a window."""
    del arg
    window = LENGTH // 2
    return [
        arm("rope", "rope_randomized", fields={"positions": {"name": "randomized", "maximum": LENGTH * TIMES[-1]}}),
        arm("rope", "rope_log_n", fields={"model.logit_scale": "log_n"}),
        arm("rope", "rope_scaled", fields={"model.logit_scale": "learned"}),
        arm("none", "none_scaled", fields={"model.logit_scale": "learned"}),
        arm("none", "rope_none", fields={"model.pattern": (("rope", None), ("none", None))}),
        arm("none", "rope_swa_none", fields={"model.pattern": (("rope", window), ("none", None))}),
    ]
