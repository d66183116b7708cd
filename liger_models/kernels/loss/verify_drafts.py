"""Speculative sampling: decides which drafts (proposed tokens) are accepted, and draws other tokens in place of
rejected drafts.

Let p be the model's distribution for a token, and let q be the distribution from which the draft d of the token was
drawn. E_t and u are random numbers as in `seeded_scores`, where u belongs to the index V, which no token has::

    p = softmax(z)                              of the scores z, which by default are the logits x
    d is accepted if u · q_d < p_d
    token = d                                   if d is accepted
    token = argmax_t max(0, p_t − q_t) / E_t    if d is rejected
    token = argmax_t p_t / E_t                  if there is no draft, or if d is rejected and p = q
    log_prob = x_token − log Σ_t exp(x_t)

The chosen token has the distribution p. If d is rejected, the formula samples a token t with a probability proportional
to max(0, p_t − q_t): as in `seeded_scores`, each t has an exponential clock, here with this rate, and the clock of the
sampled token rings first. Each program reads the logits of a token twice: first to compute the sums, and then to choose
the token.

Source: https://arxiv.org/abs/2211.17192.
"""

import torch
from torch import Tensor

from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import has_ptx, on_device_of, tl, triton, use_triton
from liger_models.kernels.loss.seeded_scores import exponential, exponential_noise, uniform
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import contiguous_rows, exp, next_power_of_2, num_warps

BLOCK = 4096
"""Maximum number of vocabulary entries that a program reads per step."""


