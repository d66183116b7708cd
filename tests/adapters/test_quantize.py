"""`quantize_base` on models without adapters."""

import pytest
import torch

from liger_models import LigerLlama, LigerMixtral
from liger_models.adapters import LoRAConfig, apply_lora, quantize_base
from liger_models.arch.llama import LlamaConfig
from liger_models.arch.mixtral import MixtralConfig
from liger_models.convert import get_hf_state_dict
from liger_models.layers.frozen_linear import FrozenLinear

from ..late import Late

torchao = Late("torchao", "quantized weights need torchao")
SIZES = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
IDS = torch.arange(36).view(2, 18) % 50
DTYPES = pytest.mark.parametrize("dtype", ["nf4", "float8"])
EXPERTS = pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])


@pytest.fixture(autouse=True)
def _needs_torchao():
    torchao.quantization  # noqa: B018


def plain(experts: bool = False):
    torch.manual_seed(0)
    if experts:
        return LigerMixtral.from_config(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    return LigerLlama.from_config(LlamaConfig(**SIZES, attention_bias=True))


@DTYPES
@EXPERTS
def test_the_model_is_that_with_adapters_that_do_nothing(dtype, experts):
    """Adapters start at 0. Logits, tokens, and what is saved: the numbers that the codes stand for."""
    model, want = quantize_base(plain(experts), dtype=dtype), quantize_base(apply_lora(plain(experts)), dtype=dtype)
    linear = [each for each in model.layers.modules() if isinstance(each, torch.nn.Linear)]
    assert {type(each) for each in linear if each not in routers(model)} == {FrozenLinear}
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert sum(p.nbytes for p in model.layers.parameters()) < 0.4 * sum(p.nbytes for p in plain(experts).parameters())
    assert torch.equal(model(IDS).logits, want(IDS).logits)
    tokens = [each.generate(IDS[:, :7], max_new_tokens=9, eos_token_id=[]) for each in (model, want)]
    assert torch.equal(*tokens)
    got, expected, dense = (get_hf_state_dict(each) for each in (model, want, plain(experts)))
    assert got.keys() == expected.keys() == dense.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert {name for name in got if not torch.equal(got[name], dense[name])} == {
        name for name in got if "proj.weight" in name or ".experts." in name
    }


def routers(model):
    return [each.gate for each in model.modules() if hasattr(each, "gate") and hasattr(each, "top_k")]


@DTYPES
def test_adapters_may_be_added_later(dtype):
    first, second = quantize_base(plain(), dtype=dtype), plain()
    for each in (first, second):
        torch.manual_seed(1)
        apply_lora(each, LoRAConfig(r=4))
    quantize_base(second, dtype=dtype)
    for name, parameter in first.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
            second.get_parameter(name).data.copy_(parameter)
    losses = [each(IDS, labels=IDS).loss for each in (first, second)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    trained = [name for name, parameter in first.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * 2
    assert all(torch.equal(first.get_parameter(name).grad, second.get_parameter(name).grad) for name in trained)
    merged = [get_hf_state_dict(each) for each in (first, second)]
    assert all(torch.equal(tensor, merged[1][name]) for name, tensor in merged[0].items())


@DTYPES
@EXPERTS
def test_weights_that_are_quantized_as_they_are_read(dtype, experts, tmp_path):
    model = plain(experts)
    model.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path, progress=False, shard=lambda model: quantize_base(model, dtype=dtype))
    want = quantize_base(model, dtype=dtype)
    assert torch.equal(read(IDS).logits, want(IDS).logits)
    assert read.num_parameters() == want.num_parameters()
    read.save_pretrained(tmp_path / "again")
    again = get_hf_state_dict(type(model).from_pretrained(tmp_path / "again", progress=False))
    assert all(torch.equal(tensor, again[name]) for name, tensor in get_hf_state_dict(want).items())


@pytest.mark.gpu
@DTYPES
@EXPERTS
def test_decoding_on_a_gpu(dtype, experts):
    """A model on the CPU that is quantized on the GPU, in graphs of few rows, beside its own forward."""
    model = quantize_base(plain(experts).to(torch.bfloat16), "cuda", dtype=dtype).eval()
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    found = model.generate(IDS[:, :7].cuda(), max_new_tokens=9, eos_token_id=[], return_logprobs=True)
    whole = model(found.sequences).logits[:, 6:-1].float().log_softmax(-1)
    wanted = whole.gather(2, found.sequences[:, 7:, None])[..., 0]
    torch.testing.assert_close(found.logprobs, wanted, rtol=0, atol=0.1)


def test_deterministic_rollouts():
    """As under adapters: 4 bits are dequantized for all rows alike, float8 is refused."""
    (found,) = quantize_base(plain()).rollout([[3, 4]], max_new_tokens=2, eos_token_id=[], deterministic=True)
    assert len(found.tokens) == 2
    with pytest.raises(ValueError, match=r"linear layers must not be float8, got layers\.0\.self_attn\.qkv_proj"):
        quantize_base(plain(), dtype="float8").rollout([[3, 4]], max_new_tokens=2, deterministic=True)


def test_what_cannot_be_quantized():
    with pytest.raises(ValueError, match="must not be quantized yet"):
        quantize_base(quantize_base(plain()))
    with pytest.raises(ValueError, match="must have adapters on layers of the blocks, or no adapters"):
        quantize_base(apply_lora(plain(), LoRAConfig(target_modules=["lm_head"])))
