"""The ops, their shapes, what their peers run; ``python -m benchmarks.ops OP PEER`` measures one in this process.

Everything is bf16, 2 bytes an element. An op's ``work`` counts each tensor that has to be read or written once, without
vectors. Letters are the package's: N tokens, C hidden, F MLP width, H and G heads, D head dimension, V vocabulary,
X experts, K experts per token; B and T rows and positions, L layers.
"""

import functools
import gc
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.cross_entropy import cross_entropy
from liger_models.kernels.gated_act import gated_act_reference, geglu, swiglu
from liger_models.kernels.gated_mlp import gated_mlp, gated_mlp_reference
from liger_models.kernels.linear_cross_entropy import linear_cross_entropy
from liger_models.kernels.moe import moe_mlp, moe_mlp_reference
from liger_models.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from liger_models.kernels.rope import rope_qkv, rope_qkv_reference, split_heads

from .losses import LOSSES
from .measure import Function, Op, Peer, ceilings, measure, randn

EPS = 1e-6


load = functools.cache(pkgutil.resolve_name)


def named(path: str, *rest: Any, **options: Any) -> Function:
    """The function at ``module:attribute``, looked up when it is called; ``rest`` comes after its arguments."""
    return lambda *inputs: load(path)(*inputs, *rest, **options)


def liger(name: str, *rest: Any) -> Function:
    return named(f"liger_kernel.transformers.functional:{name}", *rest)


def of_liger(run: Function, enter: Function = Peer.enter) -> Peer:
    return Peer(run, enter, needs="liger_kernel")


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x
    return F.rms_norm(h, weight.shape, weight, EPS), h


