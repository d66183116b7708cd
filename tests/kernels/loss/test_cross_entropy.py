import pytest
import torch
from torch.nn import functional as F

from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.loss.cross_entropy import cross_entropy, cross_entropy_reference
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from liger_models.kernels.loss.row_chunks import BF16_CHUNKS, chunk_rows, logits_buffer

from ..norm.test_rms_norm import dtypes
from ..oracle import assert_close_to_truth, opcheck, run

N, V, C = 13, 37, 16

OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore": {"ignore_index": 5},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "class": {"class": True},
    "token": {"token": True},
    "items": {"num_items": 7.0},
    "all-mean": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 4.0, "logit_scale": 2.0, "class": 1, "token": 1},
    "all-sum": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 4.0, "class": 1, "token": 1, "reduction": "sum"},
    "all-none": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 4.0, "class": 1, "token": 1, "reduction": "none"},
}


def targets(device, rows=N, ignored=(2, 9)):
    target = torch.randint(0, V, (rows,), generator=torch.Generator().manual_seed(1))
    target[list(ignored)] = -100
    return target.to(device)


def bound(function, options, target, **extra):
    """``function`` with options bound, in the device and dtype of its input, giving only the loss."""
    options = dict(options)
    target = target.masked_fill(target == -100, options.get("ignore_index", -100))
    draw = lambda *size: torch.rand(*size, generator=torch.Generator().manual_seed(2)) + 0.5
    if options.pop("class", False):
        options["class_weight"] = draw(V)
    if options.pop("token", False):
        options["token_weight"] = draw(N)

    def loss(x, *args):
        moved = {k: v.to(x.device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return function(x, *args, target.to(x.device), **moved, **extra).loss

    return loss


def upstream_of(options, device):
    shape = (N,) if options.get("reduction") == "none" else ()
    return [torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)]


@pytest.mark.cases(13)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_cross_entropy_matches_fp64(backend, options, poisoned_empty):
    target = targets(backend)
    for dtype in dtypes(backend):
        logits = torch.randn(N, V, generator=torch.Generator().manual_seed(0)).mul(3).to(backend, dtype)
        assert_close_to_truth(
            bound(cross_entropy, options, target), bound(cross_entropy_reference, options, target),
            [logits], upstream_of(options, backend),
        )  # fmt: skip


@pytest.fixture
def four_rows_a_chunk(monkeypatch):
    """13 rows end in a chunk of one."""
    monkeypatch.setattr("liger_models.kernels.loss.row_chunks.BF16_CHUNKS", 1)
    monkeypatch.setattr("liger_models.kernels.loss.linear_cross_entropy.chunk_rows", lambda *_, **__: 4)


def linear_inputs(device, dtype, rows=N):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator).to(device, dtype)
    return [draw(rows, C), draw(V, C)], draw(V)


@pytest.mark.cases(26)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_linear_cross_entropy_matches_fp64(backend, options, with_bias, poisoned_empty, four_rows_a_chunk):
    target = targets(backend)

    def bias_among_inputs(function):
        def call(x, w, *rest, **options):
            *bias, target = rest
            return function(x, w, target, bias=bias[0] if bias else None, **options)

        return call

    ours, reference = bias_among_inputs(linear_cross_entropy), bias_among_inputs(linear_cross_entropy_reference)
    for dtype in dtypes(backend):
        inputs, bias = linear_inputs(backend, dtype)
        assert_close_to_truth(
            bound(ours, options, target), bound(reference, options, target),
            inputs + [bias] * with_bias, upstream_of(options, backend),
        )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_odd_vocabulary(backend, reduction, poisoned_empty, four_rows_a_chunk, monkeypatch):
    """37 words are taken as 32 and five."""
    monkeypatch.setattr("liger_models.kernels.loss.row_chunks.COLUMN_MULTIPLE", 8)
    target, options = targets(backend), {"reduction": reduction}
    inputs, bias = linear_inputs(backend, torch.float32)
    for extra in ([], [bias]):
        assert_close_to_truth(
            lambda x, w, *b: linear_cross_entropy(x, w, target.to(x.device), bias=b[0] if b else None, **options).loss,
            lambda x, w, *b: linear_cross_entropy_reference(
                x, w, target.to(x.device), bias=b[0] if b else None, **options
            ).loss,
            inputs + extra, upstream_of(options, backend),
        )  # fmt: skip


