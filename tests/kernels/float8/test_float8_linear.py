import functools
from types import SimpleNamespace

import pytest
import torch

from liger_models.kernels.float8 import float8_gated_mlp as float8_gated_mlp_module
from liger_models.kernels.float8 import float8_linear as float8_linear_module
from liger_models.kernels.float8.float8 import RECIPES, plain, round_matrix
from liger_models.kernels.float8.float8_gated_mlp import float8_gated_mlp, float8_gated_mlp_reference
from liger_models.kernels.float8.float8_linear import float8_linear, float8_norm_linear, float8_norm_linear_reference
from liger_models.kernels.linear import gated_mlp as chunks
from liger_models.kernels.linear.gated_mlp import GatedMLPInputs, GatedMLPNeeds, gated_mlp_reference
from liger_models.kernels.linear.norm_linear import NormLinearInputs, NormLinearNeeds, norm_linear_reference
from liger_models.kernels.linear.projection import NormNeeds, Projection, ProjectionNeeds
from liger_models.kernels.norm.fused_norm import FusedNorm

from ..oracle import opcheck_named, run, wide

N, C, F, OUT = 21, 32, 48, 64  # no multiple of 16 rows
KINDS = ["rms", "gemma", "layer", "none"]
CASES = [(False, kind) for kind in KINDS] + [(True, kind) for kind in KINDS]
NAMES = ["x", "residual", "norm_weight", "norm_bias", "weight", "bias", "down_weight", "down_bias"]


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter truncates bfloat16 where hardware rounds.
    return [torch.bfloat16] if device == "cuda" else [torch.float32]


