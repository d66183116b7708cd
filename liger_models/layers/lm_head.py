"""The language-model head, which computes the loss in its forward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group, gather_vocab
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.loss.cross_entropy import cross_entropy, cross_entropy_reference
from liger_models.kernels.loss.linear_cross_entropy import VocabShard, linear_cross_entropy
from liger_models.kernels.matmul.row_linear import inference_linear
from liger_models.kernels.options import KernelOptions
from liger_models.kernels.tiles import cdiv
from liger_models.layers.layer import Layer
from liger_models.layers.linear import local, local_or_none

LossFunction = Callable[[Tensor, Tensor, Tensor], Any]
"""Function of hidden states [..., C], the head's weight [V, C] and shifted targets [...] that returns any object."""


ROW_MULTIPLE = 256
TOKEN_MULTIPLE = 64
"""If the head skips rows, the number of remaining rows is a multiple of ROW_MULTIPLE, so that there are few shapes. If
it skips tokens of each sequence, the number of remaining tokens of a sequence is a multiple of TOKEN_MULTIPLE."""

BIAS_COLUMNS = 8
"""Number of columns that the bias adds to the operands of a loss. A multiple of 8 keeps the rows of the operands
aligned to 16 bytes, as fast matrix products require.
"""


class _Rows(torch.autograd.Function):
    """Selects rows of x [N, C] by their indices. Indices may only be equal if the gradients of their rows are 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.size, dy.shape[1]).index_copy_(0, rows, dy), None


@functools.cache
def _aside(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


class HostCount:
    """An integer on a device that is copied to the host asynchronously, so that the host need not wait for the device.

    The copy runs on its own stream, so that it need not wait for copies of offloaded optimizer moments.
    """

    def __init__(self, count: Tensor) -> None:
        self._count = count
        self._copied: torch.Event | None = None
        if count.device.type in ACCELERATORS:
            # The copy runs on its own stream after the count is computed. `rounded_up` waits for the event.
            stream = _aside(count.device)
            stream.wait_stream(torch.accelerator.current_stream(count.device))
            count.record_stream(stream)
            with stream:
                self._count = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
                self._count.copy_(count, non_blocking=True)
            self._copied = stream.record_event()

    def rounded_up(self, multiple: int) -> int:
        """Return the smallest positive multiple of ``multiple`` that is not less than the count.

        With rounded numbers of rows, there are few different shapes.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return max(cdiv(int(self._count), multiple), 1) * multiple


def _spread(results: Tensor, rows: Tensor | None, shape: torch.Size) -> Tensor:
    """Write the results for ``rows``, indices into the flattened ``shape``, to a tensor of this shape that is otherwise
    0. If ``rows`` is None, the results have this shape already."""
    if rows is None:
        return results
    return results.new_zeros(shape.numel()).index_copy(0, rows.flatten(), results.flatten()).view(shape)


class LabeledRows:
    """The rows of a batch that have a target other than −100. Only these rows need logits.

    If the object is created before the blocks run, the number of these rows is on the host by the time the head needs
    it, so the head never waits for the device; see `HostCount`.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.ignored = (target == -100).flatten()
        self.count = HostCount((~self.ignored).sum())
        self.rows: Tensor | None = None
        """Indices of the rows that `select` returned; None for all rows."""

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return n rows of x [..., C], and the same rows of the targets. The n rows include all rows that have a
        target.

        n is a multiple of `ROW_MULTIPLE`. If there are at most n rows, x and the targets are returned unchanged.
        """
        count = self.count.rounded_up(ROW_MULTIPLE)
        if count >= len(self.ignored):
            return x, self.target
        self.rows = self.ignored.to(torch.uint8).argsort(stable=True)[:count]  # rows with a target come first
        selected: Tensor = _Rows.apply(x.flatten(0, -2), self.rows)  # type: ignore[no-untyped-call]
        return selected, self.target.flatten()[self.rows]

    def spread(self, results: Tensor) -> Tensor:
        """Expand the results for the rows that `select` returned to the shape of the targets, with zeros for all other
        rows."""
        return _spread(results, self.rows, self.target.shape)


