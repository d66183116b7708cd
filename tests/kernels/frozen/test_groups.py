"""Four-bit codes in groups that share a scale: the kernels against plain torch, and their products against fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_models.kernels.activation.gated_act import gated_act_reference
from liger_models.kernels.frozen import groups
from liger_models.kernels.frozen.groups import MOST_ROWS, check_width
from liger_models.kernels.frozen.products import quantized_linear
from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight
from liger_models.kernels.matmul.batch_invariance import batch_invariant

FOUR_BITS = {"mxfp4": [32], "nvfp4": [16, 0], "nvfp4 over": [16, 1], "int4": [32], "bnb_nf4": [64, 0]}
KINDS = pytest.mark.parametrize("kind", FOUR_BITS)


def draw(*size, device="cpu", dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def make(kind, shape, device="cpu", dtype=torch.float32, layout=None, exponents=(-6, 1)):
    """Codes of all kinds and scales, which are powers of 2 on the CPU: the interpreter truncates to bfloat16."""
    layout, generator = layout or FOUR_BITS[kind], torch.Generator().manual_seed(sum(shape))
    *rows, columns = shape
    codes = torch.randint(256, (*rows, columns // 2), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(*exponents, (*rows, columns // layout[0]), generator=generator)
    scales = exponents.float().exp2()
    if device == "cuda" and kind != "mxfp4":
        scales *= 1 + torch.rand(scales.shape, generator=generator)
    match kind.split()[0]:
        case "mxfp4":
            tensors = [codes, (exponents + 127).to(torch.uint8)]
        case "nvfp4":
            whole = 2.0 ** torch.randint(-2, 2, (*rows, 1), generator=generator)
            tensors = [codes, scales.to(torch.float8_e4m3fn), whole]
        case "int4":
            tensors = [codes, scales.bfloat16()]
        case "bnb_nf4":
            tensors = [codes, scales]
    return FrozenWeight(
        FORMATS[kind.split()[0]], tuple(each.to(device) for each in tensors), torch.Size(shape), layout, dtype
    )


def in_double(weight):
    """The numbers in fp64 that codes and scales stand for, without any rounding."""
    table = torch.tensor(groups.NUMBERS[weight.format.codes_kind], dtype=torch.float64, device=weight.device)
    codes, scales = weight.codes.int(), weight.scales
    numbers = table[torch.stack([codes & 15, codes >> 4], -1)].flatten(-2)
    scales = torch.exp2(scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
    if len(weight.tensors) == 3:
        whole = weight.tensors[2].double()
        scales = scales / whole if weight.layout[1] else scales * whole
    return numbers * scales.repeat_interleave(weight.layout[0], -1)


@KINDS
@pytest.mark.parametrize("shape", [(5, 64), (48, 192), (3, 7, 128)], ids=str)
def test_dense_is_the_reference(kernel_device, shape, kind, poisoned_empty):
    """Bit for bit, in each dtype. On the CPU, NF4 has numbers that the interpreter would truncate."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight = make(kind, shape, kernel_device, dtype)
        want, exact = weight.format.reference(weight), in_double(weight)
        assert want.shape == weight.shape
        assert ((want.double() - exact).abs() <= exact.abs() * 2**-8).all()
        if kind == "bnb_nf4" and kernel_device == "cpu":
            assert ((weight.dense().double() - exact).abs() <= exact.abs() * 2**-7).all()
        else:
            assert torch.equal(weight.dense(), want)


