"""AdamW for many tensors at once, in place. One launch updates all tensors that have the same dtypes and device.

Let g be the gradient, or its negative if the objective is maximized. Let t be the step number, and let m and v be the
moving averages of g and g². The update is computed in fp32::

    m = β₁ · m + (1 − β₁) · g
    v = β₂ · v + (1 − β₂) · g²
    p = p − lr · λ · p
    p = p − lr / (1 − β₁ᵗ) · m / (sqrt(v) / sqrt(1 − β₂ᵗ) + eps)

p is computed from the unrounded m and v. Then p, m and v are rounded to the dtypes of their tensors, either to nearest
or stochastically. Stochastic rounding of x to bfloat16 adds a random integer r, uniform in [0, 2¹⁶), to the 32 bits of
x, and keeps the upper 16 bits of the sum. The expected value of the rounded x is therefore x. Moments need stochastic
rounding, too: if 0.999 · v were rounded to nearest, the result would be v again. The random integer r is Philox(seed;
element, tensor, step), so it depends neither on the grid of the launch nor on PyTorch's global generators. 8-bit
moments consist of codes and scales, which `moments` describes. 8-bit moments are always rounded stochastically.

The kernel finds the tensors in a table with one row per tensor. The table is copied to the device with every launch,
because gradients have new addresses in every step. The host never waits for the device. `adamw_` is not registered with
`torch.library`, because it writes to its arguments. It need not be registered, because optimizers run outside compiled
graphs.

Source: https://arxiv.org/abs/1711.05101 (AdamW), https://doi.org/10.1145/2063384.2063405 (Philox, used with 7 rounds).
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.optimizer.moments import WIDTH, decode, decoded, encode, encoded, scale_shape

BLOCK = 1024
NUM_WARPS = 4
"""Number of elements per block, and number of warps per program. A thread loads one 16-byte vector of each bfloat16
tensor at a time."""

BLOCKS = 2
"""Number of blocks that a program processes one after the other. The program searches only once for the tensor that
contains these blocks. On an H200, the kernel reaches 0.93 of the copy bandwidth, or 0.91 with stochastic rounding. With
one block per program, the kernel would reach 0.84."""


class Hyper(NamedTuple):
    """Hyperparameters of one tensor in one step. The first ``step`` is 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    step: int

    def factors(self) -> tuple[float, ...]:
        """Compute the coefficients of the update's formulas, in fp64.

        With ``maximize``, only the formula of m changes, because v does not depend on the sign of the gradient.
        """
        return (
            self.beta1,
            (self.beta1 - 1 if self.maximize else 1 - self.beta1),
            self.beta2,
            1 - self.beta2,
            self.lr * self.weight_decay,
            self.lr / (1 - self.beta1**self.step),
            (1 - self.beta2**self.step) ** 0.5,
            self.eps,
        )


