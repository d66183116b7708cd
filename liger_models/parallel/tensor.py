"""Tensor and expert parallelism: each rank has a shard of a layer."""

import dataclasses
from collections.abc import Collection
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from liger_models.adapters.quantize import quantized_layers
from liger_models.distributed.collectives import group_of
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import frozen_weights
from liger_models.layers.layer import layers_of, named_layers
from liger_models.layers.linear import ReplicatedLinear
from liger_models.parallel.agreement import check_first_forward, weight_samples
from liger_models.parallel.mesh import own_dimension, replicas

Model = TypeVar("Model", bound=Decoder)


def apply_tp(model: Model, mesh: DeviceMesh, *, sequence_parallel: bool = False, averaged: bool = False) -> Model:
    """Shard a model's layers over the ranks of a mesh, in place. All these ranks work on the same tokens.

    Each rank has 1 / R of the attention heads, of the MLP's (and each expert's) width and of the vocabulary. Norms and
    routers are replicated. The fused ops run on the rank's shard. The loss does not gather logits. Of an adapter
    (`apply_lora`), the matrix on the side along which the weight is sharded is sharded, and the other is replicated.
    Quantized weights (`quantize_base`, ``keep_float8``) are sharded as they are stored, with their scales.

    A vision tower is sharded in the same way, but every rank has all patches. A layer of the tower is replicated if R
    does not divide its attention heads or MLP width. So are everything outside the tower's layers, and Gemma 4's tower.

    All ranks must be given the same batch; they return the same loss. Call it before `apply_fsdp`, and create the
    optimizer afterwards. If other dimensions of the mesh have more ranks, these hold copies: without `apply_fsdp` over
    them, the first forward in training is refused.

    Args:
        model: on the meta device (`from_pretrained` with ``shard`` then reads only each rank's shards), or with the
            same weights on every rank.
        mesh: the mesh of all ranks, with a dimension called "tp" of R ranks, or that dimension alone; preferably on one
            host.
        sequence_parallel: between the layers, each rank has 1 / R of the tokens. That saves memory and computes norms
            once instead of R times, for one more all-gather in each layer's backward. T must then be a multiple of R,
            so the model cannot generate.
        averaged: code of your own averages the gradients over the other dimensions of the mesh.

    Returns:
        ``model``.

    Raises:
        ValueError: the model is already sharded or has linear layers that are replaced by others than `apply_lora` and
            `quantize_base`, the mesh does not fit, R does not divide the heads or widths of the language model, or a
            rank's slice of a quantized weight would end within a block of numbers that share a scale. The model may
            then be changed in part; create it again.

    Source: https://arxiv.org/abs/1909.08053, https://arxiv.org/abs/2205.05198.
    """
    check_unsharded("apply_tp", model)
    samples = weight_samples(model)
    mesh = own_dimension("apply_tp", mesh, "tp")
    group = group_of(mesh.get_group(), sequence_parallel=sequence_parallel)
    if group.size == 1:
        return model
    for adapted in quantized_layers(model):
        adapted.store()
    tower = set() if model.visual is None else set(model.visual.modules())
    given = set(layers_of(model))
    summed = set()
    if sequence_parallel:
        summed = {layer for layer in given if layer not in tower and layer.sum_gradients(group)}
    # Each rank has all patches, and all embeddings too: image tokens replace some before the tokens are distributed.
    on_all_tokens = {*tower, model.embed_tokens} if tower else tower
    dims: dict[str, int] = {}
    for name, layer in named_layers(model):
        if layer not in tower or layer.can_shard(group.size):
            sharded = layer.shard(
                dataclasses.replace(group, sequence_parallel=False) if layer in on_all_tokens else group
            )
            dims |= {f"{name}.{parameter}": dim for parameter, dim in sharded.items()}
    # Linear layers that sharding has put in, for their adapters.
    put_in = {name: layer for name, layer in named_layers(model) if layer not in given}
    for name, layer in put_in.items():
        dims |= {f"{name}.{parameter}": dim for parameter, dim in layer.shard(group).items()}
    dims = _with_frozen(model, dims, group.size)
    if sequence_parallel:
        summed |= {layer for layer in put_in.values() if layer.sum_gradients(group)}
        _check_gradients(model, summed, dims)
    for name, module in list(model.named_modules()):
        if module in tower and isinstance(module, nn.Linear) and f"{name}.weight" not in dims:
            model.set_submodule(name, ReplicatedLinear.of(module, None))
    model.groups = dataclasses.replace(model.groups, tensor=group)
    _distribute(model, mesh, dims, rest=True)
    model.tie_weights()
    check_first_forward(model, samples, averaged=averaged, replicas=replicas(mesh, group))
    return model