def test_products_in_bfloat16_on_the_cpu_read_no_undefined_numbers(poisoned_empty):
    """With AMX they read the numbers behind the last word of each row."""
    (x, w), _ = linear_inputs("cpu", torch.bfloat16)
    gradients = torch.autograd.grad(
        linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), targets("cpu")).loss, [x, w]
    )
    assert all(gradient.isfinite().all() for gradient in gradients)
    logits = logits_buffer(x, V, N)
    assert logits.as_strided((N, logits.stride(0)), logits.stride())[:, V:].eq(0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_optional_outputs(backend, reduction):
    (x, w), _ = linear_inputs(backend, torch.float32)
    target = targets(backend)
    wanted = linear_cross_entropy_reference(x, w, target, reduction=reduction, z_loss=0.1)
    options = {"reduction": reduction, "z_loss": 0.1}
    flags = {f"return_{name}": True for name in wanted._fields[1:]}
    for got in (
        linear_cross_entropy(x, w, target, **options, **flags),
        cross_entropy(x @ w.T, target, **options, **flags),
    ):
        for name in wanted._fields:
            torch.testing.assert_close(getattr(got, name), getattr(wanted, name), msg=name)
    assert linear_cross_entropy(x, w, target, **options)[1:] == (None, None, None, None)
    del flags["return_log_probs"]
    w.requires_grad_()
    for got in (
        linear_cross_entropy(x, w, target, **options, **flags),
        cross_entropy(x @ w.T, target, **options, **flags),
        linear_cross_entropy(x, w, target, **options, return_predicted_tokens=True),
    ):
        for name in wanted._fields:
            if getattr(got, name) is not None:
                torch.testing.assert_close(getattr(got, name), getattr(wanted, name), msg=name)
        assert got.predicted_tokens is not None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_through_loss_and_log_probs_together(backend, reduction):
    """As preference losses use them: a non-uniform, strided upstream gradient for every token."""
    target = targets(backend)
    inputs, _ = linear_inputs(backend, torch.float32)
    dlogp = torch.randn(2 * N, generator=torch.Generator().manual_seed(4)).to(backend)[::2]
    upstream = [*upstream_of({"reduction": reduction}, backend), dlogp]

    def pair(function, **flags):
        def both(*args):
            out = function(*args, target.to(args[0].device), reduction=reduction, softcap=5.0, z_loss=0.1, **flags)
            return out.loss, out.log_probs

        return both

    assert_close_to_truth(
        pair(linear_cross_entropy, return_log_probs=True), pair(linear_cross_entropy_reference), inputs, upstream
    )
    logits = [inputs[0] @ inputs[1].T]
    assert_close_to_truth(pair(cross_entropy, return_log_probs=True), pair(cross_entropy_reference), logits, upstream)


def test_expanded_upstream_gradient(backend):
    """loss.sum() hands the backward a gradient of stride 0."""
    target = targets(backend)
    (x, w), _ = linear_inputs(backend, torch.float32)
    x.requires_grad_()
    linear_cross_entropy(x, w, target, reduction="none").loss.sum().backward()
    want = torch.autograd.grad(linear_cross_entropy_reference(x, w, target, reduction="sum").loss, x)[0]
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_tokens_ignored(backend, reduction):
    (x, w), _ = linear_inputs(backend, torch.float32)
    x.requires_grad_()
    w.requires_grad_()
    loss = linear_cross_entropy(x, w, torch.full((N,), -100, device=backend), reduction=reduction).loss
    assert not loss.any()
    loss.sum().backward()
    assert not x.grad.any()
    assert not w.grad.any()


def test_no_items(backend):
    (x, w), _ = linear_inputs(backend, torch.float32)
    ignored = torch.full((N,), -100, device=backend)
    for items in (torch.tensor(0, device=backend), torch.tensor(0)):
        assert linear_cross_entropy(x.requires_grad_(), w, ignored, num_items=items).loss == 0


def test_no_tokens(backend):
    (x, w), _ = linear_inputs(backend, torch.float32, rows=0)
    x.requires_grad_()
    w.requires_grad_()
    linear_cross_entropy(x, w, targets(backend, 0, ())).loss.backward()
    assert x.grad.shape == (0, C)
    assert not w.grad.any()
    assert cross_entropy(x @ w.T, targets(backend, 0, ()), reduction="none").loss.shape == (0,)


def test_batched_shapes(backend):
    (x, w), _ = linear_inputs(backend, torch.float32, rows=12)
    target = targets(backend, 12)
    flat = linear_cross_entropy(x, w, target, reduction="none").loss
    shaped = linear_cross_entropy(x.view(3, 4, C), w, target.view(3, 4), reduction="none", return_log_probs=True)
    assert torch.equal(shaped.loss.flatten(), flat)
    assert shaped.log_probs.shape == (3, 4)
    assert torch.equal(cross_entropy((x @ w.T).view(3, 4, V), target.view(3, 4), reduction="none").loss.flatten(), flat)


def test_logits_of_minus_infinity(backend):
    logits = torch.randn(3, V, device=backend)
    logits[:, 10:] = float("-inf")
    logits.requires_grad_()
    target = torch.tensor([1, 2, 9], device=backend)
    loss = cross_entropy(logits, target).loss
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, torch.autograd.grad(F.cross_entropy(logits, target), logits)[0])


