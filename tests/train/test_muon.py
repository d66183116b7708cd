"""Muon on the packed weights is torch's on the matrices of the checkpoint, and beside it AdamW is as ever."""

import copy
import math
import pickle
import re

import pytest
import torch
from torch import nn

from liger_models import AutoLigerModel, LigerAdamW, LigerLlama, LigerMuon, LlamaConfig, step_in_backward
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.convert import format_of

from ..arch.families import FIRST_CASES, beyond_kinds, tiny
from ..late import transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def small_model(**options):
    torch.manual_seed(3)
    return LigerLlama.from_config(LlamaConfig(**{**SIZES, **options}))


def loss_of(model, step):
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
    return model(ids, labels=ids).loss


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def train(model, optimizer, steps):
    for step in steps:
        give_gradients(model, step)
        optimizer.step()


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def matrices_of_the_checkpoint(model, tensor):
    """Copies of the checkpoint's matrices in ``tensor`` of each trained parameter with some; one for each expert."""
    entries = format_of(type(model)).weight_map(model.config).entries
    trained = {name: parameter for name, parameter in model.hidden_matrices().items() if parameter.requires_grad}
    found = {}
    for ours, parameter in trained.items():
        for name, part in entries[ours].unpack(tensor(parameter).detach()).items():
            stacked = parameter.dim() == part.dim() == 3
            for index, matrix in enumerate(part if stacked else [part.flatten(1)]):
                found[f"{name} {index}"] = matrix.clone()
    return found


CASES = [pytest.param(*case, {}, marks=beyond_kinds(case[0]), id="-".join(case)) for case in FIRST_CASES]
CASES += [
    pytest.param("llama", "gqa", options, id=str(options))
    for options in ({"nesterov": False}, {"adjust_lr_fn": "original"})
]


@pytest.mark.parametrize(("arch", "variant", "options"), CASES)
def test_steps_are_torchs_on_the_matrices_of_the_checkpoint(arch, variant, options, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's orthogonalizes in bf16
    config = transformers.AutoConfig.for_model(arch, **tiny(arch)[variant]).to_dict()
    torch.manual_seed(0)
    model = AutoLigerModel.from_config(config).double()
    theirs = {name: nn.Parameter(x) for name, x in matrices_of_the_checkpoint(model, lambda p: p).items()}
    settings = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw", **options}
    expected = torch.optim.Muon(theirs.values(), **settings)
    rest = {name: p for name, p in model.named_parameters() if name not in model.hidden_matrices() and p.requires_grad}
    others = {name: nn.Parameter(p.detach().clone()) for name, p in rest.items()}
    is_vector = {name: p.dim() < 2 or name.endswith("bias") for name, p in others.items()}
    vectors = [p for name, p in others.items() if is_vector[name]]
    tables = [p for name, p in others.items() if not is_vector[name]]
    groups = [{"params": tables}, {"params": vectors, "weight_decay": 0.0}]
    beside = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    optimizer = LigerMuon(model, **settings, adamw_lr=1e-3)
    for step in range(3):
        give_gradients(model, step)
        for name, gradient in matrices_of_the_checkpoint(model, lambda p: p.grad).items():
            theirs[name].grad = gradient
        for name, parameter in others.items():
            parameter.grad = rest[name].grad
        for each in (optimizer, expected, beside):
            each.step()
    got = matrices_of_the_checkpoint(model, lambda p: p)
    assert got.keys() == theirs.keys()
    for name, parameter in (theirs | others).items():
        torch.testing.assert_close(got.get(name, rest.get(name)), parameter, rtol=1e-9, atol=1e-10)


def test_which_parameters_are_matrices():
    """The linear layers but the head, and experts; no table of embeddings, filter, bias or adapter."""
    kinds = [[0, 0], [0, 0]]
    for arch, variant in FIRST_CASES:
        config = transformers.AutoConfig.for_model(arch, **tiny(arch)[variant]).to_dict()
        model = AutoLigerModel.from_config(config, device="meta")
        chosen = model.hidden_matrices()
        for name, parameter in model.named_parameters():
            no_matrix = (
                parameter.dim() < 2
                or "embed" in re.sub("patch_embed|unembeds", "", name)
                or "conv_weight" in name
                or "newline" in name
            )
            expected = not (no_matrix or name.endswith("bias") or name == "lm_head.weight")
            assert (name in chosen) == expected, (arch, name)
            kinds[parameter.dim() == 3][name in chosen] += 1
    assert min(map(min, kinds)) > 0


def test_groups_have_learning_rates_of_their_own():
    model = small_model(tie_word_embeddings=True)
    optimizer = LigerMuon(model, lr=0.02, adamw_lr=1e-3, weight_decay=0.3)
    found = [(len(g["params"]), g["lr"], g["weight_decay"], g.get("momentum")) for g in optimizer.param_groups]
    assert found == [(8, 0.02, 0.3, 0.95), (1, 1e-3, 0.3, None), (5, 1e-3, 0.0, None)]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    give_gradients(model, 0)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.015, 7.5e-4, 7.5e-4]
    assert LigerMuon(model, lr=0.02).param_groups[1]["lr"] == 0.02


def test_converges_beside_adamw():
    """Twenty sentences by heart: with "match_rms_adamw" at the learning rate of AdamW, and sooner."""
    losses = []
    for make in (LigerMuon, lambda model, **options: LigerAdamW(model.parameters(), **options)):
        model = small_model()
        optimizer = make(model, lr=1e-2, weight_decay=0.0)
        for step in range(60):
            loss = loss_of(model, step % 4)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] < losses[1] < 0.8 * math.log(64)