def make_heads(B: int, T: int, H: int, G: int, D: int, norm: int = 0, whole: int = 0) -> dict[str, Tensor]:
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(D // 2) * 2 / D)
    made = {
        "qkv": randn(B, T, (H + 2 * G) * D),
        "cos": angles.cos().bfloat16()[None],
        "sin": angles.sin().bfloat16()[None],
    }
    return made | ({"q_weight": randn(H * D if whole else D), "k_weight": randn(G * D if whole else D)} if norm else {})


def liger_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Norms, if there are any, and rotation (in place), in transformers' layout; v is not touched."""
    for weight in weights[:1]:
        q = liger("liger_rms_norm", EPS)(q.flatten(2).unflatten(-1, (-1, len(weight))), weight).view_as(q)
    for weight in weights[1:]:
        k = liger("liger_rms_norm", EPS)(k.flatten(2).unflatten(-1, (-1, len(weight))), weight).view_as(k)
    q, k = liger("liger_rope")(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2), v


def heads_op(name: str, ours: Function, truth: Function, H: int = 32, G: int = 8, D: int = 128, **extra: int) -> Op:
    def packed(function: Function) -> Function:
        return lambda qkv, cos, sin, *weights: function(qkv, cos, sin, H, G, D, *weights)

    def apart(qkv: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return *split_heads(qkv, H, G, D), torch.cat([cos, cos], -1), torch.cat([sin, sin], -1), *weights

    def work(B: int, T: int, norm: int = 0, **_: int) -> tuple[int, int]:
        # qkv is read, q, k, v are written, and the other way round; through a norm the backward reads qkv, too.
        part = 2 * B * T * (H + 2 * G) * D
        return 2 * part, (3 if norm else 2) * part

    return Op(
        name=name, shapes=({"B": 8, "T": 2048, "H": H, "G": G, "D": D} | extra,), check={"B": 2, "T": 64},
        make=make_heads, fixed=("cos", "sin"), truth=packed(truth), limit="bytes", work=work,
        peers={"torch": Peer(packed(truth)), "liger": of_liger(liger_heads, apart), "ours": Peer(packed(ours))},
    )  # fmt: skip


def gate_and_up(gate_up: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """By themselves, from pairs along ``dim``, counted from the end."""
    gate, up = gate_up.unflatten(dim, (-1, 2)).unbind(dim)
    return gate.contiguous(), up.contiguous()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def gated_op(name: str, ours: Function, in_torch: Function, act: str) -> Op:
    return Op(
        name=name, shapes=({"N": 16384, "F": 14336},), check={"N": 256}, make=lambda N, F: {"gate_up": randn(N, 2 * F)},
        truth=lambda gate_up: gated_act_reference(gate_up, act),
        limit="bytes", work=lambda N, F: (6 * N * F, 10 * N * F),
        peers={
            "torch": Peer(in_torch, gate_and_up),
            "liger": of_liger(liger(f"liger_{name}"), gate_and_up),
            "ours": Peer(ours),
        },
    )  # fmt: skip


def mlp(norm: Function, act: Function | None) -> Function:
    """Norm, gate, up, activation and down as they come; without an activation through Liger's fused projections."""

    def run(x: Tensor, residual: Tensor, weight: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        normed, h = norm(x, residual, weight)
        if act is None:
            return load("liger_kernel.ops:LigerMLPFunction").apply(normed[None], *weights)[0], h
        gate, up, down = weights
        return F.linear(act(F.linear(normed, gate), F.linear(normed, up)), down), h

    return run


def mlp_apart(x: Tensor, residual: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    return x, residual, weight, *gate_and_up(gate_up, -2), down


def make_moe(N: int, C: int, F: int, X: int, K: int) -> dict[str, Tensor]:
    weights, experts = torch.randn(N, X).softmax(-1).topk(K, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    matrices = {"gate_up": randn(X, 2 * F, C, scale=0.02), "down": randn(X, C, F, scale=0.02)}
    return {"x": randn(N, C), "weights": weights, "experts": experts} | matrices


def moe_apart(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    return x, weights, experts, torch.cat(gate_and_up(gate_up, -2), -2), down


def moe_in_torch(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sorted by expert, with PyTorch's grouped products."""
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(len(down), device=x.device), right=True).int()
    product = silu_mul(*F.grouped_mm(x[order // experts.shape[1]], gate_up.transpose(1, 2), offs=ends).chunk(2, -1))
    rows = F.grouped_mm(product, down.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
    return rows[order.argsort()].view(*experts.shape, -1).sum(1).to(x.dtype)


def liger_moe(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return load("liger_kernel.ops:LigerFusedMoEFunction").apply(x, gate_up, down, experts.int(), weights)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return loss_of(F.linear(x, weight), target)


class Skeleton(torch.autograd.Function):
    """The library calls that a chunked loss over the head cannot do without; a bound, not a loss.

    Logits into one reused buffer, a kernel that reads and writes them in place, the products for dx and dweight: the
    gradient of `skeleton_truth`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: int) -> Tensor:
        logits, dx, dw = x.new_empty(rows, len(weight)), torch.empty_like(x), torch.empty_like(weight)
        for start in range(0, len(x), rows):
            part = x[start : start + rows]
            chunk = logits[: len(part)]
            torch.mm(part, weight.t(), out=chunk)
            chunk.mul_(0.5)
            torch.mm(chunk, weight, out=dx[start : start + rows])
            dw.addmm_(chunk.t(), part, beta=int(start > 0))
        ctx.made = dx, dw
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (dx, dw), ctx.made = ctx.made, None
        return dx, dw, None


def skeleton_truth(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    value = 0.25 * F.linear(x, weight).square().sum()
    return value - value.detach()


def skeleton(rows: int) -> Peer:
    return Peer(lambda x, weight, target: Skeleton.apply(x, weight, rows), truth=skeleton_truth)


def make_parameters(L: int, C: int, F: int, V: int) -> dict[str, Tensor]:
    """Parameters, then gradients, of a Llama of L layers with keys and values C / 3 wide and a tied head."""
    layer = [(C, C), (C // 3, C), (C // 3, C), (C, C), (F, C), (F, C), (C, F), (C,), (C,)]
    shapes = [(V, C), (C,), *layer * L]
    return {f"{kind}{i}": randn(*shape, scale=0.02) for kind in "pg" for i, shape in enumerate(shapes)}


def optimizer(path: str, **options: Any) -> Function:
    def build(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors[: len(tensors) // 2]]
        for parameter, gradient in zip(parameters, tensors[len(parameters) :], strict=True):
            parameter.grad = gradient
        adamw = load(path)(parameters, lr=1e-3, weight_decay=0.1, **options)

        def step() -> tuple[Tensor, ...]:
            adamw.step()
            return tuple(parameters)

        return step

    return build


OPS: dict[str, Op] = {}


def add(*ops: Op) -> None:
    OPS.update((op.name, op) for op in ops)


add(*LOSSES)
add(
    Op(
        name="rms_norm", shapes=(*({"N": 16384, "C": C} for C in (2048, 4096, 8192)), {"N": 4096, "C": 65536}),
        check={"N": 512}, make=lambda N, C: {"x": randn(N, C), "weight": randn(C)}, truth=rms_norm_reference,
        limit="bytes", work=lambda N, C: (4 * N * C, 6 * N * C),
        peers={
            "torch": Peer(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
            "liger": of_liger(liger("liger_rms_norm", EPS)),
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
            "liger": of_liger(liger("liger_fused_add_rms_norm", EPS)),
            "quack": Peer(lambda x, h, w: load("quack:rmsnorm")(x, w, None, h, eps=EPS, prenorm=True), needs="quack"),
            "ours": Peer(add_rms_norm),
        },
    ),
    heads_op("rope", rope_qkv, rope_qkv_reference),
    heads_op("qk_norm_rope", qk_norm_rope, qk_norm_rope_reference, norm=1),
    heads_op("qk_norm_rope_whole", qk_norm_rope, qk_norm_rope_reference, G=32, norm=1, whole=1),
    gated_op("swiglu", swiglu, silu_mul, "silu"),
    gated_op("geglu", geglu, gelu_mul, "gelu_tanh"),
    Op(
        name="gated_mlp", shapes=({"N": 8192, "C": 4096, "F": 14336},), check={},
        make=lambda N, C, F: {
            "x": randn(N, C), "residual": randn(N, C), "weight": randn(C),
            "gate_up": randn(2 * F, C, scale=0.02), "down": randn(C, F, scale=0.02),
        },
        truth=gated_mlp_reference, limit="flops", work=lambda N, C, F: (6 * N * C * F, 12 * N * C * F),
        peers={
            "torch": Peer(mlp(add_norm, silu_mul), mlp_apart),
            "liger": of_liger(mlp(liger("liger_fused_add_rms_norm", EPS), liger("liger_swiglu")), mlp_apart),
            "liger-mlp": of_liger(mlp(liger("liger_fused_add_rms_norm", EPS), None), mlp_apart),
            "ours": Peer(gated_mlp),
            "ours+recompute": Peer(functools.partial(gated_mlp, recompute=True)),
        },
    ),
    Op(
        name="cross_entropy", shapes=({"N": 8192, "V": 128256}, {"N": 8192, "V": 32000}), check={"N": 256},
        make=lambda N, V: {"logits": randn(N, V), "target": torch.randint(V, (N,))}, truth=loss_of,
        limit="bytes", work=lambda N, V: (4 * N * V,),  # one read, one write
        peers={
            "torch": Peer(loss_of),
            "liger": of_liger(liger("liger_cross_entropy")),
            "quack": Peer(named("quack:cross_entropy", reduction="mean"), needs="quack"),
            "ours": Peer(lambda logits, target: cross_entropy(logits, target).loss),
        },
    ),
    Op(
        name="linear_cross_entropy",
        shapes=tuple(
            {"N": N, "C": C, "V": V} for N, C, V in ((8192, 4096, 128256), (8192, 2304, 256000), (4096, 4096, 128256))
        ),
        check={},  # all rows: the error of dweight grows with the number of chunks
        make=lambda N, C, V: {
            "x": randn(N, C), "weight": randn(V, C, scale=C**-0.5), "target": torch.randint(V, (N,)),
        },
        truth=linear_loss, limit="flops", work=lambda N, C, V: (6 * N * C * V,),
        peers={
            "torch": Peer(linear_loss),
            "liger": of_liger(liger("liger_fused_linear_cross_entropy")),
            "cce": Peer(named("cut_cross_entropy:linear_cross_entropy"), needs="cut_cross_entropy"),
            "quack": Peer(named("quack.linear_cross_entropy:chunked_linear_cross_entropy"), needs="quack"),
            "torch_linear_cross_entropy": Peer(
                lambda *inputs: F.linear_cross_entropy(*inputs, options=torch.nn.LinearCrossEntropyOptions()),
                needs="torch.nn.functional:linear_cross_entropy",
            ),
            "skeleton-2048": skeleton(2048),
            "skeleton-4096": skeleton(4096),
            "ours": Peer(lambda *inputs: linear_cross_entropy(*inputs).loss),
        },
    ),
    Op(
        name="moe_mlp", make=make_moe, truth=moe_mlp_reference,
        check={},  # the peers that tune themselves do so at their first call
        shapes=(
            {"N": 8192, "C": 4096, "F": 14336, "X": 8, "K": 2},
            {"N": 8192, "C": 2048, "F": 768, "X": 128, "K": 8},
        ),
        limit="flops", work=lambda N, C, F, X, K: (6 * N * K * C * F, 12 * N * K * C * F),
        peers={
            "torch": Peer(moe_in_torch, moe_apart, needs="torch.nn.functional:grouped_mm"),
            "loop": Peer(moe_mlp_reference),
            "liger": of_liger(liger_moe, moe_apart),
            "ours": Peer(moe_mlp),
            "ours+recompute": Peer(functools.partial(moe_mlp, recompute=True)),
        },
    ),
    Op(
        name="adamw", stateful=True, make=make_parameters, truth=optimizer("torch.optim:AdamW", foreach=False),
        shapes=({"L": 16, "C": 3072, "F": 8192, "V": 128256},),  # 2.0e9 parameters in 146 tensors
        check={"L": 1, "V": 1024}, limit="bytes",
        # Parameter, gradient and both moments are read, all but the gradient are written.
        work=lambda L, C, F, V: (14 * (V * C + C + L * (8 * C * C // 3 + 3 * C * F + 2 * C)),),
        peers={
            "torch": Peer(optimizer("torch.optim:AdamW", fused=True)),
            "foreach": Peer(optimizer("torch.optim:AdamW", foreach=True)),
            "ours": Peer(optimizer("liger_models.optim:LigerAdamW"), needs="liger_models.optim"),
        },
    ),
)  # fmt: skip


def main(op_name: str, peer_name: str) -> None:
    if op_name != "ceilings":
        op = OPS[op_name]
        needs = op.peers["torch" if peer_name == "compile" else peer_name].needs.partition(":")[0]
        if needs:
            importlib.import_module("liger_kernel.transformers.functional" if needs == "liger_kernel" else needs)
    sys.stdin.readline()
    device = {"device": torch.cuda.get_device_name()}
    if op_name == "ceilings":
        print(json.dumps(device | ceilings("cuda")))
        return
    for sizes in op.shapes:
        row: dict[str, Any] = {"shape": " ".join(f"{name}={size}" for name, size in sizes.items())} | device
        try:
            row |= measure(op, peer_name, sizes, "cuda")
        except Exception as error:
            row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(json.dumps(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
