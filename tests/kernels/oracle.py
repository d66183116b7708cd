"""Truth for the op tests: the reference in fp64, and the error that plain torch makes in the dtype under test."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.common.ops import Op


def run(function: Callable[..., object], inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of ``function`` on detached copies of the inputs (strides kept), then the gradient of every input."""
    leaves = []
    for tensor in inputs:
        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        leaves.append(copy.copy_(tensor).requires_grad_(tensor.is_floating_point()))
    outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, list(upstream), allow_unused=True)
    return [out.detach() for out in outputs] + [
        torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads, strict=True)
    ]


def wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu() if tensor.is_floating_point() else tensor.detach().cpu()


def assert_close_to_truth(
    function: Callable[..., object],
    reference: Callable[..., object],
    inputs: Sequence[Tensor],
    upstream: Sequence[Tensor],
    factor: float = 1.5,
    slack: Mapping[int, float] | None = None,
) -> None:
    """Outputs and gradients of ``function`` are about as near to the fp64 truth as plain torch in the same dtype is.

    Error is the norm of the difference over the norm of the truth. Allowed: ``factor`` times the reference's own error,
    plus two epsilons of the fp32 that kernels compute in, or a tenth of the result's own (a reference that happens to
    be exact). ``slack`` is what the numbers that a result is computed from, rounded as they are saved, may add to the
    norm of its difference: index of the result -> norm.
    """
    before = [tensor.clone() for tensor in inputs]
    got = run(function, inputs, upstream)
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor, copy), "an input was written to"
    plain = run(reference, inputs, upstream)
    truth = run(reference, [wide(t) for t in inputs], [wide(t) for t in upstream])
    assert len(got) == len(plain) == len(truth)
    for index, (ours, theirs, exact) in enumerate(zip(got, plain, truth, strict=True)):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        scale = exact.norm().clamp_min(1e-30)
        error = ((wide(ours) - exact).norm() / scale).item()
        allowed = factor * ((wide(theirs) - exact).norm() / scale).item() + max(
            0.1 * torch.finfo(ours.dtype).eps, 2.4e-7
        )
        allowed += (slack or {}).get(index, 0.0) / scale.item()
        assert error <= allowed, f"result {index}: error {error:.3e}, allowed {allowed:.3e}"


def opcheck_named(op: Op[Any, Any], inputs: tuple[Any, ...]) -> None:
    """`opcheck` of an op with named inputs."""
    opcheck(getattr(torch.ops.liger_models, op.name), op.inputs.flatten(inputs))


def opcheck(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object] | None = None) -> None:
    """All of `torch.library.opcheck`: schema, fake, autograd registration, and both kinds of tracing."""
    torch.library.opcheck(function, args, kwargs or {})
