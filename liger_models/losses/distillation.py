"""Distillation losses as modules, called as Liger-Kernel's are: over two models' heads, or over given distributions.

The ones with "FusedLinear" run `liger_models.kernels.divergence.linear_divergence`; its docstring has the formulas. The
others are plain torch, in fp32, and exact where probabilities are 0.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from liger_models.kernels.dispatch import check
from liger_models.kernels.divergence import linear_divergence, over_mixture
from liger_models.kernels.linear_cross_entropy import linear_cross_entropy

REDUCTIONS = ("none", "sum", "mean", "batchmean")


class _FusedLinearDistillation(nn.Module):
    """``weight_hard_loss · cross entropy + weight_soft_loss · divergence``, a mean over the tokens not ignored.

    Args as of `LigerFusedLinearJSDLoss`.
    """

    divergence: ClassVar[str]

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check(temperature > 0, f"{name}: temperature must be positive, got {temperature}.")
        check(
            0.0 <= beta <= 1.0 if self.divergence == "jsd" else self.divergence == "cosine" or beta == 0.5,
            f"{name}: beta must {'lie in [0, 1]' if self.divergence == 'jsd' else 'be left out'}, got {beta}.",
        )
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature, self.return_soft_hard_loss = (
            ignore_index,
            temperature,
            return_soft_hard_loss,
        )
        self.softcap, self.logit_scale = softcap, logit_scale
        self.teacher_softcap, self.teacher_logit_scale = teacher_softcap, teacher_logit_scale
        self.workspace_mib = workspace_mib

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Loss [] fp32, or with ``return_soft_hard_loss`` that, soft loss and hard loss.

        Args:
            student_input: [..., C].
            student_weight: [V, C].
            teacher_input: [..., C'], where C' may differ from C.
            teacher_weight: [V, C'].
            true_labels: [...] int64, already shifted.
            student_bias, teacher_bias: [V].
        """
        # A hard loss of weight 0 is computed only to be returned.
        unweighted = self.weight_hard_loss == 0.0 and self.return_soft_hard_loss
        loss, soft, hard = linear_divergence(
            student_input, student_weight, teacher_input, teacher_weight, true_labels,
            divergence=self.divergence, beta=self.beta, temperature=self.temperature,
            bias=student_bias, teacher_bias=teacher_bias,
            hard_weight=self.weight_hard_loss, soft_weight=self.weight_soft_loss, ignore_index=self.ignore_index,
            softcap=self.softcap, logit_scale=self.logit_scale, teacher_softcap=self.teacher_softcap,
            teacher_logit_scale=self.teacher_logit_scale, workspace_mib=self.workspace_mib,
        )  # fmt: skip
        if unweighted:
            with torch.no_grad():
                hard = linear_cross_entropy(
                    student_input, student_weight, true_labels, bias=student_bias, ignore_index=self.ignore_index,
                    softcap=self.softcap, logit_scale=self.logit_scale, workspace_mib=self.workspace_mib,
                ).loss  # fmt: skip
        return (loss, soft, hard) if self.return_soft_hard_loss else loss


class LigerFusedLinearJSDLoss(_FusedLinearDistillation):
    """``weight_hard_loss · cross entropy + weight_soft_loss · D``, D the generalised Jensen-Shannon divergence.

    A mean over the tokens that are not ignored.

    Args:
        weight_hard_loss, weight_soft_loss: the two weights.
        beta: in [0, 1]; 0 is the forward, 1 the reverse KL divergence.
        ignore_index: label of tokens that count for nothing.
        temperature: divisor of both models' logits in the divergence.
        compiled, chunk_size: how Liger-Kernel splits its work. Nothing here depends on them; see ``workspace_mib``.
        return_soft_hard_loss: return (loss, soft loss, hard loss), the last two without gradient.
        softcap, logit_scale, teacher_softcap, teacher_logit_scale: of each model's logits, as in `linear_divergence`.
        workspace_mib: budget in MiB of the buffers for logits; None as in `linear_divergence`.

    Raises:
        ValueError: a temperature or beta out of its range.
    """

    divergence = "jsd"


