"""The MLPs of a mixture of experts, computed as grouped matrix products over tokens that are sorted by expert.

The N · K copies of the tokens are sorted as in `permutation`: copy k of token n is row j = slot[n, k], and e is the
expert of this copy. A is one of the activations of `expert_act`. If the activation A has no gate, u_j holds only up.
Without biases, bgu = bd = 0. The forward is::

    r_j = x_n                             permute
    u_j = Wgu_e · r_j                     grouped product; gate and up interleaved
    o_j = Wd_e · A(u_j + bgu_e)           grouped product
    y_n = Σ_k w_nk · (o_slot[n,k] + bd_e) unpermute

If there are only a few copies and no backward, the copies are not sorted (see `few`). A copy without an expert has no
row.

In the backward, multiplying by the routing weight w_nk before or after a linear map gives the same result. The
multiplication is cheapest where rows are narrow. dy is therefore copied without the weight. A later kernel, which reads
u and g, multiplies by the weight and does all other elementwise work. The backward is::

    d_j = dy_n                            permute
    g_j = Wd_eᵀ · d_j                     grouped product; the gradient of A(u_j), without the routing weight
    dw_nk = g_j · A(u_j) + dy_n · bd_e    equals dy_n · (o_j + bd_e), but does not need o_j
    du_j = w_nk · A'(u_j)(g_j),   p_j = w_nk · A(u_j)     p overwrites g
    dWd_e = Σ_j d_j ⊗ p_j,   dWgu_e = Σ_j du_j ⊗ r_j      grouped outer products
    dbd_e = Σ_nk w_nk · dy_n,   dbgu_e = Σ_j du_j         over the copies that go to e
    dx_n = Σ_k Wgu_eᵀ · du_slot[n,k]      grouped product, then unpermute without weights

A low-rank term B_e · A_e may be added to each matrix W_e. (A_e is a matrix, not the activation.) The sum W_e + B_e ·
A_e is never computed: A_e and B_e have grouped products of their own. The backward recomputes A_e · r_j and A_e · p_j,
and the gradients of A_e and B_e are::

    dB_e = Σ_j du_j ⊗ (A_e · r_j),   dA_e = Σ_j (B_eᵀ · du_j) ⊗ r_j     gate and up
    dB_e = Σ_j d_j ⊗ (A_e · p_j),    dA_e = Σ_j (B_eᵀ · d_j) ⊗ p_j      down

Dropout may be applied to r_j and A(u_j), the inputs of the low-rank terms. The forward saves only the seed of the
dropout, from which the backward generates the same random numbers.

Frozen matrices may be quantized (`FrozenWeight`). With few rows per expert, the forward reads the quantized matrices
directly (see `few`). Otherwise, the matrices of a projection are dequantized right before each product, and the dense
matrices are freed after the product. If the backward recomputes u, it dequantizes the matrices of gate and up only
once, and uses them for both u and dx.

The forward saves order, slot, ends, the routing weights, the experts' parameters (quantized matrices in quantized
form), and u before the bias is added. x is saved only for the gradients of the gate and up matrices, or to recompute u.
With ``recompute``, u is not saved. The backward then recomputes u, bitwise identical to the u of the forward, and
overwrites u with du. If there are many tokens, the forward and the backward then process them in chunks, so that the
sorted rows exist only for one chunk at a time. Each chunk is sorted separately, and the gradients of the parameters are
summed over the chunks in fp32. Because these sums need memory, too, chunks are larger if the experts are trained.

The sorted copies of x and the gated product are never saved. Gradients that are not needed are not computed. Every
other gradient has the dtype of its input. The backward is a single op, so that compilers do not see that tensors are
recomputed. A compiler that saw the recomputation would save the tensors in the forward instead.

Source: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2211.15841, https://arxiv.org/abs/2512.14080 (gradient
of the routing weights without the experts' outputs).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import Argument, Op
from liger_models.kernels.activation.gated_act import ACTIVATIONS, _load_pairs, gated_act_forward
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.frozen.products import WEIGHT, dense
from liger_models.kernels.linear.gated_mlp import WORKSPACE_MIB
from liger_models.kernels.linear.projection import LOW_RANK, ProjectionGradients, ProjectionNeeds
from liger_models.kernels.matmul.row_linear import LowRank
from liger_models.kernels.moe.dropout import draw_seed, drop
from liger_models.kernels.moe.expert_act import _expert_act, check_expert_act, expert_act_reference, inputs_of
from liger_models.kernels.moe.few import few_experts, few_product, takes_few, takes_few_copies
from liger_models.kernels.moe.grouped_mm import grouped_mm, grouped_outer, grouped_sum, library_runs
from liger_models.kernels.moe.permutation import MAX_COPIES, MAX_EXPERTS, permute, sort_by_expert, unpermute
from liger_models.kernels.tiles import cdiv, next_power_of_2

ACT_BLOCK = 1024
"""Number of (gate, up) pairs that the activation's kernels process per step. A program loops over a whole row, because
the gradient of the routing weight is a sum over the row."""

MIN_ROWS = 512
"""Lower bound of the maximum number of rows per chunk and expert, regardless of `WORKSPACE_MIB`, which limits the size
of u in a chunk. Each chunk reads all matrices of the experts."""


def moe_mlp_reference(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
    *,
    act: str = "silu",
    limit: float = 0.0,
    dropout: float = 0.0,
    copies: int | None = None,
) -> Tensor:
    """Compute `moe_mlp` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64.

    The function loops over the experts, and the host waits for the number of rows of each expert. Compilers cannot
    trace this wait, so the loop is a separate op. Quantized matrices are dequantized at the start. With dropout, the
    dropped elements are not the same as in `moe_mlp`.
    """
    gate_up_weight, down_weight = dense(gate_up_weight), dense(down_weight)
    N, K = experts.shape
    # Sort the copies by expert, and find the end of each expert's rows, as in `sort_by_expert`.
    chosen = experts.reshape(-1)
    order = chosen.argsort(stable=True)[:copies]
    every = torch.arange(gate_up_weight.shape[0], device=x.device)
    ends = torch.searchsorted(chosen[order], every, right=True)
    # Compute gate and up [S, 2 F] of the sorted rows, their gated product [S, F], and the experts' outputs [S, C].
    x = x.to(gate_up_weight.dtype)
    gate_up = torch.ops.liger_models.grouped_product(x[order // K], gate_up_weight.transpose(1, 2), ends)
    if gate_up_low_rank is not None:
        gate_up = gate_up + _low_rank_term(_dropped(x, dropout)[order // K], gate_up_low_rank, ends)
    if gate_up_bias is not None:
        gate_up = gate_up + gate_up_bias.to(gate_up.dtype)[chosen[order]]
    product = expert_act_reference(gate_up, act, limit)
    sorted_rows = torch.ops.liger_models.grouped_product(product, down_weight.transpose(1, 2), ends)
    if down_low_rank is not None:
        sorted_rows = sorted_rows + _low_rank_term(_dropped(product, dropout), down_low_rank, ends)
    if down_bias is not None:
        sorted_rows = sorted_rows + down_bias.to(sorted_rows.dtype)[chosen[order]]
    # Restore the order of the tokens, [N, K, C], and compute the sum weighted by the routing weights in at least fp32.
    rows = sorted_rows.new_zeros(N * K, x.shape[1]).index_copy(0, order, sorted_rows).view(N, K, x.shape[1])
    compute = torch.promote_types(rows.dtype, torch.float32)
    y: Tensor = (rows.to(compute) * weights.to(compute).unsqueeze(-1)).sum(1).to(rows.dtype)
    return y


def _dropped(rows: Tensor, dropout: float) -> Tensor:
    return torch.native_dropout(rows, dropout, True)[0] if dropout > 0 else rows


def _low_rank_term(rows: Tensor, low_rank: LowRank, ends: Tensor) -> Tensor:
    for matrix in low_rank:
        rows = torch.ops.liger_models.grouped_product(rows, matrix.transpose(1, 2), ends)
    return rows


@triton.jit
def _expert_of(row, ends_ptr, X, BLOCK_X: tl.constexpr):
    """Return the index of the expert to which a sorted row belongs. This index is the number of experts e for which
    ends[e] is at most ``row``.
    """
    lanes = tl.arange(0, BLOCK_X)
    ends = tl.load(ends_ptr + lanes, mask=lanes < X, other=2147483647)
    return tl.sum((ends <= row).to(tl.int32), 0)


@triton.jit
def _load_biased(
    gate_up_ptr, bias_ptr, start, left, BIAS: tl.constexpr, BLOCK: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    """Load gate and up for the BLOCK results from index ``start`` on, add their biases, and return them in fp32.

    If the activation has only one input, this input is returned as the gate, and up is 1.
    """
    if INPUTS == 1:
        lanes = tl.arange(0, BLOCK)
        gate = tl.load(gate_up_ptr + start + lanes, mask=lanes < left, other=0.0).to(tl.float32)
        if BIAS:
            gate += tl.load(bias_ptr + start + lanes, mask=lanes < left, other=0.0).to(tl.float32)
        return gate, tl.full([BLOCK], 1.0, tl.float32)
    else:
        gate, up = _load_pairs(gate_up_ptr + 2 * start, left, BLOCK)
        if BIAS:
            gate_bias, up_bias = _load_pairs(bias_ptr + 2 * start, left, BLOCK)
            gate += gate_bias
            up += up_bias
        return gate, up


@triton.jit
def _act_kernel(
    gate_up_ptr, bias_ptr, ends_ptr, product_ptr, F, X, limit, ACT: tl.constexpr, INPUTS: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * F
    if BIAS:
        bias_ptr += _expert_of(tl.program_id(0), ends_ptr, X, BLOCK_X).to(tl.int64) * INPUTS * F
    dtype = gate_up_ptr.dtype.element_ty
    results = tl.arange(0, BLOCK)
    for start in range(0, F, BLOCK):
        left = F - start
        gate, up = _load_biased(gate_up_ptr + INPUTS * row, bias_ptr, start, left, BIAS, BLOCK, INPUTS)
        a, u, _, _ = _expert_act(gate, up, limit, ACT)
        tl.store(product_ptr + row + start + results, (a.to(dtype).to(tl.float32) * u).to(dtype), mask=results < left)


@triton.jit
def _act_backward_kernel(
    g_ptr, gate_up_ptr, weights_ptr, order_ptr, d_gate_up_ptr, product_ptr, d_weights_ptr, bias_ptr, ends_ptr,
    d_rows_ptr, down_bias_ptr, F, C, X, limit, ACT: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr,
    DOWN_BIAS: tl.constexpr, READ_G: tl.constexpr, STORE_D_GATE_UP: tl.constexpr, STORE_PRODUCT: tl.constexpr,
    STORE_D_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * F
    if BIAS or DOWN_BIAS:
        expert = _expert_of(tl.program_id(0), ends_ptr, X, BLOCK_X).to(tl.int64)
        bias_ptr += expert * INPUTS * F
        down_bias_ptr += expert * C
    copy = tl.load(order_ptr + tl.program_id(0))
    w = tl.load(weights_ptr + copy).to(tl.float32)
    dtype = gate_up_ptr.dtype.element_ty
    results = tl.arange(0, BLOCK)
    elements = tl.arange(0, INPUTS * BLOCK)
    # A single loop over the row sums g · A(u) for dw, and writes du and the weighted product.
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, F, BLOCK):
        left = F - start
        gate, up = _load_biased(gate_up_ptr + INPUTS * row, bias_ptr, start, left, BIAS, BLOCK, INPUTS)
        a, u, slope, inside = _expert_act(gate, up, limit, ACT)
        a = a.to(dtype).to(tl.float32)
        p = (a * u).to(dtype).to(tl.float32)  # the input of the forward's down projection
        if READ_G:
            g = tl.load(g_ptr + row + start + results, mask=results < left, other=0.0).to(tl.float32)
            dot += g * p
            if STORE_D_GATE_UP:
                gradient = (w * g * u * slope).to(dtype)
                if INPUTS == 2:
                    gradient = tl.interleave(gradient, (w * g * a * inside).to(dtype))
                at = d_gate_up_ptr + INPUTS * (row + start) + elements
                tl.store(at, gradient, mask=elements < INPUTS * left)
        if STORE_PRODUCT:
            tl.store(product_ptr + row + start + results, (w * p).to(dtype), mask=results < left)
    if STORE_D_WEIGHTS:
        # The routing weight multiplies the sum of the down product and the down bias, so the weight's gradient includes
        # the bias.
        if DOWN_BIAS:
            for start in range(0, C, BLOCK):
                inside = start + results < C
                d = tl.load(d_rows_ptr + tl.program_id(0).to(tl.int64) * C + start + results, mask=inside, other=0.0)
                b = tl.load(down_bias_ptr + start + results, mask=inside, other=0.0)
                dot += d.to(tl.float32) * b.to(tl.float32)
        tl.store(d_weights_ptr + copy, tl.sum(dot, 0).to(d_weights_ptr.dtype.element_ty))


def _row_blocks(F: int, X: int) -> dict[str, int]:
    # With fewer than 128 pairs, some threads of a warp would hold the same elements.
    block = max(min(next_power_of_2(F), ACT_BLOCK), 128)
    return {"BLOCK": block, "BLOCK_X": max(next_power_of_2(X), 2), "num_warps": block // 128}


def _act(gate_up: Tensor, bias: Tensor | None, ends: Tensor, act: str, limit: float) -> Tensor:
    """Launch the kernel of the activation: [S, 2 F] -> [S, F], or [S, F] -> [S, F] without a gate."""
    if bias is None and act in ACTIVATIONS:
        return gated_act_forward(gate_up, act)
    S, F = gate_up.shape[0], gate_up.shape[1] // inputs_of(act)
    product = torch.empty(S, F, dtype=gate_up.dtype, device=gate_up.device)
    with on_device_of(gate_up):
        _act_kernel[(S,)](
            gate_up, gate_up if bias is None else bias, ends, product, F, len(ends), limit, ACT=act,
            INPUTS=inputs_of(act), BIAS=bias is not None, **_row_blocks(F, len(ends)),
        )  # fmt: skip
    return product


def _act_backward(
    g: Tensor | None, gate_up: Tensor, weights: Tensor, order: Tensor, ends: Tensor, d_rows: Tensor | None,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str, limit: float, *, need_d_gate_up: bool,
    need_product: bool, need_d_weights: bool, overwrite_gate_up: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch the kernel of the activation's backward, and return ``(d_gate_up, weighted product, d_weights)``.

    The weighted product, which overwrites g, is the gated product multiplied by the routing weight. Results that are
    not needed are None. ``d_rows`` is needed if the down projection has a bias.
    """
    S, F = gate_up.shape[0], gate_up.shape[1] // inputs_of(act)
    d_gate_up = (gate_up if overwrite_gate_up else torch.empty_like(gate_up)) if need_d_gate_up else None
    product = None
    if need_product:
        product = torch.empty(S, F, dtype=gate_up.dtype, device=gate_up.device) if g is None else g
    empty = torch.empty_like if weights.numel() == S else torch.zeros_like  # the gradient of a copy without a row is 0
    d_weights = empty(weights) if need_d_weights else None
    with on_device_of(gate_up):
        _act_backward_kernel[(S,)](
            gate_up if g is None else g, gate_up, weights, order, gate_up if d_gate_up is None else d_gate_up,
            gate_up if product is None else product, weights if d_weights is None else d_weights,
            gate_up if gate_up_bias is None else gate_up_bias, ends, gate_up if d_rows is None else d_rows,
            gate_up if down_bias is None else down_bias, F, 0 if down_bias is None else down_bias.shape[1], len(ends),
            limit, ACT=act, INPUTS=inputs_of(act), BIAS=gate_up_bias is not None,
            DOWN_BIAS=down_bias is not None and need_d_weights, READ_G=g is not None, STORE_D_GATE_UP=need_d_gate_up,
            STORE_PRODUCT=need_product, STORE_D_WEIGHTS=need_d_weights, **_row_blocks(F, len(ends)),
        )  # fmt: skip
    return d_gate_up, product, d_weights


