"""Ops with named arguments: the schema, what calls leave out, outputs that are None, and gradients by name."""

from contextlib import nullcontext
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_models.common.ops import Argument, Arguments, Op, define_op

PAIR = Argument("Tensor? {0}_a=None, Tensor? {0}_b=None", tuple, lambda a, b: (a, b))
SCALED = Argument(
    "Tensor {0}, float {0}_scale=1.0",
    lambda value: None if isinstance(value, Tensor) else value,
    lambda tensor, scale: (tensor, scale),
)


class Norm(NamedTuple):
    weight: Tensor | None
    eps: float


class Inputs(NamedTuple):
    x: Tensor
    scaled: Annotated[Tensor | tuple[Tensor, float], SCALED]
    norm: Norm
    name: str
    sizes: list[int]
    dtype: torch.dtype | None
    pair: Annotated[tuple[Tensor, Tensor] | None, PAIR] = None


def inputs(**others):
    x = torch.ones(3)
    return Inputs(
        **({"x": x, "scaled": x + 1, "norm": Norm(None, 1e-6), "name": "n", "sizes": [1], "dtype": None} | others)
    )


def test_schema():
    arguments = Arguments(Inputs)
    assert arguments.schema == (
        "Tensor x, Tensor scaled, Tensor? norm_weight, float norm_eps, str name, int[] sizes, ScalarType? dtype,"
        " float scaled_scale=1.0, Tensor? pair_a=None, Tensor? pair_b=None"
    )
    assert [name for name, is_tensor in zip(arguments.names, arguments.is_tensor, strict=True) if is_tensor] == [
        "x", "scaled", "norm_weight", "pair_a", "pair_b",
    ]  # fmt: skip


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("paired", [False, True])
def test_arguments_are_restored(scaled, paired):
    tensor = torch.zeros(2)
    value = inputs(scaled=(tensor, 2.0) if scaled else tensor, pair=(tensor, tensor) if paired else None)
    arguments = Arguments(Inputs)
    flat = arguments.flatten(value)
    assert len(flat) == (10 if paired else 8 if scaled else 7)  # what has its default value at the end is left out
    for given in (flat, arguments.flatten_all(value)):
        restored = arguments.unflatten(*given)
        assert type(restored) is Inputs
        assert type(restored.norm) is Norm
        assert all(ours is theirs or ours == theirs for ours, theirs in zip(restored, value, strict=True))


class NormGradients(NamedTuple):
    weight: Any = None
    bias: Any = None


class AllGradients(NamedTuple):
    x: Any = None
    norm: NormGradients = NormGradients()


def test_one_class_is_gradients_and_needs():
    gradients, needs = Arguments(AllGradients), Arguments(Annotated[AllGradients, bool])
    assert gradients.schema == "Tensor? x, Tensor? norm_weight, Tensor? norm_bias"
    assert needs.schema == "bool x, bool norm_weight, bool norm_bias"
    value = AllGradients(True, NormGradients(False, True))
    assert needs.flatten(value) == (True, False, True)
    assert needs.unflatten(True, False, True) == value


class Product(NamedTuple):
    x: Tensor
    norm: Norm
    keep: bool


class Outputs(NamedTuple):
    y: Tensor
    kept: Tensor | None


class Saved(NamedTuple):
    keep: bool
    x: Tensor
    norm: Norm


class Needs(NamedTuple):
    norm_weight: bool
    x: bool


class Gradients(NamedTuple):
    norm_weight: Tensor | None
    x: Tensor | None


def _forward(inputs: Product) -> Outputs:
    return Outputs(inputs.x * inputs.norm.weight, inputs.x + inputs.norm.eps if inputs.keep else None)


def _save(ctx, inputs: Product, outputs: Outputs, needs: Needs) -> Saved:
    if outputs.kept is not None:
        ctx.mark_non_differentiable(outputs.kept)
    return Saved(inputs.keep, inputs.x, inputs.norm)


