"""FSDP2 on a model: every block is gathered for its own forward and backward only."""

import socket
import warnings
from collections.abc import Sequence
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
from torch.utils._pytree import tree_leaves

from liger_models.kernels.add_parts import add_parts
from liger_models.kernels.collectives import ranks_of, reduce_into
from liger_models.kernels.dispatch import check
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.moe import LigerMoE
from liger_models.medusa import LigerMedusa

Model = TypeVar("Model", bound=CausalLM)
Sharded = TypeVar("Sharded", bound=CausalLM | LigerMedusa)


def apply_fsdp(
    model: Sharded,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = torch.bfloat16,
    reduce_dtype: torch.dtype | None = torch.float32,
    cpu_offload: bool = False,
    reshard_after_forward: bool | int = True,
    prefetch: int = 1,
) -> Sharded:
    """Shard a model's parameters, gradients and optimizer state over the ranks of a mesh, in place.

    Groups that are gathered together: the embedding; each block, a vision tower's, too; the head, which stays gathered
    until its backward. Tied, embedding and head are one group, which stays gathered from the first to the last use. The
    final norm, and what a tower has around its blocks, belong to the model itself. Experts that `apply_ep` has spread
    are a group of each layer, sharded over the ranks that have the same ones. Parameters keep their dtype (fp32 for
    master weights) and are computed with in ``param_dtype``.

    Make the optimizer afterwards: it must see the sharded parameters.

    Args:
        model: on the meta device (`from_pretrained` with ``shard`` then reads each rank's part only), or with the same
            weights on every rank. A `LigerMedusa` may have a model that is sharded already; each head is a group.
        mesh: of one dimension, or of two with names (HSDP): copies, and the ranks over which each is sharded. After
            `apply_tp` of a mesh's last dimension the others. After `apply_ep` the whole mesh of two dimensions, of
            which `apply_ep` got the second. Default: all ranks.
        param_dtype: of gathered parameters, and so of the computation; None for the parameters' own.
        reduce_dtype: in which gradients are averaged over the ranks; None for ``param_dtype``. Within a host, for fp32,
            they are sent in a narrower ``param_dtype``, in which they are made, unless several backward passes were
            added up before (``set_requires_gradient_sync``).
        cpu_offload: parameters, gradients and optimizer state live on the CPU, and the optimizer runs there.
        reshard_after_forward: False keeps blocks gathered until their backward (ZeRO-2); a number shards them over so
            many ranks in the meantime.
        prefetch: number of groups that are gathered ahead of their use.

    Returns:
        ``model``.

    Raises:
        ValueError: no process group, a model that is sharded already, a mesh that does not fit.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
    """
    check(
        dist.is_available() and dist.is_initialized(),
        "apply_fsdp: the process group must be initialised. Call torch.distributed.init_process_group() first, in "
        "processes started by torchrun.",
    )
    check(
        not isinstance(model, FSDPModule),
        f"apply_fsdp: {type(model).__name__} must not be sharded yet, got one that is. Call it once for each model.",
    )
    if isinstance(model, LigerMedusa):
        _shard_medusa(
            model, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype, cpu_offload=cpu_offload,
            reshard_after_forward=reshard_after_forward, prefetch=prefetch,
        )  # fmt: skip
        return model
    check(
        model.ranks is None or mesh is not None,
        "apply_fsdp: mesh must be that of the data-parallel ranks for a model that is cut by apply_tp, got none. Pass "
        'mesh["dp"] of the mesh of which apply_tp got mesh["tp"].',
    )
    check(prefetch >= 0, f"apply_fsdp: prefetch must not be negative, got {prefetch}.")
    mesh = _all_ranks() if mesh is None else mesh
    check(
        mesh.ndim == 1 or (mesh.ndim == 2 and mesh.mesh_dim_names is not None),
        f"apply_fsdp: mesh must have one dimension, or two with names, got {mesh}. Take the mesh of the data-parallel "
        "ranks; name its dimensions by mesh_dim_names.",
    )
    check(
        model.ranks is None or all(group.group_name != model.ranks.group for group in mesh.get_all_groups()),
        "apply_fsdp: mesh must not have the dimension over which apply_tp has cut the model, got "
        f'{mesh}. Pass the others: mesh["dp"].',
    )
    experts_mesh = None
    experts = [module for module in model.modules() if isinstance(module, LigerMoE)]
    spread = next((module.expert_ranks.size for module in experts if module.expert_ranks is not None), None)
    if spread is not None:
        check(
            mesh.ndim == 2 and mesh.size(1) == spread,
            f"apply_fsdp: mesh must have two dimensions after apply_ep, the second of {spread} ranks, "
            f'got {mesh}. Pass the mesh, of which apply_ep got mesh["ep"]; its first dimension may be of size 1.',
        )
        assert mesh.mesh_dim_names is not None
        experts_mesh = mesh[mesh.mesh_dim_names[0]]
        mesh = DeviceMesh(mesh.device_type, mesh.mesh.flatten(), mesh_dim_names=("data",))
        model.balance_ranks = ranks_of(mesh.get_group())
    passes, options = _Passes(), _options(mesh, param_dtype, reduce_dtype, cpu_offload)
    tied = model.lm_head.weight is model.embed_tokens.weight
    if tied:
        _shard([model.embed_tokens, model.lm_head], passes, reshard_after_forward=False, **options)
    else:
        _shard(model.embed_tokens, passes, reshard_after_forward=reshard_after_forward, **options)
    tower = list(getattr(getattr(model, "visual", None), "blocks", []))
    for block in [*tower, *model.layers]:
        # No layer writes in place, so a view is a result like any other.
        names = f"FSDP({type(block).__name__}|{LigerMoE.__name__})"
        message = rf"FSDP2-wrapped module \({names}\) returned a view tensor"
        warnings.filterwarnings("ignore", message, UserWarning)
        for module in block.modules() if experts_mesh is not None else ():
            if isinstance(module, LigerMoE):
                _shard(module.gate, passes, reshard_after_forward=reshard_after_forward, **options)
                # A number of ranks is one of the whole mesh.
                given = {**options, "mesh": experts_mesh, "reshard_after_forward": bool(reshard_after_forward)}
                _shard(module, passes, **given)
        _shard(block, passes, reshard_after_forward=reshard_after_forward, **options)
    if not tied:
        _shard(model.lm_head, passes, reshard_after_forward=False, **options)
    # What is left, the final norm: the model calls its method `add`, past the hooks that a group of its own would have.
    fully_shard(model, reshard_after_forward=False, **options)
    if param_dtype is not None:
        model.register_forward_pre_hook(_EmbedsCast(param_dtype), with_kwargs=True)

    order: list[Any] = [model.embed_tokens, *tower, *model.layers, *([] if tied else [model.lm_head])]
    for index, module in enumerate(order if prefetch else []):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + prefetch])
        # Without such a list PyTorch gathers one group ahead, in the order of the forward at hand.
        if prefetch > 1:
            module.set_modules_to_backward_prefetch(order[max(index - prefetch, 0) : index][::-1])
    return model


