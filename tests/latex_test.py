"""The LaTeX table: read back by a small parser of tabulars, since no LaTeX is needed to run the tests."""

import math
import re

import pytest
from report_test import finished, plan, read, store

from pe_ablation import report
from pe_ablation.latex import escape, to_latex

COMMANDS = {
    "begin", "end", "toprule", "midrule", "bottomrule", "multicolumn", "texttt", "pm", "dagger", "infty",
    "textbackslash", "textasciitilde", "textasciicircum",
}  # fmt: skip


def parsed(text):
    """(comments, column types, lines of cells) of a tabular; asserts that it is one that LaTeX takes."""
    lines = text.splitlines()
    comments = [line[2:] for line in lines if line.startswith("% ")]
    body = [line for line in lines if not line.startswith("%")]
    begin = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", body[0])
    assert begin and body[1] == r"\toprule" and body[-2:] == [r"\bottomrule", r"\end{tabular}"]
    rows = [line for line in body[2:-2] if line != r"\midrule"]
    found = []
    for line in rows:
        assert line.endswith(r" \\")
        bare = re.sub(r"\\[&%$#_{}]", "", line.removesuffix(r" \\"))
        assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
        assert not re.search(r"[%#~]", bare) and bare.isascii()
        assert not re.search(r"[_^]", re.sub(r"\$[^$]*\$", "", bare))
        assert set(re.findall(r"\\([a-z]+)", bare)) <= COMMANDS
        cells = re.split(r"(?<!\\)&", line.removesuffix(r" \\"))
        span = re.match(r"\\multicolumn\{(\d+)\}", line)
        assert (int(span[1]) if span else len(cells)) == len(begin[1])
        found.append([cell.strip() for cell in cells])
    return comments, begin[1], found


def test_the_table_has_every_cell_and_says_what_was_scored(tmp_path):
    for seed, shift in ((0, 0.0), (1, 0.2)):
        finished(tmp_path, "transformer_xl", seed, values=(2.0 + shift, 2.5, 3.0))
        learned = plan(tmp_path, "learned", seed)
        store(learned, 8, 2.0)
        store(learned, 16, math.nan, status="n/a")
        store(learned, 32, math.nan, status="OOM")
        learned.finish({"parameters": 1})
    finished(tmp_path, "alibi")
    plan(tmp_path, "alibi", 1)
    comments, columns, rows = parsed(to_latex(read(tmp_path), protocol="targets"))
    assert columns == "rlrrrr" and rows[0] == ["train length", "encoding", "seeds", "8", "16", "32"]
    assert rows[1] == ["8", "learned", "2", r"2.000 $\pm$ 0.000", "n/a", "OOM"]
    assert rows[2] == ["8", "alibi", "2", "-- (1/2)", "-- (1/2)", "-- (1/2)"]
    assert rows[3] == ["8", r"transformer\_xl", "2", *(rf"{mean} $\pm$ {sd}" for mean, sd in (
        ("2.100", "0.141"), ("2.500", "0.000"), ("3.000", "0.000"),
    ))]  # fmt: skip
    assert r"\texttt{window\_mask}" in rows[4][0] and rows[7][3:] == [
        "", r"2.200 $\pm$ 0.000", r"2.300 $\pm$ 0.000",
    ]  # fmt: skip
    told = " ".join(comments)
    for part in ("Bits per byte, protocol targets, split validation", "120 tokens in 3 documents", "Seeds 0, 1"):
        assert part in told


def test_numbers_that_are_none_and_daggers_have_signs(tmp_path):
    run = plan(tmp_path)
    store(run, 8, math.inf)
    store(run, 16, math.nan)
    store(run, 32, 3.0)
    rows = read(tmp_path)
    rows.loc[rows.eval_length != 16, "untrained"] = "True"
    comments, _, lines = parsed(to_latex(rows, protocol="targets"))
    assert lines[1][3:] == [r"$\infty$$^{\dagger}$", "NaN", r"3.000$^{\dagger}$"]
    assert "no training gradient" in " ".join(comments)


def test_signs_stand_for_whole_words(tmp_path):
    finished(tmp_path, values=(-math.inf, 2.5, -1.0))
    store(plan(tmp_path, "alibi"), 8, -1.5)
    plan(tmp_path, "alibi", 1).finish({"status": "diverged"})
    plan(tmp_path, "alibi", 2)
    rows = parsed(to_latex(read(tmp_path), protocol="targets"))[2]
    assert rows[1][3:] == [r"$-\infty$", "2.500", "-1.000"] and rows[2][3] == "diverged, -- (1/3)"


def test_training_lengths_are_ruled_off(tmp_path):
    finished(tmp_path)
    finished(tmp_path, length=16, lengths=(16, 32), values=(2.0, 3.0), masked=(2.0,))
    text = to_latex(read(tmp_path), protocol="targets")
    _, _, rows = parsed(text)
    assert [row[0] for row in rows[1:3]] == ["8", "16"] and "\\\\\n\\midrule\n16 " in text


@pytest.mark.parametrize("plain, escaped", [
    ("t5_128 (learning_rate=0.01)", r"t5\_128 (learning\_rate=0.01)"),
    ("50% & #1 {a} $x$", r"50\% \& \#1 \{a\} \$x\$"),
    ("C:\\a~b^c", r"C:\textbackslash{}a\textasciitilde{}b\textasciicircum{}c"),
    ("1 ± 2†", r"1 $\pm$ 2$^{\dagger}$"),
])  # fmt: skip
def test_what_latex_would_misread_is_escaped(plain, escaped):
    assert escape(plain) == escaped


def test_a_label_with_a_dash_keeps_it(tmp_path):
    finished(tmp_path, overrides={"label": "a - b_inf"})
    assert parsed(to_latex(read(tmp_path), protocol="targets"))[2][1][1] == r"a - b\_inf"


def test_the_report_writes_it(tmp_path):
    store(finished(tmp_path), 8, 2.0, protocol="blocks")
    report.write(tmp_path, tmp_path / "out")
    assert "protocol targets" in (tmp_path / "out" / "table.tex").read_text()
    parsed((tmp_path / "out" / "table_2.tex").read_text())
