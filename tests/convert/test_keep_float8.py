"""Weights in float8 with scales of blocks that stay as they are: what they compute is what the dequantized ones do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora, load_adapter, merge_lora, save_adapter, unmerge_lora
from liger_models.adapters.lora_config import EXPERTS
from liger_models.convert import get_hf_state_dict, load_hf_tensors
from liger_models.kernels.frozen import float8_blocks
from liger_models.layers.frozen import frozen_parts, frozen_weights
from liger_models.layers.frozen_linear import FrozenLinear
from liger_models.layers.layer import named_layers, routed_layers
from liger_models.layers.moe import LigerMoE
from liger_models.memory.estimate import training_memory
from liger_models.parallel import compile_blocks
from liger_models.train.metrics import flops
from liger_models.train.report import estimate

from .conftest import assert_same_bits, read_tensors
from .test_fp8 import CASES, quantized

BLOCK = 24, 20
"""Blocks end within rows, columns, heads, and the parts of fused tensors."""
IDS = torch.arange(2, 14).view(2, 6)


@pytest.fixture(autouse=True)
def _tiles_of_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are dequantized in tiles of their size: the interpreter takes as long for elements that are masked."""
    monkeypatch.setattr(float8_blocks, "ROWS", 32)
    monkeypatch.setattr(float8_blocks, "PIECES", 8)


def load(folder: Path, **options: Any) -> Any:
    return AutoLigerModel.from_pretrained(folder, progress=False, **options)


def stirred(model: Any) -> Any:
    """With adapters away from where they start, also of routed experts."""
    torch.manual_seed(3)
    apply_lora(model, LoRAConfig(r=4, target_parameters=EXPERTS if routed_layers(model) else ()))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) / 10)
    return model


def as_stored(model: Any) -> dict[str, Tensor]:
    """The parameters of a model, with codes and scales of experts apart."""
    parts = {name: getattr(each, "stored", [each]) for name, each in model.named_parameters()}
    return {f"{name} {number}": each for name, group in parts.items() for number, each in enumerate(group)}


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    ids = IDS.to(model.device)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.cases(5)
@pytest.mark.parametrize("arch", [*CASES, "mixtral", "qwen3_vl_moe", "gpt_oss"])
def test_computes_as_the_dequantized_model(arch: str, tmp_path: Path) -> None:
    codes, _ = quantized(arch, tmp_path, BLOCK)
    dense, kept = load(codes), load(codes, keep_quantized=True)
    assert len(frozen_weights(kept)) > 0
    assert kept.num_parameters() == dense.num_parameters()
    for path, layer in kept.named_modules():
        if isinstance(layer, FrozenLinear):
            assert torch.equal(layer.frozen_weight.dense(), dense.get_submodule(path).weight)
            assert layer.weight.nbytes == layer.in_features * layer.out_features
    for path, experts in named_layers(kept):
        for name in frozen_parts(experts) if isinstance(experts, LigerMoE) else ():
            weight = experts.matrices(name)
            assert torch.equal(weight.dense(), dense.get_submodule(path).get_parameter(name))
            assert (weight.codes.nbytes, weight.layout) == (weight.numel(), [BLOCK[1]])
            assert not weight.requires_grad
    # Those of GPT-OSS are transposed in its checkpoints, so that rows share no scales.
    count = 0 if arch == "gpt_oss" else 2
    assert all(len(frozen_parts(layer)) == count for layer in routed_layers(kept))
    assert_same_bits(get_hf_state_dict(kept), get_hf_state_dict(dense))
    assert torch.equal(kept(IDS).logits, dense(IDS).logits)
    if arch not in ("qwen3_next", "qwen3_vl_moe"):
        made = [each.generate(IDS, max_new_tokens=4, eos_token_id=[]) for each in (kept, dense)]
        assert torch.equal(*made)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arch", "policy"),
    [
        *(("qwen3", policy) for policy in ("none", "selective", "full")),
        ("qwen3_moe", "none"),
        ("qwen3_moe", "full"),
        ("qwen3_next", "selective"),
    ],
)
def test_adapters_train_as_on_the_dequantized_model(arch: str, policy: str, tmp_path: Path, kernel_device: str) -> None:
    codes, _ = quantized(arch, tmp_path, BLOCK, powers=True)
    options = {"dtype": "float32", "device": kernel_device}
    dense, kept = stirred(load(codes, **options)), stirred(load(codes, keep_quantized=True, **options))
    batch = {"input_ids": IDS, "labels": IDS, "cu_seqlens": torch.tensor([0, 6, 12])}
    assert flops(kept, [batch]) == flops(dense, [batch])
    found = []
    for model in (dense, kept):
        model.set_checkpointing(policy)
        found.append(step(model))
    (want, expected), (loss, gradients) = found
    assert torch.equal(loss, want)
    assert gradients.keys() == expected.keys()
    assert len(gradients) > 0
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())

    save_adapter(kept, tmp_path / "adapter")
    again = load_adapter(load(codes, keep_quantized=True, **options), tmp_path / "adapter")
    ids = IDS.to(kernel_device)
    assert torch.equal(again(ids).logits, kept(ids).logits)
    frozen = {name: each.clone() for name, each in as_stored(kept).items()}
    assert_same_bits(
        dict(merge_lora(kept, reversible=True).named_parameters()), dict(merge_lora(dense).named_parameters())
    )
    kept.save_pretrained(tmp_path / "merged")
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    loaded = load(tmp_path / "merged", device=kernel_device).requires_grad_(False)
    assert torch.equal(loaded(ids).logits, kept(ids).logits)
    assert_same_bits(as_stored(unmerge_lora(kept)), frozen)


