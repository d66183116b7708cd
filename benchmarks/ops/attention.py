"""Causal attention of heads wider than 256, and of 256 beside the kernels that take those."""

from torch import Tensor
from torch.nn import functional as F

from liger_models.kernels.causal_attention import causal_attention, causal_attention_reference

from .op import Op, Peer, randn


def make(B: int, T: int, H: int, G: int, D: int) -> dict[str, Tensor]:
    return {"q": randn(B, T, H, D), "k": randn(B, T, G, D), "v": randn(B, T, G, D)}


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_attention_reference(q, k, v, scale=q.shape[3] ** -0.5)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's, with keys and values repeated where heads are too wide for its flash attention, as transformers do."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[3] > 256:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def work(B: int, T: int, H: int, G: int, D: int) -> tuple[float, float]:
    product = B * H * T**2 * D  # half of the pairs
    return 2.0 * product, 5.0 * product


OPS = (
    Op(
        name="causal_attention",
        shapes=(
            {"B": 1, "T": 8192, "H": 8, "G": 4, "D": 512},
            {"B": 1, "T": 8192, "H": 16, "G": 2, "D": 512},
            {"B": 1, "T": 8192, "H": 16, "G": 8, "D": 256},
        ),
        check={"T": 512}, make=make, truth=truth, limit="flops", work=work,
        peers={"torch": Peer(truth), "sdpa": Peer(sdpa), "ours": Peer(causal_attention)},
    ),
)  # fmt: skip