def _backward(saved: Saved, needs: Needs, upstream: Outputs) -> Gradients:
    assert saved.norm.eps == 0.5
    d_weight = (upstream.y * saved.x).sum(0) if needs.norm_weight else None
    return Gradients(d_weight, upstream.y * saved.norm.weight if needs.x else None)


op = Op("product_of_the_tests", _forward, _forward)
op.differentiable(_save, _backward)


@pytest.mark.parametrize("keep", [False, True])
def test_op(keep):
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    outputs = op(Product(x, Norm(weight, 0.5), keep))
    assert (outputs.kept is not None) == keep
    assert not keep or not outputs.kept.requires_grad
    dx, d_weight = torch.autograd.grad(outputs.y.sum(), (x, weight))
    torch.testing.assert_close(dx, weight.expand(3, 4))
    torch.testing.assert_close(d_weight, x.sum(0))
    (dx,) = torch.autograd.grad(op(Product(x, Norm(weight.detach(), 0.5), keep)).y.sum(), x)
    torch.testing.assert_close(dx, weight.expand(3, 4))
    torch.library.opcheck(
        torch.ops.liger_models.product_of_the_tests, op.inputs.flatten(Product(x, Norm(weight, 0.5), keep))
    )


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


def _doubled_backward(dy: Tensor) -> Tensor:
    return DOUBLED_BACKWARD(dy)


DOUBLED_BACKWARD = define_op("doubled_backward_of_the_tests", _doubled, "x")
DOUBLED = define_op("doubled_of_the_tests", _doubled, "x", backward=_doubled_backward, gradients="x")


def product(x):
    return op(Product(x, Norm(torch.full((4,), 3.0), 0.5), False)).y


