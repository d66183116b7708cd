import pytest
import torch
from torch.nn.functional import logsigmoid

from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.loss import linear_logprobs, row_chunks
from liger_models.kernels.loss.linear_logprobs import (
    fused_linear_logprobs,
    fused_linear_logprobs_reference,
    log_probs_of_sum,
    loss_of_log_probs,
)

from ..oracle import assert_close_to_truth, opcheck, run

N, V, C = 11, 37, 8
DTYPES = [torch.float32, torch.float16]
OPTIONS = {
    "plain": {},
    "ignore": {"ignore_index": 5},
    "temperature": {"temperature": 0.7},
    "scale": {"logit_scale": 0.25},
    "all": {"softcap": 3.0, "logit_scale": 2.0, "temperature": 1.5},
}


@pytest.fixture
def four_rows_a_chunk(monkeypatch):
    """A chunk has four rows. A row of 37 logits has blocks of 16, so the last block has 5."""
    monkeypatch.setattr(linear_logprobs, "MAX_BLOCK", 16)
    for module in ("linear_cross_entropy", "linear_logprobs"):
        monkeypatch.setattr(f"liger_models.kernels.loss.{module}.chunk_rows", lambda *_, **__: 4)


def inputs(device, dtype=torch.float32, rows=N):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator) for shape in ((rows, C), (V, C), (V,))]
    return [tensor.to(device, dtype) for tensor in tensors]


def targets(ignore_index=-100, rows=N):
    target = torch.randint(0, V, (rows,), generator=torch.Generator().manual_seed(1))
    target[1::5] = ignore_index
    return target


@pytest.mark.cases(9)
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_matches_fp64(backend, options, with_entropy, poisoned_empty, four_rows_a_chunk):
    target = targets(options.get("ignore_index", -100))

    def of(function, **extra):
        def outputs(x, w, b):
            out = function(x, w, target.to(x.device), bias=b, **options, **extra)
            return out if isinstance(out, torch.Tensor) or with_entropy else out[0]

        return outputs

    upstream = tuple(torch.randn(N, device=backend) for _ in range(1 + with_entropy))
    for dtype in DTYPES:
        ours, theirs = of(fused_linear_logprobs, return_entropy=with_entropy), of(fused_linear_logprobs_reference)
        assert_close_to_truth(ours, theirs, inputs(backend, dtype), upstream)


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_of_one_output_alone(backend, output):
    target = targets().to(backend)
    upstream = [torch.randn(N, device=backend)]
    got, want = (
        run(lambda x, w, b, f=f, k=k: f(x, w, target, bias=b, **k)[output], inputs(backend), upstream)
        for f, k in ((fused_linear_logprobs, {"return_entropy": True}), (fused_linear_logprobs_reference, {}))
    )
    torch.testing.assert_close(got, want)


def test_gradcheck_in_fp64():
    with reference_backend():
        leaves = [tensor[:5].double().requires_grad_() for tensor in inputs("cpu", rows=5)]
        target = torch.tensor([0, 4, -100, 3, 2])
        options = {"softcap": 2.0, "temperature": 0.8, "return_entropy": True}
        torch.autograd.gradcheck(lambda x, w, b: fused_linear_logprobs(x, w, target, bias=b, **options), leaves)


