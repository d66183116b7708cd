"""Folders of compressed-tensors, ModelOpt, bitsandbytes and GPT-OSS, whose weights are read, kept, and saved again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora, merge_lora
from liger_models.convert import get_hf_state_dict
from liger_models.kernels.frozen.groups import NUMBERS
from liger_models.layers.frozen import frozen_parts, frozen_weights
from liger_models.layers.frozen_linear import FrozenLinear
from liger_models.layers.layer import routed_layers
from liger_models.layers.moe import LigerMoE
from liger_models.train.report import estimate

from .conftest import assert_same_bits, edit_json, read_tensors
from .quantized_folders import CONFIGS, make_quantized
from .test_keep_float8 import IDS, as_stored, load, step, stirred
from .test_mxfp4 import make as make_mxfp4

BITS = {"bnb": 4, "bnb_nested": 4, "ct_int4": 4, "ct_nvfp4": 4, "mo_nvfp4": 4}
KINDS = pytest.mark.parametrize("kind", CONFIGS)
ARCHS = pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])


def frozen_of(model: Any) -> dict[str, Any]:
    """The frozen weights of a model by the names of its parameters."""
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, FrozenLinear):
            found[f"{path}.weight"] = layer.frozen_weight
        elif isinstance(layer, LigerMoE):
            found |= {f"{path}.{name}": layer.matrices(name) for name in frozen_parts(layer)}
    return found


@pytest.mark.cases(6)
@KINDS
@ARCHS
def test_read_kept_and_saved(kind: str, arch: str, tmp_path: Path) -> None:
    """As the format's formula says, bit for bit; and back into the same tensors."""
    codes, numbers = make_quantized(kind, arch, tmp_path)
    dense, read, kept = load(numbers), load(codes), load(codes, keep_quantized=True)
    assert_same_bits(dict(read.named_parameters()), dict(dense.named_parameters()))
    frozen = frozen_of(kept)
    assert len(frozen) == 8
    for name, weight in frozen.items():
        assert torch.equal(weight.dense(), dense.get_parameter(name))
        assert weight.codes.nbytes == weight.numel() * BITS.get(kind, 8) // 8
    assert torch.equal(kept(IDS).logits, dense(IDS).logits)
    assert_same_bits(get_hf_state_dict(kept), get_hf_state_dict(dense))

    kept.save_pretrained(tmp_path / "saved", max_shard_size=20_000)
    quantization = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert quantization == CONFIGS[kind]
    again = load(tmp_path / "saved", keep_quantized=True)
    assert_same_bits(as_stored(again), as_stored(kept))
    if kind != "bnb_nested":  # whose scales are written as they are
        state = ".quant_state.bitsandbytes__nf4"
        saved, want = read_tensors(tmp_path / "saved"), read_tensors(codes)
        assert saved.keys() == want.keys()
        assert_same_bits(*({n: t for n, t in each.items() if not n.endswith(state)} for each in (saved, want)))
    kept.save_pretrained(tmp_path / "dense", dtype="bfloat16")
    assert "quantization_config" not in (tmp_path / "dense" / "config.json").read_text()
    assert_same_bits(read_tensors(tmp_path / "dense"), read_tensors(numbers))


@pytest.mark.cases(3)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["ct_nvfp4", "mo_tensors", "ct_int4", "bnb"])
@ARCHS
def test_adapters_train_as_on_the_dequantized_model(kind: str, arch: str, dora: bool, tmp_path: Path) -> None:
    codes, numbers = make_quantized(kind, arch, tmp_path)
    found = []
    models = [load(folder, dtype="float32", keep_quantized=folder is codes) for folder in (numbers, codes)]
    for model in models:
        if dora:
            torch.manual_seed(1)
            apply_lora(model, LoRAConfig(r=4, use_dora=True))
        else:
            stirred(model)
        found.append(step(model))
    (want, expected), (loss, gradients) = found
    assert torch.equal(loss, want)
    assert gradients.keys() == expected.keys()
    assert len(gradients) > 0
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
    want, got = (dict(merge_lora(model).named_parameters()) for model in models)
    # Experts without adapters stay in the form of the checkpoint, with scales beside the codes.
    unmerged = {name: frozen.dense() for name, frozen in frozen_of(models[1]).items()}
    assert bool(unmerged) == (dora and arch == "qwen3_moe")
    assert_same_bits({name: tensor for name, tensor in (got | unmerged).items() if ".stored." not in name}, want)


