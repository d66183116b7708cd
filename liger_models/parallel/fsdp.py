"""FSDP2: parameters are sharded over the ranks, and each block is gathered only for its own forward and backward."""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.torch_version import TorchVersion

from liger_models.adapters.lora_layers import LoRALinear, adapted_layers
from liger_models.adapters.medusa import LigerMedusa
from liger_models.distributed.collectives import group_of
from liger_models.distributed.groups import ParallelGroups
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import frozen_parts, frozen_weights
from liger_models.layers.layer import layers_of, routed_layers
from liger_models.layers.linear import is_sharded, local
from liger_models.layers.moe import LigerMoE
from liger_models.layers.recompute import is_compiled
from liger_models.parallel.agreement import check_first_forward, weight_samples
from liger_models.parallel.float8_gather import Float8Gather
from liger_models.parallel.mesh import data_mesh, group_over, replicas
from liger_models.parallel.reduce_scatter import BackwardPasses, ReduceScatter

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

    These groups of parameters are gathered together: the embedding; each block, including a vision tower's; and the
    head, which stays gathered until its backward. If embedding and head are tied they form one group, which stays
    gathered from its first to its last use. The final norm and a tower's parameters outside its blocks form the group
    of the model itself. Experts sharded by `apply_ep` form one group per layer, sharded over the ranks that hold the
    same experts; if that is one rank and they have ``param_dtype`` already, they stay as they are. Parameters keep
    their dtype (fp32 for master weights); the computation uses ``param_dtype``. Weights that `quantize_base` has
    quantized or that `from_pretrained` has kept in float8 are sharded and gathered as they are stored.

    Each rank has some whole routed experts. If there are so few of them that a rank would have none, it has a part of
    each instead: some of their rows or columns, whichever the number of ranks divides. If it divides neither, or
    ``reshard_after_forward`` is a number, ranks without experts gather them as padding.

    Create the optimizer afterwards, because it must hold the sharded parameters.

    Args:
        model: on the meta device (`from_pretrained` with ``shard`` then reads only each rank's shards), or with the
            same weights on every rank. The model of a `LigerMedusa` may be sharded already; each head is a group.
        mesh: the mesh of all ranks that `apply_tp`, `apply_cp` and `apply_ep` got. The dimension of `apply_tp` is left
            out; those of `apply_cp` and `apply_ep` are merged with the one before. What remains has one dimension, or
            two named ones (HSDP): replicas, and the ranks over which each is sharded. Without the dimension of
            `apply_tp` the mesh may also be given as ``mesh["dp"]``. Default: all ranks, in one dimension.
        param_dtype: dtype of gathered parameters, and so of the computation. None: the parameters' own.
        reduce_dtype: dtype in which gradients are averaged over the ranks. None: ``param_dtype``. Within one host fp32
            gradients are sent in the narrower ``param_dtype`` that backward produced them in, unless several backward
            passes were accumulated first (``set_requires_gradient_sync``).
        cpu_offload: keep parameters, gradients and optimizer state on the CPU, where the optimizer then runs.
        reshard_after_forward: False keeps blocks gathered until their backward (ZeRO-2). A number reshards them over
            that many ranks in between.
        prefetch: number of groups that are gathered ahead of their use.
        float8_gather: gather weights that one scale rounds to float8 (`convert_to_float8`, recipe "tensorwise") after
            rounding them. Results are the same. It needs blocks that are either resharded over the whole mesh or not at
            all, and no ``cpu_offload``; otherwise ``param_dtype`` is gathered.
        averaged: of a mesh with more dimensions than were passed, the others hold other parameters (stages of a
            pipeline), or code of your own averages the gradients over them. Otherwise the first forward in training is
            refused, because copies of the weights would drift apart.

    Returns:
        ``model``.

    Raises:
        ValueError: there is no process group, the model is already sharded, or the mesh does not fit.

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
    mixtures = [layer for layer in layers_of(model) if isinstance(layer, LigerMoE)]
    for adapted in adapted_layers(model).values():
        if isinstance(adapted, LoRALinear):
            adapted.store()
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
    # Frozen experts in fewer bits that apply_ep or apply_tp has distributed stay on their ranks.
    ignored = {
        parameter
        for layer in mixtures
        for name, weight in frozen_parts(layer).items()
        if weight.sharded is not None
        for parameter in (getattr(layer, name), *weight.parameters())
    }
    if experts_mesh is not None and experts_mesh.size() == 1 and not cpu_offload:
        # No other rank has these experts. Where FSDP2 would not cast them either, it would only copy them.
        mine = [each for layer in layers_of(model) if layer.groups.expert for each in layer.parameters()]
        ignored |= {each for each in mine if is_sharded(each) and each.dtype == (param_dtype or each.dtype)}
    dtypes: dict[str, Any] = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "cpu_offload": cpu_offload}
    passes, options = BackwardPasses(), _options(mesh, reshard_after_forward, ignored, **dtypes)
    # A number in reshard_after_forward counts ranks of the whole mesh, not of the experts' mesh.
    experts_options = None
    if experts_mesh is not None:
        experts_options = _options(experts_mesh, bool(reshard_after_forward), ignored, **dtypes)
    tied = model.lm_head.weight is model.embed_tokens.weight
    if tied:
        _shard([model.embed_tokens, model.lm_head], passes, **{**options, "reshard_after_forward": False})
    else:
        _shard(model.embed_tokens, passes, **options)
    for block in model.blocks:
        routed = [layer for layer in layers_of(block) if layer.groups.expert is not None]
        sharded = [layer for layer in routed if any(is_sharded(p) and p not in ignored for p in layer.parameters())]
        # FSDP2 warns because in-place writes to a view would be lost. No layer writes in place.
        names = f"FSDP({'|'.join({type(each).__name__ for each in [block, *sharded]})})"
        message = rf"FSDP2-wrapped module \({names}\) returned a view tensor"
        warnings.filterwarnings("ignore", message, UserWarning)
        for layer in sharded:
            assert layer.router is not None
            assert experts_options is not None
            _shard(layer.router, passes, **options)
            _shard(layer, passes, **experts_options)
        _shard(block, passes, **options)
    if not tied:
        _shard(model.lm_head, passes, **{**options, "reshard_after_forward": False})
    # The final norm is left to the model's own group: the model calls its method `add`, which would bypass the hooks of
    # a group of the norm's own.
    fully_shard(model, **{**options, "reshard_after_forward": False})
    if param_dtype is not None:
        model.register_forward_pre_hook(_EmbedsCast(param_dtype), with_kwargs=True)
    if float8_gather and isinstance(reshard_after_forward, bool) and not cpu_offload:
        gather = Float8Gather(model, mesh, param_dtype)
        # Before FSDP2's own hook, after which its stream does not wait for the maxima.
        model.register_forward_pre_hook(gather, prepend=True)
    check_first_forward(model, samples, averaged=averaged, replicas=uncovered)

    order: list[Any] = [model.embed_tokens, *model.blocks, *([] if tied else [model.lm_head])]
    for index, module in enumerate(order if prefetch else []):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + prefetch])
        # Without such a list PyTorch gathers one group ahead, in the reverse order of the last forward.
        if prefetch > 1:
            module.set_modules_to_backward_prefetch(order[max(index - prefetch, 0) : index][::-1])
    return model


