"""A model whose layers are sharded over ranks computes and trains as in one process: tensor parallel."""

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.arch import list_archs
from liger_models.distributed.collectives import group_of
from liger_models.kernels import dispatch
from liger_models.kernels.linear import act_linear, gated_mlp
from liger_models.kernels.options import KernelOptions
from liger_models.layers.layer import CHECKPOINTING_POLICIES, Layer
from liger_models.layers.linear import local
from liger_models.layers.linear import replicated as replicated_weight
from liger_models.layers.mlp import LigerMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.parallel import (
    apply_ep,
    apply_fsdp,
    apply_tp,
    compile_blocks,
    targets_per_rank,
)

from ..arch.families import of_each_kind
from .comparison import (
    RUNS,
    assert_close,
    assert_same,
    assert_same_on_device,
    assert_same_once,
    assert_same_run,
    assert_same_runs,
    batch_for,
    beyond_kinds_of_run,
    build,
    configs_of,
    mesh_of,
    once,
    one_block,
    run_config,
    train,
)
from .images import FAMILIES, IMAGE_MODELS, LENGTH, image_batch, image_config
from .models import TINY, batch, gradients, init_device_mesh, stir, tiny


def cut_once(cases: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The first case both ways, the others by turns with and without tokens on ranks."""
    mesh = mesh_of(2)
    return [once(apply_tp(build(*case), mesh, sequence_parallel=i % 2 == 1)) for i, case in enumerate(cases)]


@pytest.mark.cases(3)
@pytest.mark.parametrize("arch", of_each_kind(list_archs()))
def test_every_architecture(two, arch):
    configs = configs_of(arch)
    cases = [(arch, config) for config in (configs[0], *configs[:5])]
    expected = [once(build(*case)) for case in cases]
    for results in two(cut_once, cases):
        for got, right in zip(results, expected, strict=True):
            assert_same_once(got, right)


def share_of_weights(model: Any) -> float:
    """The share that this rank holds, without towers and Gemma 3n's streams, most of which every rank holds whole."""
    whole = (".visual.", ".streams.", ".altup.", ".laurel.", ".per_layer.")
    parameters = [x for name, x in model.named_parameters() if not any(part in f".{name}" for part in whole)]
    return sum(each.to_local().numel() for each in parameters) / sum(each.numel() for each in parameters)


def train_cut(case: tuple[str, Any], sequence_parallel: bool, policy: str, packed: bool) -> dict[str, Any]:
    model = build(*case)
    model.set_checkpointing(policy)
    names = [name for name, _ in model.named_parameters()]
    apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
    assert [name for name, _ in model.named_parameters()] == names
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert share_of_weights(model) < 0.55
    return train(model, packed=packed)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("name", "sequence_parallel", "policy", "packed"),
    [
        *(
            pytest.param(
                name, index % 2 == 0, CHECKPOINTING_POLICIES[index % 3], False, marks=beyond_kinds_of_run(name)
            )
            for index, name in enumerate(RUNS)
        ),
        ("llama, tied, biases", True, "full", True),
        ("apertus", True, "none", True),
        *(
            pytest.param(
                name, parallel, CHECKPOINTING_POLICIES[(index + parallel) % 3], False, marks=beyond_kinds_of_run(name)
            )
            for index, name in enumerate(IMAGE_MODELS)
            for parallel in (False, True)
        ),
    ],
)
def test_trains_as_one_process(two, name, sequence_parallel, policy, packed):
    case = run_config(name)
    expected = train(build(*case), packed=packed)
    assert_same_runs(two(train_cut, case, sequence_parallel, policy, packed), expected)


