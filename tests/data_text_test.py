"""A user's own text: which bytes become which documents of which split, and what is refused."""

import json
import os
import re

import numpy as np
import pytest

from pe_ablation import data
from pe_ablation.config import ConfigError, DataConfig, TextConfig
from pe_ablation.data import text
from pe_ablation.data.documents import SPLITS, Split

AWKWARD = b"\xef\xbb\xbfab\r\nc\xe2\x80\xa8d\xe2\x80\xa9e\xc2\x85f \xc9 <|endoftext|>g\r\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def documents(split: Split = "train", **fields):
    return [(each.name, each.content) for each in text.corpus(TextConfig(**fields), split).read()]


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_folder_is_a_document_a_file_sorted_by_name_without_hidden_files(folder):
    write(folder, t__b=b"two", t__a=b"one", t__sub__c=b"three")
    write(folder, **{"t__.DS_Store": b"\0\1", "t__.git__x": b"no"})
    assert documents(train="t") == [("a", b"one"), ("b", b"two"), ("sub/c", b"three")]


@pytest.mark.parametrize("pattern", ["t/*.txt", "t/**/*.txt"])
def test_glob_is_sorted_and_leaves_other_files_out(folder, pattern):
    write(folder, **{"t__b.txt": b"two", "t__a.txt": b"one", "t__c.md": b"no"})
    assert documents(train=pattern) == [("a.txt", b"one"), ("b.txt", b"two")]