def _all_ranks() -> DeviceMesh:
    device = torch.accelerator.current_accelerator()
    return init_device_mesh("cpu" if device is None else device.type, (dist.get_world_size(),))


def _options(
    mesh: DeviceMesh, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, cpu_offload: bool
) -> dict[str, Any]:
    """Of ``fully_shard``."""
    accelerated = mesh.device_type != "cpu"

    def along(parameter: nn.Parameter) -> Shard | None:
        # Of rows that `apply_tp` could not cut evenly (a vocabulary's) PyTorch loses track once they are cut again: the
        # offsets that checkpoints go by are wrong. Columns then, where the ranks divide them.
        uneven = isinstance(parameter, DTensor) and parameter.shape[0] % parameter.device_mesh.size() > 0
        return Shard(1) if uneven and parameter.ndim > 1 and parameter.shape[1] % mesh.size(-1) == 0 else None

    return {
        "mesh": mesh,
        "shard_placement_fn": along,
        # Inputs are not cast: it would reach into `Sequence` and round the rotary tables.
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=accelerated) if cpu_offload else OffloadPolicy(),
    }


class _Passes:
    """How many backward passes have reached a model: the same number on all ranks, though of a batch on one of them the
    loss may leave a group out.
    """

    def __init__(self) -> None:
        self.count, self.last = 0, -1
        self.hosts: dict[Any, list[Any]] = {}

    def on_one_host(self, group: dist.ProcessGroup) -> bool:
        """Whether several ranks share a host. They ask each other, so that all have the same answer."""
        if group not in self.hosts:
            self.hosts[group] = [None] * group.size()
            dist.all_gather_object(self.hosts[group], socket.gethostname(), group=group)
        return len(set(self.hosts[group])) == 1 < group.size()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook of the forward. A loss may hide in what it returns; then the gradient of what it got tells."""
        for leaf in tree_leaves((args, output)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._reach)

    def _reach(self, _: Tensor) -> None:
        number = torch._C._current_graph_task_id()  # no public function tells one pass from the next
        self.count += number != self.last
        self.last = number


def _shard(modules: nn.Module | list[nn.Module], passes: _Passes, **options: Any) -> None:
    """``fully_shard``, with `_Exchange` where it saves bytes: among the GPUs of one host.

    Between hosts PyTorch's own exchange sends less, since the gradients of a host are added up on the way.
    """
    fully_shard(modules, **options)
    mesh, policy = options["mesh"], options["mp_policy"]
    each = modules if isinstance(modules, list) else [modules]
    group, made = each[0], policy.param_dtype
    assert isinstance(group, FSDPModule)
    # Without param_dtype gradients can be of several dtypes; and for other sums FSDP2 divides what is sent before.
    narrow = made in (torch.bfloat16, torch.float16) and policy.reduce_dtype == torch.float32
    if narrow and passes.on_one_host(mesh.get_group(mesh.ndim - 1)):
        group.set_custom_reduce_scatter(_Exchange(passes, made))  # type: ignore[arg-type]  # no public name to inherit
        for module in each:
            module.register_forward_hook(passes.watch)


class _Exchange:
    """How FSDP2 brings a group's gradients together: sent in their own dtype, added up in that of the result.

    The sum is that of PyTorch's own exchange, which sends and stores every gradient in the result's dtype, with twice
    the bytes for bf16 and fp32. What has been added up over several backward passes is in that dtype too, and is sent
    so.

    Args:
        passes: of the model.
        dtype: in which autograd makes the group's gradients.
    """

    def __init__(self, passes: _Passes, dtype: torch.dtype) -> None:
        self.passes, self.dtype = passes, dtype
        self.done = 0  # passes until the last exchange
        self.sends = True  # what is asked for next; after one that failed what is sent is not narrowed

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """For what is sent, then for what is received: FSDP2 asks in turn."""
        dtype = self.dtype if self.sends and self.passes.count - self.done <= 1 else dtype
        memory = torch.empty(size, dtype=dtype, device=device)
        self.sends = False
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """FSDP2's interface: the part of this rank of what all ranks have, [ranks · size] -> [size]."""
        self.sends, self.done = True, self.passes.count
        divisor = {dist.ReduceOp.AVG: group.size(), dist.ReduceOp.SUM: 1}.get(op)
        if input_tensor.dtype == output_tensor.dtype or divisor is None:
            input_tensor = input_tensor.to(output_tensor.dtype)
            return reduce_into(output_tensor, input_tensor, op, group, async_op)  # type: ignore[no-any-return]
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        add_parts(parts.view(group.size(), -1), output_tensor, divisor)
        return None


