"""Corpora to batches: documents -> tokenizer -> one cached token file per split -> shuffled blocks -> windows.

`load` gives a split as a `TokenFile`, `tokenizer` the ids that it is written in, `Batches` the endless, resumable
stream of training windows. Text is read in binary and no byte is changed: line ends, byte order marks and invalid UTF-8
stay as they are, whatever the tokenizer.
"""

from pe_ablation.data.batches import Batches
from pe_ablation.data.batches import check as check_batches
from pe_ablation.data.corpus import cache_folder, load, tokenizer
from pe_ablation.data.tokenizers import Tokenizer
from pe_ablation.data.tokens import TokenFile

__all__ = ["Batches", "TokenFile", "Tokenizer", "cache_folder", "check_batches", "load", "tokenizer"]
