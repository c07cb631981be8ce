"""Frequency schedules: what the rotations of a trained RoPE become where it reads past its training length.

theta is float64 [F] radians per token of the F = D/2 pairs of rotated dims, trained at L tokens (`original`) as
theta_k = b^(-k/F); s >= 1 is the factor, usually the length to be read over L. A factor of 1 changes no bit.
"""

import math

import numpy as np


def interpolated(theta: np.ndarray, factor: float) -> np.ndarray:
    """theta / s, which is reading position p at p / s (position interpolation).

    Source: Chen et al. 2023, arXiv:2306.15595.
    """
    return theta / factor


def ntk(theta: np.ndarray, factor: float) -> np.ndarray:
    """theta_k s^(-k/(F-1)), which is the base b s^(D/(D-2)): the first frequency stays, the last is divided by s.

    Source: bloc97 2023, "NTK-aware scaled RoPE"; Peng et al. 2024, arXiv:2309.00071, section 3.1. Needs two pairs.
    """
    pairs = len(theta)
    return theta * factor ** (-np.arange(pairs) / (pairs - 1))


def dynamic_factor(length: int, original: int, factor: float) -> float:
    """The factor of `ntk` at `length` tokens: f l/L - (f - 1), and 1 up to L; f = 1 is l/L.

    Source: emozilla 2023, "Dynamically scaled RoPE"; transformers' form.
    """
    return max(1.0, factor * length / original - (factor - 1))


def by_parts(theta: np.ndarray, factor: float, kept: np.ndarray) -> np.ndarray:
    """(1 - kept) theta / s + kept theta, kept [F] in 0..1 (a ramp).

    Source: Peng et al. 2024, arXiv:2309.00071, section 3.2.
    """
    return theta + (1 - kept) * (theta / factor - theta)


def rotations(theta: np.ndarray, original: int) -> np.ndarray:
    """L theta / (2 pi): how often each pair turns within the training length."""
    return original * theta / (2 * math.pi)


def ramp_of_rotations(theta: np.ndarray, original: int, alpha: float, beta: float) -> np.ndarray:
    """0 for pairs that turn less than alpha times, 1 for more than beta, linear in the rotations between.

    Source: Peng et al. 2024, arXiv:2309.00071, equation 11: YaRN as its paper says. With alpha 1 and beta 4 it is that
    of Llama 3 (Dubey et al. 2024, arXiv:2407.21783), there written in wavelengths.
    """
    return np.clip((rotations(theta, original) - alpha) / (beta - alpha), 0.0, 1.0)


def ramp_of_index(pairs: int, base: float, original: int, alpha: float, beta: float) -> np.ndarray:
    """Linear in the pair's index between those that turn beta and alpha times, rounded outwards: YaRN as released.

    A pair turns r times at index F ln(L / (2 pi r)) / ln b. Source: the code of Peng et al. 2024, and transformers'.
    """

    def index(turns: float) -> float:
        return pairs * math.log(original / (2 * math.pi * turns)) / math.log(base)

    low, high = max(math.floor(index(beta)), 0), min(math.ceil(index(alpha)), 2 * pairs - 1)
    return 1 - np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0.0, 1.0)


def yarn_magnitude(factor: float) -> float:
    """1/sqrt(t) = 0.1 ln s + 1, by which cos and sin are multiplied: logits by its square, and by nothing else.

    Source: Peng et al. 2024, arXiv:2309.00071, section 3.4.
    """
    return 0.1 * math.log(factor) + 1