def _make_frozen_parameters() -> None:
    """Before PyTorch 2.13, FSDP creates parameters with requires_grad=True, which uint8 tensors reject."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    if TorchVersion(torch.__version__) < "2.13":
        vars(_fsdp_param)["nn"] = SimpleNamespace(**{**vars(nn), "Parameter": _parameter})


def _parameter(values: Tensor, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(values, requires_grad and values.dtype.is_floating_point)


def _all_ranks() -> DeviceMesh:
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
    """The arguments of ``fully_shard`` for most groups."""
    accelerated = mesh.device_type != "cpu"
    return {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": set(ignored) or None,
        "shard_placement_fn": partial(
            _placement, ranks=mesh.size(-1), any_dimension=isinstance(reshard_after_forward, bool)
        ),
        # Do not cast inputs: PyTorch would also cast the rotary tables in `BatchLayout`, and round them.
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=accelerated) if cpu_offload else OffloadPolicy(),
    }


def _placement(parameter: nn.Parameter, *, ranks: int, any_dimension: bool) -> Shard | None:
    """The dimension along which a parameter is sharded; None for the first one.

    Args:
        parameter: plain, or a DTensor that `apply_tp` or `apply_ep` has sharded.
        ranks: number of shards.
        any_dimension: whether a dimension other than the first one may be chosen for experts. PyTorch can't gather
            those that it has resharded over fewer ranks in between.
    """
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    rows, *others = local(parameter).shape

    # If `apply_tp` has sharded rows unevenly (a vocabulary's) and they are sharded again, PyTorch computes wrong
    # offsets for checkpoints. Shard columns instead, where the ranks divide them. Bytes of blocks stay together.
    uneven = isinstance(parameter, DTensor) and parameter.shape[0] % parameter.device_mesh.size() > 0
    if uneven and parameter.is_floating_point() and others and others[0] % ranks == 0:
        return Shard(1)

    # Experts [X, O, C] may be too few for the ranks, of which the last would hold none and send padding. PyTorch shards
    # no other dimension unevenly. Bytes in the last dimension stay together, because they may be parts of one number.
    if parameter.ndim == 3 and any_dimension and -(-rows // ranks) * (ranks - 1) >= rows:
        last = 2 if parameter.is_floating_point() else 1
        sharded = [placement.dim for placement in placements if isinstance(placement, Shard)]
        for dim in range(1, last + 1):
            if parameter.shape[dim] % ranks == 0 and dim not in sharded:
                return Shard(dim)
    return None


def _shard(modules: nn.Module | list[nn.Module], passes: BackwardPasses, **options: Any) -> None:
    """``fully_shard``, with `ReduceScatter` if all ranks are on one host: it copies faster and may send fewer bytes.

    Between hosts PyTorch's own reduce-scatter sends less, because it sums the gradients within each host first.
    """
    fully_shard(modules, **options)
    mesh, policy = options["mesh"], options["mp_policy"]
    each = modules if isinstance(modules, list) else [modules]
    group, dtype = each[0], policy.param_dtype
    assert isinstance(group, FSDPModule)
    parameters: Any = group._get_fsdp_state()._fsdp_param_group
    for parameter in parameters.fsdp_params if parameters else ():
        if not parameter.sharded_param.dtype.is_floating_point:  # PyTorch before 2.13 would cast it to param_dtype
            parameter.init_dtype_attrs = partial(_keep_dtype, parameter.init_dtype_attrs)
    ranks = mesh.get_group(mesh.ndim - 1)
    if passes.on_one_host(ranks):
        # Without param_dtype the gradients may have several dtypes. For other reductions FSDP2 divides before it sends.
        narrow = ranks.size() > 1 and dtype in (torch.bfloat16, torch.float16) and policy.reduce_dtype == torch.float32
        group.set_custom_reduce_scatter(ReduceScatter(passes, dtype if narrow else None))  # type: ignore[arg-type]  # no public name to inherit
        for module in each if narrow else ():
            module.register_forward_hook(passes.watch)


def _keep_dtype(init_dtype_attrs: Callable[[MixedPrecisionPolicy], None], _: MixedPrecisionPolicy) -> None:
    """Let FSDP gather a parameter in its own dtype, instead of one by the policy of its group."""
    init_dtype_attrs(MixedPrecisionPolicy())


def _shard_medusa(
    medusa: LigerMedusa, mesh: DeviceMesh | None, *, reshard_after_forward: bool | int, prefetch: int,
    float8_gather: bool, averaged: bool, **dtypes: Any,
) -> None:  # fmt: skip
    """`apply_fsdp` on the model, unless it is sharded already, and on the heads."""
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
    """Forward hook that casts ``inputs_embeds`` to the dtype of the gathered parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        embeds = kwargs.get("inputs_embeds")
        return args, kwargs if embeds is None else {**kwargs, "inputs_embeds": embeds.to(self.dtype)}


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: after a forward without backward, FSDP keeps some groups gathered.

    Until then ``model.parameters()`` returns the gathered parameters of those groups.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def unsharded(model: Model) -> Iterator[Model]:
    """Context with a model that has the gathered parameters of ``model``, and knows of no other rank.

    Sampling between two optimizer steps needs no collective then: ranks may run different numbers of forwards, steps
    are CUDA graphs where they are on one GPU, and `rollout` takes the model. Every rank needs memory for all parameters
    in the ``param_dtype`` of `apply_fsdp`. All ranks must enter and leave together.

    Args:
        model: sharded by `apply_fsdp` alone. A model that is not sharded is yielded as it is.

    Returns:
        A context manager. Its model shares the other attributes of the modules, and is neither compiled nor hooked. It
        is not for training, and not for use afterwards: leaving the context frees its parameters.

    Raises:
        ValueError: the model is also sharded by `apply_tp`, `apply_cp` or `apply_ep`.
    """
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not groups:
        yield model
        return
    used = [model.groups, *(layer.groups for layer in layers_of(model))]
    if not all(each.tensor is each.context is each.expert is None for each in used):
        raise ValueError(
            "unsharded: the model must be sharded by apply_fsdp alone, got one that apply_tp, apply_cp or apply_ep has "
            "sharded, too. Generate with the model itself."
        )
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Float8Gather):
            hook.refresh()
    for module in groups:
        module.unshard()
    try:
        found = _without_hooks(model, {})
        found.groups = ParallelGroups()
        yield found
    finally:
        for module in groups:
            module.reshard()


def _without_hooks(module: Any, made: dict[nn.Module, Any]) -> Any:
    """A copy of a module and its submodules, with the same parameters, as it was before FSDP."""
    if module not in made:
        kinds = type(module).__mro__  # FSDP2 puts two classes before that of the module
        kind: Any = kinds[kinds.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else kinds[0]
        made[module] = copy = kind.__new__(kind)
        state = {name: type(value)() if "_hooks" in name else value for name, value in vars(module).items()}
        if is_compiled(module):
            state["_compiled_call_impl"] = None
            state.pop("forward", None)
        children = {name: child and _without_hooks(child, made) for name, child in module._modules.items()}
        copy.__dict__ = {**state, "_parameters": dict(module._parameters), "_modules": children}
    return made[module]


def compile_blocks(model: Model, **options: Any) -> Model:
    """Compile the forward of each block, in place. Call it before or after `apply_fsdp`, whose hooks are not compiled.

    Blocks of one kind share the compiled code. The names of modules and parameters do not change.

    Args:
        model: changed in place.
        options: arguments of ``torch.compile``; ``fullgraph=True`` by default.

    Returns:
        ``model``.
    """
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **{"fullgraph": True, **options})
    return model
