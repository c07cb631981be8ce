"""Prepared datasets of tensorflow-datasets are read as they are; what isn't there is refused at once with ways out."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from isolated import BLOCKED

from pe_ablation import data
from pe_ablation.config import ConfigError, DataConfig, TextConfig, TfdsConfig
from pe_ablation.data import tfds as source
from pe_ablation.data import tokens
from pe_ablation.data.documents import Split
from pe_ablation.data.tokenizers import ByteTokenizer

AWKWARD = "\ufeffé\u2028 <|endoftext|>\r\n".encode() + b"\xff\xc9"
TRAIN = [b"one", b"", b"two", b" \n", AWKWARD, b"four"]
TEST = [b"test %d" % index for index in range(4)]


class Small(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Examples with a text and other features, prepared without TensorFlow."""

    VERSION = tfds.core.Version("1.0.0")
    name = "small"
    pkg_dir_path = None
    splits: Any = None

    def _info(self):
        features = {
            "text": tfds.features.Text(), "title": tfds.features.Text(), "number": tfds.features.Scalar(np.int64),
            "parts": tfds.features.Sequence(tfds.features.Text()),
        }  # fmt: skip
        return tfds.core.DatasetInfo(
            builder=self, description="", features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(texts) for split, texts in self.splits.items()}

    def _generate_examples(self, texts):
        for index, text in enumerate(texts):
            yield index, {"text": text, "title": "a title", "number": index, "parts": ["a", "b"]}


class Configured(Small, skip_registration=True):
    name = "configured"
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=each) for each in ("en", "de")]  # noqa: RUF012


def prepare(folder, builder=Small, config=None, version="1.0.0", **splits):
    builder.VERSION = tfds.core.Version(version)
    made = builder(data_dir=folder, file_format="array_record", config=config)
    made.splits = splits
    with source.quiet(), contextlib.redirect_stderr(io.StringIO()):
        made.download_and_prepare()
    return made.data_path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensorflow_datasets")
    prepare(folder, train=TRAIN, test=TEST)
    prepare(folder, Configured, "en", train=[b"english"], test=[b"text"])
    prepare(folder, Configured, "de", train=[b"deutsch"], test=[b"text"])
    return folder


@pytest.fixture
def asked(prepared, tmp_path):
    def config(cache_dir="cache", train_bytes=None, **fields):
        named = TfdsConfig(**{"name": "small", "data_dir": str(prepared), **fields})
        return DataConfig(source="tfds", tfds=named, cache_dir=str(tmp_path / cache_dir), train_bytes=train_bytes)

    return config


def documents(config, split: Split = "train"):
    made = data.load(config, split)
    return [(made.names[at], ByteTokenizer().decode(made.document(at))) for at in range(len(made.names))]


def test_an_example_is_a_document_with_every_byte_it_has(asked):
    texts = [b"one", b"two", AWKWARD, b"four"]
    assert documents(asked()) == [(f"train[{at}]", text) for at, text in enumerate(texts)]
    assert documents(asked(), "test") == [(f"test[{at}]", text) for at, text in enumerate(TEST)]


def test_names_are_not_kept_and_survive_the_cache(asked, tmp_path):
    data.load(asked(), "train")
    again = data.load(asked(), "train")
    assert list(again.names) == again.names[:] == [f"train[{at}]" for at in range(4)]
    assert again.names[-1] == "train[3]"
    with pytest.raises(IndexError):
        again.names[4]
    (path,) = (tmp_path / "cache" / "tokens").iterdir()
    assert b'"names": {"numbered": "train", "count": 4}' in path.read_bytes()


