"""Preference losses over the language-model head, without building its logits; called as Liger-Kernel's are.

Each is one pass of `fused_linear_logprobs` without gradient for a reference model, and one of `loss_of_log_probs` over
all rows of the policy, with a few operations on log-probabilities [B, T], whose gradient is autograd's.
``from_log_probs`` is these operations alone, for log-probabilities that were computed elsewhere.

With l(y) the log-probability of a sequence, the sum of its tokens' or their mean (``average_log_prob``; 0 if it has
none), r(y) = l(y) − l_ref(y), or l(y) without reference, y_w the chosen and y_l the rejected sequence of a pair, the
loss is a mean over pairs, plus ``alpha`` times the mean negative log-probability of the chosen tokens (NLL).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from liger_models.kernels.dispatch import check
from liger_models.kernels.linear_cross_entropy import linear_cross_entropy
from liger_models.kernels.linear_logprobs import fused_linear_logprobs, loss_of_log_probs

Metrics = TypeVar("Metrics", bound=tuple[object, ...])

MARGIN_LOSSES = ("sigmoid", "hinge", "ipo")
DPO_LOSSES = (
    *MARGIN_LOSSES, "robust", "exo_pair", "discopop", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
)  # fmt: skip
SMOOTHED = ("sigmoid", "robust", "exo_pair")


class PreferenceMetrics(NamedTuple):
    """What was measured beside a loss over pairs, in Liger-Kernel's order; without gradients.

    Attributes:
        chosen_logps, rejected_logps: [pairs] log-probability of each sequence.
        chosen_logits_mean, rejected_logits_mean: [] mean of all the logits, before a softcap; None without x.
        nll_loss: [] 0 if it is not asked for.
        chosen_rewards, rejected_rewards: [pairs] beta · r(y).
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor | None
    rejected_logits_mean: Tensor | None
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def accuracies(self) -> Tensor:
        """[pairs] 1 where the chosen sequence has the larger reward, else 0."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.chosen_rewards.dtype)


class ORPOMetrics(NamedTuple):
    """`PreferenceMetrics` and ORPO's own two.

    Attributes:
        log_odds_ratio: [] mean of log sigmoid of the log odds ratios.
        log_odds_chosen: [] mean log odds ratio.
        Others: as in `PreferenceMetrics`.
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor | None
    rejected_logits_mean: Tensor | None
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    log_odds_ratio: Tensor
    log_odds_chosen: Tensor

    @property
    def accuracies(self) -> Tensor:
        """[pairs] 1 where the chosen sequence has the larger reward, else 0."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.chosen_rewards.dtype)


class KTOMetrics(NamedTuple):
    """What was measured beside a KTO loss, in Liger-Kernel's order: [] sums over the chosen and the rejected sequences.

    The logits' sums are over tokens and vocabulary as well, before a softcap; None where there was no x.
    """

    chosen_logps_sum: Tensor
    rejected_logps_sum: Tensor
    chosen_logits_sum: Tensor | None
    rejected_logits_sum: Tensor | None
    chosen_rewards_sum: Tensor
    rejected_rewards_sum: Tensor


def sequence_log_probs(log_probs: Tensor, target: Tensor, ignore_index: int = -100, average: bool = False) -> Tensor:
    """Sum or mean of the tokens' log-probabilities [B, T] over each sequence [B]; 0 for one without targets."""
    valid = target != ignore_index
    total = log_probs.where(valid, 0).sum(-1)
    return total / valid.sum(-1).clamp_min(1) if average else total


def _check_options(name: str, loss_type: str, beta: float, label_smoothing: float) -> None:
    check(
        beta > 0 or loss_type not in ("ipo", "sppo_hard"),
        f"{name}: beta must be positive with loss_type {loss_type!r}, which divides by it, got {beta}.",
    )
    check(
        label_smoothing == 0.0 or loss_type in SMOOTHED,
        f"{name}: label_smoothing must be 0 with loss_type {loss_type!r}, got {label_smoothing}.",
    )
    low_enough = label_smoothing < 0.5 if loss_type == "robust" else label_smoothing <= 1.0
    high_enough = label_smoothing > 0.0 if loss_type == "exo_pair" else label_smoothing >= 0.0
    check(
        low_enough and high_enough and not (loss_type == "exo_pair" and label_smoothing == 1.0),
        f"{name}: label_smoothing must lie in [0, 1], with loss_type 'robust' in [0, 0.5), with 'exo_pair' in (0, 1),"
        f" got {label_smoothing} with {loss_type!r}.",
    )


