import copy
import itertools
import math
import pickle
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import liger_models
from liger_models import LigerAdamW, LigerLlama, LlamaConfig, step_in_backward

from ..processes import FORKSERVER, free_port, start_forkserver

SHAPES = [(5, 3), (2049,), (), (0, 4), (33, 70)]


def parameters(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    return [nn.Parameter(draw(shape).to(device, dtype)) for shape in SHAPES]


def groups(params):
    """Two groups with options of their own, the rest by default."""
    return [
        {"params": params[:2], "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.3},
        {"params": params[2:3], "maximize": True, "eps": 1e-3},
        {"params": params[3:]},
    ]


def give_gradients(seed, *lists):
    generator = torch.Generator().manual_seed(seed)
    for together in zip(*lists, strict=True):
        gradient = torch.randn(together[0].shape, generator=generator, dtype=torch.float64)
        for param in together:
            param.grad = gradient.to(param.device, param.dtype)


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_near(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach().double().cpu(), b.detach().double().cpu(), rtol=1e-5, atol=1e-6)


def test_public_names():
    assert {"LigerAdamW", "step_in_backward"} <= set(liger_models.__all__)


def test_many_steps_are_torchs(backend):
    ours, theirs = parameters(backend), parameters(dtype=torch.float64)
    optimizer, expected = LigerAdamW(groups(ours), lr=1e-2), torch.optim.AdamW(groups(theirs), lr=1e-2)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 50) for each in (optimizer, expected)]
    for step in range(50):
        give_gradients(step, ours, theirs)
        kept = [param.grad.clone() for param in ours]
        optimizer.step()
        expected.step()
        assert_same(kept, [param.grad for param in ours])
        for scheduler in schedulers:
            scheduler.step()
    assert_near(ours, theirs)


def test_parameters_without_a_gradient_are_skipped(backend):
    """Then they count fewer steps, in the same launch."""
    ours, theirs = parameters(backend), parameters(dtype=torch.float64)
    optimizer, expected = LigerAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(6):
        give_gradients(step, ours, theirs)
        ours[step % 2].grad = theirs[step % 2].grad = None
        optimizer.step()
        expected.step()
    assert_near(ours, theirs)
    assert [int(optimizer.state[param]["step"]) for param in ours] == [3, 3, 6, 6, 6]
    optimizer.zero_grad()
    optimizer.step()
    assert_near(ours, theirs)


