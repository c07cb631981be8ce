"""Tokenizer, token files, and the cache that holds them."""

import dataclasses

import numpy as np
import pytest

from pe_ablation import data
from pe_ablation.config import ConfigError, DataConfig, TextConfig
from pe_ablation.data import tokenizers, tokens
from pe_ablation.data.documents import Document, Split, TooShort, prefix
from pe_ablation.data.tokens import TokenFile, TokenFileError

BOS, EOS = 256, 257
BYTE = tokenizers.ByteTokenizer()


class Wide(tokenizers.ByteTokenizer):
    """Bytes as ids, with special ids that need more than 16 bits."""

    name = "wide"
    vocab_size, bos, eos = 70002, 70000, 70001


@pytest.fixture
def config(tmp_path):
    write(tmp_path / "train", a=b"first", b=b"second")
    return DataConfig(source="text", text=TextConfig(train=f"{tmp_path}/train"), cache_dir=f"{tmp_path}/cache")


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def cached(tmp_path):
    return sorted((tmp_path / "cache" / "tokens").iterdir())


def sample(tokenizer=BYTE, bos="document"):
    return TokenFile.encode([Document("a", b"xy"), Document("b", b"z")], tokenizer, bos, "0" * 64)


def test_byte_tokenizer_keeps_all_bytes_and_never_yields_specials():
    content = bytes(range(256)) + b"a<|endoftext|>b"
    ids = BYTE.encode(content)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(content)
    assert BYTE.decode(ids) == content
    assert BYTE.decode(np.array([BOS, 104, 105, EOS])) == b"hi"


def test_byte_tokenizer_counts_bytes():
    sizes = BYTE.bytes_per_token
    assert (BYTE.vocab_size, BYTE.bos, BYTE.eos) == (258, BOS, EOS)
    assert sizes.dtype == np.int32
    assert sizes.tolist() == [1] * 256 + [0, 0]


@pytest.mark.parametrize("wrong", [-1, 258])
def test_decode_refuses_what_is_no_id(wrong):
    with pytest.raises(ValueError, match=f"id {wrong} is not one of 0 to 257"):
        BYTE.decode(np.array([65, wrong]))