def verify_drafts_reference(
    logits: Tensor, scores: Tensor | None, drafts: Tensor, proposed: Tensor, draft_log_probs: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `verify_drafts` in plain PyTorch."""
    (rows, k, V), wide = proposed.shape, torch.promote_types(logits.dtype, torch.float32)
    noise = exponential_noise(seeds, 0, V + 1).to(wide).view(rows, k + 1, V + 1)
    p = (logits if scores is None else scores).to(wide).softmax(1).view(rows, k + 1, V)
    at_draft = proposed.to(wide).gather(2, drafts[..., None])
    q = (proposed.to(wide) - at_draft + draft_log_probs[..., None]).exp()
    ours, theirs = (x.gather(2, drafts[..., None])[..., 0] for x in (p[:, :k], q))
    agree = -torch.expm1(-noise[:, :k, V]) * theirs < ours

    # Compute the distribution after a rejection. If p and q are equal, no draft is rejected.
    rest = (p[:, :k] - q).clamp_min(0)
    rest = torch.where(rest.sum(2, keepdim=True) > 0, rest, p[:, :k])
    others = (torch.cat([rest, p[:, k:]], 1) / noise[..., :V]).argmax(2)
    chosen = torch.cat([torch.where(agree, drafts, others[:, :k]), others[:, k:]], 1)
    log_probs = logits.to(wide).log_softmax(1).gather(1, chosen.view(-1, 1))[:, 0]
    return chosen, agree, log_probs


@triton.jit
def _add_exponentials(most, total, x):
    """Add exp(x) to a running sum of exponentials in each lane, and return the new maxima and sums.

    ``most`` holds the maximum m of the numbers x so far in each lane, and ``total`` holds Σ exp(x − m).
    """
    higher = tl.maximum(most, x)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # −inf: the lane has no finite number yet
    return higher, total * exp(most - base) + exp(x - base)


@triton.jit
def _log_sum(most, total):
    """Combine the lanes' maxima and sums from `_add_exponentials` into one log-sum-exp."""
    highest = tl.max(most, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    # The highest number adds 1 to the sum. The sum is therefore below 1 only if no number is finite.
    return base + tl.log(tl.maximum(tl.sum(total * exp(most - base), 0), 1.0))


@triton.jit
def _verify_drafts_kernel(
    logits_ptr, scores_ptr, draft_ptr, proposed_ptr, draft_log_prob_ptr, seed_ptr, chosen_ptr, agree_ptr, log_prob_ptr,
    V, logits_n, scores_n, draft_n, K: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Accept the draft at one position of a row, or draw another token, and store the log-probability of the result."""
    await_previous(OVERLAPS)
    at = tl.program_id(0).to(tl.int64)
    row, index = at // (K + 1), at % (K + 1)
    lane = tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr + at)
    logits_ptr += at * logits_n
    z_ptr = logits_ptr
    if scores_ptr is not None:
        z_ptr = scores_ptr + at * scores_n

    # Compute the log-sum-exp of the logits and, if there are separate scores, of the scores.
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if scores_ptr is not None:
        z_most, z_total = most, total
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        x = tl.load(logits_ptr + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        most, total = _add_exponentials(most, total, x)
        if scores_ptr is not None:
            z = tl.load(z_ptr + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
            z_most, z_total = _add_exponentials(z_most, z_total, z)
    x_sum = _log_sum(most, total)
    z_sum = x_sum
    if scores_ptr is not None:
        z_sum = _log_sum(z_most, z_total)

    # Accept or reject the draft. The last token of a row has no draft; the previous token's draft is read, but not
    # used.
    before = tl.minimum(index, K - 1)
    proposed_ptr += (row * K + before) * V
    draft = tl.load(draft_ptr + row * draft_n + before)
    log_q = tl.load(draft_log_prob_ptr + row * K + before)
    q_sum = tl.load(proposed_ptr + draft).to(tl.float32) - log_q
    draft_p = exp(tl.load(z_ptr + draft).to(tl.float32) - z_sum)
    zero = tl.zeros([], tl.int64)
    agrees = (uniform(seed, zero, V + zero) * exp(log_q) < draft_p) & (index < K)

    # Draw another token. Each lane has its own best token for max(0, p − q), and its own best token for p.
    best = tl.zeros([BLOCK], tl.float32)
    best_p = tl.zeros([BLOCK], tl.float32)
    other, other_p = lane, lane
    for start in range(0, V, BLOCK):
        token = start + lane
        inside = token < V
        z = tl.load(z_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
        s = tl.load(proposed_ptr + token, mask=inside & (index < K), other=float("-inf")).to(tl.float32)
        p = exp(z - z_sum)
        rate = 1.0 / exponential(seed, zero, token, PTX)
        rest = tl.maximum(p - exp(s - q_sum), 0.0) * rate
        p = p * rate
        other = tl.where(rest > best, token, other)
        best = tl.maximum(best, rest)
        other_p = tl.where(p > best_p, token, other_p)
        best_p = tl.maximum(best_p, p)
    nothing = tl.max(best, 0) == 0.0  # p and q are equal
    best, other = tl.where(nothing, best_p, best), tl.where(nothing, other_p, other)
    token = tl.min(tl.where(best == tl.max(best, 0), other, V), 0)
    token = tl.where(agrees, draft, tl.minimum(token, V - 1).to(tl.int64))

    tl.store(chosen_ptr + at, token)
    tl.store(agree_ptr + row * K + before, agrees, mask=index < K)
    tl.store(log_prob_ptr + at, tl.load(logits_ptr + token).to(tl.float32) - x_sum)


def _verify_drafts(
    logits: Tensor, scores: Tensor | None, drafts: Tensor, proposed: Tensor, draft_log_probs: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    chosen, agree, log_probs = _verify_drafts_fake(logits, scores, drafts, proposed, draft_log_probs, seeds)
    logits, drafts = contiguous_rows(logits), contiguous_rows(drafts)
    scores = None if scores is None else contiguous_rows(scores)
    N, V = logits.shape
    block = min(next_power_of_2(V), BLOCK)
    if N:
        with on_device_of(logits):
            _verify_drafts_kernel[(N,)](
                logits, scores, drafts, proposed.contiguous(), draft_log_probs.contiguous(), seeds.contiguous(), chosen,
                agree, log_probs, V, logits.stride(0), 0 if scores is None else scores.stride(0), drafts.stride(0),
                K=drafts.shape[1], BLOCK=block, PTX=has_ptx(logits), **overlap(logits), num_warps=num_warps(block),
            )  # fmt: skip
    return chosen, agree, log_probs


def _verify_drafts_fake(logits, scores, drafts, proposed, draft_log_probs, seeds):
    rows, k = drafts.shape
    return (
        drafts.new_empty(rows, k + 1),
        drafts.new_empty(rows, k, dtype=torch.bool),
        draft_log_probs.new_empty(rows * (k + 1)),
    )


FORWARD = define_op("verify_drafts", _verify_drafts, _verify_drafts_fake)


def verify_drafts(
    logits: Tensor, scores: Tensor | None, drafts: Tensor, proposed: Tensor, draft_log_probs: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts or draw other tokens, such that all tokens have the model's distribution. The op has no backward.

    Args:
        logits: [rows · (k + 1), V], float32, float16 or bfloat16; the tokens of a row are consecutive.
        scores: in the shape of the logits; the scores from which the tokens are drawn, such as logits with a
            temperature. None for the logits.
        drafts: [rows, k] int64, where k is at least 1.
        proposed: [rows, k, V], the scores from which the drafts were drawn.
        draft_log_probs: [rows, k] fp32, the log-softmax of these scores at the drafts.
        seeds: [rows · (k + 1)] int64, not negative, drawn at random for each call.

    Returns:
        ``(tokens, accepted, log_probs)``: [rows, k + 1] int64, [rows, k] bool, and [rows · (k + 1)] fp32. ``accepted``
        says whether each draft is accepted, regardless of the drafts before it. ``log_probs`` is the log-softmax of the
        logits at the tokens.

    Raises:
        ValueError: the shapes do not match.
    """
    rows, k = drafts.shape
    N, V = rows * (k + 1), proposed.shape[-1]
    fits = k > 0 and logits.shape == (N, V) and (scores is None or scores.shape == logits.shape)
    if not fits or proposed.shape != (rows, k, V) or draft_log_probs.shape != (rows, k) or seeds.shape != (N,):
        raise ValueError(
            f"verify_drafts: for drafts [{rows}, {k}], logits and scores must be [{N}, V], proposed [{rows}, {k}, V], "
            f"draft_log_probs [{rows}, {k}] and seeds [{N}], got {list(logits.shape)}, "
            f"{'none' if scores is None else list(scores.shape)}, {list(proposed.shape)}, "
            f"{list(draft_log_probs.shape)} and {list(seeds.shape)}."
        )
    arguments = logits, scores, drafts, proposed, draft_log_probs, seeds
    if not use_triton(logits):
        return verify_drafts_reference(*arguments)
    return FORWARD(*arguments)