def test_state_is_made_for_what_has_gradients():
    params = parameters()
    optimizer = LigerAdamW(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert set(optimizer.state) == {params[0]}


@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_state_dict_is_torchs(direction, backend):
    ours, theirs = parameters(backend), parameters(backend)
    optimizer, expected = LigerAdamW(groups(ours)), torch.optim.AdamW(groups(theirs))
    source, target = (expected, optimizer) if direction == "from torch" else (optimizer, expected)
    trained, fresh = (theirs, ours) if direction == "from torch" else (ours, theirs)
    for step in range(3):
        give_gradients(step, trained)
        source.step()
    saved = copy.deepcopy(source.state_dict())
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    target.load_state_dict(saved)
    with torch.no_grad():
        for a, b in zip(fresh, trained, strict=True):
            a.copy_(b)
    assert_same([target.state[p]["exp_avg"] for p in fresh], [source.state[p]["exp_avg"] for p in trained])
    for step in range(3, 6):
        give_gradients(step, ours, theirs)
        optimizer.step()
        expected.step()
    assert_near(ours, theirs)
    assert int(target.state[fresh[0]]["step"]) == int(source.state[trained[0]]["step"]) == 6


def restored(make, file):
    """What ``make`` returns, parameters and their optimizer, with the state and the values in a file."""
    params, optimizer = make()
    state, values = torch.load(file, weights_only=True)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    return params, optimizer


def test_resumes_bit_for_bit(backend, tmp_path):
    def make():
        params = parameters(backend, torch.bfloat16)
        return params, LigerAdamW(groups(params), state_dtype=torch.float32, stochastic_rounding=True, seed=4)

    params, optimizer = make()
    for step in range(3):
        give_gradients(step, params)
        optimizer.step()
    torch.save([optimizer.state_dict(), params], tmp_path / "state.pt")
    again, resumed = restored(make, tmp_path / "state.pt")
    for step in range(3, 6):
        give_gradients(step, params, again)
        optimizer.step()
        resumed.step()
    assert_same(params, again)
    assert all(resumed.state[param]["exp_avg"].dtype == torch.float32 for param in again)


def test_loading_casts_and_lays_out():
    """Moments in the dtype asked for, in the order of the parameter; the step on the CPU, shared with nobody."""
    first = nn.Parameter(torch.randn(4, 6))
    first.grad = torch.randn(4, 6)
    source = torch.optim.AdamW([first])
    source.step()
    saved = source.state_dict()
    saved["state"][0]["step"] = saved["state"][0]["step"].double()
    second = nn.Parameter(torch.randn(6, 4).bfloat16().t())
    optimizer = LigerAdamW([second], state_dtype=torch.float32)
    hooked = []
    optimizer.register_load_state_dict_post_hook(lambda it: hooked.append(it.state[second]["exp_avg"].dtype))
    optimizer.load_state_dict(saved)
    state = optimizer.state[second]
    assert hooked == [torch.float32]
    assert_same([state["exp_avg"], state["exp_avg_sq"]], [source.state[first][n] for n in ("exp_avg", "exp_avg_sq")])
    assert state["exp_avg"].stride() == second.stride()
    assert state["step"].dtype == torch.float32
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert saved["state"][0]["step"] == 1
    narrow = LigerAdamW([second])
    narrow.load_state_dict(optimizer.state_dict())
    assert narrow.state[second]["exp_avg"].dtype == torch.bfloat16


def test_hooks_see_the_state_that_is_loaded():
    """And may change it; moments are not rounded to the parameter's dtype behind them."""
    source = LigerAdamW(first := parameters(dtype=torch.bfloat16), state_dtype=torch.float32)
    give_gradients(0, first)
    source.step()
    optimizer = LigerAdamW(second := parameters(dtype=torch.bfloat16), state_dtype=torch.float32)

    def double(_, state_dict):
        state = {key: value | {"exp_avg": 2 * value["exp_avg"]} for key, value in state_dict["state"].items()}
        return state_dict | {"state": state}

    hook = optimizer.register_load_state_dict_pre_hook(double)
    for factor in (2, 1):
        optimizer.load_state_dict(source.state_dict())
        moments = [source.state[param]["exp_avg"] * factor for param in first]
        assert_same([optimizer.state[param]["exp_avg"] for param in second], moments)
        hook.remove()


def test_copies_keep_the_options():
    params = parameters()
    optimizer = LigerAdamW(params, stochastic_rounding=True, state_dtype=torch.float32, seed=7)
    give_gradients(0, params)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.stochastic_rounding, other.state_dtype, other.seed) == (True, torch.float32, 7)
        other.step()


def test_state_dtype(backend):
    for dtype in (None, torch.float32):
        params = parameters(backend, torch.float16)
        optimizer = LigerAdamW(params, state_dtype=dtype)
        give_gradients(0, params)
        optimizer.step()
        state = optimizer.state[params[0]]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == (dtype or torch.float16)


def test_stochastic_rounding_needs_no_generator(backend):
    def train(seed):
        params = parameters(backend, torch.bfloat16)
        optimizer = LigerAdamW(params, lr=1e-4, stochastic_rounding=True, seed=seed)
        for step in range(3):
            give_gradients(step, params)
            optimizer.step()
        return params

    first = train(0)
    torch.manual_seed(9)
    assert_same(train(0), first)
    assert not torch.equal(train(1)[1], first[1])


