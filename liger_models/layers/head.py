"""Language-model head, with the loss inside its forward."""

import torch
from torch import Tensor, nn

from liger_models.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from liger_models.kernels.linear_cross_entropy import linear_cross_entropy
from liger_models.kernels.linear_logprobs import fused_linear_logprobs
from liger_models.kernels.options import KernelOptions


class LigerLMHead(nn.Linear):
    """Projection to the vocabulary; given targets it returns their loss without building the logits.

    The loss is computed in here, not around it, so that whatever gathers this module's weight for its forward (FSDP)
    has gathered it for the loss.

    Args:
        hidden_size: C.
        vocab_size: V.
        logit_scale: factor of the logits.
        softcap: logits, scaled, become ``softcap · tanh(logits / softcap)``; None for no cap.
        kernels: which loss runs.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        kernels: KernelOptions | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.logit_scale, self.softcap = logit_scale, softcap
        self.kernels = kernels or KernelOptions()

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        target: Tensor | None = None,
        *,
        num_items: Tensor | float | None = None,
        return_logits: bool = False,
        log_probs: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Loss and logits, each None where it is not wanted.

        Args:
            x: [..., C].
            target: [...] int64, already shifted; −100 is ignored. None: no loss.
            num_items: divisor of the loss, None for the number of targets.
            return_logits: build the logits [..., V] even with a target.
            log_probs: return the log-probability of each target [...] in the loss's place, 0 where ignored.
        """
        scale, cap = self.logit_scale, self.softcap
        fused = self.kernels.fused_linear_cross_entropy
        raw = super().forward(x) if target is None or return_logits or not (fused or log_probs) else None
        logits = None
        if raw is not None and (target is None or return_logits):
            logits = raw if scale == 1.0 else raw * scale
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
        if target is None:
            return None, logits
        if log_probs:
            return fused_linear_logprobs(x, self.weight, target, softcap=cap, logit_scale=scale), logits
        if raw is None or fused:
            loss = linear_cross_entropy(
                x, self.weight, target, num_items=num_items, logit_scale=scale, softcap=cap
            ).loss
        else:
            function = cross_entropy if self.kernels.cross_entropy else cross_entropy_reference
            loss = function(raw, target, num_items=num_items, logit_scale=scale, softcap=cap).loss
        return loss, logits
