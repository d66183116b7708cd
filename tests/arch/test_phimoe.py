"""Phi-3.5-MoE: what its head's bias, its router and its rotation add to the tests of every family."""

import json

import pytest
import torch
from safetensors.torch import load_file

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora, merge_lora
from liger_models.arch.phimoe import PhimoeConfig
from liger_models.hf.model import LigerModel
from liger_models.layers.rope import LinearScaling, LongRopeScaling

from ..late import transformers
from .families import LIMIT, auto_class, error, hf_model, load, make_folder, tiny, tokens

WINDOW, LONG = ("phimoe", "window"), ("phimoe", "longrope")
IDS = tokens("phimoe", "window", 2, 12)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def make(variant: str = "window", **changes):
    """A model with weights and biases far from zero."""
    torch.manual_seed(0)
    sizes = {**tiny("phimoe")[variant], "model_type": "phimoe", **changes}
    model = AutoLigerModel.from_config(sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
    return model


@torch.no_grad()
def test_long_texts_are_rotated_with_the_long_factor(root):
    """From the original length on. Transformers 5.23 uses the short one, and multiplies cos and sin alone by another
    number."""
    folder = make_folder(*LONG, root)
    ours, theirs = load("phimoe", folder), auto_class("phimoe").from_pretrained(folder, attn_implementation="eager")
    patched = hf_model(folder)
    short, ids = IDS[:, :5], tokens(*LONG, 2, 12)
    assert error(ours(short).logits, theirs.eval()(short).logits) <= LIMIT
    assert error(ours(ids).logits, theirs(ids).logits) > 1e-3
    assert error(ours(ids).logits, patched(ids).logits) <= LIMIT


def test_experts_are_chosen_in_training_as_in_evaluation():
    model = make()
    want = model(IDS, labels=IDS).loss
    for _ in range(2):
        torch.testing.assert_close(model.train()(IDS, labels=IDS).loss, want, rtol=0, atol=0)


def test_noise_multiplies_the_input_of_the_experts_once(monkeypatch):
    """Half and double, in turn: noise that is applied twice would be seen."""
    model, seen = make(input_jitter_noise=0.25).train(), []
    block = model.layers[0].mlp
    block.gate.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.ones(1, 400, 64)
    block(x)
    assert 0.75 <= seen[0].min() < 0.76
    assert 1.24 < seen[0].max() <= 1.25


def test_released_names_are_written(tmp_path):
    make("longrope").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["PhiMoEForCausalLM"]
    assert config["rope_scaling"]["type"] == "longrope"
    assert set(config["rope_scaling"]) == {
        "type", "short_factor", "long_factor", "short_mscale", "long_mscale", "original_max_position_embeddings"
    }  # fmt: skip
    assert type(auto_class("phimoe").from_pretrained(tmp_path)) is transformers.PhimoeForCausalLM


@pytest.mark.parametrize("variant", ["window", "tied"])
def test_an_adapter_on_a_head_with_a_bias(variant):
    model = make(variant, tie_word_embeddings=False)
    want = model(IDS).logits.detach()
    apply_lora(model, LoRAConfig(r=4, target_modules=["lm_head"]))
    assert error(model(IDS).logits, want) <= LIMIT
    torch.nn.init.normal_(model.lm_head.lora["lm_head"].lora_B)
    adapted = model(IDS, labels=IDS, return_logits=True)
    assert error(adapted.logits, want) > 0.1
    with torch.no_grad():
        assert error(model(IDS).logits, adapted.logits) <= LIMIT
    adapted.loss.backward()
    assert model.lm_head.lora["lm_head"].lora_A.grad.any()
    assert model.lm_head.bias.grad is None
    merge_lora(model)
    again = model(IDS, labels=IDS, return_logits=True)
    assert error(again.logits, adapted.logits) <= LIMIT
    torch.testing.assert_close(again.loss, adapted.loss)


def test_sampled_tokens_have_the_log_probabilities_of_a_forward():
    model = make()
    prompts = [IDS[0, :5].tolist(), IDS[1, :9].tolist()]
    for deterministic in (False, True):
        completions = model.rollout(prompts, max_new_tokens=6, seed=1, deterministic=deterministic)
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion.tokens.tolist()]])
            with torch.no_grad():
                log_probs = model(ids, labels=ids, return_log_probs=True).log_probs
            want = log_probs[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(completion.log_probs, want, rtol=1e-4, atol=1e-5)


def test_a_body_has_no_bias_of_a_head(tmp_path):
    make().save_pretrained(tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert "lm_head.bias" in whole
    body = LigerModel.from_pretrained(tmp_path / "whole")
    assert not any("lm_head" in name for name, _ in body.named_parameters())
    body.save_pretrained(tmp_path / "body")
    saved = load_file(tmp_path / "body" / "model.safetensors")
    assert {name for name in whole if not name.startswith("lm_head.")} == {
        name if name.startswith("model.") else f"model.{name}" for name in saved
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": LinearScaling(factor=2.0)}, "rope_scaling must be LongRopeScaling with short_mscale and"),
        (
            {
                "rope_scaling": LongRopeScaling(
                    short_factor=[1.0], long_factor=[1.0], original_max_position_embeddings=8, short_mscale=1.0
                )
            },
            "short_mscale and long_mscale, or None, got .*long_mscale=None",
        ),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok must be 2, got 3"),
        ({"router_jitter_noise": -0.1}, "router_jitter_noise must be at least 0, got -0.1"),
    ],
)
def test_configurations_that_the_model_cannot_have(changes, message):
    with pytest.raises(ValueError, match=message):
        PhimoeConfig(**changes)
