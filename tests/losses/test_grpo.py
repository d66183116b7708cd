"""GRPO and related losses against an fp64 implementation written down from the papers, token by token."""

import math

import pytest
import torch
from torch import Tensor

from liger_models import LigerFusedLinearGRPOLoss, LigerGRPOLoss

from .plain import (
    T,
    assert_matches,
    assert_matches_in_fp64,
    inputs,
    plain_log_probs,
    plain_logits,
    results,
    targets,
)

B = 5
HEAD = {"softcap": 3.0, "logit_scale": 1.5, "temperature": 0.8}
ADVANTAGES = torch.tensor([1.2, -0.7, 0.0, 2.0, -1.5])
MASK = (targets(B, empty=(2,)) != -100).long()
IDS = targets(B).clamp_min(0)


def draw(seed: int, scale: float = 0.6) -> Tensor:
    return torch.randn(B, T, generator=torch.Generator().manual_seed(seed)).double() * scale


def base_log_probs() -> Tensor:
    x, weight, bias = (t.double() for t in inputs(B))
    return plain_log_probs(x, weight, bias, IDS)


OLD, REFERENCE = base_log_probs() + draw(5), base_log_probs() + draw(6)


def plain_grpo(
    kind="dapo", *, beta=0.0, low=0.2, high=0.2, sequence=False, old=None, ref=None, delta=None, kl="k3",
    corrected=False, vllm=None, tau=(1.0, 1.05), vespo=((2.0, 3.0), (3.0, 2.0)), max_length=None, items=None,
    upstream=None, **head,
):  # fmt: skip
    """``(x, weight, bias) -> (loss, metrics)``, in loops; with ``upstream`` [B, T] the loss is Σ upstream · L."""

    def function(x, weight, bias):
        l = plain_log_probs(x, weight, bias, IDS, **head)  # noqa: E741
        l_old = l.detach() if old is None else old
        losses, clipped, divergence = [], 0.0, 0.0
        for i in range(B):
            inside = [t for t in range(T) if MASK[i, t]]
            A = ADVANTAGES[i].double()
            loss = l.new_zeros(T)
            mean_ratio = torch.exp(sum(((l - l_old)[i, t] for t in inside), l.new_zeros(())) / max(len(inside), 1))
            W = torch.exp(sum(((l - l_old)[i, t].detach() for t in inside), l.new_zeros(())))
            if vllm is not None and kind == "vespo":
                W = W * math.prod(vllm[i, t].item() for t in inside)
            for t in inside:
                w = mean_ratio if sequence else torch.exp(l[i, t] - l_old[i, t])
                if kind == "cispo":
                    token = -torch.clamp(w.detach(), max=high) * A * l[i, t]
                    clipped += bool(w > high and A > 0)
                elif kind == "sapo":
                    temperature = tau[0] if A > 0 else tau[1]
                    token = -4 / temperature / (1 + torch.exp(-temperature * (w - 1))) * A
                elif kind == "vespo":
                    k, rate = vespo[0] if A >= 0 else vespo[1]
                    token = -(W**k) * torch.exp(rate * (1 - W)) * A * l[i, t]
                else:
                    bounded = w if delta is None else torch.clamp(w, max=delta)
                    token = -torch.minimum(bounded * A, torch.clamp(w, 1 - low, 1 + high) * A)
                    clipped += bool((w > 1 + high and A > 0) or (w < 1 - low and A < 0))
                if vllm is not None and kind != "vespo":
                    token = token * vllm[i, t]
                if beta:
                    d = l[i, t] - ref[i, t]
                    term = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) + d - 1}[kl] * (w if corrected else 1)
                    token = token + beta * term
                    divergence += term.detach()
                loss[t] = token
            losses.append(loss)
        losses, counts, tokens = torch.stack(losses), MASK.sum(1), MASK.sum()
        if upstream is not None:
            return (losses * upstream).sum(), [losses.detach()]
        total = {
            "grpo": lambda: (losses.sum(1) / counts.clamp(min=1)).mean(),
            "bnpo": lambda: losses.sum() / tokens,
            "dr_grpo": lambda: losses.sum() / (B * max_length),
            "luspo": lambda: losses.sum() / B,
            "dapo": lambda: losses.sum() / (tokens if items is None else items),
        }[{"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}.get(kind, kind)]()
        clip = torch.as_tensor(clipped / tokens.double())
        return total, [*([divergence / tokens] if beta else []), clip]

    return function


def bound(loss, **tensors):
    def function(x, weight, bias):
        moved = {k: v.to(x) if isinstance(v, Tensor) else v for k, v in tensors.items()}
        ids, mask = IDS.to(x.device), MASK.to(x.device)
        return loss(x, weight, ids, mask, ADVANTAGES.to(x), bias, **moved)

    return function


CASES = {
    **{
        kind: ({"loss_type": kind, **({"max_completion_length": 9} if kind == "dr_grpo" else {})}, {"kind": kind})
        for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    },
    **{
        f"sequence-{kind}": (
            {"loss_type": kind, "importance_sampling_level": "sequence", "max_completion_length": 9},
            {"kind": kind, "sequence": True},
        )
        for kind in ("grpo", "dr_grpo", "dapo", "luspo")
    },
    "clip-higher": ({"epsilon_low": 0.1, "epsilon_high": 0.5}, {"low": 0.1, "high": 0.5}),
    "two-sided": ({"delta": 1.4}, {"delta": 1.4}),
    "sapo temperatures": (
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
        {"kind": "sapo", "tau": (2.0, 0.5)},
    ),
    "vespo shapes": (
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.0,
            "vespo_lambda_pos": 0.5,
            "vespo_k_neg": 0.7,
            "vespo_lambda_neg": 1.1,
        },
        {"kind": "vespo", "vespo": ((1.0, 0.5), (0.7, 1.1))},
    ),
}
CASES = {
    name: ({**ours, **({} if ours.get("loss_type") == "dr_grpo" else {"max_completion_length": None})}, plain)
    for name, (ours, plain) in CASES.items()
}  # fmt: skip


@pytest.mark.cases(19)
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize(("ours", "plain"), CASES.values(), ids=CASES)
def test_loss_types(ours, plain, with_old, beta):
    plain = {"max_length": 9, **plain, "old": OLD if with_old else None, "ref": REFERENCE, "beta": beta}
    loss = LigerFusedLinearGRPOLoss(beta=beta, **ours)
    tensors = {"old_per_token_logps": plain["old"], "ref_per_token_logps": REFERENCE if beta else None}
    function = bound(loss, **tensors)
    assert_matches_in_fp64(function, plain_grpo(**plain), inputs(B))
    assert_matches(function, plain_grpo(**plain), inputs(B), tolerance=4e-6)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_kl_estimators(kl, sequence, corrected):
    loss = LigerFusedLinearGRPOLoss(
        0.3, kl_estimator=kl, use_bias_correction_kl=corrected,
        importance_sampling_level="sequence" if sequence else "token",
    )  # fmt: skip
    plain = plain_grpo(beta=0.3, kl=kl, corrected=corrected, sequence=sequence, old=OLD, ref=REFERENCE)
    function = bound(loss, old_per_token_logps=OLD, ref_per_token_logps=REFERENCE)
    assert_matches_in_fp64(function, plain, inputs(B))


@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_head_and_reference_model(backend, kind):
    ref_inputs = inputs(B, hidden=5, seed=3)
    reference = plain_log_probs(*(t.double() for t in ref_inputs), IDS, **HEAD)
    plain = plain_grpo(kind, beta=0.2, old=OLD, ref=reference, **HEAD)
    loss = LigerFusedLinearGRPOLoss(0.2, loss_type=kind, **HEAD)
    tensors = dict(zip(("ref_input", "ref_weight", "ref_bias"), ref_inputs, strict=True))
    assert_matches(bound(loss, old_per_token_logps=OLD, **tensors), plain, inputs(B), backend, 4e-6)


@pytest.mark.parametrize("shape", [(B,), (B, 1), (B, T)])
@pytest.mark.parametrize("kind", ["dapo", "sapo", "vespo"])
def test_correction_for_the_sampler(kind, shape):
    ratio = torch.rand(shape, generator=torch.Generator().manual_seed(7)).double() + 0.5
    if kind == "vespo" and shape != (B, T):  # one factor of the sequence, once
        each = (ratio.view(B) ** (1 / MASK.sum(1).clamp(min=1).double()))[:, None].expand(B, T)
    else:
        each = ratio.view(B, -1).expand(B, T)
    plain = plain_grpo(kind, old=OLD, vllm=each)
    loss = LigerFusedLinearGRPOLoss(0.0, loss_type=kind)
    ours = bound(loss, old_per_token_logps=OLD, vllm_is_ratio=ratio)
    assert_matches_in_fp64(ours, plain, inputs(B))


@pytest.mark.parametrize("kind", ["dapo", "grpo"])
@pytest.mark.parametrize("old", [None, OLD], ids=["sampled_now", "sampled_before"])
def test_correction_for_a_sampler_that_rounds(backend, kind, old):
    """The ratio of the policy that trained the tokens and of the sampler, cut off at the cap."""
    x, weight, bias = (t.double() for t in inputs(B))
    policy = plain_log_probs(x, weight, bias, IDS) if old is None else OLD
    noise = torch.randn(B, T, generator=torch.Generator().manual_seed(5)).double()
    sampling = (policy + noise).detach()
    ratio = (policy - sampling).exp().clamp(max=1.5).detach()
    assert ((ratio == 1.5) & (MASK != 0)).any()
    assert ((ratio < 1.5) & (MASK != 0)).any()
    sampling = sampling.where(MASK != 0, math.nan)
    loss = LigerFusedLinearGRPOLoss(0.0, loss_type=kind, sampling_cap=1.5)
    others = {} if old is None else {"old_per_token_logps": OLD}
    plain = plain_grpo(kind, old=policy.detach(), vllm=ratio)

    def plain_with_metric(*leaves):
        value, metrics = plain(*leaves)
        return value, (*metrics, ((noise.abs() * MASK).sum() / MASK.sum()).to(value))

    ours = bound(loss, **others, sampling_per_token_logps=sampling)
    assert_matches(ours, plain_with_metric, inputs(B), backend, 4e-6)


@pytest.mark.parametrize("items", [40, torch.tensor(40.0)])
def test_number_of_items(items):
    ours = bound(LigerFusedLinearGRPOLoss(0.0), old_per_token_logps=OLD, num_items_in_batch=items)
    assert_matches_in_fp64(ours, plain_grpo(old=OLD, items=40), inputs(B))


@pytest.mark.parametrize("items", [float("nan"), -3, True, 0])
def test_a_number_of_items_that_cannot_be(items):
    ours = bound(LigerFusedLinearGRPOLoss(0.0), old_per_token_logps=OLD, num_items_in_batch=items)
    with pytest.raises(ValueError, match="num_items_in_batch must be a positive number, or 0 without targets"):
        ours(*inputs(B))


@pytest.mark.parametrize("items", [None, 40])
def test_several_ranks_divide_by_the_tokens_of_all(items, monkeypatch):
    """Two ranks, the other with three times our tokens. Gradients are averaged over ranks afterwards."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.mul_(4))
    ours = bound(LigerFusedLinearGRPOLoss(0.0), old_per_token_logps=OLD, num_items_in_batch=items)
    tokens = MASK.sum() * 4 if items is None else items
    assert_matches_in_fp64(ours, plain_grpo(old=OLD, items=tokens / 2), inputs(B))


@pytest.mark.cases(8)
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_nothing_is_masked_in_from_padding(backend, kind):
    """Values at masked tokens have no effect, not even NaN or ids out of range."""
    x, weight, bias = (t.to(backend).requires_grad_() for t in inputs(B))
    loss = LigerFusedLinearGRPOLoss(loss_type=kind, max_completion_length=T)
    mask, advantages = MASK.to(backend), ADVANTAGES.to(backend)

    def outcome(ids, old, ref):
        ids, old, ref = ids.to(backend), old.float().to(backend), ref.float().to(backend)
        value, metrics = loss(
            x, weight, ids, mask, advantages, bias, ref, old, vllm_is_ratio=torch.ones_like(old).where(mask != 0, old)
        )
        return [value, *metrics, *torch.autograd.grad(value, (x, weight, bias))]

    want = outcome(IDS, OLD.where(MASK != 0, 1.0), REFERENCE)
    inside = MASK != 0
    got = outcome(IDS.where(inside, 10**6), OLD.where(inside, math.nan), REFERENCE.where(inside, math.inf))
    torch.testing.assert_close(got, want)
    assert all(tensor.isfinite().all() for tensor in got)


def on_logits(loss, logits_options, extra, **options):
    """``(x, weight, bias) -> result`` of a loss on logits, with ``extra`` positions after the completions."""

    def function(x, weight, bias):
        move = lambda t: t.to(x) if isinstance(t, Tensor) else t
        logits = plain_logits(torch.nn.functional.pad(x, (0, 0, 0, extra)), weight, bias, **logits_options)
        named = {key: move(value) for key, value in options.items()}
        reference, old = named.pop("ref", None), named.pop("old", None)
        ids, mask = (tensor.to(x.device) for tensor in (IDS, MASK))
        return loss(logits, old, reference, ids, ADVANTAGES.to(x), mask, **named)

    return function


@pytest.mark.cases(19)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize(("ours", "plain"), CASES.values(), ids=CASES)
def test_of_logits(ours, plain, with_old, extra):
    """The same losses and metrics from whole logits, with and without the position after the completions."""
    given = {"old": OLD if with_old else None, "ref": REFERENCE}
    plain = plain_grpo(**{"max_length": 9, **plain, **given, "beta": 0.3, "temperature": 0.8})
    function = on_logits(LigerGRPOLoss(0.3, **ours, temperature=0.8), {}, extra, **given)
    assert_matches_in_fp64(function, plain, inputs(B))
    assert_matches(function, plain, inputs(B), tolerance=4e-6)


@pytest.mark.cases(19)
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize(("ours", "plain"), CASES.values(), ids=CASES)
def test_of_each_token(ours, plain, with_old, beta):
    """reduce=False: every token's loss, and its gradient under an upstream gradient of its own."""
    upstream = draw(8)
    given = {"old": OLD if with_old else None, "ref": REFERENCE if beta else None}
    plain = plain_grpo(**{"max_length": 9, **plain, **given, "beta": beta, "upstream": upstream})
    tokens = on_logits(LigerGRPOLoss(beta, **ours), {}, 1, **given, reduce=False)

    def weighted(x, weight, bias):
        loss, kl, clipped = tokens(x, weight, bias)
        assert (kl is None) == (beta == 0.0)
        assert not clipped.requires_grad
        assert kl is None or not kl.requires_grad
        assert all(each is None or each.shape == (B, T) for each in (loss, kl, clipped))
        return (loss * upstream.to(x)).sum(), [loss.detach()]

    assert_matches_in_fp64(weighted, plain, inputs(B))


def test_metrics_of_each_token():
    """They add up to the metrics of the reduced loss."""
    loss, given = LigerGRPOLoss(0.3, loss_type="bnpo"), {"old": OLD, "ref": REFERENCE}
    leaves = [t.double() for t in inputs(B)]
    value, kl, clipped = on_logits(loss, {}, 0, **given, reduce=False)(*leaves)
    want, metrics = on_logits(loss, {}, 0, **given)(*leaves)
    torch.testing.assert_close([each.sum() / MASK.sum() for each in (value, kl, clipped)], [want, *metrics])
    assert clipped.any()


def test_of_logits_on_kernels(backend):
    """With a softcap and a factor that the logits have not been through; nothing is read from padding."""
    x, weight, bias = (t.to(backend) for t in inputs(B))
    logits = plain_logits(x, weight, bias).requires_grad_()
    inside = MASK != 0
    loss = LigerGRPOLoss(0.2, loss_type="grpo", **HEAD)
    poisoned = OLD.where(inside, math.nan), REFERENCE.where(inside, math.inf), IDS.where(inside, 10**6)
    old, reference, ids = (each.to(backend) for each in poisoned)
    value, _, _ = loss(
        logits, old.float(), reference.float(), ids, ADVANTAGES.to(backend), MASK.to(backend), reduce=False
    )
    got = [value, torch.autograd.grad(value.sum(), logits)[0]]
    assert not got[1].cpu()[~inside].any()
    wide = logits.detach().double().cpu().requires_grad_()
    log_probs = (3.0 * torch.tanh(1.5 * wide / 3.0) / 0.8).log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
    rest = {"ref_per_token_logps": REFERENCE, "old_per_token_logps": OLD}
    truth, _, _ = loss.token_losses(log_probs, MASK, ADVANTAGES.double(), **rest)
    want = [truth, torch.autograd.grad(truth.sum(), wide)[0]]
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double().cpu(), exact, rtol=1e-4, atol=2e-6)


