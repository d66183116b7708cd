"""Hunyuan-A13B and ERNIE 4.5 with experts, whose routers are in fp32: files, settings and sizes of released models."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from liger_models import AutoLigerModel
from liger_models.arch import get_arch
from liger_models.layers.layer import wide_parameters

from .families import hf_model, make_folder, tiny

CASES = [("hunyuan_v1_moe", "alpha"), ("ernie4_5_moe", "released"), ("ernie4_5_moe", "unshared")]
A13B = {
    "vocab_size": 128167, "intermediate_size": 3072, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64,
    "moe_topk": [8] * 32, "tie_word_embeddings": True, "moe_intermediate_size": [3072] * 32,
    "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True, "norm_topk_prob": True, "moe_drop_tokens": False,
    "use_cla": False, "use_qk_norm": True, "model_type": "hunyuan_v1_moe",
}  # fmt: skip
"""A part of a released config.json."""


@pytest.mark.parametrize(("arch", "billions"), [("hunyuan_v1_moe", 80.393), ("ernie4_5_moe", 21.825)])
def test_the_number_of_parameters(arch, billions):
    model = AutoLigerModel.from_config(A13B if arch == "hunyuan_v1_moe" else {"model_type": arch}, device="meta")
    biases = [name for name in wide_parameters(model) if name.endswith("bias")]
    count = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in biases)
    assert round(count / 1e9, 3) == billions


@pytest.mark.parametrize(("arch", "variant"), CASES)
def test_routers_stay_in_fp32(arch, variant, tmp_path_factory):
    folder = make_folder(arch, variant, tmp_path_factory.mktemp("routers"))
    theirs = hf_model(folder, torch.bfloat16).state_dict()
    wide = {name for name, tensor in theirs.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in theirs if ".mlp.gate." in name} != set()
    model = AutoLigerModel.from_pretrained(folder, dtype=torch.bfloat16, progress=False)
    assert {*wide_parameters(model)} == {
        name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32
    }
    with torch.no_grad():
        logits = model.train()(torch.arange(3, 20)[None]).router_logits
    assert {each.dtype for each in logits} == {torch.float32}

    model.save_pretrained(folder.parent / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (folder, folder.parent / "saved"))
    assert {name for name, tensor in after.items() if tensor.dtype == torch.float32} == {
        name for name in before if ".mlp.gate." in name or "statics" in name
    }
    assert all(torch.equal(tensor, before[name].to(tensor.dtype)) for name, tensor in after.items())


def test_hunyuans_released_config_is_known():
    config = AutoLigerModel.from_config(A13B, device="meta").config
    assert config.num_experts_per_tok == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_topk": [2, 3]}, r"moe_topk must be a number, or the same number for each of the 2 layers, got \[2, 3\]"),
        ({"moe_topk": [2]}, r"moe_topk must be .* got \[2\]"),
        ({"moe_intermediate_size": [24, 48]}, r"moe_intermediate_size must be 24 for all layers, got \[24, 48\]"),
        ({"num_shared_expert": 2}, "num_shared_expert must be 1 for all layers, got 2"),
    ],
)
def test_hunyuans_layers_must_be_alike(changes, message):
    with pytest.raises(ValueError, match=message):
        AutoLigerModel.from_config({"model_type": "hunyuan_v1_moe", **tiny("hunyuan_v1_moe")["alpha"], **changes})


def test_what_no_ernie_has_is_refused():
    sizes = tiny("ernie4_5_moe")["released"]
    with pytest.raises(ValueError, match=r"Ernie4_5MoeConfig: moe_norm_min must be .* supports nothing"):
        AutoLigerModel.from_config({"model_type": "ernie4_5_moe", **sizes, "moe_norm_min": 0.5})


def test_ernies_layers_with_experts():
    sizes = {"num_hidden_layers": 12, "moe_layer_start_index": 3, "moe_layer_end_index": 9, "moe_layer_interval": 2}
    config = get_arch("ernie4_5_moe").config_class(**sizes)
    assert [layer for layer in range(12) if config.is_sparse(layer)] == [3, 5, 7, 9]


def test_ernies_weights_for_later_tokens_are_kept(tmp_path_factory):
    folder = make_folder("ernie4_5_moe", "released", tmp_path_factory.mktemp("later"))
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.mtp_block.0.mlp.down_proj.weight": torch.randn(4, 8), "model.mtp_emb_norm.0.weight": torch.ones(4)}
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoLigerModel.from_pretrained(folder, progress=False, strict=True)
    model.save_pretrained(folder.parent / "saved")
    saved = load_file(folder.parent / "saved/model.safetensors")
    assert saved.keys() == tensors.keys() | extra.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in (tensors | extra).items())


@pytest.mark.parametrize(("arch", "variant"), CASES[:2])
def test_names_of_transformers_modules_are_read(arch, variant, tmp_path_factory):
    """Experts in one tensor, and ERNIE's bias in the router."""
    folder = make_folder(arch, variant, tmp_path_factory.mktemp("names"))
    want = AutoLigerModel.from_pretrained(folder, progress=False)
    tensors = hf_model(folder).state_dict()
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    tensors = {name: tensor for name, tensor in tensors.items() if not (tied and name == "lm_head.weight")}
    assert [name for name in tensors if name.endswith("experts.gate_up_proj")]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoLigerModel.from_pretrained(folder, progress=False, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters(), strict=True))
