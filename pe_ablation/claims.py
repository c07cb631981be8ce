"""What the literature leads one to expect of a table, beside what was seen. A claim that fails fails nothing."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pandas as pd

from pe_ablation import config, transforms
from pe_ablation.tables import Frame, select, selections, summary, text_grid

PRESS = "Press et al. 2022"
KAZEMNEJAD = "Kazemnejad et al. 2023"
DAI = "Dai et al. 2019"
CHEN = "Chen et al. 2023"
PENG = "Peng et al. 2024"


@dataclass(frozen=True)
class Seen:
    """One training length's results: `cells[arm][eval length] = (status, mean bits per byte)`."""

    train_length: int
    cells: dict[str, dict[int, tuple[str, float]]]

    def own(self, arm: str) -> float:
        """Bits per byte at the training length; NaN if it is not there."""
        return self.at(arm, self.train_length)

    def ratios(self, arm: str, beyond: float = 1.0) -> dict[int, float]:
        """Bits per byte over those at the training length, at longer lengths from `beyond` times it on."""
        lengths = [
            length for length in self.cells[arm] if length > self.train_length and length >= beyond * self.train_length
        ]
        return {length: self.at(arm, length) / self.own(arm) for length in lengths}

    def last(self, arm: str) -> float:
        """The ratio at the longest length; NaN without a longer length."""
        ratios = self.ratios(arm)
        return ratios[max(ratios)] if ratios else math.nan

    def statuses(self, arm: str) -> set[str]:
        """The statuses of the cells past the training length."""
        return {status for length, (status, _) in self.cells[arm].items() if length > self.train_length}

    def at(self, arm: str, length: int) -> float:
        """Bits per byte at a length; NaN if they are not there."""
        status, value = self.cells.get(arm, {}).get(length, ("missing", math.nan))
        return value if status == "ok" else math.nan

    def reach(self, transform: str) -> float:
        """The length that a transform is meant for: its factor times the training length; infinite without one."""
        asked = config.transform(transform)
        factor = asked.factor if isinstance(asked, transforms.ByFactor) else None
        return math.inf if factor is None else factor * self.train_length


Check = Callable[[Seen], tuple[str, bool | None]]


@dataclass(frozen=True)
class Claim:
    """A statement about the arms it names (it is left out where one of them is absent).

    `check` returns what was seen as text, and whether the statement holds (None: the numbers for it are not there).
    `data` limits a claim to one corpus and tokenizer, as in the `data` column of the rows.
    """

    statement: str
    source: str
    arms: tuple[str, ...]
    check: Check
    data: str | None = None


def below(limit: float, skip: tuple[str, ...] = ()) -> Check:
    """Every arm but `skip` is under `limit` bits per byte at its own length."""

    def check(seen: Seen) -> tuple[str, bool | None]:
        values = {arm: seen.own(arm) for arm in seen.cells if arm not in skip}
        absent = [arm for arm, value in values.items() if math.isnan(value)]
        if absent or not values:
            return f"no number for {', '.join(absent) or 'any arm'}", None
        worst = max(values, key=lambda arm: values[arm])
        return f"worst {worst} {values[worst]:.2f}", values[worst] < limit

    return check


def ratio_within(arm: str, low: float, high: float = math.inf, beyond: float = 1.0) -> Check:
    """The arm is `low` to `high` times its own value at all longer lengths from `beyond` times the training length."""

    def check(seen: Seen) -> tuple[str, bool | None]:
        ratios = list(seen.ratios(arm, beyond).values())
        if not ratios or any(map(math.isnan, ratios)):
            return "not there", None
        least, most = min(ratios), max(ratios)
        return f"{least:.2f}x to {most:.2f}x", low <= least and most <= high

    return check


def order(*arms: str) -> Check:
    """Growth at the longest length, relative to the arm's own value, increases along `arms`."""

    def check(seen: Seen) -> tuple[str, bool | None]:
        growth = [seen.last(arm) for arm in arms]
        if any(map(math.isnan, growth)):
            return "not there", None
        text = ", ".join(f"{arm} {value:.2f}x" for arm, value in zip(arms, growth, strict=True))
        return text, all(a < b for a, b in itertools.pairwise(growth))

    return check


def unavailable(arm: str) -> Check:
    """The arm is n/a at every length past its training length."""

    def check(seen: Seen) -> tuple[str, bool | None]:
        statuses = seen.statuses(arm)
        return ", ".join(sorted(statuses)) or "not there", statuses == {"n/a"} if statuses else None

    return check


def worst_as_trained(seen: Seen) -> tuple[str, bool | None]:
    """At every longer length the model as it was trained is worse than under any transform meant for that length."""
    texts, holds = [], []
    for length in sorted(each for each in seen.cells["none"] if each > seen.train_length):
        meant = (name for name in seen.cells if name != "none" and length <= seen.reach(name))
        values = {name: seen.at(name, length) for name in meant}
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        if values:
            worst = max(values, key=lambda name: values[name])
            texts.append(f"{length}: {seen.at('none', length):.3f}, worst {worst} {values[worst]:.3f}")
            holds.append(values[worst] < seen.at("none", length))
    return "; ".join(texts) or "not there", all(holds) if holds else None


def dearer(one: str, other: str) -> Check:
    """By the same factor, the first transform costs more than the second at the training length."""

    def check(seen: Seen) -> tuple[str, bool | None]:
        factors = [each.removeprefix(f"{one}:") for each in seen.cells if each.startswith(f"{one}:factor=")]
        pairs = {each: (seen.own(f"{one}:{each}"), seen.own(f"{other}:{each}")) for each in factors}
        pairs = {each: pair for each, pair in pairs.items() if not any(map(math.isnan, pair))}
        texts = (f"{each}: {a:.3f} and {b:.3f}" for each, (a, b) in pairs.items())
        return "; ".join(texts) or "not there", all(a > b for a, b in pairs.values()) if pairs else None

    return check


