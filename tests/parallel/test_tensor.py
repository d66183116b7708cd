"""A model whose layers are cut over ranks computes and trains as in one process: tensor and expert parallel."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.arch import get_arch, list_archs
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.convert.config_map import read_config
from liger_models.kernels import act_linear, dispatch, gated_mlp
from liger_models.kernels.collectives import copy_to_region, group_of
from liger_models.kernels.linear_cross_entropy import VocabShard, linear_cross_entropy
from liger_models.kernels.moe import expert_parallel
from liger_models.kernels.options import KernelOptions
from liger_models.layers import moe
from liger_models.layers.embedding import zero_padding_row
from liger_models.layers.layer import Layer
from liger_models.layers.linear import local
from liger_models.layers.linear import replicated as replicated_weight
from liger_models.layers.mlp import LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.parallel import (
    apply_cp,
    apply_ep,
    apply_fsdp,
    apply_tp,
    clip_grad_norm_,
    compile_blocks,
    load_state,
    mean_over_ranks,
    save_state,
    targets_per_rank,
)

from .conftest import Group, running
from .images import FAMILIES, IMAGE_BATCHES, IMAGE_MODELS, LENGTH, image_batch, image_config
from .models import TINY, batch, gradients, init_device_mesh, make_optimizer, mean, share, stir, tiny, whole

STEPS = 3


def build(arch: str, config: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    model = get_arch(arch).from_config(config, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Also norms and biases away from the ones and zeros that they start from.
            parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.nan_to_num_(posinf=1.0, neginf=-1.0)  # bounds of what a tower clips
            if name.endswith("A_log"):  # in a new model states vanish within a token or two, and whatever is in them
                parameter.sub_(4)
    return model


def configs_of(arch: str) -> list[Any]:
    """The tiny configurations of an architecture whose KV heads two ranks can share."""
    import transformers  # here, so that the processes need not import it

    from ..arch.families import tiny as tiny_configs

    theirs = [transformers.AutoConfig.for_model(arch, **config).to_dict() for config in tiny_configs(arch).values()]
    configs = [read_config(get_arch(arch).config_class, config) for config in theirs]
    return [config for config in configs if config.kv_heads % 2 == 0]


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def assert_close(got: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def assert_same(got: dict[str, Any], expected: dict[str, Any], limit: float = 1e-5) -> None:
    """Tensors that differ by no more than this share of their norm."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error <= limit, f"{name}: {error}"


def once(model: Any, **options: Any) -> dict[str, Any]:
    """Loss, logits and gradients of a padded batch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (2, 12), generator=generator)  # those from there on may stand for images
    if model.config.pad_token_id is not None:
        ids[:, 5] = model.config.pad_token_id
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, labels=labels, attention_mask=mask, return_logits=True, **options)
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), "gradients": gradients(model)}


def assert_same_once(got: dict[str, Any], right: dict[str, Any]) -> None:
    assert_close(got["loss"], right["loss"])
    assert_close(got["logits"], right["logits"], atol=1e-5)
    assert_same(got["gradients"], right["gradients"])


def cut_once(cases: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The first case both ways, the others by turns with and without tokens on ranks."""
    mesh = mesh_of(2)
    return [once(apply_tp(build(*case), mesh, sequence_parallel=i % 2 == 1)) for i, case in enumerate(cases)]


@pytest.mark.parametrize("arch", list_archs())
def test_every_architecture(two, arch):
    configs = configs_of(arch)
    cases = [(arch, config) for config in (configs[0], *configs[:5])]
    expected = [once(build(*case)) for case in cases]
    for results in two(cut_once, cases):
        for got, right in zip(results, expected, strict=True):
            assert_same_once(got, right)


GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 5, "vocab_size_per_layer_input": 97, "rms_norm_eps": 0.1,
    "hidden_size_per_layer_input": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
