import copy
import dataclasses

import pytest
import torch
from torch import nn

from liger_models import AutoLigerModel, LigerLlama, LlamaConfig
from liger_models.adapters.float8 import Float8Linear, convert_to_float8
from liger_models.base.causal_lm import CausalLM
from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.float8.float8 import RECIPES
from liger_models.layers.compile_ahead import never_ahead
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.memory import training_memory

from ..late import dynamo_testing

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
ATTENTION = ["self_attn.qkv_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_up_proj", "mlp.down_proj"]
IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def llama(dtype: torch.dtype = torch.bfloat16, **changes) -> LigerLlama:
    torch.manual_seed(0)
    return LigerLlama.from_config(LlamaConfig(**(vars(CONFIG) | changes)), dtype=dtype)


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def step(model: CausalLM, ids: torch.Tensor = IDS, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and the gradient of every parameter."""
    model.zero_grad()
    loss = model(ids, labels=ids, **options).loss
    loss.backward()
    return loss.detach(), [parameter.grad.cpu() for parameter in model.parameters()]


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
    assert convert_to_float8(model) is model
    assert converted(model) == [f"layers.{i}.{name}" for i in range(2) for name in names]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.cases(4)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_are_those_of_torchao(recipe, dtype):
    """And close to those without float8."""
    float8 = pytest.importorskip("torchao.float8", reason="the oracle: pip install 'liger_models[fp8]'")
    plain_loss, plain = step(llama(dtype))
    loss, gradients = step(convert_to_float8(llama(dtype), recipe))
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    their_loss, theirs = step(convert_to_float8(llama(dtype), config))
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    assert 0 < abs(loss - plain_loss) < 0.01 * plain_loss
    for got, want, unrounded in zip(gradients, theirs, plain, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
        assert (got - unrounded).norm() < 0.2 * unrounded.norm()  # e4m3 has 3 bits behind the point, e5m2 has 2


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("config", "recipe"),
    [("llama", "tensorwise"), ("llama", "rowwise"), ("qwen2", "tensorwise"), ("olmo2", "tensorwise")],
)
def test_fused_ops_compute_what_the_reference_computes(kernel_device, config, recipe):
    """Norms and gated MLPs in float8, biases, and a family whose layers fuse less."""
    torch.manual_seed(0)
    model = AutoLigerModel.from_config(SIZES | {"model_type": config, "num_hidden_layers": 1}).to(kernel_device)
    ids = IDS[:, :7].to(kernel_device)
    with reference_backend():
        want = step(convert_to_float8(model, recipe), ids=ids)
    for policy in CHECKPOINTING_POLICIES:
        model.set_checkpointing(policy)
        loss, gradients = step(model, ids=ids)
        torch.testing.assert_close(loss, want[0], rtol=1e-3, atol=0)
        for got, exact in zip(gradients, want[1], strict=True):
            assert (got - exact).norm() < 0.03 * exact.norm()


def test_no_layer_is_called(kernel_device, monkeypatch):
    """A Llama's layers are read by fused ops, but for the output projection of attention."""
    model = convert_to_float8(llama(torch.float32)).to(kernel_device)
    never_ahead(model)  # which would call the layers, too
    calls = []
    forward = Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", lambda self, x: calls.append(self) or forward(self, x))
    step(model, ids=IDS[:, :7].to(kernel_device))
    assert calls == [block.self_attn.o_proj for block in model.layers]


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_follows_that_without_float8(recipe):
    """Forty steps on one batch, which the model learns."""
    curves = []
    for float8 in (False, True):
        model = llama(torch.float32)
        model = convert_to_float8(model, recipe) if float8 else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(40):
            losses.append(step(model)[0])
            optimizer.step()
        curves.append(torch.stack(losses))
    plain, rounded = curves
    assert plain[-1] < 0.3 * plain[0]
    assert ((rounded - plain).abs() < 0.03 * plain[0]).all()
    assert not torch.equal(plain, rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_policy_gives_the_same_gradients(dtype):
    model = convert_to_float8(llama(dtype))
    want = step(model)
    for policy in ("selective", "full"):
        model.set_checkpointing(policy)
        torch.testing.assert_close(step(model), want, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_save_what_they_save_without_float8(recipe):
    """And a few numbers for each layer; the estimate counts it."""
    plain = training_memory(llama(), 64)
    rounded = training_memory(convert_to_float8(llama(), recipe), 64)
    for policy in CHECKPOINTING_POLICIES:
        for ours, theirs in zip(rounded.blocks[policy], plain.blocks[policy], strict=True):
            assert 0 <= ours.total - theirs.total <= 2 * 8 + 16


def test_fused_ops_save_what_the_estimate_counts(kernel_device):
    model = convert_to_float8(llama(torch.float32)).to(kernel_device)
    for policy in ("none", "selective"):
        model.set_checkpointing(policy)
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.data_ptr(): t}) or t, lambda t: t):  # noqa: B023
            block = model.layers[1].mlp
            x, residual = torch.randn(2, 2, 16, 32, device=kernel_device, requires_grad=True)
            block.add_norm(model.layers[1].post_attention_layernorm, x, residual)
        of_model = {p.data_ptr() for p in model.parameters()}
        count = sum(t.numel() for at, t in saved.items() if at not in of_model)
        assert count == 32 * 32 + 32 + 4 + (32 * 96 if policy == "none" else 0)


@pytest.mark.cases(1)
@pytest.mark.compile
@pytest.mark.parametrize(("policy", "packed"), [("none", False), ("selective", True), ("full", False)])
def test_blocks_compile(policy, packed):
    """Each in one graph, and all but the first, which has no branch to add, in the same."""
    torch._dynamo.reset()
    options = {"cu_seqlens": torch.tensor([0, 5, 20, 32])} if packed else {}
    model = convert_to_float8(llama())
    model.set_checkpointing(policy)
    want = step(model, **options)
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(step(model, **options), want)
    assert counter.frame_count == 2
    assert not any("_orig_mod" in name for name in model.state_dict())


@pytest.mark.matrix
@pytest.mark.compile
@pytest.mark.slow
def test_blocks_compile_with_inductor():
    """The second block: the first does the same but for the addition of a branch."""
    torch._dynamo.reset()
    model = convert_to_float8(llama(torch.float32, num_hidden_layers=2))
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
    model = convert_to_float8(copy.deepcopy(plain))
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
    torch.testing.assert_close(step(convert_to_float8(again)), step(model), rtol=0, atol=0)
    plain.load_state_dict(model.state_dict())


def test_a_configuration_of_torchao_is_taken_as_it_is():
    float8 = pytest.importorskip("torchao.float8", reason="a configuration is torchao's")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    linear = convert_to_float8(llama(), config).layers[0].mlp.down_proj
    assert linear.config is config
    assert type(linear.weight.data) is not torch.Tensor  # FSDP2 asks it for what to gather


def test_generation_and_meta_device():
    model = convert_to_float8(llama())
    assert model.generate(IDS, max_new_tokens=2, eos_token_id=[]).shape == (2, 18)
    with torch.device("meta"):
        meta = LigerLlama(CONFIG).bfloat16()
    convert_to_float8(meta).to_empty(device="cpu").load_state_dict(model.state_dict())
    torch.testing.assert_close(step(meta), step(model), rtol=0, atol=0)


def test_odd_sizes_stay_and_are_named():
    model = llama(intermediate_size=50)
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp\.gate_up_proj \[100, 32\], .* and 2 more\. They stay in bfl"):
        convert_to_float8(model)
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


@pytest.mark.compile
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
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
