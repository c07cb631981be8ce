"""The documentation of the encodings, made of their classes: a page of text, and a picture of each.

pe-ablation encodings --docs docs/encodings.md --plot docs/encodings
"""

import dataclasses
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from pe_ablation import attention, config, effects, encodings, model, positions, tables, transforms
from pe_ablation.encodings import Encoding, Scores
from pe_ablation.figure import COLOURS, FAINT, INK, SIZE, SMALL, Target, plain, save

REFERENCE: dict[str, Any] = {"vocab_size": 50_257, "train_length": 1024, **model.SIZES["gpt2_small"]}
PATTERN = (("rope", 256), ("none", None))
HEADS = COLOURS[3], COLOURS[1], COLOURS[4], COLOURS[5]  # of the lines of heads 1, 2, ...
BAND = (0.1, 0.9)  # quantiles
WIDE, EXACT = 30.0, 10  # logits that need a logarithmic axis, and up to which that is linear
PANEL = (6.4, 3.3)  # inches

OUT_OF_SCOPE = {
    "PaTH (Yang et al. 2025, arXiv:2505.16381)": "A logit is k_j . P q_i, P the product of one Householder-like matrix "
    "for each token between the two, made of that token's content. That is no function of two tokens' vectors, "
    "positions and states, which is all that a hook is shown: it needs an attention kernel of its own, and decoding "
    "rewrites the cached keys at every token.",
    "PoPE (Gopalakrishnan et al. 2025, arXiv:2509.10534)": "Each channel of queries and keys becomes a magnitude, the "
    "softplus of the channel, and a phase that is the position's alone. So the score of two tokens at one place is not "
    "q . k: beside the encodings here it would compare two attentions, not two encodings.",
    "Cable (Veisi et al. 2025, arXiv:2503.08067)": "Biases that each token adds for each head, made of its content and "
    "summed along the text. Two of that family are here: `fox` sums the logarithms of gates, `cope` counts gates.",
    "Abacus (McLeish et al. 2024, arXiv:2405.17399)": "Numbers the digits inside each number. It is for arithmetic "
    "alone, and has to know which tokens are digits, which is the tokenizer's knowledge and no position.",
    "GRAPE (Zhang et al. 2025, arXiv:2512.07805)": "Positions as actions of a group: rotations, of which RoPE is one, "
    "and additive ones, of which ALiBi and FoX are two. `rope`, `alibi` and `fox` are here; planes of rotation that "
    "are learned and biases summed along a path are not.",
}


def markdown() -> str:
    """The page: an overview, a section per registered encoding, and what is apart from encodings."""
    parts = [
        _introduction(),
        _overview(),
        *map(_section, encodings.names()),
        _patterns(),
        _positions(),
        _logit_scale(),
        _transforms(),
        _out_of_scope(),
    ]
    return "\n\n".join(parts) + "\n"


def added_parameters(name: str) -> int:
    """How many parameters an encoding adds to the decoder of `REFERENCE`, shared by its layers as in the paper."""
    return _parameters(name) - _parameters("none")


@functools.cache
def _parameters(name: str) -> int:
    return model.count_parameters(_reference(name))


def acts_on(encoding: Encoding) -> str:
    """Which of the hooks' places an encoding changes: input, queries and keys, logits, values, state."""
    places = {
        "input": encoding.overrides("embed"),
        "queries and keys": encoding.overrides("query") or encoding.overrides("key"),
        "logits": encoding.scores is not Scores.NONE,
        "values": encoding.overrides("values"),
        "state": encoding.overrides("state"),
    }
    return ", ".join(place for place, changed in places.items() if changed) or "nothing"


def _reference(name: str, **fields: Any) -> model.GPTConfig:
    return model.GPTConfig(**REFERENCE, encoding=name, **fields)


@functools.cache
def _built(name: str) -> Encoding:
    """At the reference size, with shapes and no values."""
    reference = _reference(name)
    return reference.abstract_encoding(reference.slots[0])


def _introduction() -> str:
    heads, layers, dim = (REFERENCE[name] for name in ("num_heads", "num_layers", "model_dim"))
    made = """
        Every encoding of the registry: what it computes, where it comes from, what it costs, and what to expect of it
        past the training length. This page is made of the classes and of the decoder, and a test holds it to them:
    """
    letters = f"""
        Letters: q_i, k_j the query and the key of positions i >= j, l_ij their logit, H heads, D head dim, M model
        dim, L training length. Parameters are counted in the decoder of GPT-2 small ({layers} layers, H = {heads},
        D = {dim // heads}, M = {dim}, L = {REFERENCE["train_length"]:,}), shared by its layers as in each paper
        (`model.sharing=paper`).
    """
    pictures = f"""
        Pictures are drawn by the encodings' own hooks, as they are initialised, at {_sizes()}: what is added to the
        input, by position and channel, or else to the logit q . k / sqrt(D) of the query at position
        {effects.TIMES * effects.SIZES.train_length}, by distance. Where content plays a part, a band holds the middle
        {BAND[1] - BAND[0]:.0%} for vectors drawn from N(0, 1), and a line is that of vectors (1, ..., 1), or of each
        head where heads differ by more than the band. What is added to values is not drawn. One of your own:
    """
    return f"""# Encodings

{_wrapped(made)}

    pe-ablation encodings --docs docs/encodings.md --plot docs/encodings

{_wrapped(letters)}

{_wrapped(pictures)}

    pe-ablation encodings --plot pictures --only my_encoding.py:Slopes"""


