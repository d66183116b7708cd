"""A reduce-scatter for FSDP2 that sends gradients in the dtype in which the backward has computed them."""

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from liger_models.common.uncompiled import uncompiled
from liger_models.distributed.collectives import reduce_into
from liger_models.kernels.add_parts import add_parts


class BackwardPasses:
    """Counts the backward passes of a model.

    The count is the same on all ranks, even if some rank's loss does not depend on all groups of parameters.
    `ReduceScatter` uses the count to choose the dtype in which a rank sends gradients, so all ranks choose the same
    dtype.
    """

    def __init__(self) -> None:
        self.count, self.last = 0, -1
        self.hosts: dict[Any, list[Any]] = {}

    def on_one_host(self, group: dist.ProcessGroup) -> bool:
        """Return whether all ranks in a group are on one host. All ranks in the group must call this method."""
        if group not in self.hosts:
            self.hosts[group] = [None] * group.size()
            dist.all_gather_object(self.hosts[group], socket.gethostname(), group=group)
        return len(set(self.hosts[group])) == 1

    @uncompiled
    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook that counts the backward passes that reach an input or an output of a module.

        Inputs are watched as well, because the output may be an object in which no tensors are found.
        """
        for leaf in tree_leaves((args, output)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._reach)

    def _reach(self, _: Tensor) -> None:
        # Each backward pass has its own number. PyTorch has no public function that returns this number.
        number = torch._C._current_graph_task_id()
        self.count += number != self.last
        self.last = number


class _Buffer(Tensor):
    """The buffer of a reduce-scatter. When FSDP2 calls ``fsdp.chunk_cat`` on the buffer, `_concatenate` fills the
    buffer."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.ops.fsdp.chunk_cat:
                return _concatenate(*args, **kwargs)
            result = function(*args, **(kwargs or {}))
            return result.as_subclass(cls) if function is Tensor.view else result


def _concatenate(tensors: list[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """Fill ``out``, which has one row for each rank. A rank's row gets the rank's chunks of all tensors, one after the
    other.

    PyTorch's own kernel reads a table with an entry for every few KB of a chunk, and the host needs milliseconds to
    build this table. On two ranks, PyTorch's kernel takes twice as long as this function for a large layer, and four
    times as long for a layer with many experts.

    Args:
        tensors: each tensor is split along its first dimension and padded to ``num_chunks`` equal chunks.
        dim: always 0 when FSDP2 calls this function.
        num_chunks: number of ranks.
        out: [ranks, size].
    """
    # Each [n, ...] becomes [ranks, ceil(n / ranks) · ...].
    rows = []
    for tensor in tensors:
        if missing := -len(tensor) % num_chunks:
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        rows.append(tensor.reshape(num_chunks, -1))
    torch.cat(rows, 1, out=out)


class ReduceScatter:
    """A reduce-scatter for FSDP2 that sends gradients in their own dtype, but sums them in the dtype of the result.

    PyTorch's own reduce-scatter computes the same sum, but sends and stores every gradient in the dtype of the result.
    For bf16 gradients and fp32 sums, PyTorch's reduce-scatter therefore sends and stores twice as many bytes as this
    class. Gradients that were accumulated over several backward passes have the dtype of the result, and are sent in
    this dtype.

    Args:
        passes: the counter of the model's backward passes.
        dtype: dtype in which autograd produces the group's gradients. None: always send gradients in the dtype of the
            result.
    """

    def __init__(self, passes: BackwardPasses, dtype: torch.dtype | None) -> None:
        self.passes, self.dtype = passes, dtype
        self.done = 0
        """The number of backward passes that had been counted at the last reduce-scatter."""
        self.sends = True
        """Whether the next buffer is for sending, and may therefore have the dtype of the gradients. If a
        reduce-scatter failed before it sent anything, this is False, and the next buffer has the dtype of the
        result."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer. FSDP2 first allocates the buffer for sending, then the buffer for receiving."""
        dtype = self.dtype if self.dtype and self.sends and self.passes.count - self.done <= 1 else dtype
        memory = torch.empty(size, dtype=dtype, device=device)
        self.sends = False
        return memory.as_subclass(_Buffer)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter [ranks · size] to [size] on this rank. FSDP2 determines the signature."""
        self.sends, self.done = True, self.passes.count
        output_tensor, input_tensor = output_tensor.as_subclass(Tensor), input_tensor.as_subclass(Tensor)
        # With AVG, this function divides the sum. With SUM, FSDP2 divides the gradients itself, before and after the
        # sum. PyTorch handles all other ops.
        divisor = {dist.ReduceOp.AVG: group.size(), dist.ReduceOp.SUM: 1}.get(op)
        if input_tensor.dtype == output_tensor.dtype or divisor is None:
            input_tensor = input_tensor.to(output_tensor.dtype)
            return reduce_into(output_tensor, input_tensor, op, group, async_op)  # type: ignore[no-any-return]
        # Exchange gradients in the narrow dtype, [ranks, size], and sum them on this rank in the dtype of the result.
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        add_parts(parts.view(group.size(), -1), output_tensor, divisor)
        return None
