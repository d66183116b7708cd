"""FSDP2: parameters are sharded over the ranks. A block's parameters are gathered only for its forward and backward."""

import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function
from torch.torch_version import TorchVersion

from liger_models.adapters.lora_layers import LoRALinear, adapted_layers
from liger_models.adapters.medusa import LigerMedusa
from liger_models.distributed.collectives import group_of
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import frozen_parts, frozen_weights
from liger_models.layers.layer import layers_of, routed_layers
from liger_models.layers.linear import is_sharded, local
from liger_models.layers.moe import LigerMoE
from liger_models.parallel.agreement import check_first_forward, weight_samples
from liger_models.parallel.float8_gather import Float8Gather
from liger_models.parallel.mesh import data_mesh, group_over, replicas
from liger_models.parallel.reduce_scatter import BackwardPasses, ReduceScatter

RECOMPILE_LIMIT = 64
"""Maximum number of times that a block's forward is compiled after `compile_blocks`.

PyTorch's limit is 8. Separate compilations are needed for the first block, for each kind of attention, for a fixed
length and for changing lengths, and for training, evaluation and generation. A model with attention windows needs
over 20 of them.
"""
Model = TypeVar("Model", bound=Decoder)
Sharded = TypeVar("Sharded", bound=Decoder | LigerMedusa)