def fails_past_reach(seen: Seen) -> tuple[str, bool | None]:
    """Every transform by a factor is over 1.05x its value at factor times the training length, at the length after."""
    growth = {}
    for name in seen.cells:
        beyond = [length for length in seen.cells[name] if length > seen.reach(name)]
        if beyond and math.isfinite(reach := seen.reach(name)) and reach > seen.train_length:
            growth[name] = seen.at(name, min(beyond)) / seen.at(name, int(reach))
    growth = {name: value for name, value in growth.items() if not math.isnan(value)}
    if not growth:
        return "not there", None
    least = min(growth, key=lambda name: growth[name])
    return f"least {least} {growth[least]:.2f}x, most {max(growth.values()):.2f}x", growth[least] > 1.05


CORPUS = "corpus statistics"
CLAIMS = (
    Claim("every arm learns: under a unigram's 4.38 at its own length", CORPUS, (), below(4.38), "sotu/byte"),
    Claim("all but none: under a bigram's 3.42", CORPUS, (), below(3.42, skip=("none",)), "sotu/byte"),
    Claim("alibi stays within 5 % of its own", PRESS, ("alibi",), ratio_within("alibi", 0.95, 1.05)),
    Claim(
        "sinusoidal: over 1.3x its own from 4x on", PRESS, ("sinusoidal",), ratio_within("sinusoidal", 1.3, beyond=4)
    ),
    Claim("rope: over 1.3x its own from 4x on", PRESS, ("rope",), ratio_within("rope", 1.3, beyond=4)),
    Claim("t5 grows less than rope, alibi less still", PRESS, ("alibi", "t5", "rope"), order("alibi", "t5", "rope")),
    Claim(
        "transformer_xl grows less than sinusoidal",
        DAI,
        ("transformer_xl", "sinusoidal"),
        order("transformer_xl", "sinusoidal"),
    ),
    Claim("none grows less than rope", KAZEMNEJAD, ("none", "rope"), order("none", "rope")),
    Claim("learned has no position past its table: n/a", "its definition", ("learned",), unavailable("learned")),
)
SCALING = (  # of one encoding, whose arms are the transforms that it was scored under; `none` is as trained
    Claim("past its length, as trained is the worst", CHEN, ("none",), worst_as_trained),
    Claim("pi costs more than ntk at 1x", PENG, ("none",), dearer("pi", "ntk")),
    Claim("each fails past the length it is meant for", PENG, ("none",), fails_past_reach),
)


def expected(rows: pd.DataFrame, *, claims: tuple[Claim, ...] = CLAIMS) -> str:
    """The claims whose arms are there, with what was seen (bits per byte, mean over seeds), as markdown.

    Judged on the first of `selections(rows)`, a block of claims per training length. Growth is relative to the arm's
    own value at its training length. Arms that are there more than once (`variant`) are not judged.
    """
    lines: list[tuple[str, ...]] = [("train length", "expected", "source", "seen", "holds")]
    for data, seen in _results(rows):
        lines += _judged([each for each in claims if each.data in (None, data)], seen)
    for encoding, seen in _transformed(rows):
        lines += [(length, f"{encoding}: {text}", *rest) for length, text, *rest in _judged(SCALING, seen)]
    if len(lines) == 1:
        return ""
    return f"Expected shapes (bits per byte; a difference fails nothing)\n\n{text_grid(lines, left=(1, 2, 3, 4))}\n"


def _judged(claims: Iterable[Claim], seen: Seen) -> Iterator[tuple[str, ...]]:
    words = {None: "?", True: "yes", False: "no"}
    for claim in claims:
        if set(claim.arms) <= seen.cells.keys():
            text, holds = claim.check(seen)
            yield str(seen.train_length), claim.statement, claim.source, text, words[holds]


def _results(rows: pd.DataFrame) -> Iterator[tuple[str, Seen]]:
    """What was seen per corpus and training length, of arms that are there once, as they were trained."""
    choice = selections(rows)[0]._asdict()
    for data, of_data in select(rows, **choice)[1].groupby("data"):
        frame: Frame = summary(of_data[of_data["transform"] == ""], **choice)
        for train_length, group in frame.groupby("train_length"):
            arms = {str(arm): part for arm, part in group.groupby("encoding", sort=False) if _once(part)}
            yield str(data), Seen(int(train_length), {arm: _by_length(part) for arm, part in arms.items()})


def _transformed(rows: pd.DataFrame) -> Iterator[tuple[str, Seen]]:
    """Of every encoding that is there once and was scored at other frequencies: what it was, by transform."""
    choice = selections(rows)[0]._asdict()
    frame: Frame = summary(rows, **choice)
    for (encoding, train_length), group in frame.groupby(["encoding", "train_length"], sort=False):
        arms = {str(name) or "none": part for name, part in group.groupby("transform", sort=False)}
        if any(isinstance(config.transform(name), transforms.Rotation) for name in arms) and _once(group):
            yield str(encoding), Seen(int(train_length), {name: _by_length(part) for name, part in arms.items()})


def _once(part: Frame) -> bool:
    return part.point.nunique() == 1 and part.data_digest.nunique() == 1


def _by_length(part: Frame) -> dict[int, tuple[str, float]]:
    return {int(row.eval_length): (row.status, row.mean) for row in part.itertuples()}
