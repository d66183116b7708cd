from contextlib import nullcontext
from itertools import product

import pytest
import torch

from liger_models.kernels.dispatch import reference_backend, use_triton
from liger_models.kernels.optimizer import adamw
from liger_models.kernels.optimizer.adamw import BLOCK, BLOCKS, Hyper, Update, adamw_
from liger_models.kernels.optimizer.moments import decode, encode

pytestmark = [
    # NumPy's, in the interpreter: infinities and NaN are meant
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

SPAN = BLOCK * BLOCKS
"""Elements of a program."""
SIZES = [(), (1,), (0, 4), (7, 3), (SPAN,), (3, SPAN + 1)]
GPU_SIZES = [(50_001, 641), (4096, 4096)]
HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, maximize=False, step=3)
OTHER = Hyper(lr=3e-3, beta1=0.0, beta2=0.9, eps=1e-6, weight_decay=0.0, maximize=True, step=1)


def truncates(device):
    """Triton's interpreter truncates to bfloat16 where hardware rounds to nearest."""
    return device == "cpu" and use_triton(torch.empty(0))


def combinations(device):
    """Dtypes of parameter, gradient and moments."""
    low = torch.float16 if truncates(device) else torch.bfloat16
    every = list(product((torch.float32, low), repeat=3))
    return every if truncates(device) else [*every, (torch.float16,) * 3]


def make(shape, dtypes, device, hyper=HYPER, stream=0):
    generator = torch.Generator().manual_seed(stream)
    draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64)
    p, g, m, v = (draw().to(device, dtype) for dtype in (*dtypes, dtypes[-1]))
    return Update(p, g, m, v.square_(), hyper, stream)


def copy_of(update):
    return Update(*(tensor.clone() for tensor in update[:4]), *update[4:])


def truth(update):
    """Parameter and moments after the step, by torch.optim.AdamW in fp64."""
    p, g, m, v = (tensor.detach().double().cpu().clone() for tensor in update[:4])
    lr, beta1, beta2, eps, weight_decay, maximize, step = update.hyper
    p.requires_grad_().grad = g
    optimizer = torch.optim.AdamW([p], lr, (beta1, beta2), eps, weight_decay, maximize=maximize, foreach=False)
    optimizer.state[p] = {"step": torch.tensor(step - 1.0), "exp_avg": m, "exp_avg_sq": v}
    optimizer.step()
    return p.detach(), m, v


def assert_rounded_once(before, after):
    """Each result is the truth, rounded to its dtype, but for a few fp32 epsilons of what it is the sum of."""
    wide = lambda tensor: tensor.double().cpu()
    p, g, m = map(wide, before[:3])
    want = truth(before)
    *_, step_size, root, eps = before.hyper.factors()
    of_m = m.abs() + g.abs()
    terms = (p.abs() + step_size * of_m / (want[2].sqrt() / root + eps), of_m, want[2])
    for got, exact, scale in zip((after.param, *after[2:4]), want, terms, strict=True):
        info = torch.finfo(got.dtype)
        allowed = 0.5 * info.eps * exact.abs() + info.tiny * info.eps + 4 * torch.finfo(torch.float32).eps * scale
        assert ((wide(got) - exact).abs() <= allowed).all()


@pytest.mark.parametrize("hyper", [HYPER, OTHER], ids=["decay", "maximize"])
def test_matches_fp64(backend, hyper):
    """All dtypes and sizes in one call."""
    kinds = list(product(combinations(backend), SIZES))
    updates = [make(shape, dtypes, backend, hyper, stream) for stream, (dtypes, shape) in enumerate(kinds)]
    before = [copy_of(update) for update in updates]
    adamw_(updates)
    for old, new in zip(before, updates, strict=True):
        assert torch.equal(old.grad, new.grad), "a gradient was written to"
        assert_rounded_once(old, new)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SIZES, ids=str)
