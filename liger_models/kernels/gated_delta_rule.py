"""Gated delta rule: a layer that is linear in the tokens, whose state is a matrix for each head.

Forward, for each value head and token in fp32, with S [Dk, Dv] the state, q̂ and k̂ the L2-normalised query and key::

    S ← exp(g) · S,   d = β · (v − k̂ᵀ S),   S ← S + k̂ dᵀ,   o = scale · q̂ᵀ S

The kernels take `CHUNK` tokens at a time. With S the state before the chunk, G_i = Σ_{j ≤ i} g_j within it, G its last
value, E_ij = exp(G_i − G_j) for i ≥ j and 0 otherwise, and rows of matrices for tokens::

    M_ij = β_i · E_ij · k̂_i·k̂_j  (i > j),   A = (I + M)⁻¹,   P_ij = scale · E_ij · q̂_i·k̂_j
    X = β · (V − e^{G_i} · K̂ S),   D = A X,   O = scale · e^{G_i} · Q̂ S + P D,   S ← e^G · S + (e^{G − G_i} · K̂)ᵀ D

P of all chunks comes from one kernel, with the factors of rows of Q, K and X, and A from a second one. A third goes
through the chunks in order, each program with some columns of S in registers. Backward, with dS the gradient of the
state after the chunk, in the opposite order::

    dD = Pᵀ dO + e^{G − G_i} · K̂ dS,   dX = Aᵀ dD,   dV = β · dX
    dS ← e^G · dS + (scale · e^{G_i} · Q̂)ᵀ dO − (β · e^{G_i} · K̂)ᵀ dX

S and D, which do not depend on these, are recomputed at the same time. The other gradients of a chunk need what its
queries and keys read, and what its keys write, ∘ for element by element::

    dQ̂ = scale · (e^{G_i} · dO Sᵀ + (E ∘ dO Dᵀ) K̂)
    R = e^{G_i} · dX Sᵀ + (E ∘ dX Dᵀ) K̂    (i > j),   dβ_i = dX_i·V_i − k̂_i·R_i
    W = e^{G − G_i} · D dSᵀ − (E ∘ dV Dᵀ)ᵀ K̂    (i > j),   dK̂ = W − β · R + scale · (E ∘ dO Dᵀ)ᵀ Q̂

Where a key head serves several value heads, one program adds up what they give: a first kernel E ∘ dO Dᵀ and
β · E ∘ dX Dᵀ, a second one what goes through S and dS, to which it adds the products with those sums. Products are in
the dtype of q, k and v and are summed in fp32; the state and the decay are in fp32, and products within the inverse
have errors of at most 2⁻¹⁶. Saved: the inputs, and A in their dtype. The backward recomputes P, S and D.

A few tokens without gradients (decoding) have a kernel of their own, which follows the recurrence.

Source: https://arxiv.org/abs/2412.06464; the form in chunks: https://arxiv.org/abs/2406.06484.
"""

from typing import Any

import torch
from torch import Tensor

from .checks import check, check_documents, check_floating
from .dispatch import (
    INTERPRET,
    LIBRARY,
    TensorDescriptor,
    fitting_stages,
    on_device_of,
    register_autograd,
    tl,
    triton,
    use_triton,
)
from .documents import bounds, flat, locate, slots

CHUNK = 64
"""Tokens that are computed together: four blocks of 16, the least that tensor cores multiply."""

L2_EPS = 1e-6

STEP_TOKENS = 16
"""Most tokens for which the recurrence is followed token by token, where no gradient is needed."""

SIMILARITY_WARPS, INVERSE_WARPS, INVERSE_STAGES = 8, 1, 3
SCAN_WARPS, SCAN_STAGES, SCAN_COLUMNS = 4, 3, 32
"""In the kernels that go through the chunks in order, each program has this many columns of the state of one head. With
32, heads of 128 have four programs, which fill a GPU where there is one text with 32 heads."""

BACK_STAGES = 2
"""Stages in the scans of the backward: with more, the shared memory of Hopper would not hold two programs."""

GRADIENT_WARPS, GRADIENT_STAGES, GRADIENT_COLUMNS = 4, 2, 64
"""The kernels with the other gradients take this many columns of v at a time, and at most half of them. Four warps took
less time on Hopper than eight, with 255 registers each or 128."""

KEY_COLUMNS = 64
"""Kernels take this many columns of q and k, or twice as many. Other numbers gave wrong results on Hopper with
Triton 3.6."""