def sigmoid(x: Tensor) -> Tensor:
    """σ(x), whose gradient keeps its digits near 1 as well; that of `torch.sigmoid` is y · (1 − y)."""
    return logsigmoid(x).exp()


def margin_losses(loss_type: str, margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Losses [pairs] of the margins β·(r(y_w) − r(y_l)) [pairs]: sigmoid, hinge, ipo, robust, exo_pair."""
    e = label_smoothing
    kept, flipped = -logsigmoid(margin), -logsigmoid(-margin)
    if loss_type == "sigmoid":
        return kept * (1 - e) + flipped * e if e else kept
    if loss_type == "hinge":
        return torch.relu(1 - margin)
    if loss_type == "ipo":
        return (margin / beta - 1 / (2 * beta)).square()
    if loss_type == "robust":
        return (kept * (1 - e) - flipped * e) / (1 - 2 * e)
    assert loss_type == "exo_pair"
    wanted = margin.new_tensor([1 - e, e]).log()
    return torch.sigmoid(margin) * (-kept - wanted[0]) + torch.sigmoid(-margin) * (-flipped - wanted[1])


class _OverLogProbs(nn.Module):
    """Options of the head that every loss has, and the pass over it."""

    def __init__(self, ignore_index: int, softcap: float | None, logit_scale: float, workspace_mib: int | None) -> None:
        super().__init__()
        self.ignore_index, self.softcap, self.logit_scale = ignore_index, softcap, logit_scale
        self.workspace_mib = workspace_mib

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _log_probs(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        return fused_linear_logprobs(
            x, weight, target, bias=bias, ignore_index=self.ignore_index, softcap=self.softcap,
            logit_scale=self.logit_scale, workspace_mib=self.workspace_mib,
        )  # fmt: skip

    def _over_head(
        self,
        loss_of: Callable[[Tensor], tuple[Tensor, Metrics]],
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        together: int,
    ) -> tuple[Tensor, Metrics]:
        """Loss of the log-probabilities, and metrics."""
        return loss_of_log_probs(
            loss_of, x, weight, target, together=together, bias=bias, ignore_index=self.ignore_index,
            softcap=self.softcap, logit_scale=self.logit_scale, workspace_mib=self.workspace_mib,
        )  # fmt: skip

    def _check_rows(self, rows: Tensor, target: Tensor, paired: bool) -> None:
        check(
            target.dim() == 2 and rows.shape[:2] == target.shape,
            f"{self._name}: target must be [B, T] like the rows, got {list(target.shape)} for {list(rows.shape)}.",
        )
        check(
            not paired or len(target) % 2 == 0,
            f"{self._name}: rows must be chosen sequences and then as many rejected ones, got {len(target)} rows.",
        )

    def _reference(
        self,
        use_ref_model: bool,
        target: Tensor,
        average: bool,
        ref_log_probs: Tensor | None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> Tensor | None:
        """Log-probability of each sequence [B] under the reference model, without gradient; None for no reference."""
        given = [tensor is not None for tensor in (ref_input, ref_weight, ref_log_probs)]
        wanted = ([True, True, False], [False, False, True]) if use_ref_model else ([False] * 3,)
        check(
            given in wanted and (ref_bias is None or given[1]),
            f"{self._name}: with use_ref_model=True either ref_input and ref_weight or ref_log_probs must be given,"
            f" with False none of them; got use_ref_model={use_ref_model} and of these three {given}.",
        )
        if not use_ref_model:
            return None
        with torch.no_grad():
            if ref_input is not None and ref_weight is not None:
                self._check_rows(ref_input, target, paired=False)
                ref_log_probs = self._log_probs(ref_input, ref_weight, target, ref_bias)
            assert ref_log_probs is not None
            if ref_log_probs.dim() == 1:
                check(
                    len(ref_log_probs) == len(target),
                    f"{self._name}: ref_log_probs must have {len(target)} rows, got {len(ref_log_probs)}.",
                )
                return ref_log_probs.detach()
            self._check_rows(ref_log_probs, target, paired=False)
            return sequence_log_probs(ref_log_probs, target, self.ignore_index, average)

    def _mean_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Mean of the logits of each sequence [B], for the price of one read of x and of the weight."""
        with torch.no_grad():
            wide = torch.promote_types(x.dtype, torch.float32)
            mean = (x.sum(1, dtype=wide) / max(x.shape[1], 1)) @ weight.mean(0, dtype=wide)
            return self.logit_scale * (mean if bias is None else mean + bias.mean(dtype=wide))


class _OverPairs(_OverLogProbs, ABC):
    """What the losses over pairs share: sequences' log-probabilities, rewards, NLL, metrics."""

    def __init__(
        self,
        ignore_index: int,
        beta: float,
        alpha: float,
        compute_nll_loss: bool,
        average_log_prob: bool,
        softcap: float | None,
        logit_scale: float,
        workspace_mib: int | None,
    ) -> None:
        super().__init__(ignore_index, softcap, logit_scale, workspace_mib)
        check(beta >= 0, f"{self._name}: beta must not be negative, got {beta}.")
        check(
            compute_nll_loss or alpha == 1.0,
            f"{self._name}: alpha is the weight of the NLL, got {alpha} with compute_nll_loss=False. Set that to True, "
            "or leave alpha out.",
        )
        self.beta, self.alpha, self.compute_nll_loss = beta, alpha, compute_nll_loss
        self.average_log_prob = average_log_prob

    @abstractmethod
    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Losses [pairs] of r(y_w) and r(y_l) [pairs]."""

    def _from_log_probs(
        self, log_probs: Tensor, target: Tensor, reference: Tensor | None = None, nll_loss: Tensor | None = None
    ) -> tuple[Tensor, PreferenceMetrics]:
        self._check_rows(log_probs, target, paired=True)
        pairs = len(target) // 2
        logps = sequence_log_probs(log_probs, target, self.ignore_index, self.average_log_prob)
        ratios = logps if reference is None else logps - reference
        chosen, rejected = ratios[:pairs], ratios[pairs:]
        loss = self.pair_losses(chosen, rejected).sum() / max(pairs, 1)
        if nll_loss is None:
            nll_loss = log_probs.new_zeros(())
            if self.compute_nll_loss:
                valid = target[:pairs] != self.ignore_index
                nll_loss = -log_probs[:pairs].where(valid, 0).sum() / valid.sum().clamp_min(1)
        if self.compute_nll_loss:
            loss = loss + self.alpha * nll_loss
        logps, rewards = logps.detach(), self.beta * ratios.detach()
        return loss, PreferenceMetrics(
            logps[:pairs], logps[pairs:], None, None, nll_loss.detach(), rewards[:pairs], rewards[pairs:]
        )

    def _forward(
        self,
        lin_weight: Tensor,
        x: Tensor,
        target: Tensor,
        bias: Tensor | None,
        reference: Tensor | None = None,
        nll_loss: Tensor | None = None,
    ) -> tuple[Tensor, PreferenceMetrics]:
        self._check_rows(x, target, paired=True)
        nll_value = None if nll_loss is None else nll_loss.detach()
        loss, metrics = self._over_head(
            lambda log_probs: self._from_log_probs(log_probs, target, reference, nll_value),
            x, lin_weight, target, bias, together=2,
        )  # fmt: skip
        if nll_loss is not None:  # its gradient is no matter of these log-probabilities
            loss = loss + self.alpha * (nll_loss - nll_loss.detach())
        means = self._mean_logits(x, lin_weight, bias)
        chosen, rejected = means.view(2, len(means) // 2).sum(1) / max(len(target) // 2, 1)
        return loss, metrics._replace(chosen_logits_mean=chosen, rejected_logits_mean=rejected)


class LigerFusedLinearDPOLoss(_OverPairs):
    """Direct preference optimisation: ``−log σ(β·(r(y_w) − r(y_l)))``, and its relatives by ``loss_type``.

    With m the margin β·(r(y_w) − r(y_l)), w = β·r(y_w), l = β·r(y_l), ε ``label_smoothing``, σ the logistic function:

    - sigmoid: −(1 − ε)·log σ(m) − ε·log σ(−m)  (ε > 0: conservative DPO)
    - hinge: max(0, 1 − m)
    - ipo: (m/β − 1/(2β))²; with ``average_log_prob`` the normalised form that its authors used
    - robust: (−(1 − ε)·log σ(m) + ε·log σ(−m)) / (1 − 2ε)
    - exo_pair: KL of (σ(m), σ(−m)) from (1 − ε, ε)
    - nca_pair: −log σ(w) − ½·log σ(−w) − ½·log σ(−l)
    - bco_pair: −log σ(w) − log σ(−l)
    - sppo_hard: (w/β − 1/(2β))² + (l/β + 1/(2β))²
    - apo_zero: 1 − σ(w) + σ(l)
    - apo_down: σ(w) + 1 − σ(m)
    - discopop: −(1 − σ(m/τ))·log σ(m) + σ(m/τ)·exp(−m), τ ``discopop_tau``

    Args:
        ignore_index: target value of tokens that count for nothing.
        beta: β.
        alpha: weight of the NLL.
        compute_nll_loss: add the NLL.
        compiled, chunk_size: how Liger-Kernel splits its work. Nothing here depends on them; see ``workspace_mib``.
        use_ref_model: take a reference model's log-probabilities; without, r(y) = l(y).
        average_log_prob: l(y) is the mean and not the sum.
        loss_type: one of the above.
        label_smoothing: ε, for sigmoid, robust and exo_pair.
        discopop_tau: τ, for discopop.
        softcap, logit_scale: of the logits, as in `fused_linear_logprobs`; for the reference as well.
        workspace_mib: budget in MiB of the buffer for logits; None as in `linear_cross_entropy`.

    Raises:
        ValueError: an unknown loss type, or an option that the loss type does not have.

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
            ignore_index, beta, alpha, compute_nll_loss, average_log_prob, softcap, logit_scale, workspace_mib
        )
        check(loss_type in DPO_LOSSES, f"{self._name}: loss_type must be one of {DPO_LOSSES}, got {loss_type!r}.")
        _check_options(self._name, loss_type, beta, label_smoothing)
        check(
            loss_type == "discopop" or discopop_tau == 0.05,
            f"{self._name}: discopop_tau is for loss_type 'discopop', got {discopop_tau} with {loss_type!r}.",
        )
        check(discopop_tau > 0, f"{self._name}: discopop_tau must be positive, got {discopop_tau}.")
        self.use_ref_model, self.loss_type = use_ref_model, loss_type
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Losses [pairs] of r(y_w) and r(y_l) [pairs]."""
        kind, w, l = self.loss_type, self.beta * chosen, self.beta * rejected  # noqa: E741
        margin = self.beta * (chosen - rejected)
        if kind == "nca_pair":
            return -logsigmoid(w) - 0.5 * logsigmoid(-w) - 0.5 * logsigmoid(-l)
        if kind == "bco_pair":
            return -logsigmoid(w) - logsigmoid(-l)
        if kind == "sppo_hard":
            return (chosen - 0.5 / self.beta).square() + (rejected + 0.5 / self.beta).square()
        if kind == "apo_zero":
            return sigmoid(-w) + sigmoid(l)
        if kind == "apo_down":
            return sigmoid(w) + sigmoid(-margin)
        if kind == "discopop":
            scaled = margin / self.discopop_tau  # one exponential: exp(−m) alone overflows where its factor is 0
            return -logsigmoid(margin) * sigmoid(-scaled) + torch.exp(logsigmoid(scaled) - margin)
        return margin_losses(kind, margin, self.beta, self.label_smoothing)

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
        """Loss and metrics.

        Args:
            lin_weight: [V, C].
            _input: [2·pairs, T, C], the chosen sequences first.
            target: [2·pairs, T] int64, already shifted.
            bias: [V].
            ref_input, ref_weight, ref_bias: the same of the reference model, whose hidden size may differ.
            ref_log_probs: instead of them: [2·pairs, T] of each token, or [2·pairs] of each sequence.

        Returns:
            Loss [] fp32 and `PreferenceMetrics`.

        Raises:
            ValueError: shapes that do not fit; a reference that is missing, given twice, or given and not used.
        """
        reference = self._reference(
            self.use_ref_model, target, self.average_log_prob, ref_log_probs, ref_input, ref_weight, ref_bias
        )
        return self._forward(lin_weight, _input, target, bias, reference)

    def from_log_probs(
        self, log_probs: Tensor, target: Tensor, *, ref_log_probs: Tensor | None = None
    ) -> tuple[Tensor, PreferenceMetrics]:
        """As `forward`, from the policy's log-probabilities of each token, [2·pairs, T]."""
        reference = self._reference(self.use_ref_model, target, self.average_log_prob, ref_log_probs)
        return self._from_log_probs(log_probs, target, reference)


