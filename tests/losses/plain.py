"""Shared by the tests of fused losses: inputs, log-probabilities from whole logits in fp64, comparison."""

import torch
from torch import Tensor

V, C, T = 23, 8, 6


def inputs(rows: int, hidden: int = C, seed: int = 0, vocabulary: int = V) -> list[Tensor]:
    """Hidden states [rows, T, hidden], weight, bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, T, hidden), (vocabulary, hidden), (vocabulary,))
    return [
        torch.randn(*shape, generator=generator) * scale for shape, scale in zip(shapes, (1, 0.5, 0.5), strict=True)
    ]


def targets(rows: int, ignore_index: int = -100, empty: tuple[int, ...] = ()) -> Tensor:
    """[rows, T]: 0 to 2 ignored tokens at the start, 0 to 3 at the end; the rows in ``empty`` have no target."""
    target = torch.randint(0, V, (rows, T), generator=torch.Generator().manual_seed(1))
    if ignore_index >= 0:
        target[target == ignore_index] = 0 if ignore_index else 1
    for row in range(rows):
        target[row, : row % 3] = ignore_index
        target[row, T - row % 4 :] = ignore_index
    target[list(empty)] = ignore_index
    return target


def plain_logits(x, weight, bias, softcap=None, logit_scale=1.0, temperature=1.0):
    logits = x @ weight.T * logit_scale
    if bias is not None:
        logits = (x @ weight.T + bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def plain_log_probs(x, weight, bias, target, ignore_index=-100, **head):
    """[B, T], 0 where ignored."""
    log_p = torch.log(torch.softmax(plain_logits(x, weight, bias, **head), -1))
    chosen = torch.gather(log_p, 2, target.masked_fill(target == ignore_index, 0)[..., None])[..., 0]
    return torch.where(target == ignore_index, torch.zeros_like(chosen), chosen)


def results(function, leaves: list[Tensor], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Loss and metrics of ``function(*leaves)``, then the gradient of every leaf under an upstream gradient of 0.37."""
    copies = [leaf.detach().to(device, dtype).requires_grad_() for leaf in leaves]
    loss, metrics = function(*copies)
    gradients = torch.autograd.grad(loss * 0.37, copies)
    assert not any(metric is not None and metric.requires_grad for metric in metrics)
    return [loss.detach(), *metrics, *gradients]


def assert_same(got, want, tolerance: float) -> None:
    """The norm of each result's error is at most ``tolerance`` times the norm of the wanted result."""
    assert len(got) == len(want)
    for index, (ours, truth) in enumerate(zip(got, want, strict=True)):
        if truth is None:
            assert ours is None
            continue
        assert ours.shape == truth.shape, index
        ours, truth = ours.double().cpu(), truth.double()
        assert ours.isfinite().all(), index
        error = (ours - truth).norm() / truth.norm().clamp_min(1e-3)
        assert error <= tolerance, f"result {index}: error {error:.3e}, allowed {tolerance:.0e}"


def assert_matches(ours, plain, leaves: list[Tensor], backend: str = "cpu", tolerance: float = 1e-6) -> None:
    """``ours`` in fp32 gives the results of ``plain`` in fp64."""
    want = results(plain, leaves, torch.float64)
    assert_same(results(ours, leaves, torch.float32, backend), want, tolerance)


def assert_matches_in_fp64(ours, plain, leaves: list[Tensor]) -> None:
    """Both in fp64, where rounding is negligible."""
    assert_same(results(ours, leaves, torch.float64), results(plain, leaves, torch.float64), 1e-12)