def apply_ep(model: Model, mesh: DeviceMesh) -> Model:
    """Distribute a model's experts over the ranks of a mesh in place: tokens are sent to their experts' ranks and back.

    The ranks have different batches, as in data parallelism. Everything but the experts is replicated. Call
    `apply_fsdp` afterwards with the same mesh: it shards the weights over all ranks and averages their gradients.
    Without it, the first forward in training is refused. The load-balancing loss covers the tokens of all ranks. It
    cannot be combined with `apply_tp`.

    Args:
        model: with `LigerMoE` layers; on the meta device, or with the same weights on every rank.
        mesh: the mesh of all ranks, with a dimension called "ep" of R ranks, or that dimension alone.

    Returns:
        ``model``.

    Raises:
        ValueError: there are no experts, R does not divide their number, the model is already sharded, or the mesh does
            not fit.

    Source: https://arxiv.org/abs/2006.16668.
    """
    check_unsharded("apply_ep", model)
    samples = weight_samples(model)
    mesh = own_dimension("apply_ep", mesh, "ep")
    group = group_of(mesh.get_group())
    layers = {name: layer for name, layer in named_layers(model) if layer.router is not None}
    if len(layers) == 0:
        raise ValueError(f"apply_ep: the model must have mixtures of experts, got {type(model).__name__}.")
    if group.size == 1:
        return model
    dims = {
        f"{name}.{parameter}": dim
        for name, module in layers.items()
        for parameter, dim in module.shard_experts(group).items()
    }
    dims = _with_frozen(model, dims, group.size)
    model.groups = dataclasses.replace(model.groups, balance=group)
    _distribute(model, mesh, dims, rest=False)
    check_first_forward(model, samples)
    return model


def check_unsharded(where: str, model: Decoder) -> None:
    """Raise ValueError if the model is sharded in any way."""
    if model.groups.context is not None:
        raise ValueError(
            f"{where}: {type(model).__name__} must have all tokens on each rank, got one after apply_cp. Call apply_cp "
            "once, and neither apply_tp nor apply_ep with it."
        )
    if isinstance(model, FSDPModule) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"{where}: {type(model).__name__} must not be sharded yet, got one that is. Call it once, before "
            "apply_fsdp."
        )


def _check_gradients(model: Decoder, summed: Collection[nn.Module], dims: dict[str, int]) -> None:
    """Refuse replicated parameters of the blocks whose gradients, from each rank's own tokens, no layer sums."""
    for name, module in model.named_modules():
        if not name.startswith("layers.") and module is not model.norm:
            continue
        own = module.named_parameters(recurse=False)
        replicated = [each for each, p in own if f"{name}.{each}" not in dims and p.is_floating_point()]
        if replicated and module not in summed:
            raise ValueError(
                f"apply_tp: {name} ({type(module).__name__}) must be a Layer whose sum_gradients sums the gradients of "
                f"{', '.join(replicated)} over the ranks, got one that does not. Derive it from Layer, or leave "
                "sequence_parallel out."
            )


def _with_frozen(model: nn.Module, dims: dict[str, int], ranks: int) -> dict[str, int]:
    """``dims`` with the parameters that frozen weights in fewer bits consist of, in place of these weights."""
    frozen = {name: weight for name, weight in frozen_weights(model).items() if name in dims}
    sharded = {name: dim for name, dim in dims.items() if name not in frozen}
    for name, weight in frozen.items():
        sharded |= weight.shard(model.get_submodule(name.rpartition(".")[0]), name, dims[name], ranks)
    return sharded


def _distribute(model: nn.Module, mesh: DeviceMesh, dims: dict[str, int], *, rest: bool) -> None:
    """Make parameters DTensors: those in ``dims`` sharded along that dimension, with ``rest`` the others replicated."""
    for name, parameter in list(model.named_parameters()):
        if name not in dims and not rest:
            continue
        placement = Shard(dims[name]) if name in dims else Replicate()
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, _as_dtensor(parameter, mesh, placement))


def _as_dtensor(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    local: Tensor = parameter.detach()
    if isinstance(placement, Shard):
        # A copy, so that the memory of the whole parameter is freed.
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone(
            memory_format=torch.contiguous_format
        )
    sharded = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)
