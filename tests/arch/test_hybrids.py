"""Published sizes of the hybrid models, and packed documents of lengths around those of chunks."""

import warnings

import pytest
import torch

from liger_models import AutoLigerModel

LENGTHS = [1, 2, 63, 64, 65, 130]
GRANITE = {
    "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10,
    "shared_intermediate_size": 1536, "mamba_d_state": 128, "tie_word_embeddings": True,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
}  # fmt: skip
BAMBA = {"mamba_d_state": 128, "attn_layer_indices": [9, 18, 27]}
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_state": 16,
}  # fmt: skip
MODELS = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 40},
}


@pytest.mark.parametrize(
    ("arch", "sizes", "parameters"),
    [("granitemoehybrid", GRANITE, 32_207_337_984), ("bamba", BAMBA, 9_778_138_240)],
)
def test_published_sizes(arch, sizes, parameters):
    """Granite 4.0 small and Bamba 9B."""
    model = AutoLigerModel.from_config({"model_type": arch, **sizes}, device="meta")
    assert model.num_parameters() == parameters


def test_a_z_loss_that_would_be_left_out_is_reported():
    config = {"model_type": "bamba", **TINY, **MODELS["bamba"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoLigerModel.from_config({**config, "z_loss_coefficient": 0.0}, device="meta")
    with pytest.warns(UserWarning, match="BambaConfig does not know the keys z_loss_coefficient"):
        AutoLigerModel.from_config({**config, "z_loss_coefficient": 1e-4}, device="meta")


@pytest.mark.parametrize("arch", sorted(MODELS))
def test_packed_documents_equal_documents_alone(arch):
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({"model_type": arch, **TINY, **MODELS[arch]})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("A_log"):  # states that last
                parameter.sub_(4)
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