# Whole training runs: tied and not, of all kinds of layers.
RUNS = {
    "llama": ("llama", {}),
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 5.0}),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {"head_dim": 8}),
    "granite": ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}),
    "gemma4_text": ("gemma4_text", GEMMA4 | {"num_hidden_layers": 4, "num_kv_shared_layers": 2}),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rms_norm_eps": 0.05, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
}  # fmt: skip


def run_config(name: str) -> tuple[str, Any]:
    if name in IMAGE_MODELS:
        return image_config(name)
    arch, config = RUNS[name]
    return arch, get_arch(arch).config_class(**{**TINY, "initializer_range": 0.1, **config})


def batch_for(model: Any, step: int, *, packed: bool = False, dp: tuple[int, int] = (0, 1)) -> dict[str, torch.Tensor]:
    images = isinstance(model, VisionLanguageModel)
    inputs = image_batch(model.config, step, dp) if images else share(batch(step, packed=packed), *dp)
    return {key: value.to(model.device) for key, value in inputs.items()}


def train(model: Any, optimizer_name: str = "liger", *, packed: bool = False, dp: tuple[int, int] = (0, 1)) -> dict:
    """Losses, norms, the first step's gradients and the last one's weights; ``dp``: place and number of the rank."""
    optimizer = make_optimizer(optimizer_name, model)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(len(IMAGE_BATCHES) if isinstance(model, VisionLanguageModel) else STEPS):
        inputs = batch_for(model, step, packed=packed, dp=dp)
        loss = model(**inputs, num_items_in_batch=targets_per_rank(inputs)).loss
        loss.backward()
        result["losses"].append(mean_over_ranks(loss))
        if step == 0:
            result["gradients"] = gradients(model)
        result["norms"].append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return result | {"weights": whole(model.named_parameters())}