def test_confident_and_huge_logits(backend):
    """p(target) → 1, where a gradient of p − 1 must not be rounded twice; and logits near the end of the range."""
    for dtype in dtypes(backend):
        logits = torch.zeros(4, V, device=backend, dtype=dtype)
        logits[torch.arange(4), torch.arange(4)] = torch.tensor([10.0, 20.0, 1e3, 6e4], device=backend, dtype=dtype)
        target = torch.arange(4, device=backend)
        assert_close_to_truth(
            lambda x, t=target: cross_entropy(x, t.to(x.device), reduction="none").loss,
            lambda x, t=target: cross_entropy_reference(x, t.to(x.device), reduction="none").loss,
            [logits], [torch.randn(4, device=backend)],
        )  # fmt: skip


def test_inputs_and_upstream_are_left_alone_and_a_second_backward_agrees(backend):
    for reduction in ("mean", "none"):
        (x, w), b = linear_inputs(backend, torch.float32)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        copies = [t.detach().clone() for t in leaves]
        loss = linear_cross_entropy(x, w, targets(backend), bias=b, reduction=reduction).loss
        dy = torch.randn_like(loss)
        kept = dy.clone()
        first = [g.clone() for g in torch.autograd.grad(loss, leaves, dy, retain_graph=True)]
        again = torch.autograd.grad(loss, leaves, dy)
        assert torch.equal(dy, kept)
        assert all(torch.equal(a, c) for a, c in zip(leaves, copies, strict=True))
        assert all(torch.equal(a, c) for a, c in zip(first, again, strict=True))