class Update(NamedTuple):
    """The update of one parameter.

    Attributes:
        param, grad, exp_avg, exp_avg_sq: the parameter, its gradient and its moments, which all have the same shape.
        hyper: the hyperparameters.
        stream: a number that gives each tensor its own random numbers in stochastic rounding.
        scales: [*shape[:-1], ceil(shape[-1] / 128)] fp32 each, the scales of both moments if the moments are 8-bit
            codes; None otherwise.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    hyper: Hyper
    stream: int
    scales: tuple[Tensor, Tensor] | None = None


def adamw_reference(update: Update, stochastic_rounding: bool = False, seed: int = 0) -> None:
    """Perform `adamw_` for one parameter in plain PyTorch, in fp64 for fp64 tensors.

    If values are rounded stochastically, this function uses different random numbers than the kernel.
    """
    param, grad, exp_avg, exp_avg_sq, hyper, stream, scales = update
    beta1, grad_to_m, beta2, grad_to_v, decay, step_size, root, eps = hyper.factors()
    wide = torch.promote_types(param.dtype, torch.float32)
    g, m, v = grad.to(wide), exp_avg.to(wide), exp_avg_sq.to(wide)
    # 8-bit moments are codes with one scale per block.
    if scales is not None:
        m, v = (decode(codes, scale.to(wide)) for codes, scale in zip((exp_avg, exp_avg_sq), scales, strict=True))
    m = m.mul(beta1).add(g, alpha=grad_to_m)
    v = v.mul(beta2).addcmul(g, g, value=grad_to_v)
    p = param.to(wide)
    p = p.sub(p, alpha=decay).addcdiv(m, v.sqrt().div_(root).add_(eps), value=-step_size)
    # Write the results. Codes are always rounded stochastically. Other tensors are rounded stochastically only on
    # request.
    generator = torch.Generator(param.device).manual_seed(hash((seed, hyper.step, stream)) & (2**63 - 1))
    rounded = [(param, p), (exp_avg, m), (exp_avg_sq, v)]
    if scales is not None:
        for (tensor, new), scale in zip(rounded[1:], scales, strict=True):
            codes, largest = encode(new, tensor.dtype, generator)
            tensor.copy_(codes)
            scale.copy_(largest)
        rounded = rounded[:1]
    for tensor, new in rounded:
        write_rounded(tensor, new, generator if stochastic_rounding else None)


def write_rounded(tensor: Tensor, new: Tensor, generator: torch.Generator | None) -> None:
    """Write values to a tensor, rounded to the tensor's dtype.

    Values are rounded to nearest or, with a generator and a bfloat16 tensor, stochastically.
    """
    if generator is not None and tensor.dtype == torch.bfloat16:
        new = new.float()
        bits = new.view(torch.int32)
        bits = bits + torch.randint(2**16, bits.shape, dtype=bits.dtype, device=bits.device, generator=generator)
        new = torch.where(new.isnan(), new, (bits & -(2**16)).view(torch.float32))
    tensor.copy_(new)


@triton.jit
def _tensor_at(address_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a tensor's address from the table entry at ``address_ptr``, and return it as a pointer to DTYPE."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _draw(start, seed, stream, step, BLOCK: tl.constexpr):
    """Return one random integer from 0 to 65535 for each of the BLOCK elements from index ``start`` on."""
    # One call generates 16 bits for each of 8 adjacent elements, which belong to one thread.
    eight = start // 8 + tl.arange(0, BLOCK // 8)
    low, high = eight.to(tl.uint32), (eight >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, stream.to(tl.uint32), step.to(tl.uint32), 7)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return tl.interleave(words & 0xFFFF, words >> 16)


@triton.jit
def _round(x, start, seed, stream, step, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    """Round BLOCK elements to DTYPE: stochastically with STOCHASTIC and bfloat16, otherwise to nearest."""
    if STOCHASTIC and DTYPE.is_bf16():
        draw = tl.reshape(_draw(start, seed, stream, step, BLOCK), x.shape)
        bits = x.to(tl.uint32, bitcast=True) + draw
        # NaN is not rounded, because the addition could carry into its sign bit.
        x = tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def _step(p, g, m, v, factors):
    """Return the parameter and both moments after one step of AdamW, in fp32."""
    m = tl.load(factors) * m + tl.load(factors + 1) * g
    v = tl.load(factors + 2) * v + tl.load(factors + 3) * g * g
    p -= tl.load(factors + 4) * p
    p -= tl.load(factors + 5) * m / (tl.sqrt(v) / tl.load(factors + 6) + tl.load(factors + 7))
    return p, m, v


@triton.jit
def _update(
    row, factors, start, remaining, seed,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update up to BLOCK elements of a tensor.

    ``start`` is the index of the first of these elements. ``remaining`` is the number of elements from this index to
    the end of the tensor.
    """
    at = start + tl.arange(0, BLOCK)
    p_ptr = _tensor_at(row + 4, P_DTYPE, ALIGNED) + at
    g_ptr = _tensor_at(row + 5, G_DTYPE, ALIGNED) + at
    m_ptr = _tensor_at(row + 6, STATE_DTYPE, ALIGNED) + at
    v_ptr = _tensor_at(row + 7, STATE_DTYPE, ALIGNED) + at
    inside = tl.arange(0, BLOCK) < remaining

    # These loads bypass the L1 cache, so that the table stays in the L1 cache.
    g = tl.load(g_ptr, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    m = tl.load(m_ptr, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    v = tl.load(v_ptr, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    p = tl.load(p_ptr, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    p, m, v = _step(p, g, m, v, factors)
    stream = 3 * tl.load(row + 2)
    step = tl.load(row + 3)
    tl.store(p_ptr, _round(p, start, seed, stream, step, P_DTYPE, STOCHASTIC, BLOCK), mask=inside)
    tl.store(m_ptr, _round(m, start, seed, stream + 1, step, STATE_DTYPE, STOCHASTIC, BLOCK), mask=inside)
    tl.store(v_ptr, _round(v, start, seed, stream + 2, step, STATE_DTYPE, STOCHASTIC, BLOCK), mask=inside)


@triton.jit
def _update_codes(
    row, factors, start, remaining, seed,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update up to BLOCK elements of a tensor whose moments are 8-bit codes; see `_update`.

    Elements are numbered as if each row were padded to whole blocks of 128 elements.
    """
    # Compute the rows and columns of R blocks of 128 elements, [R, 128].
    R: tl.constexpr = BLOCK // 128
    columns = tl.load(row + 10).to(tl.int32)
    if ALIGNED:
        columns = columns // 16 * 16  # a no-op that lets the compiler infer that rows are aligned for vector loads
    row_blocks = (columns + 127) // 128
    block = (start // 128).to(tl.int32) + tl.arange(0, R)
    line = block // row_blocks
    column = ((block - line * row_blocks) * 128)[:, None] + tl.arange(0, 128)[None, :]
    exists = tl.arange(0, R) * 128 < remaining
    inside = exists[:, None] & (column < columns)
    at = line.to(tl.int64)[:, None] * columns + column

    p_ptr = _tensor_at(row + 4, P_DTYPE, ALIGNED) + at
    m_ptr = _tensor_at(row + 6, tl.int8, ALIGNED) + at
    v_ptr = _tensor_at(row + 7, tl.uint8, ALIGNED) + at
    m_scale_ptr = _tensor_at(row + 8, tl.float32, ALIGNED) + block
    v_scale_ptr = _tensor_at(row + 9, tl.float32, ALIGNED) + block
    g = tl.load(_tensor_at(row + 5, G_DTYPE, ALIGNED) + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    m = decoded(
        tl.load(m_ptr, mask=inside, other=0, cache_modifier=".cg"), tl.load(m_scale_ptr, mask=exists, other=0.0), 127
    )
    v = decoded(
        tl.load(v_ptr, mask=inside, other=0, cache_modifier=".cg"), tl.load(v_scale_ptr, mask=exists, other=0.0), 255
    )
    p = tl.load(p_ptr, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    p, m, v = _step(p, g, m, v, factors)
    stream = 3 * tl.load(row + 2)
    step = tl.load(row + 3)
    tl.store(p_ptr, _round(p, start, seed, stream, step, P_DTYPE, STOCHASTIC, BLOCK), mask=inside)
    m_codes, m_scale = encoded(m, tl.reshape(_draw(start, seed, stream + 1, step, BLOCK), (R, 128)), 127)
    v_codes, v_scale = encoded(v, tl.reshape(_draw(start, seed, stream + 2, step, BLOCK), (R, 128)), 255)
    tl.store(m_ptr, m_codes.to(tl.int8), mask=inside)
    tl.store(v_ptr, v_codes.to(tl.uint8), mask=inside)
    tl.store(m_scale_ptr, m_scale, mask=exists)
    tl.store(v_scale_ptr, v_scale, mask=exists)


@triton.jit(do_not_specialize=["rows", "seed"])
def _adamw_kernel(
    table, factors, rows, seed,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Update BLOCKS blocks of one tensor.

    The table has a row of 12 integers and 8 floats for each tensor. The floats are `Hyper.factors`. The integers are::

        0 to 3     index of the tensor's first program, number of elements, stream, and step
        4 to 7     addresses of the parameter, the gradient and both moments
        8 to 10    for 8-bit moments, addresses of both scales, and number of columns
        11         unused
    """
    # Programs are numbered across all tensors. Search for the last tensor whose first program is this program or an
    # earlier one.
    SPAN: tl.constexpr = BLOCK * BLOCKS
    program = tl.program_id(0)
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(table + middle * 16) <= program:
            low = middle
        else:
            high = middle

    row = table + low * 16  # 12 integers of 64 bits, then 8 floats in the space of 4 integers
    factors += low * 32 + 24
    start = (program - tl.load(row)) * SPAN
    end = tl.minimum(start + SPAN, tl.load(row + 1))

    # Tensors are loaded in vectors if their addresses are multiples of 16.
    addresses = tl.load(row + 4) | tl.load(row + 5) | tl.load(row + 6) | tl.load(row + 7)
    if STATE_DTYPE.is_int8():
        aligned = ((addresses | tl.load(row + 8) | tl.load(row + 9) | tl.load(row + 10)) % 16) == 0
        while start < end:
            if aligned:
                _update_codes(row, factors, start, end - start, seed, P_DTYPE, G_DTYPE, STOCHASTIC, True, BLOCK)
            else:
                _update_codes(row, factors, start, end - start, seed, P_DTYPE, G_DTYPE, STOCHASTIC, False, BLOCK)
            start += BLOCK
    elif (addresses % 16 == 0) & (start + SPAN == end):
        for _ in range(BLOCKS):
            _update(row, factors, start, BLOCK, seed, P_DTYPE, G_DTYPE, STATE_DTYPE, STOCHASTIC, True, BLOCK)
            start += BLOCK
    else:
        while start < end:
            _update(row, factors, start, end - start, seed, P_DTYPE, G_DTYPE, STATE_DTYPE, STOCHASTIC, False, BLOCK)
            start += BLOCK


def _in_layout_of(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Return the gradient in the memory layout of the parameter.

    Raises:
        ValueError: the parameter has gaps in memory, or the moments have another layout.
    """
    if not (param.is_contiguous() and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous()):
        span = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
        if not (span == param.numel() and param.stride() == exp_avg.stride() == exp_avg_sq.stride()):
            raise ValueError(
                "adamw: a parameter must fill its memory without gaps, and its moments must have the same strides; got "
                f"{param.stride()}, {exp_avg.stride()} and {exp_avg_sq.stride()} for {list(param.shape)}. Make them "
                "contiguous."
            )
    elif grad.is_contiguous():
        return grad
    return grad if grad.stride() == param.stride() else torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def _check_codes(update: Update) -> None:
    """Raise ValueError unless 8-bit moments have scales of the right shape, and other moments have no scales."""
    param, _, *moments, _, _, scales = update
    dtypes = [moment.dtype for moment in moments]
    codes = {torch.int8, torch.uint8} & {*dtypes}
    if not (not codes if scales is None else dtypes == [torch.int8, torch.uint8]):
        raise ValueError(
            f"adamw: moments with scales, and no others, must be codes in int8 and uint8, got {dtypes[0]} and "
            f"{dtypes[1]} {'without' if scales is None else 'with'} scales. Pass the codes together with scales."
        )
    if scales is not None:
        shape = scale_shape(param.shape) if param.dim() else "none for a scalar"
        if not all(list(scale.shape) == shape and scale.dtype == torch.float32 for scale in scales) or not all(
            tensor.is_contiguous() for tensor in (param, *moments, *scales)
        ):
            raise ValueError(
                f"adamw: scales of a parameter {list(param.shape)} must be {shape} in float32, and parameter, codes "
                f"and scales contiguous, got {' and '.join(f'{list(x.shape)} in {x.dtype}' for x in scales)}."
            )


def _launch(updates: Sequence[Update], stochastic_rounding: bool, seed: int) -> None:
    first = updates[0].param
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("adamw: a captured graph would repeat one step number. Capture without the optimizer.")
    grads = [_in_layout_of(*update[:4]) for update in updates]  # this list keeps copies alive until the launch
    factors = {hyper: hyper.factors() for hyper in {update.hyper for update in updates}}

    # Fill the rows of the table, which `_adamw_kernel` describes.
    programs = 0
    integers, floats = array("q"), array("f")  # torch reads arrays without a loop over their numbers, unlike lists
    for (param, _, exp_avg, exp_avg_sq, hyper, stream, scales), grad in zip(updates, grads, strict=True):
        count, code_entries = param.numel(), (0, 0, 0)
        if scales is not None:
            count = WIDTH * scales[0].numel()
            code_entries = (scales[0].data_ptr(), scales[1].data_ptr(), param.shape[-1])
        addresses = param.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr()
        integers.extend((programs, count, stream, hyper.step, *addresses, *code_entries, 0))
        floats.extend(factors[hyper])
        programs += -(-count // (BLOCK * BLOCKS))
    if not programs:
        return

    # PyTorch's allocator reuses the pinned memory only after the copy has finished.
    table = torch.empty(len(updates), 16, dtype=torch.int64, pin_memory=first.device.type != "cpu", device="cpu")
    table[:, :12] = torch.frombuffer(integers, dtype=torch.int64).view(-1, 12)
    table[:, 12:].view(torch.float32).copy_(torch.frombuffer(floats, dtype=torch.float32).view(-1, 8))
    table = table.to(first.device, non_blocking=True)
    p_dtype, g_dtype, state_dtype = (getattr(tl, str(tensor.dtype).removeprefix("torch.")) for tensor in updates[0][:3])
    with on_device_of(first):
        _adamw_kernel[(programs,)](
            table, table.view(torch.float32), len(updates), seed,
            P_DTYPE=p_dtype, G_DTYPE=g_dtype, STATE_DTYPE=state_dtype,
            STOCHASTIC=stochastic_rounding, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=NUM_WARPS,
        )  # fmt: skip

    # Increment the version counters, as PyTorch's in-place operations do, so that autograd detects overwritten tensors.
    written = [tensor for u in updates for tensor in (u.param, u.exp_avg, u.exp_avg_sq, *(u.scales or ()))]
    torch.autograd.graph.increment_version(written)


@torch.no_grad()
def adamw_(updates: Sequence[Update], *, stochastic_rounding: bool = False, seed: int = 0) -> None:
    """Perform one AdamW step for every tensor, in place.

    Args:
        updates: one update per parameter. A parameter may have any shape, and its memory must have no gaps. Its
            gradient may have any strides, and its moments must have the strides of the parameter. All tensors are
            float32, float16 or bfloat16, and both moments have the same dtype. With scales, the moments are int8 and
            uint8 codes, and all tensors except the gradient must be contiguous.
        stochastic_rounding: whether to round bfloat16 parameters and moments stochastically instead of to nearest.
        seed: seed of the stochastic rounding. The same seed, step and stream give the same random numbers.

    Raises:
        ValueError: shapes, devices or layouts do not match, or stochastic rounding to float16 is requested.
        TypeError: a tensor is not floating-point.
        RuntimeError: a CUDA graph is being captured.
    """
    # Tensors with the same dtypes and devices share a launch.
    groups: dict[tuple[object, ...], list[Update]] = {}
    for update in updates:
        p, g, m, v, _, _, scales = update
        if not p.shape == g.shape == m.shape == v.shape:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in update[:4])
            raise ValueError(f"adamw: parameter, gradient and moments must have one shape, got {shapes}.")
        _check_codes(update)
        tensors = (p, g, m, v, *(scales or ()))
        key = (*(tensor.dtype for tensor in tensors), *(tensor.device for tensor in tensors))
        groups.setdefault(key, []).append(update)

    for group in groups.values():
        param, grad, exp_avg, exp_avg_sq, _, _, scales = group[0]
        # For 8-bit moments, check the scales. The dtypes of the codes were checked above.
        m, v = (exp_avg, exp_avg_sq) if scales is None else scales
        check_floating("adamw", param=param, grad=grad, exp_avg=m, exp_avg_sq=v)
        devices = [str(tensor.device) for tensor in (*group[0][:4], *(scales or ()))]
        if len(set(devices)) != 1:
            raise ValueError(f"adamw: the tensors must be on one device, got {', '.join(devices)}.")
        if m.dtype != v.dtype:
            raise ValueError(f"adamw: both moments must have one dtype, got {m.dtype} and {v.dtype}.")
        if stochastic_rounding and torch.float16 in (param.dtype, m.dtype):
            raise ValueError(
                "adamw: stochastic rounding is for bfloat16, got float16. Use bfloat16, or stochastic_rounding=False."
            )
        if use_triton(param) and use_triton(grad) and use_triton(m):
            _launch(group, stochastic_rounding, seed)
        else:
            for update in group:
                adamw_reference(update, stochastic_rounding, seed)
