"""Losses over the head for preferences, rewards, distillation and Medusa, and divergences of full distributions.

In losses over the head, every token is a target, and plain torch builds all logits. If a loss takes the hidden states
of a reference model or teacher, the loss also computes the logits of this model, which gets no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy

from .op import Function, Op, Peer, Sizes, liger, liger_peer, load, randn

BETA, GAMMA, DECAY = 0.1, 0.5, 0.8


def log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return wide.gather(-1, target[..., None])[..., 0]


def reference_log_probs(ref_x: Tensor, ref_weight: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        return log_probs(ref_x, ref_weight, target).sum(-1)


def dpo(weight: Tensor, x: Tensor, target: Tensor, ref_x: Tensor, ref_weight: Tensor) -> Tensor:
    rewards = log_probs(x, weight, target).sum(-1) - reference_log_probs(ref_x, ref_weight, target)
    chosen, rejected = rewards.chunk(2)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def orpo(weight: Tensor, x: Tensor, target: Tensor) -> Tensor:
    mean = log_probs(x, weight, target).mean(-1)
    chosen, rejected = (mean - torch.log1p(-mean.exp())).chunk(2)
    return -mean.chunk(2)[0].mean() - BETA * logsigmoid(chosen - rejected).mean()


def cpo(weight: Tensor, x: Tensor, target: Tensor) -> Tensor:
    token_log_probs = log_probs(x, weight, target)  # [2P, T]
    chosen, rejected = token_log_probs.sum(-1).chunk(2)
    return -token_log_probs.chunk(2)[0].mean() - logsigmoid(BETA * (chosen - rejected)).mean()


def simpo(weight: Tensor, x: Tensor, target: Tensor) -> Tensor:
    chosen, rejected = log_probs(x, weight, target).mean(-1).chunk(2)
    return -chosen.mean() - logsigmoid(BETA * (chosen - rejected) - GAMMA).mean()


def kto(x: Tensor, weight: Tensor, target: Tensor, labels: Tensor, ref_x: Tensor, ref_weight: Tensor) -> Tensor:
    rewards = log_probs(x, weight, target).sum(-1) - reference_log_probs(ref_x, ref_weight, target)
    return (1 - torch.sigmoid(BETA * torch.where(labels, rewards, -rewards))).mean()


def grpo(x: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor, ref: Tensor) -> Tensor:
    """The loss for answers that the policy has just sampled, so every probability ratio is 1."""
    # The ratio has the value 1 and the gradient of the log-probability.
    current = log_probs(x, weight, ids)
    ratio, difference = (current - current.detach()).exp(), ref - current
    loss = BETA * (difference.exp() - difference - 1) - ratio * advantages[:, None]
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def distil(divergence: Function) -> Function:
    """Half the cross entropy plus half the divergence of the student from the teacher. Both are means over tokens."""

    def run(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, target: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        student = F.linear(x, weight).to(wide)
        with torch.no_grad():
            teacher = F.linear(teacher_x, teacher_weight).to(wide)
        return 0.5 * F.cross_entropy(student, target) + 0.5 * divergence(student, teacher) / len(x)

    return run


def jsd_of_log_probs(student: Tensor, teacher: Tensor) -> Tensor:
    mixture = torch.logaddexp(student, teacher) - torch.log(
        torch.tensor(2.0, dtype=student.dtype, device=student.device)
    )
    return 0.5 * sum(F.kl_div(mixture, p, reduction="sum", log_target=True) for p in (student, teacher))


def jsd(student: Tensor, teacher: Tensor) -> Tensor:
    return jsd_of_log_probs(student.log_softmax(-1), teacher.log_softmax(-1))


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True)


def tvd(student: Tensor, teacher: Tensor) -> Tensor:
    return 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum()


def kl_of_probs(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student, teacher, reduction="sum")


def tvd_of_probs(student: Tensor, teacher: Tensor) -> Tensor:
    return 0.5 * (student - teacher).abs().sum()


def cross_entropy_and_tvd(student: Tensor, teacher: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and total variation distance of each token, in fp32 or a wider dtype."""
    student, teacher = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (student, teacher))
    return (
        F.cross_entropy(student, target, reduction="none"),
        0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1),
    )


def of_distributions(divergence: Function) -> Function:
    """The mean of a divergence over rows, in fp32 or a wider dtype."""

    def run(student: Tensor, teacher: Tensor) -> Tensor:
        student, teacher = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (student, teacher))
        return divergence(student, teacher) / len(student)

    return run


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    return 0.5 * (1 - F.cosine_similarity(student, teacher)).sum()


