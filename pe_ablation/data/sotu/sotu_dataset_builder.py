"""The tensorflow-datasets builder `sotu`. Importing it imports tensorflow-datasets; `prepared` does so when needed."""

from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from pe_ablation.data.documents import SPLITS
from pe_ablation.data.sotu import package


class Builder(tfds.core.GeneratorBasedBuilder):
    """Addresses by falling length, their order kept; `text` is the file's bytes, unchanged."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "sotu 0.1.2, dealt by index mod 10: 4 is validation, 9 is test."}  # noqa: RUF012

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="State of the Union addresses of the Python package sotu, public domain, split by index.",
            features=tfds.features.FeaturesDict({"fileid": tfds.features.Text(), "text": tfds.features.Text()}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # everything is installed already
        addresses = package.addresses()
        return {split: self._generate_examples([each for each in addresses if each.split == split]) for split in SPLITS}

    def _generate_examples(self, addresses: list[package.Address]) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, address in enumerate(addresses):
            yield index, {"fileid": address.fileid, "text": address.content}