STEP_WARPS, STEP_COLUMNS = 4, 32


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and final states of `gated_delta_rule` in plain torch (differentiable; fp64 stays fp64)."""
    result_dtype, dtype = v.dtype, torch.promote_types(v.dtype, torch.float32)
    (B, T, Hk, Dk), (Hv, Dv) = k.shape, v.shape[2:]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
    g, beta = (x.to(dtype).transpose(1, 2) for x in (g, beta))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q = q * (Dk**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(Hv // Hk, 1) for x in (q, k))
    token = torch.arange(T, device=v.device)
    edges = torch.arange(2, device=v.device) * T if cu_seqlens is None else cu_seqlens.long()
    document = torch.searchsorted(edges, token, right=True) - 1  # not of edges[1:]: Inductor takes no slice (2.11)
    state = v.new_zeros(B, Hv, Dk, Dv)
    initial = None if initial_state is None else initial_state.to(dtype)
    if cu_seqlens is None:
        state, initial = state if initial is None else initial, None
    finals = v.new_zeros(len(edges) - 1, Hv, Dk, Dv)
    if initial is not None:
        finals = initial * (edges.diff() == 0)[:, None, None, None]

    def chunk(start: int, state: Tensor, finals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        Q, K, V, decay, b = (x[:, :, start : start + CHUNK] for x in (q, k, v, g, beta))
        here = document[start : start + CHUNK]
        causal = torch.ones(len(here), len(here), dtype=torch.bool, device=v.device).tril()
        causal = causal & (here[:, None] == here)
        # Documents that began before this chunk continue from `state`, the others start from their initial one.
        carried = here == document[max(start - 1, 0)]
        carried = (carried if start or cu_seqlens is None else carried & False).to(dtype)[:, None]
        total = decay.cumsum(-1)
        first = (here[:, None] > here).sum(-1)  # token in this chunk of the token's document
        since = (total - (total - decay)[..., first]).exp()[..., None]
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()

        def seen(x: Tensor) -> Tensor:
            """``x`` times the state that its document had before this chunk, decayed up to the token."""
            out = (x @ state) * carried
            if initial is not None:
                out = out + torch.einsum("bhtk,thkv->bhtv", x, initial[here]) * (1 - carried)
            return out * since

        system = (K @ K.mT * between * b[..., None]).tril(-1)
        d = torch.linalg.solve_triangular(system, b[..., None] * (V - seen(K)), upper=False, unitriangular=True)
        out = seen(Q) + (Q @ K.mT * between) @ d
        # The state after the last token; with documents after each token, since a document may end at any.
        which = slice(-1, None) if cu_seqlens is None else slice(None)
        after = (between[:, :, which, :, None] * K[:, :, None]).mT @ d[:, :, None]
        previous = state[:, :, None] * carried[which, :, None]
        if initial is not None:
            previous = previous + initial[here[which]].transpose(0, 1) * (1 - carried[which, :, None])
        after = after + previous * since[:, :, which, :, None]
        if cu_seqlens is not None:
            ends = (token[start : start + CHUNK] + 1 == edges[here + 1]).to(dtype)
            finals = finals.index_add(0, here, after[0].transpose(0, 1) * ends[:, None, None, None])
        return out, after[:, :, -1], finals

    outputs = [v[:, :, :0]]
    for start in range(0, T, CHUNK):
        out, state, finals = chunk(start, state, finals)
        outputs.append(out)
    return torch.cat(outputs, 2).transpose(1, 2).to(result_dtype), state if cu_seqlens is None else finals


@triton.jit
def _load_rows(ptr, rows, stride, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of a matrix [tokens, WIDTH], with 0 from row ``end`` on."""
    columns = tl.arange(0, BLOCK)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns, mask=(rows < end)[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def _inverse_norms(x, NORMALIZE: tl.constexpr, EPS: tl.constexpr):
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    return 1.0 / tl.sqrt(square + EPS) if NORMALIZE else tl.zeros_like(square) + 1.0


@triton.jit
def _decays(left, right, keep):
    """exp(left_i − right_j) where ``keep``, and 0 elsewhere."""
    return tl.exp(tl.where(keep, left[:, None] - right[None, :], float("-inf")))


@triton.jit
def _similarity_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, cu_ptr, p_ptr, total_ptr, q_norm_ptr, k_norm_ptr, factor_ptr, tokens, documents, q_t,
    q_h, k_t, k_h, g_t, g_h, beta_t, beta_h, scale, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr, NEED_P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """P, the running sums of g and the inverse norms of one chunk and key head.

    The factors of rows are β, those of K̂ S in X and of D in the next state, which include the inverse norm of k, and
    that of Q̂ S in O.
    """
    key_head = tl.program_id(1).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    index = tl.arange(0, C)
    rows = first + index
    inside = rows < end
    k = _load_rows(k_ptr + key_head * k_h, rows, k_t, end, DK, BLOCK_K)
    k_norm = _inverse_norms(k, NORMALIZE, EPS)
    tl.store(k_norm_ptr + key_head * tokens + rows, k_norm, mask=inside)
    if NEED_P:
        q = _load_rows(q_ptr + key_head * q_h, rows, q_t, end, DK, BLOCK_K)
        q_norm = _inverse_norms(q, NORMALIZE, EPS)
        tl.store(q_norm_ptr + key_head * tokens + rows, q_norm, mask=inside)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * q_norm[:, None] * k_norm[None, :])
    for head in range(key_head * GROUP, (key_head + 1) * GROUP):
        total = tl.cumsum(tl.load(g_ptr + head * g_h + rows * g_t, mask=inside, other=0.0).to(tl.float32), 0)
        beta = tl.load(beta_ptr + head * beta_h + rows * beta_t, mask=inside, other=0.0).to(tl.float32)
        tl.store(total_ptr + head * tokens + rows, total, mask=inside)
        at_factors = factor_ptr + 4 * head * tokens + rows
        tl.store(at_factors, beta, mask=inside)
        tl.store(at_factors + tokens, beta * tl.exp(total) * k_norm, mask=inside)
        whole = tl.sum(tl.where(rows == end - 1, total, 0.0), 0)
        tl.store(at_factors + 2 * tokens, tl.exp(whole - total) * k_norm, mask=inside)
        if NEED_P:
            p = qk * _decays(total, total, index[:, None] >= index[None, :])
            at = (head * tokens + rows)[:, None] * C + index[None, :]
            tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside[:, None])
            tl.store(at_factors + 3 * tokens, tl.exp(total) * q_norm * scale, mask=inside)


@triton.jit
def _times(left, right, PRECISION: tl.constexpr):
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _add_dots(sum, left, right, PRECISION: tl.constexpr):
    return tl.dot(left, tl.trans(right), sum, input_precision=PRECISION)


@triton.jit
def _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, ROW: tl.constexpr):
    """Load the running sums of g, β times the inverse norms of k, and these norms, for 16 rows from ``ROW`` on."""
    rows = ROW + tl.arange(0, 16)
    norm = tl.load(k_norm_ptr + rows, mask=rows < count, other=0.0)
    beta = tl.load(factor_ptr + rows, mask=rows < count, other=0.0)
    return tl.load(total_ptr + tl.minimum(rows, count - 1)), beta * norm, norm


@triton.jit
def _scaled(products, left, right, keep):
    """A block of M, given k_i·k_j and the factors of its rows and columns."""
    return products * _decays(left[0], right[0], keep) * left[1][:, None] * right[2][None, :]


@triton.jit
def _inverted(products, factors, PRECISION: tl.constexpr):
    """(I + M)⁻¹ for a block on the diagonal of M, by those of 2, 4 and 8 on its own diagonal in turn."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    m = _scaled(products, factors, factors, row > column)
    a = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -m, 0.0))
    for i in tl.static_range(1, 4):
        apart = (row >> i != column >> i) & (row >> (i + 1) == column >> (i + 1))
        a -= _times(a, _times(tl.where(apart, m, 0.0), a, PRECISION), PRECISION)
    return a


@triton.jit
def _store_block(a_ptr, x, count, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    rows, columns = ROW + tl.arange(0, 16), COLUMN + tl.arange(0, 16)
    at = a_ptr + rows[:, None] * C + columns[None, :]
    tl.store(at, x.to(a_ptr.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _inverse_kernel(
    k_ptr, total_ptr, factor_ptr, k_norm_ptr, cu_ptr, a_ptr, tokens, documents, k_t, k_h, GROUP: tl.constexpr,
    C: tl.constexpr, DK: tl.constexpr, BLOCK: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A of one chunk and value head, in blocks of 16 x 16: those on the diagonal, then by products those below them."""
    head = tl.program_id(1).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    count, index = (end - first).to(tl.int32), tl.arange(0, 16)
    k_ptr += head // GROUP * k_h + first * k_t
    k_norm_ptr += head // GROUP * tokens + first
    total_ptr += head * tokens + first
    factor_ptr += 4 * head * tokens + first
    a_ptr += (head * tokens + first) * C
    none = tl.zeros([16, 16], tl.float32)
    m00, m11, m22, m33, m10, m20, m21, m30, m31, m32 = none, none, none, none, none, none, none, none, none, none
    for start in tl.range(0, DK, BLOCK, num_stages=STAGES):
        k0 = _load_rows(k_ptr + start, index, k_t, count, DK - start, BLOCK)
        k1 = _load_rows(k_ptr + start, 16 + index, k_t, count, DK - start, BLOCK)
        k2 = _load_rows(k_ptr + start, 32 + index, k_t, count, DK - start, BLOCK)
        k3 = _load_rows(k_ptr + start, 48 + index, k_t, count, DK - start, BLOCK)
        m00, m11 = _add_dots(m00, k0, k0, PRECISION), _add_dots(m11, k1, k1, PRECISION)
        m22, m33 = _add_dots(m22, k2, k2, PRECISION), _add_dots(m33, k3, k3, PRECISION)
        m10, m20 = _add_dots(m10, k1, k0, PRECISION), _add_dots(m20, k2, k0, PRECISION)
        m21, m30 = _add_dots(m21, k2, k1, PRECISION), _add_dots(m30, k3, k0, PRECISION)
        m31, m32 = _add_dots(m31, k3, k1, PRECISION), _add_dots(m32, k3, k2, PRECISION)
    f0 = _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, 0)
    f1 = _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, 16)
    f2 = _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, 32)
    f3 = _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, 48)
    a00, a11 = _inverted(m00, f0, PRECISION), _inverted(m11, f1, PRECISION)
    a22, a33 = _inverted(m22, f2, PRECISION), _inverted(m33, f3, PRECISION)
    m10, m20, m21 = _scaled(m10, f1, f0, True), _scaled(m20, f2, f0, True), _scaled(m21, f2, f1, True)
    m30, m31, m32 = _scaled(m30, f3, f0, True), _scaled(m31, f3, f1, True), _scaled(m32, f3, f2, True)
    # Each block is stored as soon as no product needs it any more, which frees its registers.
    _store_block(a_ptr, none, count, 0, 16, C)
    _store_block(a_ptr, none, count, 0, 32, C)
    _store_block(a_ptr, none, count, 0, 48, C)
    _store_block(a_ptr, none, count, 16, 32, C)
    _store_block(a_ptr, none, count, 16, 48, C)
    _store_block(a_ptr, none, count, 32, 48, C)
    a10 = -_times(a11, _times(m10, a00, PRECISION), PRECISION)
    _store_block(a_ptr, a10, count, 16, 0, C)
    a20 = -_times(a22, _times(m20, a00, PRECISION) + _times(m21, a10, PRECISION), PRECISION)
    _store_block(a_ptr, a20, count, 32, 0, C)
    a30 = -_times(
        a33, _times(m30, a00, PRECISION) + _times(m31, a10, PRECISION) + _times(m32, a20, PRECISION), PRECISION
    )
    _store_block(a_ptr, a30, count, 48, 0, C)
    _store_block(a_ptr, a00, count, 0, 0, C)
    a21 = -_times(a22, _times(m21, a11, PRECISION), PRECISION)
    _store_block(a_ptr, a21, count, 32, 16, C)
    a31 = -_times(a33, _times(m31, a11, PRECISION) + _times(m32, a21, PRECISION), PRECISION)
    _store_block(a_ptr, a31, count, 48, 16, C)
    _store_block(a_ptr, a11, count, 16, 16, C)
    a32 = -_times(a33, _times(m32, a22, PRECISION), PRECISION)
    _store_block(a_ptr, a32, count, 48, 32, C)
    _store_block(a_ptr, a22, count, 32, 32, C)
    _store_block(a_ptr, a33, count, 48, 48, C)