class _WithoutReference(_OverPairs):
    """A loss over pairs that knows the policy alone."""

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, PreferenceMetrics]:
        """Loss and metrics; arguments as in `LigerFusedLinearDPOLoss.forward`."""
        return self._forward(lin_weight, _input, target, bias)

    def from_log_probs(self, log_probs: Tensor, target: Tensor) -> tuple[Tensor, PreferenceMetrics]:
        """As `forward`, from the policy's log-probabilities of each token, [2·pairs, T]."""
        return self._from_log_probs(log_probs, target)


class LigerFusedLinearCPOLoss(_WithoutReference):
    """Contrastive preference optimisation: ``−(1 − ε)·log σ(m) − ε·log σ(−m) + alpha · NLL``, m = β·(l(y_w) − l(y_l)).

    Args:
        alpha: weight of the NLL.
        label_smoothing: ε, for loss type sigmoid.
        loss_type: "sigmoid", "hinge" or "ipo", see `LigerFusedLinearDPOLoss`.
        Others: as in `LigerFusedLinearDPOLoss`.

    Source: https://arxiv.org/abs/2401.08417
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        loss_type: str = "sigmoid",
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(
            ignore_index, beta, alpha, compute_nll_loss, average_log_prob, softcap, logit_scale, workspace_mib
        )
        check(loss_type in MARGIN_LOSSES, f"{self._name}: loss_type must be one of {MARGIN_LOSSES}, got {loss_type!r}.")
        _check_options(self._name, loss_type, beta, label_smoothing)
        self.label_smoothing, self.loss_type = label_smoothing, loss_type

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Losses [pairs] of l(y_w) and l(y_l) [pairs]."""
        return margin_losses(self.loss_type, self.beta * (chosen - rejected), self.beta, self.label_smoothing)


