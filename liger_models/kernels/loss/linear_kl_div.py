"""KL divergence between a teacher's stored probabilities and a student's distribution, fused with the student's head.

Let z be the student's logits after ``logit_scale`` and softcap, and let τ be the temperature. Let s = log softmax(z /
τ) and q = exp(s). The stored probabilities p of a token need not sum to 1. All sums are over the vocabulary, in fp32::

    D = Σ p · (log max(p, eps) − s)
    dD/dz_j = (q_j · Σ p − p_j) / τ

Terms with p = 0 are 0. For tokens whose target is ``ignore_index``, the divergence and all gradients are 0.

The rows are processed in chunks, as in `linear_cross_entropy`. The loss is a scalar, so the forward also computes the
gradients. The forward and the backward together then need only three matrix products. A divergence is a small
difference between large terms. The logits are therefore in fp32 even if the inputs are in half precision. The
probabilities are read without a copy or a cast, and get no gradient. The forward saves the same tensors as
`linear_cross_entropy`, and the probabilities, which are read only if there is a second backward.

Source: https://arxiv.org/abs/1503.02531.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_models.common.errors import check_floating
from liger_models.common.ops import Op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.loss.cross_entropy import LOWEST, check_arguments, final_logits, token_scale, write_zeros
from liger_models.kernels.loss.divergence import load_logits
from liger_models.kernels.loss.row_chunks import check_head, chunk_rows, matching_dtypes, walk_chunks
from liger_models.kernels.loss.scalar_loss import (
    HeadGradients,
    HeadNeeds,
    fused_loss,
    fused_loss_fake,
    save_scalar_loss,
    scalar_loss_backward,
    without_exponent,
)
from liger_models.kernels.tiles import exp, next_power_of_2, num_warps

REDUCTIONS = ("batchmean", "mean", "sum")
MAX_BLOCK = 8192


class KLDivOptions(NamedTuple):
    """The arguments of `linear_kl_div` from which the divergence of a row is computed."""

    temperature: float
    eps: float
    ignore_index: int
    softcap: float | None
    logit_scale: float


def linear_kl_div_reference(
    x: Tensor,
    weight: Tensor,
    probabilities: Tensor,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    reduction: str = "batchmean",
    temperature: float = 1.0,
    eps: float = 1e-10,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Compute `linear_kl_div` in plain PyTorch, with all logits at once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    p = probabilities.detach().to(wide)
    s = _log_probs(logits, temperature, softcap, logit_scale)
    losses = (p * (p.clamp_min(eps).log() - s)).sum(-1)
    valid = torch.ones_like(losses, dtype=torch.bool) if target is None else target != ignore_index
    total = losses.where(valid, 0).sum()
    rows = valid.sum().clamp_min(1)
    return {"sum": total, "batchmean": total / rows, "mean": total / (rows * p.shape[-1])}[reduction]


def _log_probs(logits: Tensor, temperature: float, softcap: float | None, logit_scale: float) -> Tensor:
    z = final_logits(logits, logit_scale, softcap)
    return (z / temperature).log_softmax(-1).clamp_min(LOWEST)  # for a logit of −inf and p = 0, p · s must be 0


@triton.jit
def _linear_kl_div_kernel(
    logits_ptr, p_ptr, gradient_ptr, target_ptr, factor_ptr, loss_ptr,
    logits_stride, p_stride, gradient_stride, V, ignore_index, eps, inverse_temperature, softcap, logit_scale,
    GRADIENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes the divergence of one row [V]. With GRADIENT, the program also computes the gradient of the
    row's logits.
    """
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * logits_stride
    p_ptr += row.to(tl.int64) * p_stride
    gradient_ptr += row.to(tl.int64) * gradient_stride
    columns = tl.arange(0, BLOCK)

    # For an ignored row, all results are 0, and the logits are not read.
    if tl.load(target_ptr + row) == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            write_zeros(gradient_ptr, columns, V, BLOCK)
        return

    # In a first read of the row, compute the online softmax of the logits, and Σ p.
    maximum, total, mass = LOWEST, 0.0, 0.0
    for start in range(0, V, BLOCK):
        inside = start + columns < V
        z = load_logits(logits_ptr + start, columns, inside, logit_scale, softcap, HAS_SOFTCAP)
        z = tl.where(inside, z, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(z, 0))
        total *= exp((maximum - new_maximum) * inverse_temperature)
        total += tl.sum(exp((z - new_maximum) * inverse_temperature), 0)
        maximum = new_maximum
        mass += tl.sum(tl.load(p_ptr + start + columns, mask=inside, other=0.0).to(tl.float32), 0)
    log_total = tl.log(total)

    # In a second read of the row, compute D and the gradient.
    loss, factor = 0.0, 0.0
    if GRADIENT:
        factor = tl.load(factor_ptr + row) * inverse_temperature * logit_scale
    for start in range(0, V, BLOCK):
        inside = start + columns < V
        z = load_logits(logits_ptr + start, columns, inside, logit_scale, softcap, HAS_SOFTCAP)
        p = tl.load(p_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        s = tl.maximum((z - maximum) * inverse_temperature - log_total, LOWEST)
        loss += tl.sum(p * (tl.log(tl.maximum(p, eps)) - s), 0)
        if GRADIENT:
            dz = (exp(s) * mass - p) * factor
            if HAS_SOFTCAP:
                dz *= 1.0 - (z / softcap) * (z / softcap)
            tl.store(gradient_ptr + start + columns, dz.to(gradient_ptr.dtype.element_ty), mask=inside)
    tl.store(loss_ptr + row, loss)


def _rows_in_torch(logits, p, gradient, target, factors, options) -> Tensor:
    """Compute the divergence and the gradient of rows in plain PyTorch, without autograd; see `_rows`."""
    temperature, eps, ignore_index, softcap, logit_scale = options
    p, valid = p.to(logits.dtype), target != ignore_index
    s = _log_probs(logits, temperature, softcap, logit_scale)
    loss: Tensor = (p * (p.clamp_min(eps).log() - s)).sum(-1).where(valid, 0)
    if gradient is not None:
        dz = (s.exp() * p.sum(-1, keepdim=True) - p) * (logit_scale / temperature)
        if softcap is not None:
            dz *= 1 - torch.tanh(logits * (logit_scale / softcap)).square()
        gradient.copy_((dz * factors[:, None]).where(valid[:, None], 0))
    return loss


def _rows(logits, p, gradient, target, factors, options) -> Tensor:
    """Compute the divergence of each row. If ``gradient`` is given, also write the gradient of the logits to it. Each
    row of the gradient is multiplied by the row's factor.
    """
    if not use_triton(logits):
        return _rows_in_torch(logits, p, gradient, target, factors, options)
    temperature, eps, ignore_index, softcap, logit_scale = options
    N, V = logits.shape
    loss = torch.empty(N, dtype=torch.float32, device=logits.device)
    out = logits if gradient is None else gradient  # without a gradient, the kernel writes nothing to `out`
    block = min(next_power_of_2(V), MAX_BLOCK)
    with on_device_of(logits):
        _linear_kl_div_kernel[(N,)](
            logits, p, out, target, factors, loss, logits.stride(0), p.stride(0), out.stride(0), V,
            ignore_index, eps, 1.0 / temperature, 0.0 if softcap is None else softcap, logit_scale,
            GRADIENT=gradient is not None, HAS_SOFTCAP=softcap is not None, LOWEST=LOWEST, BLOCK=block,
            num_warps=num_warps(block),
        )  # fmt: skip
    return loss


class LinearKLDivInputs(NamedTuple):
    """Inputs of the op `linear_kl_div`. ``factors`` [N] holds the factor of each row's divergence."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    probabilities: Tensor
    factors: Tensor
    options: KLDivOptions
    rows: int
    needs: HeadNeeds


class LinearKLDivOutputs(NamedTuple):
    """Outputs of the op `linear_kl_div`: the loss, then the gradients and their scale, as `HandOver` requires."""

    loss: Tensor
    gradients: HeadGradients
    scale: Tensor


def _forward(inputs: LinearKLDivInputs) -> LinearKLDivOutputs:
    x, target, factors, needs = inputs.x.contiguous(), inputs.target.contiguous(), inputs.factors, inputs.needs
    # The kernel supports any stride between rows. Only the elements of a row must be adjacent.
    probabilities = inputs.probabilities
    if probabilities.stride(-1) != 1:
        probabilities = probabilities.contiguous()
    # A gradient in fp16 could underflow. The factors are therefore divided by a power of two, by which the gradients
    # are multiplied at the end.
    shares, scale = without_exponent(factors, x.dtype)

    def divergence(logits: Tensor, part: slice, gradient: Tensor) -> tuple[Tensor]:
        out = gradient if any(needs) else None
        return (_rows(logits, probabilities[part], out, target[part], shares[part], inputs.options),)

    wide = torch.promote_types(x.dtype, torch.float32)
    results, *gradients = walk_chunks(x, inputs.weight, inputs.bias, inputs.rows, needs, divergence, wide)
    loss = (results[0] * factors).sum() if results else factors.new_zeros(())
    return LinearKLDivOutputs(loss, HeadGradients(*gradients), scale)


def _fake(inputs: LinearKLDivInputs) -> LinearKLDivOutputs:
    loss = inputs.x.new_empty((), dtype=torch.promote_types(inputs.x.dtype, torch.float32))
    return LinearKLDivOutputs(loss, *fused_loss_fake(inputs.x, inputs.weight, inputs.needs))


LINEAR_KL_DIV = Op("linear_kl_div", _forward, _fake)
LINEAR_KL_DIV.differentiable(save_scalar_loss, scalar_loss_backward)


def linear_kl_div(
    x: Tensor,
    weight: Tensor,
    probabilities: Tensor,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    reduction: str = "batchmean",
    temperature: float = 1.0,
    eps: float = 1e-10,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    workspace_mib: int | None = None,
) -> Tensor:
    """Compute the KL divergence between stored probabilities p and a student's distribution.

    The divergence of a token is ``Σ p · (log max(p, eps) − log softmax((x @ weightᵀ + bias) / temperature))``.

    Args:
        x: [..., C], floating-point.
        weight: [V, C], in the dtype of x.
        probabilities: [..., V], the stored p, in any floating-point dtype. They are not copied, and get no gradient.
        target: [...] int64, only compared with ``ignore_index``. If None, no token is ignored.
        bias: [V].
        reduction: "sum" returns the sum over the tokens. "batchmean" divides this sum by the number of tokens that are
            not ignored. "mean" also divides by the size of the vocabulary.
        temperature: divisor of the student's logits; the stored probabilities are used unchanged.
        eps: lower bound of p inside the logarithm.
        ignore_index: target value of tokens that are ignored.
        softcap, logit_scale: applied to the student's logits as in `cross_entropy`.
        workspace_mib: maximum size of the logits buffer in MiB; None for the default of `linear_cross_entropy`.

    Returns:
        [] fp32; 0 if all tokens are ignored.

    Raises:
        ValueError: shapes do not match, or an option is out of range.
        TypeError: a dtype is wrong.
    """
    op = "linear_kl_div"
    check_floating(op, x=x, weight=weight, bias=bias, probabilities=probabilities)
    check_head(op, x, weight, bias, workspace_mib)
    V = weight.shape[0]
    if tuple(probabilities.shape) != (*x.shape[:-1], V):
        raise ValueError(f"{op}: probabilities must have shape {[*x.shape[:-1], V]}, got {list(probabilities.shape)}.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be one of {REDUCTIONS}, got {reduction!r}.")
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be positive, got {temperature}.")
    if not eps > 0:
        raise ValueError(f"{op}: eps must be positive, got {eps}.")
    if target is None:
        target = torch.full(x.shape[:-1], 0 if ignore_index else 1, dtype=torch.int64, device=x.device)
    check_arguments(op, tuple(x.shape[:-1]), V, target, None, None, ignore_index, 0.0, softcap, "mean", None)
    x, weight, bias = matching_dtypes(op, x, weight, bias)  # type: ignore[assignment]
    y = target.flatten()

    # Compute the bytes that the buffers need per row and vocabulary entry, and the factor of each token's loss.
    wide = torch.promote_types(x.dtype, torch.float32)
    size = wide.itemsize + (x.element_size() if x.dtype != wide else 0)
    factors = token_scale(y, None, None, ignore_index, "sum" if reduction == "sum" else "mean", None, wide)
    if reduction == "mean":
        factors = factors / V
    options = KLDivOptions(temperature, eps, ignore_index, softcap, logit_scale)
    inputs = LinearKLDivInputs(
        x.flatten(0, -2), weight, y, bias, probabilities.detach().flatten(0, -2), factors, options,
        chunk_rows(len(y), V, size, workspace_mib, trained=weight.requires_grad), HeadGradients(),
    )  # fmt: skip
    loss: Tensor = fused_loss(LINEAR_KL_DIV, inputs)[0]
    return loss
