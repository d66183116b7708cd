"""RMSNorm of heads held as pairs x1, x2 [ROWS, BLOCK], for `qk_norm_rope` and `qkv_norm_rope`.

The norm is over one head (a row), or with WHOLE over all heads of a program. Backward, with s the weight times the
gradient of the normed head::

    dx = r · (s − x · r² · mean(s · x))
"""

from torch import Tensor

from liger_models.kernels.dispatch import fitting_stages, num_programs, tl, triton
from liger_models.kernels.rope.rope import store_heads

HEAD_WARPS_PER_SM, HEAD_STAGES = 64, 4
WHOLE_WARPS_PER_SM, WHOLE_STAGES = 16, 3
"""For the backward with weight gradients, which each program sums over its tokens: warps per multiprocessor, and tokens
that a program has in flight if shared memory holds them. HEAD is for norms of single heads, WHOLE of all heads. On an
H200 the backward with 32 + 8 and 32 + 32 heads of 128 reaches 0.81 and 0.99 of copy bandwidth; with one token in flight
0.73 and 0.87."""


@triton.jit
def _mean(x, count, WHOLE: tl.constexpr):
    """The mean over ``count`` entries, given their sums by pair, for each row [ROWS, 1] or with WHOLE for all rows."""
    return (tl.sum(x) if WHOLE else tl.sum(x, 1)[:, None]) / count


@triton.jit
def inverse_rms(x1, x2, count, eps, WHOLE: tl.constexpr):
    """r of each head [ROWS, 1], or with WHOLE of all heads."""
    return 1.0 / tl.sqrt(_mean(x1 * x1 + x2 * x2, count, WHOLE) + eps)


@triton.jit
def norm_gradient(x1, x2, s1, s2, rstd, count, WHOLE: tl.constexpr):
    """dx as pairs, [ROWS, BLOCK] each."""
    along = rstd * rstd * _mean(s1 * x1 + s2 * x2, count, WHOLE)
    return rstd * (s1 - x1 * along), rstd * (s2 - x2 * along)


@triton.jit
def store_weight_gradients(
    dw_ptr, program, is_query, is_key, dw1, dw2, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Sum a program's weight gradients over its queries and over its keys, and store them in dw [programs, 2, D]."""
    one = tl.arange(0, 1)[:, None]
    for part in tl.static_range(2):
        heads = is_key if part == 1 else is_query
        sum1 = tl.sum(tl.where(heads, dw1, 0.0), 0)[None, :]  # [1, BLOCK]
        sum2 = tl.sum(tl.where(heads, dw2, 0.0), 0)[None, :]
        row = program * 2 + part
        store_heads(dw_ptr + row * D + one, one == 0, sum1, sum2, D, HALF, BLOCK, INTERLEAVED)


def backward_launch(packed: Tensor, constants: dict[str, int], need_dw: bool, whole: bool = False) -> tuple[int, int]:
    """For each chunk of heads, how many programs share the tokens, and how many tokens each has in flight.

    Args:
        packed: [B, T, W].
        constants: the launch's constants, with CHUNKS, ROWS, BLOCK and num_warps.
        need_dw: whether programs sum a weight gradient. If not, each program takes one token.
        whole: whether the norm is over all heads.
    """
    tokens = packed.shape[0] * packed.shape[1]
    warps, stages = (WHOLE_WARPS_PER_SM, WHOLE_STAGES) if whole else (HEAD_WARPS_PER_SM, HEAD_STAGES)
    token_bytes = 2 * constants["ROWS"] * 2 * constants["BLOCK"] * packed.element_size()  # x and its gradient
    programs = num_programs(packed, warps // constants["num_warps"])
    shares = min(tokens, max(programs // constants["CHUNKS"], 1)) if need_dw else tokens
    return shares, fitting_stages(packed, stages, token_bytes)
