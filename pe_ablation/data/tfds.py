"""Any text dataset of tensorflow-datasets that lies prepared as array_record: read without TensorFlow, Beam or network.

Nothing is ever downloaded or prepared here: what is not on this machine is refused, in seconds, with how to get it. An
example is a document. In datasets of sentences (lm1b) documents are therefore short: training windows cross them,
evaluation windows never do, and a length that no document has is refused.
"""

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from pe_ablation.config import ConfigError, TfdsConfig, near
from pe_ablation.data.documents import SPLITS, Corpus, Document, Split

_NAME = re.compile(r"(?P<name>[a-z]\w*)(/(?P<config>[\w+.-]+))?(:(?P<version>\d+\.\d+\.\d+))?")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_SAMPLE = 1 << 16  # bytes at both ends of a file that stand for its content
_INSTEAD = "set data.source to 'text' and data.text.train, data.text.validation to your own files"


def corpus(config: TfdsConfig, split: Split) -> Corpus:
    """The documents of `split`, in the order of the prepared dataset, read one by one; those without text are left out.

    The digest is over name, configuration, version, feature, and the examples' files: name, size, 64 KiB at both ends.
    Raises ConfigError with the field's path: a dataset that is not prepared as array_record, a split or a text feature
    that it does not have, splits that share examples.
    """
    folder = _folder(config)
    with quiet():
        builder = _builder(folder)
        found = _instructions(builder, config, split)
        _check_disjoint(builder, config, split, found)
        _check_text(builder, config.text_field)
    expression = str(getattr(config, split))
    return Corpus(_digest(builder, config, found), lambda: _read(builder, config, split), expression)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep tensorflow-datasets' prints and info lines from the terminal; warnings and errors pass."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(min(verbosity, logging.WARNING))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _folder(config: TfdsConfig) -> Path:
    """Where the dataset lies: ROOT/NAME[/CONFIG]/VERSION, the newest version unless one is named."""
    if config.name is None:
        raise ConfigError("data.tfds.name: not set; name a dataset of tensorflow-datasets, as in 'wiki40b/en'")
    asked = _NAME.fullmatch(config.name)
    if asked is None:
        raise ConfigError(f"data.tfds.name: {config.name!r} is not NAME[/CONFIG][:VERSION], as in wiki40b/en:1.3.0")
    root = _root(config)
    holder = root / asked["name"] / (asked["config"] or "")
    versions = _versions(holder)
    if not versions:
        raise ConfigError(_unprepared(config.name, asked["name"], asked["config"], root))
    version = asked["version"] or versions[-1]
    if version not in versions:
        raise ConfigError(f"data.tfds.name: {config.name!r}: {holder} has version {', '.join(versions)} alone")
    return holder / version


def _root(config: TfdsConfig) -> Path:
    given = config.data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    if "://" in given:
        raise ConfigError(f"data.tfds.data_dir: {given!r} is on a network; copy it, and give a folder on this machine")
    return Path(given).expanduser().absolute()


def _versions(holder: Path) -> list[str]:
    """Versions that lie whole in a folder, the newest last."""
    whole = [path.parent for path in holder.glob("*/features.json") if path.with_name("dataset_info.json").exists()]
    found = [path.name for path in whole if _VERSION.fullmatch(path.name)]
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")])


def _unprepared(given: str, name: str, chosen: str | None, root: Path) -> str:
    """Why there is nothing to read: a configuration that isn't named, a name that nobody knows, or never prepared."""
    configs = sorted(path.name for path in root.glob(f"{name}/*") if _versions(path))
    if configs:
        close = near(chosen, configs) if chosen else ""
        return (
            f"data.tfds.name: {given!r}: {root} has {name} as {', '.join(f'{name}/{each}' for each in configs)}{close}"
        )
    here = sorted(path.name for path in root.glob("*") if any(_versions(each) for each in (path, *path.glob("*"))))
    known = _catalogue()
    if known and name not in known:
        close = near(name, [*here, *known])
        unknown = f"{given!r} is no dataset of tensorflow-datasets{close}, nor is it in {root}"
        return f"data.tfds.name: {unknown}; take another, or {_INSTEAD}"
    return (
        f"data.tfds.name: {given!r} is not prepared in {root} (there: {', '.join(here) or 'none'}; data.tfds.data_dir, "
        f"else TFDS_DATA_DIR, names the folder). {_preparing(given)}; or {_INSTEAD}"
    )


def _preparing(given: str) -> str:
    """How to prepare a dataset, in one line: the runner matters to Apache Beam's datasets alone."""
    return (
        "Preparing needs TensorFlow and a network. On a machine that has both: pip install "
        "'pe_ablation[tfds-prepare]' && python -c \"import tensorflow_datasets as tfds, tensorflow_datasets.text; "
        f"tfds.builder('{given}', data_dir='DIR', file_format='array_record').download_and_prepare("
        "download_config=tfds.download.DownloadConfig(beam_runner='DirectRunner'))\"; then copy DIR here and set "
        "data.tfds.data_dir to it"
    )