class LigerFusedLinearForwardKLLoss(_FusedLinearDistillation):
    """KL divergence of the teacher from the student, and cross entropy; ``beta`` is to be left out.

    Args as of `LigerFusedLinearJSDLoss`.
    """

    divergence = "forward_kl"


class LigerFusedLinearReverseKLLoss(_FusedLinearDistillation):
    """KL divergence of the student from the teacher, and cross entropy; ``beta`` is to be left out.

    Args as of `LigerFusedLinearJSDLoss`.
    """

    divergence = "reverse_kl"


class LigerFusedLinearTVDLoss(_FusedLinearDistillation):
    """Total variation distance and cross entropy; ``beta`` is to be left out.

    Args as of `LigerFusedLinearJSDLoss`.
    """

    divergence = "tvd"


class LigerFusedLinearCosineSimilarityLoss(_FusedLinearDistillation):
    """``beta · (1 − cosine)`` of the logits, and cross entropy; the temperature makes no difference to it.

    Args as of `LigerFusedLinearJSDLoss`.
    """

    divergence = "cosine"


class LigerFusedLinearJSD(nn.Module):
    """Generalised Jensen-Shannon divergence alone, over both models' heads.

    Args:
        jsd_beta: β in [0, 1]; 0 is the forward, 1 the reverse KL divergence.
        ignore_index: label of tokens that count for nothing.
        temperature: divisor of both models' logits.
        accum_dtype: None or float32. Sums over chunks are as in `linear_cross_entropy` either way.
        Others: as in `LigerFusedLinearJSDLoss`.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__()
        check(0.0 <= jsd_beta <= 1.0, f"LigerFusedLinearJSD: jsd_beta must lie in [0, 1], got {jsd_beta}.")
        check(temperature > 0, f"LigerFusedLinearJSD: temperature must be positive, got {temperature}.")
        check(
            accum_dtype in (None, torch.float32),
            f"LigerFusedLinearJSD: accum_dtype must be None or torch.float32, got {accum_dtype}.",
        )
        self.jsd_beta, self.ignore_index, self.temperature = jsd_beta, ignore_index, temperature
        self.softcap, self.logit_scale = softcap, logit_scale
        self.teacher_softcap, self.teacher_logit_scale = teacher_softcap, teacher_logit_scale
        self.workspace_mib = workspace_mib

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Loss [] fp32 of [..., C], [V, C], [..., C'], [V, C'] and labels [...] int64; None: all tokens count."""
        return linear_divergence(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels,
            divergence="jsd", beta=self.jsd_beta, temperature=self.temperature, ignore_index=self.ignore_index,
            softcap=self.softcap, logit_scale=self.logit_scale, teacher_softcap=self.teacher_softcap,
            teacher_logit_scale=self.teacher_logit_scale, workspace_mib=self.workspace_mib,
        ).loss  # fmt: skip