@pytest.mark.parametrize("function", [DOUBLED, product, DOUBLED_BACKWARD])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_an_error(function, requires_grad):
    """And not a tangent of zero, or none."""
    x, tangent = torch.randn(3, 4, requires_grad=requires_grad), torch.randn(3, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            function(dual)
        function(x)  # has no tangent
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(function, (x,), (tangent,))


def test_a_second_derivative_through_an_op_without_a_backward_is_an_error():
    """And not a gradient that lacks terms."""
    x = torch.randn(3, 4, requires_grad=True)
    loss = lambda x: DOUBLED(x).square().sum()
    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(gradient, 8 * x)
    with pytest.raises(RuntimeError, match="doubled_backward_of_the_tests: this op has no derivative"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match="doubled_backward_of_the_tests: this op has no derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x.detach())


@pytest.mark.parametrize("function", [DOUBLED, product])
def test_outer_levels_of_transforms_get_their_gradients(function):
    x = torch.randn(3, 4, requires_grad=True)
    scale = torch.tensor(2.0)

    def inner(scale, x):
        y = (scale * function(scale * x)).sum()
        return y, y

    want = torch.autograd.grad(2 * function(2 * x).sum(), x)
    _, y = torch.func.grad(inner, has_aux=True)(scale, x)
    torch.testing.assert_close(torch.autograd.grad(y, x), want)
    total = lambda x: torch.func.grad(inner, has_aux=True)(scale, x)[1]
    torch.testing.assert_close(torch.func.grad(total)(x), want[0])


def test_inputs_get_no_gradients_if_no_output_has_one():
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x = torch.randn(3, 4, requires_grad=True)
    NoGradient.apply(product(x)).sum().backward()
    assert x.grad is None


def test_gradients_have_names_of_inputs():
    class Other(NamedTuple):
        y: Tensor | None

    def backward(saved: Saved, needs: Needs, upstream: Outputs) -> Other:
        return Other(None)

    backward.__annotations__["return"] = Other
    with pytest.raises(ValueError, match="y"):
        op.differentiable(_save, backward)


def test_only_calls_that_something_observes_go_through_the_dispatcher(monkeypatch):
    """Modes, transforms, profilers, tensors without values and subclasses; a plain call needs autograd at most."""

    class Subclass(Tensor):
        pass

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    def is_dispatched(x):
        dispatched.clear()
        weight = norm.weight.to(x.device)
        outputs = op(Product(x, Norm(weight, norm.eps), False))
        assert outputs.kept is None
        return bool(dispatched)

    names, dispatched = [], []
    run, norm, x = op.run, Norm(torch.ones(4), 0.5), torch.randn(3, 4)
    monkeypatch.setattr(op, "run", lambda *arguments: dispatched.append(True) or run(*arguments))
    assert not is_dispatched(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_dispatched(x)
    with torch.device("cpu"):  # a mode of functions
        assert is_dispatched(x)
    with torch.no_grad():
        assert not is_dispatched(x)
        assert is_dispatched(x.to("meta"))
        assert is_dispatched(x.as_subclass(Subclass))
        with Names():
            assert is_dispatched(x)
        assert "liger_models::product_of_the_tests" in names
        torch.func.vmap(lambda x: is_dispatched(x) and x)(x[None])
        assert dispatched
    with torch.inference_mode():
        assert not is_dispatched(x)

    # What a call saves and its gradients are the same without the dispatcher.
    gradients, kept = [], []
    for mode in (nullcontext(), Names()):
        leaf = x.clone().requires_grad_()
        with mode, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
            outputs = op(Product(leaf, norm, True))
        assert not outputs.kept.requires_grad
        gradients.append(torch.autograd.grad(outputs.y.square().sum(), leaf)[0])
    assert dispatched
    assert torch.equal(*gradients)
    assert kept[: len(kept) // 2] == kept[len(kept) // 2 :]


def _scaled_backward(
    d_y: Tensor | None, d_total: Tensor | None, x: Tensor, y: Tensor, bias: Tensor | None, scale: float, need_sum: bool
) -> tuple[Tensor, Tensor | None]:
    d_inner = torch.zeros_like(x) if d_y is None else d_y * (y > 0)
    d_x = d_inner * scale if d_total is None else d_inner * scale + d_total
    return d_x, d_inner.sum(0) if need_sum else x.new_empty(0)


def _scaled(
    x: Tensor, bias: Tensor | None, scale: float = 2.0, places: Annotated[int, "SymInt"] = 0
) -> tuple[Tensor, Tensor, Tensor]:
    y = (x * scale if bias is None else x * scale + bias).relu()
    return y, x.sum(0), y.sign()


def test_op_of_a_function():
    """The schema of a function, and a backward whose parameters say what is saved."""
    names = {"outputs": "y total sign", "constants": "sign", "needs": {"need_sum": "bias"}}
    options = names | {"backward": _scaled_backward, "gradients": "x bias"}
    fake = lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape[1:]), x.new_empty(x.shape))
    scaled = define_op("scaled_of_the_tests", _scaled, fake, **options)
    overload = torch.ops.liger_models.scaled_of_the_tests
    assert str(overload.default._schema) == (
        "liger_models::scaled_of_the_tests(Tensor x, Tensor? bias, float scale=2., SymInt places=0)"
        " -> (Tensor, Tensor, Tensor)"
    )
    x, bias = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    for arguments in ((x, bias), (x, None, 3.0), (x.detach(), bias, 2.0, 1), (x, bias.detach())):
        torch.library.opcheck(overload, arguments)

    y, total, sign = scaled(x, bias, 3.0, 0)
    assert not sign.requires_grad
    d_x, d_bias = torch.autograd.grad([y, total], [x, bias], [torch.ones(3, 4), torch.full((4,), 2.0)])
    assert torch.equal(d_x, 3 * (y > 0) + 2)
    assert torch.equal(d_bias, (y > 0).sum(0))
    assert torch.equal(torch.autograd.grad(scaled(x, bias, 3.0, 0)[1].sum(), x)[0], torch.ones(3, 4))
    y = scaled(x, None, 3.0, 0)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 3 * (y > 0))

    with pytest.raises(ValueError, match="inputs or outputs, got bais"):
        define_op("wrong_of_the_tests", _scaled, fake, **(options | {"gradients": "x bais"}))
