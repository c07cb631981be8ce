"""The default corpus: exactly the package's bytes, prepared once, with neither TensorFlow nor a network."""

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from isolated import BLOCKED

from pe_ablation import data
from pe_ablation.config import ConfigError, DataConfig, TextConfig
from pe_ablation.data import tokenizers
from pe_ablation.data.documents import Split
from pe_ablation.data.sotu import package, prepared

EXPECTED: dict[Split, tuple[int, int]] = {
    "train": (190, 9_647_208),
    "validation": (24, 1_194_459),
    "test": (23, 1_105_632),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("split", EXPECTED)
def test_splits_have_their_documents_and_bytes(cache, split):
    made = data.load(DataConfig(cache_dir=str(cache)), split)
    documents, size = EXPECTED[split]
    assert len(made.names) == documents
    assert len(made.tokens) == size + 2 * documents
    assert ((made.tokens == 256).sum(), (made.tokens == 257).sum()) == (documents, documents)
    assert tokenizers.ByteTokenizer().bytes_per_token[made.tokens].sum() == size


def test_documents_are_the_files_of_the_package(cache):
    distribution = importlib.metadata.distribution("sotu")
    paths = {
        Path(file).stem: distribution.locate_file(file) for file in distribution.files or () if file.suffix == ".txt"
    }
    names = set()
    for split in EXPECTED:
        made = data.load(DataConfig(cache_dir=str(cache)), split)
        lengths = [len(made.document(index)) for index in range(len(made.names))]
        assert lengths == sorted(lengths, reverse=True)
        names |= set(made.names)
        for index in (0, len(made.names) - 1):
            content = Path(str(paths[made.names[index]])).read_bytes()
            assert tokenizers.ByteTokenizer().decode(made.document(index)) == content
    assert len(names) == 237


def test_no_address_is_read_where_the_token_file_is_there(cache, monkeypatch):
    first = data.load(DataConfig(cache_dir=str(cache)), "validation")
    monkeypatch.setattr(prepared, "documents", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(package, "addresses", lambda: pytest.fail("read"))
    assert data.load(DataConfig(cache_dir=str(cache)), "validation").digest == first.digest


def address(content, split: Split = "train"):
    return package.Address(f"{split}-1", content, hashlib.sha256(content).hexdigest(), split)


def test_prepared_bytes_need_not_be_utf8_and_preparing_is_silent(tmp_path, monkeypatch, capfd):
    awkward = b"\xef\xbb\xbf\xff\xfe\xc9 a\r\nb\0\x85 \xe2\x80\xa8\n"
    given = [address(awkward), address(b"v", "validation"), address(b"t", "test")]
    monkeypatch.setattr(package, "addresses", lambda: given)
    assert prepared.documents("train", tmp_path) == [("train-1", awkward)]
    assert capfd.readouterr() == ("", "")
    assert [each.name for each in tmp_path.iterdir()] == [f"sotu-{package.digest()[:16]}"]


def test_prepared_dataset_that_holds_other_text_is_refused(tmp_path, monkeypatch):
    given = [address(b"one"), address(b"v", "validation"), address(b"t", "test")]
    monkeypatch.setattr(package, "addresses", lambda: given)
    prepared.documents("train", tmp_path)
    given[0] = address(b"two")
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*delete that folder"):
        prepared.documents("train", tmp_path)


def test_changed_file_is_refused_by_name(tmp_path, monkeypatch):
    files = package._files()
    changed = tmp_path / "1790-Washington-1.txt"
    changed.write_bytes(files[changed.name].read_bytes() + b" ")
    monkeypatch.setattr(package, "_files", lambda: {**files, changed.name: changed})
    with pytest.raises(ConfigError, match=r"1790-Washington-1\.txt has sha256 [0-9a-f]{64}, the package's metadata"):
        package.addresses()


def test_file_that_is_no_address_is_verified_too(tmp_path, monkeypatch):
    files = package._files()
    addresses = {f"{each.fileid}.txt" for each in package.addresses()}
    other = min(name for name in files if name.endswith(".txt") and name[:4].isdigit() and name not in addresses)
    changed = tmp_path / other
    changed.write_bytes(b"something else")
    monkeypatch.setattr(package, "_files", lambda: {**files, other: changed})
    with pytest.raises(ConfigError, match=other.replace(".", r"\.")):
        package.addresses()


def test_missing_package_is_named_with_the_way_out(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package.importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r"data\.source: 'sotu' needs .*sotu==0\.1\.2.*data\.text\.train"):
        data.load(DataConfig(cache_dir=str(tmp_path / "cache")), "train")
    assert not (tmp_path / "cache").exists()


def test_other_version_is_refused(monkeypatch):
    monkeypatch.setattr(package, "VERSION", "9.9")
    with pytest.raises(ConfigError, match=r"needs sotu==9\.9, found 0\.1\.2"):
        package.digest()


def test_text_fields_beside_this_corpus_are_refused(tmp_path):
    config = DataConfig(text=TextConfig(validation="mine"), cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.text\.validation: set, while data\.source is 'sotu'"):
        data.load(config, "train")


ISOLATED = (
    BLOCKED
    + """
from pe_ablation import data
from pe_ablation.config import DataConfig, TextConfig

folder, cache = sys.argv[1:]
mine = DataConfig(source="text", text=TextConfig(train=folder), cache_dir=cache)
for config in (mine, DataConfig(cache_dir=cache)):
    tokens = data.load(config, "train")
    batch = next(data.Batches(tokens, block=8, batch_tokens=16, length=4, seed=0, bos=config.bos))
    print(len(tokens.stored), batch.shape, "tensorflow" in sys.modules)
"""
)


def test_two_processes_at_once_without_tensorflow_or_network(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_bytes(b"some text of mine")
    command = [
        sys.executable,
        "-W",
        "error:::pe_ablation",
        "-c",
        ISOLATED,
        str(tmp_path / "mine"),
        str(tmp_path / "cache"),
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out == "19 (4, 5) False\n9647588 (4, 5) False\n"
        assert err == ""
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.name.startswith(".")]
    assert left == []
