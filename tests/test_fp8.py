import copy
import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from liger_models import AutoLigerModel, LigerLlama, LlamaConfig
from liger_models.adapters.float8 import convert_to_float8
from liger_models.base.causal_lm import CausalLM
from liger_models.layers.layer import CHECKPOINTING_POLICIES

from .late import Late

float8 = Late("torchao.float8")
float8_linear = Late("torchao.float8.float8_linear")

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
ATTENTION = ["self_attn.qkv_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_up_proj", "mlp.down_proj"]
IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _torchao():
    pytest.importorskip("torchao", reason="float8 training needs torchao: pip install 'liger_models[fp8]'")


def emulated() -> Any:
    """Float8 products that any device computes."""
    return float8.Float8LinearConfig(emulate=True)


def llama(dtype: torch.dtype = torch.bfloat16, **changes) -> LigerLlama:
    torch.manual_seed(0)
    return LigerLlama.from_config(LlamaConfig(**(vars(CONFIG) | changes)), dtype=dtype)


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, float8_linear.Float8Linear)]


def step(model: CausalLM, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and the gradient of every parameter."""
    model.zero_grad()
    loss = model(IDS, labels=IDS, **options).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "qwen3"}, ATTENTION + MLP),
        ({"model_type": "gemma2", "sliding_window": 8}, ATTENTION + MLP),
        ({"model_type": "mixtral", "num_local_experts": 4}, ATTENTION),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_linear_layers_of_the_blocks_are_converted(config, names):
    """Not the head, the embedding, routers and experts."""
    model = AutoLigerModel.from_config(SIZES | config)
    before = dict(model.named_parameters())
    assert convert_to_float8(model, emulated()) is model
    assert converted(model) == [f"layers.{i}.{name}" for i in range(2) for name in names]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_loss_and_gradients_are_close_to_bf16(recipe):
    model = llama()
    loss, gradients = step(model)
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    rounded_loss, rounded = step(convert_to_float8(model, config))
    assert 0 < abs(rounded_loss - loss) < 0.01 * loss
    for got, want in zip(rounded, gradients, strict=True):
        assert (got - want).norm() < 0.2 * want.norm()  # e4m3 has 3 bits behind the point, e5m2 has 2


def test_a_name_is_torchaos_recipe():
    model = convert_to_float8(llama(), "rowwise")
    linear = model.layers[0].mlp.down_proj
    assert linear.config.cast_config_input.scaling_granularity.short_str() == "axs"
    assert linear.config.pad_inner_dim
    assert not linear.config.emulate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_policy_gives_the_same_gradients(dtype):
    model = convert_to_float8(llama(dtype), emulated())
    want = step(model)
    for policy in ("selective", "full"):
        model.set_checkpointing(policy)
        torch.testing.assert_close(step(model), want, rtol=0, atol=0)


def test_kernels_around_float8_layers(kernel_device):
    """The norms and the gated product run as kernels of their own where a linear layer is no plain one."""
    model = convert_to_float8(llama(torch.float32).to(kernel_device), emulated())
    reference = copy.deepcopy(model).to("cpu")
    for policy in ("none", "selective"):
        model.set_checkpointing(policy)
        loss = model(IDS.to(kernel_device), labels=IDS.to(kernel_device)).loss
        loss.backward()
        torch.testing.assert_close(loss.cpu(), reference(IDS, labels=IDS).loss, rtol=1e-3, atol=0)
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_selective_keeps_the_stream_of_the_mlp_alone():
    """Not the normed rows, nor gate and up, nor their product."""
    model = convert_to_float8(llama(), emulated())
    model.set_checkpointing("selective")
    block = model.layers[0]
    x, residual = torch.randn(2, 2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, stream = block.mlp.add_norm(block.post_attention_layernorm, x, residual)
    assert [t.data_ptr() for t in saved] == [stream.data_ptr()]


@pytest.mark.compile
@pytest.mark.parametrize(("policy", "packed"), [("none", False), ("selective", True), ("full", False)])
def test_blocks_compile(policy, packed):
    """Each in one graph, and all but the first, which has no branch to add, in the same."""
    torch._dynamo.reset()
    options = {"cu_seqlens": torch.tensor([0, 5, 20, 32])} if packed else {}
    model = convert_to_float8(llama(), emulated())
    model.set_checkpointing(policy)
    want = step(model, **options)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(step(model, **options), want)
    assert counter.frame_count == 2
    assert not any("_orig_mod" in name for name in model.state_dict())


@pytest.mark.compile
@pytest.mark.slow
def test_blocks_compile_with_inductor():
    """The second block: the first does the same but for the addition of a branch."""
    torch._dynamo.reset()
    model = convert_to_float8(llama(torch.float32, num_hidden_layers=2), emulated())
    want = step(model)
    model.layers[1].compile(fullgraph=True)
    loss, gradients = step(model)
    torch.testing.assert_close(loss, want[0], rtol=1e-3, atol=0)
    for got, exact in zip(gradients, want[1], strict=True):
        assert (
            got - exact
        ).norm() < 0.1 * exact.norm()  # another rounding before a cast moves a value by a float8 step


def test_checkpoints_are_those_of_the_plain_model(tmp_path):
    plain = llama()
    model = convert_to_float8(copy.deepcopy(plain), emulated())
    assert model.num_parameters() == plain.num_parameters()
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in plain.state_dict().items()}
    for name, each in (("plain", plain), ("float8", model)):
        each.save_pretrained(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "float8").iterdir())
    for file in files:
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "float8" / file).read_bytes()
    again = LigerLlama.from_pretrained(tmp_path / "float8", progress=False)
    assert again.dtype == torch.bfloat16
    torch.testing.assert_close(step(convert_to_float8(again, emulated())), step(model), rtol=0, atol=0)
    plain.load_state_dict(model.state_dict())


def test_a_configuration_of_torchao_is_taken_as_it_is():
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    linear = convert_to_float8(llama(), config).layers[0].mlp.down_proj
    assert linear.config is config
    assert type(linear.weight.data) is not torch.Tensor  # FSDP2 asks it for what to gather


def test_generation_and_meta_device():
    model = convert_to_float8(llama(), emulated())
    assert model.generate(IDS, max_new_tokens=2, eos_token_id=[]).shape == (2, 18)
    with torch.device("meta"):
        meta = LigerLlama(CONFIG).bfloat16()
    convert_to_float8(meta, emulated()).to_empty(device="cpu").load_state_dict(model.state_dict())
    torch.testing.assert_close(step(meta), step(model), rtol=0, atol=0)


def test_odd_sizes_stay_and_are_named():
    model = llama(intermediate_size=50)
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp\.gate_up_proj \[100, 32\], .* and 2 more\. They stay in bfl"):
        convert_to_float8(model, emulated())
    assert converted(model) == [f"layers.{i}.{name}" for i in range(3) for name in ATTENTION]
    assert step(model)[0].isfinite()


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match="recipe must be one of tensorwise, rowwise, rowwise_with_gw_hp, got 'fp8'"):
        convert_to_float8(llama(), "fp8")
    with pytest.raises(TypeError, match="recipe must be a name or a Float8LinearConfig, got NoneType"):
        convert_to_float8(llama(), None)
    with pytest.raises(TypeError, match=r"weights must be float32 or bfloat16, got torch\.float16"):
        convert_to_float8(llama(torch.float16))
    with pytest.raises(ValueError, match=r"multiples of 16 in its blocks, got none\. Don't convert it \(again\)"):
        convert_to_float8(convert_to_float8(llama()))
    monkeypatch.setattr(CausalLM, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RuntimeError, match=r"the GPU must have float8 .*, got sm_80"):
        convert_to_float8(llama())
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match=r"pip install 'liger_models\[fp8\]'"):
        convert_to_float8(llama())


@pytest.mark.compile
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
def test_compiled_blocks_on_gpu(recipe, packed):
    """Hardware products, kernels between them, token counts that are no multiple of 16."""
    torch._dynamo.reset()
    model = llama(hidden_size=256, intermediate_size=512).to("cuda")
    ids = torch.randint(64, (1, 509), device="cuda")
    options = {"cu_seqlens": torch.tensor([0, 130, 509], device="cuda")} if packed else {}
    want = model(ids, labels=ids, **options).loss
    convert_to_float8(model, recipe)
    for policy in CHECKPOINTING_POLICIES:
        model.set_checkpointing(policy)
        for compiled in (False, True):
            for block in model.layers:
                block.compile(fullgraph=True) if compiled else setattr(block, "_compiled_call_impl", None)
            model.zero_grad()
            loss = model(ids, labels=ids, **options).loss
            loss.backward()
            torch.testing.assert_close(loss, want, rtol=0.01, atol=0)
            assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
