"""Tensor parallelism and expert parallelism: each rank holds a shard of each layer, or of each layer's experts."""

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
    """Shard a model's layers over the R ranks of a mesh, in place. All these ranks process the same tokens.

    Each rank has 1 / R of the attention heads, of the width of each MLP and expert, and of the vocabulary. Norms and
    routers are replicated. The fused ops run on the rank's shard, and the loss does not gather logits. An adapter
    (`apply_lora`) has one matrix for the rows of the weight and one for its columns. The adapter's matrix for the
    sharded side of the weight is sharded, too, and the adapter's other matrix is replicated. Quantized weights
    (`quantize_base`, ``keep_quantized``) are sharded in their quantized form, together with their scales.

    A vision tower is sharded in the same way, but every rank has all patches. A layer of the tower is replicated if
    the number of its attention heads or its MLP width is not divisible by R. The tower's parameters outside its
    layers are replicated, too. Gemma 4's tower is completely replicated.

    All ranks must get the same batch, and all return the same loss. Call this function before `apply_fsdp`, and create
    the optimizer afterwards. Ranks along the other dimensions of the mesh hold replicas. Without `apply_fsdp` over the
    other dimensions, the first training forward raises an error.

    Args:
        model: the model, either on the meta device (`from_pretrained` with ``shard`` then reads only each rank's
            shards), or with the same weights on every rank.
        mesh: the mesh of all ranks. It has a dimension "tp" with R ranks, or only this dimension. These R ranks should
            be on one host.
        sequence_parallel: whether each rank has only 1 / R of the tokens between the layers. This saves memory, and
            norms are computed once instead of R times, at the cost of one more all-gather in each layer's backward. The
            number of tokens per row must be a multiple of R, so the model cannot generate.
        averaged: whether your own code averages the gradients over the other dimensions of the mesh.

    Returns:
        ``model``.

    Raises:
        ValueError: the model is already sharded; something other than `apply_lora` and `quantize_base` has replaced a
            linear layer; the mesh has no dimension "tp"; the heads or widths of the language model are not divisible
            by R; or a rank's slice of a quantized weight would end within a block of elements that share a scale.
            After this error, some layers may have changed, so create the model again.

    Source: https://arxiv.org/abs/1909.08053, https://arxiv.org/abs/2205.05198.
    """
    check_unsharded("apply_tp", model)
    # Sample the weights while every rank has all of them.
    samples = weight_samples(model)
    mesh = own_dimension("apply_tp", mesh, "tp")
    group = group_of(mesh.get_group(), sequence_parallel=sequence_parallel)
    if group.size == 1:
        return model
    for adapted in quantized_layers(model):
        adapted.freeze_weight()

    # With sequence parallelism, find the layers that sum the gradients of their replicated parameters over the ranks.
    tower = set() if model.visual is None else set(model.visual.modules())
    given = set(layers_of(model))
    summed = set()
    if sequence_parallel:
        summed = {layer for layer in given if layer not in tower and layer.sum_gradients(group)}

    # Shard each layer. Every rank has all patches of images, and also all embeddings, because image tokens replace
    # some embeddings before the tokens are distributed.
    on_all_tokens = {*tower, model.embed_tokens} if tower else tower
    dims: dict[str, int] = {}
    for name, layer in named_layers(model):
        if layer not in tower or layer.can_shard(group.size):
            sharded = layer.shard(
                dataclasses.replace(group, sequence_parallel=False) if layer in on_all_tokens else group
            )
            dims |= {f"{name}.{parameter}": dim for parameter, dim in sharded.items()}
    # Sharding has replaced linear layers with parallel layers, which now shard their adapters.
    put_in = {name: layer for name, layer in named_layers(model) if layer not in given}
    for name, layer in put_in.items():
        dims |= {f"{name}.{parameter}": dim for parameter, dim in layer.shard(group).items()}
    dims = _with_frozen(model, dims, group.size)

    # All other parameters in the blocks and the tower are replicated.
    if sequence_parallel:
        summed |= {layer for layer in put_in.values() if layer.sum_gradients(group)}
        _check_gradients(model, summed, dims)
    for name, module in list(model.named_modules()):
        if module in tower and isinstance(module, nn.Linear) and f"{name}.weight" not in dims:
            model.set_submodule(name, ReplicatedLinear.of(module, None))

    # Convert all parameters to DTensors. Each name gets its own parameter, so tie weights again.
    model.groups = dataclasses.replace(model.groups, tensor=group)
    _distribute(model, mesh, dims, rest=True)
    model.tie_weights()
    check_first_forward(model, samples, averaged=averaged, replicas=replicas(mesh, group))
    return model