def test_real_sizes(shape):
    for dtypes in combinations("cuda"):
        update = make(shape, dtypes, "cuda")
        before = copy_of(update)
        adamw_([update])
        assert_rounded_once(before, update)


def test_together_as_one_by_one(kernel_device):
    """Hyper-parameters are of each tensor, and neither its place in the table nor its neighbors matter."""
    dtype = torch.float16
    sizes = [5, 0, SPAN, 3 * SPAN + 2, 0, 1, 2 * SPAN, 0]
    updates = [make((n,), (dtype,) * 3, kernel_device, (HYPER, OTHER)[i % 2], i) for i, n in enumerate(sizes)]
    alone = [copy_of(update) for update in updates]
    adamw_(updates)
    for together, update in zip(updates, alone, strict=True):
        adamw_([update])
        assert all(torch.equal(a, b) for a, b in zip(together[:4], update[:4], strict=True))


def test_one_launch(kernel_device, monkeypatch):
    launches = []

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    kernel = adamw._adamw_kernel
    monkeypatch.setattr(adamw, "_adamw_kernel", Counting())
    adamw_([make((n,), (torch.float32,) * 3, kernel_device, (HYPER, OTHER)[n % 2], n) for n in range(40)])
    assert launches == [(39,)]
    adamw_([make((3,), dtypes, kernel_device) for dtypes in combinations(kernel_device)])
    assert len(launches) == 1 + len(combinations(kernel_device))
    adamw_([])
    adamw_([make((0,), (torch.float32,) * 3, kernel_device)])
    assert len(launches) == 1 + len(combinations(kernel_device))


@pytest.mark.parametrize("which", range(4), ids=["param", "grad", "exp_avg", "exp_avg_sq"])
def test_unaligned_views_and_nothing_beside_them(backend, which):
    for dtype, shift in product((torch.float32, torch.float16), (1, 3, 16)):
        update = make((SPAN + 70,), (dtype,) * 3, backend)
        before = copy_of(update)
        room = torch.full((SPAN + 100,), 7.0, dtype=dtype, device=backend)
        view = room[shift : shift + SPAN + 70].copy_(update[which])
        tensors = list(update)
        tensors[which] = view
        update = Update(*tensors)
        adamw_([update])
        assert_rounded_once(before, update)
        assert (room[:shift] == 7).all()
        assert (room[shift + SPAN + 70 :] == 7).all()


def test_strides(backend):
    """Gradients of any strides; parameters of any order in memory."""
    dtypes = (torch.float32,) * 3
    update = make((6, 40), dtypes, backend)
    row = torch.arange(40.0, device=backend)
    gradients = [
        update.grad.t().contiguous().t(),
        make((6, 80), dtypes, backend).grad[:, ::2],
        row.expand(6, 40),
        row.as_strided((6, 40), (0, 1)).flip(1),
    ]
    for gradient, turn in product(gradients, (False, True)):
        case = copy_of(update._replace(grad=gradient))._replace(grad=gradient)
        if turn:
            case = Update(*(case[i] if i == 1 else case[i].t().contiguous().t() for i in range(4)), *case[4:])
        before, kept = copy_of(case), gradient.clone()
        adamw_([case])
        assert_rounded_once(before, case)
        assert torch.equal(gradient, kept)


def test_extreme_values(backend):
    gradient = torch.tensor([0.0, -0.0, 1e-20, 1e15, -1e15, float("inf"), float("nan")], device=backend)
    zeros = lambda: torch.zeros_like(gradient)
    update = Update(torch.ones_like(gradient), gradient, zeros(), zeros(), HYPER._replace(step=1), 0)
    adamw_([update])
    got = update.param.cpu()
    want, *_ = truth(update._replace(param=torch.ones(7), exp_avg=zeros(), exp_avg_sq=zeros()))
    torch.testing.assert_close(got[:5], want[:5].float())
    assert got[5:].isnan().all()


