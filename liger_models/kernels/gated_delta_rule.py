"""Gated delta rule: a layer that is linear in the tokens, whose state is a matrix for each head.

Forward, for each value head and token in fp32, with S [Dk, Dv] the state, q̂ and k̂ the L2-normalised query and key::

    S ← exp(g) · S,   d = β · (v − k̂ᵀ S),   S ← S + k̂ dᵀ,   o = scale · q̂ᵀ S

The kernels take `CHUNK` tokens at a time. With S the state before the chunk, G_i = Σ_{j ≤ i} g_j within it, G its last
value, E_ij = exp(G_i − G_j) for i ≥ j and 0 otherwise, and rows of matrices for tokens::

    M_ij = β_i · E_ij · k̂_i·k̂_j  (i > j),   A = (I + M)⁻¹,   P_ij = scale · E_ij · q̂_i·k̂_j
    X = β · (V − e^{G_i} · K̂ S),   D = A X,   O = scale · e^{G_i} · Q̂ S + P D,   S ← e^G · S + (e^{G − G_i} · K̂)ᵀ D

P and, without its β, M of all chunks come from one kernel, with the factors of rows of Q, K and X, and A from a second
one. A third goes through the chunks in order, each program with some columns of S in registers. Backward, with dS the
gradient of the state after the chunk, in the opposite order::

    dD = Pᵀ dO + e^{G − G_i} · K̂ dS,   dX = Aᵀ dD,   dV = β · dX
    dS ← e^G · dS + (scale · e^{G_i} · Q̂)ᵀ dO − (β · e^{G_i} · K̂)ᵀ dX

The other gradients of a chunk need what its queries and keys read, and what its keys write, ∘ for element by element::

    dQ̂ = scale · (e^{G_i} · dO Sᵀ + (E ∘ dO Dᵀ) K̂)
    R = e^{G_i} · dX Sᵀ + (E ∘ dX Dᵀ) K̂    (i > j),   dβ_i = dX_i·V_i − k̂_i·R_i
    W = e^{G − G_i} · D dSᵀ − (E ∘ dV Dᵀ)ᵀ K̂    (i > j),   dK̂ = W − β · R + scale · (E ∘ dO Dᵀ)ᵀ Q̂

Where a key head serves several value heads, one program adds up what they give. Products are in the dtype of q, k and
v and are summed in fp32; the state, the decay and the inverse are in fp32. Saved: only the inputs. The backward
recomputes A, P, S and D.

A few tokens without gradients (decoding) have a kernel of their own, which follows the recurrence.

Source: https://arxiv.org/abs/2412.06464; the form in chunks: https://arxiv.org/abs/2406.06484.
"""

import torch
from torch import Tensor

from .checks import check, check_documents, check_floating
from .dispatch import LIBRARY, fitting_stages, on_device_of, tl, triton, use_triton
from .documents import bounds, flat, locate, slots

CHUNK = 64
"""Tokens that are computed together: four blocks of 16, whose inverses are found one by one."""

L2_EPS = 1e-6

STEP_TOKENS = 16
"""Most tokens for which the recurrence is followed token by token, where no gradient is needed."""

SIMILARITY_WARPS, INVERSE_WARPS = 8, 1
SCAN_WARPS, SCAN_STAGES, SCAN_COLUMNS = 4, 3, 32
"""In the kernels that go through the chunks in order, each program has this many columns of the state of one head. With
32, heads of 128 have four programs, which fill a GPU where there is one text with 32 heads."""

READ_WARPS, WRITE_WARPS = 4, 8
GRADIENT_STAGES, GRADIENT_COLUMNS = 2, 64
"""The kernels with the other gradients take this many columns of v at a time, and at most half of them: without loops
the tiles of all products would be in shared memory at once."""

