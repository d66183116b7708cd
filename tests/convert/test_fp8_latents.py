"""DeepSeek V3 in float8: matrices whose last block is a part of one, as the 576 rows of its ``kv_a_proj_with_mqa``.

The tiny model has 40 rows there, in blocks of 24, and 24 rows of ``q_a_proj`` beside them in one parameter.
"""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from liger_models import AutoLigerModel
from liger_models.adapters import LigerMTP, LoRAConfig, apply_lora, load_adapter, merge_lora, save_adapter
from liger_models.convert import save
from liger_models.convert.files import open_files, read_headers, read_rows
from liger_models.layers.frozen import frozen_weights
from liger_models.parallel import apply_fsdp

from .conftest import assert_same_bits, read_tensors
from .test_fp8 import quantized

BLOCK = (24, 20)
KEEP: dict[str, Any] = {"keep_quantized": True}
IDS = torch.arange(2, 14)[None]
IN_FLOAT8 = {
    "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj",
    "self_attn.o_proj", "mlp.experts.0.gate_proj", "mlp.experts.11.down_proj", "mlp.shared_experts.up_proj",
    "mlp.shared_experts.down_proj",
}  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in float8, and one in bfloat16 with the numbers that it stands for."""
    codes, dense = quantized("deepseek_v3", tmp_path, BLOCK, powers=True)
    with safe_open(codes / "model.safetensors", "pt") as file:
        for name in IN_FLOAT8:
            assert file.get_slice(f"model.layers.1.{name}.weight").get_dtype() == "F8_E4M3", name
        scales = file.get_tensor("model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv")
        assert scales.shape == (2, 4)  # 40 rows are a block of 24 and one of 16, and 64 columns end with one of 4
    return codes, dense


def load(folder: Path, **options: Any) -> Any:
    return AutoLigerModel.from_pretrained(folder, progress=False, **options)


def gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_read_as_what_it_stands_for(folders: tuple[Path, Path]) -> None:
    codes, dense = folders
    assert_same_bits(dict(load(codes).named_parameters()), dict(load(dense).named_parameters()))


def test_frozen_weights_are_kept_and_saved_again(folders: tuple[Path, Path], tmp_path: Path) -> None:
    codes, dense = folders
    want, kept = load(codes, dtype="float32"), load(codes, dtype="float32", **KEEP)
    names = {name.split(".", 2)[2] for name in frozen_weights(kept)}
    assert names >= {"self_attn.qkv_a_proj.weight", "self_attn.kv_b_proj.weight", "mlp.experts.down_weight"}
    assert names >= {"mlp.shared_expert.gate_up_proj.weight", "self_attn.q_b_proj.weight", "self_attn.o_proj.weight"}
    torch.testing.assert_close(kept(IDS).logits, want(IDS).logits, rtol=1e-5, atol=1e-5)
    load(codes, **KEEP).save_pretrained(tmp_path / "saved")
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(codes))
    assert "quantization_config" in (tmp_path / "saved" / "config.json").read_text()
    kept.save_pretrained(tmp_path / "dense", dtype="bfloat16")
    assert_same_bits(read_tensors(tmp_path / "dense"), read_tensors(dense))


def with_mtp(codes: Path, dense: Path) -> None:
    """Add a multi-token prediction block, whose matrices are in float8, too."""
    for folder in (codes, dense):
        tensors = read_tensors(folder)
        block = {name: each.clone() for name, each in tensors.items() if name.startswith("model.layers.1.")}
        first = "model.layers.2."
        more = {name.replace("model.layers.1.", first): each for name, each in block.items()}
        more |= {f"{first}{name}.weight": torch.ones(64, dtype=torch.bfloat16) for name in ("enorm", "hnorm")}
        more[f"{first}shared_head.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
        for ending in ("", "_scale_inv") if folder == codes else ("",):
            part = tensors[f"model.layers.1.self_attn.o_proj.weight{ending}"]
            more[f"{first}eh_proj.weight{ending}"] = torch.cat([part] * 3, 1)[:, : (7 if ending else 128)].contiguous()
        more[f"{first}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        more[f"{first}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})


def test_a_prediction_block_in_float8_is_saved_again(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Bit for bit, as the rest; once it is trained, as dense numbers."""
    codes, dense = folders
    with_mtp(codes, dense)
    model = load(codes, **KEEP)
    with mock.patch.object(save, "run_on_rank_zero", wraps=save.run_on_rank_zero) as run:
        model.save_pretrained(tmp_path / "saved")
    run.assert_called_once()  # the other ranks wait in it
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(codes))
    assert "quantization_config" in (tmp_path / "saved" / "config.json").read_text()
    assert_same_bits(model.kept_tensors, load(dense).kept_tensors)

    predictor = LigerMTP(model)
    with torch.no_grad():
        predictor.fc.weight.add_(1)
    model.save_pretrained(tmp_path / "trained")
    saved, stored = read_tensors(tmp_path / "trained"), read_tensors(codes)
    name = "model.layers.2.eh_proj.weight"
    assert saved[name].dtype == torch.bfloat16
    assert f"{name}_scale_inv" not in saved
    rest = {each: tensor for each, tensor in stored.items() if not each.startswith("model.layers.2.")}
    assert_same_bits({each: saved[each] for each in rest}, rest)
    again = load(tmp_path / "trained", **KEEP)
    assert torch.equal(again.kept_tensors[name], saved[name])
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_tokens_from_kept_weights(folders: tuple[Path, Path]) -> None:
    """The cache holds latents, and decoding multiplies them by parts of ``kv_b_proj``."""
    codes, _ = folders
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [], "return_logprobs": True}
    want, got = (load(codes, dtype="float32", **keep).generate(IDS[:, :5], **options) for keep in ({}, KEEP))
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-4, atol=1e-4)


