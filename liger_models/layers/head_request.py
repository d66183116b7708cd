"""The results that a caller requests from a forward: a loss, logits, log-probabilities or hidden states."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_tensors, check_values, is_traced
from liger_models.common.foreign import translate
from liger_models.distributed.groups import ParallelGroups
from liger_models.layers.batch import BatchLayout
from liger_models.layers.lm_head import LabeledRows, LossFunction


class HeadRequest(NamedTuple):
    """The arguments of `Decoder.forward` that describe the requested results. Each field is named like its argument."""

    labels: Tensor | None = None
    num_items_in_batch: Tensor | float | None = None
    return_logits: bool | None = None
    return_log_probs: bool = False
    loss_function: LossFunction | None = None
    logits_to_keep: int = 0
    output_hidden_states: bool = False
    routed_experts: Tensor | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "HeadRequest":
        """Make a request from keyword arguments, which may have the names of this package or those of transformers."""
        return cls(**translate("forward", options, cls._fields))

    @property
    def without_head(self) -> bool:
        """Whether the caller requests only the input of the head. The head is then skipped."""
        return self.return_logits is False and self.labels is None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether each rank needs the hidden states of all tokens."""
        own_loss = self.loss_function is not None
        return own_loss or self.output_hidden_states or self.without_head or self.logits_to_keep != 0

    @property
    def skips_rows(self) -> bool:
        """Whether the head may skip tokens without a target."""
        return not (self.return_logits or self.loss_function is not None)

    def check(self, B: int, T: int, *, cached: bool) -> None:
        """Raise ValueError if arguments cannot be combined, or do not fit a batch [B, T] or a decode cache."""
        labels, kept = self.labels, self.logits_to_keep
        if labels is not None and (cached or kept):
            raise ValueError(
                "forward: labels can't be combined with cache or logits_to_keep. Omit these to compute a loss."
            )
        if self.return_log_probs and labels is None:
            raise ValueError("forward: return_log_probs needs labels. Pass them.")
        alone = labels is not None and not self.return_log_probs and self.num_items_in_batch is None
        if self.loss_function is not None and not alone:
            raise ValueError(
                "forward: loss_function needs labels, and neither return_log_probs nor num_items_in_batch."
            )
        check_tensors(labels=labels)
        if labels is not None and tuple(labels.shape) != (B, T):
            raise ValueError(f"forward: labels must be [{B}, {T}] like input_ids, got {list(labels.shape)}.")
        if not isinstance(kept, int) or isinstance(kept, bool) or kept < 0:
            raise ValueError(f"forward: logits_to_keep must be an integer of at least 0, got {kept!r}. 0 keeps all.")


class LossTargets(NamedTuple):
    """The targets of all tokens of a batch, and of the tokens of this rank.

    Attributes:
        shifted: [B, T], the target of every token.
        local: [B, T / R], the targets of this rank's tokens, where R is the number of ranks.
        num_items: number by which this rank's summed loss is divided; None for the number of targets in ``local``.
        rows: the rows of ``local`` that have a target, if the head may skip all other rows; otherwise None.
    """

    shifted: Tensor
    local: Tensor
    num_items: Tensor | float | None
    rows: LabeledRows | None

    @classmethod
    def of(cls, request: HeadRequest, layout: BatchLayout, groups: ParallelGroups, embeds: Tensor) -> "LossTargets":
        """Compute the targets for a request with labels.

        Call this method before the blocks run, so that the host does not wait for the number of rows; see
        `LabeledRows`.
        """
        assert request.labels is not None
        shifted = layout.shift(request.labels)
        check_num_items(request.num_items_in_batch, shifted)
        local, num_items = groups.share_targets(shifted, request.num_items_in_batch)
        rows = LabeledRows(local) if request.skips_rows and not in_graph(embeds) else None
        return cls(shifted, local, num_items, rows)


def in_graph(x: Tensor) -> bool:
    """Whether the values of x can't be read, because x has none or because a graph is being compiled or captured."""
    without_values = x.is_meta or hasattr(x, "fake_mode")
    return is_traced() or without_values or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_num_items(num_items: Tensor | float | None, target: Tensor) -> None:
    """Check the number by which a summed loss is divided, without waiting for the device.

    Args:
        num_items: a number, a tensor of one element, or None.
        target: [B, T] int64, −100 for no target. ``num_items`` may be 0 only if no token has a target.

    Raises:
        ValueError: ``num_items`` is a bool, is negative, or is 0 although there are targets. A wrong value in a tensor
            on a GPU triggers a device-side assertion instead; see `check_values`.
    """
    if num_items is None:
        return
    must = "forward: num_items_in_batch must be a positive number, or 0 without targets"
    todo = "Pass the number of targets in all accumulation steps and on all ranks, or leave it out."

    # A tensor on a GPU is checked on the GPU, because reading its value would make the host wait.
    if isinstance(num_items, Tensor):
        dtype = num_items.dtype
        if num_items.numel() != 1 or dtype == torch.bool or dtype.is_complex:
            raise ValueError(f"{must}, got a tensor {list(num_items.shape)} {dtype}. {todo}")
        if in_graph(num_items) or in_graph(target):
            return
        if num_items.device.type != "cpu":
            count = num_items.detach().reshape(())
            without_targets = (target == -100).all().to(num_items.device)
            valid = count.isfinite() & ((count > 0) | ((count == 0) & without_targets))
            check_values(valid, f"{must}, got another. {todo}")
            return

    # A number or a tensor on the CPU can be read.
    value: Any = num_items.item() if isinstance(num_items, Tensor) else num_items
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{must}, got {value!r}. {todo}")
    if value == 0:
        check_values((target == -100).all(), f"{must}, got 0. {todo}")