def apply_fsdp(
    model: Sharded,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = torch.bfloat16,
    reduce_dtype: torch.dtype | None = torch.float32,
    cpu_offload: bool = False,
    reshard_after_forward: bool | int = True,
    prefetch: int = 1,
    float8_gather: bool = True,
    averaged: bool = False,
) -> Sharded:
    """Shard a model's parameters, gradients and optimizer state over the ranks of a mesh, in place.

    The parameters are divided into groups, and the parameters of a group are gathered together. The groups are: the
    embedding; each block, including the blocks of a vision tower; and the head, which stays gathered until its
    backward. A tied embedding and head form one group, which stays gathered from its first to its last use. Each layer
    whose parameters are used and trained in fp32, such as the decays of Mamba-2, is a separate group, which is gathered
    and reduced in fp32. The group of the model itself consists of the final norm and of all parameters of a vision
    tower outside its blocks. If `apply_ep` has distributed a layer's experts, the experts on a rank form a group, which
    is sharded over the ranks that hold the same experts. If only one rank holds the experts of such a group, and the
    experts already have ``param_dtype``, FSDP2 neither shards nor casts them.

    Parameters keep their dtype (fp32 for master weights), and the computation uses ``param_dtype``. Weights that
    `quantize_base` has quantized or that `from_pretrained` has kept in float8 are sharded and gathered in their
    quantized form.

    Routed experts are sharded so that each rank has some whole experts. If there are too few experts for all ranks,
    each rank has a part of every expert instead. The part consists of rows if the number of rows is divisible by the
    number of ranks, and otherwise of columns. If neither the number of rows nor the number of columns is divisible, or
    if ``reshard_after_forward`` is a number, some ranks have no experts and send padding.

    Create the optimizer after this call, because the optimizer must hold the sharded parameters.

    Args:
        model: the model, either on the meta device (`from_pretrained` with ``shard`` then reads only each rank's
            shards), or with the same weights on every rank. It may be a `LigerMedusa`, whose own model may be sharded
            already. Each head of a `LigerMedusa` is a group.
        mesh: the mesh of all ranks that was passed to `apply_tp`, `apply_cp` and `apply_ep`. The dimension of
            `apply_tp` is left out, and the dimensions of `apply_cp` and `apply_ep` are merged with the data-parallel
            dimension. The remaining mesh has one dimension, or two named dimensions for HSDP: the first dimension is
            over the replicas, and the second dimension is over the ranks that share a replica. After `apply_tp`, you
            may also pass ``mesh["dp"]``. Default: all ranks, in one dimension.
        param_dtype: dtype of gathered parameters, and thus of the computation. None: the dtype of the parameters.
        reduce_dtype: dtype in which gradients are averaged over the ranks. None: ``param_dtype``. Within one host,
            gradients that are averaged in fp32 are sent in ``param_dtype``, in which the backward computes them.
            Gradients that were first accumulated over several backward passes (``set_requires_gradient_sync``) are sent
            in fp32.
        cpu_offload: whether to keep parameters, gradients and optimizer state on the CPU. The optimizer then runs on
            the CPU.
        reshard_after_forward: whether to reshard a block after its forward. False keeps blocks gathered until their
            backward (ZeRO-2). A number reshards blocks over this many ranks between the forward and the backward.
        prefetch: number of groups that are gathered ahead of their use.
        float8_gather: whether weights with a single float8 scale (`convert_to_float8`, recipe "tensorwise") are rounded
            before they are gathered. This does not change the results. If ``reshard_after_forward`` is a number, or
            with ``cpu_offload``, these weights are gathered in ``param_dtype``.
        averaged: has an effect only if ``mesh`` is a part of a larger mesh. Pass True if ranks along the other
            dimensions hold other parameters (pipeline stages), or if your own code averages the gradients over these
            dimensions. Otherwise, the first training forward raises an error, because replicas of the weights would
            diverge.

    Returns:
        ``model``.

    Raises:
        ValueError: there is no process group, the model is already sharded, ``prefetch`` is negative, or the mesh does
            not have the dimensions that the model needs.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "apply_fsdp: the process group must be initialized. Call torch.distributed.init_process_group() first, in "
            "processes started by torchrun."
        )
    modules = model.modules() if isinstance(model, Decoder) else [model]  # the model of a LigerMedusa may be sharded
    if any(isinstance(module, FSDPModule) for module in modules):
        raise ValueError(
            f"apply_fsdp: {type(model).__name__} must not be sharded yet, got one that is, or whose modules are. Call "
            "it once for each model, without fully_shard."
        )

    _annotate_for_profilers_alone()

    # Frozen quantized weights become uint8 parameters, which are dequantized to the dtype of the computation.
    for adapted in adapted_layers(model).values():
        if isinstance(adapted, LoRALinear):
            adapted.freeze_weight()
    frozen = frozen_weights(model).values()
    if frozen:
        _make_frozen_parameters()
    for weight in frozen:
        weight.dtype = param_dtype or weight.dtype
    if isinstance(model, LigerMedusa):
        _shard_medusa(
            model, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype, cpu_offload=cpu_offload,
            reshard_after_forward=reshard_after_forward, prefetch=prefetch, float8_gather=float8_gather,
            averaged=averaged,
        )  # fmt: skip
        return model
    if model.groups.tensor is not None and mesh is None:
        raise ValueError(
            "apply_fsdp: mesh must be given for a model that apply_tp has sharded, got none. Pass the "
            'mesh of all ranks whose "tp" dimension apply_tp got.'
        )
    if not prefetch >= 0:
        raise ValueError(f"apply_fsdp: prefetch must not be negative, got {prefetch}.")

    # Determine the mesh to shard over, and the ranks outside of this mesh that hold replicas of this rank's weights.
    # While every rank has all weights, take samples of the weights, with which the ranks are compared later.
    mesh = _all_ranks() if mesh is None else mesh
    samples, copies = weight_samples(model), replicas(mesh, model.groups.tensor)
    experts = next((layer.groups.expert for layer in layers_of(model) if layer.groups.expert is not None), None)
    mesh, experts_mesh = data_mesh(mesh, model.groups, experts)
    uncovered = copies.difference(mesh.mesh.flatten().tolist())
    model.groups = replace(
        model.groups,
        data=tuple(group_of(group) for group in mesh.get_all_groups()),
        balance=group_over(mesh) if routed_layers(model) and mesh.size() > 1 else model.groups.balance,
    )

    alone = experts_mesh is not None and experts_mesh.size() == 1 and not cpu_offload
    ignored = _parameters_that_stay(model, param_dtype, alone=alone)
    dtypes: dict[str, Any] = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "cpu_offload": cpu_offload}
    passes, options = BackwardPasses(), _options(mesh, reshard_after_forward, ignored, **dtypes)
    # A number in reshard_after_forward refers to ranks of the whole mesh, not of the experts' mesh.
    experts_options = None
    if experts_mesh is not None:
        experts_options = _options(experts_mesh, bool(reshard_after_forward), ignored, **dtypes)

    tied = model.lm_head.weight is model.embed_tokens.weight
    _shard_groups(model, passes, options, experts_options, ignored, tied=tied)
    # The final norm belongs to the model's own group. It can't be a group itself, because the model calls the norm's
    # method `add`, and FSDP2's hooks run only for `forward`.
    fully_shard(model, **{**options, "reshard_after_forward": False})
    if param_dtype is not None:
        model.register_forward_pre_hook(_EmbedsCast(param_dtype), with_kwargs=True)
    if float8_gather and isinstance(reshard_after_forward, bool) and not cpu_offload:
        gather = Float8Gather(model, mesh, param_dtype)
        # This hook must run before FSDP2's hook. Otherwise, FSDP2's stream would not wait for the maxima.
        model.register_forward_pre_hook(gather, prepend=True)
    check_first_forward(model, samples, averaged=averaged, replicas=uncovered)

    _set_prefetch(model, prefetch, tied=tied)
    return model


def _parameters_that_stay(model: Decoder, param_dtype: torch.dtype | None, *, alone: bool) -> set[Any]:
    """Return the parameters that FSDP2 must neither shard nor cast.

    These are the frozen quantized experts that `apply_ep` or `apply_tp` has distributed. If no other rank holds the
    same experts (``alone``) and FSDP2 need not cast them, dense experts are returned as well, because FSDP2 would only
    copy them.
    """
    ignored = {
        parameter
        for layer in layers_of(model)
        if isinstance(layer, LigerMoE)
        for name, weight in frozen_parts(layer).items()
        if weight.sharded is not None
        for parameter in (getattr(layer, name), *weight.parameters())
    }
    if alone:
        for layer in layers_of(model):
            if layer.groups.expert:
                ignored |= {x for x in layer.parameters() if is_sharded(x) and x.dtype == (param_dtype or x.dtype)}
    return ignored


def _shard_groups(
    model: Decoder, passes: BackwardPasses, options: dict[str, Any], experts_options: dict[str, Any] | None,
    ignored: set[Any], *, tied: bool,
) -> None:  # fmt: skip
    """Shard group by group, inner groups first. A group gets the parameters of its modules that are not in an inner
    group.
    """
    if tied:
        _shard([model.embed_tokens, model.lm_head], passes, **{**options, "reshard_after_forward": False})
    else:
        _shard(model.embed_tokens, passes, **options)
    for block in model.blocks:
        routed = [layer for layer in layers_of(block) if layer.groups.expert is not None]
        sharded = [layer for layer in routed if any(is_sharded(p) and p not in ignored for p in layer.parameters())]
        # Suppress FSDP2's warning that in-place writes to a view would be lost, because no layer writes in place.
        names = f"FSDP({'|'.join({type(each).__name__ for each in [block, *sharded]})})"
        message = rf"FSDP2-wrapped module \({names}\) returned a view tensor"
        warnings.filterwarnings("ignore", message, UserWarning)
        for layer in (layer for layer in layers_of(block) if layer.wide):
            policy = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
            _shard(layer, passes, **{**options, "mp_policy": policy, "reshard_after_forward": False})
        for layer in sharded:
            assert layer.router is not None
            assert experts_options is not None
            if not isinstance(layer.router, FSDPModule):  # sharded above
                _shard(layer.router, passes, **options)
            _shard(layer, passes, **experts_options)
        _shard(block, passes, **options)
    if not tied:
        _shard(model.lm_head, passes, **{**options, "reshard_after_forward": False})


def _set_prefetch(model: Decoder, prefetch: int, *, tied: bool) -> None:
    """For each group, choose the groups that FSDP2 gathers in advance while this group runs."""
    order: list[Any] = [model.embed_tokens, *model.blocks, *([] if tied else [model.lm_head])]
    for index, module in enumerate(order if prefetch else []):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + prefetch])
        # Without a list for the backward, PyTorch gathers one group ahead, in the reverse order of the forward.
        if prefetch > 1:
            module.set_modules_to_backward_prefetch(order[max(index - prefetch, 0) : index][::-1])


def _make_frozen_parameters() -> None:
    """Allow FSDP2 to shard parameters whose dtype is uint8.

    Before PyTorch 2.13, FSDP2 creates all parameters with requires_grad=True, which raises an error for uint8 tensors.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    if TorchVersion(torch.__version__) < "2.13":
        vars(_fsdp_param)["nn"] = SimpleNamespace(**{**vars(nn), "Parameter": _parameter})


