"""Base class of the losses that take hidden states and the language-model head's weight instead of logits."""

from typing import Any

from torch import nn


class FusedLinearLoss(nn.Module):
    """A loss that takes hidden states and the head's weight, and computes the logits for one chunk of tokens at a time.

    Args:
        ignore_index: target value of tokens that the loss skips.
        softcap, logit_scale: applied to the logits, as in `fused_linear_logprobs`.
        workspace_mib: maximum size of the logits buffer in MiB; None for the default of `linear_cross_entropy`.
    """

    def __init__(self, ignore_index: int, softcap: float | None, logit_scale: float, workspace_mib: int | None) -> None:
        super().__init__()
        self.ignore_index, self.softcap, self.logit_scale = ignore_index, softcap, logit_scale
        self.workspace_mib = workspace_mib

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _head_options(self) -> dict[str, Any]:
        """The keyword arguments that all fused ops share."""
        return {
            "ignore_index": self.ignore_index,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "workspace_mib": self.workspace_mib,
        }