def test_autograd_notices(backend):
    """As after any in-place operation, what was saved for a backward counts as changed."""
    update = make((4,), (torch.float32,) * 3, backend)
    weight = update.param.requires_grad_()
    loss = weight.square().sum()
    adamw_([update])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Stochastic rounding

BF16 = (torch.bfloat16,) * 3


def tiny_steps(device, count, size, stochastic):
    """Parameters of 1 with the gradient 1: each step takes lr away, a hundredth of a bfloat16's step below 1."""
    p = torch.ones(size, dtype=torch.bfloat16, device=device)
    g = torch.ones_like(p)
    m, v = (torch.zeros_like(p, dtype=torch.float32) for _ in range(2))
    lr = 2.0**-8 / 100
    for step in range(1, count + 1):
        hyper = Hyper(lr, 0.9, 0.999, 1e-12, 0.0, False, step)
        adamw_([Update(p, g, m, v, hyper, 0)], stochastic_rounding=stochastic)
    return p.double().cpu(), lr * count


def test_tiny_updates_are_not_lost(backend):
    if not truncates(backend):
        nearest, _ = tiny_steps(backend, 20, 64, stochastic=False)
        assert (nearest == 1).all()
    size, count = 20_000, 20
    stochastic, expected = tiny_steps(backend, count, size, stochastic=True)
    # A step is lost or made whole: so many coin tosses of so much.
    deviation = 2.0**-8 * (count * 0.01 * 0.99 / size) ** 0.5
    assert abs((1 - stochastic.mean()).item() - expected) < 5 * deviation


def rounded(device, values, seed=0, stream=0, step=1):
    """The values put through the kernel's rounding, by a step with no gradient on moments that hold them."""
    zeros = torch.zeros_like(values, dtype=torch.float32)
    # m = 0 · m + 1 · g
    hyper = Hyper(0.0, 0.0, 0.5, 1.0, 0.0, False, step)
    m = zeros.to(device, torch.bfloat16)
    update = Update(zeros.to(device, torch.bfloat16), values.to(device), m, m.clone(), hyper, stream)
    adamw_([update], stochastic_rounding=True, seed=seed)
    return m


def test_rounds_to_a_neighbor_without_bias(backend):
    values = torch.randn(64).repeat_interleave(1000) * torch.logspace(-20, 20, 64).repeat_interleave(1000)
    got = rounded(backend, values).cpu()
    bits = values.view(torch.int32)
    below = (bits & -(2**16)).view(torch.float32)
    above = ((bits & -(2**16)) + 2**16).view(torch.float32)
    assert ((got == below) | (got == above)).all()
    share = (got.float() != below).double().view(64, 1000).mean(1)
    wanted = (bits & 0xFFFF).double().view(64, 1000).mean(1) / 2**16
    assert ((share - wanted).abs() < 5 * (wanted * (1 - wanted) / 1000).sqrt() + 1e-3).all()
    assert (share - wanted).mean().abs() < 5 * 0.5 / (64 * 1000) ** 0.5


def test_what_bfloat16_holds_stays(backend):
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), float("nan"), 3.3895e38])
    values = torch.cat(
        [values.bfloat16().float(), torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)]
    )
    for seed in range(20):
        torch.testing.assert_close(rounded(backend, values, seed).float().cpu(), values, rtol=0, atol=0, equal_nan=True)