def test_logits_in_half_precision_are_read_where_they_are():
    """The position after the completions costs no copy of the logits, and they are not overwritten."""
    x, weight, bias = inputs(B)
    logits = plain_logits(torch.nn.functional.pad(x, (0, 0, 0, 1)), weight, bias).bfloat16().requires_grad_()
    before = logits.detach().clone()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss, _ = LigerGRPOLoss(0.0)(logits, OLD.float(), None, IDS, ADVANTAGES)
    assert {t.data_ptr() for t in saved if t.numel() >= logits.numel()} <= {logits.data_ptr()}
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16
    assert not logits.grad[:, -1].any()
    assert torch.equal(logits, before)


def test_everything_masked(backend):
    x, weight, bias = (t.to(backend).requires_grad_() for t in inputs(B))
    args = (IDS.to(backend), torch.zeros_like(MASK).to(backend), ADVANTAGES.to(backend), bias)
    for kind in ("grpo", "bnpo", "dapo", "luspo", "vespo"):
        value, metrics = LigerFusedLinearGRPOLoss(0.0, loss_type=kind)(x, weight, *args)
        gradients = torch.autograd.grad(value, (x, weight, bias))
        assert value == 0
        assert all(metric == 0 for metric in metrics)
        assert all(gradient.eq(0).all() for gradient in gradients)


