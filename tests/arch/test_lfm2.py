"""LFM2's sizes, and packed documents of lengths around those of chunks."""

import pytest
import torch

from liger_models.arch.lfm2.dense import Lfm2Config, LigerLfm2
from liger_models.arch.lfm2.moe import Lfm2MoeConfig, LigerLfm2Moe, from_json

LENGTHS = [1, 2, 63, 64, 65, 130]
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_published_sizes():
    """LFM2-350M: 6656 becomes 4608."""
    types = ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]
    config = Lfm2Config(
        hidden_size=1024, intermediate_size=6656, num_hidden_layers=16, num_attention_heads=16, layer_types=types
    )
    assert config.mlp_size == 4608
    model = LigerLfm2.from_config(config, device="meta")
    assert model.num_parameters() == 354_483_968


def test_published_sizes_with_experts():
    """LFM2-8B-A1B, with a bias for each expert that is not a parameter in transformers."""
    types = ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]
    model = LigerLfm2Moe.from_config(Lfm2MoeConfig(num_hidden_layers=24, layer_types=types), device="meta")
    assert model.num_parameters(only_trainable=True) == 8_339_929_856
    with pytest.raises(ValueError, match=r"layer_types must have a type for each layer, got none"):
        from_json({})


@pytest.mark.parametrize("bias", [False, True])
def test_packed_documents_equal_documents_alone(bias):
    torch.manual_seed(0)
    types = ["conv", "full_attention", "conv"]
    config = Lfm2Config(
        **SIZES, intermediate_size=48, block_multiple_of=8, num_hidden_layers=3, layer_types=types, conv_bias=bias
    )
    model = LigerLfm2.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ids, weights = torch.randint(64, (1, sum(LENGTHS))), torch.randn(1, sum(LENGTHS), 64)
    packed = model(ids, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0)).logits
    (packed * weights).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for document, factor, logits in zip(*(x.split(LENGTHS, 1) for x in (ids, weights, packed)), strict=True):
        alone = model(document).logits
        assert (alone - logits).norm() <= 1e-5 * alone.norm()
        (alone * factor).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm()
