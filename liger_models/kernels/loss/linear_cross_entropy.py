"""Cross entropy of the logits ``x @ weightᵀ + bias``. Only one chunk of the logits is in memory at a time.

The rows of x are processed in chunks whose logits fit into a workspace. For each chunk, a matrix product writes the
logits into a reused buffer, one kernel computes the loss and overwrites the logits with their gradient, and two matrix
products compute the chunk's dx and its part of dweight. The formulas for a row are the same as in `cross_entropy`.

- A scalar loss (reduction "mean" or "sum") has a single upstream gradient, which is not yet known in the forward. The
  forward computes all gradients for an upstream gradient of 1, and the backward multiplies them by the upstream
  gradient. The forward and the backward together take three matrix products. The forward saves dx in the dtype of x,
  dweight in bf16 (in fp32 if the weight is not in bf16), and dbias in fp32. The first backward scales the saved
  gradients in place and returns them, so there is never a second copy of dweight. The forward also saves x, so that a
  second backward (``retain_graph``) can recompute the gradients.
- Per-token results (reduction "none", or ``return_log_probs``) have one upstream gradient per token, so the backward
  must recompute the logits. The forward and the backward together take four matrix products. The forward saves x,
  weight and lse.

In fp16, the gradients of a mean over many tokens could underflow. The loss of each token is multiplied by a factor,
which for a mean is 1 / (number of tokens). Before the gradient of the logits is rounded, the factors of all tokens are
therefore divided by the same power of two. At the end, the gradients are multiplied by this power of two, which causes
no rounding error.

The host never waits for the device. Gradients that are not needed, such as the gradients of frozen inputs, are not
computed. The loop over chunks is in `row_chunks.py`.

If the vocabulary is sharded over ranks (`VocabShard`), the logits are never gathered. For each token of a chunk, each
rank sends four numbers about its shard: the maximum of the logits z, log Σ exp(z − maximum), the logit of the target if
the target is in the shard, and the sum for label smoothing. From the numbers of all ranks, each rank computes the
statistics of the whole vocabulary, and the gradient of its shard's logits. Each rank's dx is a partial sum.

Source: https://arxiv.org/abs/2410.10989 (Liger Kernel), https://arxiv.org/abs/2411.09009 (Cut Your Losses);
https://arxiv.org/abs/1909.08053 for the sharded vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_models.common.errors import check_floating
from liger_models.common.ops import Argument, Op
from liger_models.distributed.collectives import Group, all_gather
from liger_models.kernels.loss.cross_entropy import (
    CrossEntropyOutput,
    LossOptions,
    TokenStatistics,
    check_arguments,
    cross_entropy_reference,
    reduce,
    token_accuracy,
    token_scale,
    token_statistics,
)
from liger_models.kernels.loss.row_chunks import check_head, chunk_rows, matching_dtypes, walk_chunks
from liger_models.kernels.loss.scalar_loss import (
    HeadGradients,
    HeadNeeds,
    fused_loss,
    fused_loss_fake,
    gradients_fake,
    save_scalar_loss,
    scalar_loss_backward,
    scaled,
    where_needed,
    without_exponent,
)


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: object
) -> CrossEntropyOutput:
    """Compute `linear_cross_entropy` in plain PyTorch: all logits at once, followed by `cross_entropy_reference`."""
    return cross_entropy_reference(F.linear(x, weight, bias), target, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class VocabShard:
    """A rank's shard of the vocabulary. The rows of the head's weight are split as ``torch.chunk`` splits them.

    Attributes:
        ranks: the process group over which the vocabulary is sharded.
        vocabulary: V, the size of the whole vocabulary.
    """

    ranks: Group
    vocabulary: int

    @property
    def shard_size(self) -> int:
        """Number of vocabulary entries in every shard except the last shard, which may be smaller."""
        return -(-self.vocabulary // self.ranks.size)

    @property
    def start(self) -> int:
        """Index of the first vocabulary entry in this rank's shard."""
        return self.shard_size * self.ranks.rank

    @property
    def count(self) -> int:
        """Number of vocabulary entries in this rank's shard."""
        return max(min(self.shard_size, self.vocabulary - self.start), 0)

    def check(self) -> "VocabShard":
        """Return this object if every rank's shard has at least one vocabulary entry.

        Raises:
            ValueError: the shard of a rank would be empty.
        """
        size = self.ranks.size
        if not self.shard_size * (size - 1) < self.vocabulary:
            raise ValueError(
                f"VocabShard: vocab_size ({self.vocabulary}) must be enough for {size} ranks of {self.shard_size} "
                "words each."
            )
        return self


