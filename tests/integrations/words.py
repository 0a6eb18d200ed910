"""Tokenizers whose token i is the word "wi", for hosts that need text."""

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = 0, 1


def word_tokenizer(num_words: int, names: Mapping[int, str] | None = None) -> Any:
    """Return a tokenizer of words between spaces; `names` gives other names to some tokens."""
    special = {PAD: "<pad>", EOS: "<eos>", **(names or {})}
    words = {special.get(i, f"w{i}"): i for i in range(num_words)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")