@pytest.mark.cases(2)
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize(
    "prompts", [[[2]], pytest.param([[5, 17, 3], [7, 33, 21]], marks=pytest.mark.matrix)], ids=["one", "two"]
)
def test_generates_from_codes(
    arch: str,
    prompts: list[list[int]],
    adapted: bool,
    tmp_path: Path,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few tokens make no weight dense. Single rows in fp32, several in 16 bits; only the order of the sums differs."""
    codes, _ = quantized(arch, tmp_path, (24, 32), powers=True)
    dtype = "float32" if len(prompts) == 1 else "float16"
    dense, kept = (load(codes, dtype=dtype, device=kernel_device, keep_quantized=each) for each in (False, True))
    monkeypatch.delattr(float8_blocks, "blocks_dense")
    found = []
    for model in (dense, kept):
        made = (stirred(model) if adapted else model).generate(
            prompts, max_new_tokens=4, eos_token_id=[], do_sample=False, return_logprobs=True
        )
        found.append((made.sequences, made.logprobs))
    (want, expected), (sequences, logprobs) = found
    assert torch.equal(sequences, want)
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    torch.testing.assert_close(logprobs, expected, rtol=tolerance, atol=tolerance)


def without_scales(codes: Path, dense: Path, name: str) -> None:
    """Let one tensor of a checkpoint be in bfloat16."""
    tensors = read_tensors(codes)
    del tensors[f"{name}_scale_inv"]
    save_file({**tensors, name: read_tensors(dense)[name]}, codes / "model.safetensors", {"format": "pt"})


@pytest.mark.cases(6)
@pytest.mark.parametrize("arch", ["qwen3", "phi3", "qwen3_moe", "qwen3_next", "gpt_oss", "partly"])
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16], ids=str)
def test_saved_as_it_was(arch: str, number: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, with its scales; a mixture of which some experts are not kept as the numbers that it stands for."""
    kept = arch not in ("gpt_oss", "partly")
    codes, dense = quantized("qwen3_moe" if arch == "partly" else arch, tmp_path, BLOCK, number)
    if arch == "partly":
        without_scales(codes, dense, "model.layers.1.mlp.experts.2.up_proj.weight")
    model = load(codes, keep_quantized=True)
    model.save_pretrained(tmp_path / "saved", max_shard_size=20_000)
    if arch == "partly":
        assert sorted(frozen_parts(routed_layers(model)[-1])) == ["down_weight"]
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(codes if kept else dense))
    assert ("quantization_config" in (tmp_path / "saved" / "config.json").read_text()) == kept
    assert torch.equal(load(tmp_path / "saved")(IDS).logits, model(IDS).logits)
    model.save_pretrained(tmp_path / "dense", dtype="bfloat16")
    assert_same_bits(read_tensors(tmp_path / "dense"), read_tensors(dense))


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_memory_is_counted(arch: str, tmp_path: Path) -> None:
    """The estimate counts stored weights, and the largest dense weight that is made of them."""
    codes, _ = quantized(arch, tmp_path, BLOCK)
    dense, kept = (stirred(load(codes, keep_quantized=each)) for each in (False, True))
    kinds = [each for each in as_stored(kept).values() if not each.requires_grad]
    counted, without = estimate(kept, 64), estimate(dense, 64)
    trained = sum(each.nbytes for each in kept.parameters() if each.requires_grad)
    assert counted.weights == trained + sum(each.nbytes for each in kinds)
    assert counted._replace(weights=0, temporary=0) == without._replace(weights=0, temporary=0)
    ends = "proj.weight", "gate_up_weight", "down_weight"
    assert counted.temporary == max(each.nbytes for name, each in dense.named_parameters() if name.endswith(ends))
    assert counted.weights < without.weights
    for policy, expected in training_memory(dense, 64).activations.items():
        assert training_memory(kept, 64).activations[policy] == expected


@pytest.mark.matrix
@pytest.mark.compile
def test_blocks_with_experts_compile(tmp_path: Path) -> None:
    codes, _ = quantized("qwen3_moe", tmp_path, BLOCK, powers=True)
    model = stirred(load(codes, keep_quantized=True, dtype="float32"))
    want = step(model)
    compile_blocks(model, backend="eager")
    loss, gradients = step(model)
    torch.testing.assert_close(loss, want[0])
    for name, gradient in want[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_what_does_not_work_is_named(tmp_path: Path) -> None:
    codes, dense = quantized("qwen3", tmp_path, BLOCK)
    with pytest.raises(
        ValueError, match=r"keep_quantized needs linear layers or experts whose .* got a checkpoint without any"
    ):
        load(dense, keep_quantized=True)
    with pytest.raises(ValueError, match="load_hf_tensors: weights must not be kept quantized"):
        load_hf_tensors(load(codes, keep_quantized=True), get_hf_state_dict(load(dense)))
