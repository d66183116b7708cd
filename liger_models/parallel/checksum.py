"""Checksums of weights, sharded or not. A resumed run uses them to check that the base weights have not changed."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from liger_models.layers.linear import is_sharded, local

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Maps the number of bytes of an element to the integer dtype in which the bits of the element are summed."""
_sums: Any = WeakTensorKeyDictionary()
"""Maps a tensor to a pair: its version when its bits were summed, and the sum over this rank's shard."""


@torch.no_grad()
def weight_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of tensors. The digest covers the name of each tensor and a sum over its elements, whose bits are
    read as integers.

    If a tensor is sharded, all ranks must call this function.

    The digest does not depend on the number of ranks. Each rank reads only its own shards, and reads a shard again only
    if the shard has been written to. Ranks exchange one number per tensor.

    Args:
        tensors: pairs of a name and a tensor. All ranks must pass the same tensors, each rank with its own shards.

    Returns:
        16 hexadecimal digits. For an unsharded tensor, the digest covers the calling rank's replica.
    """
    # Sum the elements of this rank's shards. Tensors with the same mesh and placements share one reduction below.
    groups: dict[Any, tuple[list[str], list[Tensor]]] = {}
    for name, tensor in tensors:
        sharded: Any = tensor
        key = (sharded.device_mesh, sharded.placements) if is_sharded(tensor) else None
        names, sums = groups.setdefault(key, ([], []))
        names.append(name)
        sums.append(_sum_of_shard(tensor))

    # Add up the sums of the ranks, except along dimensions of the mesh that hold replicas of the shards.
    totals: dict[str, int] = {}
    for key, (names, sums) in groups.items():
        total = torch.stack([value.to(sums[0].device) for value in sums])
        if key is not None:
            from torch.distributed.tensor import DTensor, Partial, Replicate  # slow to import

            mesh, placements = key
            kinds = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
            total = DTensor.from_local(total.to(mesh.device_type), mesh, kinds, run_check=False).full_tensor()
        totals |= zip(names, total.tolist(), strict=True)
    return hashlib.blake2b(repr(sorted(totals.items())).encode(), digest_size=8).hexdigest()


def frozen_checksum(model: nn.Module) -> str:
    """Return the `weight_checksum` of a model's frozen weights. The result does not depend on the sharding.

    For a quantized weight, the checksum covers the codes and the scales. It does not cover the tensor ``factors``, with
    which NF4 scales are dequantized, because `apply_tp` replicates this tensor on each rank.
    """
    frozen = ((name, value) for name, value in model.named_parameters() if not value.requires_grad)
    return weight_checksum(
        (name, value) for name, value in frozen if ".stored." not in name or name.endswith(".scales")
    )


def _sum_of_shard(tensor: Tensor) -> Tensor:
    """Sum the bits of this rank's shard. `_sums` caches the sum until the tensor is written to."""
    version, total = _sums.get(tensor, (None, None))
    if version != version_of(tensor):
        version, total = _sums[tensor] = version_of(tensor), sum_bits(local(tensor))
    return total  # type: ignore[no-any-return]


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return two version numbers. The first number changes when a DTensor is written to, and the second number changes
    when this rank's shard is written to."""
    return tensor._version, local(tensor)._version


def sum_bits(tensor: Tensor) -> Tensor:
    """Interpret each element's bits as an integer, and return the int64 sum of these integers. The sum may overflow."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
