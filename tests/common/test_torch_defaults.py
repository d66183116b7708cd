"""Several training loops call `torch.set_default_dtype(torch.bfloat16)`. No result may depend on it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import liger_models.train.optimizer
from liger_models import AutoLigerProcessor, LigerAdamW, LigerMuon
from liger_models.kernels.loss.cross_entropy import token_accuracy

from ..arch.families import load, make_folder, tokens
from ..base import test_processor_lfm2_vl, test_processor_muse_glimmer, test_processor_transformers
from ..base.conftest import picture
from ..convert.quantized_folders import make_quantized
from ..generation.test_drafts import drafting


def assert_same(compute: Callable[[], Any]) -> None:
    want = compute()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = compute()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=0)  # and the same dtypes


CASES = [
    ("llama", "dynamic"), ("phimoe", "longrope"), ("phimoe", "aux"), ("apertus", "released"), ("idefics3", "tied"),
    ("gemma3n_text", "shared"), ("qwen3_5_text", "gqa"), ("nemotron_h", "experts"), ("kimi_linear", "experts"),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "variant"), CASES)
def test_models(arch, variant, tmp_path):
    folder, ids = make_folder(arch, variant, tmp_path), tokens(arch, variant, 2, 14)

    def step():
        model = load(arch, folder, dtype=torch.float32)
        out = model(ids, labels=ids)
        out.loss.backward()
        return out.loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    assert_same(step)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", ["bnb", "bnb_nested", "mo_nvfp4"])
def test_quantized_checkpoints(kind, kept, tmp_path):
    codes, _ = make_quantized(kind, "qwen3", tmp_path)
    ids = torch.arange(3, 17)[None]
    assert_same(lambda: load("qwen3", codes, dtype=torch.float32, keep_quantized=kept)(ids).logits.detach())


@pytest.mark.parametrize("seeded", [False, True])
def test_log_probs_of_rollouts(seeded):
    """With drafts, whose probabilities are compared if there is no seed."""
    model, mtp = drafting("glm4_moe")

    def log_probs():
        draws = {"seed": 3} if seeded else {"generator": torch.Generator().manual_seed(3)}
        found = model.rollout(
            [[5, 6, 7], [8, 9]], max_new_tokens=8, do_sample=True, draft_model=mtp, num_draft_tokens=2, **draws
        )
        return [(row.tokens, row.log_probs) for row in found]

    assert_same(log_probs)


@pytest.mark.parametrize("arch", ["qwen2_vl", "idefics3", "mllama", "gemma4", "muse_glimmer", "lfm2_vl"])
def test_pixels(arch, tmp_path):
    own = {"muse_glimmer": test_processor_muse_glimmer.make, "lfm2_vl": test_processor_lfm2_vl.make}
    model = own[arch]() if arch in own else test_processor_transformers.make(arch)
    model.save_pretrained(tmp_path)
    images = [picture(40, 30), picture(24, 50)]
    assert_same(lambda: AutoLigerProcessor.from_pretrained(tmp_path).pixels(images))


@pytest.mark.parametrize("muon", [False, True])
def test_states_of_optimizers(muon, tmp_path, monkeypatch):
    monkeypatch.setattr(liger_models.train.optimizer, "SMALLEST", 0)
    folder = make_folder("llama", "gqa", tmp_path)

    def state():
        model = load("llama", folder, dtype=torch.float32)
        optimizer = LigerMuon(model) if muon else LigerAdamW(model.parameters(), state_dtype=torch.int8)
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 + step)
            optimizer.step()
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {
            names[parameter]: {**values, "weight": parameter.detach()} for parameter, values in optimizer.state.items()
        }

    assert_same(state)


def test_the_accuracy_of_tokens():
    target = torch.arange(1000)
    assert_same(lambda: token_accuracy(target.clamp(max=332), target, -100))