KEY_COLUMNS = 64
"""Kernels take the columns of q and k in one or two parts of this size. Other sizes gave wrong results on Hopper with
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
    q_ptr, k_ptr, g_ptr, beta_ptr, cu_ptr, m_ptr, p_ptr, total_ptr, q_norm_ptr, k_norm_ptr, factor_ptr, tokens,
    documents, q_t, q_h, k_t, k_h, g_t, g_h, beta_t, beta_h, scale, GROUP: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
    NEED_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M without its β, P, the running sums of g and the inverse norms of one chunk and key head.

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
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (k_norm[:, None] * k_norm[None, :])
    kk = tl.where(index[:, None] > index[None, :], kk, 0.0)
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
        decays = _decays(total, total, index[:, None] >= index[None, :])
        at = (head * tokens + rows)[:, None] * C + index[None, :]
        tl.store(m_ptr + at, kk * decays, mask=inside[:, None])
        if NEED_P:
            tl.store(p_ptr + at, (qk * decays).to(p_ptr.dtype.element_ty), mask=inside[:, None])
            tl.store(at_factors + 3 * tokens, tl.exp(total) * q_norm * scale, mask=inside)


@triton.jit
def _row_solved(x, m_ptr, beta_ptr, i, C: tl.constexpr, BLOCK: tl.constexpr, beta_t, rows):
    """One step of the forward substitution that turns I into (I + βM)⁻¹, for a block of 16 x 16 on the diagonal."""
    index = tl.arange(0, 16)
    row = BLOCK * 16 + i
    beta = tl.load(beta_ptr + row * beta_t, mask=row < rows, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + row * C + BLOCK * 16 + index, mask=(index < i) & (row < rows), other=0.0) * beta
    return tl.where(index[:, None] == i, x - tl.sum(m[:, None] * x, 0)[None, :], x)


@triton.jit
def _block(ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    """Where a block of 16 x 16 of a chunk's matrix is, and its rows."""
    index = tl.arange(0, 16)
    return (ROW * 16 + index)[:, None] * C + (COLUMN * 16 + index)[None, :], ROW * 16 + index


