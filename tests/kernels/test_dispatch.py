import pytest
import torch

from liger_models.common.ops import register_autograd

from .oracle import opcheck

LIBRARY = torch.library.Library("liger_models_tests", "DEF")


@pytest.fixture(scope="module")
def op():
    """An op of which PyTorch leaves out the last arguments, if they have their defaults."""
    LIBRARY.define("scaled_sum(Tensor x, Tensor? y=None, float scale=2.0) -> (Tensor, Tensor)")

    @torch.library.impl(LIBRARY, "scaled_sum", "CompositeExplicitAutograd")
    def forward(x, y=None, scale=2.0):
        total = x * scale if y is None else (x + y) * scale
        return total, total.detach().sign()

    @torch.library.register_fake("liger_models_tests::scaled_sum", lib=LIBRARY)
    def fake(x, y=None, scale=2.0):
        return torch.empty_like(x), torch.empty_like(x)

    def setup_context(ctx, inputs, output):
        _, ctx.y, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])

    def backward(ctx, d_total, _):
        return d_total * ctx.scale, None if ctx.y is None else d_total * ctx.scale, None

    register_autograd("scaled_sum", backward, setup_context, library=LIBRARY)
    return torch.ops.liger_models_tests.scaled_sum


def test_autograd_of_an_op(op):
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    for arguments in ((x,), (x, y), (x, None, 3.0), (x.detach(), y, 3.0), (x, y.detach())):
        opcheck(op, arguments)
    total, sign = op(x, y)
    assert not sign.requires_grad
    assert torch.equal(torch.autograd.grad(total.sum(), (x, y))[1], torch.full((3,), 2.0))
    compiled = torch.compile(lambda x, y: op(x, y, 3.0)[0].sum(), fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x, y), x)[0], torch.full((3,), 3.0))


def test_nothing_is_kept_where_nothing_needs_a_gradient(op):
    x = torch.randn(3, requires_grad=True)
    assert op(x.detach())[0].grad_fn is None
    with torch.no_grad():
        assert op(x)[0].grad_fn is None
    with torch.inference_mode():
        assert op(x)[0].grad_fn is None
