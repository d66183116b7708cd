"""Gated DeltaNet (the gated delta rule, the convolution before it, and the norm after it), and the scan of Mamba-2.

The scan has H heads with P columns and states of N rows. The heads in each of the G groups share B and C.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.linear_attention.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from liger_models.kernels.linear_attention.short_conv import short_conv, short_conv_reference
from liger_models.kernels.linear_attention.ssd_scan import ssd_scan, ssd_scan_reference
from liger_models.kernels.linear_attention.step_sizes import step_sizes
from liger_models.kernels.norm.gated_norm import gated_norm, gated_norm_reference

from .norm import EPS
from .op import Function, Op, Peer, load, named, randn


def make_delta(T: int, H: int, G: int, D: int, documents: int = 0) -> dict[str, Tensor]:
    """Inputs with H value heads and G key heads. The lengths of documents are proportional to 1, 3, 5, ...."""
    inputs = {
        "q": randn(1, T, G, D),
        "k": randn(1, T, G, D),
        "v": randn(1, T, H, D),
        "g": -0.1 * F.softplus(torch.randn(1, T, H)),
        "beta": randn(1, T, H).sigmoid(),
    }
    if documents:
        inputs["cu_seqlens"] = (torch.arange(documents + 1) ** 2 * T // documents**2).int()
    return inputs


def delta_truth(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    return gated_delta_rule_reference(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0]


def for_value_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat queries and keys for each value head."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return q, k


def delta_in_transformers(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The formula that transformers uses without the package fla."""
    rule = load("transformers.models.qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule")
    out: Tensor = rule(*for_value_heads(q, k, v), v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    return out


def delta_in_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """flash-linear-attention. In versions that require it, queries and keys are repeated for each value head."""
    bounds = None if cu_seqlens is None else cu_seqlens.long()
    rule = load("fla.ops.gated_delta_rule:chunk_gated_delta_rule")
    if "HV" not in rule.__doc__:
        q, k = for_value_heads(q, k, v)
    out: Tensor = rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)[0]
    return out


def delta_ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    out = gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)
    assert isinstance(out, Tensor)
    return out


def delta_op(name: str, **extra: int) -> Op:
    """The delta rule for one text or, with documents=n, for n packed texts.

    The peer that loops over chunks is measured only with one text. With several texts, it would have to keep the state
    after each token.
    """

    def work(T: int, H: int, G: int, D: int, **_: int) -> tuple[int, int]:
        part = 2 * T * D  # the forward reads q, k, v and writes the result
        return part * 2 * (G + H), part * (4 * G + 3 * H)  # the backward also reads do and writes dq, dk, dv

    peers = {"fla": Peer(delta_in_fla, needs="fla"), "ours": Peer(delta_ours)}
    if not extra:
        peers = {
            "loop": Peer(delta_truth),
            "hf": Peer(delta_in_transformers, needs="transformers"),
        } | peers
    return Op(
        name=name, shapes=({"T": 32768, "H": 32, "G": 16, "D": 128} | extra,), check={"T": 512}, make=make_delta,
        truth=delta_truth, limit="bytes", work=work, peers=peers, least_error=torch.finfo(torch.bfloat16).eps / 2,
    )  # fmt: skip


def conv_in_torch(x: Tensor, weight: Tensor) -> Tensor:
    out = F.conv1d(x.transpose(1, 2), weight[:, None], padding=weight.shape[1] - 1, groups=len(weight))
    return F.silu(out[..., : x.shape[1]]).transpose(1, 2)


def conv_in_cuda(x: Tensor, weight: Tensor) -> Tensor:
    function = load("causal_conv1d:causal_conv1d_fn")
    out: Tensor = function(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)
    return out


def make_scan(T: int, H: int, G: int, P: int, N: int) -> dict[str, Tensor]:
    """The outputs of the convolution and of the projection to step sizes, and parameters as in a new model."""
    steps = torch.empty(H).uniform_(0.001, 0.1)
    return {
        "x": randn(1, T, H, P),
        "B": randn(1, T, G, N),
        "C": randn(1, T, G, N),
        "dt": randn(1, T, H),
        "dt_bias": steps.expm1().log(),  # the inverse of softplus
        "A_log": torch.empty(H).uniform_(1, 16).log(),
        "D": torch.ones(H),
    }


