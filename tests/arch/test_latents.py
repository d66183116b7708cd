"""Families with latent attention: sizes of released models, and Kimi K2 under its own model_type."""

import json
import shutil

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.arch import get_arch
from liger_models.kernels.matmul import row_linear
from liger_models.layers import latent_attention
from liger_models.layers.frozen import frozen_weights
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import wide_parameters
from liger_models.layers.paged_cache import PagedCache

from ..convert.quantized_folders import CONFIGS, quantize
from .families import LIMIT, error, hf_model, make_folder, tiny

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
    "Mistral Small 4": ("mistral4", 118.973, {}),
    "Kimi K2": ("kimi_k2", 1026.408, KIMI),
}  # fmt: skip


@pytest.mark.cases(4)
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


def test_the_language_model_of_mistral_small_4_is_read_alone(tmp_path_factory):
    """Out of a folder with images, without the tensors of the tower."""
    from safetensors.torch import load_file, save_file

    folder = make_folder("mistral4", "scaled", tmp_path_factory.mktemp("small"))
    want = AutoLigerModel.from_pretrained(folder, progress=False)
    config = json.loads((folder / "config.json").read_text())
    tensors = {f"language_model.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    tensors |= {f"{name}.weight": torch.ones(4) for name in ("vision_tower.patch_conv", "multi_modal_projector.norm")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole = {"model_type": "mistral3", "text_config": config, "vision_config": {"model_type": "pixtral"}}
    (folder / "config.json").write_text(json.dumps(whole))
    model = get_arch("mistral4").from_pretrained(folder, progress=False)
    assert model.config == want.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters(), strict=True))
    model.save_pretrained(folder.parent / "saved")
    saved = json.loads((folder.parent / "saved/config.json").read_text())
    assert saved["model_type"] == "mistral4"
    assert "text_config" not in saved
    assert not [name for name in load_file(folder.parent / "saved/model.safetensors") if "language_model" in name]
    whole["text_config"] = {**config, "model_type": "mistral"}
    (folder / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="model_type of text_config must be 'mistral4', got 'mistral'"):
        get_arch("mistral4").from_pretrained(folder, progress=False)


def test_the_scale_of_mistral_small_4_is_that_of_its_published_parameters(tmp_path_factory):
    """transformers multiplies scores by the square of YaRN's factor, unless its layers are told otherwise."""
    folder = make_folder("mistral4", "scaled", tmp_path_factory.mktemp("scale"))
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"scale_by_mscale": true', '"scale_by_mscale": false'))
    theirs, ours = hf_model(folder), AutoLigerModel.from_pretrained(folder, progress=False)
    ids = torch.arange(20)[None]
    assert error(ours(ids).logits, theirs(ids).logits) > 1e-3
    for layer in theirs.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5
    assert error(ours(ids).logits, theirs(ids).logits) <= LIMIT


