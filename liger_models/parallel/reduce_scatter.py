"""A reduce-scatter for FSDP2 that sends gradients in the dtype in which backward produces them."""

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from liger_models.distributed.collectives import reduce_into
from liger_models.kernels.add_parts import add_parts


class BackwardPasses:
    """Counts the backward passes of a model.

    The count is the same on all ranks, even if one rank's loss does not depend on all groups of parameters.
    """

    def __init__(self) -> None:
        self.count, self.last = 0, -1
        self.hosts: dict[Any, list[Any]] = {}

    def on_one_host(self, group: dist.ProcessGroup) -> bool:
        """Whether all ranks of the group are on one host. A collective: all ranks get the same answer."""
        if group not in self.hosts:
            self.hosts[group] = [None] * group.size()
            dist.all_gather_object(self.hosts[group], socket.gethostname(), group=group)
        return len(set(self.hosts[group])) == 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: count the backward passes that reach an input or output.

        The inputs matter if the output is an object that hides its loss.
        """
        for leaf in tree_leaves((args, output)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._reach)

    def _reach(self, _: Tensor) -> None:
        number = torch._C._current_graph_task_id()  # there is no public function for it
        self.count += number != self.last
        self.last = number


class _Buffer(Tensor):
    """Memory of a reduce-scatter. FSDP2 fills it by ``fsdp.chunk_cat`` on a view, which is `_concatenate` here."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.ops.fsdp.chunk_cat:
                return _concatenate(*args, **kwargs)
            result = function(*args, **(kwargs or {}))
            return result.as_subclass(cls) if function is Tensor.view else result


def _concatenate(tensors: list[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """The chunks of each rank beside each other in a row of ``out`` [ranks, size]: tensors are split along their rows.

    PyTorch's kernel for it reads a table that the host makes, with an entry for each few KB of a chunk. On two ranks it
    takes twice as long for a large layer, four times for a layer of many experts, and the host milliseconds.
    """
    rows = []
    for tensor in tensors:
        if missing := -len(tensor) % num_chunks:
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        rows.append(tensor.reshape(num_chunks, -1))
    torch.cat(rows, 1, out=out)


class ReduceScatter:
    """A reduce-scatter for FSDP2 that sends gradients in their own dtype and sums them in the dtype of the result.

    It computes the same sum as PyTorch's own, which sends and stores every gradient in the dtype of the result: twice
    the bytes for bf16 gradients and fp32 sums. Gradients accumulated over several backward passes have the dtype of the
    result, and are sent in it.

    Args:
        passes: counts the model's backward passes.
        dtype: dtype in which autograd produces the group's gradients; None to send that of the result in any case.
    """

    def __init__(self, passes: BackwardPasses, dtype: torch.dtype | None) -> None:
        self.passes, self.dtype = passes, dtype
        self.done = 0
        """Number of passes at the last reduce-scatter."""
        self.sends = True
        """Whether the next buffer is for sending. It stays False after a failure, so that the next is not narrowed."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer: FSDP2 calls this for what is sent and then for what is received, in turn."""
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
        """FSDP2's interface: reduce-scatter, [ranks · size] -> this rank's [size]."""
        self.sends, self.done = True, self.passes.count
        output_tensor, input_tensor = output_tensor.as_subclass(Tensor), input_tensor.as_subclass(Tensor)
        divisor = {dist.ReduceOp.AVG: group.size(), dist.ReduceOp.SUM: 1}.get(op)
        if input_tensor.dtype == output_tensor.dtype or divisor is None:
            input_tensor = input_tensor.to(output_tensor.dtype)
            return reduce_into(output_tensor, input_tensor, op, group, async_op)  # type: ignore[no-any-return]
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        add_parts(parts.view(group.size(), -1), output_tensor, divisor)
        return None
