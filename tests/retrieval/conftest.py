"""A tiny model with a tokenizer that ends texts with a token, as that of Qwen3-Embedding does."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from liger_models.arch.qwen3 import LigerQwen3, Qwen3Config

WORDS = ["<pad>", "<eos>", "query", ":", "yes", "no", "Instruct", "document", *(f"w{n}" for n in range(40))]
TEXTS = ["w1 w2 w3", "w1", "w3 w4 w5 w20 w21 w7", "w6 w5 w4", "w8 " * 40, "w9 w9"]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}


def tokenizer_json() -> str:
    backend = Backend(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    return backend.to_str()


def save_tiny(folder: Path, *, tied: bool = True) -> Path:
    """Write a causal model with random weights."""
    torch.manual_seed(0)
    model = LigerQwen3.from_config(Qwen3Config(vocab_size=len(WORDS), tie_word_embeddings=tied, **SIZES))
    model.assets = {
        "tokenizer.json": tokenizer_json().encode(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>",
             "padding_side": "left", "model_max_length": 512}
        ).encode(),
    }  # fmt: skip
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("retrieval") / "tied")


@pytest.fixture(scope="session")
def untied(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("retrieval") / "untied", tied=False)