def test_closure(backend):
    weight = nn.Parameter(torch.ones(3, device=backend))
    optimizer = LigerAdamW([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert (weight < 1).all()


def test_offload_of_parameters_on_the_cpu():
    params = parameters()
    optimizer = LigerAdamW(params, offload=params[:2])
    give_gradients(0, params)
    optimizer.step()
    other = copy.deepcopy(optimizer)
    assert other.offload == {*other.param_groups[0]["params"][:2]}
    with pytest.raises(ValueError, match="offload must hold parameters of params only"):
        LigerAdamW(params[1:], offload=params[:1])


def test_loading_waits_for_moments_under_way():
    """What is loaded may be the optimizer's own, saved before."""
    optimizer, settled = LigerAdamW(parameters()), []
    state = optimizer.state_dict()
    optimizer._staging = {torch.device("cuda"): SimpleNamespace(settle=lambda: settled.append(True))}
    optimizer.load_state_dict(state)
    assert settled


def test_moments_of_parameters_that_were_moved(monkeypatch):
    """On the CPU, step waits for them; the next GPU waits for what the last one has sent."""
    monkeypatch.setattr(liger_models.train.optimizer, "Staging", lambda device, size, left: SimpleNamespace(left=left))
    params = parameters()
    optimizer, settled = LigerAdamW(params, offload=params[:2]), []
    first, second = (optimizer._stage(torch.device("cuda", i)) for i in range(2))
    assert first is not second
    assert first.left is second.left
    first.settle = second.settle = lambda: settled.append(True)
    give_gradients(0, params[2:])
    optimizer.step()
    assert not settled
    give_gradients(0, params)
    optimizer.step()
    assert settled


# Moments in 8 bits

WIDE = [(40, 300), (5,), (2, 3, 128), (7, 127), (3, 1024)]
"""Some have no whole block of 128 columns."""


def wide_parameters(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in WIDE]


def decoded(state, name):
    """A moment in fp64, from its codes if it has some."""
    if name in state:
        return state[name].double().cpu()
    codes, scale = (state[f"{name}_{part}"].double().cpu() for part in ("codes", "scale"))
    value = codes.sign() * (codes / 127) ** 2 if name == "exp_avg" else (codes / 255) ** 4
    return value * scale.repeat_interleave(128, -1)[..., : codes.shape[-1]]


def step_times(params, optimizer, steps):
    for step in steps:
        give_gradients(step, params)
        optimizer.step()


def test_state_of_8_bits(backend):
    """Two codes for each element and 8 bytes for 128; other parameters have moments in fp32."""
    for dtype in (torch.float16, torch.float32):
        params = wide_parameters(backend, dtype)
        optimizer = LigerAdamW(params, state_dtype=torch.int8)
        step_times(params, optimizer, range(2))
        for param in params:
            state = optimizer.state[param]
            if param.dim() > 1 and param.shape[-1] >= 128:
                assert [*state] == [
                    "step",
                    *(f"exp_avg{sq}_{part}" for part in ("codes", "scale") for sq in ("", "_sq")),
                ]
                assert (state["exp_avg_codes"].dtype, state["exp_avg_sq_codes"].dtype) == (torch.int8, torch.uint8)
                rows, columns = param.numel() // param.shape[-1], param.shape[-1]
                assert state["exp_avg_scale"].dtype == torch.float32
                nbytes = sum(value.nbytes for name, value in state.items() if name != "step")
                assert nbytes == 2 * (rows * columns + 4 * rows * math.ceil(columns / 128))
            else:
                assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(
                    ("step", "exp_avg", "exp_avg_sq"), torch.float32
                )
    turned = nn.Parameter(torch.randn(300, 40).t())  # its rows are not contiguous
    optimizer = LigerAdamW([turned], state_dtype=torch.int8)
    turned.grad = torch.ones_like(turned)
    optimizer.step()
    assert optimizer.state[turned]["exp_avg"].dtype == torch.float32


def test_8_bit_moments_follow_those_of_fp64(backend):
    """Each has the noise of its codes, no more, and in the mean none."""
    ours, theirs = wide_parameters(backend), [nn.Parameter(param.double()) for param in wide_parameters()]
    optimizer = LigerAdamW(ours, lr=1e-3, betas=(0.9, 0.95), state_dtype=torch.int8)
    expected = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        for param, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            other.grad[..., ::2] *= 0.05  # small ones next to large ones
            param.grad = other.grad.to(param.device, param.dtype)
        optimizer.step()
        expected.step()
    for param, other in zip(ours, theirs, strict=True):
        for name, beta, levels, power in (("exp_avg", 0.9, 127, 2), ("exp_avg_sq", 0.95, 255, 4)):
            got, want = decoded(optimizer.state[param], name), expected.state[other][name]
            if name in optimizer.state[param]:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
                continue
            scale = optimizer.state[param][f"{name}_scale"].double().cpu()
            scale = scale.repeat_interleave(128, -1)[..., : got.shape[-1]]
            root = (want.abs() / scale) ** (1 / power)
            spacing = scale * ((root + 2 / levels) ** power - root**power) / 2
            # Each step adds noise of at most half the distance of two codes, and forgets 1 - beta of the former.
            noise, allowed = got - want, 0.5 * spacing / (1 - beta**2) ** 0.5
            for half in (slice(0, None, 2), slice(1, None, 2)):
                ratio = noise[..., half].square().mean() / allowed[..., half].square().mean()
                assert 0.1 < ratio < 1
                assert noise[..., half].mean().abs() < 5 * (noise[..., half].square().mean() / noise.numel() * 2) ** 0.5
    moved = [(a.double().cpu() - b).detach().flatten() for a, b in zip(ours, theirs, strict=True)]
    assert torch.cat(moved).square().mean() ** 0.5 < 0.1 * 1e-3 * 40**0.5


@pytest.mark.parametrize("source_dtype", [torch.int8, torch.float32, None])
def test_8_bit_state_is_converted(source_dtype, backend):
    """From 8 bits to other dtypes, and back; torch's optimizer cannot take codes for moments."""
    first = wide_parameters(backend)
    kind = torch.optim.AdamW if source_dtype is None else LigerAdamW
    source = kind(first, **({} if source_dtype is None else {"state_dtype": source_dtype}))
    step_times(first, source, range(3))
    saved = copy.deepcopy(source.state_dict())
    target_dtype = torch.int8 if source_dtype != torch.int8 else torch.float32
    for dtype in (target_dtype, torch.int8):
        optimizer = LigerAdamW(second := wide_parameters(backend), state_dtype=dtype)
        optimizer.load_state_dict(copy.deepcopy(saved))
        for a, b in zip(second, first, strict=True):
            assert ("exp_avg" in optimizer.state[a]) == (dtype != torch.int8 or a.dim() == 1 or a.shape[-1] < 128)
            for name, power in (("exp_avg", 2 / 127), ("exp_avg_sq", 4 / 255)):
                got, want = decoded(optimizer.state[a], name), decoded(source.state[b], name)
                if source_dtype == torch.int8 or name in optimizer.state[a]:
                    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-6, atol=0)
                else:
                    assert (got - want).abs().max() < power / 2 * want.abs().max()
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}
        step_times(second, optimizer, range(3, 4))
    if source_dtype == torch.int8:
        theirs = torch.optim.AdamW(second := wide_parameters(backend))
        theirs.load_state_dict(saved)
        with pytest.raises(KeyError, match="exp_avg"):
            step_times(second, theirs, range(1))