def _low_rank_library(library: bool, A: Tensor, B: Tensor) -> bool:
    """Return whether PyTorch's grouped_mm can compute the products with the low-rank matrices A and B.

    PyTorch's grouped_mm requires that the rows of the low-rank matrices consist of whole 16-byte vectors.
    """
    return library and A.shape[1] % 8 == 0 and A.data_ptr() % 16 == 0 and B.data_ptr() % 16 == 0


Drop = Callable[[Tensor], Tensor]
"""A function that applies dropout to sorted rows."""


def _drops(order: Tensor, seed: Tensor | None, dropout: float, K: int) -> tuple[Drop, Drop]:
    """Return two functions that apply dropout to the inputs of low-rank terms: one for gate and up, and one for down.

    The function for gate and up drops the same elements in all copies of a token.
    """
    if seed is None:
        return (lambda rows: rows), (lambda rows: rows)
    options: dict[str, Any] = {"order": order, "seed": seed, "dropout": dropout}
    return partial(drop, K=K, number=0, **options), partial(drop, K=1, number=1, **options)


def _product(
    rows: Tensor, weight: Tensor, low_rank: LowRank | None, ends: Tensor, library: bool, drop_rows: Drop
) -> Tensor:
    """Multiply each row [in] by the transposed matrix of the row's expert. The matrix is [out, in]. If there is a
    low-rank term, add it.
    """
    if takes_few(rows, weight):
        out = few_product(rows, weight, ends)
    else:
        out = grouped_mm(rows, dense(weight).transpose(1, 2), ends, library)
    if low_rank is not None:
        rows, library = drop_rows(rows), _low_rank_library(library, *low_rank)
        for matrix in low_rank:
            rows = grouped_mm(rows, matrix.transpose(1, 2), ends, library)
        out += rows
    return out


