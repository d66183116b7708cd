"""RMSNorm and LayerNorm, alone and with the residual addition before them."""

import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.norm.layer_norm import layer_norm, layer_norm_reference
from liger_models.kernels.norm.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

from .op import Op, Peer, liger, liger_peer, load, named, randn

EPS = 1e-6


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x
    return F.rms_norm(h, weight.shape, weight, EPS), h


OPS = (
    Op(
        name="rms_norm", shapes=(*({"N": 16384, "C": C} for C in (2048, 4096, 8192)), {"N": 4096, "C": 65536}),
        check={"N": 512}, make=lambda N, C: {"x": randn(N, C), "weight": randn(C)}, truth=rms_norm_reference,
        limit="bytes", work=lambda N, C: (4 * N * C, 6 * N * C),
        peers={
            "torch": Peer(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
            "liger": liger_peer(liger("liger_rms_norm", EPS)),
            "quack": Peer(named("quack:rmsnorm", eps=EPS), needs="quack"),
            "ours": Peer(rms_norm),
        },
    ),
    Op(
        name="add_rms_norm", shapes=tuple({"N": 16384, "C": C} for C in (2048, 4096, 8192)), check={"N": 512},
        make=lambda N, C: {"x": randn(N, C), "residual": randn(N, C), "weight": randn(C)}, truth=add_rms_norm_reference,
        limit="bytes", work=lambda N, C: (8 * N * C, 8 * N * C),  # one gradient serves x and residual
        peers={
            "torch": Peer(add_norm),
            "liger": liger_peer(liger("liger_fused_add_rms_norm", EPS)),
            "quack": Peer(lambda x, h, w: load("quack:rmsnorm")(x, w, None, h, eps=EPS, prenorm=True), needs="quack"),
            "ours": Peer(add_rms_norm),
        },
    ),
    Op(
        name="layer_norm", shapes=tuple({"N": 16384, "C": C} for C in (1024, 2048, 4096, 8192)), check={"N": 512},
        make=lambda N, C: {"x": randn(N, C), "weight": randn(C), "bias": randn(C)},
        truth=lambda x, weight, bias: layer_norm_reference(x, weight, bias, EPS),
        limit="bytes", work=lambda N, C: (4 * N * C, 6 * N * C),
        peers={
            "torch": Peer(lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS)),
            "liger": liger_peer(liger("liger_layer_norm", EPS)),
            "ours": Peer(lambda x, weight, bias: layer_norm(x, weight, bias, EPS)),
        },
    ),
)  # fmt: skip