def test_8_bits_resume_bit_for_bit(backend, tmp_path):
    def make():
        params = wide_parameters(backend, torch.bfloat16)
        return params, LigerAdamW(params, state_dtype=torch.int8, stochastic_rounding=True, seed=4)

    params, optimizer = make()
    step_times(params, optimizer, range(3))
    torch.save([optimizer.state_dict(), params], tmp_path / "state.pt")
    for copied in (False, True):
        again, resumed = restored(make, tmp_path / "state.pt")
        if copied:
            resumed = copy.deepcopy(resumed)
            again = resumed.param_groups[0]["params"]
            assert resumed.state_dtype == torch.int8
        else:
            step_times(params, optimizer, range(3, 6))
        step_times(again, resumed, range(3, 6))
        assert_same(params, again)


def losses_of(steps, device="cpu", dtype=torch.float32, **options):
    """Losses of a small model that learns eight rows, with their tokens drawn at random, and the model."""
    model = small_model(device, hidden_size=128, intermediate_size=160).to(dtype)
    optimizer = LigerAdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), stochastic_rounding=True, **options)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8_bits_converge_as_32_do(dtype, monkeypatch):
    """Both learn the rows by heart, at the same speed; with codes that are read as linear the losses are others."""
    fine, coarse = (losses_of(60, dtype=dtype, state_dtype=each) for each in (torch.float32, torch.int8))
    assert fine[0] == coarse[0] > 4
    difference = lambda losses: max(abs(a - b) for a, b in zip(losses, fine, strict=True))
    assert fine[-1] < 0.5
    assert abs(coarse[-1] - fine[-1]) < 0.05
    assert difference(coarse) < 0.25  # rounding of the weights alone makes 0.06 in bf16
    monkeypatch.setattr(liger_models.kernels.optimizer.adamw, "decode", linear)
    wrong = losses_of(60, dtype=dtype, state_dtype=torch.int8)
    assert difference(wrong) > 1
    assert wrong[-1] > 1