def packed_and_frozen(name: str, frozen: tuple[str, ...]) -> dict[str, Any]:
    """Gradients where text and padding of each row are documents, and not all is trained."""
    model = build(*image_config(name))
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not path.startswith(frozen))
    if dist.is_initialized():
        apply_tp(model, mesh_of(2), sequence_parallel=True)
    inputs = image_batch(model.config, 0)
    lengths = inputs.pop("attention_mask").sum(1).tolist()
    bounds = [bound for row, length in enumerate(lengths) for bound in (row * LENGTH, row * LENGTH + length)]
    model(**inputs, cu_seqlens=torch.tensor([*bounds, len(lengths) * LENGTH])).loss.backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("qwen3_vl", ("embed_tokens", "layers", "visual.blocks")), ("gemma3", ("layers.1", "norm")), ("mllama", "visual")],
)
def test_packed_and_frozen_parts(two, name, frozen):
    expected = packed_and_frozen(name, frozen)
    for got in two(packed_and_frozen, name, frozen):
        assert_same(got, expected)


def layer_norms(cut: bool, use_bias: bool = True, plain_mlp: bool = False, **inputs: torch.Tensor) -> dict[str, Any]:
    """Gradients where a text model has LayerNorms."""
    model = tiny(num_hidden_layers=1) if inputs else tiny()
    norm = partial(LigerLayerNorm, TINY["hidden_size"], bias=True, use_bias=use_bias)
    for block in model.layers:
        block.input_layernorm, block.post_attention_layernorm = norm(), norm()
        if plain_mlp:
            block.mlp = LigerMLP(TINY["hidden_size"], TINY["intermediate_size"], act="gelu", bias=use_bias)
    model.norm = norm()
    if cut:
        apply_tp(model, mesh_of(2), sequence_parallel=True)
    model(**inputs or batch(0)).loss.backward()
    return gradients(model)


@pytest.mark.parametrize(("use_bias", "plain_mlp"), [(True, False), (False, True)])
def test_layer_norms(two, use_bias, plain_mlp):
    expected = layer_norms(False, use_bias, plain_mlp)
    for got in two(layer_norms, True, use_bias, plain_mlp):
        assert_same(got, expected)


def layer_norm_kernels(use_bias: bool, plain_mlp: bool) -> None:
    """The Triton kernels' results on this rank are those of an uncut model, which uses them, too."""
    assert dispatch.INTERPRET
    inputs = {key: value[:2, :6] for key, value in batch(0).items()}
    expected, got = (layer_norms(cut, use_bias, plain_mlp, **inputs) for cut in (False, True))
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("use_bias", "plain_mlp"), [(True, False), pytest.param(True, True, marks=pytest.mark.matrix), (False, True)]
)
def test_layer_norms_with_kernels(two_with_kernels, use_bias, plain_mlp):
    two_with_kernels(layer_norm_kernels, use_bias, plain_mlp)


class OwnNorm(Layer):
    """A norm of one's own, without `add`, that adds up its gradient over ranks with tokens of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(torch.linspace(0.5, 1.5, size)), None

    def sum_gradients(self, ranks: Any) -> bool:
        self.group = ranks
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return replicated_weight(self.weight, self.group) * x / (1 + x.square().mean(-1, keepdim=True)).sqrt()


class SilentNorm(OwnNorm):
    def sum_gradients(self, ranks: Any) -> bool:
        return False


def own_norms(cut: bool, norm: Any = OwnNorm, *, sequence_parallel: bool = True) -> dict[str, Any]:
    model = tiny()
    for block in model.layers:
        block.input_layernorm, block.post_attention_layernorm = norm(TINY["hidden_size"]), norm(TINY["hidden_size"])
    if cut:
        apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
    model(**batch(0)).loss.backward()
    return gradients(model)


def test_norms_of_ones_own_with_tokens_on_ranks(two):
    expected = own_norms(False)
    for got in two(own_norms, True):
        assert_same(got, expected)


class PlainNorm(nn.Module):
    """As one writes it who knows of DTensors only."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return local(self.weight) * x / (1 + x.square().mean(-1, keepdim=True)).sqrt()