class LabeledTokens:
    """The tokens of each sequence of a batch that have a target other than −100.

    `LabeledRows` loses the borders of the sequences. This class keeps them, for losses that are computed from whole
    sequences, such as DPO's. Create the object before the blocks run, too.

    Args:
        labels: [B, T] int64, not shifted.
        rows: [sequences, n] int64, the indices of the tokens of each sequence among all B · T tokens, if the sequences
            are not the rows of the batch; see `pack_answers`.
    """

    def __init__(self, labels: Tensor, rows: Tensor | None = None) -> None:
        self.shape = labels.shape
        self.rows = rows
        """The indices [sequences, n] of the selected tokens among all B · T tokens; None for all tokens."""
        # No sequence has more targets than labels.
        self.most = None if rows is not None else HostCount((labels != -100).sum(1).amax())

    def select(self, x: Tensor, target: Tensor, *values: Tensor | None) -> tuple[Any, ...]:
        """Return n tokens of each sequence, in order. They include all tokens of the sequence that have a target.

        If the sequences are the rows of the batch, n is a multiple of `TOKEN_MULTIPLE`. If T is then at most n, the
        arguments are returned unchanged.

        Args:
            x: [B, T, C].
            target: [B, T] int64, shifted.
            values: further tensors [B, T], or None.

        Returns:
            x [sequences, n, C], the target [sequences, n], and the values [sequences, n].
        """
        if self.rows is None:
            assert self.most is not None
            (B, T), n = self.shape, self.most.rounded_up(TOKEN_MULTIPLE)
            if n >= T:
                return x, target, *values
            order = (target == -100).to(torch.uint8).argsort(dim=1, stable=True)  # tokens with a target come first
            self.rows = order[:, :n] + T * torch.arange(B, device=order.device)[:, None]
        others = (None if value is None else value.flatten()[self.rows] for value in values)
        return *select_tokens(x, target, self.rows), *others

    def spread(self, results: Tensor) -> Tensor:
        """Expand the results [B, n] for the tokens that `select` returned to [B, T], with zeros for other tokens."""
        return _spread(results, self.rows, self.shape)


