"""The head with a bias: logits, every loss and all gradients are those of a linear layer with a bias."""

import pytest
import torch
from torch.nn import functional as F

from liger_models import KernelOptions, LigerFusedLinearDPOLoss, LigerLlama, LlamaConfig
from liger_models.generation.deterministic import head_outputs
from liger_models.kernels.dispatch import reference_backend
from liger_models.layers.lm_head import BIAS_COLUMNS, LigerLMHead
from liger_models.memory import training_memory

C, V, N = 16, 37, 12
SCALE, CAP = 1.5, 4.0


def make_head(**options) -> LigerLMHead:
    torch.manual_seed(0)
    head = LigerLMHead(C, V, bias=True, logit_scale=SCALE, softcap=CAP, **options)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    return head


def plain_logits(x, weight, bias):
    return CAP * torch.tanh(SCALE * F.linear(x, weight, bias) / CAP)


def mean_loss(x, weight, bias, target):
    return F.cross_entropy(plain_logits(x, weight, bias), target, ignore_index=-100)


def gradients_of(loss, *leaves):
    return [gradient.double() for gradient in torch.autograd.grad(loss, leaves)]


def wide_copies(*tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def dpo(x, weight, target):
    function = LigerFusedLinearDPOLoss(use_ref_model=False, logit_scale=SCALE, softcap=CAP, compute_nll_loss=True)
    return function(weight, x.view(4, 3, -1), target.view(4, 3))[0]


def plain_dpo(x, weight, bias, target):
    one = weight.new_ones(V, 1)  # the bias as a column of the weight
    columns = torch.cat([weight, bias[:, None] * one], 1)
    with reference_backend():
        return dpo(torch.cat([x, torch.ones_like(x[:, :1])], 1), columns, target)


LOSSES = {
    "fused": (KernelOptions(), {}, mean_loss),
    "in two kernels": (KernelOptions(fused_linear_cross_entropy=False), {}, mean_loss),
    "log-probabilities": (
        KernelOptions(),
        {"log_probs": True},
        lambda x, weight, bias, target: (
            -plain_logits(x, weight, bias)
            .log_softmax(-1)[range(N), target.clamp(min=0)]
            .masked_fill(target < 0, 0)
            .sum()
        ),
    ),
    "another loss": (KernelOptions(), {"loss_function": dpo}, plain_dpo),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_a_linear_layer_with_a_bias(backend, name):
    kernels, options, plain = LOSSES[name]
    head = make_head(kernels=kernels).to(backend)
    x = torch.randn(N, C).to(backend).requires_grad_()
    target = torch.randint(V, (N,)).to(backend)
    target[5] = -100
    result, _ = head(x, target, **options)
    loss = -result.sum() if "log_probs" in options else result
    wide = wide_copies(x, head.weight, head.bias)
    exact = plain(*wide, target)
    torch.testing.assert_close(loss.double(), exact.double(), rtol=1e-5, atol=1e-6)
    ours = gradients_of(loss, x, head.weight, head.bias)
    with reference_backend():  # kernels on a GPU do not support fp64
        theirs = gradients_of(exact, *wide)
    for got, want in zip(ours, theirs, strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_logits_have_the_bias_with_and_without_gradients(backend):
    head, x = make_head().to(backend), torch.randn(2, N, C).to(backend)
    want = plain_logits(x, head.weight, head.bias)
    torch.testing.assert_close(head(x), want)
    with torch.no_grad():
        torch.testing.assert_close(head(x), want)
    _, logits = head(x, torch.zeros(2, N, dtype=torch.int64, device=backend), return_logits=True)
    torch.testing.assert_close(logits, want)
    with torch.no_grad():
        torch.testing.assert_close(head_outputs(head, x[:, 0])[1], want[:, 0])


def test_rows_of_the_operands_stay_aligned():
    head = make_head()
    x, weight = head.operands(torch.randn(N, C))
    assert weight.shape == (V, C + BIAS_COLUMNS)
    assert x.shape[1] % 8 == 0


def test_a_head_without_bias_adds_no_column():
    head, x = LigerLMHead(C, V), torch.randn(N, C)
    assert head.operands(x)[0] is x
    assert head.operands(x)[1] is head.weight


class Biased(LigerLlama):
    """Llama whose head has a bias."""

    def build_head(self, config):
        return LigerLMHead(config.hidden_size, config.vocab_size, bias=True, kernels=self.kernels)


SIZES = {"vocab_size": V, "hidden_size": C, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_the_estimate_has_the_copy_of_the_weight():
    config = LlamaConfig(**SIZES)
    plain, biased = (training_memory(model.from_config(config, device="meta"), 64) for model in (LigerLlama, Biased))
    assert biased.logits - plain.logits == 2 * V * (C + BIAS_COLUMNS)
    assert biased.weights - plain.weights == 2 * V


def test_new_rows_get_the_mean_of_the_bias():
    model = Biased.from_config(LlamaConfig(**SIZES))
    torch.nn.init.normal_(model.lm_head.bias)
    old = model.lm_head.bias.detach().clone()
    model.resize_token_embeddings(V + 3)
    assert torch.equal(model.lm_head.bias[:V], old)
    torch.testing.assert_close(model.lm_head.bias[V:].detach(), old.mean().expand(3))
    model.resize_token_embeddings(V - 5)
    assert torch.equal(model.lm_head.bias, old[: V - 5])
    ids = torch.arange(6)[None]
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.bias.grad.any()