def _sizes() -> str:
    heads, head_dim, dim, length = effects.SIZES
    return f"H = {heads}, D = {head_dim}, M = {dim}, L = {length}"


def _overview() -> str:
    """One row per encoding."""
    header = ["encoding", "acts on", "scores", "shift invariant", "parameters", "past L"]
    lines = [header]
    for name in encodings.names():
        built, about = _built(name), encodings.find(name).about
        past, _, _ = about.beyond.partition(":")
        count = f"{added_parameters(name):,}"
        moved = "yes" if built.shift_invariant else "no"
        lines.append([f"[{name}](#{name})", acts_on(built), built.scores.name, moved, count, past])
    meanings = "\n".join(f"- `{each.name}`: {each.value}." for each in Scores)
    return f"""## Overview

{tables.text_grid(lines, left=(0, 1, 2, 3, 5))}

Scores say what the hook of the logits does, and so which kernels of attention can serve it:

{meanings}

Past L: `yes`; `window`: stays flat, without using what is far away; `partly`; `no`; `n/a`: it has no position there.
That is what formulas and papers lead one to expect; what one small model of each did, which is not always that, is in
[experiments/catalogue](../experiments/catalogue/README.md)."""


def _section(name: str) -> str:
    cls = encodings.find(name)
    about = cls.about
    count = f"{added_parameters(name):,} at the size of GPT-2 small"
    entries = {
        "Formula": _code(about.formula),
        "Source": _escaped(about.source),
        "Options": "; ".join(_options(name)) or "none",
        "Parameters": f"{_code(about.parameters)}: {count}",
        "Over layers": _layers(name),
        "Past the training length": _escaped(about.beyond),
        "Cost": _escaped(about.cost),
    }
    lines = "\n".join(f"- **{title}.** {text}" for title, text in entries.items())
    what = "the input" if _built(name).overrides("embed") else "a logit"
    return f"## {name}\n\n{_documentation(cls)}\n\n{lines}\n\n![What {name} adds to {what}](encodings/{name}.png)"


def _options(name: str) -> Iterator[str]:
    """`name: type = default` of each."""
    types = encodings.option_types(name)
    for option, default in encodings.option_defaults(name).items():
        kind = types[option]
        text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
        text = re.sub(r"\b(typing|collections\.abc)\.", "", text)
        yield f"`{option}: {text} = {default!r}`"


def _layers(name: str) -> str:
    """Which parameters are one per layer and which all layers share, seen from their shapes in the decoder."""
    alone, stacked = (
        {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(each, nnx.Param))}
        for each in (_built(name), model.abstract(_reference(name)).encodings[0])
    )
    if not alone:
        never = encodings.find(name).about.parameters == "0"
        return "no parameters" if never else "no parameters with these defaults"
    if _built(name).overrides("embed"):
        return "acts once, at the input"
    own = [f"`{path}`" for path in alone if stacked[path] != alone[path]]
    shared = [f"`{path}`" for path in alone if stacked[path] == alone[path]]
    kinds = {"one per layer": own, "shared by all layers": shared}
    return "; ".join(f"{kind}: {', '.join(paths)}" for kind, paths in kinds.items() if paths)


def _patterns() -> str:
    fields = _sentence(model.GPTConfig, "`pattern`")
    slots = _reference("none", pattern=PATTERN).slots
    each = REFERENCE["num_layers"] // len(slots)
    named = " and ".join(
        f"{each} of {slot.name} with {f'a window of {slot.window} tokens' if slot.window else 'all keys'}"
        for slot in slots
    )
    hybrids = """
        Some layers with rotations and a window, the others without positions and with all keys: RNoPE-SWA (Yang et
        al. 2025, arXiv:2501.18795) and SWAN (Puvvada et al. 2025, arXiv:2504.08719, which scales logits at evaluation
        as well, see `log_n_beyond` below). No rotation meets a distance past its window, at any length. As an overlay
        of a sweep, such as the arm `rope_swa_none` of [configs/catalogue.py](../configs/catalogue.py):
    """
    layers = f"In GPT-2 small that is {named} layers. What acts on the input cannot be one of several encodings."
    return f"""## Patterns over layers

{_escaped(fields)}

{_wrapped(hybrids)}

    {{"encoding.name": "none", "model.pattern": {PATTERN!r}}}

{_wrapped(layers)}"""