@pytest.mark.parametrize("head", [False, True])
def test_a_second_derivative_is_an_error(backend, head):
    """And not a gradient without a graph, of which a penalty would be nothing."""
    x, weight, target = torch.randn(N, C, device=backend), torch.randn(V, C, device=backend), targets(backend)
    x.requires_grad_()
    loss = (linear_cross_entropy(x, weight, target) if head else cross_entropy(x @ weight.t(), target)).loss
    with pytest.raises(RuntimeError, match="a fused loss has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_second_derivative_by_transforms_is_an_error(backend):
    x, weight, target = torch.randn(N, C, device=backend), torch.randn(V, C, device=backend), targets(backend)
    first = torch.func.grad(lambda x, weight: linear_cross_entropy(x, weight, target).loss)
    with pytest.raises(RuntimeError, match="a fused loss has no second derivative"):
        torch.func.grad(lambda weight: first(x, weight).square().sum())(weight)


def test_outer_levels_of_transforms_get_the_gradients_of_the_loss(backend):
    x, weight, target = torch.randn(N, C, device=backend), torch.randn(V, C, device=backend), targets(backend)
    weight.requires_grad_()

    def inner(scale):
        loss = linear_cross_entropy(x, weight, target).loss
        return scale * loss, loss

    _, loss = torch.func.grad(inner, has_aux=True)(torch.tensor(2.0, device=backend))
    want = torch.autograd.grad(linear_cross_entropy(x, weight, target).loss, weight)
    torch.testing.assert_close(torch.autograd.grad(loss, weight), want)


def test_logits_that_another_op_saved_are_not_overwritten(backend):
    x = torch.randn(N, V, device=backend, requires_grad=True)
    logits = x.exp()  # exp saves its output
    loss = cross_entropy(logits, targets(backend)).loss
    (grad,) = torch.autograd.grad(loss, x)
    (want,) = torch.autograd.grad(cross_entropy_reference(x.exp(), targets(backend)).loss, x)
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_inputs_cost_no_product(backend, reduction, monkeypatch):
    import liger_models.kernels.loss.linear_cross_entropy as module

    needs = []
    original = module._walk_chunks
    monkeypatch.setattr(module, "_walk_chunks", lambda *a, **k: needs.append(a[1]) or original(*a, **k))
    (x, w), b = linear_inputs(backend, torch.float32)
    target = targets(backend)
    with torch.no_grad():
        assert not linear_cross_entropy(x.requires_grad_(), w, target, reduction=reduction).loss.requires_grad
    assert needs.pop() in (None, (False, False, False))
    for frozen in range(3):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((x, w, b))]
        linear_cross_entropy(*leaves[:2], target, bias=leaves[2], reduction=reduction).loss.sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [i != frozen for i in range(3)]
        assert tuple(needs[-1]) == tuple(i != frozen for i in range(3))