def _catalogue() -> list[str]:
    """The datasets that the installed tensorflow-datasets has code for; empty where it can't be asked."""
    with quiet(), contextlib.suppress(Exception):  # builders import what they like; the catalogue only helps a message
        import tensorflow_datasets as tfds

        for kind in ("text", "summarization", "question_answering", "translate"):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"tensorflow_datasets.{kind}")
        return tfds.list_builders(with_community_datasets=False)
    return []


def _builder(folder: Path) -> Any:
    """The dataset of a folder, without the code that prepared it."""
    about = json.loads((folder / "dataset_info.json").read_bytes())
    kind = about.get("fileFormat", "tfrecord")
    if kind != "array_record":
        raise ConfigError(
            f"data.tfds.name: {folder} is prepared as {kind}; array_record alone can be read without "
            f"TensorFlow. {_preparing(_full_name(about))}; or {_INSTEAD}"
        )
    import tensorflow_datasets as tfds  # half a second

    try:
        return tfds.builder_from_directory(folder)
    except Exception as error:
        raise ConfigError(f"data.tfds.name: {folder} cannot be read: {_first_line(error)}; or {_INSTEAD}") from error


def _full_name(about: dict[str, Any]) -> str:
    chosen = f"/{about['configName']}" if about.get("configName") else ""
    return f"{about['name']}{chosen}:{about['version']}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _instructions(builder: Any, config: TfdsConfig, split: Split) -> list[Any]:
    """Which examples of which files a split is."""
    field, expression = f"data.tfds.{split}", getattr(config, split)
    sizes = ", ".join(f"{name} ({info.num_examples:,} examples)" for name, info in builder.info.splits.items())
    there = f"{config.name} has {sizes}; a part is written train[:99%]"
    if expression is None:
        raise ConfigError(f"{field}: the {split} split is asked for, and not configured; {there}")
    try:
        found = builder.info.splits[expression].file_instructions
    except (ValueError, KeyError, AssertionError) as error:
        close = near(expression, builder.info.splits)
        raise ConfigError(f"{field}: {expression!r}{close}: {_first_line(error)} {there}") from None
    if not found:
        raise ConfigError(f"{field}: {expression!r} has no examples; {there}")
    for each in found:
        if not Path(each.filename).is_file():
            raise ConfigError(f"{field}: {each.filename} is missing; copy the whole folder again")
    return list(found)


def _check_disjoint(builder: Any, config: TfdsConfig, split: Split, found: Sequence[Any]) -> None:
    """Refuse a split that shares examples with another one that the dataset has."""
    for other in SPLITS:
        if other == split or getattr(config, other) is None:
            continue
        try:
            others = _instructions(builder, config, other)
        except ConfigError:  # refused when it is asked for
            continue
        for one in found:
            if any(_shared(one, each) for each in others):
                raise ConfigError(
                    f"data.tfds.{split}: {getattr(config, split)!r} shares examples with data.tfds.{other} = "
                    f"{getattr(config, other)!r}; give parts that don't, or None for a split that is not used"
                )


def _shared(one: Any, other: Any) -> bool:
    first, last = max(one.skip, other.skip), min(one.skip + one.take, other.skip + other.take)
    return one.filename == other.filename and first < last


def _check_text(builder: Any, field: str) -> None:
    features = dict(builder.info.features.items())
    texts = [name for name, each in features.items() if each.shape == () and np.dtype(each.np_dtype) == np.object_]
    if field not in texts:
        problem = "is not text" if field in features else f"is not there{near(field, texts)}"
        raise ConfigError(
            f"data.tfds.text_field: {field!r} {problem}; {builder.info.full_name} has as text "
            f"{', '.join(sorted(texts)) or 'nothing'}"
        )


def _digest(builder: Any, config: TfdsConfig, found: Sequence[Any]) -> str:
    files = [[Path(each.filename).name, each.skip, each.take, *_stamp(Path(each.filename))] for each in found]
    made_from = {"dataset": builder.info.full_name, "text_field": config.text_field, "files": files}
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, str]:
    """A file's size, and sha256 of its two ends: a record file of hundreds of MB is not read for it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        state = hashlib.sha256(file.read(_SAMPLE))
        file.seek(max(0, size - _SAMPLE))
        state.update(file.read())
    return size, state.hexdigest()


def _read(builder: Any, config: TfdsConfig, split: Split) -> Iterator[Document]:
    expression, count = getattr(config, split), 0
    with quiet():
        source = builder.as_data_source(expression)
    for row in source:
        if row[config.text_field].strip():
            yield Document(f"{expression}[{count}]", row[config.text_field])
            count += 1
    if not count:
        raise ConfigError(f"data.tfds.{split}: {expression!r} has no text in {config.text_field!r}: white space alone")
