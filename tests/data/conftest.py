"""A tokenizer of bytes, and data sets in a cache of their own."""

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from liger_models import PackedDataset, Tokenizer

from .examples import BOS, CHAT


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Bytes are tokens: the bos and eos tokens, then one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT})


@pytest.fixture
def make(tokenizer, tmp_path):
    """A data set in a cache of its own."""

    def made(source: Any, **options: Any) -> PackedDataset:
        return PackedDataset(
            source, tokenizer, **{"length": 32, "cache_dir": tmp_path / "cache", "progress": False, **options}
        )

    return made
