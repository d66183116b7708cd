"""Cross entropy (computed from logits or from the head's inputs), and log-probabilities with entropies."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_models.kernels.loss.cross_entropy import cross_entropy
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy
from liger_models.kernels.loss.linear_logprobs import fused_linear_logprobs, fused_linear_logprobs_reference

from .op import Op, Peer, liger, liger_peer, load, named, randn


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return loss_of(F.linear(x, weight), target)


def make_head(N: int, C: int, V: int) -> dict[str, Tensor]:
    return {"x": randn(N, C), "weight": randn(V, C, scale=C**-0.5), "target": torch.randint(V, (N,))}


class Skeleton(torch.autograd.Function):
    """Only the library calls that every chunked loss over the head needs. This peer is a bound on the time, not a loss.

    Logits are written to one reused buffer. A kernel reads and writes them in place. Two products then compute dx and
    dweight, which are the gradients of `skeleton_truth`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: int) -> Tensor:
        logits, dx, dw = x.new_empty(rows, len(weight)), torch.empty_like(x), torch.empty_like(weight)
        for start in range(0, len(x), rows):
            part = x[start : start + rows]
            chunk = logits[: len(part)]
            torch.mm(part, weight.t(), out=chunk)  # [rows, V]
            chunk.mul_(0.5)  # stands for the kernel of the loss
            torch.mm(chunk, weight, out=dx[start : start + rows])
            dw.addmm_(chunk.t(), part, beta=int(start > 0))
        ctx.gradients = dx, dw
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (dx, dw), ctx.gradients = ctx.gradients, None
        return dx, dw, None


def skeleton_truth(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    value = 0.25 * F.linear(x, weight).square().sum()
    return value - value.detach()


def skeleton(rows: int) -> Peer:
    return Peer(lambda x, weight, target: Skeleton.apply(x, weight, rows), truth=skeleton_truth)


def chunked_logprobs(x: Tensor, weight: Tensor, target: Tensor, rows: int = 1024) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies in plain torch, ``rows`` rows at a time. The backward recomputes the logits."""
    parts = [
        checkpoint(fused_linear_logprobs_reference, x_part, weight, target_part, use_reentrant=False)
        for x_part, target_part in zip(x.split(rows), target.split(rows), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def liger_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss, entropy = load(f"{LIGER_LOGPROBS}.apply")(x, weight, target, return_entropy=True)
    return -loss, entropy


def trl_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    utilities = load("trl.trainer.utils")
    arguments = (x, weight, None, target, 1.0, utilities._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",))
    log_probs, entropy, *_ = load(TRL_LOGPROBS).apply(*arguments)
    return log_probs, entropy


LIGER_LOGPROBS = "liger_kernel.ops.fused_linear_scaled_cross_entropy:LigerFusedLinearScaledCrossEntropyFunction"
TRL_LOGPROBS = "trl.kernels.chunked_logprob:ChunkedLogProbFunction"

OPS = (
    Op(
        name="cross_entropy", shapes=({"N": 8192, "V": 128256}, {"N": 8192, "V": 32000}), check={"N": 256},
        make=lambda N, V: {"logits": randn(N, V), "target": torch.randint(V, (N,))}, truth=loss_of,
        limit="bytes", work=lambda N, V: (4 * N * V,),  # one read and one write
        peers={
            "torch": Peer(loss_of),
            "liger": liger_peer(liger("liger_cross_entropy")),
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
        make=make_head, truth=linear_loss, limit="flops", work=lambda N, C, V: (6 * N * C * V,),
        peers={
            "torch": Peer(linear_loss),
            "liger": liger_peer(liger("liger_fused_linear_cross_entropy")),
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
        # Each token has its own upstream gradient, so the logits must be computed twice. This makes four products.
        name="linear_logprobs", shapes=({"N": 8192, "C": 4096, "V": 131072},), check={"N": 4096}, make=make_head,
        truth=fused_linear_logprobs_reference, limit="flops", work=lambda N, C, V: (2 * N * C * V, 6 * N * C * V),
        peers={
            "torch": Peer(fused_linear_logprobs_reference),
            "torch_chunked": Peer(chunked_logprobs),
            "liger": Peer(liger_logprobs, needs=LIGER_LOGPROBS),
            "trl": Peer(trl_logprobs, needs=TRL_LOGPROBS),
            "ours": Peer(lambda *inputs: fused_linear_logprobs(*inputs, return_entropy=True)),
        },
    ),
)  # fmt: skip
