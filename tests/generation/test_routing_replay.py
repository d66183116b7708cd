"""Routing replay: the experts that a rollout chose are recorded, and the training forward takes them."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from liger_models import AutoLigerModel
from liger_models.arch import built_in
from liger_models.generation import rollouts as module
from liger_models.generation import scheduler
from liger_models.generation.rollouts import rollout
from liger_models.generation.scheduler import Scheduler
from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.moe import Routing, route_reference
from liger_models.layers import moe as moe_module
from liger_models.layers import paged_cache
from liger_models.layers.moe import LigerMoE

from ..arch.families import tiny

pytestmark = pytest.mark.slow

VOCAB = 40


def mixture(arch="qwen3_moe", variant=None, device="cpu", seed=0, **changes):
    """A model whose routers are far from choosing at random."""
    torch.manual_seed(seed)
    sizes = tiny(arch)[variant] if variant else next(iter(tiny(arch).values()))
    model = AutoLigerModel.from_config({**sizes, "model_type": arch, **changes}, device=device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
    return model


def mixtures():
    """Every family and variant that has routed experts."""
    found = [(arch, variant, sizes) for arch in built_in() for variant, sizes in tiny(arch).items()]
    return [(arch, variant) for arch, variant, sizes in found if "expert" in str(sizes) and routes(arch, sizes)]


def routes(arch, sizes):
    with torch.device("meta"):
        return bool(AutoLigerModel.from_config({**sizes, "model_type": arch}, device="meta").routers)


MIXTURES = mixtures()
BOUNDS = torch.tensor([0, 5, 14, 24])


def packed(device="cpu"):
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "labels": ids, "cu_seqlens": BOUNDS.to(device)}


def own_choice(model, **inputs):
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    out = model(**inputs, return_logits=False)
    B, T = inputs["input_ids"].shape
    return model.choose_experts(out.router_logits).unflatten(0, (B, T))


def other_choice(model, B, T):
    """[B, T, L, K]: different experts for each token and layer, drawn."""
    X = len(model.routers[0].down_weight)
    scores = torch.rand(B, T, len(model.routers), X, generator=torch.Generator().manual_seed(2))
    return scores.topk(model.routers[0].top_k).indices.to(model.device, torch.int16)


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def test_there_are_mixtures():
    assert {"mixtral", "gpt_oss", "qwen3_moe", "qwen3_vl_moe", "qwen3_next", "gemma4_text"} <= {a for a, _ in MIXTURES}


@pytest.mark.cases(23)
@pytest.mark.parametrize("case", MIXTURES, ids="-".join)
def test_replay_of_the_own_choice_changes_no_bit(case):
    """The loss and all gradients, of packed documents."""
    model = mixture(*case)
    inputs = packed()
    chosen = own_choice(model, **inputs)
    assert chosen.dtype == torch.int16
    assert chosen.shape == (2, 12, len(model.routers), model.routers[0].top_k)
    free = loss_and_gradients(model, **inputs)
    replayed = loss_and_gradients(model, **inputs, routed_experts=chosen)
    assert len(free) == len(replayed) > 5
    assert all(map(torch.equal, replayed, free))


def trained(router):
    """The parameters of a router that gradients train."""
    return [parameter for parameter in router.parameters() if parameter.requires_grad]


@pytest.mark.cases(23)
@pytest.mark.parametrize("case", MIXTURES, ids="-".join)
def test_every_layer_takes_its_own_part(case, monkeypatch):
    """As if the routers chose, one after the other, what is given; and their weights get gradients."""
    model, inputs = mixture(*case), packed()
    given = other_choice(model, 2, 12)
    got = loss_and_gradients(model, **inputs, routed_experts=given)
    if model.routers[0].active_share < 1:
        assert not torch.equal(got[0], loss_and_gradients(model, **inputs)[0])
    layers = iter(given.flatten(0, 1).long().unbind(1))

    def to_given(logits, routing, bias, _):
        experts = next(layers)
        if routing.score == "sparsemixer":
            return route_reference(logits, routing, None, experts)
        scores = logits.float().softmax(-1) if routing.score == "softmax" else logits.float().sigmoid()
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(1, keepdim=True) if routing.normalize else weights
        weights = weights * routing.scale
        return weights.to(logits.dtype).float() if routing.round_weights else weights, experts

    for name in ("route", "route_reference"):
        monkeypatch.setattr(moe_module, name, to_given)
    want = loss_and_gradients(model, **inputs)
    assert next(layers, None) is None
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert all(each.grad.abs().sum() > 0 for layer in model.routers for each in trained(layer.router))


def test_a_layer_by_hand(backend):
    """Output and gradients of given experts, in plain torch; the third token has none."""
    torch.manual_seed(0)
    N, C, n, X, K = 5, 16, 16, 6, 2
    layer = LigerMoE(C, n, X, Routing(K, normalize=True)).to(backend)
    x = torch.randn(1, N, C, device=backend, requires_grad=True)
    given = torch.tensor([[4, 1], [0, 5], [-1, -1], [3, 2], [2, 4]], device=backend)
    upstream = torch.randn(1, N, C, device=backend)

    def run(function):
        layer.zero_grad()
        x.grad = None
        y = function()
        y.backward(upstream)
        return [y.detach(), x.grad.clone(), *(each.grad.clone() for each in layer.parameters())]

    def by_hand():
        logits = x[0] @ layer.gate.weight.T
        chosen = [row if row[0] >= 0 else logits[i].topk(K).indices.tolist() for i, row in enumerate(given.tolist())]
        rows = []
        for i, experts in enumerate(chosen):
            shares = logits[i, experts].softmax(0)
            gate, up = (layer.gate_up_weight[experts] @ x[0, i]).unflatten(1, (n, 2)).unbind(2)
            each = (layer.down_weight[experts] @ (F.silu(gate) * up)[..., None])[..., 0]
            rows.append((shares[:, None] * each).sum(0))
        return torch.stack(rows)[None]

    for got, want in zip(run(lambda: layer(x, given[None])[0]), run(by_hand), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_the_backward_takes_the_same_experts(policy):
    """Also where a block is recomputed as a whole by code of a user's own."""
    model, inputs = mixture("mixtral"), packed()
    given = other_choice(model, 2, 12)
    want = loss_and_gradients(model, **inputs, routed_experts=given)
    model.set_checkpointing(policy)
    for one, other in zip(loss_and_gradients(model, **inputs, routed_experts=given), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    if policy == "none":
        for block in model.layers:
            forward = block.forward
            block.forward = lambda *args, forward=forward: torch.utils.checkpoint.checkpoint(
                forward, *args, use_reentrant=False
            )
        assert all(map(torch.equal, loss_and_gradients(model, **inputs, routed_experts=given), want))


def test_padding_and_tokens_without_a_choice():
    """Negative numbers leave the choice to the router; what padding is given changes no token."""
    model = mixture("mixtral")
    ids = torch.randint(3, VOCAB, (2, 10))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    given = other_choice(model, 2, 10)
    some = given.clone()
    some[:, 5:] = -1
    with torch.no_grad():
        got, free = model(**inputs, routed_experts=some).logits, model(**inputs).logits
        assert torch.equal(model(**inputs, routed_experts=torch.full_like(given, -1)).logits, free)
        assert not torch.allclose(got, free)
        other = some.clone()
        other[1, :4] = -1
        torch.testing.assert_close(model(**inputs, routed_experts=other).logits[mask == 1], got[mask == 1])


@pytest.mark.compile
@pytest.mark.parametrize("part", ["blocks", "model"])
def test_compiled(part):
    model, inputs = mixture("mixtral"), packed()
    given = other_choice(model, 2, 12)
    want = loss_and_gradients(model, **inputs, routed_experts=given)
    for each in model.layers if part == "blocks" else [model]:
        each.compile(backend="eager", fullgraph=True)
    for one, other in zip(loss_and_gradients(model, **inputs, routed_experts=given), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_what_cannot_be_replayed(monkeypatch):
    model, ids = mixture("mixtral"), torch.randint(3, VOCAB, (2, 6))
    given = other_choice(model, 2, 6)
    with pytest.raises(ValueError, match=r"routed_experts must be \[2, 6, 2, 2\] .*, got \[2, 5, 2, 2\]"):
        model(ids, routed_experts=given[:, 1:])
    with pytest.raises(ValueError, match=r"given must be .* integers"):
        model(ids, routed_experts=given.float())
    wrong = given.clone()
    wrong[1, 3, 1, 1] = len(model.routers[0].down_weight)
    with pytest.raises(ValueError, match="given must name experts below"):
        model(ids, routed_experts=wrong)
    dense = mixture("llama")
    with pytest.raises(ValueError, match="routed_experts need layers with routed experts, got LigerLlama without any"):
        dense(ids, routed_experts=given)
    with pytest.raises(ValueError, match=r"record_routing needs routed experts .* got LigerLlama"):
        rollout(dense, ids, max_new_tokens=2, record_routing=True)
    monkeypatch.setattr(type(model), "replays_routing", False)
    with pytest.raises(ValueError, match="LigerMixtral, whose replays_routing is False"):
        model(ids, routed_experts=given)
    with pytest.raises(ValueError, match="record_routing needs routed experts in blocks that replay"):
        rollout(model, ids, max_new_tokens=2, record_routing=True)


# --- rollouts --------------------------------------------------------------------------------------------------------

LENGTHS, NEW = [9, 1, 38, 17, 3, 33], [12, 5, 9, 1, 20, 8]


@pytest.fixture(autouse=True)
def _pages_of_16_tokens(monkeypatch):
    monkeypatch.setattr(paged_cache, "PAGE", 16)


@pytest.fixture
def removed(monkeypatch):
    """Numbers of the rows whose pages were taken, at their end or before."""
    found, original = [], Scheduler._remove
    monkeypatch.setattr(Scheduler, "_remove", lambda self, row: found.append(row.number) or original(self, row))
    return found


def make_prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def assert_recorded(model, prompts, found, repeats=1):
    """What is recorded is what a forward over the whole row chooses, of all tokens but the last."""
    for number, row in enumerate(found):
        ids = torch.tensor([[*prompts[number // repeats], *row.tokens.tolist()]], device=model.device)
        want = own_choice(model, input_ids=ids)[0].cpu()
        assert row.routed_experts.dtype == torch.int16
        assert torch.equal(row.routed_experts[:-1], want[:-1]), number
        assert torch.equal(row.routed_experts[-1], torch.full_like(want[-1], -1))


@pytest.mark.cases(3)
@pytest.mark.parametrize("arch", ["mixtral", "gpt_oss", "qwen3_moe", "qwen3_next", "qwen3_vl_moe"])
def test_a_rollout_records_what_a_forward_over_the_row_chooses(arch):
    """Through chunks, packed prompts, rows that wait, stop tokens and steps of fewer rows; and nothing else changes."""
    model, prompts = mixture(arch), make_prompts()
    for sizes in ({"batch_size": 3, "chunk_size": 11, "steps_per_read": 3}, {"batch_size": 5, "chunk_size": 60}):
        options = {"max_new_tokens": NEW, "do_sample": True, "seed": 3, "eos_token_id": [7, 8, 9], **sizes}
        found = rollout(model, prompts, record_routing=True, **options)
        assert_recorded(model, prompts, found)
        plain = rollout(model, prompts, **options)
        assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in plain]
        assert all(map(torch.equal, (row.log_probs for row in found), (row.log_probs for row in plain)))
        assert all(row.routed_experts is None for row in plain)


@pytest.mark.parametrize("batch_size", [256, 3])
def test_rows_of_one_prompt_have_its_experts(batch_size):
    model, prompts = mixture("mixtral"), make_prompts([38, 1, 17, 2])
    found = rollout(
        model, prompts, max_new_tokens=6, do_sample=True, seed=1, eos_token_id=[], chunk_size=20, record_routing=True,
        num_return_sequences=4, batch_size=batch_size,
    )  # fmt: skip
    assert_recorded(model, prompts, found, repeats=4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("repeats", [1, 3])
def test_rows_that_are_put_back_pass_the_same_experts(removed, monkeypatch, repeats):
    """Their choice is recorded once, and given to the forward that computes them again."""
    model, prompts, new = mixture("mixtral"), make_prompts([20, 3, 17, 2, 5, 19]), [20, 44, 22, 35, 38, 25]
    pools, make_pool = [], module._make_pool
    monkeypatch.setattr(module, "_make_pool", lambda *args: pools.append(make_pool(*args)) or pools[-1])
    options = {"max_new_tokens": new, "do_sample": True, "seed": 0, "eos_token_id": [], "num_return_sequences": repeats}
    want = rollout(model, prompts, record_routing=True, **options)
    page = sum(x[0].nbytes for layer in pools[0]._layers.values() for x in layer)
    removed.clear()
    small = {"cache_bytes": 5 * page, "chunk_size": 9, "steps_per_read": 5, "record_routing": True}
    found = rollout(model, prompts, **options, **small)
    assert len(removed) > len(found)
    assert_recorded(model, prompts, found, repeats)
    assert all(torch.equal(one.routed_experts, other.routed_experts) for one, other in zip(found, want, strict=True))

    given = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **more: given.append(more) or forward(*args, **more))
    rollout(model, prompts, **options, **small)
    replayed = [more["routed_experts"] for more in given if more.get("routed_experts") is not None]
    assert any((each >= 0).any() for each in replayed)
    assert any((each < 0).all() for each in replayed)


def test_log_probs_of_the_training_forward_in_half_precision():
    """With the recorded experts the training forward finds the log-probabilities of the rollout; without, it passes
    other experts wherever two logits of a router are close."""
    model = mixture("mixtral").bfloat16()
    prompts = make_prompts([9, 17, 30, 25])
    found = rollout(
        model, prompts, max_new_tokens=20, do_sample=True, seed=5, eos_token_id=[], record_routing=True, chunk_size=16
    )
    rows = [torch.tensor([*prompt, *row.tokens.tolist()]) for prompt, row in zip(prompts, found, strict=True)]
    bounds = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    inputs = {"input_ids": torch.cat(rows)[None], "labels": torch.cat(rows)[None], "cu_seqlens": bounds}
    experts = torch.cat([row.routed_experts for row in found])[None]
    own = own_choice(model, **inputs)
    flipped = (own.sort(-1).values != experts.sort(-1).values).any(-1)[experts[..., 0] >= 0]
    assert flipped.any()

    def error(**more):
        trained = model(**inputs, return_log_probs=True, **more).log_probs[0]
        firsts = [start + len(prompt) - 1 for start, prompt in zip(bounds.tolist(), prompts, strict=False)]
        return max(
            (row.log_probs - trained[first : first + len(row.tokens)]).abs().max().item()
            for first, row in zip(firsts, found, strict=True)
        )

    with torch.no_grad():
        assert 2 * error(routed_experts=experts) < error()


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["mixtral", "gpt_oss", "qwen3_moe", "qwen3_next", "gemma4_text"])
def test_captured_steps_record_what_ordinary_ones_do(arch, monkeypatch):
    variant = "experts" if arch == "gemma4_text" else None
    model, prompts = mixture(arch, variant, device="cuda"), make_prompts()
    options = {"max_new_tokens": NEW, "eos_token_id": [], "batch_size": 3, "chunk_size": 11, "record_routing": True}
    found = rollout(model, prompts, **options)
    assert_recorded(model, prompts, found)
    monkeypatch.setattr(scheduler, "can_capture", lambda *_: False)
    plain = rollout(model, prompts, **options)
    assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in plain]
    assert all(torch.equal(one.routed_experts, other.routed_experts) for one, other in zip(found, plain, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", MIXTURES, ids="-".join)
def test_replay_on_a_gpu(case):
    """The own choice changes no bit of the loss; another one gives the loss of the references."""
    model, inputs = mixture(*case, device="cuda"), packed("cuda")
    chosen, other = own_choice(model, **inputs), other_choice(model, 2, 12)
    free, replayed = (loss_and_gradients(model, **inputs, **more) for more in ({}, {"routed_experts": chosen}))
    assert torch.equal(free[0], replayed[0])
    for one, two in zip(free, replayed, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    got = loss_and_gradients(model, **inputs, routed_experts=other)
    with reference_backend():
        want = loss_and_gradients(model, **inputs, routed_experts=other)
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-3, atol=2e-4)