def _vocab_parallel_statistics(
    logits: Tensor, target: Tensor, options: LossOptions, vocab_shard: VocabShard
) -> TokenStatistics:
    """Compute `token_statistics` over a sharded vocabulary, from the logits of this rank's shard."""
    ignore_index, smoothing, z_loss = options[:3]
    valid = target != ignore_index

    # Compute the statistics of the shard. A target of another rank is replaced by the shard's first entry, whose logit
    # isn't used.
    in_shard = valid & (target >= vocab_shard.start) & (target < vocab_shard.start + vocab_shard.count)
    local_target = torch.where(valid, (target - vocab_shard.start).where(in_shard, 0), IGNORED)
    local_options = options._replace(ignore_index=IGNORED, z_loss=0.0)
    local = token_statistics(logits, local_target, None, *local_options, vocabulary=vocab_shard.vocabulary)
    assert local is not None
    maximum, log_total = local.lse[:, 0], local.lse[:, 1].log()
    # In the loss over the shard, label smoothing is the term ε · lse − ε/V · Σ z. Solve for ε/V · Σ z.
    mean_share = smoothing * (maximum + log_total) - local.loss + (smoothing - 1) * local.log_probs

    # Exchange the four numbers of each token.
    numbers = torch.stack([maximum, log_total, local.log_probs + log_total, mean_share])  # [4, N]
    numbers = all_gather(numbers, vocab_shard.ranks)  # [R, 4, N]
    maxima, log_totals, target_logits, mean_shares = numbers.unbind(1)  # [R, N] each

    # Compute the statistics of the whole vocabulary.
    maximum = maxima.amax(0)
    log_total = (maxima - maximum + log_totals).logsumexp(0)
    lse = maximum + log_total
    owner = (target.where(valid, 0) // vocab_shard.shard_size)[None]
    # This avoids the difference lse − z_y, which would lose digits for a target near the maximum.
    log_probs = ((maxima - maximum).gather(0, owner) + target_logits.gather(0, owner))[0] - log_total
    squared = z_loss * lse.square()
    loss = (smoothing - 1) * log_probs + smoothing * lse - mean_shares.sum(0) + squared
    keep = lambda tensor: tensor.where(valid, 0)
    lse = torch.stack([maximum, log_total.exp()], 1).where(valid[:, None], 1)
    return TokenStatistics(keep(loss), keep(squared), keep(log_probs), lse, target.new_empty(0))


def _local_target(target: Tensor, ignore_index: int, vocab_shard: VocabShard) -> Tensor:
    """Convert targets to indices into this rank's shard.

    A target that is in the shard of another rank becomes −1. An ignored target becomes `IGNORED`.
    """
    in_shard = (target >= vocab_shard.start) & (target < vocab_shard.start + vocab_shard.count)
    return torch.where(target == ignore_index, IGNORED, (target - vocab_shard.start).where(in_shard, -1))


def _shard_from_op(name: str, size: int, rank: int, vocabulary: int) -> VocabShard:
    return VocabShard(Group(name, size, rank), vocabulary)


SHARD = Argument(
    "str {0}_group='', int {0}_ranks=1, int {0}_rank=0, int {0}_vocabulary=0",
    lambda shard: (shard.ranks.name, shard.ranks.size, shard.ranks.rank, shard.vocabulary),
    _shard_from_op,
)
"""Represents a `VocabShard` by arguments of an op. The default values mean that the vocabulary is not sharded."""

IGNORED = -100
"""Value that replaces ``ignore_index`` in targets that are indices into a shard. There, -1 marks a target in the shard
of another rank, so an ``ignore_index`` of -1 would be ambiguous."""


class LinearCrossEntropyInputs(NamedTuple):
    """Inputs of the op `linear_cross_entropy`. ``factors`` [N] holds the factor of each token's loss."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    factors: Tensor
    options: LossOptions
    rows: int
    predict: bool
    needs: HeadNeeds
    shard: Annotated[VocabShard | None, SHARD] = None


class LinearCrossEntropyOutputs(NamedTuple):
    """Outputs of the op `linear_cross_entropy`: the loss and other results, then the gradients and their scale, as
    `HandOver` requires.
    """

    loss: Tensor
    z_loss: Tensor
    predicted: Tensor
    gradients: HeadGradients
    scale: Tensor


class TokensInputs(NamedTuple):
    """Inputs of the op `linear_cross_entropy_tokens`. Its outputs are `TokenStatistics`."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    options: LossOptions
    rows: int
    predict: bool
    shard: Annotated[VocabShard | None, SHARD] = None


class TokensSaved(NamedTuple):
    """What `linear_cross_entropy_tokens` saves for the backward: its inputs, and ``lse`` [N, 2] (max z and Σ exp(z −
    max z) of each row).
    """

    inputs: TokensInputs
    lse: Tensor


class TokensUpstream(NamedTuple):
    """Inputs of the op `linear_cross_entropy_tokens_backward`.

    ``a`` [N] and ``c`` [N] are the upstream gradients of the losses and of the log-probabilities.
    """

    a: Tensor | None
    c: Tensor | None
    saved: TokensSaved
    needs: HeadNeeds


def _walk_chunks(
    inputs: LinearCrossEntropyInputs | TokensInputs,
    needs: HeadNeeds,
    *,
    predict: bool = False,
    a: Tensor | None = None,
    c: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[list[Tensor], HeadGradients]:
    """Process all rows in chunks: compute the statistics of the rows, and the needed gradients (dx, dweight and dbias).

    If ``lse`` is given, the statistics are known and are not computed again. ``a`` [N] and ``c`` [N] are the upstream
    gradients of the losses and of the log-probabilities.
    """
    x, target, shard, options = inputs.x.contiguous(), inputs.target.contiguous(), inputs.shard, inputs.options
    local_target, local_options, vocabulary = target, options, None
    if shard is not None:
        local_target = _local_target(target, options.ignore_index, shard)
        local_options, vocabulary = options._replace(ignore_index=IGNORED), shard.vocabulary

    def statistics(logits: Tensor, part: slice, gradient: Tensor) -> Sequence[Tensor] | None:
        results, part_lse = None, None if lse is None else lse[part]
        if shard is not None and part_lse is None:
            results = _vocab_parallel_statistics(logits, target[part], options, shard)
            part_lse = results.lse

        # With a sharded vocabulary, this launch computes only the gradient.
        if part_lse is None or any(needs):
            local_results = token_statistics(
                logits, local_target[part], inputs.class_weight, *local_options, predict=predict, lse=part_lse,
                a=None if a is None else a[part], c=None if c is None else c[part],
                gradient=gradient if any(needs) else None, vocabulary=vocabulary,
            )  # fmt: skip
            results = local_results if results is None else results
        return results

    results, *gradients = walk_chunks(x, inputs.weight, inputs.bias, inputs.rows, needs, statistics)
    if lse is None and not results:
        empty = lambda *size: x.new_empty(0, *size, dtype=torch.promote_types(x.dtype, torch.float32))
        results = [empty(), empty(), empty(), empty(2), target.new_empty(0)]  # an op must not return one tensor twice
    return results, HeadGradients(*gradients)


def _loss(inputs: LinearCrossEntropyInputs) -> LinearCrossEntropyOutputs:
    a, scale = without_exponent(inputs.factors, inputs.x.dtype)
    statistics, gradients = _walk_chunks(inputs, inputs.needs, predict=inputs.predict, a=a)
    loss, z_loss, _, _, predicted = statistics
    loss = (loss * inputs.factors).sum()
    z_loss = (z_loss * inputs.factors).sum() if inputs.options.z_loss else torch.zeros_like(loss)
    return LinearCrossEntropyOutputs(loss, z_loss, predicted, gradients, scale)


def _loss_fake(inputs: LinearCrossEntropyInputs) -> LinearCrossEntropyOutputs:
    x = inputs.x
    loss, z_loss = (x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
    predicted = inputs.target.new_empty(x.shape[0] if inputs.predict else 0)
    return LinearCrossEntropyOutputs(loss, z_loss, predicted, *fused_loss_fake(x, inputs.weight, inputs.needs))


LINEAR_CROSS_ENTROPY = Op("linear_cross_entropy", _loss, _loss_fake)
LINEAR_CROSS_ENTROPY.differentiable(save_scalar_loss, scalar_loss_backward)


def _tokens(inputs: TokensInputs) -> TokenStatistics:
    statistics, _ = _walk_chunks(inputs, HeadGradients(False, False, False), predict=inputs.predict)
    return TokenStatistics(*statistics)


def _tokens_fake(inputs: TokensInputs) -> TokenStatistics:
    x = inputs.x
    row = lambda *size: x.new_empty(x.shape[0], *size, dtype=torch.promote_types(x.dtype, torch.float32))
    predicted = inputs.target.new_empty(x.shape[0] if inputs.predict else 0)
    return TokenStatistics(row(), row(), row(), row(2), predicted)


def _tokens_backward(upstream: TokensUpstream) -> HeadGradients:
    (inputs, lse), a, c = upstream.saved, upstream.a, upstream.c
    dtypes = inputs.x.dtype, inputs.weight.dtype, inputs.weight.dtype
    # Both upstream gradients are divided by the same power of two.
    a = lse.new_zeros(len(lse)) if a is None else a
    factors, scale = without_exponent(torch.cat([a, a.new_empty(0) if c is None else c]), dtypes[0])
    a, c = factors[: len(a)], None if c is None else factors[len(a) :]
    _, gradients = _walk_chunks(inputs, upstream.needs, a=a, c=c, lse=lse)
    return HeadGradients(*scaled(gradients, scale, dtypes))


def _tokens_backward_fake(upstream: TokensUpstream) -> HeadGradients:
    return gradients_fake(upstream.saved.inputs.x, upstream.saved.inputs.weight, upstream.needs)


def _save_tokens(ctx: Any, inputs: TokensInputs, outputs: TokenStatistics, needs: HeadNeeds) -> TokensSaved:
    ctx.mark_non_differentiable(outputs.z_loss, outputs.lse, outputs.predicted)
    return TokensSaved(inputs, outputs.lse)


def _tokens_gradients(saved: TokensSaved, needs: HeadNeeds, upstream: Any) -> HeadGradients:
    a, c = upstream.loss, upstream.log_probs
    if a is None and c is None:
        return HeadGradients()
    return where_needed(LINEAR_CROSS_ENTROPY_TOKENS_BACKWARD(TokensUpstream(a, c, saved, needs)), needs)


LINEAR_CROSS_ENTROPY_TOKENS = Op("linear_cross_entropy_tokens", _tokens, _tokens_fake)
LINEAR_CROSS_ENTROPY_TOKENS_BACKWARD = Op(
    "linear_cross_entropy_tokens_backward", _tokens_backward, _tokens_backward_fake
)
LINEAR_CROSS_ENTROPY_TOKENS.differentiable(_save_tokens, _tokens_gradients)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
    return_z_loss: bool = False,
    return_log_probs: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    workspace_mib: int | None = None,
    vocab_shard: VocabShard | None = None,
) -> CrossEntropyOutput:
    """Compute `cross_entropy` of ``x @ weightᵀ + bias`` and ``target``, holding the logits of only one chunk at a time.

    Args:
        x: [..., C], floating-point.
        weight: [V, C], in the dtype of x.
        target: [...], int64 in [0, V) or ``ignore_index``.
        bias: [V], in the dtype of x.
        workspace_mib: maximum size of the logits buffer in MiB. A chunk has at least 128 rows, even if the buffer is
            then larger. The default is 640 MiB for up to 8192 tokens, and grows in proportion to the number of tokens
            up to 65,536 tokens. If V > 327,680 (in fp32, if V > 163,840), the default buffer holds an eighth of the
            rows, but at most 8192 rows. If the weight needs no gradient, the default buffer has at most 1536 rows.
        vocab_shard: this rank's shard if the vocabulary is sharded over ranks. weight and bias then hold only the rows
            of the shard. All ranks pass the same x and get the same loss. The gradient of x is a partial sum, which
            `collectives.copy_to_region` adds up over the ranks. A shard cannot be combined with ``class_weight``,
            ``return_token_accuracy`` or ``return_predicted_tokens``.
        Others: as in `cross_entropy`. The results of ``return_log_probs`` and of reduction "none" are differentiable
            per token, and their backward recomputes the logits.

    Returns:
        `CrossEntropyOutput`.

    Raises:
        ValueError: shapes do not match, or an option or (on the CPU) a target is out of range.
        TypeError: a dtype is wrong.
    """
    op = "linear_cross_entropy"
    predict = return_token_accuracy or return_predicted_tokens
    check_head(op, x, weight, bias, workspace_mib)
    check_floating(op, class_weight=class_weight, token_weight=token_weight)
    V = weight.shape[0] if vocab_shard is None else vocab_shard.vocabulary
    if vocab_shard is not None:
        if class_weight is not None or predict:
            raise ValueError(
                f"{op}: class_weight, return_token_accuracy and return_predicted_tokens do not work with "
                "vocab_shard. Leave them out."
            )
        if not len(weight) == vocab_shard.count > 0:
            raise ValueError(
                f"{op}: weight must have the {vocab_shard.count} > 0 rows of this rank's shard, got {len(weight)}."
            )
    check_arguments(
        op, tuple(x.shape[:-1]), V, target, class_weight, token_weight,
        ignore_index, label_smoothing, softcap, reduction, num_items,
    )  # fmt: skip
    x, weight, bias = matching_dtypes(op, x, weight, bias)  # type: ignore[assignment]
    flat, y = x.reshape(-1, x.shape[-1]), target.reshape(-1)

    # Compute the number of rows per chunk. It is the same on all ranks, because ranks communicate after each chunk.
    words = V if vocab_shard is None else vocab_shard.shard_size
    rows = chunk_rows(flat.shape[0], words, x.element_size(), workspace_mib, trained=weight.requires_grad)

    # Compute the factor of each token's loss under the reduction, [N].
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    factors = token_scale(
        y, class_weight, token_weight, ignore_index, reduction, num_items, torch.promote_types(x.dtype, torch.float32)
    )

    # A scalar loss computes its gradients in the forward. Per-token results recompute the logits in the backward.
    if reduction == "none" or return_log_probs:
        loss, z_part, log_probs, _, predicted = LINEAR_CROSS_ENTROPY_TOKENS(
            TokensInputs(flat, weight, y, bias, class_weight, options, rows, predict, vocab_shard)
        )
        loss = reduce(loss * factors, reduction, target.shape)
        z_part = reduce(z_part * factors, reduction, target.shape)
        log_probs = log_probs.view(target.shape)
    else:
        inputs = LinearCrossEntropyInputs(
            flat, weight, y, bias, class_weight, factors, options, rows, predict, HeadGradients(), vocab_shard
        )
        loss, z_part, predicted, *_ = fused_loss(LINEAR_CROSS_ENTROPY, inputs)
        log_probs = None
    return CrossEntropyOutput(
        loss=loss,
        z_loss=z_part if return_z_loss else None,
        log_probs=log_probs if return_log_probs else None,
        token_accuracy=token_accuracy(predicted, y, ignore_index) if return_token_accuracy else None,
        predicted_tokens=predicted.view(target.shape) if return_predicted_tokens else None,
    )