def make(mlp: bool, kind: str, dtype: torch.dtype, device: str):
    """The op's tensors by name, and the upstream gradients of both results."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator).to(device, dtype)
    named = {"x": draw(3, N // 3, C), "residual": draw(3, N // 3, C)}
    if kind != "none":
        named["norm_weight"] = 1 + draw(C) / 4
    if kind == "layer":
        named["norm_bias"] = draw(C)
    named |= {"weight": draw(2 * F if mlp else OUT, C) / C**0.5, "bias": draw(2 * F if mlp else OUT)}
    if mlp:
        named |= {"down_weight": draw(OUT, F) / F**0.5, "down_bias": draw(OUT)}
    return named, [draw(3, N // 3, OUT), draw(3, N // 3, C)]


def call(function, names, kind, **options):
    """``function`` of the tensors named, in that order; the others are None."""

    def of(*tensors):
        t = dict.fromkeys(NAMES) | dict(zip(names, tensors, strict=True))
        norm = FusedNorm(t["norm_weight"], t["norm_bias"], "layer_norm" if kind == "layer" else "rms_norm", 1e-5)
        norm = norm._replace(weight_offset=1.0, scale_in_fp32=True) if kind == "gemma" else norm
        weights = [t["weight"], t["down_weight"], t["bias"], t["down_bias"]]
        weights = weights if t["down_weight"] is not None else [t["weight"], t["bias"]]
        return function(t["x"], t["residual"], norm, *weights, **options)

    return of


def pair(mlp: bool, names, kind, recipe, **options):
    """The op and its reference."""
    if mlp:
        return (
            call(float8_gated_mlp, names, kind, act="silu", recipe=recipe, **options),
            call(float8_gated_mlp_reference, names, kind, act="silu", recipe=recipe),
        )
    return tuple(call(f, names, kind, recipe=recipe) for f in (float8_norm_linear, float8_norm_linear_reference))


def unrounded(mlp: bool, names, kind):
    """The same in the dtype of the tensors."""
    if not mlp:
        return call(norm_linear_reference, names, kind)

    def plain(x, residual, norm, *weights):
        options = {"eps": norm.eps, "weight_offset": norm.weight_offset, "scale_in_fp32": norm.scale_in_fp32}
        options |= {"norm": norm.kind, "norm_bias": norm.bias}
        return gated_mlp_reference(x, residual, norm.weight, *weights, **options)

    return call(plain, names, kind)


@pytest.mark.cases(9)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("mlp", "kind"), CASES)
def test_matches_the_reference_and_fp64(backend, mlp, kind, recipe, poisoned_empty):
    """The kernels round what the reference rounds.

    On a GPU sums in another order change the last bit of some numbers in bf16, and one of 64 of these then moves by a
    step of e5m2, up to a quarter of it: sqrt(1 / 64) / 4 of the norm.
    """
    bound = 1e-6 if backend == "cpu" else 64**-0.5 / 4
    for dtype in dtypes(backend):
        named, upstream = make(mlp, kind, dtype, backend)
        turn = KINDS.index(kind) + [*RECIPES].index(recipe)
        for missing in ((), (("x",), ("bias", "down_bias"))[turn % 2]):
            names = [name for name in named if name not in missing]
            tensors = [named[name] for name in names]
            ours, reference = (run(f, tensors, upstream) for f in pair(mlp, names, kind, recipe))
            exact = run(unrounded(mlp, names, kind), [wide(t) for t in tensors], [wide(t) for t in upstream])
            for got, want, truth in zip(ours, reference, exact, strict=True):
                assert got.dtype == want.dtype
                assert got.shape == want.shape
                assert (wide(got) - wide(want)).norm() <= bound * wide(want).norm()
                theirs = (wide(want) - truth).norm()
                assert (wide(got) - truth).norm() <= max(0.12 * truth.norm(), theirs + bound * truth.norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_product_alone(backend, recipe):
    named, (dy, _) = make(False, "none", torch.float32, backend)
    tensors = [named["residual"], named["weight"], named["bias"]]
    ours = run(functools.partial(float8_linear, recipe=recipe), tensors, [dy])
    exact = run(torch.nn.functional.linear, tensors, [dy])
    assert 0 < (ours[0] - exact[0]).norm() < 0.05 * exact[0].norm()
    for got, want in zip(ours[1:], exact[1:], strict=True):
        assert (got - want).norm() < 0.1 * want.norm()
    torch.testing.assert_close(ours[-1], exact[-1])  # the bias's gradient is not rounded


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_gate_and_up_give_the_same_gradients(kernel_device, recipe, poisoned_empty):
    named, upstream = make(True, "rms", torch.float32, kernel_device)
    for missing in ((), ("bias",)):
        names = [name for name in named if name not in missing]
        tensors = [named[name] for name in names]
        saved, recomputed = (
            run(pair(True, names, "rms", recipe, recompute=again)[0], tensors, upstream) for again in (False, True)
        )
        assert all(torch.equal(a, b) for a, b in zip(saved, recomputed, strict=True))
        y, h = pair(True, names, "rms", recipe, recompute=True, need_y=False)[0](*(t.requires_grad_() for t in tensors))
        grads = torch.autograd.grad([y, h], tensors, upstream)
        assert all(torch.equal(a, b) for a, b in zip(grads, saved[2:], strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_chunks(kernel_device, monkeypatch, recipe, poisoned_empty):
    """Scales of tensors differ between chunks, the rest does not."""
    named, upstream = make(True, "gemma", torch.float32, kernel_device)
    names, tensors = list(named), list(named.values())
    function = pair(True, names, "gemma", recipe, recompute=True)[0]
    exact = run(unrounded(True, names, "gemma"), tensors, upstream)
    whole = run(function, tensors, upstream)
    monkeypatch.setattr(chunks, "MIN_CHUNK", 8)
    monkeypatch.setattr(chunks, "WORKSPACE_MIB", 0)
    for got, at_once, want in zip(run(function, tensors, upstream), whole, exact, strict=True):
        assert (got - want).norm() <= max(1.2 * (at_once - want).norm(), 1e-5 * want.norm())


@pytest.mark.parametrize(("mlp", "kind"), CASES)
def test_nothing_more_is_saved(kernel_device, mlp, kind):
    """What the op without float8 saves, and a few maxima."""
    named, _ = make(mlp, kind, torch.float32, kernel_device)
    for tensor in named.values():
        tensor.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, stream = pair(mlp, list(named), kind, "tensorwise")[0](*named.values())
    parameters = {t.data_ptr() for t in named.values()}
    shapes = sorted(tuple(t.shape) for t in saved if t.data_ptr() not in parameters and t.numel() > 4)
    rows = (3, N // 3)
    want = {"rms": [rows], "gemma": [rows], "layer": [(*rows, 2)], "none": []}[kind]
    assert shapes == sorted([*want, (*rows, C), *([(*rows, 2 * F)] if mlp else [])])
    assert any(t.data_ptr() == stream.data_ptr() for t in saved)


@pytest.mark.cases(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mlp", [False, True])
def test_only_what_is_trained(kernel_device, mlp, recipe):
    named, upstream = make(mlp, "layer", torch.float32, kernel_device)
    names = list(named)
    want = dict(zip(names, run(pair(mlp, names, "layer", recipe)[0], list(named.values()), upstream)[2:], strict=True))
    for trained in [("x",), ("residual",), ("norm_weight",), ("norm_bias",), ("weight",), ("bias",), ("down_weight",)]:
        for name, tensor in named.items():
            tensor.requires_grad_(name in trained)
        if not set(trained) <= set(named):
            continue
        outputs = pair(mlp, names, "layer", recipe)[0](*named.values())
        streams = outputs if {"x", "residual"} & set(trained) else outputs[:1]
        (grad,) = torch.autograd.grad(streams, [named[trained[0]]], upstream[: len(streams)])
        torch.testing.assert_close(grad, want[trained[0]])


@pytest.mark.parametrize("mlp", [False, True])
def test_second_backward_agrees_and_nothing_is_overwritten(kernel_device, mlp):
    named, upstream = make(mlp, "rms", torch.float32, kernel_device)
    leaves = [t.requires_grad_() for t in named.values()]
    outputs = pair(mlp, list(named), "rms", "tensorwise")[0](*leaves)
    tensors = [*upstream, *outputs, *leaves]
    kept = [t.clone() for t in tensors]
    first = [g.clone() for g in torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)]
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


@pytest.mark.parametrize("mlp", [False, True])
def test_only_one_output_empty_rows_and_no_grad(backend, mlp):
    named, upstream = make(mlp, "rms", torch.float32, backend)
    names = list(named)
    for recipe in RECIPES:
        ours, reference = pair(mlp, names, "rms", recipe)
        for pick in (0, 1):
            got, want = (
                run(lambda *t, f=f: f(*t)[pick], list(named.values()), upstream[pick : pick + 1])  # noqa: B023
                for f in (ours, reference)
            )
            for a, b in zip(got, want, strict=True):
                assert (a - b).norm() <= 0.02 * b.norm()
        empty = [t[:0] if t.dim() == 3 else t for t in named.values()]
        torch.testing.assert_close(*(run(f, empty, [t[:0] for t in upstream]) for f in (ours, reference)))
        with torch.no_grad():
            torch.testing.assert_close(ours(*named.values())[0], ours(*(t.requires_grad_() for t in named.values()))[0])


@pytest.mark.parametrize("mlp", [False, True])
def test_streams_and_weights_of_two_dtypes(backend, mlp):
    """As autocast makes of a model in fp32: the stream stays, the weights are cast."""
    named, upstream = make(mlp, "gemma", torch.float32, backend)
    named |= {name: named[name].half() for name in named if "weight" in name and "norm" not in name}
    upstream[0] = upstream[0].half()
    ours, reference = (run(f, list(named.values()), upstream) for f in pair(mlp, list(named), "gemma", "rowwise"))
    for got, want in zip(ours, reference, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).float().norm() <= 0.02 * want.float().norm()


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("mlp", [False, True])
def test_opcheck(kernel_device, mlp, kind):
    named, (dy, dh) = make(mlp, kind, torch.float32, kernel_device)
    t = dict.fromkeys(NAMES) | {name: tensor.requires_grad_() for name, tensor in named.items()}
    norm = FusedNorm(t["norm_weight"], t["norm_bias"], "layer_norm" if kind == "layer" else "rms_norm", 1e-5)
    x, residual = t["x"] if mlp == (kind == "rms") else None, t["residual"]
    projection = Projection(t["weight"], t["bias"])
    every, with_bias = ProjectionNeeds(True, True, False, False), NormNeeds(True, kind == "layer")
    weight, nothing = ProjectionNeeds(True, False, False, False), NormNeeds(False, False)
    none = ProjectionNeeds(False, False, False, False)
    if mlp:
        module, down = float8_gated_mlp_module, Projection(t["down_weight"], t["down_bias"])
        inputs = GatedMLPInputs(x, residual, norm, projection, down, "silu", x is not None, True)
        inputs = module.Float8GatedMLPInputs(inputs, "tensorwise")
        needs_type, upstream = module.Float8GatedMLPNeeds, module.Float8GatedMLPUpstream
        all_needs = GatedMLPNeeds(True, True, with_bias, every, every)
        some_needs = GatedMLPNeeds(False, False, nothing, none, weight)
    else:
        module = float8_linear_module
        inputs = module.Float8NormLinearInputs(NormLinearInputs(x, residual, norm, projection), "rowwise")
        needs_type, upstream = module.Float8NormLinearNeeds, module.Float8NormLinearUpstream
        all_needs = NormLinearNeeds(True, True, with_bias, every)
        some_needs = NormLinearNeeds(False, False, nothing, weight)
    op, backward = module.FORWARD, module.BACKWARD
    opcheck_named(op, inputs)

    arguments = (each.detach() if isinstance(each, torch.Tensor) else each for each in op.inputs.flatten(inputs))
    inputs = op.inputs.unflatten(*arguments)
    context = SimpleNamespace(mark_non_differentiable=lambda *_: None)
    saved = module._save(context, inputs, op(inputs), needs_type(all_needs))
    for needs in (all_needs, some_needs):
        opcheck_named(backward, upstream(dy, dh, saved, needs_type(needs)))


FUNCTIONS = [
    (float8_norm_linear, {}),
    (float8_norm_linear_reference, {}),
    (float8_gated_mlp, {}),
    (float8_gated_mlp, {"recompute": True}),
    (float8_gated_mlp_reference, {}),
]


@pytest.mark.parametrize(("function", "options"), FUNCTIONS)
def test_weights_that_are_rounded_already(kernel_device, function, options):
    """Bit for bit the same; the weights themselves are not read."""
    mlp = "mlp" in function.__name__
    options = options | ({"act": "silu"} if mlp else {})
    named, upstream = make(mlp, "rms", torch.float32, kernel_device)
    of = functools.partial(call, function, list(named), "rms", recipe="tensorwise", **options)
    names = [each for each in ("weight", "down_weight") if each in named]
    rounded = [round_matrix(plain(named[each]), RECIPES["tensorwise"])[0] for each in names]
    unknown = {each: torch.full_like(named[each], torch.nan) for each in names}
    want = run(of(), list(named.values()), upstream)
    ours = run(of(gathered=tuple(rounded) if mlp else rounded[0]), list((named | unknown).values()), upstream)
    assert all(torch.equal(*each) for each in zip(ours, want, strict=True))


@pytest.mark.compile
@pytest.mark.parametrize("mlp", [False, True])
def test_compiles(backend, mlp):
    torch._dynamo.reset()
    named, upstream = make(mlp, "rms", torch.float32, backend)
    function = pair(mlp, list(named), "rms", "tensorwise")[0]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = list(named.values())
    torch.testing.assert_close(run(compiled, inputs, upstream), run(function, inputs, upstream))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_real_sizes(recipe):
    torch.manual_seed(0)
    draw = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
    norm, x, residual = FusedNorm(1 + draw(4096) / 4), draw(500, 4096), draw(500, 4096)
    for weights in ([draw(6144, 4096) / 64], [draw(28672, 4096) / 64, draw(4096, 14336) / 120]):
        upstream = draw(500, weights[-1].shape[0])
        names = ["x", "residual", "norm_weight", "weight", *(["down_weight"] if len(weights) == 2 else [])]
        tensors = [x, residual, norm.weight, *weights]
        mlp = len(weights) == 2
        ours = run(pair(mlp, names, "rms", recipe)[0], tensors, [upstream, residual])
        exact = run(unrounded(mlp, names, "rms"), [t.double() for t in tensors], [upstream.double(), residual.double()])
        for got, want in zip(ours, exact, strict=True):
            assert (got - want).norm() <= 0.12 * want.norm()


def test_bad_arguments():
    ones, norm = torch.ones, FusedNorm(torch.ones(32))
    with pytest.raises(ValueError, match="recipe must be one of tensorwise, rowwise, rowwise_with_gw_hp, got 'fp8'"):
        float8_norm_linear(None, ones(2, 32), norm, ones(16, 32), None, "fp8")
    with pytest.raises(ValueError, match=r"both sizes of weight must be multiples of 16, got \[8, 32\]\. Multiply in"):
        float8_norm_linear(None, ones(2, 32), norm, ones(8, 32), None, "tensorwise")
    with pytest.raises(ValueError, match=r"weight must be \[out, 32\], got \[32, 16\]"):
        float8_linear(ones(2, 32), ones(32, 16), None, "tensorwise")
    with pytest.raises(ValueError, match=r"both sizes of down_weight must be multiples of 16, got \[32, 24\]"):
        float8_gated_mlp(None, ones(2, 32), norm, ones(48, 32), ones(32, 24))
    with pytest.raises(ValueError, match=r"act must be one of silu, gelu_tanh, gelu, got 'relu'"):
        float8_gated_mlp(None, ones(2, 32), norm, ones(32, 32), ones(32, 16), act="relu")
    with pytest.raises(TypeError, match=r"must have one dtype, got torch\.float32 and torch\.float16"):
        float8_gated_mlp(None, ones(2, 32), norm, ones(32, 32), ones(32, 16).half())