def test_logits_of_minus_infinity(backend):
    x, w, b = inputs(backend)
    b[3] = float("-inf")
    leaves = [tensor.requires_grad_() for tensor in (x, w)]
    target = torch.zeros(N, dtype=torch.int64, device=backend)
    outputs = fused_linear_logprobs(*leaves, target, bias=b, return_entropy=True)
    want = fused_linear_logprobs_reference(*leaves, target, bias=b)[1]
    torch.testing.assert_close(outputs[1], want)
    gradients = torch.autograd.grad(sum(out.sum() for out in outputs), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_logit_that_is_not_a_number_shows(backend):
    x, w, _ = inputs(backend)
    x[2] = float("nan")
    target = torch.zeros(N, dtype=torch.int64, device=backend)
    for out in fused_linear_logprobs(x, w, target, return_entropy=True):
        assert out.isnan().nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("return_entropy", [False, True])
def test_no_rows_and_ignored_rows(backend, return_entropy):
    for rows in (0, 3):
        x, w, b = (tensor.requires_grad_() for tensor in inputs(backend, rows=rows))
        target = torch.full((rows,), -100, device=backend)
        out = fused_linear_logprobs(x, w, target, bias=b, return_entropy=return_entropy)
        total = sum(o.sum() for o in out) if return_entropy else out.sum()
        total.backward()
        assert total == 0
        assert all(t.grad.eq(0).all() for t in (x, w, b))


def test_shapes_frozen_inputs_and_expanded_upstream(backend):
    x, w, _ = inputs(backend, rows=12)
    target = targets(rows=12).to(backend)
    flat = fused_linear_logprobs(x, w, target, return_entropy=True)
    x = x.view(3, 4, C).requires_grad_()
    shaped = fused_linear_logprobs(x, w, target.view(3, 4), return_entropy=True)
    torch.testing.assert_close([out.flatten() for out in shaped], list(flat))
    sum(out.sum() for out in shaped).backward()
    want = torch.autograd.grad(sum(o.sum() for o in fused_linear_logprobs_reference(x, w, target.view(3, 4))), x)
    torch.testing.assert_close(x.grad, want[0])
    assert w.grad is None


def test_autocast(backend):
    x, w, b = inputs(backend)
    with torch.autocast(torch.device(backend).type, torch.bfloat16):
        got = fused_linear_logprobs(x.bfloat16(), w, targets().to(backend), bias=b, return_entropy=True)
    want = fused_linear_logprobs_reference(x, w, targets().to(backend), bias=b)
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


def test_ops_are_registered_in_full():
    x, w, b = inputs("cpu")
    target = targets()
    args = (x.requires_grad_(), w.requires_grad_(), target, b.requires_grad_(), -100, 0.0, 0.0, 3.0, 1.0, 4)
    opcheck(torch.ops.liger_models.linear_logprobs, args)
    with torch.no_grad():
        _, entropy, lse = torch.ops.liger_models.linear_logprobs(*args)
        backward = (torch.randn(N), None, *args, lse, entropy, True, False, True)
        opcheck(torch.ops.liger_models.linear_logprobs_backward, [t.detach() if isinstance(t, torch.Tensor) else t
                                                                  for t in backward])  # fmt: skip


@pytest.mark.compile
def test_compiled():
    x, w, b = inputs("cpu")
    target = targets()
    function = lambda x, w, b: fused_linear_logprobs(x, w, target, bias=b, return_entropy=True)
    upstream = [torch.randn(N), torch.randn(N)]
    want = run(function, (x, w, b), upstream)
    got = run(torch.compile(function, fullgraph=True, backend="aot_eager"), (x, w, b), upstream)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"temperature": 0.0}, ValueError),
        ({"softcap": -1.0}, ValueError),
        ({"workspace_mib": 0}, ValueError),
        ({"bias": torch.randn(V + 1)}, ValueError),
        ({"bias": torch.randn(V).double()}, TypeError),
        ({"target": torch.full((N,), V)}, ValueError),
        ({"target": torch.zeros(N)}, TypeError),
        ({"weight": torch.randn(V, C + 1)}, ValueError),
    ],
)
@pytest.mark.parametrize("return_entropy", [False, True])
def test_wrong_arguments(change, error, return_entropy):
    x, w, _ = inputs("cpu")
    with pytest.raises(error):
        fused_linear_logprobs(**{"x": x, "weight": w, "target": targets(), **change}, return_entropy=return_entropy)