def apply_ep(model: Model, mesh: DeviceMesh) -> Model:
    """Distribute a model's experts over the R ranks of a mesh, in place. Each token is sent to the ranks that hold its
    experts.

    The ranks have different batches, as in data parallelism. The load-balancing loss covers the tokens of all ranks.
    Everything except the experts is replicated. Call `apply_fsdp` afterwards with the same mesh, to shard the weights
    over all ranks and to average their gradients. Without `apply_fsdp`, the first training forward raises an error.
    `apply_ep` cannot be combined with `apply_tp`.

    Args:
        model: a model with `LigerMoE` layers, either on the meta device or with the same weights on every rank.
        mesh: the mesh of all ranks. It has a dimension "ep" with R ranks, or only this dimension.

    Returns:
        ``model``.

    Raises:
        ValueError: there are no experts, their number is not divisible by R, the model is already sharded, or the
            mesh has no dimension "ep".

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

    # Shard along the experts. The load-balancing loss counts tokens over these ranks; `apply_fsdp` extends it to all
    # ranks.
    dims = {
        f"{name}.{parameter}": dim
        for name, module in layers.items()
        for parameter, dim in module.shard_experts(group).items()
    }
    dims = _with_frozen(model, dims, group.size)
    model.groups = dataclasses.replace(model.groups, balance=group)
    _distribute(model, mesh, dims, rest=False)
    # A block whose experts are on several ranks is no longer recomputed as a whole.
    model.set_checkpointing(model.checkpointing, offload_layers=len(model.offloaded))
    check_first_forward(model, samples)
    return model


def check_unsharded(where: str, model: Decoder) -> None:
    """Raise ValueError if the model is sharded in any way. ``where`` is the calling function's name."""
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
    """Raise ValueError if the blocks have a replicated parameter, and no layer sums the gradient of this parameter over
    the ranks.

    With sequence parallelism, each rank computes the gradient of a replicated parameter only from its own tokens.

    Args:
        model: the model. Its layers are already sharded.
        summed: the layers that sum these gradients over the ranks.
        dims: maps the path of each sharded parameter to the dimension along which it is sharded.
    """
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
    """Return ``dims`` with each quantized weight replaced by the parameters that store its codes and scales.

    Args:
        model: the model.
        dims: maps the path of each sharded parameter to the dimension along which it is sharded.
        ranks: number of ranks, each of which gets a slice.
    """
    frozen = {name: weight for name, weight in frozen_weights(model).items() if name in dims}
    sharded = {name: dim for name, dim in dims.items() if name not in frozen}
    for name, weight in frozen.items():
        sharded |= weight.shard(model.get_submodule(name.rpartition(".")[0]), name, dims[name], ranks)
    return sharded


def _distribute(model: nn.Module, mesh: DeviceMesh, dims: dict[str, int], *, rest: bool) -> None:
    """Replace parameters with DTensors.

    Args:
        model: the model.
        mesh: a mesh with one dimension.
        dims: maps the path of each sharded parameter to the dimension along which it is sharded.
        rest: whether all other parameters become replicated DTensors. If False, they do not change.
    """
    for name, parameter in list(model.named_parameters()):
        if name not in dims and not rest:
            continue
        placement = Shard(dims[name]) if name in dims else Replicate()
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, _as_dtensor(parameter, mesh, placement))


def _as_dtensor(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Convert a whole parameter to a DTensor that holds this rank's shard."""
    local: Tensor = parameter.detach()
    if isinstance(placement, Shard):
        # Copy the shard, because a view would keep the memory of the whole parameter alive.
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone(
            memory_format=torch.contiguous_format
        )
    sharded = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)
