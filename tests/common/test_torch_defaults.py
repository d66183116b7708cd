"""Training loops call `torch.set_default_dtype(torch.bfloat16)` or `torch.set_default_device("cuda")`. No result may
depend on it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import liger_models.train.optimizer
from liger_models import AutoLigerProcessor, LigerAdamW, LigerMuon
from liger_models.adapters import unpack_projections
from liger_models.kernels.loss.cross_entropy import token_accuracy
from liger_models.retrieval import LigerEmbedder, LigerReranker

from ..arch.families import load, make_folder, tokens
from ..base import test_processor_lfm2_vl, test_processor_muse_glimmer, test_processor_transformers
from ..base.conftest import picture
from ..convert.quantized_folders import make_quantized
from ..generation.test_drafts import drafting
from ..retrieval.conftest import TEXTS, checkpoint  # noqa: F401
from ..train.test_objectives import folder as objectives  # noqa: F401
from ..train.test_objectives import no_group_is_left, result, tokenizer, train_on  # noqa: F401

DEFAULTS: list[tuple[Any, Any, Any]] = [
    (torch.set_default_dtype, torch.bfloat16, torch.float32),
    (torch.set_default_device, "meta", None),
]


def assert_same(compute: Callable[[], Any]) -> None:
    want = compute()
    for default, value, usual in DEFAULTS:
        default(value)
        try:
            got = compute()
        finally:
            default(usual)
        torch.testing.assert_close(got, want, rtol=0, atol=0)  # and the same dtypes and devices


CASES = [
    ("llama", "dynamic"), ("phimoe", "longrope"), ("phimoe", "aux"), ("apertus", "released"), ("idefics3", "tied"),
    ("gemma3n_text", "shared"), ("qwen3_5_text", "gqa"), ("nemotron_h", "experts"), ("kimi_linear", "experts"),
]  # fmt: skip


@pytest.mark.cases(5)
@pytest.mark.parametrize(("arch", "variant"), CASES)
def test_models(arch, variant, tmp_path):
    folder, ids = make_folder(arch, variant, tmp_path), tokens(arch, variant, 2, 14)

    def step():
        model = load(arch, folder, dtype=torch.float32)
        out = model(ids, labels=ids)
        out.loss.backward()
        return out.loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    assert_same(step)


@pytest.mark.cases(4)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "data", "options"),
    [("pretrain", "text", {"workers": 1, "lora_r": 4}), ("kto", "marked", {}), ("grpo", "prompts", {})],
)
def test_training_runs(objectives, tmp_path, objective, data, options):  # noqa: F811
    numbers = itertools.count()

    def run():
        output = tmp_path / str(next(numbers))
        train_on(objectives, str(output), objective, data, steps=2, **options)
        weights = next(name for name in result(output) if name.endswith(".safetensors"))
        return torch.frombuffer(bytearray(result(output)[weights]), dtype=torch.uint8)

    assert_same(run)


def test_inputs_that_are_no_tensors(checkpoint):  # noqa: F811
    def compute():
        model = LigerEmbedder.from_pretrained(checkpoint, progress=False).model
        rows = model.generate([[8, 9, 10], [11]], max_new_tokens=3, do_sample=True, seed=[1, 2])
        return rows, dict(model.tokenizer(TEXTS)), model.tokenizer.encode("w1 w2", return_tensors="pt")

    assert_same(compute)


def test_embeddings_and_scores(checkpoint):  # noqa: F811
    assert_same(lambda: LigerEmbedder.from_pretrained(checkpoint, progress=False).encode(TEXTS))
    assert_same(lambda: LigerReranker.from_pretrained(checkpoint, progress=False).score([("w1", "w2"), ("w3", "w4")]))


def test_unpacked_projections(tmp_path):
    folder, ids = make_folder("llama", "gqa", tmp_path), tokens("llama", "gqa", 2, 9)

    def logits():
        model = load("llama", folder, dtype=torch.float32)
        unpack_projections(model)
        return model(ids).logits.detach()

    assert_same(logits)


def test_the_accuracy_of_tokens():
    target = torch.arange(1000)
    assert_same(lambda: token_accuracy(target.clamp(max=332), target, -100))