@pytest.mark.parametrize("width", [2, 24, 48, 96, 512])
def test_groups_of_any_even_width(kernel_device, width):
    weight = make("int4", (3, 2 * width), kernel_device, layout=[width])
    assert torch.equal(weight.dense(), weight.format.reference(weight))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_codes_anywhere_and_of_large_weights(kernel_device, kind, monkeypatch):
    """Codes that begin at any address are read in smaller pieces, and indices of large weights have 64 bits."""
    weight, in_pieces = make(kind, (5, 192), kernel_device), groups.in_pieces
    want, sizes = weight.format.reference(weight), []
    for large in (False, True):

        def launched(*given, large=large):
            pieces, constants = in_pieces(*given)
            return pieces, constants | {"LARGE": large}

        monkeypatch.setattr(groups, "in_pieces", launched)
        for offset in range(4):
            memory = torch.empty(weight.codes.numel() + 16, dtype=torch.uint8, device=kernel_device)
            codes = memory[offset : offset + weight.codes.numel()].view_as(weight.codes).copy_(weight.codes)
            sizes.append(in_pieces(codes, 8)[1]["NUMBERS"])
            assert torch.equal(weight._replace(tensors=(codes, *weight.tensors[1:])).dense(), want)
    assert sizes == 2 * [8, 2, 4, 2]


def test_all_scales_of_a_byte(kernel_device):
    """Exponents of 2 from the least to the largest, and every number of e4m3; both are exact."""
    codes = torch.full((256, 16), 0x21, dtype=torch.uint8, device=kernel_device)
    every = torch.arange(256, device=kernel_device, dtype=torch.uint8)[:, None]
    weight = FrozenWeight(FORMATS["mxfp4"], (codes, every), torch.Size([256, 32]), [32], torch.float32)
    first = 0 if kernel_device == "cuda" else 2  # the interpreter makes subnormal numbers of bfloat16 zero
    assert torch.equal(weight.dense()[first:], weight.format.reference(weight)[first:])
    assert weight.format.reference(weight)[0, 1] == 2.0**-127
    finite = every[(every & 0x7F) != 0x7F][:, None]
    tensors = codes[: len(finite), :8].contiguous(), finite.view(torch.float8_e4m3fn), torch.ones_like(finite).float()
    weight = FrozenWeight(FORMATS["nvfp4"], tensors, torch.Size([len(finite), 16]), [16, 0], torch.float32)
    assert torch.equal(weight.dense()[:, 1:2], finite.view(torch.float8_e4m3fn).float())


@pytest.mark.cases(9)
@pytest.mark.parametrize("act", ["", "silu"])
@pytest.mark.parametrize("shape", [(6, 64), (20, 832)], ids=str)
@KINDS
def test_few_rows_match_fp64(kernel_device, shape, kind, act, poisoned_empty):
    """W is rounded to bfloat16 as documented: what is left is the sum in fp32 and one rounding of the result."""
    for rows in (1, 2, 9, MOST_ROWS):
        for dtype in [*([torch.float32] if rows == 1 else []), torch.float16]:
            weight = make(kind, shape, kernel_device, dtype)
            dense, limits = weight.dense().double(), torch.finfo(dtype)
            x, bias = ((draw(*size, device=kernel_device) / 64).to(dtype) for size in ((rows, 1, shape[1]), shape[:1]))
            for b in (None, bias):
                want, terms = (
                    F.linear(f(x.double()), f(dense), None if b is None else f(b.double()))
                    for f in (torch.Tensor.clone, torch.abs)
                )
                found = weight.format.few_rows(weight, x, b, act)
                assert found is not None
                y, product = found
                assert y.shape == (rows, 1, shape[0])
                assert ((y.double() - want).abs() <= limits.eps / 2 * want.abs() + 2e-6 * terms + limits.tiny).all()
                if act:
                    torch.testing.assert_close(product, gated_act_reference(y, act), rtol=2 * limits.eps, atol=1e-6)