@triton.jit
def _columns(program, Hv: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr):
    """What a program of a scan owns: document, value head, key head, and columns of the state."""
    BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    head = (program // BLOCKS % Hv).to(tl.int64)
    columns = program % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    return (program // (BLOCKS * Hv)).to(tl.int64), head, head // GROUP, columns


@triton.jit
def _scan(
    program, q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, out_ptr, final_ptr,
    states_ptr, d_ptr, tokens, q_t, q_h, k_t, k_h, v_t, v_h, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_OUT: tl.constexpr, STORE_STATES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and final state, or with STORE_STATES the state before each chunk and D, which the backward needs.

    A GPU has few programs for each of its processors here, so a step has to be short: what is the same for all columns
    comes from the kernels before, and offsets are 32-bit numbers within a chunk.
    """
    n, head, key_head, v_columns = _columns(program, Hv, GROUP, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_v = (v_columns < DV)[None, :]
    inside_k = (k_columns < DK)[None, :]
    inside_state = (k_columns < DK)[:, None] & inside_v
    at_state = k_columns[:, None] * DV + v_columns[None, :]
    at_q, at_k = index[:, None] * q_t + k_columns[None, :], index[:, None] * k_t + k_columns[None, :]
    at_v, at_out = index[:, None] * v_t + v_columns[None, :], index[:, None] * (Hv * DV) + v_columns[None, :]
    at_d, at_a = index[:, None] * DV + v_columns[None, :], index[:, None] * C + index[None, :]
    q_ptr += key_head * q_h + start * q_t
    k_ptr += key_head * k_h + start * k_t
    v_ptr += head * v_h + start * v_t
    out_ptr += (start * Hv + head) * DV
    d_ptr += (head * tokens + start) * DV
    a_ptr += (head * tokens + start) * C
    p_ptr += (head * tokens + start) * C
    total_ptr += head * tokens + start
    factor_ptr += 4 * head * tokens + start
    states_ptr += ((start // C + n) * Hv + head) * (DK * DV)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + (n * Hv + head) * (DK * DV) + at_state, mask=inside_state, other=0.0)
    length = (end - start).to(tl.int32)
    for number in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        left = length - number * C
        inside = index < left
        rows = inside[:, None]
        k = tl.load(k_ptr + at_k, mask=rows & inside_k, other=0.0)
        a = tl.load(a_ptr + at_a, mask=rows, other=0.0)
        v = tl.load(v_ptr + at_v, mask=rows & inside_v, other=0.0)
        beta = tl.load(factor_ptr + index, mask=inside, other=0.0)
        taken = tl.load(factor_ptr + tokens + index, mask=inside, other=0.0)
        kept = tl.load(factor_ptr + 2 * tokens + index, mask=inside, other=0.0)
        whole = tl.load(total_ptr + tl.minimum(left, C) - 1)
        rounded = state.to(dtype)
        seen = tl.dot(k, rounded, input_precision=PRECISION)
        x = beta[:, None] * v.to(tl.float32) - taken[:, None] * seen
        d = tl.dot(a, x.to(dtype), input_precision=PRECISION)
        if STORE_OUT:
            q = tl.load(q_ptr + at_q, mask=rows & inside_k, other=0.0)
            p = tl.load(p_ptr + at_a, mask=rows, other=0.0)
            q_factor = tl.load(factor_ptr + 3 * tokens + index, mask=inside, other=0.0)
            out = tl.dot(q, rounded, input_precision=PRECISION) * q_factor[:, None]
            out = tl.dot(p, d.to(dtype), out, input_precision=PRECISION)
            tl.store(out_ptr + at_out, out.to(dtype), mask=rows & inside_v)
        if STORE_STATES:
            tl.store(states_ptr + at_state, rounded, mask=inside_state)
            tl.store(d_ptr + at_d, d.to(dtype), mask=rows & inside_v)
        update = (d * kept[:, None]).to(dtype)
        state = tl.dot(tl.trans(k), update, state * tl.exp(whole), input_precision=PRECISION)
        q_ptr += C * q_t
        k_ptr += C * k_t
        v_ptr += C * v_t
        out_ptr += C * Hv * DV
        d_ptr += C * DV
        a_ptr += C * C
        p_ptr += C * C
        total_ptr += C
        factor_ptr += C
        states_ptr += Hv * DK * DV
    if not STORE_STATES:
        tl.store(final_ptr + (n * Hv + head) * (DK * DV) + at_state, state, mask=inside_state)


@triton.jit
def _scan_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, out_ptr, final_ptr, tokens, q_t, q_h,
    k_t, k_h, v_t, v_h, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_OUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    _scan(
        tl.program_id(0), q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, out_ptr,
        final_ptr, out_ptr, out_ptr, tokens, q_t, q_h, k_t, k_h, v_t, v_h, Hv, GROUP, C, DK, BLOCK_K, DV, BLOCK_V,
        HAS_INITIAL, STORE_OUT, False, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def _scan_back(
    program, q_ptr, k_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, d_out_ptr, d_final_ptr, d_states_ptr, dx_ptr,
    d_initial_ptr, tokens, q_t, q_h, k_t, k_h, d_out_t, d_out_h, Hv: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_FINAL: tl.constexpr, STORE_INITIAL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dX, the gradient of the state after each chunk, and that of the initial state; steps as in `_scan`."""
    n, head, key_head, v_columns = _columns(program, Hv, GROUP, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_v = (v_columns < DV)[None, :]
    inside_k = (k_columns < DK)[None, :]
    inside_state = (k_columns < DK)[:, None] & inside_v
    at_state = k_columns[:, None] * DV + v_columns[None, :]
    at_q, at_k = index[:, None] * q_t + k_columns[None, :], index[:, None] * k_t + k_columns[None, :]
    at_d_out, at_dx = index[:, None] * d_out_t + v_columns[None, :], index[:, None] * DV + v_columns[None, :]
    at_a = index[:, None] * C + index[None, :]
    length = (end - start).to(tl.int32)
    chunks = tl.cdiv(length, C)
    last = start + (chunks - 1) * C
    q_ptr += key_head * q_h + last * q_t
    k_ptr += key_head * k_h + last * k_t
    d_out_ptr += head * d_out_h + last * d_out_t
    dx_ptr += (head * tokens + last) * DV
    a_ptr += (head * tokens + last) * C
    p_ptr += (head * tokens + last) * C
    total_ptr += head * tokens + last
    factor_ptr += 4 * head * tokens + last
    d_states_ptr += ((start // C + n + chunks - 1) * Hv + head) * (DK * DV)
    d_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_FINAL:
        d_state = tl.load(d_final_ptr + (n * Hv + head) * (DK * DV) + at_state, mask=inside_state, other=0.0)
    for step in tl.range(0, chunks, num_stages=STAGES):
        left = length - (chunks - 1 - step) * C
        inside = index < left
        rows = inside[:, None]
        k = tl.load(k_ptr + at_k, mask=rows & inside_k, other=0.0)
        a = tl.load(a_ptr + at_a, mask=rows, other=0.0)
        taken = tl.load(factor_ptr + tokens + index, mask=inside, other=0.0)
        kept = tl.load(factor_ptr + 2 * tokens + index, mask=inside, other=0.0)
        whole = tl.load(total_ptr + tl.minimum(left, C) - 1)
        rounded = d_state.to(dtype)
        tl.store(d_states_ptr + at_state, rounded, mask=inside_state)
        dd = tl.dot(k, rounded, input_precision=PRECISION) * kept[:, None]
        d_state *= tl.exp(whole)
        if HAS_OUT:
            q = tl.load(q_ptr + at_q, mask=rows & inside_k, other=0.0)
            p = tl.load(p_ptr + at_a, mask=rows, other=0.0)
            q_factor = tl.load(factor_ptr + 3 * tokens + index, mask=inside, other=0.0)
            d_out = tl.load(d_out_ptr + at_d_out, mask=rows & inside_v, other=0.0)
            dd = tl.dot(tl.trans(p), d_out, dd, input_precision=PRECISION)
            scaled = d_out.to(tl.float32) * q_factor[:, None]
            d_state = tl.dot(tl.trans(q), scaled.to(dtype), d_state, input_precision=PRECISION)
        dx = tl.dot(tl.trans(a), dd.to(dtype), input_precision=PRECISION)
        tl.store(dx_ptr + at_dx, dx.to(dtype), mask=rows & inside_v)
        gone = (-dx * taken[:, None]).to(dtype)
        d_state = tl.dot(tl.trans(k), gone, d_state, input_precision=PRECISION)
        q_ptr -= C * q_t
        k_ptr -= C * k_t
        d_out_ptr -= C * d_out_t
        dx_ptr -= C * DV
        a_ptr -= C * C
        p_ptr -= C * C
        total_ptr -= C
        factor_ptr -= C
        d_states_ptr -= Hv * DK * DV
    if STORE_INITIAL:
        tl.store(d_initial_ptr + (n * Hv + head) * (DK * DV) + at_state, d_state, mask=inside_state)


@triton.jit
def _scans_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, states_ptr, d_ptr, d_out_ptr,
    d_final_ptr, d_states_ptr, dx_ptr, d_initial_ptr, tokens, q_t, q_h, k_t, k_h, v_t, v_h, d_out_t, d_out_h,
    Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_FINAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both scans of the backward, which do not depend on each other: half of the programs for one, half for the other.

    The longer one comes first. On an H200 one launch takes 0.8 of the time of one after the other.
    """
    programs = tl.num_programs(0) // 2
    program = tl.program_id(0)
    if program < programs:
        _scan_back(
            program, q_ptr, k_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, d_out_ptr, d_final_ptr, d_states_ptr,
            dx_ptr, d_initial_ptr, tokens, q_t, q_h, k_t, k_h, d_out_t, d_out_h, Hv, GROUP, C, DK, BLOCK_K, DV,
            BLOCK_V, HAS_OUT, HAS_FINAL, HAS_INITIAL, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _scan(
            program - programs, q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, d_ptr,
            initial_ptr, states_ptr, d_ptr, tokens, q_t, q_h, k_t, k_h, v_t, v_h, Hv, GROUP, C, DK, BLOCK_K, DV,
            BLOCK_V, HAS_INITIAL, False, True, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _tile(tensor, i, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A part of matrix i of a tensor of matrices, of which a descriptor is given; 0 outside of the matrix."""
    return tensor.load([i, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def _pair_kernel(
    d, d_out, dx, v, q_ptr, k_ptr, cu_ptr, total_ptr, factor_ptr, q_norm_ptr, k_norm_ptr, dv_ptr, for_q_ptr, for_k_ptr,
    d_total_ptr, d_beta_ptr, tokens, documents, q_t, q_h, k_t, k_h, scale, Hv: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_OUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The matrices between the tokens of one chunk and key head in the backward, and dV.

    They are E ∘ dO Dᵀ and −β · E ∘ dX Dᵀ, summed over the value heads, with the inverse norms of both sides; and the
    parts of dβ and of the gradients of the running sums of g that come from them. Tiles are loaded by descriptors,
    which know no end of a document: rows that follow it are dropped from the products.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    key_head, rows, at = tl.program_id(1).to(tl.int64), tl.arange(0, C), first.to(tl.int32)
    count = end.to(tl.int32) - at
    inside, square = rows < count, rows[:, None] * C + rows[None, :]
    keep, strict = (rows[:, None] >= rows[None, :]) & inside[:, None], rows[:, None] > rows[None, :]
    k = _load_rows(k_ptr + key_head * k_h + first * k_t, rows, k_t, count, DK, BLOCK_K)
    k_norm = tl.load(k_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0)
    at_pairs = (key_head * tokens + first) * C
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    kk = tl.where(strict, kk * (k_norm[:, None] * k_norm[None, :]), 0.0)
    pairs = tl.zeros([C, C], tl.float32)
    for n in range(GROUP):
        head = key_head * GROUP + n
        matrix, at_head = head.to(tl.int32), head * tokens + first
        total = tl.load(total_ptr + at_head + rows, mask=inside, other=0.0)
        beta = tl.load(factor_ptr + 3 * head * tokens + at_head + rows, mask=inside, other=0.0)
        product, along = tl.zeros_like(kk), tl.zeros([C], tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
            written, x = _tile(d, matrix, at, start, C, BLOCK_V), _tile(dx, matrix, at, start, C, BLOCK_V)
            product = tl.dot(x, tl.trans(written), product, input_precision=PRECISION)
            wide, columns = x.to(tl.float32), start + tl.arange(0, BLOCK_V)[None, :]
            along += tl.sum(wide * _tile(v, matrix, at, start, C, BLOCK_V).to(tl.float32), 1)
            at_dv = dv_ptr + (first * Hv + head) * DV + (rows[:, None] * (Hv * DV) + columns)
            tl.store(at_dv, (wide * beta[:, None]).to(k.dtype), mask=inside[:, None] & (columns < DV))
        product = tl.where(keep, product * _decays(total, total, keep), 0.0)
        by_decay = product * kk
        by_row = tl.sum(by_decay, 1)
        tl.store(d_beta_ptr + at_head + rows, along - by_row, mask=inside)
        pairs -= product * beta[:, None]
        by_decay *= beta[:, None]
        tl.store(d_total_ptr + at_head + rows, tl.sum(by_decay, 0) - by_row * beta, mask=inside)
    pairs = tl.where(strict, pairs * (k_norm[:, None] * k_norm[None, :]), 0.0)
    tl.store(for_k_ptr + at_pairs + square, pairs.to(k.dtype), mask=inside[:, None])
    if HAS_OUT:
        tl.debug_barrier()  # the sums are read again below, by other threads
        k = _load_rows(k_ptr + key_head * k_h + first * k_t, rows, k_t, count, DK, BLOCK_K)
        q = _load_rows(q_ptr + key_head * q_h + first * q_t, rows, q_t, count, DK, BLOCK_K)
        q_norm = tl.load(q_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0) * scale
        k_norm = tl.load(k_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (q_norm[:, None] * k_norm[None, :])
        pairs = tl.zeros([C, C], tl.float32)
        for n in range(GROUP):
            head = key_head * GROUP + n
            matrix, at_head = head.to(tl.int32), head * tokens + first
            product = tl.zeros_like(qk)
            for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
                written, out = _tile(d, matrix, at, start, C, BLOCK_V), _tile(d_out, matrix, at, start, C, BLOCK_V)
                product = tl.dot(out, tl.trans(written), product, input_precision=PRECISION)
            total = tl.load(total_ptr + at_head + rows, mask=inside, other=0.0)
            product = tl.where(keep, product * _decays(total, total, keep), 0.0)
            pairs += product
            product *= qk
            d_total = tl.load(d_total_ptr + at_head + rows, mask=inside, other=0.0)
            tl.store(d_total_ptr + at_head + rows, d_total + tl.sum(product, 1) - tl.sum(product, 0), mask=inside)
        pairs *= q_norm[:, None] * k_norm[None, :]
        tl.store(for_q_ptr + at_pairs + square, pairs.to(k.dtype), mask=inside[:, None])


@triton.jit
def _through_state(
    x, states, head, row, slot, factor, y, key_head, inside, C: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """factor · x Sᵀ for a chunk of x, and the products of its rows with those of y."""
    product = tl.zeros([C, BLOCK_K], tl.float32)
    for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
        state = tl.trans(_tile(states, slot, 0, start, BLOCK_K, BLOCK_V))
        product = tl.dot(_tile(x, head, row, start, C, BLOCK_V), state, product, input_precision=PRECISION)
    product *= factor[:, None]
    along = tl.sum(product * _tile(y, key_head, row, 0, C, BLOCK_K).to(tl.float32), 1)
    return product, tl.where(inside, along, 0.0)


@triton.jit
def _add_pairs(sum, pairs, x, once, PRECISION: tl.constexpr):
    """``sum`` + pairs @ x. In a loop of its own, or Triton gives the product to half of the warps."""
    for _ in tl.range(0, once, num_stages=1):
        sum = tl.dot(pairs, x, sum, input_precision=PRECISION)
    return sum


@triton.jit
def _store_gradient(
    ptr, dx, x, norm, inside, row_size: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The gradient of x, q or k, given that of x · norm with the inverse L2 norms of the rows, times norm."""
    if NORMALIZE:
        unit = x.to(tl.float32) * norm[:, None]
        dx -= unit * tl.sum(dx * unit, 1)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    at = ptr + tl.arange(0, C)[:, None] * row_size + columns
    tl.store(at, dx.to(ptr.dtype.element_ty), mask=inside[:, None] & (columns < DK))


@triton.jit
def _state_kernel(
    d, d_out, dx, states, d_states, queries, keys, q_ptr, k_ptr, cu_ptr, total_ptr, factor_ptr, q_norm_ptr, k_norm_ptr,
    for_q_ptr, for_k_ptr, d_total_ptr, d_beta_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, tokens, documents, q_t, q_h, k_t,
    k_h, scale, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_OUT: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk, dβ and dg of one chunk and key head: what goes through the states, and what `_pair_kernel` has left.

    Where rows of q and k are multiplied with those of a product, element by element, they are loaded by descriptors:
    for loads by pointers, Triton changed the layout of the whole product before its sums.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    key_head, rows, at = tl.program_id(1).to(tl.int64), tl.arange(0, C), first.to(tl.int32)
    slot, count = tl.program_id(0) * Hv, end.to(tl.int32) - at
    inside, once, row_size = rows < count, tl.minimum(count, 1), Hv // GROUP * DK
    square, both = rows[:, None] * C + rows[None, :], inside[:, None] & inside[None, :]
    at_x, at_rows, key_matrix = first * row_size + key_head * DK, key_head * tokens + first, key_head.to(tl.int32)
    q_ptr += key_head * q_h + first * q_t
    k_ptr += key_head * k_h + first * k_t
    if HAS_OUT:
        q_norm = tl.load(q_norm_ptr + at_rows + rows, mask=inside, other=0.0)
        dq = tl.zeros([C, BLOCK_K], tl.float32)
        for n in range(GROUP):
            head = key_head * GROUP + n
            at_head = head * tokens + first
            total = tl.load(total_ptr + at_head + rows, mask=inside, other=0.0)
            read, along = _through_state(
                d_out, states, head.to(tl.int32), at, slot + head.to(tl.int32), tl.exp(total) * q_norm * scale, queries,
                key_matrix, inside, C, BLOCK_K, DV, BLOCK_V, PRECISION, STAGES,
            )  # fmt: skip
            dq += read
            along += tl.load(d_total_ptr + at_head + rows, mask=inside, other=0.0)
            tl.store(d_total_ptr + at_head + rows, along, mask=inside)
        pairs = tl.load(for_q_ptr + at_rows * C + square, mask=both, other=0.0)
        k = _load_rows(k_ptr, rows, k_t, count, DK, BLOCK_K)
        dq = _add_pairs(dq, pairs, k, once, PRECISION)
        q = _tile(queries, key_matrix, at, 0, C, BLOCK_K)
        _store_gradient(dq_ptr + at_x, dq, q, q_norm, inside, Hv // GROUP * DK, DK, C, BLOCK_K, NORMALIZE)
        tl.debug_barrier()  # the sums are read again below, by other threads
    k_norm = tl.load(k_norm_ptr + at_rows + rows, mask=inside, other=0.0)
    dk = tl.zeros([C, BLOCK_K], tl.float32)
    for n in range(GROUP):
        head = key_head * GROUP + n
        at_head, at_out = head * tokens + first, first * Hv + head + rows * Hv
        total = tl.load(total_ptr + at_head + rows, mask=inside, other=0.0)
        beta = tl.load(factor_ptr + 3 * head * tokens + at_head + rows, mask=inside, other=0.0)
        whole = tl.load(total_ptr + at_head + count - 1)
        read, along = _through_state(
            dx, states, head.to(tl.int32), at, slot + head.to(tl.int32), tl.exp(total) * k_norm, keys,
            key_matrix, inside, C, BLOCK_K, DV, BLOCK_V, PRECISION, STAGES,
        )  # fmt: skip
        dk -= read * beta[:, None]
        d_beta = tl.load(d_beta_ptr + at_head + rows, mask=inside, other=0.0) - along
        tl.store(dbeta_ptr + at_out, d_beta, mask=inside)
        d_total = tl.load(d_total_ptr + at_head + rows, mask=inside, other=0.0) - along * beta
        written, product = tl.zeros([C, BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
            d_state = _tile(d_states, slot + head.to(tl.int32), 0, start, BLOCK_K, BLOCK_V)
            state = _tile(states, slot + head.to(tl.int32), 0, start, BLOCK_K, BLOCK_V)
            x = _tile(d, head.to(tl.int32), at, start, C, BLOCK_V)
            written = tl.dot(x, tl.trans(d_state), written, input_precision=PRECISION)
            product += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
        written *= (tl.exp(tl.where(inside, whole - total, float("-inf"))) * k_norm)[:, None]
        dk += written
        y = _tile(keys, key_matrix, at, 0, C, BLOCK_K)
        along = tl.where(inside, tl.sum(written * y.to(tl.float32), 1), 0.0)
        dg = tl.cumsum(d_total - along, 0, reverse=True) + (tl.sum(product, 0) * tl.exp(whole) + tl.sum(along, 0))
        tl.store(dg_ptr + at_out, dg, mask=inside)
    if HAS_OUT:
        pairs = tl.load(for_q_ptr + at_rows * C + square, mask=both, other=0.0)
        q = _load_rows(q_ptr, rows, q_t, count, DK, BLOCK_K)
        dk = _add_pairs(dk, tl.trans(pairs), q, once, PRECISION)
    k = _load_rows(k_ptr, rows, k_t, count, DK, BLOCK_K)
    pairs = tl.load(for_k_ptr + at_rows * C + square, mask=both, other=0.0)
    dk = _add_pairs(dk, pairs, k, once, PRECISION)
    dk = _add_pairs(dk, tl.trans(pairs), k, once, PRECISION)
    k = _tile(keys, key_matrix, at, 0, C, BLOCK_K)
    _store_gradient(dk_ptr + at_x, dk, k, k_norm, inside, Hv // GROUP * DK, DK, C, BLOCK_K, NORMALIZE)


@triton.jit
def _step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, initial_ptr, out_ptr, final_ptr, T, q_t, q_h, k_t, k_h, v_t, v_h,
    g_t, g_h, beta_t, beta_h, scale, Hv: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The recurrence, token by token."""
    n, head, key_head, v_columns = _columns(tl.program_id(0), Hv, GROUP, DV, BLOCK_V)
    k_columns = tl.arange(0, BLOCK_K)
    inside_k, inside_v = k_columns < DK, v_columns < DV
    inside_state = inside_k[:, None] & inside_v[None, :]
    at_state = (n * Hv + head) * (DK * DV) + k_columns[:, None] * DV + v_columns[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + at_state, mask=inside_state, other=0.0)
    for row in range(n * T, (n + 1) * T):
        q = tl.load(q_ptr + row * q_t + key_head * q_h + k_columns, mask=inside_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + row * k_t + key_head * k_h + k_columns, mask=inside_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * v_t + head * v_h + v_columns, mask=inside_v, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_t + head * g_h).to(tl.float32)
        beta = tl.load(beta_ptr + row * beta_t + head * beta_h).to(tl.float32)
        if NORMALIZE:
            q = q / tl.sqrt(tl.sum(q * q, 0) + EPS)
            k = k / tl.sqrt(tl.sum(k * k, 0) + EPS)
        state *= tl.exp(g)
        d = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * d[None, :]
        out = tl.sum(state * (q * scale)[:, None], 0)
        tl.store(out_ptr + (row * Hv + head) * DV + v_columns, out.to(out_ptr.dtype.element_ty), mask=inside_v)
    tl.store(final_ptr + at_state, state, mask=inside_state)


class _Sizes:
    """Sizes and constants that the kernels of one call share."""

    def __init__(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
        (self.B, self.T, self.Hk, self.Dk), (self.Hv, self.Dv) = k.shape, v.shape[2:]
        self.tokens = self.B * self.T
        self.cu = bounds(k, cu_seqlens)
        self.documents = len(self.cu) - 1
        self.slots = slots(self.tokens, self.documents, CHUNK)
        block_k = KEY_COLUMNS if self.Dk <= KEY_COLUMNS else 2 * KEY_COLUMNS
        block_v = max(triton.next_power_of_2(self.Dv), 16)
        columns = min(block_v, SCAN_COLUMNS)
        self.shape = {"GROUP": self.Hv // self.Hk, "C": CHUNK, "DK": self.Dk, "BLOCK_K": block_k}
        # Three products of TF32 are as good as one of fp32, and tensor cores have them. Three of bfloat16 take half of
        # the instructions, with errors of 2⁻¹⁶, far below those of an inverse that is stored in half precision, but the
        # interpreter of Triton does not know them.
        is_amd, in_half = torch.version.hip is not None, k.element_size() == 2 and not INTERPRET
        self.precision = {"PRECISION": "ieee" if is_amd else "tf32x3"}
        self.inverse_precision = "ieee" if is_amd else "bf16x3" if in_half else "tf32x3"
        self.chunked = {"DOCUMENTS": triton.next_power_of_2(self.documents)}
        self.scan_programs = self.documents * self.Hv * triton.cdiv(self.Dv, columns)
        self.columns, self.block_v = columns, block_v

    def scan(self, k: Tensor, stages: int) -> dict[str, Any]:
        """Constants of the kernels that go through the chunks."""
        # A chunk of q, k, A, P and v or dO, as many times as there are stages.
        stage = CHUNK * (2 * self.shape["BLOCK_K"] + 2 * CHUNK + self.columns) * k.element_size()
        return self.shape | self.precision | {
            "Hv": self.Hv, "DV": self.Dv, "BLOCK_V": self.columns, "STAGES": fitting_stages(k, stages, stage),
            "num_warps": SCAN_WARPS,
        }  # fmt: skip


def _prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, sizes: _Sizes, scale: float, normalize: bool, need_p: bool,
    inverse: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A, unless it is given; P, running sums of g, factors of rows, and inverse norms of q and k; the heads first."""
    p = k.new_empty(sizes.Hv, sizes.tokens, CHUNK)
    total = k.new_empty(sizes.Hv, sizes.tokens, dtype=torch.float32)
    q_norm, k_norm = (total.new_empty(sizes.Hk, sizes.tokens) for _ in range(2))
    factors = total.new_empty(sizes.Hv, 4, sizes.tokens)
    counts = sizes.tokens, sizes.documents
    _similarity_kernel[(sizes.slots, sizes.Hk)](
        q, k, g, beta, sizes.cu, p, total, q_norm, k_norm, factors, *counts, *q.stride()[:2], *k.stride()[:2],
        *g.stride(), *beta.stride(), scale, NORMALIZE=normalize, EPS=L2_EPS, NEED_P=need_p,
        num_warps=SIMILARITY_WARPS, **sizes.shape, **sizes.precision, **sizes.chunked,
    )  # fmt: skip
    if inverse is None:
        inverse = torch.empty_like(p)
        _inverse_kernel[(sizes.slots, sizes.Hv)](
            k, total, factors, k_norm, sizes.cu, inverse, *counts, *k.stride()[:2], GROUP=sizes.Hv // sizes.Hk,
            C=CHUNK, DK=sizes.Dk, BLOCK=KEY_COLUMNS, PRECISION=sizes.inverse_precision, STAGES=INVERSE_STAGES,
            num_warps=INVERSE_WARPS, **sizes.chunked,
        )  # fmt: skip
    return inverse, p, total, factors, q_norm, k_norm


def _matrices(x: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of a tensor of matrices, of which programs load ``rows`` x ``columns`` at a time."""
    if x.data_ptr() % 16 or any(not size or size * x.itemsize % 16 for size in x.stride()[:2]):
        x = x.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, columns])


LIBRARY.define(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens,"
    " float scale, bool normalize, bool need_out) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "gated_delta_rule_backward(Tensor? d_out, Tensor? d_final, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,"
    " Tensor? initial_state, Tensor? cu_seqlens, Tensor inverse, float scale, bool normalize)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "gated_delta_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, float scale,"
    " bool normalize) -> (Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "gated_delta_rule", "CompositeExplicitAutograd")
def _gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, normalize: bool, need_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = _Sizes(k, v, cu_seqlens)
    out, final = _outputs(k, v, cu_seqlens, need_out)
    if not final.numel() or not sizes.tokens:
        if initial_state is not None:
            final.copy_(initial_state)
        return out, final if initial_state is not None else final.zero_(), _inverse_like(k, v)
    q, k, v, g, beta = map(flat, (q, k, v, g, beta))
    initial = final if initial_state is None else initial_state.contiguous()
    with on_device_of(k):
        made = _prepare(q, k, g, beta, sizes, scale, normalize, need_out)[:4]
        # A pointer argument that the constants switch off still has to be a tensor.
        _scan_kernel[(sizes.scan_programs,)](
            q, k, v, sizes.cu, *made, initial, out, final, sizes.tokens, *q.stride()[:2], *k.stride()[:2],
            *v.stride()[:2], HAS_INITIAL=initial_state is not None, STORE_OUT=need_out, **sizes.scan(k, SCAN_STAGES),
        )  # fmt: skip
    return out, final, made[0]


@torch.library.impl(LIBRARY, "gated_delta_rule_backward", "CompositeExplicitAutograd")
def _gated_delta_rule_backward(
    d_out: Tensor | None, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, inverse: Tensor, scale: float, normalize: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    sizes = _Sizes(k, v, cu_seqlens)
    grads = dq, dk, dv, dg, dbeta, d_initial = _gradients_like(d_out, q, k, v, g, beta, initial_state)
    if not k.numel() or not v.numel():
        if d_final is not None and initial_state is not None:
            d_initial.copy_(d_final)
        return grads
    has_out, has_final = d_out is not None, d_final is not None
    q, k, v, g, beta = map(flat, (q, k, v, g, beta))
    d_out = v if d_out is None else flat(d_out)
    states, d_states = (k.new_empty(sizes.slots * sizes.Hv, sizes.Dk, sizes.Dv) for _ in range(2))
    d, dx = (k.new_empty(sizes.Hv, sizes.tokens, sizes.Dv) for _ in range(2))
    counts, strides = (sizes.tokens, sizes.documents), (*q.stride()[:2], *k.stride()[:2])
    with on_device_of(k):
        *made, q_norm, k_norm = _prepare(q, k, g, beta, sizes, scale, normalize, has_out, inverse)
        total, factors = made[2:]
        # A pointer argument that the constants switch off still has to be a tensor.
        _scans_kernel[(2 * sizes.scan_programs,)](
            q, k, v, sizes.cu, *made, total if initial_state is None else initial_state.contiguous(), states, d, d_out,
            total if d_final is None else d_final.contiguous(), d_states, dx, d_initial, sizes.tokens, *strides,
            *v.stride()[:2], *d_out.stride()[:2], HAS_INITIAL=initial_state is not None, HAS_OUT=has_out,
            HAS_FINAL=has_final, **sizes.scan(k, BACK_STAGES),
        )  # fmt: skip
        block_v = max(min(sizes.block_v // 2, GRADIENT_COLUMNS), 16)
        stage = (2 * sizes.shape["BLOCK_K"] + CHUNK) * block_v * k.element_size()  # S, dS and D
        common = sizes.shape | sizes.chunked | sizes.precision | {
            "Hv": sizes.Hv, "DV": sizes.Dv, "BLOCK_V": block_v, "HAS_OUT": has_out, "num_warps": GRADIENT_WARPS,
            "STAGES": fitting_stages(k, GRADIENT_STAGES, stage),
        }  # fmt: skip
        grid, inputs = (sizes.slots, sizes.Hk), (q, k, sizes.cu, total, factors, q_norm, k_norm)
        by_chunk = [_matrices(x, CHUNK, block_v) for x in (d, d_out.transpose(0, 1), dx)]
        by_state = [_matrices(x, sizes.shape["BLOCK_K"], block_v) for x in (states, d_states)]
        for_q, for_k = (k.new_empty(sizes.Hk, sizes.tokens, CHUNK) for _ in range(2))
        d_total, d_beta = (torch.empty_like(total) for _ in range(2))
        _pair_kernel[grid](
            *by_chunk, _matrices(v.transpose(0, 1), CHUNK, block_v), *inputs, dv, for_q, for_k, d_total, d_beta,
            *counts, *strides, scale, **common,
        )  # fmt: skip
        by_key = [_matrices(x.transpose(0, 1), CHUNK, sizes.shape["BLOCK_K"]) for x in (q, k)]
        _state_kernel[grid](
            *by_chunk, *by_state, *by_key, *inputs, for_q, for_k, d_total, d_beta, dq, dk, dg, dbeta, *counts, *strides,
            scale, NORMALIZE=normalize, **common,
        )  # fmt: skip
    return grads


@torch.library.impl(LIBRARY, "gated_delta_step", "CompositeExplicitAutograd")
def _gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = _Sizes(k, v, None)
    out, final = _outputs(k, v, None, True)
    if final.numel():
        q, k, v, g, beta = map(flat, (q, k, v, g, beta))
        columns = min(sizes.block_v, STEP_COLUMNS)
        with on_device_of(k):
            _step_kernel[(sizes.B * sizes.Hv * triton.cdiv(sizes.Dv, columns),)](
                q, k, v, g, beta, final if initial_state is None else initial_state.contiguous(), out, final, sizes.T,
                *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride(), *beta.stride(), scale,
                Hv=sizes.Hv, GROUP=sizes.Hv // sizes.Hk, DK=sizes.Dk, BLOCK_K=sizes.shape["BLOCK_K"], DV=sizes.Dv,
                BLOCK_V=columns, HAS_INITIAL=initial_state is not None, NORMALIZE=normalize, EPS=L2_EPS,
                num_warps=STEP_WARPS,
            )  # fmt: skip
    return out, final


def _outputs(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, need_out: bool) -> tuple[Tensor, Tensor]:
    documents = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = v.new_empty(v.shape if need_out else 0)
    return out, v.new_empty(documents, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


def _inverse_like(k: Tensor, v: Tensor) -> Tensor:
    return k.new_empty(v.shape[2], k.shape[0] * k.shape[1], CHUNK)


def _gradients_like(
    d_out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, ...]:
    """Empty gradients; without one of the output there is none of q."""
    d_initial = (
        g.new_empty(0, dtype=torch.float32)
        if initial_state is None
        else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    )
    return q.new_empty(0 if d_out is None else q.shape), *(x.new_empty(x.shape) for x in (k, v, g, beta)), d_initial


@torch.library.register_fake("liger_models::gated_delta_rule", lib=LIBRARY)
def _gated_delta_rule_fake(q, k, v, g, beta, initial_state, cu_seqlens, scale, normalize, need_out):
    return *_outputs(k, v, cu_seqlens, need_out), _inverse_like(k, v)


@torch.library.register_fake("liger_models::gated_delta_rule_backward", lib=LIBRARY)
def _gated_delta_rule_backward_fake(d_out, d_final, q, k, v, g, beta, initial_state, *_):
    return _gradients_like(d_out, q, k, v, g, beta, initial_state)


@torch.library.register_fake("liger_models::gated_delta_step", lib=LIBRARY)
def _gated_delta_step_fake(q, k, v, *_):
    return _outputs(k, v, None, True)


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.normalize, _ = inputs
    inverse = output[2]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(inverse)
    ctx.save_for_backward(*tensors, inverse)


def _backward(ctx, d_out, d_final, _):
    if d_out is None and d_final is None:
        return (None,) * 10
    saved = ctx.saved_tensors  # once: checkpointing recomputes what it unpacks
    grads = torch.ops.liger_models.gated_delta_rule_backward(d_out, d_final, *saved, ctx.scale, ctx.normalize)
    # The initial state is the sixth input; the output, the only thing that q affects, may have no gradient.
    given = d_out is not None, *(True,) * 4, saved[5] is not None
    return *(grad if use else None for grad, use in zip(grads, given, strict=True)), *(None,) * 4


register_autograd("gated_delta_rule", _backward, _setup)


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    check_floating(op, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    check(
        q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[:2] == v.shape[:2],
        f"{op}: q and k must be [B, T, Hk, Dk] and v [B, T, Hv, Dv], "
        f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}.",
    )
    (B, T, Hk, Dk), (Hv, Dv) = k.shape, v.shape[2:]
    check(Hv % Hk == 0, f"{op}: the number of value heads ({Hv}) must be a multiple of that of key heads ({Hk}).")
    check(
        g.shape == beta.shape == v.shape[:3],
        f"{op}: g and beta must be {list(v.shape[:3])}, got {list(g.shape)} and {list(beta.shape)}.",
    )
    documents = check_documents(op, cu_seqlens, B, T)
    if initial_state is not None and initial_state.dtype != torch.promote_types(v.dtype, torch.float32):
        raise TypeError(f"{op}: initial_state must be float32, got {initial_state.dtype}.")
    check(
        initial_state is None or initial_state.shape == (documents, Hv, Dk, Dv),
        f"{op}: initial_state must be {[documents, Hv, Dk, Dv]}, "
        f"got {list(initial_state.shape) if initial_state is not None else None}.",
    )


def is_fused(k: Tensor, v: Tensor) -> bool:
    """Whether kernels compute the rule: in half precision on an accelerator, where heads fit them.

    Heads have whole 16 bytes, and those of k at most 128 columns. In float32 the backward was wrong on a GPU, so plain
    torch runs there.
    """
    in_half = k.dtype != torch.float32 or k.device.type == "cpu"
    fits = k.shape[-1] <= 2 * KEY_COLUMNS and not any(x.shape[-1] * x.itemsize % 16 for x in (k, v))
    return use_triton(k) and in_half and fits


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule over whole sequences, packed documents, or the next tokens of a sequence.

    Args:
        q, k: [B, T, Hk, Dk], float32, float16 or bfloat16. Where `is_fused` is False, plain torch computes.
        v: [B, T, Hv, Dv], of the same dtype. Each key head serves Hv / Hk consecutive value heads.
        g: [B, T, Hv], the logarithm of the decay, at most 0; float32.
        beta: [B, T, Hv], how far a token's value replaces what the state has for its key.
        scale: multiplies the queries; None for Dk^-0.5.
        normalize: divide each query and key by its L2 norm, ``x · rsqrt(Σ x² + 1e-6)``.
        initial_state: [B, Hv, Dk, Dv] float32, the state before the first token, or one for each document; None for 0.
        return_state: also return the state after the last token.
        cu_seqlens: [documents + 1] int32 or int64, the bounds of packed documents, from 0 to T, for B = 1. No document
            sees another one.

    Returns:
        [B, T, Hv, Dv] in the dtype of v; with ``return_state`` also the final state, of the shape of ``initial_state``.

    Raises:
        ValueError: the shapes do not fit together.
        TypeError: a tensor has the wrong dtype.
    """
    _check("gated_delta_rule", q, k, v, g, beta, initial_state, cu_seqlens)
    T, Dk = k.shape[1], k.shape[3]
    scale = Dk**-0.5 if scale is None else float(scale)
    inputs = q, k, v, g, beta, initial_state
    if not is_fused(k, v):
        out, state = gated_delta_rule_reference(
            q, k, v, g, beta, scale=scale, normalize=normalize, initial_state=initial_state, cu_seqlens=cu_seqlens
        )
    elif cu_seqlens is None and T <= STEP_TOKENS and not _differentiable(*inputs):
        out, state = torch.ops.liger_models.gated_delta_step(*inputs, scale, normalize)
    else:
        out, state, _ = torch.ops.liger_models.gated_delta_rule(*inputs, cu_seqlens, scale, normalize, True)
    return (out, state) if return_state else out


def _differentiable(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def gated_delta_transition(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, normalize: bool = True, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What tokens do to the state, whatever it was before: ``state after = A @ state before + b``.

    Ranks that hold consecutive parts of a sequence exchange A and b, whose sizes do not depend on the number of tokens.
    `states_before` then has the initial state of each.

    Args:
        k, v, g, beta, normalize: as in `gated_delta_rule`.
        cu_seqlens: as there; the state before is that of the first document, and the state after that of the last.

    Returns:
        ``(A, b)``: [B, Hv, Dk, Dk] and [B, Hv, Dk, Dv], float32.

    Raises:
        ValueError, TypeError: as in `gated_delta_rule`.
    """
    _check("gated_delta_transition", k, k, v, g, beta, None, cu_seqlens)
    (B, T, _, Dk), Hv = k.shape, v.shape[2]
    identity = torch.eye(Dk, device=k.device, dtype=torch.promote_types(k.dtype, torch.float32))
    first = last = None
    if cu_seqlens is not None:  # empty documents, before the first token and after the last, have no part in this
        last = torch.searchsorted(cu_seqlens, torch.full([1], T, device=k.device)) - 1
        first = torch.searchsorted(cu_seqlens, torch.zeros(1, dtype=torch.int64, device=k.device), right=True) - 1
        identity = identity * (torch.arange(len(cu_seqlens) - 1, device=k.device) == first)[:, None, None, None]
        identity = identity.expand(-1, Hv, -1, -1)
    else:
        identity = identity.expand(B, Hv, Dk, Dk)

    def final_state(v: Tensor, initial_state: Tensor | None) -> Tensor:
        if is_fused(k, v):
            inputs = k, k, v, g, beta, initial_state, cu_seqlens
            state: Tensor = torch.ops.liger_models.gated_delta_rule(*inputs, 1.0, normalize, False)[1]
        else:
            _, state = gated_delta_rule_reference(
                k, k, v, g, beta, normalize=normalize, initial_state=initial_state, cu_seqlens=cu_seqlens
            )
        return state if last is None else state.index_select(0, last)

    none = v.new_zeros(1, 1, 1, Dk).expand(B, T, Hv, Dk)
    return final_state(none, identity), final_state(v, None)


def states_before(A: Tensor, b: Tensor, initial_state: Tensor | None = None) -> Tensor:
    """The state before each of several consecutive parts of a sequence.

    Args:
        A, b: [parts, B, Hv, Dk, Dk] and [parts, B, Hv, Dk, Dv], from `gated_delta_transition` of each part.
        initial_state: [B, Hv, Dk, Dv], the state before the first part; None for 0.

    Returns:
        [parts, B, Hv, Dk, Dv].
    """
    states = [torch.zeros_like(b[0]) if initial_state is None else initial_state]
    for part in range(len(A) - 1):
        states.append(A[part] @ states[-1] + b[part])
    return torch.stack(states)
