"""Base of all losses that include the language-model head instead of taking logits."""

from typing import Any

from torch import nn


class FusedLinearLoss(nn.Module):
    """A loss of hidden states and the head's weight, which holds the logits of one chunk of tokens at a time.

    Args:
        ignore_index: target value of tokens that the loss skips.
        softcap, logit_scale: applied to the logits, as in `fused_linear_logprobs`.
        workspace_mib: budget in MiB of the logits buffer; None for the default of `linear_cross_entropy`.
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
        """Keyword arguments of the fused ops."""
        return {
            "ignore_index": self.ignore_index,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "workspace_mib": self.workspace_mib,
        }
