"""Direct preference optimization (DPO) and ten related losses over pairs, with or without a reference model."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.losses.base_preference import MARGIN_LOSSES, PairLoss, PreferenceMetrics, margin_losses, sigmoid

DPO_LOSSES = (
    *MARGIN_LOSSES, "robust", "exo_pair", "discopop", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
)  # fmt: skip


class LigerFusedLinearDPOLoss(PairLoss):
    """Direct preference optimization: ``−log σ(β·(r(y_w) − r(y_l)))``, or a related loss chosen by ``loss_type``.

    r(y) is the log-probability of a sequence minus its log-probability under the reference model. y_w is the chosen
    sequence of a pair, and y_l is the rejected sequence. Let w = β·r(y_w), l = β·r(y_l), and let m = w − l be the
    margin. σ is the logistic function, and ε is ``label_smoothing``. The loss types are:

    - sigmoid: −(1 − ε)·log σ(m) − ε·log σ(−m); this is conservative DPO if ε > 0
    - hinge: max(0, 1 − m)
    - ipo: (m/β − 1/(2β))²; set ``average_log_prob`` for the length-normalized form that the authors of IPO used
    - robust: (−(1 − ε)·log σ(m) + ε·log σ(−m)) / (1 − 2ε)
    - exo_pair: KL((σ(m), σ(−m)) ‖ (1 − ε, ε))
    - nca_pair: −log σ(w) − ½·log σ(−w) − ½·log σ(−l)
    - bco_pair: −log σ(w) − log σ(−l)
    - sppo_hard: (w/β − 1/(2β))² + (l/β + 1/(2β))²
    - apo_zero: 1 − σ(w) + σ(l)
    - apo_down: σ(w) + 1 − σ(m)
    - discopop: −(1 − σ(m/τ))·log σ(m) + σ(m/τ)·exp(−m), where τ is ``discopop_tau``

    The loss is the mean over pairs. With ``compute_nll_loss``, ``alpha`` · NLL is added, where NLL is the mean negative
    log-probability of the tokens in the chosen sequences.

    Args:
        ignore_index: target value of tokens that the loss skips.
        beta: β.
        alpha: weight of the NLL.
        compute_nll_loss: whether to add the NLL.
        compiled, chunk_size: ignored; accepted for compatibility with Liger-Kernel. ``workspace_mib`` limits the size
            of a chunk.
        use_ref_model: whether to compare the policy with a reference model. If False, r(y) is the log-probability.
        average_log_prob: whether the log-probability of a sequence is the mean over its tokens instead of the sum.
        loss_type: one of the types listed above.
        label_smoothing: ε, for sigmoid, robust and exo_pair.
        discopop_tau: τ, for discopop.
        softcap, logit_scale: applied to the policy's and the reference model's logits, as in `fused_linear_logprobs`.
        workspace_mib: maximum size of the logits buffer in MiB; None for the default of `linear_cross_entropy`.

    Raises:
        ValueError: the loss type is unknown, or an option is given that the loss type does not use.

    Source: https://arxiv.org/abs/2305.18290, ipo https://arxiv.org/abs/2310.12036, robust
    https://arxiv.org/abs/2403.00409, exo https://arxiv.org/abs/2402.00856, nca https://arxiv.org/abs/2402.05369, bco
    https://arxiv.org/abs/2404.04656, sppo https://arxiv.org/abs/2405.00675, apo https://arxiv.org/abs/2408.06266,
    discopop https://arxiv.org/abs/2406.08414.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(
            beta, alpha, compute_nll_loss, average_log_prob, use_ref_model,
            ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, workspace_mib=workspace_mib,
        )  # fmt: skip
        self._check_loss_type(loss_type, DPO_LOSSES, label_smoothing)
        if loss_type != "discopop" and discopop_tau != 0.05:
            raise ValueError(
                f"{self._name}: discopop_tau is for loss_type 'discopop', got {discopop_tau} with {loss_type!r}."
            )
        if not discopop_tau > 0:
            raise ValueError(f"{self._name}: discopop_tau must be positive, got {discopop_tau}.")
        self.loss_type, self.label_smoothing, self.discopop_tau = loss_type, label_smoothing, discopop_tau

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Compute the losses [pairs] from r(y_w) of the chosen and r(y_l) of the rejected sequences, both [pairs]."""
        loss_type = self.loss_type
        # `margin_losses` computes the losses that depend only on the margin. The losses below depend on r(y_w) and
        # r(y_l) separately, except for discopop.
        w, l = self.beta * chosen, self.beta * rejected  # noqa: E741
        margin = self.beta * (chosen - rejected)
        if loss_type == "nca_pair":
            return -logsigmoid(w) - 0.5 * logsigmoid(-w) - 0.5 * logsigmoid(-l)
        if loss_type == "bco_pair":
            return -logsigmoid(w) - logsigmoid(-l)
        if loss_type == "sppo_hard":
            return (chosen - 0.5 / self.beta).square() + (rejected + 0.5 / self.beta).square()
        if loss_type == "apo_zero":
            return sigmoid(-w) + sigmoid(l)
        if loss_type == "apo_down":
            return sigmoid(w) + sigmoid(-margin)
        if loss_type == "discopop":
            # σ(m/τ)·exp(−m) is computed as one exponential, because exp(−m) alone overflows where σ(m/τ) is 0.
            scaled = margin / self.discopop_tau
            return -logsigmoid(margin) * sigmoid(-scaled) + torch.exp(logsigmoid(scaled) - margin)
        return margin_losses(loss_type, margin, self.beta, self.label_smoothing)

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        *,
        ref_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, PreferenceMetrics]:
        """Compute loss and metrics.

        Args:
            lin_weight: [V, C] weight of the head.
            _input: [2·pairs, T, C] hidden states. The chosen sequences come first.
            target: [2·pairs, T] int64, already shifted.
            bias: [V] bias of the head.
            ref_input, ref_weight, ref_bias: the reference model's hidden states and its head's weight and bias. The
                hidden size may differ from C.
            ref_log_probs: the reference model's log-probabilities of the tokens [2·pairs, T] or of the sequences
                [2·pairs], given instead of ``ref_input``, ``ref_weight`` and ``ref_bias``.

        Returns:
            Loss [] fp32 and `PreferenceMetrics`.

        Raises:
            ValueError: shapes do not match, or the reference model's values are missing, given twice, or given although
                the loss does not use them.
        """
        reference = self._reference(target, ref_log_probs, ref_input, ref_weight, ref_bias)
        return self._from_head(_input, lin_weight, target, bias, reference)

    def from_log_probs(
        self, log_probs: Tensor, target: Tensor, *, ref_log_probs: Tensor | None = None
    ) -> tuple[Tensor, PreferenceMetrics]:
        """Compute what `forward` returns, given the policy's log-probability of each token, [2·pairs, T]."""
        return self._from_log_probs(log_probs, target, self._reference(target, ref_log_probs))
