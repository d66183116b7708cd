"""A plugin of pytest: PEFT's tests load tiny models of `liger_models.hf`, unpacked, in place of those on the hub."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import liger_models.hf
from liger_models.adapters import unpack_projections

SIZES = {
    "vocab_size": 1000, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "trl-internal-testing/tiny-random-LlamaForCausalLM": transformers.LlamaConfig,
    "hf-internal-testing/tiny-random-MistralForCausalLM": transformers.MistralConfig,
    "peft-internal-testing/tiny-dummy-qwen2": transformers.Qwen2Config,
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": transformers.Gemma3TextConfig,
}
"""Name on the hub -> the configuration of a model of that family."""


def make(name: str, folder: Path) -> None:
    """Write a model with drawn weights and a tokenizer of words, as transformers writes them."""
    torch.manual_seed(0)
    config = MODELS[name](**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(997))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="w0"
    )
    tokenizer.save_pretrained(folder)


def redirect(auto_class: Any, root: Path) -> None:
    """Let an auto class of transformers load the local models, and return those of this package unpacked."""
    load = auto_class.from_pretrained
    # AutoTokenizer would read the words as a tokenizer of the family.
    load_local = (
        transformers.PreTrainedTokenizerFast.from_pretrained if auto_class is transformers.AutoTokenizer else load
    )

    def from_pretrained(name: Any, *args: Any, **options: Any) -> Any:
        loaded = load_local(str(root / name), *args, **options) if name in MODELS else load(name, *args, **options)
        return unpack_projections(loaded) if type(loaded).__module__ == "liger_models.hf" else loaded

    auto_class.from_pretrained = from_pretrained


def pytest_configure(config: Any) -> None:
    root = Path(os.environ["LIGER_MODELS"])
    for name in MODELS:
        if not (root / name).is_dir():
            make(name, root / name)
    liger_models.hf.register()
    for auto in ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer", "AutoConfig"):
        redirect(getattr(transformers, auto), root)
