"""Families with latent attention: sizes of released models, and Kimi K2 under its own model_type."""

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch import get_arch
from liger_models.layers.layer import wide_parameters

from .families import make_folder

V2 = {
    "vocab_size": 102400, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "num_experts_per_tok": 6,
    "n_shared_experts": 2,
}  # fmt: skip
KIMI = {
    "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
SIZES = {
    "V2 Lite": (
        "deepseek_v2", 15.706,
        {**V2, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
         "q_lora_rank": None, "n_routed_experts": 64},
    ),
    "V2": (
        "deepseek_v2", 235.741,
        {**V2, "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60, "num_attention_heads": 128,
         "moe_intermediate_size": 1536, "n_routed_experts": 160},
    ),
    "V3": ("deepseek_v3", 671.026, {}),
    "GLM-4.7-Flash": ("glm4_moe_lite", 29.943, {}),
    "Kimi K2": ("kimi_k2", 1026.408, KIMI),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_parameters(name):
    arch, billions, sizes = SIZES[name]
    model = AutoLigerModel.from_config({"model_type": arch, **sizes}, device="meta")
    biases = wide_parameters(model)  # a buffer of transformers' model
    count = sum(parameter.numel() for key, parameter in model.named_parameters() if key not in biases)
    assert round(count / 1e9, 3) == billions


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path_factory):
    folder = make_folder("deepseek_v3", "yarn", tmp_path_factory.mktemp("kimi"))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"'))
    model = AutoLigerModel.from_pretrained(folder, progress=False)
    assert type(model) is get_arch("kimi_k2") is get_arch("deepseek_v3")
    model.save_pretrained(folder.parent / "saved")
    assert '"model_type": "deepseek_v3"' in (folder.parent / "saved/config.json").read_text()


def test_layers_for_later_tokens_are_kept(tmp_path_factory):
    """V3 and GLM have a layer after the last one, which predicts the token after the next."""
    from safetensors.torch import load_file, save_file

    folder = make_folder("deepseek_v3", "yarn", tmp_path_factory.mktemp("later"))
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "model.layers.2.enorm.weight": torch.ones(4)}
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoLigerModel.from_pretrained(folder, progress=False)
    model.save_pretrained(folder.parent / "saved")
    saved = load_file(folder.parent / "saved/model.safetensors")
    assert saved.keys() >= extra.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in extra.items())