def test_unknown_tokenizer_is_refused_with_the_field():
    with pytest.raises(ConfigError, match=r"data\.tokenizer: 'bpr' is not known; allowed: byte, bpe, gpt2"):
        data.tokenizer(DataConfig(tokenizer="bpr"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bos", ["none", "document", "window"])
def test_documents_are_framed_by_special_tokens(bos):
    head = [BOS] if bos == "document" else []
    made = sample(bos=bos)
    assert made.tokens.tolist() == [*head, *b"xy", EOS, *head, *b"z", EOS]
    assert made.tokens.dtype == np.int32
    assert made.starts.tolist() == [0, 3 + len(head), 5 + 2 * len(head)]
    assert made.document(1).tolist() == [*head, *b"z", EOS]


def test_control_text_in_a_document_is_thirteen_bytes():
    made = TokenFile.encode([Document("a", b"a<|endoftext|>b")], BYTE, "document", "")
    assert len(made.tokens) == 1 + 15 + 1
    assert (made.tokens == EOS).sum() == len(made.names)
    assert BYTE.decode(made.document(0)) == b"a<|endoftext|>b"


def test_prefix_cuts_the_last_document():
    whole = [Document("a", b"abc"), Document("b", b"def"), Document("c", b"g")]
    assert list(prefix(whole, 3)) == [("a", b"abc")]
    assert list(prefix(whole, 5)) == [("a", b"abc"), ("b", b"de")]
    assert list(prefix(whole, 7)) == whole
    with pytest.raises(TooShort, match="8 bytes asked of documents that have 7"):
        list(prefix(whole, 8))


def test_prefix_reads_no_further_than_it_needs():
    def documents():
        yield Document("a", b"abc")
        yield Document("b", b"def")
        pytest.fail("read on")

    assert list(prefix(documents(), 6)) == [("a", b"abc"), ("b", b"def")]


@pytest.mark.parametrize("tokenizer, dtype", [(BYTE, np.uint16), (Wide(), np.int32)])
def test_file_round_trip(tmp_path, tokenizer, dtype):
    made = sample(tokenizer)
    made.write(tmp_path / "x")
    found = TokenFile.read(tmp_path / "x", tokenizer)
    assert found.stored.dtype == dtype
    np.testing.assert_array_equal(found.tokens, made.tokens)
    np.testing.assert_array_equal(found.starts, made.starts)
    assert (found.names, found.digest, found.vocab_size) == (made.names, made.digest, made.vocab_size)


def test_any_damage_is_noticed(tmp_path):
    path = tmp_path / "x"
    sample().write(path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(TokenFileError, match="x: "):
            TokenFile.read(path, BYTE)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(TokenFileError, match="x: "):
            TokenFile.read(path, BYTE)


def test_file_of_another_tokenizer_is_refused(tmp_path):
    sample(Wide()).write(tmp_path / "x")
    with pytest.raises(TokenFileError, match=r"tokenizer 'wide' with 70002 ids; asked for 'byte' with 258"):
        TokenFile.read(tmp_path / "x", BYTE)


def test_file_of_another_origin_is_refused(tmp_path):
    sample().write(tmp_path / "x")
    with pytest.raises(TokenFileError, match=f"made from {'0' * 64}; asked for {'1' * 64}"):
        TokenFile.read(tmp_path / "x", BYTE, "1" * 64)


def test_file_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "FORMAT", 2)
    sample().write(tmp_path / "x")
    monkeypatch.undo()
    with pytest.raises(TokenFileError, match="format 2; this version reads format 1"):
        TokenFile.read(tmp_path / "x", BYTE)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    sample().write(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        sample(bos="none").write(tmp_path / "x")
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == before


@pytest.mark.parametrize(
    "ids, starts",
    [([1, 258], [0, 2]), ([-1, 2], [0, 2]), ([1, 2], [0, 3]), ([1, 2], [1, 2]), ([1, 2], [0, 1, 2]), ([], [0, 0])],
)
def test_token_file_that_contradicts_itself_is_refused(ids, starts):
    with pytest.raises(TokenFileError):
        TokenFile(np.array(ids, np.int32), np.array(starts), ("a",), "", 258)


def test_second_load_finds_the_first_ones_file(config, tmp_path):
    first = data.load(config, "train")
    (path,) = cached(tmp_path)
    before = path.stat()
    second = data.load(config, "train")
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert second.digest == first.digest
    np.testing.assert_array_equal(second.tokens, [BOS, *b"first", EOS, BOS, *b"second", EOS])


def test_damaged_cache_is_built_again(config, tmp_path, caplog):
    whole = data.load(config, "train")
    (path,) = cached(tmp_path)
    content = path.read_bytes()[:-3]
    path.unlink()  # `whole` is mapped from it
    path.write_bytes(content)
    again = data.load(config, "train")
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    assert "building a token file again" in caplog.text
    assert str(path) in caplog.text
    TokenFile.read(path, BYTE, whole.digest)


def test_key_changes_with_all_that_makes_the_tokens_and_nothing_else(config, tmp_path):
    def key(split: Split = "train", **changes):
        return data.load(dataclasses.replace(config, **changes), split).digest

    first = key()
    (tmp_path / "train").rename(tmp_path / "moved")
    moved = TextConfig(train=f"{tmp_path}/moved", validation=f"{tmp_path}/moved")
    assert key(text=moved, cache_dir=f"{tmp_path}/elsewhere", block=128) == first
    others = [
        key(text=moved, bos="none"), key(text=moved, bos="window"), key(text=moved, train_bytes=7),
        key("validation", text=moved),
    ]  # fmt: skip
    assert key("validation", text=moved, train_bytes=7) == others[-1]
    write(tmp_path / "moved", b=b"seconD")
    others.append(key(text=moved))
    (tmp_path / "moved" / "b").rename(tmp_path / "moved" / "c")
    others.append(key(text=moved))
    assert len({first, *others}) == 1 + len(others)


def test_train_bytes_keeps_a_prefix_of_the_training_split_alone(config):
    config = dataclasses.replace(
        config, train_bytes=7, text=TextConfig(train=config.text.train, test=config.text.train)
    )
    assert data.load(config, "train").tokens.tolist() == [BOS, *b"first", EOS, BOS, *b"se", EOS]
    assert BYTE.decode(data.load(config, "test").tokens) == b"firstsecond"


def test_train_bytes_past_the_end_is_refused(config):
    with pytest.raises(ConfigError, match=r"data\.train_bytes: 12 bytes asked of documents that have 11 in all"):
        data.load(dataclasses.replace(config, train_bytes=12), "train")


def test_cache_folder_that_is_none_is_refused(config, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"data\.cache_dir: cannot write to .*cache'"):
        data.load(config, "train")


def test_cache_folder_from_the_environment(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PE_ABLATION_CACHE", str(tmp_path / "cache"))
    data.load(dataclasses.replace(config, cache_dir=None), "train")
    assert len(cached(tmp_path)) == 1


def test_unknown_split_is_refused(config):
    with pytest.raises(ConfigError, match="'valid' is not allowed; allowed: train, validation, test"):
        data.load(config, "valid")  # pyright: ignore[reportArgumentType]