def scan_truth(x: Tensor, B: Tensor, C: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor) -> Tensor:
    return ssd_scan_reference(x, B, C, *step_sizes(dt, A_log, dt_bias), D)[0]


def scan_ours(x: Tensor, B: Tensor, C: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor) -> Tensor:
    """The scan, and the computation of its step sizes in plain torch, as in the layer."""
    out = ssd_scan(x, B, C, *step_sizes(dt, A_log, dt_bias), D)
    assert isinstance(out, Tensor)
    return out


def scan_of(function: Function, chunk: int) -> Function:
    """A scan with the arguments of mamba-ssm, in chunks of ``chunk`` tokens."""

    def run(x: Tensor, B: Tensor, C: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor) -> Tensor:
        out: Tensor = function(x, dt, -A_log.exp(), B, C, chunk, D=D, dt_bias=dt_bias, dt_softplus=True)
        return out.to(x.dtype)

    return run


def scan_in_transformers(*inputs: Any, **options: Any) -> Any:
    """The formula that transformers uses without mamba-ssm."""
    scan = torch.compiler.disable(load)("transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan")
    return scan.__wrapped__(*inputs, **options)


def scan_work(T: int, H: int, G: int, P: int, N: int) -> tuple[int, int]:
    """Bytes of memory traffic. In chunks of 128 tokens, the products of a scan take about as long on an H200."""
    part = 2 * T  # the forward reads x, B and C and writes the result
    return part * (2 * H * P + 2 * G * N), part * (3 * H * P + 4 * G * N)  # the backward also reads dy, writes dx, ...


MAMBA = "mamba_ssm.ops.triton.ssd_combined"
"""The module with mamba-ssm's Triton kernels. The source distribution contains it, so nothing needs to be compiled."""

OPS = (
    delta_op("gated_delta_rule"),
    delta_op("gated_delta_rule_packed", documents=16),
    Op(
        name="state_space_scan", shapes=({"T": 32768, "H": 64, "G": 8, "P": 64, "N": 128},),
        check={},  # mamba-ssm tunes kernels in the first call, so it needs the timed sizes
        make=make_scan, truth=scan_truth, limit="bytes", work=scan_work,
        peers={
            "torch": Peer(scan_of(scan_in_transformers, 128), needs="transformers"),
            "mamba_ssm_128": Peer(scan_of(named(f"{MAMBA}:mamba_chunk_scan_combined"), 128), needs=MAMBA),
            "mamba_ssm_256": Peer(scan_of(named(f"{MAMBA}:mamba_chunk_scan_combined"), 256), needs=MAMBA),
            "ours": Peer(scan_ours),
        },
        least_error=torch.finfo(torch.bfloat16).eps / 2,
    ),
    Op(
        name="short_conv", shapes=({"T": 32768, "C": 8192, "K": 4},), check={"T": 512},
        make=lambda T, C, K: {"x": randn(1, T, C), "weight": randn(C, K, scale=K**-0.5)},
        truth=lambda x, weight: short_conv_reference(x, weight)[0],
        limit="bytes", work=lambda T, C, K: (4 * T * C, 6 * T * C),
        peers={
            "torch": Peer(conv_in_torch),
            "causal_conv1d": Peer(conv_in_cuda, needs="causal_conv1d"),
            "ours": Peer(short_conv),
        },
    ),
    Op(
        name="gated_norm", shapes=({"N": 32768 * 32, "C": 128},), check={"N": 512},
        make=lambda N, C: {"x": randn(N, C), "gate": randn(N, C), "weight": randn(C)},
        truth=lambda x, gate, weight: gated_norm_reference(x, gate, weight, EPS),
        limit="bytes", work=lambda N, C: (6 * N * C, 10 * N * C),
        peers={
            "torch": Peer(lambda x, gate, weight: gated_norm_reference(x, gate, weight, EPS)),
            "ours": Peer(lambda x, gate, weight: gated_norm(x, gate, weight, EPS)),
        },
    ),
)  # fmt: skip
