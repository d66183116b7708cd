"""Answers that share the tokens of their prompt, beside answers that each follow a copy of it, for every family."""

import copy

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.base.vision_language import placeholder_ids
from liger_models.data import pack_answers
from liger_models.layers.lm_head import select_tokens

from .families import ARCHS, CASES, FIRST_CASES, LIMIT, beyond_kinds, beyond_settings, error, text_sizes, tiny

PROMPTS, ANSWERS = (9, 1, 14), (5, 12, 3, 1, 8, 6)
"""Numbers of tokens of the prompts, and of the two answers to each prompt."""


def build(arch, variant, device="cpu", **options):
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({"model_type": arch, **tiny(arch)[variant]}, device=device, **options)
    for parameter in model.parameters():  # norms, biases and gates that start with zeros or ones hide mistakes
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def sample(model, vocabulary):
    """Prompts and answers without placeholders of images."""
    generator = torch.Generator().manual_seed(0)
    ids = [token for token in range(3, vocabulary) if token not in placeholder_ids(model.config)]
    draw = lambda n: torch.tensor(ids)[torch.randint(len(ids), (n,), generator=generator)]
    return [draw(n) for n in PROMPTS], [draw(n) for n in ANSWERS]


def log_probs(model, hidden, weight, target):
    """The log-probabilities of targets, 0 where there is none."""
    logits = (hidden @ weight.T).float() * model.lm_head.logit_scale
    if model.lm_head.softcap is not None:
        logits = model.lm_head.softcap * torch.tanh(logits / model.lm_head.softcap)
    values = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return values.masked_fill(target == -100, 0.0)


def shared(model, prompts, answers):
    batch, tokens = pack_answers(prompts, answers)
    moved = {name: batch[name].to(model.device) for name in ("input_ids", "labels")}
    tokens = tokens.to(model.device)

    def of_answers(hidden, weight, target):
        hidden, target = select_tokens(hidden, target, tokens)
        return log_probs(model, hidden, weight, target)

    values = model(**batch | moved, loss_function=of_answers).loss
    return [row[: len(answer)] for row, answer in zip(values, answers, strict=True)]


def alone(model, prompts, answers):
    values = []
    for number, answer in enumerate(answers):
        prompt = prompts[number // 2]
        ids = torch.cat([prompt, answer])[None].to(model.device)
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        row = model(ids, labels=labels, loss_function=lambda *given: log_probs(model, *given)).loss[0]
        values.append(row[len(prompt) - 1 : -1])
    return values


def values_and_gradients(model, function, prompts, answers):
    model.zero_grad()
    values = torch.cat(function(model, prompts, answers))
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(1)).to(values.device)
    (values * weights).sum().backward()
    return values.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("arch", "variant"), [pytest.param(*case, marks=beyond_settings(case) or beyond_kinds(case[0])) for case in CASES]
)
def test_answers_that_share_a_prompt_equal_answers_alone(arch, variant):
    model = build(arch, variant)
    prompts, answers = sample(model, text_sizes(arch, variant)["vocab_size"])
    if not model.takes_parents:
        with pytest.raises((ValueError, TypeError), match="parents"):
            shared(model, prompts, answers)
        return
    want, expected = values_and_gradients(model, alone, prompts, answers)
    got, gradients = values_and_gradients(model, shared, prompts, answers)
    assert error(got, want) <= LIMIT
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(gradients[name], gradient) <= LIMIT, name


def test_most_text_families_share_prompts():
    """What does not: recurrent layers, chunks, images, and frequencies that depend on lengths."""
    without = {
        arch for arch, variant in FIRST_CASES
        if not AutoLigerModel.from_config({"model_type": arch, **tiny(arch)[variant]}, device="meta").takes_parents
        and "vision_config" not in tiny(arch)[variant]
    }  # fmt: skip
    assert len(without) < len(ARCHS) / 3
    assert {"llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "deepseek_v3", "mistral"}.isdisjoint(without)
    assert {"mamba2", "qwen3_next", "nemotron_h", "llama4_text"} <= without


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "mistral"])
def test_answers_that_share_a_prompt_on_a_gpu(arch):
    """In half precision, as near to fp64 as answers alone are."""
    variant = next(variant for name, variant in FIRST_CASES if name == arch)
    model = build(arch, variant)
    prompts, answers = sample(model, text_sizes(arch, variant)["vocab_size"])
    truth, _ = values_and_gradients(copy.deepcopy(model).double(), alone, prompts, answers)
    model.to("cuda", torch.bfloat16)
    want, expected = values_and_gradients(model, alone, prompts, answers)
    got, gradients = values_and_gradients(model, shared, prompts, answers)
    assert error(got.cpu(), truth) <= 1.5 * error(want.cpu(), truth)
    for name, gradient in expected.items():
        assert error(gradients[name], gradient) <= 0.1, name
