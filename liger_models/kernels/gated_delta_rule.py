"""Gated delta rule: a layer that is linear in the tokens, whose state is a matrix for each head.

Forward, for each value head and token in fp32, with S [Dk, Dv] the state, q̂ and k̂ the L2-normalised query and key::

    S ← exp(g) · S,   d = β · (v − k̂ᵀ S),   S ← S + k̂ dᵀ,   o = scale · q̂ᵀ S

The kernels take `CHUNK` tokens at a time. With S the state before the chunk, G_i = Σ_{j ≤ i} g_j within it, G its last
value, E_ij = exp(G_i − G_j) for i ≥ j and 0 otherwise, and rows of matrices for tokens::

    M_ij = β_i · E_ij · k̂_i·k̂_j  (i > j),   A = (I + M)⁻¹,   P_ij = scale · E_ij · q̂_i·k̂_j
    X = β · (V − e^{G_i} · K̂ S),   D = A X,   O = scale · e^{G_i} · Q̂ S + P D,   S ← e^G · S + (e^{G − G_i} · K̂)ᵀ D

P and, without its β, M of all chunks come from one kernel, and A from a second one. A third goes through the chunks in
order, each program with some columns of S in registers. Backward, with dS the gradient of the state after the chunk, in
the opposite order::

    dD = Pᵀ dO + e^{G − G_i} · K̂ dS,   dX = Aᵀ dD,   dV = β · dX,   dM = −dX Dᵀ,   dP = dO Dᵀ
    dS ← e^G · dS + (scale · e^{G_i} · Q̂)ᵀ dO − (β · e^{G_i} · K̂)ᵀ dX

A last kernel computes the other gradients of each chunk and value head from S, D, dS and dX. Where a key head serves
several value heads, it stores their parts of dq and dk in fp32, and a small kernel adds them in order. Products are in
the dtype of q, k and v and are summed in fp32; the state, the decay and the inverse are in fp32. Saved: only the
inputs. The backward recomputes A, P, S and D.

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

SIMILARITY_WARPS, INVERSE_WARPS = 4, 1
SCAN_WARPS, SCAN_STAGES, SCAN_COLUMNS = 4, 3, 64
"""Of the kernels that go through the chunks in order: each program has this many columns of the state of one head."""

GRADIENT_WARPS, GRADIENT_COLUMNS = 8, 64
"""The kernel with the other gradients takes this many columns of v at a time, and at most half of them. Without
loops the compiler would load the tiles of several products at once, and spill them."""

SUM_WARPS = 8

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
    q_ptr, k_ptr, g_ptr, cu_ptr, m_ptr, p_ptr, total_ptr, q_norm_ptr, k_norm_ptr, tokens, documents,
    q_t, q_h, k_t, k_h, g_t, g_h, scale, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
    NEED_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M without its β, P, the running sums of g and the inverse norms of one chunk and key head."""
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
        tl.store(total_ptr + head * tokens + rows, total, mask=inside)
        decays = _decays(total, total, index[:, None] >= index[None, :])
        at = (head * tokens + rows)[:, None] * C + index[None, :]
        tl.store(m_ptr + at, kk * decays, mask=inside[:, None])
        if NEED_P:
            tl.store(p_ptr + at, (qk * decays).to(p_ptr.dtype.element_ty), mask=inside[:, None])


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
def _times(left, right):
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _inverse_kernel(
    m_ptr, beta_ptr, cu_ptr, a_ptr, tokens, documents, beta_t, beta_h, C: tl.constexpr, DOCUMENTS: tl.constexpr,
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
    a10 = -_times(a11, _times(m10, a00))
    _store_block(a_ptr, a10, rows, 1, 0, C)
    m20 = _load_block(m_ptr, beta_ptr, beta_t, rows, 2, 0, C)
    m21 = _load_block(m_ptr, beta_ptr, beta_t, rows, 2, 1, C)
    a20 = -_times(a22, _times(m20, a00) + _times(m21, a10))
    _store_block(a_ptr, a20, rows, 2, 0, C)
    m30 = _load_block(m_ptr, beta_ptr, beta_t, rows, 3, 0, C)
    m31 = _load_block(m_ptr, beta_ptr, beta_t, rows, 3, 1, C)
    m32 = _load_block(m_ptr, beta_ptr, beta_t, rows, 3, 2, C)
    a30 = -_times(a33, _times(m30, a00) + _times(m31, a10) + _times(m32, a20))
    _store_block(a_ptr, a30, rows, 3, 0, C)
    _store_block(a_ptr, a00, rows, 0, 0, C)
    a21 = -_times(a22, _times(m21, a11))
    _store_block(a_ptr, a21, rows, 2, 1, C)
    a31 = -_times(a33, _times(m31, a11) + _times(m32, a21))
    _store_block(a_ptr, a31, rows, 3, 1, C)
    _store_block(a_ptr, a11, rows, 1, 1, C)
    a32 = -_times(a33, _times(m32, a22))
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
    q_ptr, k_ptr, v_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, q_norm_ptr, k_norm_ptr, initial_ptr,
    out_ptr, final_ptr, states_ptr, d_ptr, tokens, documents, q_t, q_h, k_t, k_h, v_t, v_h, beta_t, beta_h, scale,
    Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE_OUT: tl.constexpr,
    STORE_STATES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and final state, or with STORE_STATES the state before each chunk and D, which the backward needs.

    Tiles with columns of v are transposed: [columns, keys] of the state and [columns, tokens] of V, X, D and O. What a
    product gives is thus the left side of the next one, which stays in registers.
    """
    n, head, key_head, v_columns = _columns(documents, Hv, GROUP, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_v = (v_columns < DV)[:, None]
    inside_state = (k_columns < DK)[None, :] & inside_v
    at_state = k_columns[None, :] * DV + v_columns[:, None]
    at_stored = v_columns[:, None] * DK + k_columns[None, :]
    q_ptr += key_head * q_h
    k_ptr += key_head * k_h
    v_ptr += head * v_h
    beta_ptr += head * beta_h
    a_ptr += head * tokens * C
    p_ptr += head * tokens * C
    total_ptr += head * tokens
    q_norm_ptr += key_head * tokens
    k_norm_ptr += key_head * tokens
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + (n * Hv + head) * (DK * DV) + at_state, mask=inside_state, other=0.0)
    for number in tl.range(0, tl.cdiv(end - start, C), num_stages=STAGES):
        first = start + number * C
        rows = first + index
        inside = rows < end
        k = _load_rows(k_ptr, rows, k_t, end, DK, BLOCK_K)
        a = _load_rows(a_ptr, rows, C, end, C, C)
        v = tl.load(v_ptr + rows[None, :] * v_t + v_columns[:, None], mask=inside[None, :] & inside_v, other=0.0)
        total = tl.load(total_ptr + rows, mask=inside, other=0.0)
        beta = tl.load(beta_ptr + rows * beta_t, mask=inside, other=0.0).to(tl.float32)
        k_norm = tl.load(k_norm_ptr + rows, mask=inside, other=0.0)
        whole = tl.load(total_ptr + tl.minimum(first + C, end) - 1)
        rounded = state.to(dtype)
        seen = tl.dot(rounded, tl.trans(k), input_precision=PRECISION)
        x = beta[None, :] * (v.to(tl.float32) - seen * (tl.exp(total) * k_norm)[None, :])
        d = tl.dot(x.to(dtype), tl.trans(a), input_precision=PRECISION)
        if STORE_OUT:
            q = _load_rows(q_ptr, rows, q_t, end, DK, BLOCK_K)
            p = _load_rows(p_ptr, rows, C, end, C, C)
            q_norm = tl.load(q_norm_ptr + rows, mask=inside, other=0.0)
            out = tl.dot(rounded, tl.trans(q), input_precision=PRECISION) * (tl.exp(total) * q_norm * scale)[None, :]
            out = tl.dot(d.to(dtype), tl.trans(p), out, input_precision=PRECISION)
            at_out = (rows * Hv + head)[None, :] * DV + v_columns[:, None]
            tl.store(out_ptr + at_out, out.to(dtype), mask=inside[None, :] & inside_v)
        if STORE_STATES:
            slot = start // C + n + number
            tl.store(states_ptr + (slot * Hv + head) * (DK * DV) + at_stored, rounded, mask=inside_state)
            at = (head * tokens + rows)[None, :] * DV + v_columns[:, None]
            tl.store(d_ptr + at, d.to(dtype), mask=inside[None, :] & inside_v)
        update = (d * (tl.exp(whole - total) * k_norm)[None, :]).to(dtype)
        state = tl.dot(update, k, state * tl.exp(whole), input_precision=PRECISION)
    if not STORE_STATES:
        tl.store(final_ptr + (n * Hv + head) * (DK * DV) + at_state, state, mask=inside_state)


@triton.jit
def _scan_back_kernel(
    q_ptr, k_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, q_norm_ptr, k_norm_ptr, d_out_ptr, d_final_ptr,
    d_states_ptr, dx_ptr, d_initial_ptr, tokens, documents, q_t, q_h, k_t, k_h, beta_t, beta_h, d_out_t, d_out_h,
    scale, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_OUT: tl.constexpr, HAS_FINAL: tl.constexpr,
    STORE_INITIAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dX, the gradient of the state after each chunk, and that of the initial state; tiles as in `_scan_kernel`."""
    n, head, key_head, v_columns = _columns(documents, Hv, GROUP, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_v = (v_columns < DV)[:, None]
    inside_state = (k_columns < DK)[None, :] & inside_v
    at_state = k_columns[None, :] * DV + v_columns[:, None]
    at_stored = v_columns[:, None] * DK + k_columns[None, :]
    q_ptr += key_head * q_h
    k_ptr += key_head * k_h
    d_out_ptr += head * d_out_h
    beta_ptr += head * beta_h
    a_ptr += head * tokens * C
    p_ptr += head * tokens * C
    total_ptr += head * tokens
    q_norm_ptr += key_head * tokens
    k_norm_ptr += key_head * tokens
    d_state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_FINAL:
        d_state = tl.load(d_final_ptr + (n * Hv + head) * (DK * DV) + at_state, mask=inside_state, other=0.0)
    chunks = tl.cdiv(end - start, C)
    for step in tl.range(0, chunks, num_stages=STAGES):
        number = chunks - 1 - step
        first = start + number * C
        rows = first + index
        inside = rows < end
        k = _load_rows(k_ptr, rows, k_t, end, DK, BLOCK_K)
        a = _load_rows(a_ptr, rows, C, end, C, C)
        total = tl.load(total_ptr + rows, mask=inside, other=0.0)
        beta = tl.load(beta_ptr + rows * beta_t, mask=inside, other=0.0).to(tl.float32)
        k_norm = tl.load(k_norm_ptr + rows, mask=inside, other=0.0)
        whole = tl.load(total_ptr + tl.minimum(first + C, end) - 1)
        rounded = d_state.to(dtype)
        slot = start // C + n + number
        tl.store(d_states_ptr + (slot * Hv + head) * (DK * DV) + at_stored, rounded, mask=inside_state)
        dd = tl.dot(rounded, tl.trans(k), input_precision=PRECISION) * (tl.exp(whole - total) * k_norm)[None, :]
        d_state *= tl.exp(whole)
        if HAS_OUT:
            q = _load_rows(q_ptr, rows, q_t, end, DK, BLOCK_K)
            p = _load_rows(p_ptr, rows, C, end, C, C)
            at_out = rows[None, :] * d_out_t + v_columns[:, None]
            d_out = tl.load(d_out_ptr + at_out, mask=inside[None, :] & inside_v, other=0.0)
            q_norm = tl.load(q_norm_ptr + rows, mask=inside, other=0.0)
            dd = tl.dot(d_out, p, dd, input_precision=PRECISION)
            scaled = d_out.to(tl.float32) * (tl.exp(total) * q_norm * scale)[None, :]
            d_state = tl.dot(scaled.to(dtype), q, d_state, input_precision=PRECISION)
        dx = tl.dot(dd.to(dtype), a, input_precision=PRECISION)
        at = (rows * Hv + head)[None, :] * DV + v_columns[:, None]
        tl.store(dx_ptr + at, dx.to(dtype), mask=inside[None, :] & inside_v)
        taken = (-dx * (beta * tl.exp(total) * k_norm)[None, :]).to(dtype)
        d_state = tl.dot(taken, k, d_state, input_precision=PRECISION)
    if STORE_INITIAL:
        tl.store(d_initial_ptr + (n * Hv + head) * (DK * DV) + at_state, d_state, mask=inside_state)


@triton.jit
def _unnormalized(x, d, norms, NORMALIZE: tl.constexpr):
    """The gradient of x, given ``d``, that of x · norms with the inverse L2 norms of the rows."""
    if NORMALIZE:
        along = tl.sum(x * d, 1) * norms * norms
        d = (d - x * along[:, None]) * norms[:, None]
    return d


@triton.jit
def _gradients_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, cu_ptr, m_ptr, p_ptr, total_ptr, q_norm_ptr, k_norm_ptr, states_ptr, d_states_ptr,
    d_ptr, d_out_ptr, dq_ptr, dk_ptr, dx_ptr, dg_ptr, dbeta_ptr, tokens, documents, q_t, q_h, k_t, k_h, v_t, v_h,
    beta_t, beta_h, d_out_t, d_out_h, scale, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr,
    PART: tl.constexpr, HAS_OUT: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg and dβ of one chunk and value head; dX becomes dV in place.

    With several value heads for a key head, ``dq_ptr`` and ``dk_ptr`` are for their parts. The parts of a program may
    be where its S and dS are, which nothing else reads: those of q in place of S, those of k in place of dS.

    To have enough registers, only one product is computed at a time, q and k are loaded again for each, and no loop
    goes over value heads, which would keep in registers what does not change in it.

    Every product of [C, C] is computed twice, once with rows and columns exchanged, instead of being transposed: Triton
    3.4 to 3.7.0 compile a product whose left side is a transposed result in registers wrongly for Hopper.
    """
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    index, k_columns = tl.arange(0, C), tl.arange(0, BLOCK_K)
    rows = first + index
    inside = rows < end
    q_ptr += key_head * q_h
    k_ptr += key_head * k_h
    v_ptr += head * v_h
    d_out_ptr += head * d_out_h
    dx_ptr += head * DV
    d_ptr += head * tokens * DV
    states_ptr += (slot * Hv + head) * (DK * DV)
    d_states_ptr += (slot * Hv + head) * (DK * DV)
    whole = tl.load(total_ptr + head * tokens + end - 1)
    total = tl.load(total_ptr + head * tokens + rows, mask=inside, other=0.0)
    total = tl.where(inside, total, whole)  # differences stay negative for rows that do not exist
    beta = tl.load(beta_ptr + head * beta_h + rows * beta_t, mask=inside, other=0.0).to(tl.float32)
    k_norm = tl.load(k_norm_ptr + key_head * tokens + rows, mask=inside, other=0.0)
    # M below the diagonal, and with rows and columns exchanged above it; both without the sign of dM.
    below, above = index[:, None] > index[None, :], index[:, None] < index[None, :]
    at = (head * tokens + rows)[:, None] * C + index[None, :]
    dm, dm_across = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for start in tl.range(0, DV, BLOCK_V, num_stages=1):
        v_columns = start + tl.arange(0, BLOCK_V)
        mask = inside[:, None] & (v_columns < DV)[None, :]
        dx = tl.load(dx_ptr + rows[:, None] * (Hv * DV) + v_columns[None, :], mask=mask, other=0.0)
        d = tl.load(d_ptr + rows[:, None] * DV + v_columns[None, :], mask=mask, other=0.0)
        dm = tl.dot(dx, tl.trans(d), dm, input_precision=PRECISION)
        dm_across = tl.dot(d, tl.trans(dx), dm_across, input_precision=PRECISION)
    m = tl.load(m_ptr + at, mask=inside[:, None], other=0.0) * dm
    dbeta = -tl.sum(m, 1)
    m *= beta[:, None]
    d_total = tl.sum(m, 0) - tl.sum(m, 1)
    dm *= _decays(total, total, below) * beta[:, None]
    dm += dm_across * tl.exp(tl.where(above, total[None, :] - total[:, None], float("-inf"))) * beta[None, :]
    k = _load_rows(k_ptr, rows, k_t, end, DK, BLOCK_K)
    dk = tl.dot((-dm * k_norm[None, :]).to(dtype), k, input_precision=PRECISION)
    if HAS_OUT:
        q_norm = tl.load(q_norm_ptr + key_head * tokens + rows, mask=inside, other=0.0)
        dp, dp_across = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=1):
            v_columns = start + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (v_columns < DV)[None, :]
            d_out = tl.load(d_out_ptr + rows[:, None] * d_out_t + v_columns[None, :], mask=mask, other=0.0)
            d = tl.load(d_ptr + rows[:, None] * DV + v_columns[None, :], mask=mask, other=0.0)
            dp = tl.dot(d_out, tl.trans(d), dp, input_precision=PRECISION)
            dp_across = tl.dot(d, tl.trans(d_out), dp_across, input_precision=PRECISION)
        by_decay = dp * tl.load(p_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        d_total += tl.sum(by_decay, 1) - tl.sum(by_decay, 0)
        dp *= _decays(total, total, index[:, None] >= index[None, :]) * scale
        dq = tl.dot((dp * k_norm[None, :]).to(dtype), k, input_precision=PRECISION)
        from_on = index[:, None] <= index[None, :]
        dp_across *= tl.exp(tl.where(from_on, total[None, :] - total[:, None], float("-inf"))) * scale
        q = _load_rows(q_ptr, rows, q_t, end, DK, BLOCK_K)
        dk = tl.dot((dp_across * q_norm[None, :]).to(dtype), q, dk, input_precision=PRECISION)
    tl.debug_barrier()  # all threads have read dX before it becomes dV
    # What the state gives and takes: K̂ S in X, (e^{G − G_i} · K̂)ᵀ D and e^G · S in the next state.
    part, d_whole = tl.zeros([C, BLOCK_K], tl.float32), 0.0
    for start in tl.range(0, DV, BLOCK_V, num_stages=1):
        v_columns = start + tl.arange(0, BLOCK_V)
        mask = inside[:, None] & (v_columns < DV)[None, :]
        at_state = v_columns[:, None] * DK + k_columns[None, :]
        inside_state = (v_columns < DV)[:, None] & (k_columns < DK)[None, :]
        at_x = rows[:, None] * (Hv * DV) + v_columns[None, :]
        state = tl.load(states_ptr + at_state, mask=inside_state, other=0.0)
        dx = tl.load(dx_ptr + at_x, mask=mask, other=0.0)
        part = tl.dot(dx, state, part, input_precision=PRECISION)
        d_state = tl.load(d_states_ptr + at_state, mask=inside_state, other=0.0)
        d_whole += tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0) * tl.exp(whole)
        v = tl.load(v_ptr + rows[:, None] * v_t + v_columns[None, :], mask=mask, other=0.0)
        dbeta += tl.sum(dx.to(tl.float32) * v.to(tl.float32), 1)
        tl.store(dx_ptr + at_x, (dx.to(tl.float32) * beta[:, None]).to(dtype), mask=mask)
    part *= tl.exp(total)[:, None]
    k = _load_rows(k_ptr, rows, k_t, end, DK, BLOCK_K)
    along = tl.sum(part * k.to(tl.float32), 1) * k_norm
    dbeta -= along
    tl.store(dbeta_ptr + rows * Hv + head, dbeta, mask=inside)
    d_total -= beta * along
    dk -= part * beta[:, None]
    if HAS_OUT:
        part = tl.zeros([C, BLOCK_K], tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=1):
            v_columns = start + tl.arange(0, BLOCK_V)
            mask = inside[:, None] & (v_columns < DV)[None, :]
            at_state = v_columns[:, None] * DK + k_columns[None, :]
            inside_state = (v_columns < DV)[:, None] & (k_columns < DK)[None, :]
            state = tl.load(states_ptr + at_state, mask=inside_state, other=0.0)
            d_out = tl.load(d_out_ptr + rows[:, None] * d_out_t + v_columns[None, :], mask=mask, other=0.0)
            part = tl.dot(d_out, state, part, input_precision=PRECISION)
        part *= (tl.exp(total) * scale)[:, None]
        q = _load_rows(q_ptr, rows, q_t, end, DK, BLOCK_K)
        d_total += tl.sum(part * q.to(tl.float32), 1) * q_norm
        tl.debug_barrier()  # all threads have read S before dq takes its place
        _store_gradient(dq_ptr, dq + part, q, q_norm, slot, head, rows, end, Hv, GROUP, C, DK, BLOCK_K, PART, NORMALIZE)
    part = tl.zeros([C, BLOCK_K], tl.float32)
    for start in tl.range(0, DV, BLOCK_V, num_stages=1):
        v_columns = start + tl.arange(0, BLOCK_V)
        mask = inside[:, None] & (v_columns < DV)[None, :]
        at_state = v_columns[:, None] * DK + k_columns[None, :]
        inside_state = (v_columns < DV)[:, None] & (k_columns < DK)[None, :]
        d_state = tl.load(d_states_ptr + at_state, mask=inside_state, other=0.0)
        d = tl.load(d_ptr + rows[:, None] * DV + v_columns[None, :], mask=mask, other=0.0)
        part = tl.dot(d, d_state, part, input_precision=PRECISION)
    part *= tl.exp(whole - total)[:, None]
    k = _load_rows(k_ptr, rows, k_t, end, DK, BLOCK_K)
    along = tl.sum(part * k.to(tl.float32), 1) * k_norm
    d_total -= along
    d_total += tl.where(rows == end - 1, d_whole + tl.sum(along, 0), 0.0)
    dg = tl.cumsum(tl.where(inside, d_total, 0.0), 0, reverse=True)
    tl.store(dg_ptr + rows * Hv + head, dg, mask=inside)
    tl.debug_barrier()  # all threads have read dS before dk takes its place
    _store_gradient(dk_ptr, dk + part, k, k_norm, slot, head, rows, end, Hv, GROUP, C, DK, BLOCK_K, PART, NORMALIZE)


@triton.jit
def _store_gradient(
    ptr, d, x, norms, slot, head, rows, end, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, PART: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The gradient of q or k if its key head has one value head, otherwise the part of this value head."""
    columns = tl.arange(0, BLOCK_K)[None, :]
    mask = (rows < end)[:, None] & (columns < DK)
    if GROUP == 1:
        d = _unnormalized(x.to(tl.float32), d, norms, NORMALIZE)
        tl.store(ptr + (rows * Hv + head)[:, None] * DK + columns, d.to(ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(ptr + (slot * Hv + head) * PART + tl.arange(0, C)[:, None] * DK + columns, d, mask=mask)


@triton.jit
def _sum_kernel(
    x_ptr, norm_ptr, part_ptr, dx_ptr, cu_ptr, tokens, documents, x_t, x_h, Hk: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr, PART: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """dq or dk of one chunk and key head, from the parts of its value heads."""
    slot, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    index, columns = tl.arange(0, C), tl.arange(0, BLOCK_K)
    rows = first + index
    part_ptr += (slot * Hk + key_head) * (GROUP * PART)
    d = tl.zeros([C, BLOCK_K], tl.float32)
    for member in tl.static_range(GROUP):
        d += _load_rows(part_ptr + member * PART, index, DK, end - first, DK, BLOCK_K)
    x = _load_rows(x_ptr + key_head * x_h, rows, x_t, end, DK, BLOCK_K).to(tl.float32)
    d = _unnormalized(x, d, tl.load(norm_ptr + key_head * tokens + rows, mask=rows < end, other=0.0), NORMALIZE)
    at = (rows * Hk + key_head)[:, None] * DK + columns[None, :]
    mask = (rows < end)[:, None] & (columns < DK)[None, :]
    tl.store(dx_ptr + at, d.to(dx_ptr.dtype.element_ty), mask=mask)


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
        block_k, block_v = (max(triton.next_power_of_2(size), 16) for size in (self.Dk, self.Dv))
        columns = min(block_v, SCAN_COLUMNS)
        self.shape = {"GROUP": self.Hv // self.Hk, "C": CHUNK, "DK": self.Dk, "BLOCK_K": block_k}
        # Three products of TF32 are as good as one of fp32, and tensor cores have them.
        self.precision = {"PRECISION": "tf32x3" if torch.version.hip is None else "ieee"}
        self.chunked = {"DOCUMENTS": triton.next_power_of_2(self.documents)}
        # A chunk of q, k, A, P and v or dO, as many times as there are stages.
        stage = CHUNK * (2 * block_k + 2 * CHUNK + columns) * k.element_size()
        self.scan = self.shape | self.precision | {
            "Hv": self.Hv, "DV": self.Dv, "BLOCK_V": columns, "STAGES": fitting_stages(k, SCAN_STAGES, stage),
            "num_warps": SCAN_WARPS * (2 if block_k * k.element_size() > 256 else 1),
        }  # fmt: skip
        self.scan_grid = (self.documents * self.Hv * triton.cdiv(self.Dv, columns),)
        self.block_v = block_v


def _prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, sizes: _Sizes, scale: float, normalize: bool, need_p: bool
) -> tuple[Tensor, ...]:
    """M without its β, A, P, running sums of g, inverse norms of q and k; all with the heads first."""
    similarity = k.new_empty(sizes.Hv, sizes.tokens, CHUNK, dtype=torch.float32)
    inverse, p = (k.new_empty(sizes.Hv, sizes.tokens, CHUNK) for _ in range(2))
    total = similarity.new_empty(sizes.Hv, sizes.tokens)
    q_norm, k_norm = (similarity.new_empty(sizes.Hk, sizes.tokens) for _ in range(2))
    counts = sizes.tokens, sizes.documents
    _similarity_kernel[(sizes.slots, sizes.Hk)](
        q, k, g, sizes.cu, similarity, p, total, q_norm, k_norm, *counts, *q.stride()[:2], *k.stride()[:2],
        *g.stride(), scale, NORMALIZE=normalize, EPS=L2_EPS, NEED_P=need_p, num_warps=SIMILARITY_WARPS,
        **sizes.shape, **sizes.precision, **sizes.chunked,
    )  # fmt: skip
    _inverse_kernel[(sizes.slots, sizes.Hv)](
        similarity, beta, sizes.cu, inverse, *counts, *beta.stride(), C=CHUNK, num_warps=INVERSE_WARPS, **sizes.chunked
    )
    return similarity, inverse, p, total, q_norm, k_norm


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
        made = _prepare(q, k, g, beta, sizes, scale, normalize, need_out)[1:] if sizes.tokens else (final,) * 5
        # A pointer argument that the constants switch off still has to be a tensor.
        _scan_kernel[sizes.scan_grid](
            q, k, v, beta, sizes.cu, *made, initial, out, final, k, k, sizes.tokens, sizes.documents,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *beta.stride(), scale,
            HAS_INITIAL=initial_state is not None, STORE_OUT=need_out, STORE_STATES=False, **sizes.scan,
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
        m, *made = _prepare(q, k, g, beta, sizes, scale, normalize, has_out)
        _, p, total, q_norm, k_norm = made
        # A pointer argument that the constants switch off still has to be a tensor.
        _scan_kernel[sizes.scan_grid](
            q, k, v, beta, sizes.cu, *made, total if initial_state is None else initial_state.contiguous(), k, total,
            states, d, *counts, *strides, *v.stride()[:2], *beta.stride(), scale,
            HAS_INITIAL=initial_state is not None, STORE_OUT=False, STORE_STATES=True, **sizes.scan,
        )  # fmt: skip
        _scan_back_kernel[sizes.scan_grid](
            q, k, beta, sizes.cu, *made, d_out, total if d_final is None else d_final.contiguous(), d_states, dx,
            d_initial, *counts, *strides, *beta.stride(), *d_out.stride()[:2], scale,
            HAS_OUT=has_out, HAS_FINAL=has_final, STORE_INITIAL=initial_state is not None, **sizes.scan,
        )  # fmt: skip
        grouped = sizes.Hv > sizes.Hk
        parts = [_parts(x) for x in (states, d_states)] if grouped else [dq, dk]
        shared = sizes.shape | sizes.chunked | {"PART": parts[1].stride(1), "NORMALIZE": normalize}
        _gradients_kernel[(sizes.slots, sizes.Hv)](
            q, k, v, beta, sizes.cu, m, p, total, q_norm, k_norm, states, d_states, d, d_out, *parts, dx, dg, dbeta,
            *counts, *strides, *v.stride()[:2], *beta.stride(), *d_out.stride()[:2], scale,
            Hv=sizes.Hv, DV=sizes.Dv, BLOCK_V=max(min(sizes.block_v // 2, GRADIENT_COLUMNS), 16), HAS_OUT=has_out,
            num_warps=GRADIENT_WARPS, **shared, **sizes.precision,
        )  # fmt: skip
        for x, norms, part, grad in zip((q, k), (q_norm, k_norm), parts, (dq, dk), strict=True):
            if grouped and grad.numel():
                _sum_kernel[(sizes.slots, sizes.Hk)](
                    x, norms, part, grad, sizes.cu, *counts, *x.stride()[:2], Hk=sizes.Hk, num_warps=SUM_WARPS, **shared
                )
    return grads


def _parts(states: Tensor) -> Tensor:
    """Room for the gradient of q or k of each chunk and value head in fp32: in place of the states if it fits."""
    slots, Hv, Dk, Dv = states.shape
    row = Dv * states.element_size()
    if row % 4 == 0 and row >= 4 * CHUNK:
        return states.view(torch.float32)
    return states.new_empty(slots, Hv, CHUNK, Dk, dtype=torch.float32)


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


def is_fused(v: Tensor) -> bool:
    """Whether kernels compute the rule for such values: on an accelerator in half precision.

    In float32 the backward was wrong on a GPU, so plain torch runs there.
    """
    return use_triton(v) and (v.dtype != torch.float32 or v.device.type == "cpu")


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
    if not is_fused(v):
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
        if is_fused(v):
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
