"""The documentation is what the classes make of it, and its pictures show the papers' numbers."""

import math
from pathlib import Path

import numpy as np
import pytest

from configs import catalogue
from pe_ablation import cards, cli, effects, encodings, model

pytestmark = pytest.mark.usefixtures("quick_compilation")
DOCS = Path(__file__).parent.parent / "docs"
PAST = {"yes", "window", "partly", "no", "n/a", "as its parts", "as its base"}
MINE = """
import jax.numpy as jnp
from pe_ablation.encodings import Encoding, Scores, distance


class Mine(Encoding):
    scores = Scores.BIAS

    def __init__(self, sizes, rngs, *, slope: float = 0.5):
        self.slope = slope

    def logits(self, a, q, k):
        return a - self.slope * distance(q, k)[:, None]


class Both(Mine):
    def embed(self, x, pos):
        return x + jnp.where(pos >= 0, pos, 0)[..., None].astype(x.dtype)
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def refused(capsys, *argv):
    """The one line on stderr of a command that is refused with exit code 2."""
    assert cli.main(["encodings", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_the_page_is_what_the_classes_make_of_it():
    page = (DOCS / "encodings.md").read_text(encoding="utf-8")
    assert page == cards.markdown(), f"write it anew: {cards.__doc__}"


def test_every_encoding_has_a_section_and_a_picture():
    page = (DOCS / "encodings.md").read_text(encoding="utf-8")
    sections = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert tuple(each for each in sections if each in encodings.REGISTRY) == encodings.names()
    for name in encodings.names():
        picture = DOCS / "encodings" / f"{name}.png"
        assert f"(encodings/{name}.png)" in page
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 60_000
    assert len(list((DOCS / "encodings").iterdir())) == len(encodings.names())


@pytest.mark.parametrize("name", encodings.names())
def test_a_card_says_what_it_costs_and_whether_and_why_it_reads_on(name):
    about = encodings.find(name).about
    verdict, colon, why = about.beyond.partition(": ")
    assert verdict in PAST and colon and why and about.cost


def test_parameters_are_those_of_gpt2_small_layer_by_layer():
    by_hand = {"learned": 1024 * 768, "t5": 32 * 12, "transformer_xl": 2 * 12 * 64 + 12 * 768 * 12 * 64, "rope": 0}
    assert {name: cards.added_parameters(name) for name in by_hand} == by_hand
    page = (DOCS / "encodings.md").read_text(encoding="utf-8")
    for name, count in by_hand.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| [{name}](#{name})")]
        assert row.split("|")[5].strip() == f"{count:,}"


def test_what_an_encoding_acts_on_is_seen_from_its_hooks(mine):
    wanted = {
        "none": "nothing",
        "learned": "input",
        "xpos": "queries and keys",
        "shaw": "logits, values",
        "fox": "logits, state",
        "sum": "queries and keys, logits",
        f"{mine}:Both": "input, logits",
    }
    assert {name: cards.acts_on(effects.build(name)) for name in wanted} == wanted


def test_the_pattern_shown_is_that_of_the_catalogue():
    [arm] = [arm for arm in catalogue.sweep_axes() if arm["label"] == "rope_swa_none"]
    shapes = [[(name, window is None) for name, window in each] for each in (arm["model.pattern"], cards.PATTERN)]
    assert shapes[0] == shapes[1]
    page = (DOCS / "encodings.md").read_text(encoding="utf-8")
    assert f'"model.pattern": {cards.PATTERN!r}' in page
    assert all(f"{scale}:" in page.partition("## Logit scale")[2] for scale in model.LOGIT_SCALES[1:])


def test_drawn_alibi_is_its_slopes_times_the_distance():
    effect = effects.on_logits(effects.build("alibi"))
    distance = np.arange(513)
    wanted = -np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None] * distance
    assert effect.query == 512 and not effect.redrawn
    np.testing.assert_array_equal(effect.distances, distance)
    np.testing.assert_allclose(effect.drawn, wanted[None], rtol=1e-6)


def test_drawn_sinusoid_is_the_papers_table():
    found = effects.on_input(effects.build("sinusoidal"))
    angle = np.arange(513)[:, None] / 10_000 ** (np.arange(0, 64, 2) / 64)
    assert found.shape == (513, 64)
    np.testing.assert_allclose(found[:, 0::2], np.sin(angle), atol=1e-4)
    np.testing.assert_allclose(found[:, 1::2], np.cos(angle), atol=1e-4)


def test_drawn_rope_of_equal_vectors_is_a_sum_of_cosines_less_the_plain_product():
    effect = effects.on_logits(effects.build("rope"))
    frequencies = 10_000.0 ** (-np.arange(8) / 8)
    cosines = np.cos(np.arange(513)[:, None] * frequencies).sum(axis=-1)
    wanted = 2 * cosines / math.sqrt(16) - math.sqrt(16)
    np.testing.assert_allclose(effect.alike, np.broadcast_to(wanted, (4, 513)), atol=1e-3)
    assert np.abs(effect.drawn[..., 0]).max() < 1e-5
    assert np.std(effect.drawn[..., 256:]) == pytest.approx(math.sqrt(2 - cosines[256:].mean() / 4), rel=0.05)


def test_drawn_kerple_is_its_formula_at_the_initial_parameters():
    encoding = effects.build("kerple_log")
    scale, rate = (np.log1p(np.exp(np.float64(raw[...]))) for raw in (encoding.scale, encoding.rate))
    wanted = -scale[:, None] * np.log1p(rate[:, None] * np.arange(513))
    np.testing.assert_allclose(effects.on_logits(encoding).drawn[0], wanted, rtol=1e-5, atol=1e-6)


def test_what_adds_nothing_at_first_is_drawn_with_random_parameters():
    effect = effects.on_logits(effects.build("cope", {"count": 9}))
    assert effect.redrawn and effect.drawn.std() > 0.003
    assert np.ptp(effect.drawn[..., 64:], axis=-1).max() < 1e-5 < np.ptp(effect.drawn[..., :8], axis=-1).min()


def test_a_table_of_positions_is_drawn_as_far_as_it_goes(tmp_path):
    assert effects.on_input(effects.build("learned")).shape == (128, 64)
    (axis, _) = cards.picture("learned", tmp_path / "learned.png").axes
    assert [text.get_text() for text in axis.texts] == ["no position from 128 on"]
    assert effects.on_logits(effects.build("sum", {"first": "learned"})).query == 127


def test_a_users_class_is_drawn(mine, tmp_path, capsys):
    assert cli.main(["encodings", "--plot", str(tmp_path / "there"), "--only", f"{mine}:Mine"]) == 0
    path = tmp_path / "there" / "Mine.png"
    assert capsys.readouterr().out == f"{path}\n" and path.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in path.parent.iterdir()] == ["Mine.png"]
    (axis,) = cards.picture(f"{mine}:Mine", tmp_path / "again.png").axes
    assert path.read_bytes() == (tmp_path / "again.png").read_bytes()
    assert axis.get_title(loc="left").startswith("Mine: added to q . k / sqrt(D)")
    np.testing.assert_allclose(axis.lines[0].get_ydata(), -0.5 * np.arange(513))


def test_what_acts_on_input_and_logits_has_two_panels(mine, tmp_path):
    axes = cards.picture(f"{mine}:Both", tmp_path / "both.png", {"slope": 0.25}).axes
    titles = [axis.get_title(loc="left").split("\n")[0] for axis in axes]
    assert titles[:2] == ["Both: added to the input", "Both: added to q . k / sqrt(D), query at position 512"]
    np.testing.assert_allclose(axes[1].lines[0].get_ydata(), -0.25 * np.arange(513))


def test_pictures_say_whether_a_line_is_of_a_head_or_of_all(mine, tmp_path):
    def entries(name):
        (axis,) = cards.picture(name, tmp_path / "picture.png").axes
        return [text.get_text() for text in axis.get_legend().get_texts()]

    assert entries("none") == entries(f"{mine}:Mine") == ["every head", "training length"]
    assert entries("alibi") == ["head 1", "head 2", "head 3", "head 4", "training length"]
    assert "10% to 90%" in entries("rope")[1] and entries("rope")[0] == "q = k = input\n= (1, ..., 1)"


def test_what_cannot_be_written_or_is_not_there_is_refused(mine, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "unknown encoding 'ropes'; allowed: none, sinusoidal" in refused(
        capsys, "--plot", "there", "--only", "ropes"
    )
    assert "defines no Encoding called 'Other'" in refused(capsys, "--plot", "there", "--only", f"{mine}:Other")
    assert not (tmp_path / "there").exists()
    assert "--only: goes with --plot" in refused(capsys, "--only", "rope")
    assert "--check: goes without" in refused(capsys, "--check", "rope", "--plot")
    assert "cannot write pictures here" in refused(capsys, "--plot", f"{mine}/there", "--only", "rope")
    assert "cannot write documentation here" in refused(capsys, "--docs", f"{mine}/encodings.md")
    assert "is a folder; name a file" in refused(capsys, "--docs", str(tmp_path))


def test_the_page_is_written_where_it_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cards, "markdown", lambda: "# ü\n")
    assert cli.main(["encodings", "--docs", str(tmp_path / "new" / "page.md")]) == 0
    assert (tmp_path / "new" / "page.md").read_text(encoding="utf-8") == "# ü\n"
    assert capsys.readouterr().out == f"{tmp_path}/new/page.md\n"


def test_redrawing_leaves_the_encoding_as_it_was():
    encoding = effects.build("cope", {"count": 9})
    first, second = (effects.on_logits(encoding).drawn for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert not np.asarray(encoding.table[...]).any()