def test_same_seed_same_numbers_and_no_others(backend):
    values = torch.randn(3 * SPAN + 5)
    first = rounded(backend, values, seed=2**40 + 1, stream=5, step=9)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(rounded(backend, values, seed=2**40 + 1, stream=5, step=9), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(rounded(backend, values, seed=1, stream=5, step=9), first)
    assert not torch.equal(rounded(backend, values, seed=2**40 + 1, stream=6, step=9), first)
    assert not torch.equal(rounded(backend, values, seed=2**40 + 1, stream=5, step=10), first)


def test_numbers_do_not_depend_on_the_grid(kernel_device, monkeypatch):
    def run():
        room = torch.zeros(2 * SPAN + 11, dtype=torch.bfloat16, device=kernel_device)
        updates = [make((n,), BF16, kernel_device, stream=i) for i, n in enumerate((7, 2 * SPAN + 10))]
        unaligned = updates[1]._replace(param=room[1:].copy_(updates[1].param))
        adamw_([updates[0], unaligned] if moved else updates, stochastic_rounding=True)
        return [tensor.clone() for tensor in (unaligned if moved else updates[1])[:4]]

    moved = False
    want = run()
    monkeypatch.setattr(adamw, "BLOCK", 512)
    moved = True
    assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))


def test_parameter_and_moments_draw_apart(backend):
    """Were it the same numbers, the three would round up together."""
    value = torch.full((4096,), 1 + 2.0**-9, device=backend)
    ones = lambda: torch.ones(4096, dtype=torch.bfloat16, device=backend)
    # p = 1 + 2⁻⁹ and m = −1 − 2⁻⁹, a quarter of a bfloat16's step beyond 1; v = 1 + 2⁻⁸, half a step
    update = Update(ones(), value, ones(), ones(), Hyper(2.0**-9, 0.0, 0.0, 0.0, 0.0, True, 1), 0)
    adamw_([update], stochastic_rounding=True)
    up = torch.stack(
        [(t.float().abs() > 1.001).float().cpu() for t in (update.param, update.exp_avg, update.exp_avg_sq)]
    )
    agreement = torch.corrcoef(up)
    assert (agreement - torch.eye(3)).abs().max() < 0.08


def test_second_moment_decays(backend):
    """0.999 · v is v to the nearest bfloat16, for ever."""
    for stochastic in (False, True):
        p, g, m = (torch.zeros(4096, dtype=torch.bfloat16, device=backend) for _ in range(3))
        v = torch.ones_like(p)
        for step in range(1, 21):
            hyper = HYPER._replace(beta2=0.999, step=step)
            adamw_([Update(p, g, m, v, hyper, 0)], stochastic_rounding=stochastic)
        if stochastic:
            assert abs(v.double().mean().item() - 0.999**20) < 1e-3
        elif not truncates(backend):
            assert (v == 1).all()


def test_other_dtypes_round_to_nearest(backend):
    update = make((500,), (torch.float32,) * 3, backend)
    same = copy_of(update)
    adamw_([update], stochastic_rounding=True)
    adamw_([same])
    assert torch.equal(update.param, same.param)


def test_bad_arguments(backend):
    good = make((4,), (torch.float32,) * 3, backend)
    before = copy_of(good)
    for change, error, message in [
        ({"grad": torch.ones(5, device=backend)}, ValueError, r"must have one shape, got \[4\], \[5\], \[4\], \[4\]"),
        ({"grad": torch.ones(4, dtype=torch.int32, device=backend)}, TypeError, "grad must be a floating-point tensor"),
        ({"exp_avg": torch.ones(4, device="meta")}, ValueError, "on one device, got .*meta"),
        (
            {"exp_avg": torch.ones(4, device=backend).half()},
            ValueError,
            "one dtype, got torch.float16 and torch.float32",
        ),
    ]:
        with pytest.raises(error, match=message):
            adamw_([good._replace(**change)])
    assert torch.equal(good.param, before.param)
    with pytest.raises(ValueError, match="stochastic rounding is for bfloat16, got float16"):
        adamw_([make((4,), (torch.float16,) * 3, backend)], stochastic_rounding=True)


