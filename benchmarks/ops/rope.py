"""Rotary embedding, alone and together with norms of queries and keys before it."""

import torch
from torch import Tensor

from liger_models.kernels.rope.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.kernels.rope.rope import rope_qkv, rope_qkv_reference, split_heads

from .norm import EPS
from .op import Function, Op, Peer, liger, liger_peer, randn


def make_heads(B: int, T: int, H: int, G: int, D: int, norm: int = 0, whole: int = 0) -> dict[str, Tensor]:
    # Angles [T, D / 2] of the usual base.
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(D // 2) * 2 / D)
    inputs = {
        "qkv": randn(B, T, (H + 2 * G) * D),
        "cos": angles.cos().bfloat16()[None],
        "sin": angles.sin().bfloat16()[None],
    }
    return inputs | (
        {"q_weight": randn(H * D if whole else D), "k_weight": randn(G * D if whole else D)} if norm else {}
    )


def liger_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Norms of q and k (if ``weights`` are given) and in-place rotation, in transformers' layout. v does not change."""
    for weight in weights[:1]:
        q = liger("liger_rms_norm", EPS)(q.flatten(2).unflatten(-1, (-1, len(weight))), weight).view_as(q)
    for weight in weights[1:]:
        k = liger("liger_rms_norm", EPS)(k.flatten(2).unflatten(-1, (-1, len(weight))), weight).view_as(k)
    q, k = liger("liger_rope")(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2), v


def heads_op(name: str, ours: Function, truth: Function, H: int = 32, G: int = 8, D: int = 128, **extra: int) -> Op:
    """An op on the packed projection qkv. norm=1 in ``extra`` adds norms, and whole=1 lets a norm span all heads."""

    def packed(function: Function) -> Function:
        return lambda qkv, cos, sin, *weights: function(qkv, cos, sin, H, G, D, *weights)

    def apart(qkv: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return *split_heads(qkv, H, G, D), torch.cat([cos, cos], -1), torch.cat([sin, sin], -1), *weights

    def work(B: int, T: int, norm: int = 0, **_: int) -> tuple[int, int]:
        # The forward reads qkv and writes q, k, v. The backward does the same with gradients. With norms, it also
        # reads qkv.
        part = 2 * B * T * (H + 2 * G) * D
        return 2 * part, (3 if norm else 2) * part

    return Op(
        name=name, shapes=({"B": 8, "T": 2048, "H": H, "G": G, "D": D} | extra,), check={"B": 2, "T": 64},
        make=make_heads, fixed=("cos", "sin"), truth=packed(truth), limit="bytes", work=work,
        peers={"torch": Peer(packed(truth)), "liger": liger_peer(liger_heads, apart), "ours": Peer(packed(ours))},
    )  # fmt: skip


OPS = (
    heads_op("rope", rope_qkv, rope_qkv_reference),
    heads_op("qk_norm_rope", qk_norm_rope, qk_norm_rope_reference, norm=1),
    heads_op("qk_norm_rope_whole", qk_norm_rope, qk_norm_rope_reference, G=32, norm=1, whole=1),
)
