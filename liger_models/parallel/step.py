"""Functions for a training step on several ranks: number of targets, means over ranks, and gradient clipping."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from liger_models.distributed.ranks import is_distributed, rank, world_size
from liger_models.layers.batch import BatchLayout, mark_padding, number_documents
from liger_models.layers.decoder import take_cu_seqlens
from liger_models.layers.linear import is_sharded, local

_compared: set[torch.device] = set()
"""The devices on which `targets_per_rank` has already compared the numbers of batches between ranks."""


def targets_per_rank(batches: Mapping[str, Any] | Iterable[Mapping[str, Any]], device: Any = None) -> Tensor:
    """Return the number of targets in all batches of a step on all ranks, divided by the number of ranks.

    Pass the result as ``num_items_in_batch`` to the model's forward of each of these batches. FSDP and
    DistributedDataParallel average gradients over the ranks. With this divisor, the averaged gradient is the gradient
    of the mean loss over all targets: each target has the same weight, no matter how targets are distributed over ranks
    and accumulation steps. To get the mean loss itself, sum the losses of a rank's batches, and average the sums over
    the ranks (`mean_over_ranks`).

    Args:
        batches: keyword arguments of the model's forward, for one batch or for each accumulation step. Every rank
            must pass the same number of batches. A batch may have no targets. On the CPU, the ranks compare their
            numbers of batches in each call. On an accelerator, they compare the numbers only in the first call,
            because the host must wait for the comparison.
        device: device for the all-reduce. Default: the device of the labels. NCCL needs an accelerator.

    Returns:
        [] fp32, at least 1 / ranks.

    Raises:
        ValueError: there are no batches; a batch has no labels; or ranks pass different numbers of batches, with
            which they would wait for each other forever.
    """
    batches = [batches] if isinstance(batches, Mapping) else list(batches)
    if len(batches) == 0:
        raise ValueError(
            "targets_per_rank: batches must hold those of a step, got none. Give each rank the same number."
        )
    total = torch.stack([_targets(batch) for batch in batches]).sum().to(device)
    if not is_distributed():
        return total.clamp(min=1).float()
    # In the same all-reduce, sum the numbers of batches n and their squares: (Σ n)² = R · Σ n² only if all R numbers
    # are equal.
    count = len(batches)
    sums = torch.stack([total, torch.full_like(total, count), torch.full_like(total, count**2)])
    dist.all_reduce(sums)
    if total.device.type == "cpu" or total.device not in _compared:
        _compared.add(total.device)
        _, counts, squares = sums.tolist()
        if counts**2 != world_size() * squares:
            raise ValueError(
                f"targets_per_rank: every rank must pass the same number of batches, got {count} on rank {rank()} and "
                f"{counts / world_size():.3g} on average. Give a rank without data batches of padding."
            )
    # fp32 could not represent the number of targets in large steps exactly.
    return sums[0].clamp(min=1).double().div(world_size()).float()


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """Count the targets that remain after the model has shifted the labels (`BatchLayout.shift`)."""
    labels, attention_mask = (batch.get(name) for name in ("labels", "attention_mask"))
    cu_seqlens = take_cu_seqlens(batch.get("cu_seqlens"), {**batch})
    if labels is None:
        raise ValueError(f"targets_per_rank: a batch must have labels, got {sorted(batch)}. Add them.")
    documents = None
    if cu_seqlens is not None:
        B, T = labels.shape
        documents, _ = number_documents(cu_seqlens, B, T, labels.device)
    elif attention_mask is not None:
        documents = mark_padding(attention_mask, labels.device)
    target = BatchLayout(labels, {}, documents).shift(labels)
    return (target != -100).sum()


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the detached mean of a tensor over all ranks. Without a process group, return a detached copy."""
    value = value.detach().clone()
    if is_distributed():
        dist.all_reduce(value)
        value = value / world_size()
    return value


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their total norm is at most ``max_norm``.

    Unlike in torch's function of the same name, the norm covers the shards of all ranks, and sharded and plain
    parameters may be mixed.

    Args:
        parameters: one or more parameters, the same on all ranks. Parameters without a gradient are ignored.
        max_norm: the maximum norm. With ``inf``, nothing is scaled.
        norm_type: p of the p-norm; ``inf`` for the maximum norm.
        error_if_nonfinite: whether to raise an error on all ranks if the norm is not finite.

    Returns:
        The norm before scaling, [], as a plain tensor. It is the same on all ranks.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is True.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters  # iterating a tensor yields its rows
    parameters = [parameter for parameter in parameters if parameter.grad is not None]

    # Compute one norm for each mesh, because torch can't compute a norm over DTensors on different meshes.
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient: Any = parameter.grad
        key = gradient.device_mesh if is_sharded(gradient) else None
        groups.setdefault(key, []).append(parameter)
    norms = []
    for group in groups.values():
        norm: Any = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None], norm_type)
        norms.append(norm.full_tensor() if is_sharded(norm) else norm)
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")

    # The p-norm of the groups' p-norms is the p-norm of all elements.
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients must be finite, got {total.item()}. Find the step where the "
            "loss rose, or lower the learning rate."
        )
    # Each rank scales its own shards. Scaling DTensors would be slower, because PyTorch would first determine the
    # placement of each result.
    shards: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        shard = local(gradient)
        shards.setdefault((shard.device, shard.dtype), []).append(shard)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for (device, _), same in shards.items():
            torch._foreach_mul_(same, scale.to(device))
    return total
