"""A model whose layers are cut over ranks computes and trains as in one process: tensor and expert parallel."""

from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from liger_models.arch import get_arch
from liger_models.convert.config_map import read_config
from liger_models.parallel import (
    apply_fsdp,
    apply_tp,
    clip_grad_norm_,
    mean_over_ranks,
    targets_per_rank,
)

from ..arch.families import CASES
from ..arch.families import tiny as tiny_configs
from .models import TINY, batch, gradients, make_optimizer, share, whole

STEPS = 5


def build(arch: str, config: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    model = get_arch(arch).from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            # Also norms and biases away from the ones and zeros that they start from.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def config_of(arch: str, variant: str) -> Any:
    theirs = transformers.AutoConfig.for_model(arch, **tiny_configs(arch)[variant])
    return read_config(get_arch(arch).config_class, theirs.to_dict())


CONFIGS = {(arch, variant): config_of(arch, variant) for arch, variant in CASES}


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
    ids = torch.randint(3, 97, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, labels=labels, attention_mask=mask, return_logits=True, **options)
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), "gradients": gradients(model)}


def cut_once(cases: list[tuple[str, Any]], sequence_parallel: bool) -> list[dict[str, Any]]:
    mesh = mesh_of(2)
    return [once(apply_tp(build(*case), mesh, sequence_parallel=sequence_parallel)) for case in cases]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("arch", sorted({arch for arch, _ in CASES}))
def test_every_architecture(two, arch, sequence_parallel):
    cases = [(arch, config) for (name, _), config in CONFIGS.items() if name == arch and config.kv_heads % 2 == 0]
    assert cases
    expected = [once(build(*case)) for case in cases]
    for results in two(cut_once, cases, sequence_parallel):
        for got, right in zip(results, expected, strict=True):
            assert_close(got["loss"], right["loss"])
            assert_close(got["logits"], right["logits"], atol=1e-5)
            assert_same(got["gradients"], right["gradients"])


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
}


def run_config(name: str) -> tuple[str, Any]:
    arch, config = RUNS[name]
    return arch, get_arch(arch).config_class(**{**TINY, "initializer_range": 0.1, **config})


def train(model: Any, optimizer_name: str = "liger", *, packed: bool = False, dp: tuple[int, int] = (0, 1)) -> dict:
    """Losses, norms, the first step's gradients and the last one's weights; ``dp``: place and number of the rank."""
    optimizer = make_optimizer(optimizer_name, model)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        inputs = share(batch(step, packed=packed), *dp)
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


def train_cut(case: tuple[str, Any], sequence_parallel: bool, policy: str, packed: bool) -> dict[str, Any]:
    model = build(*case)
    model.set_checkpointing(policy)
    names = [name for name, _ in model.named_parameters()]
    apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
    assert [name for name, _ in model.named_parameters()] == names
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert local < 0.55 * model.num_parameters()
    return train(model, packed=packed)


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "policy", "packed"),
    [
        *((name, index % 2 == 0, ("none", "selective", "full")[index % 3], False) for index, name in enumerate(RUNS)),
        ("llama, tied, biases", True, "full", True),
        ("olmo2", True, "selective", True),
        ("mixtral", False, "none", True),
    ],
)
def test_trains_as_one_process(two, name, sequence_parallel, policy, packed):
    case = run_config(name)
    expected = train(build(*case), packed=packed)
    for got in two(train_cut, case, sequence_parallel, policy, packed):
        assert_same_run(got, expected)


def train_2d(case: tuple[str, Any], optimizer: str, sequence_parallel: bool) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    model = apply_tp(build(*case), mesh["tp"], sequence_parallel=sequence_parallel)
    apply_fsdp(model, mesh["dp"], param_dtype=None)
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert {parameter.device_mesh for parameter in model.parameters()} == {mesh}
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert local < 0.3 * model.num_parameters()
    return train(model, optimizer, dp=(mesh["dp"].get_local_rank(), 2))


@pytest.mark.parametrize(
    ("name", "optimizer", "sequence_parallel"),
    [
        ("llama", "torch", False),
        ("llama, tied, biases", "liger", True),
        ("qwen3", "liger", False),
        ("olmo2", "torch", True),
        ("mixtral", "liger", False),
    ],
)
def test_fsdp_around_it(four, name, optimizer, sequence_parallel):
    arch, config = run_config(name)
    if arch == "mixtral":  # its balance is that of a rank's own tokens
        config = type(config)(**{**config.__dict__, "output_router_logits": False})
    expected = train(build(arch, config), optimizer)
    for got in four(train_2d, (arch, config), optimizer, sequence_parallel):
        assert_same_run(got, expected)