def _shard_medusa(
    medusa: LigerMedusa, mesh: DeviceMesh | None, *, reshard_after_forward: bool | int, prefetch: int, **given: Any
) -> None:
    """`apply_fsdp` of the model, unless that is done, and of the heads."""
    mesh = _all_ranks() if mesh is None else mesh
    if not isinstance(medusa.model, FSDPModule):
        apply_fsdp(medusa.model, mesh, reshard_after_forward=reshard_after_forward, prefetch=prefetch, **given)
    passes, options = _Passes(), _options(mesh, **given)
    for head in medusa.heads:
        _shard(head, passes, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(medusa, reshard_after_forward=False, **options)


class _EmbedsCast:
    """Brings ``inputs_embeds`` into the dtype of the gathered parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        embeds = kwargs.get("inputs_embeds")
        return args, kwargs if embeds is None else {**kwargs, "inputs_embeds": embeds.to(self.dtype)}


def reshard(model: nn.Module) -> None:
    """Free what FSDP has gathered: an evaluation leaves the groups gathered that wait for a backward.

    Until then ``model.parameters()`` has the gathered parameters in their place.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compile_blocks(model: Model, **options: Any) -> Model:
    """Compile each block's forward, in place; before or after `apply_fsdp`, whose hooks stay outside.

    Blocks of one kind share what is compiled. Names of modules and parameters stay as they are.

    Args:
        model: changed in place.
        options: of ``torch.compile``; ``fullgraph=True`` by default.

    Returns:
        ``model``.
    """
    for block in [*getattr(getattr(model, "visual", None), "blocks", []), *model.layers]:
        block.forward = torch.compile(block.forward, **{"fullgraph": True, **options})
    return model
