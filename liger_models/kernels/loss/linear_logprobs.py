"""Log-probability of each target under ``softmax(x @ weightᵀ + bias)``, and the entropy of the distribution.

Only the logits of one chunk of tokens are in memory at a time.

Let z = logit_scale · logit / temperature, or z = softcap · tanh(logit_scale · logit / softcap) / temperature with a
softcap, and let y be the target of a token. All sums are over the vocabulary, in fp32::

    logp = z_y − log Σ_j exp(z_j)
    H    = −Σ_j p_j · log p_j = log Σ_j exp(z_j − m) − Σ_j p_j · (z_j − m),  m = max z

In the backward, let ``c`` and ``h`` be the upstream gradients of logp and H::

    dz_j = c · ([j = y] − p_j) − h · p_j · (log p_j + H)

From dz, the gradient of the logits is computed as in `cross_entropy`. For tokens whose target is ``ignore_index``,
logp, H and all gradients are 0.

The rows are processed in chunks, as in `linear_cross_entropy`. Each token has its own upstream gradient, so the
backward must recompute the logits. The forward and the backward together then take four matrix products. The forward
saves x, weight, max z, Σ exp(z − max z), and H. If the entropy is not requested, the per-token op of
`linear_cross_entropy` runs instead.

For a loss that is a sum over sequences or over pairs of sequences, `loss_of_log_probs` avoids recomputing the logits.
This function computes the gradients as soon as the log-probabilities of a sequence or pair are known, while the logits
are still in memory.

Source: https://arxiv.org/abs/2410.10989 (Liger Kernel, chunked losses).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_models.common.errors import is_traced
from liger_models.common.ops import Op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.loss.cross_entropy import (
    LOWEST,
    LossOptions,
    check_arguments,
    final_logits,
    load_block,
    token_statistics,
    write_zeros,
)
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy
from liger_models.kernels.loss.row_chunks import (
    Gradients,
    check_head,
    chunk_rows,
    logits_buffer,
    matching_dtypes,
    walk_chunks,
    write_logits,
)
from liger_models.kernels.loss.scalar_loss import (
    HandOver,
    HeadGradients,
    HeadNeeds,
    gradients_fake,
    scale_,
    scaled,
    where_needed,
    without_exponent,
)
from liger_models.kernels.tiles import cdiv, exp, next_power_of_2, num_warps, scale_and_cap

More = TypeVar("More")

MAX_BLOCK = 4096
"""Number of logits that a program of the gradient kernel holds in registers at a time. With this number, a thread on
Hopper needs 32 registers for bf16 logits, so that all 2048 threads of a multiprocessor are in use."""

KEPT = 5 / 8
"""Maximum fraction of the rows whose logits `loss_of_log_probs` keeps at a time if one sequence or pair exceeds a
chunk. For a preference loss without a reference model, the peak is then a fifth of the peak of plain PyTorch. The
fraction is more than half, so that the logits of the second sequence of a single pair can be kept."""


def fused_linear_logprobs_reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies in plain PyTorch, with all logits at once."""
    logits = F.linear(x, weight, bias)
    z = final_logits(logits, logit_scale, softcap)
    log_p = (z / temperature).log_softmax(-1)
    valid = target != ignore_index
    chosen = log_p.gather(-1, target.where(valid, 0)[..., None])[..., 0]
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    return chosen.where(valid, 0), entropy.where(valid, 0)


