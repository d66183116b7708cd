"""Tensor and expert parallel: layers of which each rank has a part."""

import dataclasses
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from liger_models.kernels.collectives import ranks_of
from liger_models.kernels.dispatch import check
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.tensor_parallel import WholeLinear
from liger_models.layers.vision_language import VisionLanguageModel

Model = TypeVar("Model", bound=CausalLM)


def apply_tp(model: Model, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> Model:
    """Cut a model's layers over the ranks of a mesh, in place: all of them work on the same tokens.

    Each rank has 1 / R of the attention heads, of the MLP's (and each expert's) width and of the vocabulary; norms and
    routers are whole. The fused ops run as before, on the rank's part. Logits are not gathered for the loss.

    A vision tower is cut alike, but every rank has all patches. Where R does not divide the heads of its attention, or
    the width of an MLP, that layer is whole on every rank, as is what the tower has around them.

    The ranks must be given the same batch, and get the same loss. Call it before `apply_fsdp`, and make the optimizer
    afterwards.

    Args:
        model: on the meta device (`from_pretrained` with ``shard`` then reads each rank's part only), or with the same
            weights on every rank.
        mesh: of one dimension; R ranks, best those of one host.
        sequence_parallel: between the layers each rank has 1 / R of the tokens: less memory, and norms are not computed
            R times, for one more gather in each layer's backward. T must then be a multiple of R, so not to generate.

    Returns:
        ``model``.

    Raises:
        ValueError: a model that is sharded already or has replaced linear layers, a mesh that does not fit, heads or
            widths of the language model that R does not divide. Make the model anew after that.

    Source: https://arxiv.org/abs/1909.08053, https://arxiv.org/abs/2205.05198.
    """
    check_unsharded("apply_tp", model, mesh)
    ranks = ranks_of(mesh.get_group(), sequence=sequence_parallel)
    if ranks.size == 1:
        return model
    tower = set(model.visual.modules()) if isinstance(model, VisionLanguageModel) else set()
    if sequence_parallel:
        for module in model.modules():
            if isinstance(module, LigerRMSNorm | LigerLayerNorm) and module not in tower:
                module.ranks = ranks
    # Patches are no tokens of the text; and image tokens are put among all tokens, before those are cut.
    of_all_tokens = {*tower, model.embed_tokens} if tower else tower
    dims: dict[str, int] = {}
    for name, module in list(model.named_modules()):
        if hasattr(module, "cut") and not (module in tower and module.parts % ranks.size):
            cut = module.cut(dataclasses.replace(ranks, sequence=False) if module in of_all_tokens else ranks)
            dims |= {f"{name}.{parameter}": dim for parameter, dim in cut.items()}
    for name, module in list(model.named_modules()):
        if module in tower and isinstance(module, nn.Linear) and f"{name}.weight" not in dims:
            model.set_submodule(name, WholeLinear.of(module, None))
    model.ranks = ranks
    _distribute(model, mesh, dims, rest=True)
    model.tie_weights()
    return model


def apply_ep(model: Model, mesh: DeviceMesh) -> Model:
    """Spread a model's experts over the ranks of a mesh, in place: tokens go to the ranks of their experts, and back.

    The ranks have different batches, as in data parallel, and all else of the model; `apply_fsdp` shards it afterwards.
    The load-balancing loss is that of all ranks' tokens. Not with `apply_tp`.

    Args:
        model: with `LigerMoE` layers; on the meta device, or with the same weights on every rank.
        mesh: of one dimension; R ranks.

    Returns:
        ``model``.

    Raises:
        ValueError: no experts, a number of them that R does not divide, a model that is sharded already, a mesh that
            does not fit.

    Source: https://arxiv.org/abs/2006.16668.
    """
    check_unsharded("apply_ep", model, mesh)
    ranks = ranks_of(mesh.get_group())
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LigerMoE)}
    check(len(layers) > 0, f"apply_ep: the model must have mixtures of experts, got {type(model).__name__}.")
    if ranks.size == 1:
        return model
    dims = {
        f"{name}.{parameter}": dim
        for name, module in layers.items()
        for parameter, dim in module.cut_experts(ranks).items()
    }
    model.balance_ranks = ranks
    _distribute(model, mesh, dims, rest=False)
    return model


def check_unsharded(where: str, model: CausalLM, mesh: DeviceMesh) -> None:
    """Raise ValueError for a model that `apply_fsdp` or one of these has had, or a mesh of several dimensions."""
    check(
        model.context_ranks is None,
        f"{where}: {type(model).__name__} must have all tokens on each rank, got one that apply_cp has "
        "spread. Call that once, and neither apply_tp nor apply_ep.",
    )
    check(
        not isinstance(model, FSDPModule) and not any(isinstance(p, DTensor) for p in model.parameters()),
        f"{where}: {type(model).__name__} must not be sharded yet, got one that is. Call it once, before apply_fsdp.",
    )
    check(mesh.ndim == 1, f'{where}: mesh must have one dimension, got {mesh}. Take one of its dimensions: mesh["tp"].')


def _distribute(model: nn.Module, mesh: DeviceMesh, dims: dict[str, int], *, rest: bool) -> None:
    """Make parameters DTensors, cut along ``dims``; with ``rest`` the others, too, whole on every rank."""
    for name, parameter in list(model.named_parameters()):
        if name not in dims and not rest:
            continue
        placement = Shard(dims[name]) if name in dims else Replicate()
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, _part(parameter, mesh, placement))


def _part(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    local: Tensor = parameter.detach()
    if isinstance(placement, Shard):
        # Copied, so that the whole is let go of.
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone(
            memory_format=torch.contiguous_format
        )
    cut = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)