class BiasNorm(LigerRMSNorm):
    """A derived norm with a parameter whose gradient its base class does not know."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return y + self.bias


def silent_norms() -> None:
    for norm in (SilentNorm, PlainNorm, BiasNorm):
        message = rf"layers.0.input_layernorm \({norm.__name__}\) must be a Layer whose sum_gradients"
        with pytest.raises(ValueError, match=message):
            own_norms(True, norm)
    model = tiny()
    model.norm = PlainNorm(TINY["hidden_size"])
    with pytest.raises(ValueError, match=r"norm \(PlainNorm\) must be a Layer whose sum_gradients"):
        apply_tp(model, mesh_of(2), sequence_parallel=True)
    assert_same(own_norms(True, PlainNorm, sequence_parallel=False), own_norms(False, PlainNorm))


def test_norms_whose_gradients_nobody_adds_up_are_refused(two):
    two(silent_norms)


def train_copies() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", "parts", "tp"))
    model = apply_tp(build(*run_config("mixtral")), mesh)
    apply_fsdp(model, mesh, param_dtype=None)
    return train(model, dp=(mesh["copies"].get_local_rank(), 2))


def test_copies_of_shards_around_it(four):
    expected = train(build(*run_config("mixtral")))
    for got in four(train_copies):
        assert_same_run(got, expected)


def train_2d(case: tuple[str, Any], optimizer: str, sequence_parallel: bool) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    model = apply_tp(build(*case), mesh, sequence_parallel=sequence_parallel)
    apply_fsdp(model, mesh, param_dtype=None)
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert {parameter.device_mesh for parameter in model.parameters()} == {mesh}
    assert share_of_weights(model) < 0.3
    return train(model, optimizer, dp=(mesh["dp"].get_local_rank(), 2))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "optimizer", "sequence_parallel"),
    [
        ("llama, tied, biases", "liger", True),
        ("olmo2", "torch", True),
        ("mixtral", "liger", False),
        ("mllama", "torch", True),
        pytest.param("gemma3", "liger", False, marks=beyond_kinds_of_run("gemma3")),
        pytest.param("qwen3_vl_moe", "liger", True, marks=beyond_kinds_of_run("qwen3_vl_moe")),
    ],
)
def test_fsdp_around_it(four, name, optimizer, sequence_parallel):
    case = run_config(name)
    expected = train(build(*case), optimizer)
    assert_same_runs(four(train_2d, case, optimizer, sequence_parallel), expected)


def ask_the_model(sequence_parallel: bool) -> dict[str, Any]:
    model = tiny(tie_word_embeddings=True)
    if dist.is_initialized():
        apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
    inputs = batch(0)
    with torch.no_grad():
        results = {
            "embeds": model(inputs_embeds=torch.ones(2, 4, TINY["hidden_size"])).logits,
            "last": model(inputs["input_ids"], logits_to_keep=3).logits,
            "evaluated": model(**inputs).loss,
        }
    multiple = 1 if dist.is_initialized() else 1000  # the ranks leave out rows without targets
    with mock.patch("liger_models.layers.lm_head.ROW_MULTIPLE", multiple):
        out = model(**inputs, return_log_probs=True)
    out.log_probs.square().sum().backward()
    results |= {"log_probs": out.log_probs.detach(), "gradients": gradients(model)}
    model.zero_grad()
    embeds = torch.ones(2, 4, TINY["hidden_size"], requires_grad=True)
    model(inputs_embeds=embeds).logits.square().sum().backward()
    results |= {"d_embeds": embeds.grad, "weight gradients": gradients(model)}
    if sequence_parallel:
        return results
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    results["greedy"] = model.generate(prompts, max_new_tokens=6, eos_token_id=[])
    torch.manual_seed(0)
    results["sampled"] = model.generate(prompts, max_new_tokens=6, do_sample=True, eos_token_id=[])
    options = {"max_new_tokens": 6, "do_sample": True, "seed": 3, "eos_token_id": []}
    results["seeded"] = model.generate(prompts, **options)
    torch.manual_seed(0)
    draft = type(model).from_config(model.config)  # a whole one on each rank
    results["drafted"] = model.generate(prompts, **options, draft_model=draft)
    assert torch.equal(results["drafted"], results["seeded"])
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_everything_else_a_model_does(two, sequence_parallel):
    expected = ask_the_model(sequence_parallel)
    weights = [expected.pop(name) for name in ("gradients", "weight gradients") if name in expected]
    for got in two(ask_the_model, sequence_parallel):
        for right, name in zip(weights, ("gradients", "weight gradients"), strict=False):
            assert_same(got.pop(name), right)
        assert_close(got, expected, atol=1e-5)


def ask_about_images(name: str) -> dict[str, torch.Tensor]:
    """Logits, and what follows prompts that are padded on the left."""
    arch, config = image_config(name)
    model = build(arch, config)
    if dist.is_initialized():
        apply_tp(model, mesh_of(2))
    inputs = image_batch(config, 0)
    padding = LENGTH - inputs["attention_mask"].sum(1)
    prompts = {key: value for key, value in inputs.items() if key != "labels"} | {
        "input_ids": torch.stack([row.roll(n) for row, n in zip(inputs["input_ids"], padding.tolist(), strict=True)]),
        "attention_mask": inputs["attention_mask"].flip(1),
    }
    with torch.no_grad():
        logits = model(**inputs, return_logits=True).logits
    return {"logits": logits, "greedy": model.generate(**prompts, max_new_tokens=6, eos_token_id=[])}


@pytest.mark.parametrize("name", of_each_kind(FAMILIES))
def test_generation_with_images(two, name):
    expected = ask_about_images(name)
    for got in two(ask_about_images, name):
        assert_close(got, expected, atol=1e-5)


def refuse() -> None:
    mesh = mesh_of(2)
    with pytest.raises(ValueError, match=r"num_key_value_heads \(1\) must be a multiple of 2 ranks"):
        apply_tp(tiny(num_key_value_heads=1), mesh)
    with pytest.raises(ValueError, match=r"intermediate_size \(41\) must be a multiple of 2 ranks"):
        apply_tp(tiny(intermediate_size=41), mesh)
    with pytest.raises(ValueError, match=r"vocab_size \(1\) must be enough for 2 ranks"):
        apply_tp(tiny(vocab_size=1), mesh)
    with pytest.raises(ValueError, match=r'apply_tp: mesh must have one dimension, or one called "tp", got .*\["tp"\]'):
        apply_tp(tiny(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "shared")))
    model = apply_tp(tiny(), mesh)
    for apply in (apply_tp, apply_ep):
        with pytest.raises(ValueError, match="must not be sharded yet"):
            apply(model, mesh)
    with pytest.raises(ValueError, match="apply_fsdp: mesh must be given for a model that apply_tp has sharded"):
        apply_fsdp(model)
    with pytest.raises(ValueError, match="apply_fsdp: mesh must not have the ranks over which apply_tp has sharded"):
        apply_fsdp(model, mesh)
    with pytest.raises(ValueError, match="must not be sharded yet"):
        apply_tp(apply_fsdp(tiny()), mesh)
    wrapped = tiny()
    wrapped.layers[1].self_attn.o_proj = torch.nn.Sequential(wrapped.layers[1].self_attn.o_proj)
    with pytest.raises(ValueError, match=r"RowParallelLinear: the layer must be an nn.Linear without hooks, got Seq"):
        apply_tp(wrapped, mesh)
    with pytest.raises(ValueError, match="T must be a multiple of the 2 ranks that share the tokens, got 5"):
        apply_tp(tiny(), mesh, sequence_parallel=True)(torch.ones(1, 5, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"LigerCrossAttention: num_key_value_heads \(1\) must be a multiple of 2 ranks"
    ):
        apply_tp(build(*image_config("mllama", num_key_value_heads=1, cross_attention_layers=[0])), mesh)
    with pytest.raises(ValueError, match=r"LigerMLP: intermediate_size \(9\) must be a multiple of 2 ranks"):
        LigerMLP(8, 9, act="gelu").shard(group_of(mesh.get_group()))
    model = build(*image_config("qwen3_vl"))
    model.visual.blocks[1].mlp.fc2 = torch.nn.Sequential(model.visual.blocks[1].mlp.fc2)
    with pytest.raises(ValueError, match=r"RowParallelLinear: the layer must be an nn.Linear without hooks, got Seq"):
        apply_tp(model, mesh)
    model = apply_tp(build(*image_config("qwen3_vl")), mesh, sequence_parallel=True)
    with pytest.raises(
        ValueError, match=f"T must be a multiple of the 2 ranks that share the tokens, got {LENGTH + 1}"
    ):
        model(**image_batch(model.config, 0, length=LENGTH + 1))
    with pytest.raises(ValueError, match="must have mixtures of experts, got LigerLlama"):
        apply_ep(tiny(), mesh)
    arch, config = run_config("mixtral")
    with pytest.raises(ValueError, match=r"num_experts \(3\) must be a multiple of 2 ranks"):
        apply_ep(build(arch, dataclasses.replace(config, num_local_experts=3)), mesh)
    with pytest.raises(ValueError, match="mesh must have two dimensions after apply_ep, one of them the 2 ranks"):
        apply_fsdp(apply_ep(build(arch, config), mesh))
    with pytest.raises(ValueError, match="router_jitter must be 0 with apply_tp"):
        apply_tp(build(arch, dataclasses.replace(config, router_jitter_noise=0.1)), mesh)


def test_errors(two):
    two(refuse)


def compile_cut(sequence_parallel: bool) -> dict[str, Any]:
    model = apply_tp(tiny(), mesh_of(2), sequence_parallel=sequence_parallel)
    return train(compile_blocks(model, backend="aot_eager" if sequence_parallel else "eager"))


@pytest.mark.compile
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_compiled_blocks(two, sequence_parallel):
    expected = train(tiny())
    for got in two(compile_cut, sequence_parallel):
        assert_same_run(got, expected)


def compile_images(cut: bool) -> dict[str, Any]:
    model = build(*image_config("mllama", num_hidden_layers=1, cross_attention_layers=[0]))
    if cut:
        compile_blocks(apply_tp(model, mesh_of(2), sequence_parallel=True), backend="eager")
    model(**image_batch(model.config, 0)).loss.backward()
    return gradients(model)


@pytest.mark.matrix
@pytest.mark.compile
def test_compiled_blocks_with_images(two):
    for got in two(compile_images, True):
        assert_same(got, compile_images(False))


PLAIN = KernelOptions(rms_norm=False, rope=False, swiglu=False, fused_linear_cross_entropy=False)


def plain_kernels() -> dict[str, Any]:
    model = build("llama", run_config("llama")[1], kernels=PLAIN)
    return train(apply_tp(model, mesh_of(2), sequence_parallel=True))


def test_plain_torch(two):
    expected = train(build(*run_config("llama")))
    for got in two(plain_kernels):
        assert_same_run(got, expected)


def run_kernels(name: str, sequence_parallel: bool, policy: str, with_adapters: bool) -> None:
    """The Triton kernels' results on this rank are those of an uncut model, which uses them, too."""
    assert dispatch.INTERPRET
    inputs = {key: value[:2, :6] for key, value in batch(0).items()}
    results = []
    for cut in (False, True):
        model = one_block(*run_config(name))
        if with_adapters:
            stir(apply_lora(model, LoRAConfig(r=3)))
        model.set_checkpointing(policy)
        if cut:
            apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
        # Several chunks where gate and up are made again.
        with (
            mock.patch.multiple(gated_mlp, WORKSPACE_MIB=0, MIN_CHUNK=4),
            mock.patch.object(gated_mlp, "norm_linear_backward", wraps=gated_mlp.norm_linear_backward) as backward,
        ):
            loss = model(**inputs).loss
            loss.backward()
        chunks = 1 if policy == "none" else 3
        calls = 0 if model.routers else chunks
        assert [call.args[2].ranks is not None for call in backward.call_args_list] == [cut] * calls
        results.append({"loss": {"": loss.detach()}, "gradients": gradients(model)})
    for part in ("loss", "gradients"):
        assert_same(results[1][part], results[0][part])


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "sequence_parallel", "policy", "with_adapters"),
    [
        ("llama, tied, biases", False, "none", False),
        ("qwen3", True, "selective", False),
        ("mixtral", True, "none", False),
        ("qwen3", False, "none", True),
        ("llama, tied, biases", True, "selective", True),
    ],
)
def test_kernels(two_with_kernels, name, sequence_parallel, policy, with_adapters):
    two_with_kernels(run_kernels, name, sequence_parallel, policy, with_adapters)