def _input_gradient(
    d_out: Tensor, weight: Tensor, low_rank: LowRank | None, ends: Tensor, library: bool, drop_rows: Drop
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradient [S, in] of the input rows of `_product`.

    The second result is the gradient [S, R] of rows · Aᵀ, the first product of the low-rank term. Without a low-rank
    term, the second result is None.
    """
    d_rows = grouped_mm(d_out, dense(weight), ends, library)
    if low_rank is None:
        return d_rows, None
    A, B = low_rank
    library = _low_rank_library(library, A, B)
    h = grouped_mm(d_out, B, ends, library)
    d_rows += drop_rows(grouped_mm(h, A, ends, library))
    return d_rows, h


def _low_rank_gradients(
    d_out: Tensor | None, h: Tensor | None, rows: Tensor | None, low_rank: LowRank | None, ends: Tensor, library: bool,
    needs: ProjectionNeeds, drop_rows: Drop,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients of A and B, the low-rank matrices of `_product`. A gradient that is not needed is None.

    ``h`` is the second result of `_input_gradient`, or None if `_input_gradient` was not called.
    """
    if low_rank is None or rows is None or d_out is None or not (needs.low_rank_A or needs.low_rank_B):
        return None, None
    (A, B), rows = low_rank, drop_rows(rows)
    library = _low_rank_library(library, A, B)
    dA = dB = None
    if needs.low_rank_A:
        dA = grouped_outer(grouped_mm(d_out, B, ends, library) if h is None else h, rows, ends, library)
    if needs.low_rank_B:
        dB = grouped_outer(d_out, grouped_mm(rows, A.transpose(1, 2), ends, library), ends, library)
    return dA, dB


EXPERTS = WEIGHT._replace(from_op=lambda codes, *stored: WEIGHT.from_op(codes.contiguous(), *stored))
COPIES = Argument("SymInt? {0}=None", lambda copies: (copies,), lambda copies: copies)


class ExpertProjection(NamedTuple):
    """The parameters of a projection for all experts.

    Attributes:
        weight: [X, O, C].
        bias: [X, O].
        low_rank: ``(A [X, R, C], B [X, O, R])`` in the dtype of the weight.
    """

    weight: Annotated[Any, EXPERTS]
    bias: Tensor | None = None
    low_rank: Annotated[LowRank | None, LOW_RANK] = None

    def contiguous(self) -> "ExpertProjection":
        """Return the same projection with contiguous tensors."""
        weight = self.weight.contiguous() if isinstance(self.weight, Tensor) else self.weight
        low_rank = None if self.low_rank is None else (self.low_rank[0].contiguous(), self.low_rank[1].contiguous())
        return ExpertProjection(weight, None if self.bias is None else self.bias.contiguous(), low_rank)

    def dense(self) -> "ExpertProjection":
        """Return the same projection with a dequantized matrix."""
        return self._replace(weight=dense(self.weight))


class MoEInputs(NamedTuple):
    """Inputs of the ops `moe_mlp` and `moe_mlp_inference`, as described at the function `moe_mlp`.

    ``seed`` holds the seeds of the dropout, or is None for no dropout. Only `moe_mlp_inference` may get an ``addend``,
    which must have the dtype of y. ``sum_bytes`` are the bytes of the parameters' gradients in fp32.
    """

    x: Tensor
    weights: Tensor
    experts: Tensor
    gate_up: ExpertProjection
    down: ExpertProjection
    act: str
    limit: float
    recompute: bool
    seed: Tensor | None
    dropout: float
    copies: Annotated[int | None, COPIES] = None
    addend: Tensor | None = None
    need_y: bool = True
    sum_bytes: int = 0


class MoEOutputs(NamedTuple):
    """Outputs of the op `moe_mlp`.

    Attributes:
        y: [N, C].
        order, slot, ends: the results of `sort_by_expert`. If the tokens are processed in chunks, these are the
            concatenated results of all chunks.
        u: [S, 2 F], gates and ups without their bias; None with ``recompute``.
    """

    y: Tensor
    order: Tensor
    slot: Tensor
    ends: Tensor
    u: Tensor | None


class MoESaved(NamedTuple):
    """Tensors and constants that the forward saves for the backward. x is None if the backward does not need it."""

    x: Tensor | None
    weights: Tensor
    order: Tensor
    slot: Tensor
    ends: Tensor
    u: Tensor | None
    gate_up: ExpertProjection
    down: ExpertProjection
    act: str
    limit: float
    x_dtype: torch.dtype
    seed: Tensor | None
    dropout: float


class MoEGradients(NamedTuple):
    """The gradients of the op's inputs. In `MoENeeds`, the fields are bools that say which gradients are needed."""

    x: Any = None
    weights: Any = None
    gate_up: ProjectionGradients = ProjectionGradients()
    down: ProjectionGradients = ProjectionGradients()


MoENeeds = Annotated[MoEGradients, bool]


class MoEUpstream(NamedTuple):
    """Inputs of the op `moe_mlp_backward`."""

    dy: Tensor
    saved: MoESaved
    needs: MoENeeds


def _forward(inputs: MoEInputs) -> MoEOutputs:
    x, weights, experts = inputs.x, inputs.weights, inputs.experts
    (X, width, _), dtype = inputs.gate_up.weight.shape, inputs.gate_up.weight.dtype
    if weights.numel() == 0 or inputs.copies == 0:
        slot = experts.new_zeros(experts.numel(), dtype=torch.int32)
        u = None if inputs.recompute else x.new_empty(0, width, dtype=dtype)
        return MoEOutputs(x.new_zeros(x.shape, dtype=dtype), slot.new_empty(0), slot, slot.new_zeros(X), u)

    return _forward_tokens(inputs) if _count_chunks(inputs) == 1 else _forward_chunks(inputs)


def _count_chunks(inputs: MoEInputs) -> int:
    """Return the number of chunks of tokens. There are several chunks only if u is not saved."""
    N, K = inputs.experts.shape
    # The kernels of dropout number the copies of all tokens.
    if not inputs.recompute or inputs.copies is not None or inputs.seed is not None:
        return 1
    weight = inputs.gate_up.weight
    copies = copies_per_chunk(weight.shape, inputs.act, weight.dtype.itemsize, inputs.sum_bytes)
    return max(cdiv(N, max(copies // K, 1)), 1)


def copies_per_chunk(shape: Sequence[int], act: str, size: int, sum_bytes: int) -> int:
    """Return the maximum number of copies of tokens in a chunk.

    Args:
        shape: ``(X, 2 F, C)``, or ``(X, F, C)`` without a gate.
        act: the activation.
        size: bytes of an element.
        sum_bytes: bytes of the sums in fp32 of the parameters' gradients.
    """
    X, width, _ = shape
    worth = _copies_worth(sum_bytes, copy_bytes(shape, act, size))
    return max(WORKSPACE_MIB * 2**20 // (width * size), MIN_ROWS * X, worth)


def copy_bytes(shape: Sequence[int], act: str, size: int) -> int:
    """Return the bytes that the backward needs for a copy of a token: u, the gated product, and two rows [C]."""
    _, width, C = shape
    return (width + width // inputs_of(act) + 2 * C) * size


def _copies_worth(sum_bytes: int, copy_bytes: int) -> int:
    """Return the number of copies above which two chunks need less memory than one.

    Two chunks save the memory of half of the copies, but need the sums of the parameters' gradients.
    """
    return 2 * sum_bytes // copy_bytes


def _forward_chunks(inputs: MoEInputs) -> MoEOutputs:
    """Compute the outputs in chunks of tokens. u is not saved."""
    N = len(inputs.x)
    tokens = cdiv(N, _count_chunks(inputs))
    if inputs.need_y:
        inputs = inputs._replace(gate_up=inputs.gate_up.dense().contiguous(), down=inputs.down.dense().contiguous())
    y = inputs.x.new_empty(inputs.x.shape, dtype=inputs.gate_up.weight.dtype)
    parts = []
    for start in range(0, N, tokens):
        chunk = slice(start, start + tokens)
        part = _forward_tokens(
            inputs._replace(
                x=inputs.x[chunk],
                weights=inputs.weights[chunk],
                experts=inputs.experts[chunk],
                addend=None if inputs.addend is None else inputs.addend[chunk],
            )
        )
        if inputs.need_y:
            y[chunk] = part.y
        parts.append((part.order, part.slot, part.ends))
        del part
    order, slot, ends = map(torch.cat, zip(*parts, strict=True))
    return MoEOutputs(y, order, slot, ends, None)


def _forward_tokens(inputs: MoEInputs) -> MoEOutputs:
    """Compute the outputs for all tokens or for the tokens of one chunk."""
    x, weights, experts = inputs.x, inputs.weights, inputs.experts
    gate_up, down = inputs.gate_up.contiguous(), inputs.down.contiguous()
    X, dtype = gate_up.weight.shape[0], gate_up.weight.dtype
    library = library_runs(gate_up.weight, down.weight)
    order, slot, ends = sort_by_expert(experts.contiguous(), X, inputs.copies)
    if inputs.recompute and not inputs.need_y:
        return MoEOutputs(x.new_empty(x.shape, dtype=dtype), order, slot, ends, None)
    drop_in, drop_out = _drops(order, inputs.seed, inputs.dropout, experts.shape[1])

    rows = permute(x, slot, len(order), dtype)  # [S, C]
    u = _product(rows, gate_up.weight, gate_up.low_rank, ends, library, drop_in)  # [S, 2 F]
    del rows
    product = _act(u, gate_up.bias, ends, inputs.act, inputs.limit)  # [S, F]
    kept = None if inputs.recompute else u
    del u  # unless u is saved, this frees u before the next product
    rows = _product(product, down.weight, down.low_rank, ends, library, drop_out)  # [S, C]
    del product
    y = unpermute(rows, slot, weights.contiguous(), x.shape[0], dtype, down.bias, experts, inputs.addend)
    return MoEOutputs(y, order, slot, ends, kept)


def _inference(inputs: MoEInputs) -> Tensor:
    """Compute `moe_mlp` without a backward.

    The number of copies determines which kernels run. The kernels are chosen inside the op, so that this choice is not
    part of a compiled graph.
    """
    gate_up, down, experts = inputs.gate_up.contiguous(), inputs.down.contiguous(), inputs.experts
    has_low_rank = gate_up.low_rank is not None or down.low_rank is not None
    if not has_low_rank and inputs.copies is None and takes_few_copies(experts, gate_up.weight, down.weight):
        return few_experts(
            inputs.x.to(gate_up.weight.dtype).contiguous(), inputs.weights.contiguous(), experts.contiguous(),
            gate_up.weight, down.weight, gate_up.bias, down.bias, inputs.act, inputs.limit, inputs.addend,
        )  # fmt: skip
    return _forward(inputs._replace(recompute=True)).y


def _backward(inputs: MoEUpstream) -> MoEGradients:
    saved = inputs.saved
    if saved.order.numel() == 0:
        return _like(inputs, torch.Tensor.new_zeros)
    is_whole = len(saved.ends) == saved.gate_up.weight.shape[0]
    return _backward_tokens(inputs) if is_whole else _backward_chunks(inputs)


def _backward_chunks(inputs: MoEUpstream) -> MoEGradients:
    """Compute the gradients in chunks of tokens. The parameters' gradients are summed over the chunks in fp32."""
    dy, saved, needs = inputs
    x = saved.x
    assert x is not None
    saved = saved._replace(gate_up=saved.gate_up.dense().contiguous(), down=saved.down.dense().contiguous())
    (N, K), X = saved.weights.shape, saved.gate_up.weight.shape[0]
    tokens = cdiv(N, len(saved.ends) // X)
    dx = x.new_empty(x.shape) if needs.x else None
    d_weights = saved.weights.new_empty(N, K) if needs.weights else None
    gate_up, down = ProjectionGradients(), ProjectionGradients()
    for index, start in enumerate(range(0, N, tokens)):
        chunk = slice(start, start + tokens)
        copies = slice(start * K, (start + tokens) * K)
        part = saved._replace(
            x=x[chunk],
            weights=saved.weights[chunk],
            order=saved.order[copies],
            slot=saved.slot[copies],
            ends=saved.ends[index * X : (index + 1) * X],
        )
        gradients = _backward_tokens(MoEUpstream(dy[chunk], part, needs))
        if dx is not None:
            dx[chunk] = gradients.x
        if d_weights is not None:
            d_weights[chunk] = gradients.weights
        gate_up, down = gate_up.plus(gradients.gate_up), down.plus(gradients.down)
        del gradients
    dtype = saved.gate_up.weight.dtype
    return MoEGradients(dx, d_weights, gate_up.to(dtype), down.to(dtype))


def _backward_tokens(inputs: MoEUpstream) -> MoEGradients:
    """Compute the gradients for all tokens or for the tokens of one chunk."""
    dy, saved, needs = inputs
    x, weights, order, slot, ends, u, _, _, act, limit, x_dtype, seed, dropout = saved
    gate_up, down, weights = saved.gate_up.contiguous(), saved.down.contiguous(), weights.contiguous()
    N, S, dtype = dy.shape[0], len(order), gate_up.weight.dtype
    library = library_runs(gate_up.weight, down.weight)
    drop_in, drop_out = _drops(order, seed, dropout, weights.shape[1])
    need_du = needs.x or needs.gate_up.by_rows or needs.gate_up.bias
    rows = g = h = dx = d_rows = None

    # Begin the backward through the down projection.
    d_out = permute(dy, slot, S, dtype)  # [S, C]
    if need_du or needs.weights:
        g, h = _input_gradient(d_out, down.weight, down.low_rank, ends, library, drop_out)  # [S, F]
    dy_rows = d_out if needs.down.by_rows or down.bias is not None else None
    del d_out

    # Recompute u, bitwise identical to the forward. Matrices that are dequantized for u are kept for the gradient of x.
    recomputed = u is None
    if u is None:
        assert x is not None
        rows = permute(x, slot, S, dtype)  # [S, C]
        if needs.x and not takes_few(rows, gate_up.weight):
            gate_up = gate_up._replace(weight=dense(gate_up.weight))
        u = _product(rows, gate_up.weight, gate_up.low_rank, ends, library, drop_in)  # [S, 2 F]
        if not needs.gate_up.by_rows:
            rows = None

    # Continue the backward through the activation. If u was recomputed, du overwrites u.
    du, product, d_weights = _act_backward(
        g, u, weights, order, ends, dy_rows, gate_up.bias, down.bias, act, limit, need_d_gate_up=need_du,
        need_product=needs.down.by_rows, need_d_weights=needs.weights, overwrite_gate_up=recomputed,
    )  # fmt: skip
    del g, u

    # Compute the gradients of the down projection's parameters.
    d_weight = d_bias = None
    if dy_rows is not None and down.bias is not None and needs.down.bias:
        d_bias = grouped_sum(dy_rows, ends, down.bias.dtype, weights, order)
    if dy_rows is not None and product is not None and needs.down.weight:
        d_weight = grouped_outer(dy_rows, product, ends, library)
    pair = _low_rank_gradients(dy_rows, h, product, down.low_rank, ends, library, needs.down, drop_out)
    d_down = ProjectionGradients(d_weight, d_bias, *pair)
    del dy_rows, product, h, d_weight, d_bias, pair
    if du is None:
        return MoEGradients(None, d_weights, down=d_down)

    # Compute the gradients of the parameters of gate and up, and the gradient of x.
    d_weight = d_bias = h = None
    if gate_up.bias is not None and needs.gate_up.bias:
        d_bias = grouped_sum(du, ends, gate_up.bias.dtype)
    if needs.gate_up.by_rows and rows is None:
        assert x is not None
        rows = permute(x, slot, S, dtype)
    if needs.gate_up.weight:
        assert rows is not None
        d_weight = grouped_outer(du, rows, ends, library)
    if not (needs.gate_up.low_rank_A or needs.gate_up.low_rank_B):
        rows = None
    if needs.x:
        d_rows, h = _input_gradient(du, gate_up.weight, gate_up.low_rank, ends, library, drop_in)  # [S, C]
    pair = _low_rank_gradients(du, h, rows, gate_up.low_rank, ends, library, needs.gate_up, drop_in)
    d_gate_up = ProjectionGradients(d_weight, d_bias, *pair)
    del du, rows, h
    if d_rows is not None:
        dx = unpermute(d_rows, slot, None, N, x_dtype)
    return MoEGradients(dx, d_weights, d_gate_up, d_down)


def _forward_fake(inputs: MoEInputs) -> MoEOutputs:
    x, experts, copies = inputs.x, inputs.experts, inputs.copies
    (X, width, _), dtype = inputs.gate_up.weight.shape, inputs.gate_up.weight.dtype
    slot = experts.new_empty(experts.numel(), dtype=torch.int32)
    order = slot.new_empty(experts.numel() if copies is None else copies)
    u = None if inputs.recompute else x.new_empty(*order.shape, width, dtype=dtype)
    ends = order.new_empty(_count_chunks(inputs) * X)
    return MoEOutputs(x.new_empty(x.shape, dtype=dtype), order, slot, ends, u)


def _inference_fake(inputs: MoEInputs) -> Tensor:
    return inputs.x.new_empty(inputs.x.shape, dtype=inputs.gate_up.weight.dtype)


def _backward_fake(inputs: MoEUpstream) -> MoEGradients:
    return _like(inputs, torch.Tensor.new_empty)


def _like(inputs: MoEUpstream, new: Callable[..., Tensor]) -> MoEGradients:
    """Allocate the needed gradients with ``new``, which is ``new_zeros`` or ``new_empty``."""
    dy, saved, needs = inputs

    def of_projection(projection: ExpertProjection, needs: ProjectionNeeds) -> ProjectionGradients:
        parameters = projection.weight, projection.bias, *(projection.low_rank or (None, None))
        return ProjectionGradients(
            *(new(t, t.shape) if need else None for t, need in zip(parameters, needs, strict=True))
        )

    return MoEGradients(
        x=new(dy, dy.shape, dtype=saved.x_dtype) if needs.x else None,
        weights=new(saved.weights, saved.weights.shape) if needs.weights else None,
        gate_up=of_projection(saved.gate_up, needs.gate_up),
        down=of_projection(saved.down, needs.down),
    )


def _save(ctx: Any, inputs: MoEInputs, outputs: MoEOutputs, needs: MoENeeds) -> MoESaved:
    _, order, slot, ends, u = outputs
    # Only y is an output for the caller. The other outputs are returned for the backward.
    ctx.mark_non_differentiable(*[output for output in (order, slot, ends, u) if output is not None])
    return MoESaved(
        # The backward needs x to recompute u, or for the gradients of the gate and up matrices.
        x=inputs.x if u is None or needs.gate_up.by_rows else None,
        weights=inputs.weights,
        order=order,
        slot=slot,
        ends=ends,
        u=u,
        gate_up=inputs.gate_up,
        down=inputs.down,
        act=inputs.act,
        limit=inputs.limit,
        x_dtype=inputs.x.dtype,
        seed=inputs.seed,
        dropout=inputs.dropout,
    )


def _gradients(saved: MoESaved, needs: MoENeeds, upstream: Any) -> MoEGradients:
    return MoEGradients() if upstream.y is None else BACKWARD(MoEUpstream(upstream.y, saved, needs))


FORWARD = Op("moe_mlp", _forward, _forward_fake)
INFERENCE = Op("moe_mlp_inference", _inference, _inference_fake)
BACKWARD = Op("moe_mlp_backward", _backward, _backward_fake)
FORWARD.differentiable(_save, _gradients)


def moe_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
    *,
    act: str = "silu",
    limit: float = 0.0,
    recompute: bool = False,
    dropout: float = 0.0,
    copies: int | None = None,
    addend: Tensor | None = None,
    need_y: bool = True,
) -> Tensor:
    """Compute ``y[n] = Σ_k weights[n, k] · (act(x[n] @ Wguᵀ + bgu) @ Wdᵀ + bd)``.

    Wgu, bgu, Wd and bd belong to expert ``experts[n, k]``.

    Args:
        x: [N, C], float32, float16 or bfloat16.
        weights: [N, K], routing weights from `route`.
        experts: [N, K] int64, from 0 to X − 1. With ``copies``, X stands for no expert.
        gate_up_weight: [X, 2 F, C]. In each expert's matrix, row 2f is gate f, and row 2f + 1 is up f. For "relu2",
            which has no gate, gate_up_weight is [X, F, C]. gate_up_weight and down_weight may be of class
            `FrozenWeight`. y has the dtype of gate_up_weight, which may differ from the dtype of x. Autocast does not
            change the dtype of y.
        down_weight: [X, C, F], in the dtype of gate_up_weight.
        gate_up_bias: [X, 2 F] (or [X, F]), in the order of the rows of gate_up_weight; None for no bias.
        down_bias: [X, C]; None for no bias.
        gate_up_low_rank: ``(A [X, R, C], B [X, 2 F, R])`` in the dtype of gate_up_weight. ``x[n] @ Aᵀ @ Bᵀ``, with the
            expert's A and B, is added to gate and up.
        down_low_rank: ``(A [X, R, F], B [X, C, R])``, the low-rank term of the down projection, which is added in the
            same way.
        act: the activation: "silu", "gelu_tanh", "gelu", "clamped_swiglu" (GPT-OSS), or "relu2" (Nemotron 3). "relu2"
            is the square of ReLU, without a gate. "clamped_swiglu" is ``(clamp(up, -limit, limit) + 1) * gate *
            sigmoid(1.702 * gate)``, where gate is clamped to at most limit.
        limit: the limit of "clamped_swiglu", a positive number. Other activations ignore the limit.
        recompute: whether to recompute gate and up in the backward instead of saving them. This takes one more grouped
            product. If there are so many tokens that this saves memory, they are then processed in chunks, and the
            gradients of the parameters are summed in fp32. With a single chunk, the gradients do not change. The
            reference backend ignores this option.
        dropout: probability of dropping an element of the low-rank terms' inputs. The same elements of x are dropped
            for all experts of a token.
        copies: number of entries in ``experts`` that are less than X. The remaining entries are X, which stands for no
            expert, and contribute nothing to y. None if there are no such entries.
        addend: [N, C], which is added to the rounded y; None to add nothing. If gradients are disabled and the dtypes
            match, this addition takes no separate launch.
        need_y: whether the caller uses the values of y. If not, and with ``recompute``, y is left uninitialized. The
            reference backend ignores this option.

    Returns:
        [N, C] in the dtype of ``gate_up_weight``. If ``addend`` has another dtype, PyTorch's type promotion determines
        the dtype of the result.

    Raises:
        ValueError: the shapes do not match, or the activation is unknown.
        TypeError: a tensor is not floating-point, ``experts`` is not int64, or the experts' matrices and the low-rank
            matrices differ in dtype.
    """
    check_expert_act("moe_mlp", act, limit)
    check_floating("moe_mlp", x=x, weights=weights, gate_up_weight=gate_up_weight, down_weight=down_weight)
    check_floating("moe_mlp", gate_up_bias=gate_up_bias, down_bias=down_bias)
    if experts.dtype != torch.int64:
        raise TypeError(f"moe_mlp: experts must be int64, got {experts.dtype}.")
    if x.dim() != 2:
        raise ValueError(f"moe_mlp: x must be [N, C], got {list(x.shape)}.")
    if not (
        weights.dim() == 2
        and weights.shape == experts.shape
        and weights.shape[:1] == x.shape[:1]
        and weights.shape[1] > 0
    ):
        raise ValueError(
            f"moe_mlp: weights and experts must be [{x.shape[0]}, K], got {list(weights.shape)} and "
            f"{list(experts.shape)}."
        )
    inner = inputs_of(act)
    if gate_up_weight.dim() != 3 or gate_up_weight.shape[2] != x.shape[1] or gate_up_weight.shape[1] % inner != 0:
        rows = "2 F" if inner == 2 else "F"
        raise ValueError(
            f"moe_mlp: gate_up_weight must be [X, {rows}, {x.shape[1]}], got {list(gate_up_weight.shape)}."
        )
    X, width, C = gate_up_weight.shape
    if tuple(down_weight.shape) != (X, C, width // inner):
        raise ValueError(f"moe_mlp: down_weight must be {[X, C, width // inner]}, got {list(down_weight.shape)}.")
    for name, bias, size in (("gate_up_bias", gate_up_bias, width), ("down_bias", down_bias, C)):
        if bias is not None and tuple(bias.shape) != (X, size):
            raise ValueError(f"moe_mlp: {name} must be {[X, size]}, got {None if bias is None else list(bias.shape)}.")
    if not (X <= MAX_EXPERTS and experts.numel() <= MAX_COPIES):
        raise ValueError(
            f"moe_mlp: at most {MAX_EXPERTS} experts and {MAX_COPIES} copies of tokens, got {X} and {experts.numel()}."
        )
    if gate_up_weight.dtype != down_weight.dtype:
        raise TypeError(
            "moe_mlp: gate_up_weight and down_weight must have one dtype, "
            f"got {gate_up_weight.dtype} and {down_weight.dtype}."
        )
    _check_low_rank("gate_up_low_rank", gate_up_low_rank, gate_up_weight)
    _check_low_rank("down_low_rank", down_low_rank, down_weight)
    if addend is not None and addend.shape != x.shape:
        raise ValueError(f"moe_mlp: addend must be {list(x.shape)}, got {list(addend.shape)}.")
    if not (use_triton(x) and use_triton(gate_up_weight)):
        y = moe_mlp_reference(
            x, weights, experts, gate_up_weight, down_weight, gate_up_bias, down_bias, gate_up_low_rank, down_low_rank,
            act=act, limit=limit, dropout=dropout, copies=copies,
        )  # fmt: skip
        return y if addend is None else y + addend
    # Without low-rank terms, there is no dropout. No seed is then drawn, so that the generator does not advance.
    has_low_rank = gate_up_low_rank is not None or down_low_rank is not None
    need_gradients = torch.is_grad_enabled()
    low_ranks = *(gate_up_low_rank or ()), *(down_low_rank or ())
    parameters = gate_up_weight, down_weight, gate_up_bias, down_bias, *low_ranks
    inputs = MoEInputs(
        x=x,
        weights=weights,
        experts=experts,
        gate_up=ExpertProjection(gate_up_weight, gate_up_bias, gate_up_low_rank),
        down=ExpertProjection(down_weight, down_bias, down_low_rank),
        act=act,
        limit=limit,
        recompute=recompute,
        seed=draw_seed(x.device) if dropout > 0 and has_low_rank else None,
        dropout=dropout,
        copies=copies,
        need_y=need_y,
        sum_bytes=4 * sum(x.numel() for x in parameters if isinstance(x, Tensor) and x.requires_grad) * need_gradients,
    )
    if not need_gradients and (addend is None or (addend.dtype == down_weight.dtype and copies is None)):
        return INFERENCE(inputs._replace(addend=addend))
    y = FORWARD(inputs).y if need_gradients else INFERENCE(inputs)
    return y if addend is None else y + addend


def _check_low_rank(name: str, low_rank: LowRank | None, weight: Tensor) -> None:
    """Raise an error unless A is [X, R, in] and B is [X, out, R], both in the dtype of the weight [X, out, in].

    Raises:
        ValueError: a shape does not match.
        TypeError: A or B does not have the dtype of the weight.
    """
    if low_rank is None:
        return
    (A, B), (X, out, width) = low_rank, weight.shape
    if A.dim() != 3 or A.shape != (X, A.shape[1], width) or B.shape != (X, out, A.shape[1]):
        raise ValueError(
            f"moe_mlp: {name} must be A [{X}, R, {width}] and B [{X}, {out}, R], got {list(A.shape)} and "
            f"{list(B.shape)}."
        )
    if not A.dtype == B.dtype == weight.dtype:
        raise TypeError(f"moe_mlp: {name} must have the weights' dtype, {weight.dtype}, got {A.dtype} and {B.dtype}.")