class LigerFusedLinearSimPOLoss(_WithoutReference):
    """SimPO: ``−(1 − ε)·log σ(m) − ε·log σ(−m)``, m = β·(l(y_w) − l(y_l)) − γ, l the mean over tokens.

    Args:
        alpha, compute_nll_loss: the NLL, which the paper does not have, is added by default, as in Liger-Kernel.
        gamma: γ, the margin that is asked for.
        Others: as in `LigerFusedLinearDPOLoss`.

    Source: https://arxiv.org/abs/2405.14734
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(ignore_index, beta, alpha, compute_nll_loss, True, softcap, logit_scale, workspace_mib)
        _check_options(self._name, "sigmoid", beta, label_smoothing)
        self.label_smoothing, self.gamma = label_smoothing, gamma

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Losses [pairs] of l(y_w) and l(y_l) [pairs]."""
        margin = self.beta * (chosen - rejected) - self.gamma
        return margin_losses("sigmoid", margin, self.beta, self.label_smoothing)


def log_odds(log_prob: Tensor) -> Tensor:
    """``log(p / (1 − p))`` of log p <= 0, exact near both ends; p counts as 1 − ε (that of the dtype) at most."""
    log_prob = log_prob.clamp_max(-torch.finfo(log_prob.dtype).eps)
    # Neither form keeps its digits on the other's side of −log 2.
    near_one = log_prob > -0.6931
    rest = torch.where(
        near_one,
        torch.log(-torch.expm1(log_prob.where(near_one, -0.5))),
        torch.log1p(-torch.exp(log_prob.where(~near_one, -1.0))),
    )
    return log_prob - rest