def test_from_log_probs():
    x, weight, bias = inputs(B)
    loss = LigerFusedLinearGRPOLoss(temperature=0.7)
    rest = {"ref_per_token_logps": REFERENCE.float(), "old_per_token_logps": OLD.float()}
    want = loss(x, weight, IDS, MASK, ADVANTAGES, bias, **rest)
    log_probs = plain_log_probs(x, weight, bias, IDS, temperature=0.7)
    torch.testing.assert_close(loss.from_log_probs(log_probs, MASK, ADVANTAGES, **rest), want)


@pytest.mark.compile
def test_compiled():
    loss = LigerFusedLinearGRPOLoss(temperature=0.7)
    rest = {"ref_per_token_logps": REFERENCE, "old_per_token_logps": OLD}
    want = results(bound(loss, **rest), inputs(B), torch.float32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(bound(compiled, **rest), inputs(B), torch.float32), want)


def call(loss, **changes):
    x, weight, _ = inputs(B)
    named = {"_input": x, "lin_weight": weight, "selected_token_ids": IDS, "attention_mask": MASK, **changes}
    return loss(**{"advantages": ADVANTAGES, **named})


NO_KL = {"beta": 0.0}


LOGITS = plain_logits(*inputs(B))
GIVEN = (None, REFERENCE, IDS, ADVANTAGES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda loss: loss(LOGITS[:, 1:], *GIVEN), r"logits must be \[B, T, V\] or \[B, T \+ 1, V\]"),
        (lambda loss: loss(LOGITS[0], *GIVEN), "logits must be"),
        (lambda loss: loss(LOGITS, None, REFERENCE, IDS[0], ADVANTAGES), "logits must be"),
        (lambda loss: loss(LOGITS, *GIVEN, MASK[:, 1:]), r"completion_mask must be \[5, 6\]"),
        (lambda loss: loss(LOGITS, None, None, IDS, ADVANTAGES), "needs a reference"),
        (
            lambda loss: loss(LOGITS, *GIVEN, num_items_in_batch=4, reduce=False),
            "must be None with reduce=False, got 4",
        ),
        (lambda loss: loss(LOGITS, *GIVEN, sampling_per_token_logps=OLD, reduce=False), "got None and a tensor"),
    ],
)
def test_wrong_logits(make, message):
    with pytest.raises(ValueError, match=f"LigerGRPOLoss: .*{message}"):
        make(LigerGRPOLoss())


