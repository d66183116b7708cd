"""For each row of logits, choose the most likely token or sample a token, and compute its log-probability, in one pass.

::

    token = argmax_t z_t                             of the scores z, which by default are the logits x
    token = argmax_t (z_t − log E_t)                 with seeds, a sample from softmax(z); E as in `seeded_scores`
    log_prob = x_token − log Σ_t exp(x_t)

If several tokens have the highest score, the first of these tokens is chosen. The sums are in fp32. For a large
vocabulary, several programs read the logits of a row, and a second kernel combines their results in a fixed order.

Source: https://arxiv.org/abs/1411.0030 (Gumbel-max).
"""

import torch
from torch import Tensor

from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import has_ptx, on_device_of, tl, triton, use_triton
from liger_models.kernels.loss.seeded_scores import exponential, seeded_scores_reference
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, contiguous_rows, exp, log2, next_power_of_2, num_warps

BLOCK = 4096
"""Maximum number of vocabulary entries that a program reads. A program reads its entries at once: it then subtracts one
maximum from all logits, and computes one exponential per logit."""


def choose_tokens_reference(
    logits: Tensor, scores: Tensor | None = None, seeds: Tensor | None = None, steps: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `choose_tokens` in plain PyTorch."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    z = (logits if scores is None else scores).to(wide)
    if seeds is not None:
        assert steps is not None
        z = seeded_scores_reference(z, seeds, steps)
    tokens = z.argmax(1)
    return tokens, logits.to(wide).log_softmax(1).gather(1, tokens[:, None])[:, 0]


@triton.jit
def _store_choice(row, token, most, total, logits_ptr, token_ptr, log_prob_ptr, V, logits_n):
    """Store the chosen token of a row, and its log-probability. ``most`` + log(``total``) is the row's log-sum-exp."""
    x = tl.load(logits_ptr + row * logits_n + token).to(tl.float32)
    tl.store(token_ptr + row, token.to(tl.int64))
    # The highest logit adds 1 to the sum. The sum is therefore below 1 only if no logit is finite.
    # `tl.maximum` would hide NaN.
    tl.store(log_prob_ptr + row, x - most - tl.log(tl.where(total < 1.0, 1.0, total)))


@triton.jit
def _choose_tokens_kernel(
    logits_ptr, scores_ptr, seed_ptr, step_ptr, token_ptr, log_prob_ptr, parts_ptr, index_ptr, V, logits_n, scores_n,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Choose the token with the best score among BLOCK tokens of a row, and compute the log-sum-exp of their logits.

    If a row has several PARTS, store four results for the program's part: the best score, the maximum of the logits, Σ
    exp(logit − maximum), and the index of the best token.
    """
    await_previous(OVERLAPS)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * logits_n + token, mask=token < V, other=float("-inf")).to(tl.float32)
    z = x
    if scores_ptr is not None:
        z = tl.load(scores_ptr + row * scores_n + token, mask=token < V, other=float("-inf")).to(tl.float32)
    if seed_ptr is not None:
        noise = exponential(tl.load(seed_ptr + row), tl.load(step_ptr + row), token, PTX)
        z = z * 1.4426950408889634 - log2(noise, PTX)  # the score divided by log 2, which saves an instruction

    highest = tl.max(x, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # −inf: all logits of the part are −inf
    total = tl.sum(exp(x - base), 0)
    # If tokens have equal scores, the first token is chosen.
    score = tl.max(z, 0)
    token = tl.minimum(tl.min(tl.where(z == score, token, V), 0), V - 1)
    if PARTS == 1:
        _store_choice(row, token, base, total, logits_ptr, token_ptr, log_prob_ptr, V, logits_n)
    else:
        at = row * PARTS + part
        tl.store(parts_ptr + 3 * at, score)
        tl.store(parts_ptr + 3 * at + 1, highest)
        tl.store(parts_ptr + 3 * at + 2, total)
        tl.store(index_ptr + at, token)


@triton.jit
def _combine_choices_kernel(
    logits_ptr, parts_ptr, index_ptr, token_ptr, log_prob_ptr, V, logits_n,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Combine the results for the parts of a row: choose the best of their best tokens, and compute the log-sum-exp of
    all logits from their sums.
    """
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    at, inside = row * PARTS + part, part < PARTS
    score = tl.load(parts_ptr + 3 * at, mask=inside, other=float("-inf"))
    most = tl.load(parts_ptr + 3 * at + 1, mask=inside, other=float("-inf"))
    total = tl.load(parts_ptr + 3 * at + 2, mask=inside, other=0.0)
    index = tl.load(index_ptr + at, mask=inside, other=V)
    token = tl.minimum(tl.min(tl.where(score == tl.max(score, 0), index, V), 0), V - 1)
    highest = tl.max(most, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(total * exp(most - base), 0)
    _store_choice(row, token, base, total, logits_ptr, token_ptr, log_prob_ptr, V, logits_n)


def _choose_tokens(
    logits: Tensor, scores: Tensor | None, seeds: Tensor | None, steps: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = contiguous_rows(logits)
    scores, seeds, steps = (None if x is None else x.contiguous() for x in (scores, seeds, steps))
    N, V = logits.shape
    tokens, log_probs = _choose_tokens_fake(logits, scores, seeds, steps)
    if not N:
        return tokens, log_probs
    block = min(next_power_of_2(V), BLOCK)
    parts = cdiv(V, block)
    results = index = None
    if parts > 1:
        results = logits.new_empty(N, parts, 3, dtype=torch.float32)
        index = logits.new_empty(N, parts, dtype=torch.int32)
    strides = logits.stride(0), 0 if scores is None else scores.stride(0)
    with on_device_of(logits):
        _choose_tokens_kernel[(parts, N)](
            logits, scores, seeds, steps, tokens, log_probs, results, index, V, *strides,
            PARTS=parts, BLOCK=block, PTX=has_ptx(logits), **overlap(logits),
            num_warps=num_warps(block // 2),  # 32 elements per thread, because each reduction has a cost per warp
        )  # fmt: skip
        if parts > 1:
            _combine_choices_kernel[(N,)](
                logits, results, index, tokens, log_probs, V, strides[0],
                PARTS=parts, BLOCK=next_power_of_2(parts), **overlap(logits), num_warps=1,
            )  # fmt: skip
    return tokens, log_probs


def _choose_tokens_fake(logits, scores, seeds, steps):
    N = logits.shape[0]
    return logits.new_empty(N, dtype=torch.int64), logits.new_empty(N, dtype=torch.float32)


FORWARD = define_op("choose_tokens", _choose_tokens, _choose_tokens_fake)


def choose_tokens(
    logits: Tensor, scores: Tensor | None = None, seeds: Tensor | None = None, steps: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row, and compute its log-probability. The op has no backward.

    Args:
        logits: [N, V], float32, float16 or bfloat16.
        scores: [N, V], from which the tokens are chosen, such as logits with a temperature; None for the logits.
        seeds: [N] int64, not negative, to draw from softmax(scores); None for the most likely tokens.
        steps: [N] int64, number of tokens generated so far, from 0 to 2³² − 1; needed with seeds.

    Returns:
        The tokens [N] int64, and the log-softmax of the logits at these tokens, [N] fp32.

    Raises:
        ValueError: the shapes do not match, or only one of seeds and steps is given.
    """
    if logits.dim() != 2 or not logits.shape[1] or (scores is not None and scores.shape != logits.shape):
        raise ValueError(
            f"choose_tokens: logits and scores must be [N, V] with V > 0, got {list(logits.shape)} and "
            f"{'none' if scores is None else list(scores.shape)}."
        )
    if (seeds is None) != (steps is None) or any(x is not None and x.shape != logits.shape[:1] for x in (seeds, steps)):
        shapes = ["none" if x is None else list(x.shape) for x in (seeds, steps)]
        raise ValueError(
            f"choose_tokens: seeds and steps must both be [{len(logits)}], or None, got {shapes[0]} and {shapes[1]}."
        )
    if not use_triton(logits):
        return choose_tokens_reference(logits, scores, seeds, steps)
    return FORWARD(logits, scores, seeds, steps)