def test_home_folder_and_single_file(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    write(folder, mine=b"text")
    assert documents(validation="~/mine", split="validation") == [("mine", b"text")]


@pytest.mark.parametrize("fields", [
    {"train": "t", "validation": "t"}, {"train": "t/*", "validation": "t/a"}, {"train": "t", "test": "link"},
])  # fmt: skip
@pytest.mark.parametrize("backwards", [False, True])
def test_a_file_in_two_splits_is_told(folder, fields, backwards, caplog):
    write(folder, t__a=b"one", t__b=b"two")
    (folder / "link").symlink_to("t/a")
    one, other = reversed(fields) if backwards else fields
    assert documents(**fields, split=one)
    assert re.search(rf"data\.text\.{one}: .*t/a is in data\.text\.{other} too", caplog.text)


def test_a_split_that_is_missing_is_told_where_it_is_asked_for(folder):
    write(folder, t__a=b"one")
    assert documents(train="t", validation="gone") == [("a", b"one")]


def test_an_empty_path_is_not_the_working_directory(folder):
    write(folder, a=b"one")
    with pytest.raises(ConfigError, match=r"data\.text\.train: empty"):
        documents(train="")


def test_every_byte_is_kept(folder):
    write(folder, t__x=AWKWARD)
    assert documents(train="t") == [("x", AWKWARD)]
    config = DataConfig(source="text", text=TextConfig(train="t"), bos="none", cache_dir="cache")
    np.testing.assert_array_equal(data.load(config, "train").document(0), [*AWKWARD, 257])


def test_only_the_separator_separates(folder):
    write(folder, x="a\u2028b\u0085c\nd\n".encode())
    found = documents(train="x", separator="\n")
    assert found == [("x[0]", "a\u2028b\u0085c".encode()), ("x[1]", b"d")]


@pytest.mark.parametrize(
    "typed, expected",
    [
        (r"\n\n", b"\n\n"),
        (r"\r\n", b"\r\n"),
        (r"\t", b"\t"),
        (r"\\n", rb"\n"),
        (r"\d", rb"\d"),
        ("\n", b"\n"),
        ("é", b"\xc3\xa9"),
    ],
)
def test_separator_escapes(typed, expected):
    assert text.separator_bytes(typed) == expected


def test_pieces_of_white_space_are_no_documents(folder):
    write(folder, x=b"<s>a\n<s><s> \n<s>b<s>\n")
    assert documents(train="x", separator="<s>") == [("x[0]", b"a\n"), ("x[1]", b"b")]


def test_separated_file_is_dealt_by_index(folder):
    write(folder, x=b"|".join(b"%d" % index for index in range(23)))
    dealt = {s: [int(c) for _, c in documents(s, file="x", separator="|")] for s in SPLITS}
    assert dealt["validation"] == [4, 14]
    assert dealt["test"] == [9, 19]
    assert sorted(dealt["train"] + dealt["validation"] + dealt["test"]) == list(range(23))


def test_byte_ranges_are_one_document_each(folder):
    write(folder, x=bytes(range(65, 85)))
    ranges = {"train_bytes": (0, 12), "validation_bytes": (12, 15), "test_bytes": (15, 20)}
    assert documents("train", file="x", **ranges) == [("x[0:12]", b"ABCDEFGHIJKL")]
    assert documents("validation", file="x", **ranges) == [("x[12:15]", b"MNO")]
    assert documents("test", file="x", **ranges) == [("x[15:20]", b"PQRST")]


REFUSED = {
    "nothing": ({}, ["data.text:", "data.text.train", "data.text.file"]),
    "missing": ({"train": "nowhere"}, ["data.text.train", "'nowhere'", "missing"]),
    "no match": ({"train": "full/*.md"}, ["data.text.train", "'full/*.md'", "no file"]),
    "empty folder": ({"train": "bare"}, ["data.text.train", "'bare'", "no files"]),
    "empty file": ({"train": "void"}, ["data.text.train", "void", "empty"]),
    "white space": ({"train": "blank"}, ["data.text.train", "blank", "empty"]),
    "separators only": ({"train": "bars", "separator": "|"}, ["data.text.train", "bars", "empty"]),
    "binary": ({"train": "binary"}, ["data.text.train", "binary", "NUL at byte 3"]),
    "binary one file": ({"file": "binary", "separator": "|"}, ["data.text.file", "binary", "NUL at byte 3"]),
    "split not configured": ({"validation": "full"}, ["data.text.train", "not configured"]),
    "range not configured": ({"file": "ten", "test_bytes": (0, 5)}, ["data.text.train_bytes", "not configured"]),
    "file and paths": ({"file": "ten", "train": "full", "separator": "|"}, ["data.text.file", "data.text.train"]),
    "file alone": ({"file": "ten"}, ["data.text.file", "data.text.separator", "data.text.train_bytes"]),
    "file missing": ({"file": "nowhere", "separator": "|"}, ["data.text.file", "'nowhere'", "missing"]),
    "file is a folder": ({"file": "full", "separator": "|"}, ["data.text.file", "'full'", "folder"]),
    "empty separator": ({"train": "full", "separator": ""}, ["data.text.separator", "''"]),
    "range and separator": (
        {"file": "ten", "separator": "|", "train_bytes": (0, 5)},
        ["data.text.separator", "data.text.train_bytes"],
    ),
    "range without file": ({"train": "full", "train_bytes": (0, 5)}, ["data.text.train_bytes", "data.text.file"]),
    "reversed": ({"file": "ten", "train_bytes": (5, 5)}, ["data.text.train_bytes", "(5, 5)", "start < stop"]),
    "negative": ({"file": "ten", "train_bytes": (-1, 5)}, ["data.text.train_bytes", "(-1, 5)"]),
    "three numbers": ({"file": "ten", "train_bytes": (0, 2, 5)}, ["data.text.train_bytes", "(0, 2, 5)"]),
    "past the end": ({"file": "ten", "train_bytes": (0, 11)}, ["data.text.train_bytes", "(0, 11)", "10"]),
    "other range past the end": (
        {"file": "ten", "train_bytes": (0, 5), "test_bytes": (5, 99)},
        ["data.text.test_bytes", "(5, 99)", "10"],
    ),
    "overlap": (
        {"file": "ten", "train_bytes": (0, 5), "test_bytes": (4, 10)},
        ["data.text.test_bytes", "(4, 10)", "data.text.train_bytes", "(0, 5)"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(folder, case):
    write(folder, full__x=b"x", void=b"", blank=b" \n", bars=b"|| |", binary=b"abc\0d", ten=b"0123456789")
    (folder / "bare").mkdir()
    fields, expected = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        data.load(DataConfig(source="text", text=TextConfig(**fields), cache_dir="cache"), "train")
    assert all(words in str(refusal.value) for words in expected), str(refusal.value)
    assert not (folder / "cache").exists()


# JSON lines


def lines(*rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def test_a_line_is_a_document(folder):
    rows = [{"text": "one\u2028\u2029\x85two"}, {"id": 3, "text": "naïve 日本語 😀\r\n"}, {"text": "\0 <|endoftext|>"}]
    write(folder, **{"t__b.jsonl": lines(*rows), "t__a.jsonl": b'{"text":"first"}'})
    assert documents(train="t", field="text") == [
        ("a.jsonl:1", b"first"), *((f"b.jsonl:{at}", row["text"].encode()) for at, row in enumerate(rows, 1)),
    ]  # fmt: skip


def test_escapes_become_utf_8_and_both_halves_of_a_pair_one_character(folder):
    write(folder, x=rb'{"text": "\u00e9\ud83d\ude00\n\"\/\u0000"}')
    assert documents(train="x", field="text") == [("x:1", 'é😀\n"/\0'.encode())]


def test_lines_and_documents_without_text_are_left_out_and_lines_counted(folder):
    write(folder, x=b'{"text": ""}\r\n\n{"text": " \\n"}\n  \n{"text": "e"}\r\n\n')
    assert documents(train="x", field="text") == [("x:5", b"e")]


def test_one_file_of_json_lines_is_dealt_by_index(folder):
    write(folder, **{"x.jsonl": lines(*({"text": str(index)} for index in range(20)))})
    dealt = {s: [int(c) for _, c in documents(s, file="x.jsonl", field="text")] for s in SPLITS}
    assert (dealt["validation"], dealt["test"], len(dealt["train"])) == ([4, 14], [9, 19], 16)
    write(folder, **{"y.jsonl": lines({"text": "alone"})})
    with pytest.raises(ConfigError, match=r"data\.text\.file: 'y\.jsonl' has 1 documents under 'text', none for test"):
        documents("test", file="y.jsonl", field="text")


BROKEN = {
    "half a line": (b'{"text": "b', "not JSON: Unterminated string starting at at character 9 of the line"),
    "two objects": (b'{"text": "b"} {"text": "c"}', "not JSON: Extra data at character 14"),
    "single quotes": (b"{'text': 'b'}", "not JSON: Expecting property name"),
    "no object": (b'["b"]', "expected an object, got list"),
    "no field": (b'{"Text": "b", "id": 1}', "no field 'text' (did you mean Text?); there: 'Text', 'id'"),
    "nothing": (b"{}", "no field 'text'; there: none"),
    "a number": (b'{"text": 3}', "'text' is no text but int"),
    "null": (b'{"text": null}', "'text' is no text but NoneType"),
    "NaN": (b'{"text": "b", "x": NaN}', "not JSON: NaN"),
    "not UTF-8": (b'{"text": "b\xc9"}', "not UTF-8 at byte 11 of the line"),
    "half of a pair": (rb'{"text": "b\ud83d c"}', "'text' has half of a surrogate pair at character 1"),
    "control character": (b'{"text": "b\tc"}', "not JSON: Invalid control character at"),
    "deep": (b'{"text": "b", "x": ' + b"[" * 200_000, "nested too deeply"),
    "mark": (b'\xef\xbb\xbf{"text": "b"}', "not JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_refused_with_file_and_number(folder, case):
    line, expected = BROKEN[case]
    write(folder, **{"t__a.jsonl": b'{"text": "a"}\n\n' + line + b"\n"})
    with pytest.raises(ConfigError) as refusal:
        documents(train="t/*.jsonl", field="text")
    assert str(refusal.value).startswith("data.text.train: a.jsonl:3: ")
    assert expected in str(refusal.value)


@pytest.mark.parametrize("fields, expected", [
    ({"train": "x", "field": "text", "separator": "\n"}, "data.text.field: given with data.text.separator"),
    ({"file": "x", "field": "text", "train_bytes": (0, 5)}, "data.text.field: given with data.text.train_bytes"),
    ({"train": "y.jsonl"}, "data.text.train: 'y.jsonl' is JSON lines; name the field"),
    ({"train": "blank", "field": "text"}, "data.text.train: 'blank' is empty: nothing under 'text'"),
])  # fmt: skip
def test_json_lines_that_cannot_be_read_as_asked_are_refused(folder, fields, expected):
    write(folder, **{"x": b'{"text": "a"}', "y.jsonl": b'{"text": "a"}', "blank": b'{"text": ""}'})
    with pytest.raises(ConfigError) as refusal:
        documents(**fields)
    assert str(refusal.value).startswith(expected)


def test_too_few_documents_to_deal(folder):
    write(folder, x=b"a|b|c|d")
    with pytest.raises(ConfigError, match=r"data\.text\.file: 'x' has 4 documents .* none for validation"):
        documents("validation", file="x", separator="|")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(folder):
    write(folder, x=b"secret")
    (folder / "x").chmod(0)
    with pytest.raises(ConfigError, match=r"data\.text\.train: cannot read 'x'"):
        documents(train="x")