@triton.jit
def _gradient_kernel(
    logits_ptr, target_ptr, c_ptr, h_ptr, lse_ptr, entropy_ptr, stride, V, ignore_index, softcap, logit_scale,
    HAS_SOFTCAP: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program overwrites one row [V] of logits with their gradient."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    y = tl.load(target_ptr + row)
    columns = tl.arange(0, BLOCK)

    # The gradient of an ignored row is 0, and its logits are not read.
    if y == ignore_index:
        write_zeros(logits_ptr, columns, V, BLOCK)
        return

    maximum = tl.load(lse_ptr + 2 * row)
    log_total = tl.log(tl.load(lse_ptr + 2 * row + 1))
    entropy = tl.load(entropy_ptr + row)
    c = tl.load(c_ptr + row)
    h = tl.load(h_ptr + row)

    # dz = c · ([column = y] − p) − h · p · (log p + H), first for whole blocks of columns, which need no mask.
    whole = V // BLOCK * BLOCK
    for last in tl.static_range(2):
        for start in range(whole if last else 0, V if last else whole, BLOCK):
            x = load_block(logits_ptr, start + columns, V, last, "evict_first")
            z = scale_and_cap(x, logit_scale, softcap, HAS_SOFTCAP)
            log_p = (z - maximum) - log_total
            p = exp(log_p)
            # For a logit of −inf, p · log p must be 0 and not NaN.
            dz = -p * (c + h * (tl.maximum(log_p, LOWEST) + entropy))
            dz = tl.where(start + columns == y, dz + c, dz)
            if HAS_SOFTCAP:
                dz *= 1.0 - (z / softcap) * (z / softcap)
            dx = (dz * logit_scale).to(logits_ptr.dtype.element_ty)
            if last:
                tl.store(logits_ptr + start + columns, dx, mask=start + columns < V)
            else:
                tl.store(logits_ptr + start + columns, dx)


def _statistics(
    logits: Tensor, target: Tensor, options: LossOptions, *, predict: bool = False, gradient: Tensor | None = None
) -> tuple[Tensor, ...]:
    """For each row, return the target's log-probability, the entropy, lse [N, 2] (max z and Σ exp(z − max z)) and, with
    ``predict``, the most probable token.

    Args:
        gradient: [N, V], to which the gradient of the negative log-probabilities is written.
    """
    entropy = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    statistics = token_statistics(logits, target, None, *options, predict=predict, entropy=entropy, gradient=gradient)
    assert statistics is not None
    predicted = (statistics.predicted,) if predict else ()
    return statistics.log_probs, entropy, statistics.lse, *predicted


def _gradient(
    logits: Tensor, target: Tensor, c: Tensor, h: Tensor, lse: Tensor, entropy: Tensor, options: LossOptions
) -> None:
    """Overwrite the logits with their gradient, which is computed from the upstream gradients ``c`` and ``h``."""
    (N, V), softcap = logits.shape, options.softcap
    if not use_triton(logits):
        z = final_logits(logits, options.logit_scale, softcap)
        log_p = z.log_softmax(-1)
        # As in the kernel: dz = c · ([column = y] − p) − h · p · (log p + H).
        dz = -log_p.exp() * (c[:, None] + h[:, None] * (log_p.clamp_min(LOWEST) + entropy[:, None]))
        valid = target != options.ignore_index
        dz.scatter_add_(-1, target.where(valid, 0)[:, None], c[:, None].to(dz.dtype))
        if softcap is not None:
            dz *= 1 - (z / softcap).square()
        logits.copy_((dz * options.logit_scale).where(valid[:, None], 0))
    elif N:
        block = min(next_power_of_2(V), MAX_BLOCK)
        with on_device_of(logits):
            _gradient_kernel[(N,)](
                logits, target, c, h, lse, entropy, logits.stride(0), V, options.ignore_index,
                0.0 if softcap is None else softcap, options.logit_scale,
                HAS_SOFTCAP=softcap is not None, LOWEST=LOWEST, BLOCK=block, num_warps=num_warps(block, 32),
            )  # fmt: skip


class LinearLogprobsInputs(NamedTuple):
    """Inputs of the op `linear_logprobs`."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    options: LossOptions
    rows: int


class LinearLogprobsOutputs(NamedTuple):
    """Outputs of the op `linear_logprobs`. ``lse`` [N, 2] holds max z and Σ exp(z − max z)."""

    log_probs: Tensor
    entropy: Tensor
    lse: Tensor


class LinearLogprobsSaved(NamedTuple):
    """What `linear_logprobs` saves for the backward: its inputs, and the statistics of each row."""

    inputs: LinearLogprobsInputs
    lse: Tensor
    entropy: Tensor


class LinearLogprobsUpstream(NamedTuple):
    """Inputs of the op `linear_logprobs_backward`.

    ``c`` [N] and ``h`` [N] are the upstream gradients of the log-probabilities and of the entropies.
    """

    c: Tensor | None
    h: Tensor | None
    saved: LinearLogprobsSaved
    needs: HeadNeeds


def _forward(inputs: LinearLogprobsInputs) -> LinearLogprobsOutputs:
    x, target = inputs.x.contiguous(), inputs.target.contiguous()
    results, *_ = walk_chunks(
        x, inputs.weight, inputs.bias, inputs.rows, HeadGradients(False, False, False),
        lambda logits, part, _: _statistics(logits, target[part], inputs.options),
    )  # fmt: skip
    return LinearLogprobsOutputs(*(results or _no_rows(x)))


def _no_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    empty = lambda *size: x.new_empty(0, *size, dtype=torch.promote_types(x.dtype, torch.float32))
    return empty(), empty(), empty(2)


def _fake(inputs: LinearLogprobsInputs) -> LinearLogprobsOutputs:
    x = inputs.x
    row = lambda *size: x.new_empty(x.shape[0], *size, dtype=torch.promote_types(x.dtype, torch.float32))
    return LinearLogprobsOutputs(row(), row(), row(2))


def _backward(upstream: LinearLogprobsUpstream) -> HeadGradients:
    (inputs, lse, entropy), needs = upstream.saved, upstream.needs
    x, weight, target = inputs.x.contiguous(), inputs.weight, inputs.target.contiguous()
    # For fp16, both upstream gradients are divided by the same power of two, by which the results are multiplied at the
    # end.
    both = torch.stack([torch.zeros_like(entropy) if u is None else u for u in (upstream.c, upstream.h)])
    (c, h), scale = without_exponent(both, x.dtype)

    def gradient(logits: Tensor, part: slice, _: Tensor) -> None:
        _gradient(logits, target[part], c[part], h[part], lse[part], entropy[part], inputs.options)

    _, *gradients = walk_chunks(x, weight, inputs.bias, inputs.rows, needs, gradient)
    return HeadGradients(*scaled(gradients, scale, (x.dtype, weight.dtype, weight.dtype)))


def _backward_fake(upstream: LinearLogprobsUpstream) -> HeadGradients:
    return gradients_fake(upstream.saved.inputs.x, upstream.saved.inputs.weight, upstream.needs)


def _save(
    ctx: Any, inputs: LinearLogprobsInputs, outputs: LinearLogprobsOutputs, needs: HeadNeeds
) -> LinearLogprobsSaved:
    ctx.mark_non_differentiable(outputs.lse)
    return LinearLogprobsSaved(inputs, outputs.lse, outputs.entropy)


def _gradients(saved: LinearLogprobsSaved, needs: HeadNeeds, upstream: Any) -> HeadGradients:
    c, h, _ = upstream
    if c is None and h is None:
        return HeadGradients()
    return where_needed(LINEAR_LOGPROBS_BACKWARD(LinearLogprobsUpstream(c, h, saved, needs)), needs)


LINEAR_LOGPROBS = Op("linear_logprobs", _forward, _fake)
LINEAR_LOGPROBS_BACKWARD = Op("linear_logprobs_backward", _backward, _backward_fake)
LINEAR_LOGPROBS.differentiable(_save, _gradients)


@overload
def fused_linear_logprobs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    return_entropy: Literal[False] = False,
    workspace_mib: int | None = None,
) -> Tensor: ...


@overload
def fused_linear_logprobs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    return_entropy: Literal[True],
    workspace_mib: int | None = None,
) -> tuple[Tensor, Tensor]: ...


def fused_linear_logprobs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    return_entropy: bool = False,
    workspace_mib: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute each target's log-probability under ``softmax(x @ weightᵀ + bias)``, holding one chunk of logits at a
    time.

    Args:
        x: [..., C], floating-point.
        weight: [V, C], in the dtype of x.
        target: [...], int64 in [0, V) or ``ignore_index``.
        bias: [V], in the dtype of x.
        ignore_index: target value of tokens whose results are 0.
        softcap: bound of the scaled logits' absolute value, applied as softcap · tanh(logits / softcap); None for no
            softcap.
        logit_scale: factor by which the logits are multiplied.
        temperature: divisor of the logits, after the softcap.
        return_entropy: whether to also return the entropy of each token's distribution.
        workspace_mib: maximum size of the logits buffer in MiB; None for the default of `linear_cross_entropy`.

    Returns:
        The log-probabilities [...] in fp32. With ``return_entropy``, a pair: the log-probabilities, and the entropies
        in nats, [...] in fp32 each. All results are differentiable per token.

    Raises:
        ValueError: shapes do not match, or an option or (on the CPU) a target is out of range.
        TypeError: a dtype is wrong.
    """
    op = "fused_linear_logprobs"
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be positive, got {temperature}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap must be positive or None, got {softcap}.")

    # Dividing by the temperature after the softcap equals dividing both scale and cap by the temperature.
    softcap, logit_scale = None if softcap is None else softcap / temperature, logit_scale / temperature
    if not return_entropy:
        log_probs = linear_cross_entropy(
            x, weight, target, bias=bias, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
            reduction="sum", return_log_probs=True, workspace_mib=workspace_mib,
        ).log_probs  # fmt: skip
        assert log_probs is not None
        return log_probs

    check_head(op, x, weight, bias, workspace_mib)
    V = weight.shape[0]
    check_arguments(op, tuple(x.shape[:-1]), V, target, None, None, ignore_index, 0.0, softcap, "none", None)
    x, weight, bias = matching_dtypes(op, x, weight, bias)  # type: ignore[assignment]
    flat, y = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    rows = chunk_rows(flat.shape[0], V, x.element_size(), workspace_mib, trained=weight.requires_grad)
    options = LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)
    log_probs, entropy, _ = LINEAR_LOGPROBS(LinearLogprobsInputs(flat, weight, y, bias, options, rows))
    return log_probs.view(target.shape), entropy.view(target.shape)


