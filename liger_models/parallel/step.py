"""What a training step needs from all ranks: the number of targets, means, and the norm of all gradients."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from liger_models.distributed.ranks import is_distributed, rank, world_size
from liger_models.layers.batch import BatchLayout, mark_padding, number_documents
from liger_models.layers.decoder import take_cu_seqlens

_compared: set[torch.device] = set()
"""Accelerators on which `targets_per_rank` has compared the numbers of batches."""


def targets_per_rank(batches: Mapping[str, Any] | Iterable[Mapping[str, Any]], device: Any = None) -> Tensor:
    """Number of targets in all batches of a step on all ranks, divided by the number of ranks.

    Pass it as ``num_items_in_batch`` with each of these batches. FSDP and DistributedDataParallel average gradients
    over the ranks. With this divisor the average is the gradient of the mean loss over all targets, each with the same
    weight, however they are distributed over ranks and accumulation steps. Likewise that mean loss is the sum of a
    rank's losses, averaged over the ranks (`mean_over_ranks`).

    Args:
        batches: keyword arguments of the model's forward, for one batch or for each accumulation step. Every rank must
            pass the same number of batches; a batch may have no targets. On the CPU this is checked in each call, and
            on accelerators, where the host would have to wait, in the first one.
        device: device of the all-reduce. Default: the labels'. NCCL needs an accelerator.

    Returns:
        [] fp32, at least 1 / ranks.

    Raises:
        ValueError: there are no batches, one has no labels, or ranks pass different numbers of batches, with which they
            would wait for each other for ever.
    """
    batches = [batches] if isinstance(batches, Mapping) else list(batches)
    if len(batches) == 0:
        raise ValueError(
            "targets_per_rank: batches must hold those of a step, got none. Give each rank the same number."
        )
    total = torch.stack([_targets(batch) for batch in batches]).sum().to(device)
    if not is_distributed():
        return total.clamp(min=1).float()
    # With the targets, the numbers of batches and their squares are summed: of R equal ones, sum² = R · squares.
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
    return sums[0].clamp(min=1).double().div(world_size()).float()


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """Number of targets after the model's shift of the labels (`BatchLayout.shift`)."""
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
    """The average of a tensor over the ranks, returned on all of them. Without a process group, the tensor's value."""
    value = value.detach().clone()
    if is_distributed():
        dist.all_reduce(value)
        value = value / world_size()
    return value


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm, taken over all of them as one vector, is at most ``max_norm``.

    Like torch's function, but sharded and plain parameters may be mixed, and the norm covers all ranks.

    Args:
        parameters: one or more; those without a gradient are ignored. All ranks must pass the same ones.
        max_norm: gradients are scaled only if their norm is larger; ``inf`` only computes the norm.
        norm_type: p of the p-norm; ``inf`` for the maximum.
        error_if_nonfinite: raise on all ranks if the norm is not finite.

    Returns:
        [] the norm before scaling, a plain tensor, the same on all ranks.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters  # iterating a tensor yields its rows
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        key = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    norms = []
    for group in groups.values():
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None], norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients must be finite, got {total.item()}. Find the step where the "
            "loss rose, or lower the learning rate."
        )
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