def medusa(loss: Function) -> Function:
    """The weighted sum of the losses of all heads."""

    def total(x: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
        losses = [loss(x, weight, target) for weight, target in zip(weights, targets, strict=True)]
        return torch.stack([DECAY ** (k + 1) * head_loss for k, head_loss in enumerate(losses)]).sum()

    return total


def in_torch(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -log_probs(x, weight, target).mean()


def by_class(home: str, name: str, indices: tuple[int | None, ...], **options: Any) -> Function:
    """The loss of a module that has Liger Kernel's interface.

    Args:
        home: module that defines the class.
        name: name of the class.
        indices: for each argument of the loss, the index of an input, or None to pass None.
    """

    def run(*inputs: Tensor) -> Tensor:
        module = load(f"{home}:{name}")(**options)
        out = module(*(None if index is None else inputs[index] for index in indices))
        loss: Tensor = out[0] if isinstance(out, tuple) else out
        return loss

    return run


def both_of(home: str) -> Function:
    return lambda *inputs: load(f"{home}:LigerFusedCETVDLoss")()(*inputs)


def peers(truth: Function, name: str, *indices: int | None, **options: Any) -> dict[str, Peer]:
    return {
        "torch": Peer(truth),
        "liger": liger_peer(by_class("liger_kernel.chunked_loss", name, indices, **options)),
        "ours": Peer(by_class("liger_models", name, indices, **options)),
    }


def head(C: int, V: int) -> Tensor:
    return randn(V, C, scale=C**-0.5)


def make_rows(B: int, T: int, C: int, V: int) -> dict[str, Tensor]:
    return {"x": randn(B, T, C), "weight": head(C, V), "target": torch.randint(V, (B, T))}


def make_pairs(P: int, T: int, C: int, V: int) -> dict[str, Tensor]:
    rows = make_rows(2 * P, T, C, V)
    return {name: rows[name] for name in ("weight", "x", "target")}


def make_reference(B: int, T: int, C: int, V: int) -> dict[str, Tensor]:
    return {"ref_x": randn(B, T, C), "ref_weight": head(C, V)}


def make_answers(B: int, T: int, C: int, V: int) -> dict[str, Tensor]:
    # The reference log-probabilities are the log-probability of random logits plus noise.
    rewards = {"mask": torch.ones(B, T, dtype=torch.int64), "advantages": torch.randn(B)}
    expected = -torch.log(torch.tensor(float(V))) - 0.5
    return make_rows(B, T, C, V) | rewards | {"ref": expected + 0.5 * torch.randn(B, T)}


def make_teacher(N: int, C: int, V: int) -> dict[str, Tensor]:
    hidden = {"x": randn(N, C), "weight": head(C, V), "teacher_x": randn(N, C), "teacher_weight": head(C, V)}
    return hidden | {"target": torch.randint(V, (N,))}


def make_distributions(student_log: bool, teacher_log: bool) -> Callable[..., dict[str, Tensor]]:
    def make(N: int, V: int) -> dict[str, Tensor]:
        pairs = (("student", student_log), ("teacher", teacher_log))
        return {name: (randn(N, V).log_softmax(-1) if log else randn(N, V).softmax(-1)) for name, log in pairs}

    return make


def make_medusa(N: int, C: int, V: int, K: int) -> dict[str, Tensor]:
    heads = {f"weight {k}": head(C, V) for k in range(K)}
    return {"x": randn(N, C), "targets": torch.randint(V, (K, N)), **heads}


def shapes_of_pairs(C: int = 4096) -> tuple[Sizes, ...]:
    shapes = ((1, 4096, 128256), (4, 1024, 128256), (4, 4096, 128256), (4, 1024, 256000))
    return tuple({"P": P, "T": T, "C": C, "V": V} for P, T, V in shapes)


def distilled(name: str, divergence: Function, module: str, shapes: tuple[Sizes, ...], liger: bool) -> Op:
    implementations = peers(distil(divergence), module, 0, 1, 2, 3, 4)
    if not liger:
        del implementations["liger"]
    return Op(
        name=name, check={"N": 512}, fixed=("teacher_x", "teacher_weight"), truth=distil(divergence), limit="flops",
        shapes=shapes, make=make_teacher, work=lambda N, C, V: (8 * N * C * V,),
        peers=implementations,
    )  # fmt: skip


def of_stored(name: str, divergence: Function, module: str, log: tuple[bool, bool], **options: Any) -> Op:
    """A divergence between two distributions in memory. An ideal kernel reads both and writes one gradient."""
    truth = of_distributions(divergence)
    return Op(
        name=name, shapes=({"N": 4096, "V": 128256},), check={"N": 256}, fixed=("teacher",), truth=truth,
        limit="bytes", make=make_distributions(*log), work=lambda N, V: (6 * N * V,),
        peers={
            "torch": Peer(truth),
            "liger": liger_peer(by_class("liger_kernel.transformers", module, (0, 1), **options)),
            "ours": Peer(by_class("liger_models", module, (0, 1), **options)),
        },
    )  # fmt: skip


def shapes_of_rows(name: str, C: int = 4096) -> tuple[Sizes, ...]:
    return tuple({name: 8, "T": T, "C": C, "V": V} for T, V in ((1024, 128256), (4096, 128256), (1024, 256000)))


TOKENS = tuple({"N": N, "C": 4096, "V": V} for N, V in ((4096, 128256), (8192, 128256), (4096, 256000)))

OPS = (
    Op(
        name="dpo", shapes=shapes_of_pairs(), check={"T": 128}, fixed=("ref_x", "ref_weight"), truth=dpo, limit="flops",
        make=lambda P, T, C, V: make_pairs(P, T, C, V) | make_reference(2 * P, T, C, V),
        work=lambda P, T, C, V: (8 * 2 * P * T * C * V,),
        peers=peers(dpo, "LigerFusedLinearDPOLoss", 0, 1, 2, None, 3, 4, beta=BETA),
    ),
    Op(
        name="orpo", shapes=shapes_of_pairs(), check={"T": 128}, truth=orpo, limit="flops", make=make_pairs,
        work=lambda P, T, C, V: (6 * 2 * P * T * C * V,),
        peers=peers(orpo, "LigerFusedLinearORPOLoss", 0, 1, 2, beta=BETA),
    ),
    Op(
        name="cpo", shapes=shapes_of_pairs()[1:2], check={"T": 128}, truth=cpo, limit="flops", make=make_pairs,
        work=lambda P, T, C, V: (6 * 2 * P * T * C * V,),
        peers=peers(cpo, "LigerFusedLinearCPOLoss", 0, 1, 2, beta=BETA),
    ),
    Op(
        name="simpo", shapes=shapes_of_pairs()[1:2], check={"T": 128}, truth=simpo, limit="flops", make=make_pairs,
        work=lambda P, T, C, V: (6 * 2 * P * T * C * V,),
        peers=peers(simpo, "LigerFusedLinearSimPOLoss", 0, 1, 2, beta=BETA, gamma=GAMMA),
    ),
    Op(
        name="kto", shapes=shapes_of_rows("B"), check={"T": 128}, fixed=("ref_x", "ref_weight"), truth=kto,
        limit="flops", make=lambda B, T, C, V: make_rows(B, T, C, V) | {"labels": torch.arange(B) % 2 == 0}
        | make_reference(B, T, C, V),
        work=lambda B, T, C, V: (8 * B * T * C * V,),
        peers=peers(kto, "LigerFusedLinearKTOLoss", 0, 1, 2, None, 3, 4, 5, beta=BETA, use_ref_model=True),
    ),
    Op(
        name="grpo", shapes=shapes_of_rows("B"), check={"T": 128}, fixed=("advantages", "ref"), truth=grpo,
        limit="flops", make=make_answers, work=lambda B, T, C, V: (6 * B * T * C * V,),
        peers=peers(grpo, "LigerFusedLinearGRPOLoss", 0, 1, 2, 3, 4, None, 5, beta=BETA, loss_type="grpo"),
    ),
    distilled("jsd", jsd, "LigerFusedLinearJSDLoss", TOKENS, liger=True),
    distilled("forward_kl", kl, "LigerFusedLinearForwardKLLoss", TOKENS[:1], liger=False),
    distilled("tvd", tvd, "LigerFusedLinearTVDLoss", TOKENS[:1], liger=False),
    distilled("cosine", cosine, "LigerFusedLinearCosineSimilarityLoss", TOKENS[:1], liger=True),
    of_stored("jsd_of_log_probs", jsd_of_log_probs, "LigerJSD", (True, True)),
    of_stored("kl_of_probs", kl_of_probs, "LigerKLDIVLoss", (True, False), reduction="batchmean"),
    of_stored("tvd_of_probs", tvd_of_probs, "LigerTVDLoss", (False, False), reduction="batchmean"),
    Op(
        name="tvd_of_logits", shapes=({"N": 4096, "V": 128256},), check={"N": 256}, fixed=("teacher",), limit="bytes",
        make=lambda N, V: {"student": randn(N, V), "teacher": randn(N, V), "target": torch.randint(V, (N,))},
        truth=cross_entropy_and_tvd, work=lambda N, V: (4 * N * V, 6 * N * V),
        peers={
            "torch": Peer(cross_entropy_and_tvd),
            "liger": liger_peer(both_of("liger_kernel.transformers")),
            "ours": Peer(both_of("liger_models")),
        },
    ),
    Op(
        name="medusa", shapes=({"N": 4096, "C": 4096, "V": 128256, "K": 5},), check={"N": 1024, "V": 16032},
        truth=medusa(in_torch), limit="flops", make=make_medusa, work=lambda N, C, V, K: (6 * K * N * C * V,),
        peers={
            "torch": Peer(medusa(in_torch)),
            "liger": liger_peer(medusa(liger("liger_fused_linear_cross_entropy"))),
            "ours": Peer(medusa(lambda *inputs: linear_cross_entropy(*inputs).loss)),
        },
    ),
)  # fmt: skip