def test_another_feature_and_a_part_of_a_split(asked):
    assert {content for _, content in documents(asked(text_field="title"))} == {b"a title"}
    parts = {"train": "train[:50%]", "validation": "train[50%:]"}
    assert documents(asked(**parts)) == [("train[:50%][0]", b"one"), ("train[:50%][1]", b"two")]
    assert documents(asked(**parts), "validation") == [("train[50%:][0]", AWKWARD), ("train[50%:][1]", b"four")]
    both = "test[3:]+train[:1]"
    assert documents(asked(train=both, test=None)) == [(f"{both}[0]", b"test 3"), (f"{both}[1]", b"one")]


def test_a_configuration_and_the_folder_from_the_environment(asked, prepared, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    assert documents(asked(name="configured/de", data_dir=None)) == [("train[0]", b"deutsch")]
    assert documents(asked(name="configured/en:1.0.0", data_dir=None)) == [("train[0]", b"english")]


def test_the_newest_version_unless_one_is_named(asked, tmp_path):
    for version in ("1.9.0", "1.10.0"):
        prepare(tmp_path / "versions", version=version, train=[version.encode()])
    (tmp_path / "versions" / "small" / "incomplete.ABC_2.0.0").mkdir()
    here = {"data_dir": str(tmp_path / "versions")}
    assert documents(asked(**here)) == [("train[0]", b"1.10.0")]
    assert documents(asked(name="small:1.9.0", **here)) == [("train[0]", b"1.9.0")]
    with pytest.raises(ConfigError, match=r"'small:2\.0\.0': .* has version 1\.9\.0, 1\.10\.0 alone"):
        documents(asked(name="small:2.0.0", **here))


def test_only_what_train_bytes_asks_for_is_read(asked, monkeypatch):
    read, original = [], source._read

    def counted(*args):
        for each in original(*args):
            read.append(each.name)
            yield each

    monkeypatch.setattr(source, "_read", counted)
    assert documents(asked(train_bytes=4)) == [("train[0]", b"one"), ("train[1]", b"t")]
    assert read == ["train[0]", "train[1]"]
    with pytest.raises(ConfigError, match=r"data\.train_bytes: 1,000 bytes asked of documents that have "):
        documents(asked(train_bytes=1000))


def test_documents_pass_one_at_a_time(asked, monkeypatch):
    """The next example is read only when the one before it is written: no list of them is ever held."""
    events, original = [], source._read

    def read(*args):
        for each in original(*args):
            events.append("read")
            yield each

    class Noted(ByteTokenizer):
        def encode(self, content):
            events.append("written")
            return super().encode(content)

    monkeypatch.setattr(source, "_read", read)
    corpus = source.corpus(asked().tfds, "train")
    tokens.TokenFile.encode(corpus.read(), Noted(), "document", "", corpus.numbered)
    assert events == ["read", "written"] * 4


def test_the_digest_is_of_the_examples_and_not_of_where_they_lie(asked, prepared, tmp_path):
    def digest(split: Split = "train", **fields):
        return data.load(asked(**fields), split).digest

    first = digest()
    shutil.copytree(prepared, tmp_path / "moved")
    assert digest(data_dir=str(tmp_path / "moved"), validation=None, name="small:1.0.0") == first
    prepare(tmp_path / "other", train=[*TRAIN[:-1], b"five"], test=TEST)
    prepare(tmp_path / "version", version="1.0.1", train=TRAIN, test=TEST)
    others = [
        digest(data_dir=str(tmp_path / "other")), digest(data_dir=str(tmp_path / "version")),
        digest(text_field="title"), digest(train="train[:3]"), digest(train="train[3:]"), digest("test"),
    ]  # fmt: skip
    assert len({first, *others}) == 1 + len(others)


def test_the_digest_reads_the_ends_of_a_file_alone(tmp_path):
    path = tmp_path / "file"
    content = bytearray(1 << 20)
    path.write_bytes(content)
    first = source._stamp(path)
    for at, seen in ((0, True), (len(content) - 1, True), (len(content) // 2, False)):
        changed = content.copy()
        changed[at] = 1
        path.write_bytes(changed)
        assert (source._stamp(path) != first) == seen
    path.write_bytes(content[:-1])
    assert source._stamp(path) != first


# Refused

REFUSED = {
    "no name": ({"name": None}, ["data.tfds.name: not set", "wiki40b/en"]),
    "no name of the kind": ({"name": "Wiki40B en"}, ["data.tfds.name: 'Wiki40B en' is not NAME[/CONFIG][:VERSION]"]),
    "a network": ({"data_dir": "gs://bucket/x"}, ["data.tfds.data_dir: 'gs://bucket/x' is on a network"]),
    "no configuration": ({"name": "configured"}, ["data.tfds.name", "as configured/de, configured/en"]),
    "other configuration": ({"name": "configured/dee"}, ["'configured/dee'", "configured/en (did you mean de?)"]),
    "unknown": ({"name": "lm1bb"}, ["'lm1bb' is no dataset", "(did you mean lm1b?)", "data.source to 'text'"]),
    "near one that is there": ({"name": "smal"}, ["'smal' is no dataset", "(did you mean small?)"]),
    "split": ({"train": "trian"}, [
        "data.tfds.train: 'trian' (did you mean train?)", "small has train (6 examples), test (4 examples)",
        "train[:99%]",
    ]),
    "no such examples": ({"train": "train[20:]"}, ["data.tfds.train: 'train[20:]'", "incompatible with 6 examples"]),
    "no examples": ({"train": "train[:0]"}, ["data.tfds.train: 'train[:0]' has no examples"]),
    "no expression": ({"train": "train[:5x]"}, ["data.tfds.train: 'train[:5x]'", "train (6 examples)"]),
    "split not configured": ({"train": None}, ["data.tfds.train: the train split", "not configured", "test (4 exam"]),
    "shared examples": ({"train": "train[:99%]", "validation": "train[3:]"}, [
        "data.tfds.train: 'train[:99%]' shares examples with data.tfds.validation = 'train[3:]'",
    ]),
    "feature": ({"text_field": "txt"}, ["data.tfds.text_field: 'txt' is not there (did you mean text?)", "title"]),
    "number": ({"text_field": "number"}, ["'number' is not text; small/1.0.0 has as text text, title"]),
    "several texts": ({"text_field": "parts"}, ["data.tfds.text_field: 'parts' is not text"]),
    "white space": ({"train": "train[1:2]"}, ["data.tfds.train: 'train[1:2]' has no text in 'text'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(asked, tmp_path, case):
    fields, expected = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        data.load(asked(**fields), "train")
    assert all(words in str(refusal.value) for words in expected), str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.glob("cache/tokens/*"))


def test_a_split_that_the_dataset_lacks_is_refused_when_it_is_asked_for(asked):
    documents(asked())
    with pytest.raises(ConfigError, match=r"data\.tfds\.validation: 'validation': Unknown split .* test \(4 e"):
        data.load(asked(), "validation")


def test_validation_and_test_may_not_be_the_same(asked):
    with pytest.raises(ConfigError, match=r"validation: 'test' shares examples with data\.tfds\.test = 'test'.* None"):
        data.load(asked(validation="test"), "validation")
    assert len(documents(asked(validation="test", test=None), "validation")) == 4


@pytest.mark.parametrize("name", ["lm1b", "wiki40b/en", "pg19", "c4/en", "tiny_shakespeare"])
def test_what_is_not_prepared_is_refused_with_both_ways_out(asked, prepared, name):
    with pytest.raises(ConfigError) as refusal:
        data.load(asked(name=name), "train")
    message = str(refusal.value)
    for words in (
        f"data.tfds.name: '{name}' is not prepared in {prepared} (there: configured, small;", "TensorFlow",
        "pip install 'pe_ablation[tfds-prepare]'",
        f"tfds.builder('{name}', data_dir='DIR', file_format='array_record')",
        "data.tfds.data_dir", "data.source to 'text'", "data.text.train",
    ):  # fmt: skip
        assert words in message
    assert "\n" not in message


def test_the_command_in_the_message_prepares(tmp_path, monkeypatch):
    """Its Python, with a builder that needs neither Beam nor a network, makes what is read here."""
    command = source._preparing("small").split('"')[1]
    monkeypatch.setattr(Small, "splits", {"train": [b"mine"]})
    monkeypatch.setattr(tfds, "builder", lambda name, **fields: Small(**fields))
    monkeypatch.chdir(tmp_path)
    Small.VERSION = tfds.core.Version("1.0.0")
    with source.quiet(), contextlib.redirect_stderr(io.StringIO()):
        exec(command)
    config = TfdsConfig(name="small", data_dir=str(tmp_path / "DIR"))
    assert list(source.corpus(config, "train").read()) == [("train[0]", b"mine")]


def test_other_formats_are_refused_by_name(asked, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "old")
    path = tmp_path / "old" / "configured" / "de" / "1.0.0" / "dataset_info.json"
    about = json.loads(path.read_bytes())
    path.write_text(json.dumps(about | {"fileFormat": "tfrecord"}))
    old = {"name": "configured/de", "data_dir": str(tmp_path / "old")}
    expected = r"is prepared as tfrecord; array_record alone .*builder\('configured/de:1\.0\.0'"
    with pytest.raises(ConfigError, match=expected):
        data.load(asked(**old), "train")


def test_a_folder_that_was_copied_in_part_is_refused(asked, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "half")
    (missing,) = (tmp_path / "half").glob("small/1.0.0/*train*")
    missing.unlink()
    with pytest.raises(ConfigError, match=f"data.tfds.train: {missing} is missing; copy the whole folder again"):
        data.load(asked(data_dir=str(tmp_path / "half")), "train")
    (tmp_path / "half" / "small" / "1.0.0" / "features.json").write_text('{"pythonClassName": "nowhere.Nothing"}')
    with pytest.raises(ConfigError, match=r"data\.tfds\.name: .*small/1\.0\.0 cannot be read: "):
        data.load(asked(data_dir=str(tmp_path / "half")), "train")


def test_fields_beside_another_source_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.tfds\.name: set, while data\.source is 'sotu'; .* 'tfds' to use it"):
        data.load(DataConfig(tfds=TfdsConfig(name="lm1b"), cache_dir=str(tmp_path)), "train")
    with pytest.raises(ConfigError, match=r"data\.text\.train: set, while data\.source is 'tfds'"):
        data.load(DataConfig(source="tfds", text=TextConfig(train="x"), cache_dir=str(tmp_path)), "train")


# Without TensorFlow and network

ISOLATED = (
    BLOCKED
    + """
from pe_ablation import data
from pe_ablation.config import ConfigError, DataConfig, TfdsConfig

folder, cache = sys.argv[1:]
for name in ("small", "lm1b", "wiki40b/en", "c4", "no_such_thing"):
    try:
        asked = TfdsConfig(name=name, data_dir=folder)
        made = data.load(DataConfig(source="tfds", tfds=asked, cache_dir=cache), "train")
        print(name, len(made.names))
    except ConfigError as error:
        print(str(error).split(" in ")[0].split("; ")[0])
print("tensorflow" in sys.modules)
"""
)


def test_neither_tensorflow_nor_the_network_is_asked(prepared, tmp_path):
    command = [sys.executable, "-W", "error:::pe_ablation", "-c", ISOLATED, str(prepared), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "small 4", "data.tfds.name: 'lm1b' is not prepared", "data.tfds.name: 'wiki40b/en' is not prepared",
        "data.tfds.name: 'c4' is not prepared",
        "data.tfds.name: 'no_such_thing' is no dataset of tensorflow-datasets, nor is it", "False",
    ], done.stderr  # fmt: skip
    assert done.stderr == ""