@pytest.mark.gpu
@pytest.mark.parametrize("return_entropy", [False, True])
def test_memory_stays_within_the_workspace(return_entropy):
    N, V, C, budget = 8192, 128256, 1024, 512
    x, w = (torch.randn(n, C, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (N, V))
    target = torch.randint(0, V, (N,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = fused_linear_logprobs(x, w, target, return_entropy=return_entropy, workspace_mib=budget)
    assert torch.cuda.max_memory_allocated() - before <= (budget + 40) * 2**20
    total = sum(o.sum() for o in out) if return_entropy else out.sum()
    torch.autograd.grad(total, (x, w))
    gradients = 2 * x.numel() * 2 + 2 * w.numel() * 2  # summed, and cast
    assert torch.cuda.max_memory_allocated() - before <= gradients + (budget + 40) * 2**20


OF_SUM = {name: options for name, options in OPTIONS.items() if "temperature" not in options} | {
    "all": {"softcap": 3.0, "logit_scale": 2.0}
}
UPSTREAM = {
    "a multiple of the sum": (lambda n: torch.full((n,), -0.37), None),
    "other": (torch.randn, None),
    "with the entropies": (lambda n: torch.full((n,), 2.0), torch.randn),
    "the entropies alone": (None, torch.randn),
}


@pytest.mark.cases(15)
@pytest.mark.parametrize(("c", "h"), UPSTREAM.values(), ids=UPSTREAM)
@pytest.mark.parametrize("options", OF_SUM.values(), ids=OF_SUM)
def test_those_of_a_sum_match_fp64(backend, options, c, h, poisoned_empty, four_rows_a_chunk):
    target = targets(options.get("ignore_index", -100))
    upstream = [draw(N).to(backend) for draw in (c, h) if draw is not None]
    outputs = [index for index, draw in enumerate((c, h)) if draw is not None]

    def of(function):
        return lambda x, w, b: tuple(function(x, w, target.to(x.device), bias=b, **options)[i] for i in outputs)

    for dtype in DTYPES:
        assert_close_to_truth(
            of(log_probs_of_sum), of(fused_linear_logprobs_reference), inputs(backend, dtype), upstream
        )


def test_logits_of_a_sum_are_computed_once(backend, four_rows_a_chunk, monkeypatch):
    """A second backward gives the same gradients. The caller is told if the loss is another."""
    seen, told, write = [], [], row_chunks.write_logits
    monkeypatch.setattr(row_chunks, "write_logits", lambda x, *rest: seen.append(len(x)) or write(x, *rest))
    leaves = [tensor.requires_grad_() for tensor in inputs(backend)]
    target = targets().to(backend)

    def backward(weights, retain_graph=False, ahead=True):
        x, w, b = leaves
        log_probs, *_ = log_probs_of_sum(
            x, w, target, bias=b, ahead=ahead, when_other=lambda: told.append(len(seen))
        )  # fmt: skip
        loss = (log_probs * weights).sum()
        first = [g.clone() for g in torch.autograd.grad(loss, leaves, retain_graph=retain_graph)]
        return (first, torch.autograd.grad(loss, leaves)) if retain_graph else first

    backward(torch.full((), -0.5, device=backend))
    assert sum(seen) == N
    # The upstream gradient of an ignored row does not matter.
    backward((target != -100).float())
    assert (sum(seen), told) == (2 * N, [])
    first, second = backward(torch.full((), 2.0, device=backend), retain_graph=True)
    torch.testing.assert_close(first, list(second))
    assert (sum(seen), told) == (4 * N, [])
    # With another loss they are computed twice, with and without gradients in the forward.
    weights = torch.arange(N, device=backend).float()
    first, second = backward(weights), backward(weights, ahead=False)
    torch.testing.assert_close(first, second)
    assert (sum(seen), len(told)) == (8 * N, 1)


def test_predictions_beside_those_of_a_sum(backend, four_rows_a_chunk):
    """The first of equal logits is the most probable; without gradients nothing else changes."""
    x, w, b = inputs(backend)
    w[1], b[1] = w[0], b[0]
    target = targets().to(backend)
    with torch.no_grad():
        *got, predicted = log_probs_of_sum(x, w.requires_grad_(), target, bias=b)
    assert torch.equal(predicted, (x @ w.T + b).argmax(-1).where(target != -100, -1))
    torch.testing.assert_close(tuple(got), fused_linear_logprobs_reference(x, w, target, bias=b))
    assert not got[0].requires_grad
    # Frozen weights get no gradient.
    x.requires_grad_()
    log_probs, *_ = log_probs_of_sum(x, w.detach(), target, bias=b)
    want = torch.autograd.grad(fused_linear_logprobs_reference(x, w, target, bias=b)[0].sum(), x)
    torch.testing.assert_close(torch.autograd.grad(log_probs.sum(), x), want)


def test_a_sum_without_targets(backend):
    for rows in (0, 3):
        leaves = x, w, b = [tensor.requires_grad_() for tensor in inputs(backend, rows=rows)]
        log_probs, entropy, predicted = log_probs_of_sum(x, w, torch.full((rows,), -100, device=backend), bias=b)
        (7 * log_probs).sum().backward()
        assert not any(leaf.grad.any() for leaf in leaves)
        assert not entropy.any()
        assert predicted.eq(-1).all()


def test_a_sum_under_autocast_has_no_second_derivative(backend):
    x, w, b = (tensor.requires_grad_() for tensor in inputs(backend))
    with torch.autocast(torch.device(backend).type, torch.bfloat16):
        log_probs, *_ = log_probs_of_sum(x.bfloat16(), w, targets().to(backend), bias=b)
    (gradient,) = torch.autograd.grad(log_probs.sum(), w, retain_graph=True)
    want = torch.autograd.grad(fused_linear_logprobs_reference(x, w, targets().to(backend), bias=b)[0].sum(), w)[0]
    assert gradient.dtype == torch.float32
    assert (gradient - want).norm() <= 0.05 * want.norm()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(log_probs.sum(), w, create_graph=True)


SEQUENCES = {
    "several a chunk": (8, 3, 1, False), "a pair a chunk": (4, 5, 2, True), "more than is kept": (2, 9, 2, False),
    "uniform": (2, 9, 2, True), "uniform, alone": (1, 9, 1, True),
}  # fmt: skip
"""B, T, together, uniform: with four rows a chunk, groups of 6, of 10, and of 18 rows, of which the logits of 8 are
kept; or those of the second sequence, and none of a single one."""


def sequences(B, T, device, dtype=torch.float32, ignore_index=-100):
    x, w, b = inputs(device, dtype, rows=B * T)
    return [x.view(B, T, C), w, b], targets(ignore_index, rows=B * T).view(B, T).to(device)


def loss_of(target, together, ignore_index=-100):
    """A loss that is not linear in the log-probabilities, and their mean over targets."""

    def of_log_probs(log_probs):
        lengths = (target.to(log_probs.device) != ignore_index).sum(-1).clamp_min(1)
        means = log_probs.sum(-1) / lengths
        if together == 2:
            chosen, rejected = means.chunk(2)
            loss = -logsigmoid(2.0 * (chosen - rejected)).sum() - 0.1 * chosen.sum()
        else:
            loss = means.square().sum()
        return loss, means.detach()

    return of_log_probs


@pytest.mark.cases(23)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("B", "T", "together", "uniform"), SEQUENCES.values(), ids=SEQUENCES)
def test_a_loss_of_them_matches_fp64(backend, B, T, together, uniform, options, poisoned_empty, four_rows_a_chunk):
    _, target = sequences(B, T, backend, ignore_index=options.get("ignore_index", -100))
    of_log_probs = loss_of(target, together, options.get("ignore_index", -100))

    def ours(x, w, b):
        how = {"together": together, "uniform": uniform}
        return loss_of_log_probs(of_log_probs, x, w, target, bias=b, **how, **options)[0]

    def theirs(x, w, b):
        return of_log_probs(fused_linear_logprobs_reference(x, w, target.to(x.device), bias=b, **options)[0])[0]

    for dtype in DTYPES:
        assert_close_to_truth(ours, theirs, sequences(B, T, backend, dtype)[0], [torch.tensor(0.37, device=backend)])


@pytest.mark.parametrize(("B", "T", "together", "uniform"), SEQUENCES.values(), ids=SEQUENCES)
def test_logits_of_a_loss_are_computed_once_if_there_is_room(
    backend, B, T, together, uniform, four_rows_a_chunk, monkeypatch
):
    (x, w, b), target = sequences(B, T, backend)
    seen, write = [], linear_logprobs.write_logits
    monkeypatch.setattr(linear_logprobs, "write_logits", lambda x, *rest: seen.append(len(x)) or write(x, *rest))
    leaves = [t.requires_grad_() for t in (x, w, b)]
    how = {"together": together, "uniform": uniform}
    loss, means = loss_of_log_probs(loss_of(target, together), x, w, target, bias=b, **how)
    assert sum(seen) == (B * T if T < 9 or uniform else 18 + 12)
    assert not means.requires_grad
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    first = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(3 * loss, leaves)
    for one, three in zip(first, second, strict=True):
        torch.testing.assert_close(three, 3 * one)


def test_a_loss_of_strided_inputs_and_of_none(backend, four_rows_a_chunk):
    (x, w, b), target = sequences(4, 6, backend)
    every = []
    for rows, y in ((x[:, 1:], target[:, 1:]), (x[:, 1:].contiguous(), target[:, 1:].contiguous())):
        leaf = x.detach().requires_grad_()
        rows = leaf[:, 1:] if not rows.is_contiguous() else leaf[:, 1:].contiguous()
        loss, _ = loss_of_log_probs(loss_of(y, 2), rows, w, y, together=2, bias=b)
        every.append((loss, *torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(*every, rtol=0, atol=0)
    nothing = x[:0].requires_grad_()
    loss, _ = loss_of_log_probs(loss_of(target[:0], 2), nothing, w.requires_grad_(), target[:0], together=2, bias=b)
    assert loss == 0
    assert not torch.autograd.grad(loss, w)[0].any()


@pytest.mark.parametrize(("B", "T", "uniform"), [(4, 5, False), (2, 9, True)])
def test_frozen_parts_of_a_loss(backend, B, T, uniform, four_rows_a_chunk):
    tensors, target = sequences(B, T, backend)

    def function(x, w, b):
        return loss_of_log_probs(loss_of(target, 2), x, w, target, together=2, uniform=uniform, bias=b)[0]

    every = torch.autograd.grad(function(*[t.requires_grad_() for t in tensors]), tensors)
    for index, want in enumerate(every):
        leaves = [t.detach().requires_grad_(i == index) for i, t in enumerate(tensors)]
        (got,) = torch.autograd.grad(function(*leaves), [leaves[index]])
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        loss = function(*tensors)
    torch.testing.assert_close(loss, function(*tensors))
    assert not loss.requires_grad


def test_a_single_pair_without_targets_in_a_sequence(backend, four_rows_a_chunk):
    """Its factor is any, because it multiplies zeros."""
    tensors, target = sequences(2, 9, backend)
    for number in range(2):
        labels = target.clone()
        labels[number] = -100
        every = []
        for uniform in (False, True):
            leaves = [t.detach().requires_grad_() for t in tensors]
            loss, _ = loss_of_log_probs(
                loss_of(labels, 2), leaves[0], leaves[1], labels, together=2, uniform=uniform, bias=leaves[2]
            )
            every.append((loss, *torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(*every)
        assert not every[1][1][number].any()


def test_a_loss_under_autocast(backend, four_rows_a_chunk):
    tensors, target = sequences(4, 5, backend)
    leaves = [t.requires_grad_() for t in tensors]
    with torch.autocast(backend, torch.bfloat16):
        loss, _ = loss_of_log_probs(loss_of(target, 2), leaves[0], leaves[1], target, together=2, bias=leaves[2])
    exact, _ = loss_of_log_probs(loss_of(target, 2), leaves[0], leaves[1], target, together=2, bias=leaves[2])
    got, want = (torch.autograd.grad(each, leaves) for each in (loss, exact))
    for gradient, exact_gradient in zip(got, want, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - exact_gradient).norm() <= 0.05 * exact_gradient.norm()


def test_bad_inputs_of_a_loss(backend):
    (x, w, _), target = sequences(3, 4, backend)
    x.requires_grad_()
    with pytest.raises(ValueError, match="B a multiple of 2"):
        loss_of_log_probs(loss_of(target, 2), x, w, target, together=2)
    with pytest.raises(ValueError, match="temperature must be positive"):
        loss_of_log_probs(loss_of(target, 1), x, w, target, temperature=0.0)