class LogProbsOfSum(torch.autograd.Function):
    """Computes log-probabilities and, in the forward, the gradients of their negative sum; see `log_probs_of_sum`."""

    @staticmethod
    def forward(
        ctx: Any,
        options: LossOptions,
        rows: int,
        needs: HeadGradients,
        ahead: bool,
        when_other: Callable[[], object] | None,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x, target = x.contiguous(), target.contiguous()
        needs_now = needs if ahead else HeadGradients(False, False, False)
        results, *gradients = walk_chunks(
            x, weight, bias, rows, needs_now,
            lambda logits, part, gradient: _statistics(
                logits, target[part], options, predict=True, gradient=gradient if any(needs_now) else None
            ),
        )  # fmt: skip
        log_probs, entropy, lse, predicted = results or (*_no_rows(x), target.new_empty(0))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(predicted)
        ctx.save_for_backward(x, weight, target, bias, lse, entropy)
        ctx.options, ctx.rows, ctx.needs, ctx.when_other = options, rows, needs, when_other
        ctx.gradients = gradients if ahead else None
        return log_probs, entropy, predicted

    @staticmethod
    def backward(ctx: Any, c: Tensor | None, h: Tensor | None, *_: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph is True, but gradients that the forward computed have no graph
            raise RuntimeError(
                "backward: fused log-probabilities have no second derivative, got create_graph=True. Use a loss of the "
                "logits."
            )
        if c is None and h is None:
            return (None,) * 9
        x, weight, target, bias, lse, entropy = ctx.saved_tensors

        # The gradients that the forward computed are used at most once, and only if the loss is a multiple of the sum.
        gradients, ctx.gradients = ctx.gradients, None
        factor = None
        if gradients is not None:
            factor = None if c is None or h is not None else _common_value(c, target != ctx.options.ignore_index)
            if factor is None and ctx.when_other is not None:
                ctx.when_other()
        if factor is None:
            inputs = LinearLogprobsInputs(x, weight, target, bias, ctx.options, ctx.rows)
            result = _backward(LinearLogprobsUpstream(c, h, LinearLogprobsSaved(inputs, lse, entropy), ctx.needs))
        else:
            result = HeadGradients(*scaled(gradients, -factor, (x.dtype, weight.dtype, weight.dtype)))
        dx, dweight, dbias = where_needed(result, ctx.needs)
        return *(None,) * 5, dx, dweight, None, dbias


def _common_value(c: Tensor, valid: Tensor) -> Tensor | None:
    """If all elements of ``c`` [N] for which ``valid`` is True have the same value, return this value []. Otherwise,
    return None.
    """
    if c.numel() == 0:
        return c.new_zeros(())
    bounds = torch.stack([c.where(valid, torch.inf).amin(), c.where(valid, -torch.inf).amax()])
    low, high = bounds.tolist()
    if low > high:  # no element is valid
        return c.new_zeros(())
    return bounds[1] if low == high else None


def log_probs_of_sum(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ahead: bool = True,
    when_other: Callable[[], object] | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    workspace_mib: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities for a loss that is probably a multiple of their sum, such as their negative mean.

    While the logits are in memory, the forward computes the gradients of this sum. Three matrix products are then
    needed instead of four. The backward compares the upstream gradients of all targets. For this comparison, the host
    waits for the device. If the upstream gradients differ, or if the loss depends on the entropies, the backward
    computes the gradients again, and six products are needed. The function can't be compiled.

    Args:
        x: [..., C].
        target: [...].
        ahead: whether the forward computes the gradients. If the loss is known not to be a multiple of the sum, pass
            False. Four products are then needed.
        when_other: function that the backward calls if it finds that the loss is not a multiple of the sum.
        Others: as in `fused_linear_logprobs`.

    Returns:
        The log-probabilities [...] and the entropies [...] in fp32, both differentiable, and the most probable tokens
        [...] int64, which are −1 for ignored targets.

    Raises:
        ValueError, TypeError: as in `fused_linear_logprobs`.
    """
    op = "log_probs_of_sum"
    check_head(op, x, weight, bias, workspace_mib)
    V = len(weight)
    check_arguments(op, tuple(x.shape[:-1]), V, target, None, None, ignore_index, 0.0, softcap, "none", None)
    x, weight, bias = matching_dtypes(op, x, weight, bias)  # type: ignore[assignment]
    flat, y = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    options = LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)
    rows = chunk_rows(flat.shape[0], V, x.element_size(), workspace_mib, trained=weight.requires_grad)
    needs = HeadGradients(*(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)))
    outputs = LogProbsOfSum.apply(options, rows, needs, ahead, when_other, flat, weight, y, bias)
    log_probs, entropy, predicted = (out.view(target.shape) for out in outputs)
    return log_probs, entropy, predicted


def loss_of_log_probs(
    loss_of: Callable[[Tensor], tuple[Tensor, More]],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    together: int = 1,
    uniform: bool = False,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    workspace_mib: int | None = None,
) -> tuple[Tensor, More]:
    """Compute ``loss_of(fused_linear_logprobs(...))`` for a loss that is a sum over sequences or groups of sequences.

    The forward also computes the gradients, so the logits need not be recomputed in the backward.

    Args:
        loss_of: function that maps log-probabilities [B, T] fp32 to ``(loss [], other results without gradients)``. The
            gradient for a sequence must depend only on the sequences of its unit (see ``together``). Numbers shared by
            all sequences, such as counts of targets, must not be derived from the log-probabilities. The function is
            called several times, and log-probabilities that are not known yet are −1. In the last call, all
            log-probabilities are known.
        x: [B, T, C].
        together: number of sequences that form a unit: sequences b, b + B / together, and so on. For pairs, pass 2. All
            chosen sequences must then come before all rejected sequences.
        uniform: whether the loss depends only on the sum of each sequence's log-probabilities, so that all targets of a
            sequence have the same gradient. The logits of a single pair are then never computed twice.
        target: [B, T].
        Others: as in `fused_linear_logprobs`. Without ``workspace_mib``, a chunk holds the logits of whole sequences,
            up to five eighths of all rows. Logits beyond this limit are computed twice.

    Returns:
        The loss [], differentiable in x, weight and bias; and the second result of ``loss_of``.

    Raises:
        ValueError, TypeError: as in `fused_linear_logprobs`.
    """
    # In fp16 and in compiled graphs, the backward computes the gradients. Without gradients, only the loss is computed.
    options: dict[str, Any] = {"bias": bias, "ignore_index": ignore_index, "softcap": softcap}
    options |= {"logit_scale": logit_scale, "temperature": temperature, "workspace_mib": workspace_mib}
    need = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias))
    half = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    # In fp16, one power of two scales the gradients of all tokens, and it must be known before the first gradient is
    # computed.
    if not any(need) or half == torch.float16 or target.numel() == 0 or is_traced():
        return loss_of(fused_linear_logprobs(x, weight, target, **options))

    op = "loss_of_log_probs"
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be positive, got {temperature}.")
    if x.dim() != 3 or len(x) % together != 0:
        raise ValueError(f"{op}: x must be [B, T, C] with B a multiple of {together}, got {list(x.shape)}.")
    check_head(op, x, weight, bias, workspace_mib)
    check_arguments(op, tuple(x.shape[:-1]), len(weight), target, None, None, ignore_index, 0.0, softcap, "none", None)
    x, weight, bias = matching_dtypes(op, x, weight, bias)  # type: ignore[assignment]
    scaled_cap = None if softcap is None else softcap / temperature
    last: list[More] = []

    def run(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        loss, more, gradients = _loss_and_gradients(
            loss_of, x, weight, target, bias, together, uniform, need,
            LossOptions(ignore_index, softcap=scaled_cap, logit_scale=logit_scale / temperature), workspace_mib,
        )  # fmt: skip
        last[:] = [more]
        return loss, *gradients, loss.new_ones(())

    (loss,) = HandOver.apply(run, 4, (0, 1, 3), x, weight, target, bias)
    return loss, last[0]


def _loss_and_gradients(
    loss_of: Callable[[Tensor], tuple[Tensor, More]],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    together: int,
    uniform: bool,
    need: tuple[bool, ...],
    options: LossOptions,
    workspace_mib: int | None,
) -> tuple[Tensor, More, tuple[Tensor, Tensor, Tensor]]:
    """Compute the loss, the second result of ``loss_of``, and dx, dweight and dbias.

    A *unit* is a sequence, or several sequences that belong together. One group of units is processed at a time. The
    logits of the group are written in parts of ``step`` rows, and kept until the gradient of the group's
    log-probabilities is known. If the buffer cannot hold all parts, the first parts are overwritten and later
    recomputed.
    """
    B, T, C = x.shape
    V, N, unit = len(weight), B * T, together * T

    # Compute the number of units per group, and three numbers of rows: per group, in the buffer, and per part.
    rows = chunk_rows(N, V, x.element_size(), workspace_mib, trained=need[1])
    exceeds = workspace_mib is None and need[1]  # larger groups save additions to dweight
    group_units = cdiv(rows, unit) if exceeds else max(rows // unit, 1)
    most_rows = rows if workspace_mib is not None else max(rows, int(KEPT * N))
    group_rows = min(group_units * unit, N)
    if uniform and group_rows > most_rows and workspace_mib is None and B == together <= 2:
        return _one_unit(loss_of, x.contiguous(), weight, target, bias, need, options, min(rows, T))
    step = group_rows if group_rows <= most_rows else rows

    units = B // together
    x, target = x.contiguous().view(together, units, T, C), target.reshape(together, units, T)
    groups = [slice(start, start + group_units) for start in range(0, units, group_units)]
    gradients = Gradients(x.view(N, C), weight, need, len(groups) * cdiv(group_rows, step))
    dx = gradients.dx.view(x.shape) if need[0] else None
    buffer = logits_buffer(x.view(N, C), V, group_rows if group_rows <= most_rows else most_rows // step * step)
    # Log-probabilities that are not known yet are −1.
    log_probs = x.new_full(target.shape, -1.0, dtype=torch.promote_types(x.dtype, torch.float32))

    for group in groups:
        # Compute the log-probabilities [n] of the group and their logits, part by part.
        rows_x, y = x[:, group].reshape(-1, C), target[:, group].reshape(-1)
        parts = [slice(start, min(start + step, len(y))) for start in range(0, len(y), step)]
        dropped = max(len(parts) - len(buffer) // step, 0)  # parts whose logits are overwritten and recomputed
        group_log_probs, lse = log_probs.new_empty(len(y)), log_probs.new_empty(len(y), 2)
        logits = []
        for number, part in enumerate(parts):
            start = max(number - dropped, 0) * step
            logits.append(buffer[start : start + part.stop - part.start])
            write_logits(rows_x[part], weight, bias, logits[-1])
            statistics = token_statistics(logits[-1], y[part], None, *options)
            assert statistics is not None
            group_log_probs[part], lse[part] = statistics.log_probs, statistics.lse
        log_probs[:, group] = group_log_probs.view(log_probs[:, group].shape)

        # Compute the gradient of the log-probabilities, and then the gradient of the logits. The parts that are kept
        # come first.
        upstream = _upstream(loss_of, log_probs.view(B, T)).view(log_probs.shape)
        a = upstream[:, group].reshape(-1)
        d_rows = gradients.dx.new_empty(rows_x.shape) if need[0] else gradients.dx
        for number, part in sorted(enumerate(parts), key=lambda item: item[0] < dropped):
            if number < dropped:
                write_logits(rows_x[part], weight, bias, logits[number])
            token_statistics(
                logits[number], y[part], None, *options, lse=lse[part], a=a[part].contiguous(), gradient=logits[number]
            )
            gradients.add(logits[number], rows_x[part], d_rows[part] if need[0] else None)
        if dx is not None:
            dx[:, group] = d_rows.view(dx[:, group].shape)

    loss, more = loss_of(log_probs.view(B, T))
    del logits, buffer  # before the blocks of dweight are concatenated
    _, dweight, dbias = gradients.finish()
    return loss, more, (gradients.dx if dx is None else dx.view(B, T, C), dweight, dbias)


def _upstream(loss_of: Callable[[Tensor], tuple[Tensor, More]], log_probs: Tensor) -> Tensor:
    """Return the gradient [B, T] of the loss ``loss_of(log_probs)`` with respect to the negative log-probabilities."""
    with torch.enable_grad():
        leaf = log_probs.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(leaf)[0], leaf)
    return -gradient


def _one_unit(
    loss_of: Callable[[Tensor], tuple[Tensor, More]],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    need: tuple[bool, ...],
    options: LossOptions,
    step: int,
) -> tuple[Tensor, More, tuple[Tensor, Tensor, Tensor]]:
    """Compute `_loss_and_gradients` for a sequence or pair, if all targets of each sequence have the same gradient.

    What a sequence adds to the gradients of x, weight and bias is then proportional to this common gradient, which is
    called the factor of the sequence. The factors can be computed only when the log-probabilities of both sequences are
    known. The gradients of the first sequence are therefore computed as if its factor were 1, and are multiplied by the
    factor later. Only the logits of the second sequence are kept in the meantime.
    """
    (B, T, C), V = x.shape, len(weight)
    parts = [slice(start, min(start + step, T)) for start in range(0, T, step)]
    gradients = Gradients(x.view(B * T, C), weight, need, B * len(parts))
    dx = gradients.dx.view(x.shape) if need[0] else None
    buffer = logits_buffer(x.view(B * T, C), V, step if B == 1 else T)
    log_probs = x.new_empty(B, T, dtype=torch.promote_types(x.dtype, torch.float32))
    lse = log_probs.new_empty(T, 2)

    # Compute the log-probabilities of both sequences. The gradient of the first sequence's logits, for the factor 1, is
    # added to the sums. The second sequence's logits stay in the buffer.
    for number in range(B):
        for part in parts:
            logits = buffer[part] if number else buffer[: part.stop - part.start]
            write_logits(x[number, part], weight, bias, logits)
            statistics = token_statistics(
                logits, target[number, part], None, *options, gradient=None if number else logits
            )
            assert statistics is not None
            log_probs[number, part], lse[part] = statistics.log_probs, statistics.lse
            if not number:
                gradients.add(logits, x[0, part], None if dx is None else dx[0, part])

    # Compute the factor of the first sequence, and multiply the sums so far by this factor.
    a = _upstream(loss_of, log_probs)
    first = (target[0] != options.ignore_index).int().argmax(0, keepdim=True)
    factor = a[0].gather(0, first)[0]  # without waiting for the device
    gradients.scale(factor)
    if dx is not None:
        scale_(dx[0], factor)

    # Compute the gradient of the second sequence's logits.
    for part in parts if B == 2 else ():
        token_statistics(
            buffer[part], target[1, part], None, *options, lse=lse[part], a=a[1, part], gradient=buffer[part]
        )
        gradients.add(buffer[part], x[1, part], None if dx is None else dx[1, part])
    loss, more = loss_of(log_probs)
    flat, dweight, dbias = gradients.finish()
    return loss, more, (flat if dx is None else dx, dweight, dbias)
