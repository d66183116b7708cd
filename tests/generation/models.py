"""A tiny Llama in all variants that matter for decoding, and prompts for it."""

import json

import pytest
import torch

from liger_models.generation.options import resolve

VOCAB, NEW = 53, 20
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,  # logits far enough apart that rounding does not choose the token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(**scaling):
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


VARIANTS = {
    "gqa": {},
    "mha-tied-biased": {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True},
    "mqa-wide-heads": {"num_key_value_heads": 1, "head_dim": 16},
    "linear": _rope(rope_type="linear", factor=4.0),
    # The rows grow past the length that the frequencies are made for.
    "dynamic": {"max_position_embeddings": 16, **_rope(rope_type="dynamic", factor=4.0)},
    "llama3": _rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "yarn": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
PROMPTS = [[5, 17, 3, 44, 29, 8, 31, 12, 50], [7, 33, 21], [40, 6, 6, 19, 25, 11]]


def padded(prompts=PROMPTS, pad=0):
    T = max(map(len, prompts))
    ids = torch.tensor([[pad] * (T - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def configure(model, monkeypatch, **values):
    """Give the model a generation_config.json."""
    monkeypatch.setattr(model, "assets", {"generation_config.json": json.dumps(values).encode()})


def resolved(model, **given):
    return resolve(model, 1, given)


def counted(model, monkeypatch):
    """A list that gets the number of tokens of each forward."""
    sizes = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **inputs: sizes.append(ids.shape[1]) or forward(ids, **inputs))
    return sizes