def _positions() -> str:
    return f"""## Positions

{_documentation(positions)}

{_escaped(_sentence(config.PositionsConfig, "`evaluation`"))}

    --config.positions.name=randomized --config.positions.maximum=2048"""


def _logit_scale() -> str:
    return f"""## Logit scale

`model.logit_scale` goes with every encoding. {_escaped(_sentence(model.GPTConfig, "`logit_scale`"))}

{_documentation(attention.LogitScale)}

    --config.model.logit_scale=log_n"""


def _transforms() -> str:
    lines = []
    for name, each in transforms.REGISTRY.items():
        fields = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(each)) or "no fields"
        lines.append(f"- **{name}** (`{fields}`): {_escaped(_flat(each.__doc__))}")
    listed = "\n".join(lines)
    return f"""## Transforms

{_documentation(transforms)}

{listed}"""


def _out_of_scope() -> str:
    lines = "\n".join(f"- **{name}.** {reason}" for name, reason in OUT_OF_SCOPE.items())
    return f"""## Out of scope

{lines}"""


def _documentation(documented: Any) -> str:
    """Its docstring as markdown: indented paragraphs as they are, no source, which stands elsewhere."""
    text = inspect.cleandoc(documented.__doc__ or "")
    text = re.sub(r"^Source:.*", "", text, flags=re.DOTALL | re.MULTILINE).strip()
    paragraphs = text.split("\n\n")
    return "\n\n".join(each if each.startswith("    ") else _escaped(each) for each in paragraphs)


def _sentence(documented: Any, start: str) -> str:
    """What the docstring says of a field, from `start` on to the next field, which begins a sentence or a line."""
    found = re.search(rf"{re.escape(start)}.*?(?=\. `|\n\s*`|\Z)", documented.__doc__, re.DOTALL)
    assert found is not None
    return _flat(found[0]).removesuffix(".") + "."


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