@triton.jit
def _load_block(m_ptr, beta_ptr, beta_t, rows, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    at, row = _block(ROW, COLUMN, C)
    beta = tl.load(beta_ptr + row * beta_t, mask=row < rows, other=0.0).to(tl.float32)
    return tl.load(m_ptr + at, mask=(row < rows)[:, None], other=0.0) * beta[:, None]


@triton.jit
def _store_block(a_ptr, x, rows, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    at, row = _block(ROW, COLUMN, C)
    tl.store(a_ptr + at, x.to(a_ptr.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit
def _times(left, right, PRECISION: tl.constexpr):
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _inverse_kernel(
    m_ptr, beta_ptr, cu_ptr, a_ptr, tokens, documents, beta_t, beta_h, C: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A of one chunk and value head: the blocks on the diagonal row by row, then those below them by products."""
    head = tl.program_id(1).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    rows = end - first
    if rows == 0:
        return
    m_ptr += (head * tokens + first) * C
    a_ptr += (head * tokens + first) * C
    beta_ptr += head * beta_h + first * beta_t
    index = tl.arange(0, 16)
    unit = (index[:, None] == index[None, :]).to(tl.float32)
    a00, a11, a22, a33 = unit, unit, unit, unit
    for i in range(1, 16):
        a00 = _row_solved(a00, m_ptr, beta_ptr, i, C, 0, beta_t, rows)
        a11 = _row_solved(a11, m_ptr, beta_ptr, i, C, 1, beta_t, rows)
        a22 = _row_solved(a22, m_ptr, beta_ptr, i, C, 2, beta_t, rows)
        a33 = _row_solved(a33, m_ptr, beta_ptr, i, C, 3, beta_t, rows)
    # Each block is stored as soon as no product needs it any more, which frees its registers.
    none = tl.zeros([16, 16], tl.float32)
    _store_block(a_ptr, none, rows, 0, 1, C)
    _store_block(a_ptr, none, rows, 0, 2, C)
    _store_block(a_ptr, none, rows, 0, 3, C)
    _store_block(a_ptr, none, rows, 1, 2, C)
    _store_block(a_ptr, none, rows, 1, 3, C)
    _store_block(a_ptr, none, rows, 2, 3, C)
    m10 = _load_block(m_ptr, beta_ptr, beta_t, rows, 1, 0, C)
    a10 = -_times(a11, _times(m10, a00, PRECISION), PRECISION)
    _store_block(a_ptr, a10, rows, 1, 0, C)
    m20 = _load_block(m_ptr, beta_ptr, beta_t, rows, 2, 0, C)
    m21 = _load_block(m_ptr, beta_ptr, beta_t, rows, 2, 1, C)
    a20 = -_times(a22, _times(m20, a00, PRECISION) + _times(m21, a10, PRECISION), PRECISION)
    _store_block(a_ptr, a20, rows, 2, 0, C)
    m30 = _load_block(m_ptr, beta_ptr, beta_t, rows, 3, 0, C)
    m31 = _load_block(m_ptr, beta_ptr, beta_t, rows, 3, 1, C)
    m32 = _load_block(m_ptr, beta_ptr, beta_t, rows, 3, 2, C)
    a30 = -_times(
        a33, _times(m30, a00, PRECISION) + _times(m31, a10, PRECISION) + _times(m32, a20, PRECISION), PRECISION
    )
    _store_block(a_ptr, a30, rows, 3, 0, C)
    _store_block(a_ptr, a00, rows, 0, 0, C)
    a21 = -_times(a22, _times(m21, a11, PRECISION), PRECISION)
    _store_block(a_ptr, a21, rows, 2, 1, C)
    a31 = -_times(a33, _times(m31, a11, PRECISION) + _times(m32, a21, PRECISION), PRECISION)
    _store_block(a_ptr, a31, rows, 3, 1, C)
    _store_block(a_ptr, a11, rows, 1, 1, C)
    a32 = -_times(a33, _times(m32, a22, PRECISION), PRECISION)
    _store_block(a_ptr, a32, rows, 3, 2, C)
    _store_block(a_ptr, a22, rows, 2, 2, C)
    _store_block(a_ptr, a33, rows, 3, 3, C)


@triton.jit
def _columns(documents, Hv: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr):
    """What a program of a scan owns: document, value head, key head, and columns of the state."""
    BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // BLOCKS % Hv).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    return (tl.program_id(0) // (BLOCKS * Hv)).to(tl.int64), head, head // GROUP, columns


@triton.jit
def _scan_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, out_ptr, final_ptr, states_ptr,
    d_ptr, tokens, documents, q_t, q_h, k_t, k_h, v_t, v_h, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_OUT: tl.constexpr, STORE_STATES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and final state, or with STORE_STATES the state before each chunk and D, which the backward needs.

    A GPU has few programs for each of its processors here, so a step has to be short: what is the same for all columns
    comes from the kernels before, and offsets are 32-bit numbers within a chunk.
    """
    n, head, key_head, v_columns = _columns(documents, Hv, GROUP, DV, BLOCK_V)
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
def _scan_back_kernel(
    q_ptr, k_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, d_out_ptr, d_final_ptr,
    d_states_ptr, dx_ptr, d_initial_ptr, tokens, documents, q_t, q_h, k_t, k_h, d_out_t, d_out_h,
    Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_OUT: tl.constexpr, HAS_FINAL: tl.constexpr,
    STORE_INITIAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dX, the gradient of the state after each chunk, and that of the initial state; steps as in `_scan_kernel`."""
    n, head, key_head, v_columns = _columns(documents, Hv, GROUP, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_v = (v_columns < DV)[None, :]
    inside_k = (k_columns < DK)[None, :]
    inside_state = (k_columns < DK)[:, None] & inside_v
    at_state = k_columns[:, None] * DV + v_columns[None, :]
    at_q, at_k = index[:, None] * q_t + k_columns[None, :], index[:, None] * k_t + k_columns[None, :]
    at_d_out, at_dx = index[:, None] * d_out_t + v_columns[None, :], index[:, None] * (Hv * DV) + v_columns[None, :]
    at_a = index[:, None] * C + index[None, :]
    length = (end - start).to(tl.int32)
    chunks = tl.cdiv(length, C)
    last = start + (chunks - 1) * C
    q_ptr += key_head * q_h + last * q_t
    k_ptr += key_head * k_h + last * k_t
    d_out_ptr += head * d_out_h + last * d_out_t
    dx_ptr += (last * Hv + head) * DV
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
        dx_ptr -= C * Hv * DV
        a_ptr -= C * C
        p_ptr -= C * C
        total_ptr -= C
        factor_ptr -= C
        d_states_ptr -= Hv * DK * DV
    if STORE_INITIAL:
        tl.store(d_initial_ptr + (n * Hv + head) * (DK * DV) + at_state, d_state, mask=inside_state)


@triton.jit
def _key_part(ptr, rows, stride, count, PART: tl.constexpr, WIDTH: tl.constexpr, DK: tl.constexpr):
    """Some columns of the rows of q or k."""
    return _load_rows(ptr + PART * WIDTH, rows, stride, count, DK - PART * WIDTH, WIDTH)


@triton.jit
def _state_part(ptr, v_columns, PART: tl.constexpr, WIDTH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    """Some rows and columns of a stored state."""
    k_rows = PART * WIDTH + tl.arange(0, WIDTH)
    mask = (k_rows < DK)[:, None] & (v_columns < DV)[None, :]
    return tl.load(ptr + k_rows[:, None] * DV + v_columns[None, :], mask=mask, other=0.0)


@triton.jit
def _along(d, x, norms):
    """The product of each row of ``d`` with the normalised row of ``x``."""
    return tl.sum(d * x.to(tl.float32), 1) * norms


@triton.jit
def _store_gradient(
    ptr, first, second, x_ptr, x_t, norms, rows, count, row_size: tl.constexpr, DK: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The gradient of x, q or k, given the parts of that of x · norms with the inverse L2 norms of the rows."""
    if NORMALIZE:
        x = _key_part(x_ptr, rows, x_t, count, 0, WIDTH, DK).to(tl.float32)
        along = _along(first, x, norms)
        if PARTS == 2:
            other = _key_part(x_ptr, rows, x_t, count, 1, WIDTH, DK).to(tl.float32)
            along += _along(second, other, norms)
            second = (second - other * (along * norms)[:, None]) * norms[:, None]
        first = (first - x * (along * norms)[:, None]) * norms[:, None]
    columns, inside = tl.arange(0, WIDTH)[None, :], (rows < count)[:, None]
    at = ptr + rows[:, None] * row_size + columns
    tl.store(at, first.to(ptr.dtype.element_ty), mask=inside & (columns < DK))
    if PARTS == 2:
        tl.store(at + WIDTH, second.to(ptr.dtype.element_ty), mask=inside & (columns + WIDTH < DK))


@triton.jit
def _read_kernel(
    x_ptr, k_ptr, v_ptr, beta_ptr, cu_ptr, p_ptr, total_ptr, x_norm_ptr, k_norm_ptr, states_ptr, d_ptr, d_read_ptr,
    dx_ptr, out_ptr, d_total_ptr, dbeta_ptr, tokens, documents, x_t, x_h, k_t, k_h, v_t, v_h, beta_t, beta_h, d_read_t,
    d_read_h, scale, KEYS: tl.constexpr, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of what one chunk and key head read from the state before it and from D.

    Queries read for O, which gives dq. With KEYS, keys read for X, which gives a part of dk in fp32, dβ, and dV in
    place of dX. Each also gives a part of the gradients of the running sums of g.
    """
    slot, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    count, rows = (end - first).to(tl.int32), tl.arange(0, C)
    inside = rows < count
    x_ptr += first * x_t + key_head * x_h
    k_ptr += first * k_t + key_head * k_h
    x_norm = tl.load(x_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0)
    k_norm = tl.load(k_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0)
    sum0, sum1 = tl.zeros([C, WIDTH], tl.float32), tl.zeros([C, WIDTH], tl.float32)
    for head in range(key_head * GROUP, (key_head + 1) * GROUP):
        at_read, at_v = d_read_ptr + first * d_read_t + head * d_read_h, v_ptr + first * v_t + head * v_h
        at_d, at_states = d_ptr + (head * tokens + first) * DV, states_ptr + (slot * Hv + head) * (DK * DV)
        total = tl.load(total_ptr + head * tokens + first + rows, mask=inside, other=0.0)
        if KEYS:
            beta = tl.load(beta_ptr + first * beta_t + head * beta_h + rows * beta_t, mask=inside, other=0.0)
            beta = beta.to(tl.float32)
            along = tl.zeros([C], tl.float32)
        between, part0, part1 = tl.zeros([C, C], tl.float32), tl.zeros_like(sum0), tl.zeros_like(sum0)
        for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
            v_columns = start + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (v_columns < DV)[None, :]
            d_read = tl.load(at_read + rows[:, None] * d_read_t + v_columns[None, :], mask=mask, other=0.0)
            d = tl.load(at_d + rows[:, None] * DV + v_columns[None, :], mask=mask, other=0.0)
            between = tl.dot(d_read, tl.trans(d), between, input_precision=PRECISION)
            state = _state_part(at_states, v_columns, 0, WIDTH, DK, DV)
            part0 = tl.dot(d_read, tl.trans(state), part0, input_precision=PRECISION)
            if PARTS == 2:
                state = _state_part(at_states, v_columns, 1, WIDTH, DK, DV)
                part1 = tl.dot(d_read, tl.trans(state), part1, input_precision=PRECISION)
            if KEYS:
                v = tl.load(at_v + rows[:, None] * v_t + v_columns[None, :], mask=mask, other=0.0)
                wide = d_read.to(tl.float32)
                along += tl.sum(wide * v.to(tl.float32), 1)
                at_dx = dx_ptr + (first * Hv + head) * DV + rows[:, None] * (Hv * DV) + v_columns[None, :]
                tl.store(at_dx, (wide * beta[:, None]).to(dtype), mask=mask)
        k = _key_part(k_ptr, rows, k_t, count, 0, WIDTH, DK)
        factor = tl.exp(total) * scale
        part0 *= factor[:, None]
        part1 *= factor[:, None]
        if KEYS:
            earlier = (rows[:, None] > rows[None, :]) & inside[:, None]
            between = (between * _decays(total, total, earlier) * k_norm[None, :]).to(dtype)
            part0 = tl.dot(between, k, part0, input_precision=PRECISION)
            read = _along(part0, k, k_norm)
            sum0 -= part0 * beta[:, None]
            if PARTS == 2:
                k = _key_part(k_ptr, rows, k_t, count, 1, WIDTH, DK)
                part1 = tl.dot(between, k, part1, input_precision=PRECISION)
                read += _along(part1, k, k_norm)
                sum1 -= part1 * beta[:, None]
            tl.store(dbeta_ptr + (first * Hv + head) + rows * Hv, along - read, mask=inside)
            d_total = -beta * read
        else:
            by_decay = between * _load_rows(p_ptr + (head * tokens + first) * C, rows, C, count, C, C).to(tl.float32)
            d_total = tl.sum(by_decay, 1) - tl.sum(by_decay, 0)
            causal = (rows[:, None] >= rows[None, :]) & inside[:, None]
            between = (between * _decays(total, total, causal) * (scale * k_norm)[None, :]).to(dtype)
            d_total += _along(part0, _key_part(x_ptr, rows, x_t, count, 0, WIDTH, DK), x_norm)
            sum0 = tl.dot(between, k, sum0 + part0, input_precision=PRECISION)
            if PARTS == 2:
                k = _key_part(k_ptr, rows, k_t, count, 1, WIDTH, DK)
                d_total += _along(part1, _key_part(x_ptr, rows, x_t, count, 1, WIDTH, DK), x_norm)
                sum1 = tl.dot(between, k, sum1 + part1, input_precision=PRECISION)
        tl.store(d_total_ptr + head * tokens + first + rows, d_total, mask=inside)
    at = out_ptr + (first * (Hv // GROUP) + key_head) * DK
    _store_gradient(
        at, sum0, sum1, x_ptr, x_t, x_norm, rows, count, Hv // GROUP * DK, DK, PARTS, WIDTH, NORMALIZE and not KEYS
    )


@triton.jit
def _write_kernel(
    q_ptr, k_ptr, cu_ptr, total_ptr, q_norm_ptr, k_norm_ptr, states_ptr, d_states_ptr, d_ptr, d_out_ptr, dv_ptr,
    d_total_q_ptr, d_total_k_ptr, read_ptr, dk_ptr, dg_ptr, tokens, documents, q_t, q_h, k_t, k_h, d_out_t, d_out_h,
    scale, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_OUT: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of what one chunk and key head write: D, into the state after the chunk and for its later tokens.

    With the part of dk from `_read_kernel` this gives dk, and with the parts of its sums dg.
    """
    slot, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    count, rows = (end - first).to(tl.int32), tl.arange(0, C)
    inside = rows < count
    q_ptr += first * q_t + key_head * q_h
    k_ptr += first * k_t + key_head * k_h
    k_norm = tl.load(k_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0)
    row_size: tl.constexpr = Hv // GROUP * DK
    at_read = read_ptr + (first * (Hv // GROUP) + key_head) * DK
    dk0, dk1 = _key_part(at_read, rows, row_size, count, 0, WIDTH, DK), tl.zeros([C, WIDTH], tl.float32)
    if PARTS == 2:
        dk1 = _key_part(at_read, rows, row_size, count, 1, WIDTH, DK)
    for head in range(key_head * GROUP, (key_head + 1) * GROUP):
        at_d, at_dv = d_ptr + (head * tokens + first) * DV, dv_ptr + (first * Hv + head) * DV
        at_states = states_ptr + (slot * Hv + head) * (DK * DV)
        at_d_states = d_states_ptr + (slot * Hv + head) * (DK * DV)
        at_out = d_out_ptr + first * d_out_t + head * d_out_h
        for_x, for_out = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        part0, part1 = tl.zeros_like(dk0), tl.zeros_like(dk0)
        product = tl.zeros([WIDTH, WIDTH], tl.float32)  # its diagonal is the product of S and dS, row by row
        for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
            v_columns = start + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (v_columns < DV)[None, :]
            d = tl.load(at_d + rows[:, None] * DV + v_columns[None, :], mask=mask, other=0.0)
            dv = tl.load(at_dv + rows[:, None] * (Hv * DV) + v_columns[None, :], mask=mask, other=0.0)
            for_x = tl.dot(d, tl.trans(dv), for_x, input_precision=PRECISION)
            if HAS_OUT:
                d_out = tl.load(at_out + rows[:, None] * d_out_t + v_columns[None, :], mask=mask, other=0.0)
                for_out = tl.dot(d, tl.trans(d_out), for_out, input_precision=PRECISION)
            d_state = _state_part(at_d_states, v_columns, 0, WIDTH, DK, DV)
            part0 = tl.dot(d, tl.trans(d_state), part0, input_precision=PRECISION)
            state = _state_part(at_states, v_columns, 0, WIDTH, DK, DV)
            product = tl.dot(state, tl.trans(d_state), product, input_precision=PRECISION)
            if PARTS == 2:
                d_state = _state_part(at_d_states, v_columns, 1, WIDTH, DK, DV)
                part1 = tl.dot(d, tl.trans(d_state), part1, input_precision=PRECISION)
                state = _state_part(at_states, v_columns, 1, WIDTH, DK, DV)
                product = tl.dot(state, tl.trans(d_state), product, input_precision=PRECISION)
        whole = tl.load(total_ptr + head * tokens + end - 1)
        total = tl.load(total_ptr + head * tokens + first + rows, mask=inside, other=0.0)
        total = tl.where(inside, total, whole)  # differences stay negative for rows that do not exist
        later = tl.exp(tl.where(rows[:, None] <= rows[None, :], total[None, :] - total[:, None], float("-inf")))
        for_x = tl.where(rows[:, None] == rows[None, :], 0.0, for_x * later) * -k_norm[None, :]
        for_x, left = for_x.to(dtype), tl.exp(whole - total)[:, None]
        part0 *= left
        part1 *= left
        k = _key_part(k_ptr, rows, k_t, count, 0, WIDTH, DK)
        diagonal = tl.arange(0, WIDTH)[:, None] == tl.arange(0, WIDTH)[None, :]
        d_end = tl.sum(tl.sum(tl.where(diagonal, product, 0.0), 1), 0) * tl.exp(whole)
        d_end += tl.sum(_along(part0, k, k_norm), 0)
        part0 = tl.dot(for_x, k, part0, input_precision=PRECISION)
        written = _along(part0, k, k_norm)
        dk0 += part0
        if PARTS == 2:
            k = _key_part(k_ptr, rows, k_t, count, 1, WIDTH, DK)
            d_end += tl.sum(_along(part1, k, k_norm), 0)
            part1 = tl.dot(for_x, k, part1, input_precision=PRECISION)
            written += _along(part1, k, k_norm)
            dk1 += part1
        d_total = tl.load(d_total_k_ptr + head * tokens + first + rows, mask=inside, other=0.0) - written
        if HAS_OUT:
            q_norm = tl.load(q_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0)
            for_out = (for_out * later * (scale * q_norm)[None, :]).to(dtype)
            q = _key_part(q_ptr, rows, q_t, count, 0, WIDTH, DK)
            dk0 = tl.dot(for_out, q, dk0, input_precision=PRECISION)
            if PARTS == 2:
                q = _key_part(q_ptr, rows, q_t, count, 1, WIDTH, DK)
                dk1 = tl.dot(for_out, q, dk1, input_precision=PRECISION)
            d_total += tl.load(d_total_q_ptr + head * tokens + first + rows, mask=inside, other=0.0)
        dg = tl.cumsum(tl.where(inside, d_total, 0.0), 0, reverse=True) + d_end
        tl.store(dg_ptr + (first * Hv + head) + rows * Hv, dg, mask=inside)
    at = dk_ptr + (first * (Hv // GROUP) + key_head) * DK
    _store_gradient(at, dk0, dk1, k_ptr, k_t, k_norm, rows, count, row_size, DK, PARTS, WIDTH, NORMALIZE)


@triton.jit
def _step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, initial_ptr, out_ptr, final_ptr, T, q_t, q_h, k_t, k_h, v_t, v_h,
    g_t, g_h, beta_t, beta_h, scale, Hv: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The recurrence, token by token."""
    n, head, key_head, v_columns = _columns(0, Hv, GROUP, DV, BLOCK_V)
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
        # Three products of TF32 are as good as one of fp32, and tensor cores have them.
        self.precision = {"PRECISION": "tf32x3" if torch.version.hip is None else "ieee"}
        self.chunked = {"DOCUMENTS": triton.next_power_of_2(self.documents)}
        # A chunk of q, k, A, P and v or dO, as many times as there are stages.
        stage = CHUNK * (2 * block_k + 2 * CHUNK + columns) * k.element_size()
        self.scan = self.shape | self.precision | {
            "Hv": self.Hv, "DV": self.Dv, "BLOCK_V": columns, "STAGES": fitting_stages(k, SCAN_STAGES, stage),
            "num_warps": SCAN_WARPS,
        }  # fmt: skip
        self.scan_grid = (self.documents * self.Hv * triton.cdiv(self.Dv, columns),)
        self.block_v = block_v


def _prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, sizes: _Sizes, scale: float, normalize: bool, need_p: bool
) -> tuple[Tensor, ...]:
    """A, P, running sums of g, factors of rows, and inverse norms of q and k; all with the heads first."""
    similarity = k.new_empty(sizes.Hv, sizes.tokens, CHUNK, dtype=torch.float32)
    inverse, p = (k.new_empty(sizes.Hv, sizes.tokens, CHUNK) for _ in range(2))
    total = similarity.new_empty(sizes.Hv, sizes.tokens)
    q_norm, k_norm = (similarity.new_empty(sizes.Hk, sizes.tokens) for _ in range(2))
    factors = similarity.new_empty(sizes.Hv, 4, sizes.tokens)
    counts = sizes.tokens, sizes.documents
    _similarity_kernel[(sizes.slots, sizes.Hk)](
        q, k, g, beta, sizes.cu, similarity, p, total, q_norm, k_norm, factors, *counts, *q.stride()[:2],
        *k.stride()[:2], *g.stride(), *beta.stride(), scale, NORMALIZE=normalize, EPS=L2_EPS, NEED_P=need_p,
        num_warps=SIMILARITY_WARPS, **sizes.shape, **sizes.precision, **sizes.chunked,
    )  # fmt: skip
    _inverse_kernel[(sizes.slots, sizes.Hv)](
        similarity, beta, sizes.cu, inverse, *counts, *beta.stride(), C=CHUNK, num_warps=INVERSE_WARPS,
        **sizes.chunked, **sizes.precision,
    )  # fmt: skip
    return inverse, p, total, factors, q_norm, k_norm


LIBRARY.define(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens,"
    " float scale, bool normalize, bool need_out) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "gated_delta_rule_backward(Tensor? d_out, Tensor? d_final, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,"
    " Tensor? initial_state, Tensor? cu_seqlens, float scale, bool normalize)"
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
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = _Sizes(k, v, cu_seqlens)
    out, final = _outputs(k, v, cu_seqlens, need_out)
    if not final.numel():
        return out, final
    q, k, v, g, beta = map(flat, (q, k, v, g, beta))
    initial = final if initial_state is None else initial_state.contiguous()
    with on_device_of(k):
        made = _prepare(q, k, g, beta, sizes, scale, normalize, need_out)[:4] if sizes.tokens else (final,) * 4
        # A pointer argument that the constants switch off still has to be a tensor.
        _scan_kernel[sizes.scan_grid](
            q, k, v, sizes.cu, *made, initial, out, final, k, k, sizes.tokens, sizes.documents,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], HAS_INITIAL=initial_state is not None,
            STORE_OUT=need_out, STORE_STATES=False, **sizes.scan,
        )  # fmt: skip
    return out, final


@torch.library.impl(LIBRARY, "gated_delta_rule_backward", "CompositeExplicitAutograd")
def _gated_delta_rule_backward(
    d_out: Tensor | None, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float, normalize: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    sizes = _Sizes(k, v, cu_seqlens)
    grads = dq, dk, dx, dg, dbeta, d_initial = _gradients_like(d_out, q, k, v, g, beta, initial_state)
    if not k.numel() or not v.numel():
        if d_final is not None and initial_state is not None:
            d_initial.copy_(d_final)
        return grads
    has_out, has_final = d_out is not None, d_final is not None
    q, k, v, g, beta = map(flat, (q, k, v, g, beta))
    d_out = v if d_out is None else flat(d_out)
    states, d_states = (k.new_empty(sizes.slots, sizes.Hv, sizes.Dk, sizes.Dv) for _ in range(2))
    d = k.new_empty(sizes.Hv, sizes.tokens, sizes.Dv)
    counts, strides = (sizes.tokens, sizes.documents), (*q.stride()[:2], *k.stride()[:2])
    with on_device_of(k):
        *made, q_norm, k_norm = _prepare(q, k, g, beta, sizes, scale, normalize, has_out)
        _, p, total, _ = made
        # A pointer argument that the constants switch off still has to be a tensor.
        _scan_kernel[sizes.scan_grid](
            q, k, v, sizes.cu, *made, total if initial_state is None else initial_state.contiguous(), k, total,
            states, d, *counts, *strides, *v.stride()[:2], HAS_INITIAL=initial_state is not None, STORE_OUT=False,
            STORE_STATES=True, **sizes.scan,
        )  # fmt: skip
        _scan_back_kernel[sizes.scan_grid](
            q, k, sizes.cu, *made, d_out, total if d_final is None else d_final.contiguous(), d_states, dx,
            d_initial, *counts, *strides, *d_out.stride()[:2], HAS_OUT=has_out, HAS_FINAL=has_final,
            STORE_INITIAL=initial_state is not None, **sizes.scan,
        )  # fmt: skip
        block_k, block_v = sizes.shape["BLOCK_K"], max(min(sizes.block_v // 2, GRADIENT_COLUMNS), 16)
        stage = (2 * block_k + 3 * CHUNK) * block_v * k.element_size()  # S, dS, D, dV and dO
        common = sizes.chunked | sizes.precision | {
            "GROUP": sizes.Hv // sizes.Hk, "C": CHUNK, "DK": sizes.Dk, "PARTS": block_k // KEY_COLUMNS,
            "WIDTH": KEY_COLUMNS, "Hv": sizes.Hv, "DV": sizes.Dv, "BLOCK_V": block_v, "NORMALIZE": normalize,
            "STAGES": fitting_stages(k, GRADIENT_STAGES, stage),
        }  # fmt: skip
        grid = sizes.slots, sizes.Hk
        d_total_q, d_total_k = (torch.empty_like(total) for _ in range(2))
        read = torch.empty(k.shape, dtype=torch.float32, device=k.device)
        inputs, value_strides = (v, beta, sizes.cu, p, total), (*v.stride()[:2], *beta.stride())
        if has_out:
            _read_kernel[grid](
                q, k, *inputs, q_norm, k_norm, states, d, d_out, dx, dq, d_total_q, dbeta, *counts, *strides,
                *value_strides, *d_out.stride()[:2], scale, KEYS=False, num_warps=READ_WARPS, **common,
            )  # fmt: skip
        _read_kernel[grid](
            k, k, *inputs, k_norm, k_norm, states, d, dx, dx, read, d_total_k, dbeta, *counts, *strides[2:],
            *strides[2:], *value_strides, sizes.Hv * sizes.Dv, sizes.Dv, 1.0, KEYS=True, num_warps=READ_WARPS,
            **common,
        )  # fmt: skip
        _write_kernel[grid](
            q, k, sizes.cu, total, q_norm, k_norm, states, d_states, d, d_out, dx, d_total_q, d_total_k, read, dk, dg,
            *counts, *strides, *d_out.stride()[:2], scale, HAS_OUT=has_out, num_warps=WRITE_WARPS, **common,
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
    return _outputs(k, v, cu_seqlens, need_out)


@torch.library.register_fake("liger_models::gated_delta_rule_backward", lib=LIBRARY)
def _gated_delta_rule_backward_fake(d_out, d_final, q, k, v, g, beta, initial_state, *_):
    return _gradients_like(d_out, q, k, v, g, beta, initial_state)


@torch.library.register_fake("liger_models::gated_delta_step", lib=LIBRARY)
def _gated_delta_step_fake(q, k, v, *_):
    return _outputs(k, v, None, True)


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.normalize, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_out, d_final):
    if d_out is None and d_final is None:
        return (None,) * 10
    saved = ctx.saved_tensors  # once: checkpointing recomputes what it unpacks
    grads = torch.ops.liger_models.gated_delta_rule_backward(d_out, d_final, *saved, ctx.scale, ctx.normalize)
    # The initial state is the sixth input; the output, the only thing that q affects, may have no gradient.
    given = d_out is not None, *(True,) * 4, saved[5] is not None
    return *(grad if use else None for grad, use in zip(grads, given, strict=True)), *(None,) * 4


torch.library.register_autograd("liger_models::gated_delta_rule", _backward, setup_context=_setup, lib=LIBRARY)


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

    Heads of k have at most 128 columns, and those of v whole 16 bytes. In float32 the backward was wrong on a GPU,
    so plain torch runs there.
    """
    in_half = k.dtype != torch.float32 or k.device.type == "cpu"
    return use_triton(k) and in_half and k.shape[-1] <= 2 * KEY_COLUMNS and v.shape[-1] * v.itemsize % 16 == 0


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
        out, state = torch.ops.liger_models.gated_delta_rule(*inputs, cu_seqlens, scale, normalize, True)
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
