"""RMSNorm of heads whose elements are held as pairs x1, x2 [ROWS, BLOCK], for `qk_norm_rope` and `qkv_norm_rope`.

Without the flag WHOLE, the norm is over one head, and each head is one row. With WHOLE, the norm is over all heads that
the program holds. In the backward, let r be the inverse RMS, and let s be the weight multiplied by the gradient of the
normalized head::

    dx = r · (s − x · r² · mean(s · x))
"""

from torch import Tensor

from liger_models.kernels.dispatch import fitting_stages, num_programs, tl, triton
from liger_models.kernels.rope.rope import store_heads

HEAD_WARPS_PER_SM, HEAD_STAGES = 64, 4
WHOLE_WARPS_PER_SM, WHOLE_STAGES = 16, 3
"""For a backward in which each program sums weight gradients over its tokens: number of warps per multiprocessor, and
number of tokens that a program has in flight if shared memory can hold them. HEAD is for norms over one head, and WHOLE
is for norms over all heads. On an H200, with heads of 128, the backward reaches 0.81 of the copy bandwidth for 32 query
heads and 8 KV heads, and 0.99 for 32 query heads and 32 KV heads. With one token in flight, the backward would reach
0.73 and 0.87."""


@triton.jit
def _mean(x, count, WHOLE: tl.constexpr):
    """Compute the mean of each row [ROWS, 1] or, with WHOLE, the mean of all rows.

    Args:
        x: [ROWS, BLOCK], the sum of the two elements of each pair.
        count: number of elements over which the mean is taken.
    """
    return (tl.sum(x) if WHOLE else tl.sum(x, 1)[:, None]) / count


@triton.jit
def inverse_rms(x1, x2, count, eps, WHOLE: tl.constexpr):
    """Compute r, the inverse RMS, of each head [ROWS, 1] or, with WHOLE, one r for all heads."""
    return 1.0 / tl.sqrt(_mean(x1 * x1 + x2 * x2, count, WHOLE) + eps)


@triton.jit
def norm_gradient(x1, x2, s1, s2, rstd, count, WHOLE: tl.constexpr):
    """Compute dx as two tensors [ROWS, BLOCK]: the gradients of x1 and of x2."""
    along = rstd * rstd * _mean(s1 * x1 + s2 * x2, count, WHOLE)
    return rstd * (s1 - x1 * along), rstd * (s2 - x2 * along)


@triton.jit
def store_weight_gradients(
    dw_ptr, program, is_query, is_key, dw1, dw2, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Sum a program's weight gradients over its query heads, and separately over its key heads.

    Both sums are stored in dw [programs, 2, D].
    """
    one = tl.arange(0, 1)[:, None]
    for part in tl.static_range(2):
        heads = is_key if part == 1 else is_query
        sum1 = tl.sum(tl.where(heads, dw1, 0.0), 0)[None, :]  # [1, BLOCK]
        sum2 = tl.sum(tl.where(heads, dw2, 0.0), 0)[None, :]
        row = program * 2 + part
        store_heads(dw_ptr + row * D + one, one == 0, sum1, sum2, D, HALF, BLOCK, INTERLEAVED)


def backward_launch(packed: Tensor, constants: dict[str, int], need_dw: bool, whole: bool = False) -> tuple[int, int]:
    """Return how many programs share the work on a chunk of heads, and how many tokens a program has in flight.

    The tokens are split among the programs of a chunk.

    Args:
        packed: [B, T, W], the packed projection.
        constants: constants of the launch. Only CHUNKS, ROWS, BLOCK and num_warps are used.
        need_dw: whether programs sum a weight gradient. If not, each program has one token.
        whole: whether the norm is over all heads of a token.
    """
    tokens = packed.shape[0] * packed.shape[1]
    warps, stages = (WHOLE_WARPS_PER_SM, WHOLE_STAGES) if whole else (HEAD_WARPS_PER_SM, HEAD_STAGES)
    token_bytes = 2 * constants["ROWS"] * 2 * constants["BLOCK"] * packed.element_size()  # x and its gradient
    programs = num_programs(packed, warps // constants["num_warps"])
    shares = min(tokens, max(programs // constants["CHUNKS"], 1)) if need_dw else tokens
    return shares, fitting_stages(packed, stages, token_bytes)