def test_closure_frozen_parameters_and_parameters_without_a_gradient():
    model = small_model()
    model.layers[0].requires_grad_(False)
    optimizer = LigerMuon(model, lr=0.01)
    before = copy.deepcopy(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        model.layers[1].mlp.down_proj.weight.grad = None
        return loss

    assert optimizer.step(closure).item() == pytest.approx(loss_of(before, 0).item())
    same = {n for (n, a), b in zip(model.named_parameters(), before.parameters(), strict=True) if torch.equal(a, b)}
    frozen = {f"layers.0.{name}" for name, _ in model.layers[0].named_parameters()}
    assert same == frozen | {"layers.1.mlp.down_proj.weight"}
    assert model.layers[1].mlp.down_proj.weight not in optimizer.state
    assert optimizer.step() is None


@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_resumes_bit_for_bit(state_dtype, tmp_path):
    def make():
        model = small_model().bfloat16()
        return model, LigerMuon(model, lr=1e-2, stochastic_rounding=True, state_dtype=state_dtype, seed=4)

    model, optimizer = make()
    train(model, optimizer, range(2))
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    other, resumed = make()
    weights, state = torch.load(tmp_path / "state.pt")
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    matrix = other.layers[0].mlp.down_proj.weight
    assert {*resumed.state[matrix]} == {"step", "momentum_buffer"}
    assert resumed.state[matrix]["momentum_buffer"].dtype == (state_dtype or torch.bfloat16)
    train(model, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert_same(model.parameters(), other.parameters())


def test_copies_keep_the_options():
    model = small_model()
    optimizer = LigerMuon(model, nesterov=False, adjust_lr_fn="original", state_dtype=torch.float64)
    train(model, optimizer, range(1))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.nesterov, other.adjust_lr_fn, other.state_dtype) == (False, "original", torch.float64)
        parameters = [param for group in other.param_groups for param in group["params"]]
        assert parameters[0] is not optimizer.param_groups[0]["params"][0]
        for param, source in zip(parameters, (p for g in optimizer.param_groups for p in g["params"]), strict=True):
            param.grad = source.grad
        other.step()
    optimizer.step()
    assert_same([p for g in optimizer.param_groups for p in g["params"]], parameters)


def test_stochastic_rounding_keeps_small_updates_on_average():
    def moved(stochastic):
        model = small_model().bfloat16()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = LigerMuon(model, lr=1e-4, weight_decay=0.5, stochastic_rounding=stochastic)
        for _ in range(40):  # the weights decay by less than half of the distance to the next bfloat16
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return 1 - torch.cat([p.flatten() for p in optimizer.param_groups[0]["params"]]).double().mean().item()

    assert moved(False) == 0
    assert moved(True) == pytest.approx(40 * 5e-5, rel=0.05)


def test_buckets_change_nothing(monkeypatch):
    results = []
    for size in (2**26, 2000, 1):
        monkeypatch.setattr("liger_models.parallel.matrices.BUCKET", size)
        model = small_model()
        train(model, LigerMuon(model, lr=0.02), range(2))
        results.append([*model.parameters()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_errors():
    model = small_model()
    for options, message in (
        ({"lr": -1.0}, "LigerMuon: lr must not be negative, got -1.0"),
        ({"adamw_lr": -1.0}, "LigerMuon: adamw_lr must not be negative"),
        ({"momentum": 1.0}, r"LigerMuon: momentum must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -0.1}, "LigerMuon: weight_decay must not be negative"),
        ({"betas": (0.9, 1.0)}, "LigerMuon: betas must be in"),
        ({"adjust_lr_fn": "spectral"}, "must be one of match_rms_adamw, original, got 'spectral'"),
        ({"state_dtype": torch.int8}, "state_dtype must be a floating-point dtype, got torch.int8"),
    ):
        with pytest.raises(ValueError, match=message):
            LigerMuon(model, **options)
    with pytest.raises(TypeError, match="model must be one of this package, got Linear"):
        LigerMuon(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must update each parameter by itself, got LigerMuon"):
        step_in_backward(LigerMuon(model))
    with pytest.raises(ValueError, match=r"must be trained, got none\. Use LigerAdamW for adapters"):
        LigerMuon(apply_lora(model, LoRAConfig(r=2)))


def test_adapters_beside_trained_weights_are_adamws():
    model = apply_lora(small_model(), LoRAConfig(r=2, target_modules=["q_proj"]))
    weight = model.layers[0].mlp.down_proj.weight.requires_grad_()
    optimizer = LigerMuon(model)
    assert optimizer.param_groups[0]["params"] == [weight]
    assert len(optimizer.param_groups[1]["params"]) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    """As on the CPU, up to products in bf16; the host waits for nothing after the first step."""
    models = [small_model(hidden_size=128, intermediate_size=300).to(dtype).to(device) for device in ("cpu", "cuda")]
    before = [p.detach().double() for p in models[0].parameters()]
    optimizers = [LigerMuon(model, lr=0.02, state_dtype=torch.float32) for model in models]
    for step in range(3):
        give_gradients(models[0], step)
        for param, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
            param.grad = other.grad.cuda()
        optimizers[0].step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizers[1].step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for start, (a, b) in zip(before, zip(*(model.parameters() for model in models), strict=True), strict=True):
        moved, expected = b.detach().cpu().double() - start, a.detach().double() - start
        assert (moved - expected).norm() < 0.05 * expected.norm()