def _annotate_for_profilers_alone() -> None:
    """Make FSDP2 annotate its work only while a profiler runs.

    The annotations take about a twentieth of the host time of a block.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    vars(_fsdp_param_group)["record_function"] = _annotation


def _annotation(name: str) -> AbstractContextManager[Any]:
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()


def _parameter(values: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """Return an ``nn.Parameter``. A parameter with integer values never requires a gradient."""
    return nn.Parameter(values, requires_grad and values.dtype.is_floating_point)


def _all_ranks() -> DeviceMesh:
    """Return a mesh of all ranks in one dimension, on the accelerator if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh("cpu" if device is None else device.type, (dist.get_world_size(),))


def _options(
    mesh: DeviceMesh,
    reshard_after_forward: bool | int,
    ignored: Collection[nn.Parameter] = (),
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    cpu_offload: bool,
) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` that most groups share."""
    accelerated = mesh.device_type != "cpu"
    return {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": set(ignored) or None,
        "shard_placement_fn": partial(
            _placement, ranks=mesh.size(-1), any_dimension=isinstance(reshard_after_forward, bool)
        ),
        # Do not cast inputs, because PyTorch would also cast, and thus round, the rotary tables in `BatchLayout`.
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=accelerated) if cpu_offload else OffloadPolicy(),
    }


def _placement(parameter: nn.Parameter, *, ranks: int, any_dimension: bool) -> Shard | None:
    """Return the placement of a parameter that must be sharded along a dimension other than the first; None if the
    first dimension is suitable.

    Args:
        parameter: a plain parameter, or a DTensor that `apply_tp` or `apply_ep` has sharded.
        ranks: number of shards.
        any_dimension: whether experts may be sharded along a dimension other than the first. PyTorch can't gather
            such a parameter if it is resharded over fewer ranks between forward and backward.
    """
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    rows, *others = local(parameter).shape

    # If `apply_tp` has sharded rows unevenly (rows of a vocabulary) and these rows are sharded again, PyTorch computes
    # wrong offsets for checkpoints. Shard columns instead if their number is divisible by the number of ranks. The
    # columns of quantized weights are not sharded, so that the bytes of a block of codes stay together.
    uneven = isinstance(parameter, DTensor) and parameter.shape[0] % parameter.device_mesh.size() > 0
    if uneven and parameter.is_floating_point() and others and others[0] % ranks == 0:
        return Shard(1)

    # If there are too few experts [X, O, C] for the ranks, the last ranks would hold no experts and send padding.
    # PyTorch does not shard any other dimension unevenly. The last dimension of byte tensors is not sharded either,
    # because several bytes may belong to the same value.
    if parameter.ndim == 3 and any_dimension and -(-rows // ranks) * (ranks - 1) >= rows:
        last = 2 if parameter.is_floating_point() else 1
        sharded = [placement.dim for placement in placements if isinstance(placement, Shard)]
        for dim in range(1, last + 1):
            if parameter.shape[dim] % ranks == 0 and dim not in sharded:
                return Shard(dim)
    return None


def _shard(modules: nn.Module | list[nn.Module], passes: BackwardPasses, **options: Any) -> None:
    """Call ``fully_shard``. If all ranks are on one host, let the group reduce its gradients with `ReduceScatter`.

    Within a host, `ReduceScatter` copies faster than PyTorch's own reduce-scatter, and may send fewer bytes. Between
    hosts, PyTorch's reduce-scatter sends fewer bytes, because it first sums the gradients within each host.

    Args:
        modules: the modules of one group.
        passes: counts the backward passes of the model.
        options: arguments of ``fully_shard``.
    """
    fully_shard(modules, **options)
    mesh, policy = options["mesh"], options["mp_policy"]
    each = modules if isinstance(modules, list) else [modules]
    group, dtype = each[0], policy.param_dtype
    assert isinstance(group, FSDPModule)
    parameters: Any = group._get_fsdp_state()._fsdp_param_group
    for parameter in parameters.fsdp_params if parameters else ():
        # Before version 2.13, PyTorch's FSDP would cast uint8 parameters to param_dtype.
        if not parameter.sharded_param.dtype.is_floating_point:
            parameter.init_dtype_attrs = partial(_keep_dtype, parameter.init_dtype_attrs)
    ranks = mesh.get_group(mesh.ndim - 1)
    if passes.on_one_host(ranks):
        # Send gradients in param_dtype if they are summed in fp32. Without param_dtype, gradients may have several
        # dtypes. For sums in other dtypes, FSDP2 divides the gradients before it sends them.
        narrow = ranks.size() > 1 and dtype in (torch.bfloat16, torch.float16) and policy.reduce_dtype == torch.float32
        group.set_custom_reduce_scatter(ReduceScatter(passes, dtype if narrow else None))  # type: ignore[arg-type]  # no public name to inherit
        for module in each if narrow else ():
            module.register_forward_hook(passes.watch)


def _keep_dtype(init_dtype_attrs: Callable[[MixedPrecisionPolicy], None], _: MixedPrecisionPolicy) -> None:
    """Make FSDP2 gather a parameter in the parameter's own dtype instead of the dtype in its group's policy."""
    init_dtype_attrs(MixedPrecisionPolicy())


def _shard_medusa(
    medusa: LigerMedusa, mesh: DeviceMesh | None, *, reshard_after_forward: bool | int, prefetch: int,
    float8_gather: bool, averaged: bool, **dtypes: Any,
) -> None:  # fmt: skip
    """Call `apply_fsdp` on the model of ``medusa``, unless it is sharded already, and shard each head as a group."""
    mesh = _all_ranks() if mesh is None else mesh
    if not isinstance(medusa.model, FSDPModule):
        apply_fsdp(
            medusa.model, mesh, reshard_after_forward=reshard_after_forward, prefetch=prefetch,
            float8_gather=float8_gather, averaged=averaged, **dtypes,
        )  # fmt: skip
    passes, options = BackwardPasses(), _options(mesh, reshard_after_forward, **dtypes)
    for head in medusa.heads:
        _shard(head, passes, **options)
    fully_shard(medusa, **{**options, "reshard_after_forward": False})


class _EmbedsCast:
    """Forward pre-hook that casts ``inputs_embeds`` to the dtype of the gathered parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        embeds = kwargs.get("inputs_embeds")
        return args, kwargs if embeds is None else {**kwargs, "inputs_embeds": embeds.to(self.dtype)}


def compile_blocks(model: Model, **options: Any) -> Model:
    """Compile the forward of each block, in place, before or after `apply_fsdp`. FSDP2's hooks are not compiled.

    Blocks with the same structure share the compiled code. The names of modules and parameters do not change.

    Args:
        model: the model.
        options: arguments of ``torch.compile``. By default, ``recompile_limit`` is `RECOMPILE_LIMIT`, and
            ``fullgraph`` is True except for blocks that can't be a single graph: blocks with layers that `apply_fsdp`
            gathers separately, and blocks with experts after `apply_ep`.

    Returns:
        ``model``.
    """
    if "recompile_limit" in signature(torch.compile).parameters:
        options = {"recompile_limit": RECOMPILE_LIMIT, **options}
    for block in model.blocks:
        splits = any(layer.wide or layer.groups.expert is not None for layer in layers_of(block))
        forward, options_of_block = block.forward, {"fullgraph": not splits, **options}
        if isinstance(forward, MethodType):
            # The result is a method, too, so that a copy of the block uses the copy's weights.
            block.forward = MethodType(torch.compile(forward.__func__, **options_of_block), forward.__self__)
        else:  # a function that replaces the block's own forward
            block.forward = torch.compile(forward, **options_of_block)
    return model