def kimi_k25(root):
    """A folder of Kimi K2.5, made of a tiny DeepSeek V3 and of some tensors of a tower."""
    from safetensors.torch import load_file, save_file

    source, folder = make_folder("deepseek_v3", "yarn", root), root / "kimi_k25"
    folder.mkdir()
    text = json.loads((source / "config.json").read_text())
    tensors = {f"language_model.{name}": x for name, x in load_file(source / "model.safetensors").items()}
    tower = {"vision_tower.encoder.blocks.0.wqkv.weight": torch.randn(6, 2), "mm_projector.proj.0.bias": torch.ones(3)}
    save_file(tensors | tower, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text,
        "media_placeholder_token_id": 90, "vision_config": {"vt_hidden_size": 1152}, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return source, folder, tensors | tower


def test_the_language_model_of_kimi_k25(tmp_path):
    source, folder, _ = kimi_k25(tmp_path)
    model = AutoLigerModel.from_pretrained(folder, progress=False, strict=True)
    ids = torch.arange(3, 20)[None]
    assert error(model(ids).logits, hf_model(source)(ids).logits) <= LIMIT
    with pytest.raises(ValueError, match="pixel_values must be None, because LigerKimiK25 has no vision tower"):
        model(ids, pixel_values=torch.zeros(1))


def test_experts_of_kimi_k25_stay_in_int4(tmp_path):
    """As they are released: only experts are quantized, and text_config says how."""
    from safetensors.torch import load_file, save_file

    _, folder, tensors = kimi_k25(tmp_path)
    dense = {}
    for name in [name for name in tensors if ".experts." in name]:
        found, dense[name] = quantize("ct_int4", name.removesuffix(".weight"), tensors.pop(name), group=8)
        tensors |= found
    dense = {name: tensor.float() for name, tensor in dense.items()} | {
        name: tensor for name, tensor in tensors.items() if ".experts." not in name
    }
    config = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, tmp_path / "dense")
    save_file(dense, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    config["text_config"]["quantization_config"] = CONFIGS["ct_int4"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    want, read, kept = (
        AutoLigerModel.from_pretrained(path, progress=False, dtype="float32", keep_quantized=keep)
        for path, keep in ((tmp_path / "dense", False), (folder, False), (folder, True))
    )
    ids = torch.arange(3, 20)[None]
    assert torch.equal(read(ids).logits, want(ids).logits)
    assert torch.equal(kept(ids).logits, want(ids).logits)
    assert len(frozen_weights(kept)) == 2
    kept.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    after = json.loads((tmp_path / "saved/config.json").read_text())
    assert after["text_config"]["quantization_config"] == CONFIGS["ct_int4"]
    assert "quantization_config" not in after


def test_kimi_k25_is_saved_with_its_tower(tmp_path):
    from safetensors.torch import load_file

    _, folder, tensors = kimi_k25(tmp_path)
    AutoLigerModel.from_pretrained(folder, progress=False).save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved"))
    assert after["vision_config"] == before["vision_config"]
    assert {key: after["text_config"][key] for key in ("model_type", "kv_lora_rank")} == {
        "model_type": "deepseek_v3", "kv_lora_rank": 32
    }  # fmt: skip
    again = AutoLigerModel.from_pretrained(tmp_path / "saved", progress=False)
    assert again.config == AutoLigerModel.from_pretrained(folder, progress=False).config


def test_names_that_transformers_writes_for_kimi_k25_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    _, folder, _ = kimi_k25(tmp_path)
    want = AutoLigerModel.from_pretrained(folder, progress=False)
    file = folder / "model.safetensors"
    tensors = {name.replace("model.layers.", "model.blocks."): x for name, x in load_file(file).items()}
    assert "language_model.model.blocks.0.input_layernorm.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    model = AutoLigerModel.from_pretrained(folder, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters(), strict=True))


@pytest.mark.parametrize("adapters", [None, {}, {"use_dora": True}], ids=["plain", "lora", "dora"])
def test_a_reused_cache_of_latents_gives_the_tokens_of_whole_forwards(adapters):
    """Few tokens after cached ones attend to latents, and many to keys and values that are computed again."""
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({"model_type": "deepseek_v3", **tiny("deepseek_v3")["yarn"]}).eval()
    if adapters is not None:
        apply_lora(model, LoRAConfig(r=4, **adapters))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    cache = DecodeCache()
    options = {"max_new_tokens": 4, "eos_token_id": []}
    ids = model.generate(torch.randint(3, 90, (1, 12)), cache=cache, **options)
    for count in (3, 40):
        ids = torch.cat([ids, torch.randint(3, 90, (1, count))], 1)
        want = ids
        with torch.no_grad():
            for _ in range(4):
                want = torch.cat([want, model(want).logits[:, -1:].argmax(-1)], 1)
        ids = model.generate(ids, cache=cache, **options)
        assert torch.equal(ids, want)
    rows, nothing = cache._layers[0]
    assert rows.shape[2:] == (1, 32 + 8)
    assert nothing.numel() == 0


FUSED = [
    ("deepseek_v2", None),
    ("deepseek_v3", "yarn"),
    ("glm4_moe_lite", None),
    ("mistral4", None),
    ("kimi_linear", None),
]
"""Families whose steps run on the kernels for few rows, with a variant; None for the first one."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("arch", "variant"), FUSED, ids=lambda x: x or "first")
def test_steps_of_few_rows_give_the_tokens_of_unfused_steps(
    arch, variant, dtype, kernel_device, small_pages, monkeypatch
):
    """One row in fp32 and three in half precision, against the launches of many rows."""
    torch.manual_seed(0)
    variants = tiny(arch)
    model = AutoLigerModel.from_config({"model_type": arch, **variants[variant or next(iter(variants))]}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model, ids = model.to(kernel_device, dtype), torch.randint(3, 90, (1 if dtype == torch.float32 else 3, 9))
    options = {"max_new_tokens": 6, "eos_token_id": [], "return_logprobs": True}
    written, calls = latent_attention.write_latents, []
    spy = lambda *args, **options: calls.append(args) or written(*args, **options)
    monkeypatch.setattr(latent_attention, "write_latents", spy)
    got = model.generate(ids.to(kernel_device), **options)
    assert calls
    monkeypatch.setattr(PagedCache, "pages_of", lambda *_: None)
    monkeypatch.setattr(latent_attention, "takes_heads", lambda *_: False)
    monkeypatch.setattr(row_linear, "MOST_ROWS", 0)
    want = model.generate(ids.to(kernel_device), **options)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.05)
