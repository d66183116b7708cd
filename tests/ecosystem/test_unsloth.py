"""Unsloth's adapters as the benchmarks train them, on the CPU: the loss is that of this package's model."""

import importlib
import os

import pytest
import torch

from benchmarks.training import unsloth
from benchmarks.training.job import Job
from benchmarks.training.modes import Mode
from liger_models import AutoLigerModel

os.environ |= {"UNSLOTH_FORCE_CPU": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "HF_HUB_OFFLINE": "1"}
importlib.import_module("unsloth")  # before transformers, which it patches

pytestmark = pytest.mark.filterwarnings("ignore")  # Unsloth's

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("extras", ["", "+ac"])
def test_its_loss_is_ours_and_adapters_are_trained(extras, tmp_path, monkeypatch):
    model = AutoLigerModel.from_config(CONFIG, dtype=torch.bfloat16)
    monkeypatch.setattr(unsloth, "read_config", lambda name: CONFIG)
    monkeypatch.setattr(unsloth, "build_ours", lambda config, mode: model)
    monkeypatch.setenv("SAVE", str(tmp_path))
    monkeypatch.setenv("CHECKPOINT", str(tmp_path))
    unsloth.save(Job(Mode("ours", {}), "tiny", "", 0, False, 0.0))
    loss = unsloth.UnslothLoss(Mode.parse("unsloth+lora" + extras), 32)
    loss.train()
    ids = torch.randint(5, 300, (2, 32))
    (found,) = loss(ids, ids)
    found.backward()
    want = model(ids, labels=ids).loss
    assert abs(found.item() - want.item()) < 0.01  # both in bf16
    trained = {name for name, each in loss.named_parameters() if each.requires_grad}
    assert trained == {name for name, _ in loss.named_parameters() if "lora_" in name}
    assert all(each.grad is not None for each in loss.parameters() if each.requires_grad)