def test_parameters_with_gaps_raise(kernel_device):
    good = make((4, 4), (torch.float32,) * 3, kernel_device)
    with pytest.raises(ValueError, match=r"fill its memory without gaps.* got \(8, 2\), \(4, 1\)"):
        adamw_([good._replace(param=torch.ones(4, 8, device=kernel_device)[:, ::2])])
    with pytest.raises(ValueError, match="moments must have the same strides"):
        adamw_([good._replace(exp_avg=torch.ones(4, 4, device=kernel_device).t())])
    wide = [torch.ones(4, 8, device=kernel_device)[:, ::2] for _ in range(4)]
    with pytest.raises(ValueError, match="fill its memory without gaps"):
        adamw_([Update(*wide, HYPER, 0)])


# Moments in 8 bits

CODED_SIZES = [(5, 128), (3, 300), (0, 256), (2, 17, 144), (2 * SPAN // 128 + 3, 256), (9, 131)]


def make_coded(shape, device, dtypes=(torch.float32, torch.float32), hyper=HYPER, stream=0):
    generator = torch.Generator().manual_seed(stream)
    draw = lambda *size: torch.randn(*size, generator=generator)
    p, g = (draw(*shape).to(device, dtype) for dtype in dtypes)
    m = torch.randint(-127, 128, shape, generator=generator).to(device, torch.int8)
    v = torch.randint(0, 256, shape, generator=generator).to(device, torch.uint8)
    scales = (draw(*shape[:-1], -(-shape[-1] // 128)).square().to(device) for _ in range(2))
    return Update(p, g, m, v, hyper, stream, tuple(scales))


def copy_of_coded(update):
    return copy_of(update)._replace(scales=tuple(scale.clone() for scale in update.scales))


def values_of(update, more=0):
    """Both moments in fp64; ``more`` is added to the magnitude of each code."""
    m, v = update.exp_avg.double().cpu(), update.exp_avg_sq.double().cpu()
    scales = (scale.double().cpu().repeat_interleave(128, -1)[..., : m.shape[-1]] for scale in update.scales)
    m_scale, v_scale = scales
    return m.sign() * ((m.abs() + more) / 127) ** 2 * m_scale, ((v + more).clamp(min=0) / 255) ** 4 * v_scale


def assert_rounded_to_codes(before, after):
    """The parameter is as exact as with other moments; the moments are one of the two codes next to the truth."""
    m, v = values_of(before)
    plain = before._replace(exp_avg=m, exp_avg_sq=v, scales=None)
    p, *want = truth(plain)
    *_, step_size, root, eps = before.hyper.factors()
    of_m = m.abs() + before.grad.double().cpu().abs()
    allowed = 4 * torch.finfo(torch.float32).eps
    within = 0.5 * torch.finfo(after.param.dtype).eps * p.abs()
    within += allowed * (p.abs() + step_size * of_m / (want[1].sqrt() / root + eps))
    assert ((after.param.double().cpu() - p).abs() <= within).all()
    below, above, got = values_of(after, -1), values_of(after, 1), values_of(after)
    for moment, exact in enumerate(want):
        scale = after.scales[moment].double().cpu().repeat_interleave(128, -1)[..., : exact.shape[-1]]
        padded = torch.nn.functional.pad(exact.abs(), (0, -exact.shape[-1] % 128))
        largest = padded.unflatten(-1, (after.scales[moment].shape[-1], 128)).amax(-1)
        torch.testing.assert_close(after.scales[moment].double().cpu(), largest, rtol=allowed, atol=allowed)
        same_sign = (got[moment].sign() == exact.sign()) | (got[moment] == 0)
        assert (same_sign | (exact.abs() <= allowed * of_m)).all()
        slack = 4 * allowed * (scale + of_m * (1 - moment))
        assert (exact.abs() >= below[moment].abs() * (got[moment] != 0) - slack).all()
        step = ((1 / 127) ** 2 if moment == 0 else (1 / 255) ** 4) * scale
        assert (exact.abs() <= torch.where(got[moment] == 0, step, above[moment].abs()) + slack).all()
    assert (after.exp_avg_sq.cpu()[want[1] > 0] > 0).all()


@pytest.mark.parametrize("hyper", [HYPER, OTHER], ids=["decay", "maximize"])
def test_codes_match_fp64(backend, hyper):
    """All dtypes and sizes in one call; rows that begin at vectors of 16 elements, and others."""
    dtypes = sorted({kind[:2] for kind in combinations(backend)}, key=str)
    kinds = list(product(dtypes, CODED_SIZES))
    updates = [make_coded(shape, backend, dtype, hyper, stream) for stream, (dtype, shape) in enumerate(kinds)]
    before = [copy_of_coded(update) for update in updates]
    adamw_(updates)
    for old, new in zip(before, updates, strict=True):
        assert torch.equal(old.grad, new.grad), "a gradient was written to"
        assert_rounded_to_codes(old, new)


@pytest.mark.gpu
def test_codes_at_real_sizes():
    for shape, dtype in product([(50_001, 644), (4096, 4096), (2, 700, 2880)], (torch.bfloat16, torch.float32)):
        update = make_coded(shape, "cuda", (dtype, dtype))
        before = copy_of_coded(update)
        adamw_([update])
        assert_rounded_to_codes(before, update)


def test_kernel_and_reference_agree(kernel_device):
    """Over some steps, but for the numbers that round: the moments differ by the noise of their codes."""
    ours, theirs = (make_coded((40, 300), kernel_device) for _ in range(2))
    means, params = [], []
    for update, context in ((ours, nullcontext), (theirs, reference_backend)):
        for step in range(1, 9):
            with context():
                adamw_([update._replace(hyper=HYPER._replace(step=step))])
            if step == 1:
                params.append(update.param.clone())
        means.append(values_of(update))
    for first, second in zip(*means, strict=True):
        assert not torch.equal(first, second)
        assert (first - second).norm() < 0.05 * second.norm()
    torch.testing.assert_close(*params)  # what follows has the noise of the moments


def test_coded_and_other_tensors_together(kernel_device):
    updates = [make_coded((3, n), kernel_device, stream=n) for n in (128, 300, 5000)]
    updates.append(make((7, 3), (torch.float32,) * 3, kernel_device))
    alone = [copy_of_coded(update) if update.scales else copy_of(update) for update in updates]
    adamw_(updates)
    for together, update in zip(updates, alone, strict=True):
        adamw_([update])
        tensors = (*together[:4], *(together.scales or ())), (*update[:4], *(update.scales or ()))
        assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def test_unaligned_codes_and_nothing_beside_them(backend):
    for columns, which in product((256, 200), range(5)):
        update = make_coded((20, columns), backend)
        before = copy_of_coded(update)
        tensor = (*update[:4], update.scales[0])[which]
        room = torch.full((tensor.numel() + 9,), 7, dtype=tensor.dtype, device=backend)
        view = room[3:-6].view(tensor.shape).copy_(tensor)
        update = update._replace(**{Update._fields[which]: view} if which < 4 else {"scales": (view, update.scales[1])})
        adamw_([update])
        assert_rounded_to_codes(before, update)
        assert (room[:3] == 7).all()
        assert (room[-6:] == 7).all()


def test_codes_of_gradients_with_other_strides(backend):
    update = make_coded((140, 256), backend)
    update = update._replace(grad=update.grad.t().contiguous().t())
    before = copy_of_coded(update)
    adamw_([update])
    assert_rounded_to_codes(before, update)


def coded_values(device, values, betas=(0.0, 0.0), count=1, seed=0, step=1):
    """Both moments after steps with gradients that hold ``values``, from moments of zero."""
    zeros = torch.zeros_like(values)
    m, v = (torch.zeros_like(values, dtype=dtype, device=device) for dtype in (torch.int8, torch.uint8))
    scales = tuple(torch.zeros(*values.shape[:-1], -(-values.shape[-1] // 128), device=device) for _ in range(2))
    for number in range(step, step + count):
        hyper = Hyper(0.0, *betas, 1.0, 0.0, False, number)
        update = Update(zeros.to(device), values.to(device), m, v, hyper, 0, scales)
        adamw_([update], seed=seed)
    return update


def test_codes_are_rounded_without_bias(backend):
    """Each row holds its largest element, 1, and many of one value."""
    rows, each = 40, 48
    roots = torch.linspace(0.02, 0.98, each)
    values = roots.square().repeat_interleave(rows)[:, None].repeat(1, 128)
    values[:, ::2] *= -1
    values[:, 0] = 1
    got = values_of(coded_values(backend, values))
    exact = roots.square().double(), roots.double() ** 4
    for value, want, levels, power in zip(got, exact, (127, 255), (2, 4), strict=True):
        assert (value[:, 0] == 1).all()
        mean = value[:, 1:].abs().reshape(each, -1).mean(1)
        low = (want ** (1 / power) * levels).floor()
        spacing = ((low + 1) / levels) ** power - (low / levels) ** power
        error = (mean - want) / spacing * (rows * 127) ** 0.5 / 0.5  # at most so many standard deviations
        assert error.abs().max() < 5
        assert error.mean().abs() * each**0.5 < 5
    assert (got[0][:, 1:].sign() == values[:, 1:].sign()).all()


def test_a_small_second_moment_decays_and_is_not_zero(backend):
    """Rounded to nearest it would stay for ever; the largest of the block, which stays, keeps the scale."""
    values = torch.zeros(40, 128)
    values[:, 0] = 1
    update = coded_values(backend, values)
    update.exp_avg_sq[:, 1:] = 100  # (100 / 255)⁴
    start, steps = (100 / 255) ** 4, 20
    for step in range(1, steps + 1):
        hyper = Hyper(0.0, 0.9, 0.995, 1.0, 0.0, False, step)
        adamw_([update._replace(hyper=hyper)])
    value = values_of(update)[1]
    spacing = (101**4 - 100**4) / 255**4
    deviation = spacing * (steps / 4 / (40 * 127)) ** 0.5
    assert abs(value[:, 1:].mean().item() - start * 0.995**steps) < 5 * deviation < start * (1 - 0.995**steps) / 5
    values[:, 1], values[:, 2:] = 1e-7, 0
    update = coded_values(backend, values)
    assert (update.exp_avg_sq[:, 1] == 1).all()
    assert not update.exp_avg_sq[:, 2:].any()


def test_extreme_values_in_codes(backend):
    values = torch.ones(6, 300)
    values[0, 5], values[1, 150], values[2, 299], values[3] = float("inf"), float("nan"), -float("inf"), 0
    values[4] = 1e-30
    got = [value.reshape(6, -1) for value in values_of(coded_values(backend, values))]
    for value in got:
        for row, block in enumerate((slice(0, 128), slice(128, 256), slice(256, 300))):
            assert not value[row, block].isfinite().any()
            outside = torch.ones(300, dtype=torch.bool)
            outside[block] = False
            assert (value[row, outside] == 1).all()
        assert (value[3] == 0).all()
        assert (value[5] == 1).all()
    torch.testing.assert_close(got[0][4], torch.full((300,), 1e-30, dtype=torch.float64), rtol=1e-6, atol=0)
    assert (got[1][4] == 0).all()  # its square is no number of fp32


def test_codes_depend_on_seed_step_and_place_alone(kernel_device, monkeypatch):
    values = torch.randn(20, 300)
    codes = lambda **options: torch.stack(
        [each.short() for each in coded_values(kernel_device, values, **options)[2:4]]
    )
    first = codes(seed=3, step=2)
    torch.manual_seed(1)
    assert not torch.equal(codes(seed=4, step=2), first)
    assert not torch.equal(codes(seed=3, step=3), first)
    monkeypatch.setattr(adamw, "BLOCK", 512)
    assert torch.equal(codes(seed=3, step=2), first)


def test_encoding_values_that_are_loaded():
    """To nearest, which is within half of the distance of two codes; codes come back as they are."""
    values = torch.randn(7, 300)
    for dtype, exact in ((torch.int8, values), (torch.uint8, values.square())):
        codes, scales = encode(exact, dtype)
        levels, power = (127, 2) if dtype == torch.int8 else (255, 4)
        widest = (1 - (1 - 1 / levels) ** power) / 2
        relative = (decode(codes, scales) - exact).abs() / scales.repeat_interleave(128, -1)[:, :300]
        assert relative.max() < widest
        assert relative.mean() < widest / 4
        again = encode(decode(codes, scales), dtype)
        assert torch.equal(again[0], codes)
        torch.testing.assert_close(again[1], scales)


def test_bad_codes(backend):
    good = make_coded((4, 300), backend)
    before = copy_of_coded(good)
    scales = good.scales
    for change, message in [
        ({"scales": None}, "must be codes in int8 and uint8, got torch.int8 and torch.uint8 without scales"),
        ({"exp_avg_sq": good.exp_avg}, "must be codes in int8 and uint8, got torch.int8 and torch.int8 with scales"),
        ({"exp_avg": good.param}, "got torch.float32 and torch.uint8 with scales. Pass the codes together with scales"),
        ({"scales": (scales[0], scales[1][:, :2])}, r"\[4, 300\] must be \[4, 3\] in float32.*got .*\[4, 2\]"),
        ({"scales": (scales[0].half(), scales[1])}, r"must be \[4, 3\] in float32.*got .*torch.float16"),
        ({"exp_avg": good.exp_avg.t().contiguous().t()}, "parameter, codes and scales contiguous"),
        ({"scales": (scales[0].to("meta"), scales[1])}, "on one device, got .*meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            adamw_([good._replace(**change)])
    assert torch.equal(good.param, before.param)


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    count = 2**31 + SPAN + 3
    p, g, m, v = (torch.zeros(count, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    end = slice(count - 100, None)
    small = make((100,), BF16, "cuda")
    for tensor, values in zip((p, g, m, v), small[:4], strict=True):
        tensor[end] = values
    for stochastic in (False, True):
        adamw_([Update(p, g, m, v, HYPER, 0)], stochastic_rounding=stochastic)
        if not stochastic:
            adamw_([small])
            assert all(torch.equal(a[end], b) for a, b in zip((p, m, v), (small[0], small[2], small[3]), strict=True))
    assert not any(tensor[: count - 100].any() for tensor in (p, m, v))


@pytest.mark.gpu
def test_no_wait_for_the_device():
    updates = [make((n,), BF16, "cuda", stream=n) for n in (1, 5000, 70_000)]
    updates += [make_coded((70, 3000), "cuda")]
    for stochastic in (False, True):
        adamw_(updates, stochastic_rounding=stochastic)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for stochastic in (False, True):
            adamw_(updates, stochastic_rounding=stochastic)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_tables_in_flight_are_not_overwritten():
    """The host runs ahead of a busy device; each launch still reads its own table."""
    updates = [make((3000,), (torch.float32,) * 3, "cuda", HYPER._replace(lr=1e-3 * i), i) for i in range(50)]
    want = [copy_of(update) for update in updates]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for update in updates:
        adamw_([update])
    torch.cuda.synchronize()
    with reference_backend():
        adamw_(want)
    for got, reference in zip(updates, want, strict=True):
        torch.testing.assert_close(got.param, reference.param)


@pytest.mark.gpu
def test_graph_capture_raises():
    update = make((10,), BF16, "cuda")
    other = torch.ones(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        other += 1  # an empty graph would warn
        with pytest.raises(RuntimeError, match="a captured graph would repeat"):
            adamw_([update])