def _code(text: str) -> str:
    """A code span, of text that may have backticks itself."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _escaped(text: str) -> str:
    """Text in which no star or angle bracket outside of backticks is markup."""
    spans = re.split(r"(`[^`]*`)", text)
    markup = re.compile(r"((?<=\S)\*|\*(?=\S)|<(?=[A-Za-z/!?]))")
    return "".join(each if each.startswith("`") else markup.sub(r"\\\1", each) for each in spans)


def _wrapped(text: str) -> str:
    return textwrap.fill(_flat(text), 120, break_long_words=False, break_on_hyphens=False)


def picture(name: str, path: Target, options: Mapping[str, Any] | None = None) -> Figure:
    """Draw what an encoding, a name or FILE.py:CLASS, adds to the input or to a logit, and save it as png to `path`.

    Raises ValueError as `encodings.make` does.
    """
    encoding = effects.build(name, options)
    on_input = encoding.overrides("embed")
    on_logits = acts_on(encoding) not in ("input", "input, state")
    panels = [draw for draw, wanted in ((_draw_input, on_input), (_draw_logits, on_logits)) if wanted]
    figure = Figure(figsize=(PANEL[0] * len(panels), PANEL[1]), layout="constrained", dpi=90)
    for axis, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        plain(axis, draw(axis, encoding, name.rpartition(":")[2]))
    save(figure, path)
    return figure


def _draw_input(axis: Axes, encoding: Encoding, name: str) -> str:
    """Draws, and returns a title."""
    table = effects.on_input(encoding)
    longest, length = effects.TIMES * effects.SIZES.train_length, effects.SIZES.train_length
    most = float(np.abs(table).max()) or 1.0
    extent = (-0.5, len(table) - 0.5, -0.5, table.shape[1] - 0.5)
    image = axis.imshow(
        table.T,
        cmap="RdBu_r",
        vmin=-most,
        vmax=most,
        extent=extent,
        aspect="auto",
        origin="lower",
        interpolation="none",
    )
    bar = axis.figure.colorbar(image, ax=axis, pad=0.02)
    bar.ax.tick_params(colors=INK, labelsize=SMALL, length=3)
    bar.outline.set_visible(False)
    axis.set_xlim(-0.5, longest + 0.5)
    if len(table) < longest:
        middle = (len(table) + longest) / 2
        axis.text(middle, table.shape[1] / 2, f"no position from {len(table)} on", ha="center", color=INK, size=SIZE)
    axis.axvline(length - 0.5, color=INK, lw=0.9, ls=(0, (4, 2)))
    axis.set(xlabel="position (tokens); dashed: the training length", ylabel="channel")
    axis.xaxis.set_major_locator(FixedLocator([at * length for at in range(effects.TIMES + 1)]))
    return f"{name}: added to the input\n{_conditions(encoding)}"


def _draw_logits(axis: Axes, encoding: Encoding, name: str) -> str:
    """Draws, and returns a title."""
    effect = effects.on_logits(encoding)
    if effects.reads_content(encoding):
        entries = _draw_content(axis, effect)
    else:
        entries = _draw_lines(axis, effect.distances, effect.drawn[0])
    length = effects.SIZES.train_length
    entries.append(Line2D([], [], color=FAINT, lw=0.9, marker="|", markersize=9, ls="none", label="training length"))
    axis.axvline(length, color=FAINT, lw=0.9, zorder=0)
    axis.set_xscale("symlog", base=2, linthresh=1, linscale=0.7)
    ticks = [0, *(2**power for power in range(int(math.log2(max(effect.query, 1))) + 1))]
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axis.dataLim.intervaly
    if max(-low, high) > WIDE:
        axis.set_yscale("symlog", linthresh=EXACT)
        axis.set_ylim(1.5 * low - 1, 1.5 * high + 1)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axis.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axis.grid(axis="y", color="#E6E6E6", lw=0.6)
    axis.set_xlim(0, effect.query)
    logarithmic = f" (log past {EXACT})" if axis.get_yscale() == "symlog" else ""
    axis.set(xlabel="distance i - j (tokens)", ylabel=f"added to the logit{logarithmic}")
    conditions = _conditions(encoding, effect)
    axis.legend(
        handles=entries, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=SMALL, labelcolor=INK
    )
    return f"{name}: added to q . k / sqrt(D), query at position {effect.query}\n{conditions}"


def _conditions(encoding: Encoding, effect: effects.OnLogits | None = None) -> str:
    """At which sizes, parameters and seed a picture is drawn."""
    parts = [_sizes()]
    learned = bool(jax.tree.leaves(nnx.state(encoding, nnx.Param)))
    if learned:
        redrawn = effect is not None and effect.redrawn
        parts.append("parameters (0 at first) ~ N(0, 0.02)" if redrawn else "initial parameters")
    if learned or (effect is not None and effects.reads_content(encoding)):
        parts.append(f"seed {effects.SEED}")
    return ", ".join(parts)


def _draw_lines(axis: Axes, distances: np.ndarray, heads: np.ndarray) -> list[Any]:
    """A line for each head, in steps where most neighbours are equal, or one for all; the entries of a legend."""
    looks: dict[str, Any] = {"lw": 1.5, "drawstyle": "steps-mid" if (np.diff(heads) == 0).mean() > 0.5 else "default"}
    if (heads == heads[0]).all():
        return axis.plot(distances, heads[0], color=INK, label="every head", **looks)
    named = [(HEADS[head], f"head {head + 1}") for head in range(len(heads))]
    drawn = zip(heads, named, strict=True)
    return [axis.plot(distances, each, color=colour, label=name, **looks)[0] for each, (colour, name) in drawn]


def _draw_content(axis: Axes, effect: effects.OnLogits) -> list[Any]:
    """Median and band of random vectors, by head where heads differ by more; else a line of vectors that are alike."""
    low, middle, high = np.quantile(effect.drawn, (BAND[0], 0.5, BAND[1]), axis=0)
    band = f"{BAND[0]:.0%} to {BAND[1]:.0%}"
    if np.ptp(middle, axis=0).max() > (high - low).max():
        for head in range(len(middle)):
            axis.fill_between(effect.distances, low[head], high[head], color=HEADS[head], alpha=0.15, lw=0)
        entries = _draw_lines(axis, effect.distances, middle)
        return [
            *entries,
            Patch(color=FAINT, alpha=0.35, lw=0, label=f"{band},\nmedian as line:\nq, k, inputs\n~ N(0, 1)"),
        ]
    low, middle, high = np.quantile(effect.drawn, (BAND[0], 0.5, BAND[1]), axis=(0, 1))
    axis.fill_between(effect.distances, low, high, color=HEADS[0], alpha=0.22, lw=0)
    axis.plot(effect.distances, middle, color=HEADS[0], lw=1.2)
    same = (effect.alike == effect.alike[0]).all()
    axis.plot(effect.distances, effect.alike[0], color=INK, lw=1.2)
    return [
        Line2D([], [], color=INK, lw=1.2, label="q = k = input\n= (1, ..., 1)" + ("" if same else ",\nhead 1")),
        Patch(color=HEADS[0], alpha=0.3, lw=0, label=f"{band},\nmedian as line:\nq, k, inputs\n~ N(0, 1)"),
    ]