def test_weight_gradient_is_summed_in_fp32(backend, four_rows_a_chunk):
    """Over many chunks a half-precision sum would lose the small contributions."""
    rows = 256
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, C, generator=generator).half().to(backend) for n in (rows, V))
    target = torch.zeros(rows, dtype=torch.int64, device=backend)
    options = {"reduction": "sum"}
    assert_close_to_truth(
        lambda x, w: linear_cross_entropy(x, w, target.to(x.device), **options).loss,
        lambda x, w: linear_cross_entropy_reference(x, w, target.to(x.device), **options).loss,
        [x, w], [torch.ones((), device=backend)], factor=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("in_bf16", [True, False])
def test_weight_gradient_of_bf16(backend, four_rows_a_chunk, monkeypatch, in_bf16):
    """Summed in bf16, or in fp32 in two blocks of 16 and one of five."""
    module = "liger_models.kernels.loss.row_chunks"
    monkeypatch.setattr(f"{module}.BF16_CHUNKS", 4 if in_bf16 else 3)
    monkeypatch.setattr(f"{module}.ROW_MULTIPLE", 16)
    monkeypatch.setattr(f"{module}.COLUMN_MULTIPLE", 8)
    monkeypatch.setattr(f"{module}.BLOCK_MIB", 0)
    for reduction in ("mean", "none"):
        (x, w), _ = linear_inputs(backend, torch.bfloat16)
        target = targets(backend)
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        loss = linear_cross_entropy(*leaves, target, reduction=reduction).loss.sum()
        got = torch.autograd.grad(loss, leaves)
        wide = [t.detach().float().requires_grad_() for t in (x, w)]
        loss = linear_cross_entropy_reference(*wide, target, reduction=reduction).loss.sum()
        for ours, truth in zip(got, torch.autograd.grad(loss, wide), strict=True):
            assert ours.dtype == torch.bfloat16
            assert (ours.float() - truth).norm() <= 1e-2 * truth.norm()


def test_tiny_upstream_in_fp16(backend):
    """A mean over many tokens makes gradients below fp16's range unless they are scaled after the product."""
    (x, w), _ = linear_inputs(backend, torch.float16)
    target = targets(backend)
    for reduction, scale in (("mean", 2.0**-14), ("none", 2.0**-16)):
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        loss = linear_cross_entropy(*leaves, target, reduction=reduction).loss.sum() * scale
        got = torch.autograd.grad(loss, leaves)
        wide = [t.detach().float().requires_grad_() for t in (x, w)]
        loss = linear_cross_entropy_reference(*wide, target, reduction=reduction).loss.sum() * scale
        for ours, truth in zip(got, torch.autograd.grad(loss, wide), strict=True):
            torch.testing.assert_close(ours.float(), truth, rtol=5e-3, atol=6e-8)  # fp16's smallest step


def test_strided_inputs(backend):
    (x, w), _ = linear_inputs(backend, torch.float32, rows=2 * N)
    wt = w.T.contiguous().T
    got = run(
        lambda x, w: linear_cross_entropy(x, w, targets(x.device)).loss, [x[::2], wt], [torch.ones((), device=backend)]
    )
    want = run(
        lambda x, w: linear_cross_entropy_reference(x, w, targets(x.device)).loss,
        [x[::2], wt],
        [torch.ones((), device=backend)],
    )
    torch.testing.assert_close(got, want)


def test_autocast(backend):
    """fp32 weights with half-precision activations, with and without bias."""
    (x, w), b = linear_inputs(backend, torch.float32)
    target = targets(backend)
    for bias in (None, b):
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        with torch.autocast(backend, dtype=torch.bfloat16):
            loss = linear_cross_entropy(leaves[0].bfloat16(), leaves[1], target, bias=bias).loss
        loss.backward()
        assert loss.dtype == leaves[0].grad.dtype == leaves[1].grad.dtype == torch.float32
        torch.testing.assert_close(
            loss, linear_cross_entropy_reference(x, w, target, bias=bias).loss, rtol=2e-2, atol=2e-2
        )


def test_gradcheck_in_fp64():
    with reference_backend():
        x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (7, 3), (7,)))
        target = torch.tensor([0, 6, -100, 3, 2])
        for options in ({}, {"reduction": "none", "label_smoothing": 0.1}, {"z_loss": 0.1, "softcap": 2.0}):
            torch.autograd.gradcheck(
                lambda *a, o=options: linear_cross_entropy(*a[:2], target, bias=a[2], **o).loss, (x, w, b)
            )


def test_chunk_rows():
    assert chunk_rows(8192, 128256, 2, None) == 2048
    assert chunk_rows(65536, 128256, 2, None) == 16384
    assert chunk_rows(8192, 256000, 2, None) == 1024
    assert chunk_rows(8192, 512000, 2, None) == 1024  # 8 chunks
    assert chunk_rows(65536, 128256, 2, 512) == 2048
    assert chunk_rows(8192, 128256, 2, 512) == 2048
    assert chunk_rows(8192, 256000, 2, 512) == 1024
    assert chunk_rows(1, 128256, 2, 512) == 128
    assert chunk_rows(5000, 32000, 2, 512) == 5120  # one chunk
    assert chunk_rows(524288, 128256, 2, None) == 16384  # long sequences have more chunks
    assert chunk_rows(524288, 512000, 2, None) == 8192
    assert chunk_rows(9000, 128256, 2, 1) == 128  # never fewer
    assert chunk_rows(65536, 128256, 2, None, trained=False) == 1536  # no sums of dweight
    assert chunk_rows(8192, 256000, 2, None, trained=False) == 1024
    assert chunk_rows(65536, 128256, 2, 1024, trained=False) == 4096  # the given size
    rows = chunk_rows(8193, 128256, 2, 512)
    assert rows * 128256 * 2 <= 512 * 2**20
    assert rows % 128 == 0


