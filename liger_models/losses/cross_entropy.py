"""Cross entropy computed from logits, or from hidden states and the weight of the language-model head."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels.loss.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy


class LigerCrossEntropyLoss(nn.Module):
    """The op `liger_models.kernels.loss.cross_entropy.cross_entropy` as a module.

    Args:
        weight: [V] class weights.
        ignore_index: target value of tokens that the loss skips.
        lse_square_scale: coefficient of the z-loss.
        label_smoothing: in [0, 1].
        reduction: "mean", "sum" or "none".
        softcap: logits become softcap · tanh(logits / softcap); None for no softcap.
        return_z_loss, return_token_accuracy, return_predicted_tokens: whether to return a `CrossEntropyOutput` with the
            z-loss, the token accuracy or the predicted tokens, instead of the loss alone.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        # The class weights are a buffer, so that they move with the module. The buffer is not persistent, because
        # checkpoints do not contain it.
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index, self.lse_square_scale = ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.return_token_accuracy = return_z_loss, return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """Compute the loss of logits [..., V] and targets [...] int64."""
        return self._selected(cross_entropy(_input, target, **self._options))

    @property
    def _options(self) -> dict[str, Any]:
        """The keyword arguments of the op."""
        return {
            "class_weight": self.weight,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.lse_square_scale,
            "softcap": self.softcap,
            "reduction": self.reduction,
            "return_z_loss": self.return_z_loss,
            "return_token_accuracy": self.return_token_accuracy,
            "return_predicted_tokens": self.return_predicted_tokens,
        }

    def _selected(self, out: CrossEntropyOutput) -> Tensor | CrossEntropyOutput:
        """Return the whole output if more than the loss was requested, and otherwise the loss."""
        more = self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens
        return out if more else out.loss


class LigerFusedLinearCrossEntropyLoss(LigerCrossEntropyLoss):
    """The op `liger_models.kernels.loss.linear_cross_entropy.linear_cross_entropy` as a module.

    Args:
        ce_weight: [V] class weights.
        accum_dtype: must be None or float32. Both have the same effect: gradients are summed over chunks as described
            in `linear_cross_entropy`.
        use_token_scaling: must be False. Use ``token_weight`` of `linear_cross_entropy` instead.
        workspace_mib: maximum size of the logits buffer in MiB; None for the default of `linear_cross_entropy`.
        Others: as in `LigerCrossEntropyLoss`.

    Raises:
        ValueError: ``accum_dtype`` or ``use_token_scaling`` is not supported.
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(
            ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        if accum_dtype not in (None, torch.float32):
            raise ValueError(
                f"LigerFusedLinearCrossEntropyLoss: accum_dtype must be None or torch.float32, got {accum_dtype}."
            )
        if use_token_scaling:
            raise ValueError(
                "LigerFusedLinearCrossEntropyLoss: use_token_scaling must be False. Call linear_cross_entropy with the "
                "tokens' probabilities as token_weight."
            )
        self.workspace_mib = workspace_mib

    def forward(  # type: ignore[override]
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """Compute the loss.

        Args:
            lin_weight: [V, C] weight of the head.
            _input: [..., C] hidden states.
            target: [...] int64.
            bias: [V].
        """
        # As in Liger-Kernel, this method takes the weight before the hidden states. The op takes the hidden states
        # first.
        options = {**self._options, "bias": bias, "workspace_mib": self.workspace_mib}
        return self._selected(linear_cross_entropy(_input, lin_weight, target, **options))
