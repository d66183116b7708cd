"""Checksums of weights, sharded or not, which tell the weights of one model from those of another."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from liger_models.layers.linear import local

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype as which its bits are summed."""
_sums: Any = WeakTensorKeyDictionary()
"""Tensor -> its version, and the sum of the bits of its shard on this rank."""


@torch.no_grad()
def weight_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of the names of tensors and the sums of their bits. Every rank must call it if a tensor is sharded.

    A sum does not depend on the number of ranks, and each rank reads its shards only, again only if they have changed.
    Ranks exchange one number for each tensor.

    Args:
        tensors: names and tensors, the same on all ranks but for the shards.

    Returns:
        16 hexadecimal digits, the same on all ranks if all tensors are sharded.
    """
    # Sums of this rank's shards; those with the same mesh and placements are added up over the ranks at once.
    groups: dict[Any, tuple[list[str], list[Tensor]]] = {}
    for name, tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        names, sums = groups.setdefault(key, ([], []))
        names.append(name)
        sums.append(_sum_of_shard(tensor))
    totals: dict[str, int] = {}
    for key, (names, sums) in groups.items():
        total = torch.stack([value.to(sums[0].device) for value in sums])
        if key is not None:
            mesh, placements = key
            kinds = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
            total = DTensor.from_local(total.to(mesh.device_type), mesh, kinds, run_check=False).full_tensor()
        totals |= zip(names, total.tolist(), strict=True)
    return hashlib.blake2b(repr(sorted(totals.items())).encode(), digest_size=8).hexdigest()


def frozen_checksum(model: nn.Module) -> str:
    """`weight_checksum` of the frozen weights of a model, the same however the model is sharded.

    Of weights in fewer bits the codes and scales count. The factors of scales do not: `apply_tp` repeats them.
    """
    frozen = ((name, value) for name, value in model.named_parameters() if not value.requires_grad)
    return weight_checksum(
        (name, value) for name, value in frozen if ".stored." not in name or name.endswith(".scales")
    )


def _sum_of_shard(tensor: Tensor) -> Tensor:
    version, total = _sums.get(tensor, (None, None))
    if version != version_of(tensor):
        version, total = _sums[tensor] = version_of(tensor), sum_bits(local(tensor))
    return total  # type: ignore[no-any-return]


def version_of(tensor: Tensor) -> tuple[int, int]:
    """What changes whenever a tensor is written to, as a DTensor or through its shard on this rank."""
    return tensor._version, local(tensor)._version


def sum_bits(tensor: Tensor) -> Tensor:
    """The sum of the bits of all elements as integers, [] int64."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