def run_in_8_bits(sequence_parallel: bool) -> None:
    """The loss is the same, and the gradients are near those of the exact gates and ups."""
    inputs, results = {key: value[:2, :6] for key, value in batch(0).items()}, []
    for in_8bit in (False, True):
        model = apply_tp(one_block(*run_config("qwen3")), mesh_of(2), sequence_parallel=sequence_parallel)
        if in_8bit:
            model.set_gate_up_8bit()
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    (loss, exact), (same, rounded) = results
    assert torch.equal(loss, same)
    errors = [((rounded[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact]
    assert 1e-6 < max(errors) < 0.02


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_gate_and_up_in_8_bits(two_with_kernels, sequence_parallel):
    two_with_kernels(run_in_8_bits, sequence_parallel)


def run_image_kernels(name: str, sequence_parallel: bool) -> None:
    arch, config = image_config(name, num_hidden_layers=2)
    results = []
    for cut in (False, True):
        model = build(arch, config)
        model.set_checkpointing("selective")
        if cut:
            apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
        with mock.patch.object(act_linear, "_activate", wraps=act_linear._activate) as activated:
            model(**image_batch(config, 0, (1, 4), length=12)).loss.backward()
        assert activated.called
        results.append(gradients(model))
    assert_same(results[1], results[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "sequence_parallel"), [("qwen3_vl", True), ("qwen2_5_vl", False)])
def test_kernels_with_images(two_with_kernels, name, sequence_parallel):
    """MLPs with and without a gate, of a width that the ranks divide, and not."""
    two_with_kernels(run_image_kernels, name, sequence_parallel)


def on_devices(name: str, device: str, sequence_parallel: bool) -> None:
    """As one process on the same device: in fp32 to its rounding, in bf16 to about its error, tensor by tensor."""
    arch, config = run_config(name)
    if name not in IMAGE_MODELS:
        config = dataclasses.replace(config, hidden_size=64, head_dim=16)
    mesh = init_device_mesh(device, (1, 2), mesh_dim_names=("dp", "tp"))

    def model(dtype: torch.dtype, *, cut: bool, fsdp: bool = False) -> Any:
        made = build(arch, config).to(device, dtype)
        made = apply_tp(made, mesh["tp"], sequence_parallel=sequence_parallel) if cut else made
        return apply_fsdp(made, mesh["dp"], param_dtype=None) if fsdp else made

    expected = train(model(torch.float32, cut=False))
    for fsdp in (False, True):
        got = train(model(torch.float32, cut=True, fsdp=fsdp))
        assert_same_on_device(got, expected)
    exact, errors = expected["gradients"], []
    for cut in (False, True):
        made = model(torch.bfloat16, cut=cut)
        inputs = batch_for(made, 0)
        made(**inputs, num_items_in_batch=targets_per_rank(inputs)).loss.backward()
        found = gradients(made)
        errors.append({key: (found[key].float() - right).norm() for key, right in exact.items()})
    assert torch.stack([*errors[1].values()]).norm() <= 2 * torch.stack([*errors[0].values()]).norm()
    for key, right in exact.items():
        error, one = (each[key] / right.norm() for each in (errors[1], errors[0]))
        # Gradients of towers and gates are sums that cancel: in bf16 little but rounding, so that chance decides.
        chance = key.startswith("visual.") or key.endswith("_gate")
        assert chance or error <= 2 * one + 2e-3, f"{key}: {error}, by one process {one}"


ON_DEVICES = [("llama, tied, biases", False), ("qwen3", True), ("gemma2", True), ("olmo2", False), ("mixtral", True)]
ON_DEVICES += [(name, index % 2 == 0) for index, name in enumerate(IMAGE_MODELS)]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "sequence_parallel"), ON_DEVICES)
def test_on_gpus(two_gpus, name, sequence_parallel):
    two_gpus(on_devices, name, "cuda", sequence_parallel)


def test_what_the_gpus_are_to_run(two):
    """On the CPU, so that the function itself is right."""
    two(on_devices, "qwen3", "cpu", True)