def linear(codes, scales):
    levels = 127 if codes.dtype == torch.int8 else 255
    return codes.to(scales.dtype) / levels * scales.repeat_interleave(128, -1)[..., : codes.shape[-1]]


def test_errors():
    weight = nn.Parameter(torch.ones(3, 2))
    for options, message in [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\)"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"state_dtype": torch.int32}, "state_dtype must be None or one of .*, got torch.int32"),
        ({"state_dtype": torch.float8_e4m3fn}, "state_dtype must be None or one of .*, got torch.float8_e4m3fn"),
        ({"state_dtype": torch.uint8}, "one of .*torch.int8, got torch.uint8. Pass one of these; torch.int8 is for"),
    ]:
        with pytest.raises(ValueError, match=message):
            LigerAdamW([weight], **options)
    optimizer = LigerAdamW([weight])
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="gradients must not be sparse"):
        optimizer.step()
    amsgrad = torch.optim.AdamW([weight], amsgrad=True)
    with pytest.raises(ValueError, match="AMSGrad"):
        optimizer.load_state_dict(amsgrad.state_dict())


# The step inside the backward


def small_model(device="cpu", **options):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | options
    torch.manual_seed(3)
    return LigerLlama.from_config(LlamaConfig(**sizes, num_attention_heads=2)).to(device)


def loss_of(model, step):
    device = next(model.parameters()).device
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step)).to(device)
    return model(ids, labels=ids).loss


@pytest.mark.parametrize("state_dtype", [None, torch.int8], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_in_backward_as_after_it(tied, state_dtype):
    models = [small_model(hidden_size=128, tie_word_embeddings=tied).bfloat16() for _ in range(2)]
    options = {"stochastic_rounding": True, "state_dtype": state_dtype}
    optimizers = [LigerAdamW(model.parameters(), lr=1e-2, **options) for model in models]
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4) for optimizer in optimizers]
    handles = step_in_backward(optimizers[1])
    for step in range(4):
        if step == 3:  # back to ordinary steps
            for handle in handles:
                handle.remove()
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            loss_of(model, step).backward()
            gone = all(param.grad is None for param in model.parameters())
            assert gone == (optimizer is optimizers[1] and step < 3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert_same(models[0].parameters(), models[1].parameters())
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for key, values in states[0].items():
        assert_same(values.values(), states[1][key].values())


def test_one_gradient_at_a_time():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    alive = []
    optimizer = LigerAdamW(model.parameters())
    for param in model.parameters():  # called before those of the optimizer
        count = lambda _: alive.append(sum(param.grad is not None for param in model.parameters()))
        param.register_post_accumulate_grad_hook(count)
    step_in_backward(optimizer)
    model(torch.randn(2, 8)).sum().backward()
    assert alive == [1] * 5


def test_in_backward_frozen_parameters_and_loaded_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = LigerAdamW(model.parameters(), lr=0.1)
    assert len(step_in_backward(optimizer)) == 2
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    before = copy.deepcopy(model)
    model(torch.randn(2, 4)).sum().backward()
    assert_same(before.parameters(), model.parameters())  # by the learning rate that was loaded
    assert len(optimizer.state) == 2


def test_in_backward_errors():
    model = nn.Linear(4, 1)
    with pytest.raises(TypeError, match="optimizer must be a LigerAdamW, got AdamW"):
        step_in_backward(torch.optim.AdamW(model.parameters()))
    optimizer = LigerAdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has a gradient already. Call zero_grad\(\) first"):
        step_in_backward(optimizer)
    optimizer.zero_grad()
    step_in_backward(optimizer)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="3 backward passes since the last step"):
        optimizer.step()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"a loss scale .* needs all gradients before the step, got step_in"):
        scaler.step(optimizer)