@pytest.mark.parametrize(
    ("N", "V", "rows"),
    [
        (8192, 151936, 2048),
        (8192, 154880, 2048),
        (8192, 163840, 2048),  # 640 MiB
        (8192, 163841, 1536),
        (8192, 200064, 1536),
        (8192, 201088, 1536),
        (8192, 262144, 1024),
        (16384, 154880, 4096),  # the budget is in proportion to the tokens
        (16384, 201088, 3072),
        (65536, 154880, 16384),
        (524288, 154880, 16384),
        (9000, 512000, 1152),  # an eighth
    ],
)
def test_large_chunks_are_multiples_of_512_rows_by_default(N, V, rows):
    assert chunk_rows(N, V, 2, None) == rows


@pytest.mark.parametrize("V", [32000, 100278, 154880, 201088, 262144])
@pytest.mark.parametrize("budget", [200, 512, 640, 1000])
def test_a_budget_is_a_maximum(V, budget):
    for N in (1, 1000, 8192, 20000, 300000):
        for itemsize in (2, 4, 6):
            rows = chunk_rows(N, V, itemsize, budget)
            assert rows % 128 == 0
            assert rows * V * itemsize <= budget * 2**20


@pytest.mark.gpu
def test_memory_stays_within_the_workspace():
    N, V, C = 8192, 128256, 1024
    x = torch.randn(N, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(V, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, V, (N,), device="cuda")
    torch.cuda.synchronize()
    for budget in (128, 384, 512):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = linear_cross_entropy(x, w, target, workspace_mib=budget).loss
        chunks = -(-N // chunk_rows(N, V, 2, budget))
        held = x.numel() * 2 + w.numel() * (2 if chunks <= BF16_CHUNKS else 4)
        assert torch.cuda.max_memory_allocated() - before <= held + (budget + 40) * 2**20
        loss.backward()
        assert torch.cuda.max_memory_allocated() - before <= held + (budget + 40) * 2**20
        x.grad = w.grad = None
        del loss


@pytest.mark.gpu
@pytest.mark.parametrize("V", [128256, 256000])
def test_weight_gradient_is_as_good_as_without_chunks(V):
    """Against fp64: at most 1.5 times the error of plain bf16 matmuls, and twice among the rows of words of a kind."""
    N, C = 4096, 512  # in as many chunks as twice the tokens by default
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(N, C, device="cuda", dtype=torch.bfloat16, generator=generator)
    w = (torch.randn(V, C, device="cuda", generator=generator) * C**-0.5).bfloat16().requires_grad_()
    target = torch.randint(0, V, (N,), device="cuda", generator=generator)
    target[: N // 4] = target[0]  # a word that is in every chunk
    (ours,) = torch.autograd.grad(linear_cross_entropy(x, w, target, workspace_mib=256).loss, w)
    (plain,) = torch.autograd.grad(F.cross_entropy((x @ w.T).float(), target), w)
    truth = torch.zeros(V, C, device="cuda", dtype=torch.float64)
    wide = w.detach().double()
    for rows, labels in zip(x.double().split(512), target.split(512), strict=True):
        dlogits = (rows @ wide.T).softmax(-1)
        dlogits[torch.arange(len(labels), device="cuda"), labels] -= 1
        truth.addmm_(dlogits.T, rows)
    truth /= N
    errors = {}
    for name, found in (("ours", ours), ("plain", plain)):
        difference = (found - truth).norm(dim=1)
        targets = torch.zeros(V, dtype=torch.bool, device="cuda").index_fill(0, target, True)
        parts = {"all": slice(None), "targets": targets, "others": ~targets, "frequent": target[:1]}
        errors[name] = {k: (difference[part].norm() / truth[part].norm()).item() for k, part in parts.items()}
    for part, error in errors["plain"].items():
        assert errors["ours"][part] <= (1.5 if part == "all" else 2.0) * error, errors


@pytest.mark.gpu
def test_logits_of_more_than_two_billion_elements():
    rows, V = 16800, 128256
    logits = torch.zeros(rows, V, device="cuda", dtype=torch.bfloat16)
    logits[-1] = torch.randn(V, device="cuda")
    logits.requires_grad_()
    target = torch.full((rows,), -100, device="cuda")
    target[-1] = 7
    loss = cross_entropy(logits, target).loss
    (grad,) = torch.autograd.grad(loss, logits)
    last = logits.detach()[-1:].float().requires_grad_()
    want = F.cross_entropy(last, target[-1:])
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(grad[-1:].float(), torch.autograd.grad(want, last)[0], rtol=1e-2, atol=1e-6)


@pytest.mark.gpu
def test_no_host_synchronization():
    (x, w), b = linear_inputs("cuda", torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    target = targets("cuda")
    for reduction in ("mean", "none"):
        for _ in range(2):  # the first call compiles
            torch.cuda.set_sync_debug_mode("error" if _ else "default")
            try:
                out = linear_cross_entropy(*leaves[:2], target, bias=leaves[2], reduction=reduction)
                out.loss.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_target_outside_the_vocabulary_shows_on_the_gpu():
    loss = cross_entropy(torch.randn(2, V, device="cuda"), torch.tensor([1, V], device="cuda"), reduction="none").loss
    assert loss.isnan().tolist() == [False, True]


def test_opcheck(kernel_device):
    (x, w), b = linear_inputs(kernel_device, torch.float32)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    target = targets(kernel_device)
    options = (-100, 0.1, 0.01, 5.0, 1.0)
    weights = torch.rand(V, device=kernel_device)
    ops = torch.ops.liger_models
    opcheck(ops.cross_entropy, ((x @ w.T).detach().requires_grad_(), target, weights, *options, True))
    opcheck(ops.linear_cross_entropy_tokens, (x, w, target, b, weights, *options, 4, True))
    factors = torch.rand(N, device=kernel_device)
    opcheck(ops.linear_cross_entropy, (x, w, target, b, weights, factors, *options, 4, True, True, True, True))


@pytest.mark.compile
def test_compiles_without_a_graph_break(kernel_device):
    (x, w), _ = linear_inputs(kernel_device, torch.float32)
    target = targets(kernel_device)
    leaves = [t.requires_grad_() for t in (x, w)]
    for reduction in ("mean", "none"):
        function = lambda x, w, r=reduction: linear_cross_entropy(x, w, target, reduction=r).loss.sum()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        got = torch.autograd.grad(compiled(*leaves), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(function(*leaves), leaves))


def test_bad_arguments():
    x, w, target = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"reduction must be 'mean', 'sum' or 'none', got 'avg'"):
        linear_cross_entropy(x, w, target, reduction="avg")
    with pytest.raises(ValueError, match=r"lie in \[0, 5\), got 7"):
        linear_cross_entropy(x, w, torch.tensor([0, 7, 1]))
    with pytest.raises(ValueError, match=r"lie in \[0, 4\), got -1"):
        cross_entropy(x, torch.tensor([0, -1, 1]))
    with pytest.raises(ValueError, match=r"target must have shape \[3\], got \[2\]"):
        cross_entropy(x, target[:2])
    with pytest.raises(TypeError, match=r"target must be int64, got torch\.float32"):
        cross_entropy(x, target.float())
    with pytest.raises(TypeError, match=r"must have one dtype, got torch\.float32, torch\.float16"):
        linear_cross_entropy(x, w.half(), target)
    with pytest.raises(ValueError, match=r"weight must be \[V, C\] with C the last dimension of x, got \[5, 3\]"):
        linear_cross_entropy(x, w[:, :3], target)
    with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\], got 1.5"):
        cross_entropy(x, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"softcap must be positive or None, got 0"):
        cross_entropy(x, target, softcap=0)
    with pytest.raises(ValueError, match=r"num_items is the divisor of reduction 'mean', got it with 'sum'"):
        cross_entropy(x, target, reduction="sum", num_items=3)
    with pytest.raises(ValueError, match="token_weight gets no gradient"):
        cross_entropy(x, target, token_weight=torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="workspace_mib must be positive, got 0"):
        linear_cross_entropy(x, w, target, workspace_mib=0)
