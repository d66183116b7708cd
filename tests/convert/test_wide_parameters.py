"""Parameters that stay in fp32 beside weights in half precision: in memory, in files and in training."""

import pytest
import torch
from safetensors.torch import load_file

from liger_models.arch.mamba2 import LigerMamba2ForCausalLM, Mamba2Config
from liger_models.convert.tensors import get_hf_state_dict
from liger_models.layers.layer import wide_parameters
from liger_models.train import LigerAdamW, LigerMuon

CONFIG = Mamba2Config(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=16, n_groups=2,
    initializer_range=0.1,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A checkpoint all of whose tensors are in bf16."""
    torch.manual_seed(0)
    model = LigerMamba2ForCausalLM.from_config(CONFIG)
    model.save_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    return tmp_path / "bf16"


def dtypes(model):
    wide = {*wide_parameters(model)}
    return [{p.dtype for name, p in model.named_parameters() if (name in wide) == side} for side in (True, False)]


def test_half_precision_leaves_them_in_fp32(folder):
    narrow = [{torch.float32}, {torch.bfloat16}]
    model = LigerMamba2ForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    assert wide_parameters(model) == [f"layers.0.mixer.decay.{name}" for name in ("dt_bias", "A_log", "D")]
    assert dtypes(model) == narrow
    wide = LigerMamba2ForCausalLM.from_config(CONFIG)
    with torch.no_grad():
        wide.layers[0].mixer.decay.A_log.fill_(1 / 3)
    for half in (wide.bfloat16(), wide.to(torch.bfloat16), wide.to("cpu", torch.bfloat16)):
        assert dtypes(half) == narrow
        assert torch.equal(half.layers[0].mixer.decay.A_log, torch.full([4], 1 / 3))
    assert dtypes(wide.double()) == [{torch.float64}, {torch.float64}]
    for dtype in (None, torch.bfloat16):
        assert dtypes(LigerMamba2ForCausalLM.from_pretrained(folder, dtype=dtype)) == narrow
    assert dtypes(LigerMamba2ForCausalLM.from_pretrained(folder, dtype=torch.float32)) == [{torch.float32}] * 2


def test_what_was_not_trained_is_saved_as_it_was_read(folder, tmp_path):
    model = LigerMamba2ForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    read = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, read[name]) for name, tensor in get_hf_state_dict(model).items())

    # The values of one parameter move by less than bf16 can tell.
    with torch.no_grad():
        model.layers[0].mixer.decay.A_log.add_(1e-4)
    model.save_pretrained(tmp_path / "trained")
    saved = load_file(tmp_path / "trained" / "model.safetensors")
    moved = {name for name, tensor in saved.items() if tensor.dtype == torch.float32}
    assert moved == {"backbone.layers.0.mixer.A_log"}
    again = LigerMamba2ForCausalLM.from_pretrained(tmp_path / "trained")
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    again.save_pretrained(tmp_path / "trained-again")
    files = (tmp_path / each / "model.safetensors" for each in ("trained", "trained-again"))
    first, second = (file.read_bytes() for file in files)
    assert first == second

    # In another dtype than that of the file they are fp32.
    LigerMamba2ForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(tmp_path / "fp16")
    saved = load_file(tmp_path / "fp16" / "model.safetensors")
    assert saved["backbone.layers.0.mixer.D"].dtype == torch.float32
    assert saved["backbone.layers.0.norm.weight"].dtype == torch.float16


@pytest.mark.parametrize("optimizer_class", [LigerAdamW, LigerMuon])
def test_optimizers_train_them_in_fp32(folder, optimizer_class):
    model = LigerMamba2ForCausalLM.from_pretrained(folder)
    if optimizer_class is LigerMuon:
        optimizer = LigerMuon(model, lr=1e-4)
    else:
        optimizer = LigerAdamW(model.parameters(), lr=1e-4, stochastic_rounding=True)
    before = model.layers[0].mixer.decay.A_log.detach().clone()
    ids = torch.randint(64, (2, 12))
    model(ids, labels=ids).loss.backward()
    assert model.layers[0].mixer.decay.A_log.grad.dtype == torch.float32
    optimizer.step()
    moved = (model.layers[0].mixer.decay.A_log - before).abs()
    assert ((moved > 0) & (moved < 3e-4)).all()
    assert dtypes(model) == [{torch.float32}, {torch.bfloat16}]
