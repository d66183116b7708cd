"""The online softmax step and the argument checks that attention kernels share."""

from torch import Tensor

from liger_models.kernels.dispatch import tl, triton

MOST_HEAD_DIM = 576
"""Largest supported head dimension. Gemma 4 needs 512, and the cached rows of latent attention need 512 + 64."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_step(
    scores, v, total, most, weight, ALL_ROWS_SEE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add N keys to the online softmax of M rows, and return the new ``(total, most, weight)``.

    ``scores`` [M, N] are already multiplied by log2 e, and are -inf where a row does not see a key. ``v`` [N, D] holds
    the values of the keys. ``most`` [M] is the largest score s so far, ``weight`` [M] is the sum of exp2(s − most), and
    ``total`` [M, D] is the output multiplied by ``weight``. ALL_ROWS_SEE may be True only if every row sees at least
    one of these keys.
    """
    larger = tl.maximum(most, tl.max(scores, 1))
    finite = larger
    if not ALL_ROWS_SEE:
        finite = tl.where(larger == float("-inf"), 0.0, larger)  # the maximum is -inf if a row has seen no key yet
    p = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(most - finite)
    weight = weight * shrink + tl.sum(p, 1)
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
    return total, larger, weight


def check_heads(op: str, H: int, D: int, window: int | None, sinks: Tensor | None, advice: str) -> None:
    """Raise ValueError if heads are too wide, the window is below 1, or there is not exactly one sink per head.

    Args:
        op: name of the op, for the error message.
        H: number of heads.
        D: head dimension.
        window: number of tokens that a token sees; None for no limit.
        sinks: the sinks [H]; None for no sinks.
        advice: what the user can do if heads are too wide, for the error message.
    """
    if not 1 <= D <= MOST_HEAD_DIM:
        raise ValueError(f"{op}: heads must be 1 to {MOST_HEAD_DIM} wide, got {D}. {advice}")
    if window is not None and not window >= 1:
        raise ValueError(f"{op}: window must be at least 1, got {window}. None is for no window.")
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"{op}: sinks must be [{H}], got {list(sinks.shape)}. Pass one for each head.")
