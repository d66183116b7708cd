"""Causal attention with wide heads, and attention with sinks.

The heads are wider than 256. Heads of width 256 are also measured, for comparison with other kernels.

In latent attention, heads have N + R columns in queries and keys, of which R are rotated, and V columns in values.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from liger_models.kernels.attention.causal_attention import causal_attention, causal_attention_reference
from liger_models.kernels.attention.sink_attention import sink_attention, sink_attention_reference
from liger_models.kernels.rope.latent_heads import latent_heads, latent_heads_reference
from liger_models.layers.attention_backends import attention
from liger_models.layers.batch import BatchLayout

from .op import Function, Op, Peer, randn


def make(B: int, T: int, H: int, G: int, D: int) -> dict[str, Tensor]:
    return {"q": randn(B, T, H, D), "k": randn(B, T, G, D), "v": randn(B, T, G, D)}


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_attention_reference(q, k, v, scale=q.shape[3] ** -0.5)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's SDPA. As in transformers, keys and values are repeated if heads are too wide for flash attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[3] > 256:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def work(B: int, T: int, H: int, G: int, D: int) -> tuple[float, float]:
    product = B * H * T**2 * D  # half of the pairs
    return 2.0 * product, 5.0 * product


def make_with_sinks(B: int, T: int, H: int, G: int, D: int, window: int = 0) -> dict[str, Tensor]:
    return make(B, T, H, G, D) | {"sinks": randn(H)}


def add_nothing(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
    """The inputs of attention, without the sinks. The gradient of the sinks is 0."""
    return q + 0 * sinks[:, None], k, v


def sink_op(name: str, T: int, window: int | None = None) -> Op:
    """Attention with the heads of gpt-oss-20b. The peer "skeleton" is SDPA without sinks and without a window."""

    def work(B: int, T: int, H: int, G: int, D: int, window: int = 0) -> tuple[float, float]:
        pairs = B * H * (T * window - window * (window - 1) / 2 if window else T**2 / 2)
        return 4.0 * D * pairs, 10.0 * D * pairs

    def in_torch(*inputs: Tensor) -> Tensor:
        return sink_attention_reference(*inputs, scale=64**-0.5, window=window)

    def ours(*inputs: Tensor) -> Tensor:
        return sink_attention(*inputs, scale=64**-0.5, window=window)

    # SDPA does not support sinks, so its time is only a bound.
    peers = {"torch": Peer(in_torch), "ours": Peer(ours)}
    if window is None:
        peers["skeleton"] = Peer(sdpa, add_nothing, truth=lambda *inputs: truth(*add_nothing(*inputs)))
    shape = {"B": 1, "T": T, "H": 64, "G": 8, "D": 64} | ({"window": window} if window else {})
    return Op(
        name=name, shapes=(shape,), check={"T": 512}, make=make_with_sinks, truth=in_torch, limit="flops", work=work,
        peers=peers,
    )  # fmt: skip


def make_latent(B: int, T: int, H: int, N: int, R: int, V: int) -> dict[str, Tensor]:
    """The outputs of the projections, including the part of the keys that all heads share, and the rotation tables."""
    angles = torch.outer(torch.arange(T), 10000 ** -(torch.arange(0, R, 2) / R))[None]
    projected = {"q": randn(B, T, H, N + R), "kv": randn(B, T, H, N + V), "shared": randn(B, T, R)}
    return projected | {"cos": angles.cos(), "sin": angles.sin()}


def ready_heads(q: Tensor, kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """The queries, keys and values from which the peers start."""
    return latent_heads_reference(q.flatten(2), kv.flatten(2), shared, cos, sin, q.shape[2], interleaved=True)


def latent_ours(q: Tensor, kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer without its projections: it rotates queries and keys and computes attention."""
    q, k, v = latent_heads(q.flatten(2), kv.flatten(2), shared, cos, sin, q.shape[2], interleaved=True)
    return attention(q, k, v, BatchLayout.build(q.shape[:2], q.device, {}), scale=q.shape[3] ** -0.5)


def sdpa_of(backend: SDPBackend) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return run


def padded_values(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys, and values that are padded to the width of keys, as flash attention requires.

    The result of attention then has this width, too.
    """
    q, k, v = ready_heads(*inputs)
    return q, k, F.pad(v, (0, q.shape[3] - v.shape[3]))


def latent_work(B: int, T: int, H: int, N: int, R: int, V: int) -> tuple[float, float]:
    """Operations: two products in the forward and five in the backward, each over half of all query-key pairs."""
    pairs = B * H * T**2 / 2
    return 2.0 * pairs * (N + R + V), 2.0 * pairs * (3 * (N + R) + 2 * V)


OPS = (
    Op(
        name="latent_attention", shapes=({"B": 1, "T": 8192, "H": 128, "N": 128, "R": 64, "V": 128},),
        check={"T": 512}, make=make_latent, fixed=("cos", "sin"), limit="flops", work=latent_work,
        truth=lambda *inputs: truth(*ready_heads(*inputs)),
        peers={
            "torch": Peer(truth, ready_heads),
            "cudnn": Peer(sdpa_of(SDPBackend.CUDNN_ATTENTION), ready_heads),
            "flash_padded": Peer(
                sdpa_of(SDPBackend.FLASH_ATTENTION), padded_values, truth=lambda *inputs: truth(*padded_values(*inputs))
            ),
            "ours": Peer(latent_ours),
        },
    ),
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
    sink_op("sink_attention", 8192),
    sink_op("sink_attention_window", 8192, window=128),
)  # fmt: skip