@KINDS
def test_forward_and_backward_match_fp64(kernel_device, kind):
    """Many rows, in fp32: the input's gradient, and the bias's; the weight has none."""
    weight = make(kind, (24, 128), kernel_device)
    x, dy = draw(40, 128, device=kernel_device).requires_grad_(), draw(48, 40, device=kernel_device).t()[:, ::2]
    bias = draw(24, device=kernel_device).requires_grad_()
    dense = weight.dense().double()
    y = quantized_linear(x, weight, bias)
    y.backward(dy)
    for got, left, right, added in ((y, x, dense.T, bias), (x.grad, dy, dense, bias.new_zeros(1))):
        want, terms = (f(left.double()) @ f(right) + f(added.double()) for f in (torch.Tensor.clone, torch.abs))
        assert ((got.double() - want).abs() <= 5e-7 * terms).all()
    torch.testing.assert_close(bias.grad.double(), dy.double().sum(0), rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_taken(kernel_device):
    """Where bits must not depend on the batch, many rows, several in fp32, and groups of another width."""
    x = draw(2, 96, device=kernel_device, dtype=torch.float16)
    takes = lambda weight, x: weight.format.few_rows(weight, x, None) is not None
    weight = make("mxfp4", (8, 96), kernel_device)
    assert takes(weight, x)
    assert not takes(weight, x.float())
    assert not takes(weight, draw(MOST_ROWS + 1, 96, device=kernel_device, dtype=torch.float16))
    assert not takes(make("int4", (8, 96), kernel_device, layout=[48]), x)
    with batch_invariant():
        assert not takes(weight, x)


@KINDS
def test_slices_are_slices_of_the_weight(kind):
    """As tensor parallelism divides it: rows anywhere, columns between groups."""
    weight = make(kind, (6, 256))
    for dim in (0, 1):
        tensors, layout, dims = weight.format.slices(
            weight.format.pack(weight), weight.shape, list(weight.layout), dim, 2
        )
        assert weight.format.block(layout, rows=dim == 0) == (1 if dim == 0 else layout[0])
        for rank, want in enumerate(weight.format.reference(weight).chunk(2, dim)):
            part = {n: t.chunk(2, dims[n])[rank].contiguous() if n in dims else t for n, t in tensors.items()}
            found = FrozenWeight(weight.format, tuple(part.values()), want.shape, layout, weight.dtype)
            assert torch.equal(found.format.reference(found), want)


def test_columns_without_a_scale_are_refused():
    for columns, width in ((100, 32), (30, 15), (0, 32)):
        with pytest.raises(ValueError, match=f"x: columns must be a multiple .* got {columns} and {width}"):
            check_width("x", columns, width)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shape", [(100, 1088), (36, 4096), (16, 14336)], ids=str)
def test_few_rows_have_the_weights_of_many(kind, shape):
    """Bit for bit, on the matrix units, with scales that are no powers of 2: rows of the identity show each column."""
    weight, eye = make(kind, shape, "cuda", torch.bfloat16), torch.eye(shape[1], device="cuda", dtype=torch.bfloat16)
    for rows in (1, 2, 9, 16):
        for first in (0, 15, 16, 63, 255, 512, shape[1] // 2 + 1, shape[1] - rows):
            y, _ = weight.format.few_rows(weight, eye[first : first + rows], None)
            assert torch.equal(y, weight.dense()[:, first : first + rows].T)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)], ids=str)
def test_real_sizes(kind, shape):
    weight = make(kind, shape, "cuda", torch.bfloat16)
    dense = weight.format.reference(weight)
    assert torch.equal(weight.dense(), dense)
    for rows in (1, 2, 8, 16, 32, 100):
        x = draw(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        want = x.double() @ dense.double().T
        assert (quantized_linear(x, weight).double() - want).norm() <= 2e-3 * want.norm()


def test_a_fake_table_is_not_kept():
    """`warm_up` runs a model on tensors without values before its first step."""
    name, device, dtype = "e2m1", torch.device("cpu"), torch.float64  # which no other test asks for
    with FakeTensorMode():
        groups.table_of(name, device, dtype)
    table = groups.table_of(name, device, dtype)
    assert table.tolist() == list(groups.NUMBERS[name])
    assert groups.table_of(name, device, dtype) is table