def test_adapters_train_on_kept_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Adapters on all linear layers, experts and shared experts get the gradients that they get on dense weights."""
    codes, _ = folders
    targets = LoRAConfig(r=2, target_parameters=("experts.gate_up_proj", "experts.down_proj"))
    found = []
    for keep in ({}, KEEP):
        torch.manual_seed(0)
        model = apply_lora(load(codes, dtype="float32", **keep), targets)
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] == "lora_B" or ".lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        found.append((model, *gradients(model)))
    (_, want, expected), (kept, loss, got) = found
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert got.keys() == expected.keys()
    assert any("qkv_a_proj" in name for name in got)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-5)
    save_adapter(kept, tmp_path / "adapter")
    again = load_adapter(load(codes, dtype="float32", **KEEP), tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, kept(IDS).logits)
    logits = kept(IDS).logits.detach()
    torch.testing.assert_close(merge_lora(kept)(IDS).logits, logits, rtol=1e-2, atol=1e-2)


def test_any_rows_are_read_with_the_scales_of_their_blocks(folders: tuple[Path, Path]) -> None:
    """As ranks read them: from any row to any other, also within the last block."""
    codes, dense = folders
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    want, stored = read_tensors(dense)[name], read_headers(codes)
    with open_files() as files:
        for first in range(0, 40, 3):
            for last in range(first, 41, 4):
                assert torch.equal(read_rows(files, stored[name], first, last), want[first:last])


@pytest.mark.parametrize("keep", [{}, KEEP], ids=["dense", "kept"])
def test_each_rank_reads_its_part_of_the_blocks(
    folders: tuple[Path, Path], keep: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, _ = folders
    want = dict(load(codes, **keep).named_parameters())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        got = load(codes, shard=apply_fsdp, **keep)
        parameters = {name: getattr(each, "full_tensor", lambda e=each: e)() for name, each in got.named_parameters()}
    finally:
        dist.destroy_process_group()
    assert_same_bits(parameters, want)


def test_full_fine_tuning_in_another_dtype(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """All weights are read as numbers of the dtype, trained, and saved in bfloat16 without ``quantization_config``."""
    codes, dense = folders
    model, want = load(codes, dtype="float32"), load(dense, dtype="float32")
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert frozen_weights(model) == {}
    before = copy.deepcopy(dict(model.named_parameters()))
    for one in (model, want):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(2):
            gradients(one)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(dict(model.named_parameters()), dict(want.named_parameters()))
    moved = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert any("qkv_a_proj" in name for name in moved)
    model.save_pretrained(tmp_path / "tuned", dtype="bfloat16")
    saved = read_tensors(tmp_path / "tuned")
    assert "quantization_config" not in (tmp_path / "tuned" / "config.json").read_text()
    assert not any(name.endswith("_scale_inv") for name in saved)
    assert {tensor.dtype for name, tensor in saved.items() if name.endswith("_proj.weight")} == {torch.bfloat16}
    again = load(tmp_path / "tuned")
    torch.testing.assert_close(again.float()(IDS).logits, model(IDS).logits, rtol=0.1, atol=0.1)