class LigerFusedLinearORPOLoss(_OverPairs):
    """ORPO: ``NLL − β·log σ(log odds(y_w) − log odds(y_l))``, odds p / (1 − p) with log p the mean over tokens.

    A pair with a sequence of log-probability 0, as one without targets has, counts 0: its odds are infinite.

    Args:
        compute_nll_loss: add the NLL, with weight 1.
        Others: as in `LigerFusedLinearDPOLoss`.

    Source: https://arxiv.org/abs/2403.07691
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(ignore_index, beta, 1.0, compute_nll_loss, True, softcap, logit_scale, workspace_mib)

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Losses [pairs] of the mean log-probabilities [pairs]."""
        return -self.beta * self._odds(chosen, rejected)[1]

    def _odds(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Log odds ratios [pairs] and their log sigmoid; both 0 for a pair that counts 0."""
        both = (chosen != 0) & (rejected != 0)
        odds = log_odds(chosen) - log_odds(rejected)
        return odds.where(both, 0), logsigmoid(odds).where(both, 0)

    def _with_odds(self, loss: Tensor, metrics: PreferenceMetrics) -> tuple[Tensor, ORPOMetrics]:
        odds, ratio = self._odds(metrics.chosen_logps, metrics.rejected_logps)
        pairs = max(len(odds), 1)
        return loss, ORPOMetrics(*metrics, ratio.sum() / pairs, odds.sum() / pairs)

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, ORPOMetrics]:
        """Loss and metrics.

        Args:
            nll_target: [2·pairs, T], targets of the NLL if not ``target``, such as those of the prompt as well; costs a
                pass over the chosen sequences. The rejected ones' are not read.
            Others: as in `LigerFusedLinearDPOLoss.forward`.
        """
        nll_loss = None
        if nll_target is not None:
            check(
                self.compute_nll_loss,
                f"{self._name}: nll_target is for compute_nll_loss=True, got it with False. Leave it out.",
            )
            self._check_rows(_input, nll_target, paired=True)
            pairs = len(nll_target) // 2
            nll_loss = linear_cross_entropy(
                _input[:pairs], lin_weight, nll_target[:pairs], bias=bias, ignore_index=self.ignore_index,
                softcap=self.softcap, logit_scale=self.logit_scale, workspace_mib=self.workspace_mib,
            ).loss  # fmt: skip
        return self._with_odds(*self._forward(lin_weight, _input, target, bias, nll_loss=nll_loss))

    def from_log_probs(self, log_probs: Tensor, target: Tensor) -> tuple[Tensor, ORPOMetrics]:
        """As `forward`, from the policy's log-probabilities of each token, [2·pairs, T]."""
        return self._with_odds(*self._from_log_probs(log_probs, target))


class LigerFusedLinearKTOLoss(_OverLogProbs):
    """KTO: the mean of ``λ_d·(1 − σ(β·(r(y) − z)))`` for desirable and ``λ_u·(1 − σ(β·(z − r(y))))`` for other y.

    Args:
        use_ref_model: take a reference model's log-probabilities; without, r(y) = l(y).
        desirable_weight, undesirable_weight: λ_d and λ_u.
        Others: as in `LigerFusedLinearDPOLoss`.

    Source: https://arxiv.org/abs/2402.01306
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(ignore_index, softcap, logit_scale, workspace_mib)
        check(beta >= 0, f"{self._name}: beta must not be negative, got {beta}.")
        self.beta, self.use_ref_model, self.average_log_prob = beta, use_ref_model, average_log_prob
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | float | None = None,
        *,
        ref_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, KTOMetrics]:
        """Loss and metrics. The hidden states come first here, as in Liger-Kernel.

        Args:
            _input: [B, T, C].
            lin_weight: [V, C].
            target: [B, T] int64, already shifted.
            bias: [V].
            preference_labels: [B] bool, True for desirable sequences.
            ref_input, ref_weight, ref_bias: the same of the reference model, whose hidden size may differ.
            kl: a number, [] or [B], z: the estimated divergence from the reference model, not negative; carries no
                gradient. None for 0.
            ref_log_probs: instead of the reference: [B, T] of each token, or [B] of each sequence.

        Returns:
            Loss [] fp32 and `KTOMetrics`.

        Raises:
            ValueError: shapes that do not fit; a reference that is missing, given twice, or given and not used.
            TypeError: labels that are not bool.
        """
        self._check_rows(_input, target, paired=False)
        labels = self._labels(preference_labels, target)
        reference = self._reference(
            self.use_ref_model, target, self.average_log_prob, ref_log_probs, ref_input, ref_weight, ref_bias
        )
        loss, metrics = self._over_head(
            lambda log_probs: self._from_log_probs(log_probs, target, labels, reference, kl),
            _input, lin_weight, target, bias, together=1,
        )  # fmt: skip
        sums = self._mean_logits(_input, lin_weight, bias) * (target.shape[1] * lin_weight.shape[0])
        return loss, metrics._replace(
            chosen_logits_sum=sums.where(labels, 0).sum(), rejected_logits_sum=sums.where(~labels, 0).sum()
        )

    def from_log_probs(
        self,
        log_probs: Tensor,
        target: Tensor,
        preference_labels: Tensor | None = None,
        kl: Tensor | float | None = None,
        *,
        ref_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, KTOMetrics]:
        """As `forward`, from the policy's log-probabilities of each token, [B, T]."""
        self._check_rows(log_probs, target, paired=False)
        labels = self._labels(preference_labels, target)
        reference = self._reference(self.use_ref_model, target, self.average_log_prob, ref_log_probs)
        return self._from_log_probs(log_probs, target, labels, reference, kl)

    def _labels(self, labels: Tensor | None, target: Tensor) -> Tensor:
        if not isinstance(labels, Tensor) or labels.shape != target.shape[:1]:
            got = list(labels.shape) if isinstance(labels, Tensor) else labels
            raise ValueError(f"{self._name}: preference_labels must be a tensor [{len(target)}], got {got}.")
        if labels.dtype != torch.bool:
            raise TypeError(f"{self._name}: preference_labels must be bool, got {labels.dtype}.")
        return labels

    def _from_log_probs(
        self, log_probs: Tensor, target: Tensor, labels: Tensor, reference: Tensor | None, kl: Tensor | float | None
    ) -> tuple[Tensor, KTOMetrics]:
        shape = list(kl.shape) if isinstance(kl, Tensor) else []
        check(shape in ([], [1], [len(target)]), f"{self._name}: kl must be a number or [{len(target)}], got {shape}.")
        logps = sequence_log_probs(log_probs, target, self.ignore_index, self.average_log_prob)
        ratios = logps if reference is None else logps - reference
        z = torch.as_tensor(0.0 if kl is None else kl, dtype=ratios.dtype, device=ratios.device)
        gain = ratios - z.detach()
        losses = torch.where(
            labels,
            self.desirable_weight * sigmoid(-self.beta * gain),
            self.undesirable_weight * sigmoid(self.beta * gain),
        )
        logps, rewards = logps.detach(), self.beta * ratios.detach()
        return losses.sum() / max(len(target), 1), KTOMetrics(
            logps.where(labels, 0).sum(),
            logps.where(~labels, 0).sum(),
            None,
            None,
            rewards.where(labels, 0).sum(),
            rewards.where(~labels, 0).sum(),
        )