@pytest.mark.parametrize(
    "make",
    [
        lambda: LigerFusedLinearGRPOLoss(epsilon_low=-0.1),
        lambda: LigerFusedLinearGRPOLoss(beta=-0.1),
        lambda: LigerFusedLinearGRPOLoss(loss_type="ppo"),
        lambda: LigerFusedLinearGRPOLoss(kl_estimator="k4"),
        lambda: LigerFusedLinearGRPOLoss(importance_sampling_level="batch"),
        lambda: LigerFusedLinearGRPOLoss(importance_sampling_level="sequence", loss_type="cispo"),
        lambda: LigerFusedLinearGRPOLoss(loss_type="dr_grpo"),
        lambda: LigerFusedLinearGRPOLoss(temperature=0.0),
        lambda: LigerFusedLinearGRPOLoss(delta=-1.0),
        lambda: LigerFusedLinearGRPOLoss(epsilon_low=0.1, loss_type="cispo"),
        lambda: LigerFusedLinearGRPOLoss(epsilon_low=0.1, loss_type="sapo"),
        lambda: LigerFusedLinearGRPOLoss(epsilon_high=0.3, loss_type="vespo"),
        lambda: LigerFusedLinearGRPOLoss(**NO_KL, kl_estimator="k1"),
        lambda: LigerFusedLinearGRPOLoss(**NO_KL, use_bias_correction_kl=True),
        lambda: LigerFusedLinearGRPOLoss(delta=2.0, loss_type="sapo"),
        lambda: LigerFusedLinearGRPOLoss(use_ref_model=False),
        lambda: LigerFusedLinearGRPOLoss(sapo_temperature_pos=2.0),
        lambda: LigerFusedLinearGRPOLoss(loss_type="sapo", vespo_k_neg=1.0),
        lambda: call(LigerFusedLinearGRPOLoss()),
        lambda: call(LigerFusedLinearGRPOLoss(), ref_input=inputs(B)[0]),
        lambda: call(LigerFusedLinearGRPOLoss(0.0, use_ref_model=False), ref_per_token_logps=REFERENCE),
        lambda: call(LigerFusedLinearGRPOLoss(), ref_per_token_logps=REFERENCE, ref_bias=torch.zeros(23)),
        lambda: call(LigerFusedLinearGRPOLoss(**NO_KL, loss_type="grpo"), num_items_in_batch=3),
        lambda: call(LigerFusedLinearGRPOLoss(**NO_KL), advantages=ADVANTAGES[:-1]),
        lambda: call(LigerFusedLinearGRPOLoss(**NO_KL), attention_mask=MASK[:, 1:]),
        lambda: call(LigerFusedLinearGRPOLoss(**NO_KL), old_per_token_logps=OLD[:, 1:]),
        lambda: call(LigerFusedLinearGRPOLoss(**NO_KL), vllm_is_ratio=torch.ones(T)),
        lambda: call(LigerFusedLinearGRPOLoss(**NO_KL), sampling_per_token_logps=torch.ones(T)),
        lambda: LigerFusedLinearGRPOLoss(**NO_KL, sampling_cap=0.0),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ValueError, match="LigerFusedLinearGRPOLoss"):
        make()
