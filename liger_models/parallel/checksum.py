"""Checksums of sharded or unsharded weights. A resumed run uses them to recognize the base weights of its adapters."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from liger_models.layers.linear import is_sharded, local

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Maps the number of bytes of an element to the integer dtype as which its bits are summed."""
_sums: Any = WeakTensorKeyDictionary()
"""Maps a tensor to its version when its bits were summed, and to the sum over its shard on this rank."""


@torch.no_grad()
def weight_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Compute a digest of the name of each tensor and the sum of its elements' bits, read as integers.

    If a tensor is sharded, all ranks must call this function.

    The digest does not depend on the number of ranks. Each rank reads only its own shards, and reads a shard again only
    if the shard was written to. Ranks exchange one number per tensor.

    Args:
        tensors: pairs of a name and a tensor. All ranks pass the same tensors, each rank with its own shards.

    Returns:
        16 hexadecimal digits. If a tensor is not sharded, the digest describes the calling rank's replica of the
        tensor.
    """
    # Sum this rank's shards. Tensors with the same mesh and placements share one reduction below.
    groups: dict[Any, tuple[list[str], list[Tensor]]] = {}
    for name, tensor in tensors:
        sharded: Any = tensor
        key = (sharded.device_mesh, sharded.placements) if is_sharded(tensor) else None
        names, sums = groups.setdefault(key, ([], []))
        names.append(name)
        sums.append(_sum_of_shard(tensor))

    # Add the sums over the ranks. A dimension of the mesh that holds copies of the shards must not be added up.
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
    """Return the `weight_checksum` of a model's frozen weights. It does not depend on how the model is sharded.

    The checksum of a quantized weight includes its codes and its scales, but not the factors of its scales, because
    `apply_tp` replicates these factors on each rank.
    """
    frozen = ((name, value) for name, value in model.named_parameters() if not value.requires_grad)
    return weight_checksum(
        (name, value) for name, value in frozen if ".stored." not in name or name.endswith(".scales")
    )


def _sum_of_shard(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of this rank's shard. `_sums` caches the sum until the tensor is written to."""
    version, total = _sums.get(tensor, (None, None))
    if version != version_of(tensor):
        version, total = _sums[tensor] = version_of(tensor), sum_bits(local(tensor))
    return total  # type: ignore[no-any-return]


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return two numbers that change when a tensor is written to, as a DTensor or through its shard on this rank."""
    return tensor._version, local(tensor)._version


def sum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of all elements, with their bits interpreted as integers: [] int64, which may overflow."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