def _check_pair(name: str, first: Tensor, second: Tensor, labels: Tensor | None = None) -> None:
    check(
        first.shape == second.shape and first.dim() > 0,
        f"{name}: both distributions must have one shape [..., V], got {list(first.shape)} and {list(second.shape)}.",
    )
    check(
        labels is None or labels.shape == first.shape[:-1],
        f"{name}: shift_labels must be {list(first.shape[:-1])}, got {None if labels is None else list(labels.shape)}.",
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _reduced(each: Tensor, reduction: str, labels: Tensor | None, ignore_index: int) -> Tensor:
    """Summands [..., V] reduced over the rows not ignored: "batchmean" by their number, "mean" by that of summands."""
    rows = each[..., 0].numel()
    count = each.new_tensor(max(rows, 1))
    if labels is not None:
        valid = labels != ignore_index
        each, count = each.where(valid[..., None], 0), valid.sum().clamp_min(1)
    if reduction == "none":
        return each
    total = each.sum()
    return {"sum": total, "batchmean": total / count, "mean": total / (count * each.shape[-1])}[reduction]


class LigerKLDIVLoss(nn.Module):
    """``Σ p · (log max(p, eps) − log q)``, with 0 where p = 0, from the prediction log q and the target p or log p.

    Args:
        eps: lower bound of p within the logarithm; not with ``log_target``.
        size_average, reduce: torch's deprecated arguments; only None.
        reduction: "none", "sum", "mean" (over all summands, torch's default) or "batchmean" (over rows).
        log_target: the target is log p.
    """

    def __init__(
        self,
        eps: float = 1e-10,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        log_target: bool = False,
    ) -> None:
        super().__init__()
        check(
            size_average is None and reduce is None,
            "LigerKLDIVLoss: size_average and reduce must be None. Use reduction.",
        )
        check(eps == 1e-10 or not log_target, f"LigerKLDIVLoss: eps must be left out with log_target, got {eps}.")
        check(reduction in REDUCTIONS, f"LigerKLDIVLoss: reduction must be one of {REDUCTIONS}, got {reduction!r}.")
        self.eps, self.reduction, self.log_target = eps, reduction, log_target

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """y_pred [..., V] log-probabilities, y_true [..., V] without gradient -> loss in fp32."""
        _check_pair("LigerKLDIVLoss", y_pred, y_true)
        log_q, target = _wide(y_pred), _wide(y_true.detach())
        p = target.exp() if self.log_target else target
        log_p = target if self.log_target else target.clamp_min(self.eps).log()
        there = p > 0  # neither a product nor a gradient of −inf where p is 0
        each = (p * (log_p.where(there, 0) - log_q.where(there, 0))).where(there, 0)
        return _reduced(each, self.reduction, None, -100)


class LigerJSD(nn.Module):
    """Generalised Jensen-Shannon divergence of log-probabilities, a mean over the rows not ignored.

    Args:
        beta: β in [0, 1]; 0 is the forward KL divergence (of p from q), 1 the reverse one.
        ignore_index: label of rows that count for nothing.
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        check(0.0 <= beta <= 1.0, f"LigerJSD: beta must lie in [0, 1], got {beta}.")
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """log_q [..., V] of the student, log_p [..., V] of the teacher, labels [...] -> loss [] in fp32."""
        _check_pair("LigerJSD", log_q, log_p, shift_labels)
        # A finite stand-in for −inf: its exponential is 0, and 0 times it is 0.
        lowest = torch.finfo(torch.float32).min / 4
        s, t = _wide(log_q).clamp_min(lowest), _wide(log_p.detach()).clamp_min(lowest)
        beta = self.beta
        if beta == 0.0:
            each = t.exp() * (t - s)
        elif beta == 1.0:
            each = s.exp() * (s - t)
        else:
            each = beta * t.exp() * over_mixture(t, s, beta) + (1 - beta) * s.exp() * over_mixture(s, t, 1 - beta)
        return _reduced(each, "batchmean", shift_labels, self.ignore_index)


class LigerTVDLoss(nn.Module):
    """Total variation distance ``½ · Σ |p − q|`` of probabilities.

    Args:
        reduction: "none", "sum", "mean" (over all summands) or "batchmean" (over rows).
        ignore_index: label of rows that count for nothing.
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        check(reduction in REDUCTIONS, f"LigerTVDLoss: reduction must be one of {REDUCTIONS}, got {reduction!r}.")
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """p [..., V] of the student, q [..., V] of the teacher, without gradient, labels [...] -> loss in fp32."""
        _check_pair("LigerTVDLoss", p, q, shift_labels)
        each = (_wide(p) - _wide(q.detach())).abs() / 2
        return _reduced(each, self.reduction, shift_labels, self.ignore_index)