def assert_same_run(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_close(got["losses"], expected["losses"])
    assert_close(got["norms"], expected["norms"], rtol=2e-5)
    assert_same(got["gradients"], expected["gradients"])
    assert_same(got["weights"], expected["weights"])


def assert_same_on_device(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """In fp32, also by the kernels of a GPU."""
    assert_close(got["losses"], expected["losses"], rtol=1e-4)
    for part in ("gradients", "weights"):
        assert_same(got[part], expected[part], limit=1e-4)


def assert_same_runs(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """On all ranks, whose weights are the same bit for bit."""
    for got in results:
        assert_same_run(got, expected)
        assert_close(got["weights"], results[0]["weights"], rtol=0, atol=0)


def share_of_weights(model: Any) -> float:
    """What this rank has of them; of a tower much is whole on every rank."""
    parameters = [parameter for name, parameter in model.named_parameters() if not name.startswith("visual.")]
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


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "policy", "packed"),
    [
        *((name, index % 2 == 0, ("none", "selective", "full")[index % 3], False) for index, name in enumerate(RUNS)),
        ("llama, tied, biases", True, "full", True),
        *(
            (name, parallel, ("none", "selective", "full")[(index + parallel) % 3], False)
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


@pytest.mark.parametrize(("use_bias", "plain_mlp"), [(True, False), (True, True), (False, True)])
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


def silent_norms() -> None:
    for norm in (SilentNorm, PlainNorm):
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


@pytest.mark.parametrize(
    ("name", "optimizer", "sequence_parallel"),
    [
        ("llama, tied, biases", "liger", True),
        ("olmo2", "torch", True),
        ("mixtral", "liger", False),
        ("mllama", "torch", True),
        ("gemma3", "liger", False),
        ("qwen3_vl_moe", "liger", True),
    ],
)
def test_fsdp_around_it(four, name, optimizer, sequence_parallel):
    case = run_config(name)
    expected = train(build(*case), optimizer)
    assert_same_runs(four(train_2d, case, optimizer, sequence_parallel), expected)


def gather_options(options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of a head whose words are cut over all ranks."""
    x, weight, target, token_weight = head_inputs()
    V, ranks = len(weight), group_of(dist.group.WORLD)
    vocab_shard = VocabShard(ranks, V)
    own = weight.detach()[vocab_shard.start : vocab_shard.start + vocab_shard.count].requires_grad_()
    outputs = linear_cross_entropy(
        copy_to_region(x, ranks),
        own,
        target,
        vocab_shard=vocab_shard,
        workspace_mib=1,
        token_weight=token_weight,
        **options,
    )
    return results_of(outputs, x, own)


def head_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(5)
    x, weight = torch.randn(2, 150, 16, requires_grad=True), torch.randn(1801, 16, requires_grad=True)
    target = torch.randint(1801, (2, 150))
    target[0, :7], target[1, -1] = -1, 1800
    return x, weight, target, torch.rand(2, 150)


def results_of(outputs: Any, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
    total = outputs.loss.square().sum()
    if outputs.log_probs is not None:
        total = total + outputs.log_probs.sin().sum()
    total.backward()
    return {
        "loss": outputs.loss.detach(),
        "z_loss": None if outputs.z_loss is None else outputs.z_loss.detach(),
        "log_probs": None if outputs.log_probs is None else outputs.log_probs.detach(),
        "dx": x.grad,
        "dweight": weight.grad,
    }


HEADS = {
    "mean": {},
    "sum, capped": {"reduction": "sum", "softcap": 5.0, "logit_scale": 0.5},
    "all": {"num_items": 17.0, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 8.0, "return_z_loss": True},
    "smoothed tokens": {"reduction": "none", "label_smoothing": 0.2, "z_loss": 1e-3, "return_z_loss": True},
    "log-probabilities": {"reduction": "sum", "return_log_probs": True, "logit_scale": 2.0, "softcap": 20.0},
}


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_a_vocabulary_on_ranks(four, options):
    """1801 words on four ranks, 300 tokens in several chunks."""
    options = {"ignore_index": -1, **options}
    x, weight, target, token_weight = head_inputs()
    outputs = linear_cross_entropy(x, weight, target, token_weight=token_weight, **options)
    expected = results_of(outputs, x, weight)
    dweight = expected.pop("dweight").chunk(4)
    for got, part in zip(four(gather_options, options), dweight, strict=True):
        assert_same({"dweight": got.pop("dweight"), "dx": got.pop("dx")}, {"dweight": part, "dx": expected["dx"]}, 2e-6)
        assert_close(got, {name: value for name, value in expected.items() if name != "dx"})


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


@pytest.mark.parametrize("name", FAMILIES)
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
@pytest.mark.parametrize("sequence_parallel", [False, True])
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


@pytest.mark.compile
def test_compiled_blocks_with_images(two):
    for got in two(compile_images, True):
        assert_same(got, compile_images(False))


PLAIN = KernelOptions(rms_norm=False, rope=False, swiglu=False, fused_linear_cross_entropy=False)


def with_padding(model: Any) -> dict[str, Any]:
    ids = torch.arange(3, 19).view(2, 8)
    ids[:, 4] = model.config.pad_token_id
    model(ids, labels=ids).loss.backward()
    return gradients(model)


def padding_row(pad: int, tied: bool) -> tuple[dict[str, Any], list[int]]:
    """The gradients, and the rows that are zero after the padding row of the sharded weight was set to 0."""
    model = shard_2d(tiny(pad_token_id=pad, tie_word_embeddings=tied), (2, 2))
    got = with_padding(model)
    zero_padding_row(model.embed_tokens)  # DTensor draws no numbers on the CPU
    zero = whole([("weight", model.embed_tokens.weight)])["weight"].eq(0).all(1)
    return got, zero.nonzero().flatten().tolist()


@pytest.mark.parametrize(("pad", "tied"), [(11, False), (96, True)])
def test_the_padding_row(four, pad, tied):
    """In the first rank's part of the vocabulary and in the last one's, under FSDP."""
    right = with_padding(tiny(pad_token_id=pad, tie_word_embeddings=tied))
    assert (right["embed_tokens.weight"][pad].norm() > 0) == tied
    for got, zero in four(padding_row, pad, tied):
        assert_same(got, right)
        assert zero == [pad]


def plain_kernels() -> dict[str, Any]:
    model = build("llama", run_config("llama")[1], kernels=PLAIN)
    return train(apply_tp(model, mesh_of(2), sequence_parallel=True))


def test_plain_torch(two):
    expected = train(build(*run_config("llama")))
    for got in two(plain_kernels):
        assert_same_run(got, expected)


CHECKPOINTS = {
    "llama": {"vocab_size": 101},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 16},
    "phi3": {"pad_token_id": 0, "eos_token_id": 1},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2},
}
"""A projection for each of q, k, v, gate, up; tied; fused ones; norms as wide as them; experts."""


def checkpoint_model(arch: str) -> Any:
    if arch in FAMILIES:
        return build(*image_config(arch))
    config = get_arch(arch).config_class(**{**TINY, "initializer_range": 0.1, **CHECKPOINTS[arch]})
    return build(arch, config)


def shard_2d(model: Any, shape: tuple[int, ...]) -> Any:
    mesh = mesh_of(*shape)
    apply_tp(model, mesh["tp"])
    return apply_fsdp(model, mesh["dp"], param_dtype=None) if len(shape) == 2 else model


def checkpoint_loss(model: Any) -> torch.Tensor:
    if isinstance(model, VisionLanguageModel):
        return model(**batch_for(model, 0)).loss
    ids = torch.arange(3, 19).view(2, 8)
    return model(ids, labels=ids).loss


def load_and_save(arch: str, source: Path, target: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    shard = partial(shard_2d, shape=shape)
    model = get_arch(arch).from_pretrained(source, progress=False, shard=shard)
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.config.tie_word_embeddings
    model.save_pretrained(target)
    checkpoint_loss(model).backward()
    return {"weights": whole(model.named_parameters()), "gradients": gradients(model)}


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        *((arch, (2,)) for arch in ("gemma2", "qwen3_moe", "mllama")),
        *((arch, (2, 2)) for arch in (*CHECKPOINTS, *FAMILIES)),
    ],
)
def test_in_and_out_of_a_checkpoint(two, four, tmp_path, arch, shape):
    model = checkpoint_model(arch)
    model.save_pretrained(tmp_path / "plain")
    checkpoint_loss(model).backward()
    group = two if shape == (2,) else four
    for got in group(load_and_save, arch, tmp_path / "plain", tmp_path / "saved", shape):
        assert_close(got["weights"], whole(model.named_parameters()), rtol=0, atol=0)
        assert_same(got["gradients"], gradients(model))
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
    if arch in CHECKPOINTS and arch != "qwen3_moe":  # whose experts transformers keeps in another layout
        import transformers

        _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert not any(info.values())


def stop_and_go_on(arch: str, folder: Path, shape: tuple[int, ...], resumed: bool) -> dict[str, Any]:
    model = shard_2d(checkpoint_model(arch), shape)
    optimizer = make_optimizer("liger", model)
    start = load_state(folder, model, optimizer) if resumed else 0
    rank, ranks = (dist.get_rank() // 2, 2) if len(shape) == 2 else (0, 1)
    for step in range(start, 2):
        inputs = batch_for(model, step, dp=(rank, ranks))
        model(**inputs, num_items_in_batch=targets_per_rank(inputs)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and not resumed:
            save_state(folder, 1, model, optimizer)
    return whole(model.named_parameters())


@pytest.mark.parametrize("arch", ["llama", "mllama"])
def test_stopping_and_going_on(two, four, tmp_path, arch):
    expected = four(stop_and_go_on, arch, tmp_path, (2, 2), False)[0]
    for got in four(stop_and_go_on, arch, tmp_path, (2, 2), True):
        assert_close(got, expected, rtol=0, atol=0)
    for got in two(stop_and_go_on, arch, tmp_path, (2,), True):  # on another number of ranks
        assert_same(got, expected)


ODD = {**TINY, "vocab_size": 25, "hidden_size": 24, "head_dim": 8, "initializer_range": 0.1}
"""Of 25 words two ranks have 13 and 12, of which three would have 5, 5 and 3, or 4 each."""


def odd_rows(folder: Path) -> dict[str, Any]:
    """In from a checkpoint, a step, and out into both kinds."""
    cls = get_arch("llama")
    shard = partial(shard_2d, shape=(3, 2)) if dist.is_initialized() else None
    model = cls.from_pretrained(folder / "plain", progress=False, shard=shard)
    optimizer = make_optimizer("liger", model)
    ids = torch.arange(24).view(2, 12)
    model(ids, labels=ids).loss.backward()
    results = {"gradients": gradients(model), "norm": clip_grad_norm_(model.parameters(), 1.0)}
    optimizer.step()
    if dist.is_initialized():
        save_state(folder / "run", 1, model, optimizer)
        model.save_pretrained(folder / "saved")
    return results | {"weights": whole(model.named_parameters())}


@pytest.mark.distributed
@pytest.mark.slow
def test_a_vocabulary_that_no_number_of_ranks_divides(tmp_path):
    with running(Group(6)) as six:
        for tied in (False, True):
            folder = tmp_path / str(tied)
            model = build("llama", get_arch("llama").config_class(**ODD, tie_word_embeddings=tied))
            model.save_pretrained(folder / "plain")
            expected = odd_rows(folder)
            for got in six(odd_rows, folder):
                assert_close(got["norm"], expected["norm"])
                assert_same(got["gradients"], expected["gradients"])
                assert_same(got["weights"], expected["weights"])
            assert load_state(folder / "run", model, make_optimizer("liger", model)) == 1
            saved = get_arch("llama").from_pretrained(folder / "saved", progress=False)
            for each in (model, saved):
                assert_same(whole(each.named_parameters()), expected["weights"])


def train_experts(case: tuple[str, Any], shape: tuple[int, int], policy: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    model = build(*case)
    model.set_checkpointing(policy)
    apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
    for name, parameter in model.named_parameters():
        assert parameter.to_local().numel() <= -(-parameter.shape[0] // mesh.size()) * parameter.shape[1:].numel(), name
    return train(model, dp=(dist.get_rank(), mesh.size()))


def experts_case(arch: str, *, balanced: bool) -> tuple[str, Any]:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}
    gemma4 = GEMMA4 | experts | {"layer_types": GEMMA4["layer_types"][:3], "attention_k_eq_v": True}
    every = {"mixtral": {"num_local_experts": 4}, "gemma4_text": gemma4}
    every |= {name: RUNS[name][1] for name in ("gpt_oss", "qwen3_next")}
    sizes = every.get(arch) or CHECKPOINTS[arch]
    balance = {"output_router_logits": balanced, "router_aux_loss_coef": 0.5} if arch != "gemma4_text" else {}
    return arch, get_arch(arch).config_class(**{**TINY, "initializer_range": 0.1, **sizes, **balance})


@pytest.mark.parametrize(
    ("arch", "shape", "policy"),
    [
        ("mixtral", (1, 2), "selective"),
        ("qwen3_moe", (2, 2), "none"),
        ("mixtral", (1, 4), "full"),
        ("gpt_oss", (1, 2), "none"),
        ("gemma4_text", (1, 2), "full"),
        ("qwen3_next", (1, 2), "full"),
    ],
)
def test_experts_on_ranks(two, four, arch, shape, policy):
    case = experts_case(arch, balanced=True)
    expected = train(build(*case))
    for got in (two if shape == (1, 2) else four)(train_experts, case, shape, policy):
        assert_same_run(got, expected)


def replay(kind: str) -> dict[str, Any]:
    """Gradients of one step through experts that are given, on ranks that share experts, tokens or both."""
    model, inputs = build(*experts_case("mixtral", balanced=True)), batch(0, packed=kind != "ep")
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(*inputs["input_ids"].shape, 3, 4, generator=generator)
    inputs["routed_experts"] = scores.topk(2).indices.short()
    if dist.is_initialized():
        if kind.startswith("tp"):
            apply_tp(model, mesh_of(2), sequence_parallel=kind == "tp, tokens")
        if kind == "cp":
            apply_cp(model, mesh_of(2), averaged=True)
        if kind == "ep":
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
            apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
            inputs = share(inputs, dist.get_rank(), 2)
    loss = model(**inputs, num_items_in_batch=33 / (2 if kind == "ep" and dist.is_initialized() else 1)).loss
    loss.backward()
    found = gradients(model)
    return {name: mean(each) for name, each in found.items()} if kind == "cp" else found


@pytest.mark.parametrize("kind", ["tp", "tp, tokens", "cp", "ep"])
def test_replayed_routing(two, kind):
    expected = replay(kind)
    for got in two(replay, kind):
        assert_same(got, expected)


def load_experts(source: Path, target: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))

    def shard(model: Any) -> None:
        apply_fsdp(apply_ep(model, mesh["ep"]), mesh)

    model = get_arch("qwen3_moe").from_pretrained(source, progress=False, shard=shard)
    optimizer = make_optimizer("liger", model)
    weights = whole(model.named_parameters())
    model.save_pretrained(target / "saved")
    for step in range(2):
        model(**share(batch(step), dist.get_rank(), 4)).loss.backward()  # in bf16
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            save_state(target / "run", 1, model, optimizer)
    trained = whole(model.named_parameters())
    assert load_state(target / "run", model, optimizer) == 1
    model(**share(batch(1), dist.get_rank(), 4)).loss.backward()
    optimizer.step()
    assert_close(whole(model.named_parameters()), trained, rtol=0, atol=0)
    return weights


def test_experts_in_and_out_of_a_checkpoint(four, tmp_path):
    model = build(*experts_case("qwen3_moe", balanced=False))
    model.save_pretrained(tmp_path / "plain")
    for got in four(load_experts, tmp_path / "plain", tmp_path):
        assert_close(got, whole(model.named_parameters()), rtol=0, atol=0)
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()


def one_block(arch: str, config: Any) -> Any:
    return build(arch, dataclasses.replace(config, num_hidden_layers=1))


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
            mock.patch.object(gated_mlp, "sum_rows", wraps=gated_mlp.sum_rows) as summed,
        ):
            loss = model(**inputs).loss
            loss.backward()
        chunks = 1 if policy == "none" else 3
        calls = 0 if name == "mixtral" else chunks
        assert [call.args[1] is not None for call in summed.call_args_list] == [cut] * calls
        results.append({"loss": {"": loss.detach()}, "gradients": gradients(model)})
    for part in ("loss", "gradients"):
        assert_same(results[1][part], results[0][part])


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


@pytest.mark.parametrize(("name", "sequence_parallel"), [("qwen3_vl", True), ("qwen2_5_vl", False)])
def test_kernels_with_images(two_with_kernels, name, sequence_parallel):
    """MLPs with and without a gate, of a width that the ranks divide, and not."""
    two_with_kernels(run_image_kernels, name, sequence_parallel)


def to_the_first(logits: torch.Tensor, top_k: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A router that sends all tokens to the experts of one rank."""
    return logits[:, :top_k].float().softmax(-1), torch.arange(top_k).expand(len(logits), top_k)


def run_expert_kernels() -> None:
    compare_experts()
    name = "route" if dispatch.INTERPRET else "route_reference"
    with mock.patch.object(moe, name, to_the_first):
        compare_experts()


def compare_experts() -> None:
    case = experts_case("mixtral", balanced=True)
    inputs = {key: value[:2, :6] for key, value in batch(0).items()}
    plain, model = one_block(*case), one_block(*case)
    plain(**inputs, num_items_in_batch=10).loss.backward()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
    row = slice(dist.get_rank(), dist.get_rank() + 1)
    model(**{key: value[row] for key, value in inputs.items()}, num_items_in_batch=5).loss.backward()
    assert_same(gradients(model), gradients(plain))


def rows_that_are_sent() -> list[torch.Size]:
    """By one layer, where all tokens go to experts of rank 0."""
    model = one_block(*experts_case("mixtral", balanced=True))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    apply_fsdp(apply_ep(model, mesh["ep"]), mesh, param_dtype=None)
    with (
        mock.patch.object(moe, "route_reference", to_the_first),
        mock.patch.object(expert_parallel, "all_to_all", wraps=expert_parallel.all_to_all) as sent,
    ):
        model(batch(0)["input_ids"][:1])
    return [call.args[0].shape for call in sent.call_args_list]


def test_a_token_is_sent_to_a_rank_once(two):
    """Both of a token's experts are on rank 0, which gets each of the 12 tokens of both ranks once."""
    first, second = two(rows_that_are_sent)
    counts, rows, routing, back = zip(first, second, strict=True)
    assert counts == ((2, 2), (2, 2))
    assert rows == ((12, TINY["hidden_size"]),) * 2
    assert routing == ((12, 4),) * 2
    assert back == ((24, TINY["hidden_size"]), (0, TINY["hidden_size"]))


def test_kernels_of_experts(two, two_with_kernels):
    two(run_expert_kernels)
    two_with_kernels(run_expert_kernels)


def head_kernels() -> None:
    """A target at the edges of a rank's words, one that is confident, and huge logits, in fp32."""
    ranks = group_of(dist.group.WORLD)
    V, vocab_shard = 75, VocabShard(ranks, 75)
    x = torch.eye(6, 8)
    weight = torch.randn(V, 8, generator=torch.Generator().manual_seed(0))
    weight[:6, :6] += 15 * torch.eye(6)
    weight[40, 3] = 3e4
    target = torch.tensor([0, 37, 38, 40, -100, 74])
    options = {"label_smoothing": 0.1, "z_loss": 1e-4, "reduction": "none"}
    found = []
    for own, told in (
        (weight, {}),
        (weight[vocab_shard.start : vocab_shard.start + vocab_shard.count], {"vocab_shard": vocab_shard}),
    ):
        leaves = x.clone().requires_grad_(), own.clone().requires_grad_()
        inside = copy_to_region(leaves[0], ranks) if told else leaves[0]
        loss = linear_cross_entropy(inside, leaves[1], target, **options, **told).loss
        loss.backward(torch.arange(1.0, 7.0))
        found.append((loss.detach(), leaves[0].grad, leaves[1].grad))
    (loss, dx, dweight), got = found
    assert_close(got, (loss, dx, dweight.chunk(2)[ranks.rank]))


def test_kernels_of_the_head(two, two_with_kernels):
    two(head_kernels)
    two_with_kernels(head_kernels)


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


def experts_on_devices(device: str) -> None:
    case = experts_case("qwen3_moe", balanced=True)
    mesh = init_device_mesh(device, (1, 2), mesh_dim_names=("dp", "ep"))
    expected = train(build(*case).to(device))
    model = apply_fsdp(apply_ep(build(*case).to(device), mesh["ep"]), mesh, param_dtype=None)
    got = train(model, dp=(dist.get_rank(), 2))
    assert_same_on_device(got, expected)


ON_DEVICES = [("llama, tied, biases", False), ("qwen3", True), ("gemma2", True), ("olmo2", False), ("mixtral", True)]
ON_DEVICES += [(name, index % 2 == 0) for index, name in enumerate(IMAGE_MODELS)]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "sequence_parallel"), ON_DEVICES)
def test_on_gpus(two_gpus, name, sequence_parallel):
    two_gpus(on_devices, name, "cuda", sequence_parallel)


@pytest.mark.gpu
def test_experts_on_gpus(two_gpus):
    two_gpus(experts_on_devices, "cuda")


def test_what_the_gpus_are_to_run(two):
    """On the CPU, so that the function itself is right."""
    two(on_devices, "qwen3", "cpu", True)
    two(experts_on_devices, "cpu")