def test_a_loss_scale():
    models = [nn.Linear(4, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [LigerAdamW(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    for factor in (1.0, math.inf, 1.0, 2.0):
        losses = [factor * model(torch.ones(1, 4)).sum() for model in models]
        scaler.scale(losses[0]).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if factor < math.inf:
            losses[1].backward()
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_same(models[0].parameters(), models[1].parameters())
    assert [state["step"].item() for state in optimizers[0].state.values()] == [3, 3]
    assert scaler.get_scale() == 2**16


def test_ordinary_steps_behind_a_loop_that_called_no_step():
    models = [nn.Linear(4, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [LigerAdamW(model.parameters(), lr=0.1) for model in models]
    handles = step_in_backward(optimizers[1])
    for step in range(4):
        if step == 3:
            for handle in handles:
                handle.remove()
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 4)).sum().backward()
            if optimizer is optimizers[0] or step == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(models[0].parameters(), models[1].parameters())


# With torch.compile and torch.distributed


@pytest.mark.cases(1)
@pytest.mark.compile
@pytest.mark.parametrize("in_backward", [False, True])
def test_compiled_training_step(in_backward):
    def train(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = LigerAdamW(model.parameters(), lr=1e-2)
        if in_backward:
            step_in_backward(optimizer)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        function = torch.compile(step, backend="aot_eager") if compiled else step
        return [function(torch.full((4, 8), 0.1 * i)) for i in range(4)]

    torch.testing.assert_close(train(True), train(False))


@pytest.fixture
def mesh(backend):
    communication = "gloo" if backend == "cpu" else "nccl"
    if backend != "cpu":
        torch.cuda.init()  # as the first test of a process it would be warned, which is an error
    dist.init_process_group(communication, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(backend, (1,))
    dist.destroy_process_group()


def test_dtensors(mesh, backend):
    """Local parts are updated, with the gradient brought into the parameter's layout; the moments are DTensors."""
    plain = parameters(backend)[:2]
    sharded = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
    optimizers = LigerAdamW(plain, lr=1e-2), LigerAdamW(sharded, lr=1e-2)
    for step, placement in enumerate([Shard(0), Replicate(), Partial()]):
        give_gradients(step, plain)
        for param, wrapped in zip(plain, sharded, strict=True):
            wrapped.grad = DTensor.from_local(param.grad, mesh, [placement])
        for optimizer in optimizers:
            optimizer.step()
    assert_same(plain, [param.to_local() for param in sharded])
    for values in optimizers[1].state.values():
        assert values["exp_avg"].placements == values["exp_avg_sq"].placements == (Shard(0),)
    loss = sharded[0].square().sum()
    optimizers[1].step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def train_sharded(rank, port, results, folder):
    """Two processes train a model of 5 rows, so 3 and 2 of them, save it distributed, and go on from what they load."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def make(in_backward):
        model = sharded_model()
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        optimizer = LigerAdamW(model.parameters(), lr=1e-2)
        if in_backward:
            step_in_backward(optimizer)
        return model, optimizer

    def state_of(model, optimizer):
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}

    values = {}
    for in_backward in (False, True):
        model, optimizer = make(in_backward)
        train(model, optimizer, range(2))
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/{in_backward}")
        model, optimizer = make(in_backward)
        loaded = state_of(model, optimizer)
        dcp.load(loaded, checkpoint_id=f"{folder}/{in_backward}")
        model.load_state_dict(loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        train(model, optimizer, range(2, 4))
        assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
        values[in_backward] = [param.full_tensor().tolist() for param in model.parameters()]
    try:
        step_in_backward(LigerAdamW(sharded_model().parameters()))
    except RuntimeError as error:
        values["error"] = str(error)
    if rank == 0:
        results.put(values)
    dist.destroy_process_group()
    time.sleep(0.2)  # see torchrun.py: gloo's threads end first


def sharded_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 1))  # of the last, one has nothing


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.distributed
@pytest.mark.slow
def test_fsdp_and_distributed_checkpoint(tmp_path):
    model = sharded_model()
    optimizer = LigerAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(4))
    start_forkserver()
    results, port = FORKSERVER.SimpleQueue(), free_port()
    workers = [FORKSERVER.Process(target=train_sharded, args=(rank, port, results, tmp_path)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    values = results.get()
    for in_backward in (False, True):
        got = [torch.tensor(value) for value in values[in_backward]]
        assert_near(got, model.parameters())
    assert "DistributedDataParallel averages gradients after the step" in values["error"]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("state_dtype", [None, torch.int8], ids=["16 bits", "8 bits"])
def test_no_wait_for_the_device(state_dtype, in_backward, offload, monkeypatch):
    monkeypatch.setattr(liger_models.train.optimizer, "SMALLEST", 0)
    model = small_model("cuda", hidden_size=128).bfloat16()
    away = model.parameters() if offload else ()
    options = {"stochastic_rounding": True, "state_dtype": state_dtype}
    optimizer = LigerAdamW(model.parameters(), offload=away, **options)
    if in_backward:
        step_in_backward(optimizer)
    for step in range(3):
        loss = loss_of(model, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_in_backward_on_a_gpu():
    models = [small_model("cuda").bfloat16() for _ in range(2)]
    optimizers = [LigerAdamW(model.parameters(), lr=1e-2) for model in models]
    step_in_backward(optimizers[1])
    losses = []
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert_same(losses[::2], losses[1::2])
    assert_same(models[0].parameters(), models[1].parameters())


def wide_model(device="cuda"):
    torch.manual_seed(0)
    sizes = (1024, 2048, 768, 1536, 1024)
    layers = [nn.Linear(n, m) for n, m in itertools.pairwise(sizes)]
    return nn.ModuleList(layers).to(device, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("state_dtype", [None, torch.int8], ids=["16 bits", "8 bits"])
def test_moments_on_the_host(state_dtype, in_backward):
    """The same numbers, however late the copies are, whichever parameters take part, and after loading."""
    models = [wide_model() for _ in range(2)]
    options = {"lr": 1e-2, "stochastic_rounding": True, "state_dtype": state_dtype}
    optimizers = [
        LigerAdamW(models[0].parameters(), **options),
        LigerAdamW(models[1].parameters(), offload=models[1][1:].parameters(), **options),
    ]
    if in_backward:
        step_in_backward(optimizers[1])
    for step in range(8):
        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        for model, optimizer in zip(models, optimizers, strict=True):
            for staging in (optimizer._staging or {}).values():
                for late in (*staging._into.streams, staging._out):
                    with late:
                        torch.cuda._sleep(20_000_000)
            y = x
            for number, layer in enumerate(model):
                left_out = step == 4 and number in (1, 2)
                y = y.repeat(1, 2)[:, : layer.out_features] if left_out else layer(y)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_same(models[0].parameters(), models[1].parameters())
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    host = [param in optimizers[1].offload and param.dim() == 2 for param in models[1].parameters()]  # small ones stay
    for key, away in enumerate(host):
        first, second = (state[key] for state in states)
        assert first.keys() == second.keys()
        assert ("exp_avg_codes" in first) == (state_dtype == torch.int8 and key % 2 == 0)
        for name in first.keys() - {"step"}:
            assert torch.equal(first[name], second[name].cuda())
            assert second[name].is_pinned() == away


@pytest.mark.gpu
def test_memory_of_the_room_is_not_taken_while_copies_are_under_way():
    device, moments = torch.device("cuda"), [torch.ones(2**20, pin_memory=True) for _ in range(2)]
    room = 2 * sum(moment.nbytes for moment in moments)
    staging = liger_models.train.staging.Staging(device, room, left={})
    with staging._into.streams[0]:
        torch.cuda._sleep(100_000_000)
    for _ in range(2):
        staging._fetch(moments[0], moments)
    del staging
    others = torch.zeros(room, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    assert not others.any()


@pytest.mark.gpu
def test_fused_torch_state_loads():
    """Its steps are on the GPU; ours are read without waiting."""
    params = parameters("cuda")
    source = torch.optim.AdamW(params, fused=True)
    give_gradients(0, params)
    source.step()
    optimizer = LigerAdamW(params)
    optimizer.load_state_dict(source.state_dict())
    assert all(state["step"].device.type == "cpu" for state in optimizer.state.values())
    optimizer.step()