@pytest.mark.cases(1)
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["mo_nvfp4", "ct_channels"])
def test_the_kernels_train_and_decode(kind: str, arch: str, tmp_path: Path, kernel_device: str) -> None:
    """On the device of kernels, with whole rows: what the dense model computes, up to the order of sums."""
    codes, _ = make_quantized(kind, arch, tmp_path, powers=True)
    options = {"dtype": "float32", "device": kernel_device}
    models = [stirred(load(codes, keep_quantized=kept, **options)) for kept in (False, True)]
    (want, expected), (loss, gradients) = map(step, models)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)
    made = [model.generate([[5, 17, 3]], max_new_tokens=3, eos_token_id=[], return_logprobs=True) for model in models]
    assert torch.equal(made[0].sequences, made[1].sequences)
    torch.testing.assert_close(made[0].logprobs, made[1].logprobs, rtol=1e-4, atol=1e-4)


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    """Read, trained under adapters, merged into bfloat16; saved bit for bit, also beside weights that are merged."""
    folder = make_mxfp4(tmp_path / "mxfp4")
    dense, kept = load(folder), load(folder, keep_quantized=True)
    frozen = frozen_of(kept)
    assert len(frozen) == 4
    for name, weight in frozen.items():
        assert weight.format.name == "mxfp4"
        assert weight.nbytes == weight.numel() * 17 // 32
        assert torch.equal(weight.dense(), dense.get_parameter(name))
    assert torch.equal(kept(IDS).logits, dense(IDS).logits)
    assert_same_bits(get_hf_state_dict(kept), get_hf_state_dict(dense))
    kept.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(folder))
    kept.save_pretrained(tmp_path / "as", mxfp4=folder)
    assert_same_bits(read_tensors(tmp_path / "as"), read_tensors(folder))

    # Merged adapters of attention leave the experts as they are.
    for model in (dense, kept):
        torch.manual_seed(2)
        apply_lora(model, LoRAConfig(r=2, target_modules=["q_proj", "o_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        merge_lora(model)
    kept.save_pretrained(tmp_path / "merged")
    dense.save_pretrained(tmp_path / "wanted", mxfp4=folder)
    assert_same_bits(read_tensors(tmp_path / "merged"), read_tensors(tmp_path / "wanted"))

    # Adapters of experts train as on dense ones, and are merged into bfloat16.
    dense, kept = (stirred(load(folder, keep_quantized=each, dtype="float32")) for each in (False, True))
    (want, expected), (loss, gradients) = step(dense), step(kept)
    assert torch.equal(loss, want)
    assert any("gate_up" in name for name in gradients)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
    for name, model in (("trained", merge_lora(kept)), ("dense", merge_lora(dense))):
        model.save_pretrained(tmp_path / name, dtype="bfloat16")
    assert_same_bits(read_tensors(tmp_path / "trained"), read_tensors(tmp_path / "dense"))


@pytest.mark.parametrize("kind", ["mo_nvfp4", "mxfp4"])
def test_memory_is_counted(kind: str, tmp_path: Path) -> None:
    """The estimate counts what is stored, and the largest dense weight that is made of it."""
    folder = make_mxfp4(tmp_path / "codes") if kind == "mxfp4" else make_quantized(kind, "qwen3_moe", tmp_path)[0]
    dense, kept = (stirred(load(folder, keep_quantized=each)) for each in (False, True))
    counted, without = estimate(kept, 64), estimate(dense, 64)
    assert counted.weights == sum(each.nbytes for each in kept.parameters())
    assert counted.weights < without.weights
    assert counted.temporary == max(2 * each.numel() for each in frozen_of(kept).values())


def test_old_folders_of_modelopt(tmp_path: Path) -> None:
    """The quantization is described in a file of its own, and later in config.json."""
    codes, numbers = make_quantized("mo_nvfp4", "qwen3", tmp_path)
    edit_json(codes / "config.json", quantization_config=None)
    content = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (codes / "hf_quant_config.json").write_text(json.dumps(content))
    kept = load(codes, keep_quantized=True)
    assert torch.equal(kept(IDS).logits, load(numbers)(IDS).logits)
    kept.save_pretrained(tmp_path / "saved")
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(codes))
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert saved == {"quant_method": "modelopt", **content}
    shutil.copytree(codes, tmp_path / "again")
    load(codes).save_pretrained(tmp_path / "again")  # in bfloat16
    assert not (tmp_path / "again" / "hf_quant_config.json").exists()
    content["quantization"]["quant_algo"] = "W4A8_AWQ"
    (codes / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"modelopt with quant_algo W4A8_AWQ"):
        load(codes)


def test_weights_that_were_quantized_from_float16(tmp_path: Path) -> None:
    """Numbers of bitsandbytes are rounded to the dtype of the model that was quantized."""
    folder, _ = make_quantized("bnb", "qwen3", tmp_path)
    tensors, layer = read_tensors(folder), "model.layers.0.self_attn.o_proj.weight"
    codes, scales = tensors[layer].view(64, 32), tensors[f"{layer}.absmax"].view(64, 1)
    want = torch.tensor(NUMBERS["nf4"])[torch.stack([codes >> 4, codes & 15], -1).flatten(1).int()] * scales
    for name in [name for name in tensors if "quant_state" in name]:
        state = json.loads(bytes(tensors[name].tolist())) | {"dtype": "float16"}
        tensors[name] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    read, kept = (load(folder, dtype="float16", keep_quantized=keep) for keep in (False, True))
    assert torch.equal(read.layers[0].self_attn.o_proj.weight, want.half())
    assert torch.equal(kept.layers[0].self_attn.o_proj.frozen_weight.dense(), want.half())
    assert not torch.equal(want.half().float(), want.bfloat16().float())


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq\)\. Supported are .* Load the original checkpoint in 16 bits"),
        ({"quant_method": "awq"}, r"\(awq\)\. Supported are .* call quantize_base or train with lora_4bit"),
        ({"quant_method": "quark"}, r"\(quark\)\. .* dequantize this checkpoint with the library that wrote it"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"\(bitsandbytes with 8 bits\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes with type fp4\)"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt with quant_algo MIXED_PRECISION"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
            r"compressed-tensors with weights int8\)",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "symmetric": False}}},
            },
            r"with weights int4 and zero points\)",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "actorder": "group"}}},
            },
            r"with actorder\)",
        ),
        ({"quant_method": "mxfp4"}, "a checkpoint in MXFP4 must be of GPT-OSS, got model_type 'qwen3'"),
        ("int8", r"quantization_config \(int8\)"),
    ],
    ids=str,
)
def test_other_formats_are_refused(quantization: Any, message: str, tmp_path: Path) -> None:
    codes, _ = make_quantized("ct_channels", "qwen3", tmp_path)
    edit_json(codes / "config.json", quantization_config=quantization)
    with pytest.raises(ValueError, match=message):
        load(codes)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    def refuses(kind: str, message: str, **changes: Any) -> None:
        folder, _ = make_quantized(kind, "qwen3", tmp_path / f"{kind}{len([*tmp_path.iterdir()])}")
        tensors = read_tensors(folder)
        for name, change in changes.items():
            key = "model.layers.1.self_attn.o_proj.weight" + name
            if change is None:
                del tensors[key]
            else:
                tensors[key] = change(tensors[key])
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(folder)

    refuses("mo_nvfp4", r"o_proj.weight_scale must have one of the dtypes F8_E4M3, got F32", _scale=torch.Tensor.float)
    refuses("mo_nvfp4", r"o_proj.weight_scale must have shape \(64, 4\) for .* got \(32, 4\)", _scale=lambda t: t[:32])
    refuses("ct_int4", r"must hold .*o_proj.weight_scale, the scales of .*weight_packed, got no tensor", _scale=None)
    refuses("ct_channels", r"o_proj.weight_scale must have shape .* got \(64, 2\)", _scale=lambda t: t.repeat(1, 2))
    refuses("bnb", r"must hold .*o_proj.weight.quant_map, a part of .* in NF4", **{".quant_map": None})
    broken = {".quant_state.bitsandbytes__nf4": lambda t: t[:-1]}
    refuses("bnb", r"quant_state.bitsandbytes__nf4 must hold JSON with the shape of a matrix", **broken)
    refuses("bnb", r"quant_map must hold the numbers of NF4, got", **{".quant_map": torch.zeros_like})


def test_layers_without_routed_experts_are_kept_too(tmp_path: Path) -> None:
    codes, _ = make_quantized("ct_tensors", "qwen3_moe", tmp_path)
    kept = load(codes, keep_quantized=True)
    assert all(len(frozen_parts(layer)) == 2 for layer in routed_layers(kept))
    assert len(frozen_weights(kept)) == 8
    assert isinstance(AutoLigerModel.from_pretrained(codes, progress=False).layers[0].mlp.gate_up_weight, torch.Tensor)