def select_tokens(x: Tensor, target: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states and the targets of tokens that are given by their indices.

    Args:
        x: [B, T, C].
        target: [B, T] int64, shifted.
        tokens: [n, m] int64, indices among all B · T tokens, such as those of `pack_answers`. A token that occurs more
            than once must have no target.

    Returns:
        x [n, m, C] and the target [n, m].
    """
    selected: Tensor = _Rows.apply(x.flatten(0, 1), tokens.flatten())  # type: ignore[no-untyped-call]
    return selected.view(*tokens.shape, -1), target.flatten()[tokens]


class LigerLMHead(nn.Linear, Layer):
    """Projection to the vocabulary. If targets are given, the forward returns the loss without materializing the
    logits.

    The loss is computed inside the forward of this module, because FSDP has gathered the weight there.

    Args:
        hidden_size: C.
        vocab_size: V.
        bias: whether a bias [V] is added to the product, before scale and cap.
        logit_scale: number that the logits are multiplied by.
        softcap: scaled logits become ``softcap · tanh(logits / softcap)``; None for no cap.
        kernels: which parts run on fused kernels.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        kernels: KernelOptions | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=bias)
        self.logit_scale, self.softcap = logit_scale, softcap
        self.kernels = kernels or KernelOptions()
        self.vocab_shard: VocabShard | None = None
        """This rank's shard of the vocabulary; None if it is not sharded."""

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the vocabulary on each of R ranks; see `liger_models.parallel.apply_tp`."""
        self.vocab_shard = VocabShard(group, self.out_features).check()
        return {"weight": 0} if self.bias is None else {"weight": 0, "bias": 0}

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the logits before scale and cap, without gradients."""
        return inference_linear(x, local(self.weight), bias)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two matrices, an input and a weight. Their product is the logits before scale and cap.

        A bias and adapters become additional columns of the two matrices, so every loss function needs only two
        matrices.
        """
        return self.with_bias(x, local(self.weight))

    def with_bias(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """If there is a bias, append columns to x [..., C] and to the weight [V, C] so that their product includes the
        bias."""
        bias = local_or_none(self.bias)
        if bias is None:
            return x, weight
        # The new columns of x are 1. The first new column of the weight is the bias, and the others are 0.
        columns = F.pad(bias.to(weight.dtype)[:, None], (0, BIAS_COLUMNS - 1))
        return F.pad(x, (0, BIAS_COLUMNS), value=1.0), torch.cat([weight, columns], 1)

    def forward(
        self,
        x: Tensor,
        target: Tensor | None = None,
        *,
        num_items: Tensor | float | None = None,
        return_logits: bool = False,
        log_probs: bool = False,
        loss_function: LossFunction | None = None,
    ) -> Any:
        """Return the logits. If targets are given, return ``(loss, logits)``, where logits are None unless requested.

        If the vocabulary is sharded, each rank computes only a partial sum of the gradient of x. Therefore x must have
        all tokens and must be a result of `collectives.copy_to_region`, whose backward adds the partial sums. Every
        rank returns the loss and the logits over the whole vocabulary.

        Args:
            x: [..., C].
            target: [...] int64, already shifted; −100 is ignored. None returns only the logits.
            num_items: number by which the summed loss is divided; None for the number of targets.
            return_logits: whether to return the logits [..., V] in addition to the loss.
            log_probs: whether to return the log-probability of each target [...] instead of the loss. The
                log-probability is 0 for ignored targets.
            loss_function: function of the input and the weight that `operands` returns, and of the targets. Its result
                is returned instead of the loss.

        Raises:
            ValueError: ``loss_function`` is given although the vocabulary is sharded.
        """
        scale, cap, vocab_shard = self.logit_scale, self.softcap, self.vocab_shard
        # A sharded vocabulary always uses the fused loss, because otherwise the logits would have to be gathered.
        fused = self.kernels.fused_linear_cross_entropy or vocab_shard is not None

        # If all logits are needed in memory, compute them before scale and cap.
        raw = logits = None
        if target is None and not torch.is_grad_enabled():
            raw = self.product(x, local_or_none(self.bias))
        else:
            x, weight = self.operands(x)
            if target is None or return_logits or not (fused or log_probs or loss_function):
                raw = F.linear(x, weight)
        if raw is not None and vocab_shard is not None:
            raw = gather_vocab(raw, vocab_shard.ranks, vocab_shard.vocabulary)

        # Compute the logits that are returned.
        if raw is not None and (target is None or return_logits):
            logits = raw if scale == 1.0 else raw * scale
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
        if target is None:
            return logits

        # Compute the requested kind of loss.
        if loss_function is not None:
            if vocab_shard is not None:
                raise ValueError("LigerLMHead: loss_function needs the whole weight, got a shard of apply_tp.")
            return loss_function(x, weight, target), logits
        if log_probs:
            results = linear_cross_entropy(
                x,
                weight,
                target,
                logit_scale=scale,
                softcap=cap,
                reduction="sum",
                return_log_probs=True,
                vocab_shard=vocab_shard,
            )
            return results.log_probs, logits
        if raw is None or fused:
            loss = linear_cross_entropy(
                x, weight, target, num_items=num_items, logit_scale=scale, softcap=cap, vocab_shard=vocab_shard
            ).loss
        else:
            function = cross_entropy if self.kernels.cross_entropy else cross_entropy_reference
            loss = function(raw, target, num_items=num_items, logit_scale=scale, softcap=cap).loss
        return loss, logits
