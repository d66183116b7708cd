"""What a training step needs across ranks: how many targets there are, the norm of all gradients."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from liger_models.convert.ranks import several, world_size
from liger_models.kernels.dispatch import check
from liger_models.layers.sequence import Sequence, mark_padding, number_documents


def targets_per_rank(batches: Mapping[str, Any] | Iterable[Mapping[str, Any]], device: Any = None) -> Tensor:
    """Number of targets in all batches of a step on all ranks, divided by the number of ranks.

    It is the ``num_items_in_batch`` for each of these batches. FSDP and DistributedDataParallel average gradients over
    the ranks, so the average of the sums divided by this is the mean over all targets, each with the same weight,
    however they are spread over ranks and accumulation steps. So is the average over the ranks (`mean_over_ranks`) of
    the sum of a rank's losses.

    Args:
        batches: the keyword arguments of the model's forward, of one batch or of each accumulation step. Every rank
            must have as many; one without targets counts nothing.
        device: where the ranks add up; default: the labels'. An accelerator for NCCL.

    Returns:
        [] fp32, at least 1 / ranks.
    """
    batches = [batches] if isinstance(batches, Mapping) else list(batches)
    check(
        len(batches) > 0,
        "targets_per_rank: batches must hold those of a step, got none. Give each rank as many.",
    )
    total = torch.stack([_targets(batch) for batch in batches]).sum().to(device)
    if not several():
        return total.clamp(min=1).float()
    dist.all_reduce(total)
    return total.clamp(min=1).double().div(world_size()).float()


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """Number of targets of the model's loss, which `Sequence.shift` decides."""
    names = ("labels", "attention_mask", "cu_seqlens")
    labels, attention_mask, cu_seqlens = (batch.get(name) for name in names)
    check(labels is not None, f"targets_per_rank: a batch must have labels, got {sorted(batch)}. Add them.")
    assert labels is not None
    documents = None
    if cu_seqlens is not None:
        B, T = labels.shape
        documents, _ = number_documents(cu_seqlens, B, T, labels.device)
    elif attention_mask is not None:
        documents = mark_padding(attention_mask, labels.device)
    target = Sequence(labels, {}, documents).shift(labels)
    return (target != -100).sum()


def mean_over_ranks(value: Tensor) -> Tensor:
    """The average of a tensor over the ranks, the same on all of them; without a process group its value."""
    value = value.detach().clone()
    if several():
        dist.all_reduce(value)
        value = value / world_size()
    return value


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm, all taken as one vector, is at most ``max_norm``.

    As torch's, but for any mixture of sharded and plain parameters, and the norm is that of all ranks.

    Args:
        parameters: one or more; those without a gradient are left out. All ranks pass the same ones.
        max_norm: not scaled if the norm is less; ``inf`` only measures.
        norm_type: p of the p-norm; ``inf`` for the largest.
        error_if_nonfinite: raise, on all ranks, where the norm is not finite.

    Returns:
        [] the norm before, a plain tensor, the same on all ranks.

    Raises:
        RuntimeError: a norm that is not finite, with ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters  # which would yield its rows
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
            f"clip_grad_norm_: the norm of the gradients must be finite, got {total.item()}. Look for the step where "
            "the loss rose, or lower the learning rate."
        )
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
