"""The process groups over which a model is distributed, and how a batch's tokens are divided among the ranks."""

from dataclasses import dataclass

from torch import Tensor

from liger_models.distributed.collectives import (
    Group,
    all_reduce,
    copy_to_region,
    divide_gradient,
    gather_tokens,
    local_tokens,
    sum_over,
)


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of a model. If the model does not use a kind of parallelism, the field for this kind is None.

    Attributes:
        tensor: the group over which each layer is sharded (`liger_models.parallel.apply_tp`).
        context: the group over which the tokens of every sequence are sharded (`liger_models.parallel.apply_cp`).
        expert: the group over which experts are sharded (`liger_models.parallel.apply_ep`).
        balance: the group whose ranks' tokens together determine the load-balancing loss.
        data: the groups over which parameters are sharded or replicated (`liger_models.parallel.apply_fsdp`), one group
            per dimension of the device mesh.
    """

    tensor: Group | None = None
    context: Group | None = None
    expert: Group | None = None
    balance: Group | None = None
    data: tuple[Group, ...] = ()

    @property
    def sharded(self) -> Group | None:
        """The tensor- or context-parallel group, whose ranks all receive the same batch."""
        return self.tensor or self.context

    def check_tokens(self, T: int, *, whole: bool) -> None:
        """Raise ValueError unless T tokens can be split equally among the ranks.

        Args:
            T: number of tokens per row.
            whole: whether the forward needs all tokens on every rank, which is impossible with context parallelism.
        """
        sharing = self.context or (self.tensor if self.tensor is not None and self.tensor.sequence_parallel else None)
        if sharing is not None and T % sharing.size != 0:
            raise ValueError(
                f"forward: T must be a multiple of the {sharing and sharing.size} ranks that share the tokens, got "
                f"{T}. Pad the batch; for generation, do not use apply_cp or sequence_parallel."
            )
        if self.context is not None and whole:
            raise ValueError(
                "forward: cache, logits_to_keep, loss_function and hidden states need all tokens on one rank. Do not "
                "use apply_cp."
            )

    def local_along_context(self, x: Tensor) -> Tensor:
        """Under context parallelism, return this rank's part [B, T / R, ...] of x [B, T, ...]; otherwise return x."""
        return x if self.context is None else x[:, self.context.local_slice(x.shape[1])]

    def local_tokens(self, x: Tensor) -> Tensor:
        """Return the part [B, T / R, C] of x [B, T, C] that this rank holds between the layers.

        Without context and sequence parallelism, each rank holds all tokens, so x itself is returned.
        """
        x = self.local_along_context(x)
        return local_tokens(x, self.tensor) if self.tensor is not None and self.tensor.sequence_parallel else x

    def share_targets(self, target: Tensor, num_items: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        """Return this rank's part of the targets [B, T], and the number by which the summed loss is divided.

        Under context parallelism, the sum is by default divided by the number of targets on all ranks.
        """
        if self.context is not None and num_items is None:
            num_items = (target != -100).sum()
        return self.local_along_context(target), num_items

    def share_of_step(self, target: Tensor, num_items: Tensor | float) -> Tensor:
        """Return this batch's number of targets as a fraction of the number of targets in the optimizer step.

        The number of targets in the batch is averaged over the ranks of ``balance``.

        Args:
            target: [B, T], the targets of all tokens.
            num_items: number of targets in the whole step, divided by the number of ranks.
        """
        count = (target != -100).sum()
        if self.balance is not None:
            count = all_reduce(count, self.balance) / self.balance.size
        return count / (num_items.to(count.device) if isinstance(num_items, Tensor) else num_items)

    def enter_head(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens as the input of the head, whose vocabulary may be sharded."""
        return copy_to_region(hidden, self.tensor)

    def gather_logits(self, logits: Tensor | None) -> Tensor | None:
        """Gather the logits [B, T / R, V] of each rank's tokens into the logits [B, T, V] of all tokens.

        The gradient of each rank's part is multiplied by R. Parameter gradients are later averaged over the R ranks,
        and this factor makes the average equal to the gradients for all tokens.
        """
        if logits is None or self.context is None:
            return logits
        return gather_tokens(divide_gradient(logits, 1 / self.context.size), self.context)

    def gather_log_probs(self, log_probs: Tensor) -> Tensor:
        """Gather the log-probabilities [B, T / R] of each rank's tokens into a tensor [B, T] for all tokens."""
        gathered = self.gather_logits(log_probs[..., None])
        assert gathered is not None
        return gathered[..., 0]

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Under context parallelism, sum the losses of all ranks' tokens; otherwise return the loss."""
        return loss if self.context is None else sum_over(loss, self.context)
