"""Kernels of the Kimi delta rule. The first kernels compute, for each chunk, the operands of the scans and the matrices
with one element for each pair of tokens. The other kernels run the scans, and compute the gradients within the chunks.

The formulas are in the docstring of `kimi_delta_rule.py`. At each level of pairs in a chunk, the factors of a row are
computed from two running sums of g: the sum of the row's own token, and the sum of its reference token, which is in
another row. The kernels that go through the levels therefore read the running sums from memory.
"""

from liger_models.kernels.dispatch import tl, triton
from liger_models.kernels.linear_attention.documents import locate
from liger_models.kernels.linear_attention.gated_delta_forward import (
    LEAST_DECAY,
    inverse_norms,
    load_rows,
    owned_columns,
    store_inverse,
)


@triton.jit
def _level(total_ptr, total, level, count, C: tl.constexpr, DK: tl.constexpr, width, BLOCK: tl.constexpr):
    """Return the factors F [C, BLOCK] of a level, and a mask [C, C] of the token pairs that belong to the level.

    Level n divides the chunk into blocks of 2^(n + 1) tokens. The reference token of a block is the last token of its
    first half. Each pair of the level consists of one token from the first half and one token from the second half of
    the same block.
    """
    index, half = tl.arange(0, C), 1 << level
    reference = tl.minimum((index >> (level + 1) << (level + 1)) + half - 1, count - 1)
    at_reference = load_rows(total_ptr, reference, DK, count, width, BLOCK)
    second, block = (index & half) != 0, index >> (level + 1)
    keep = (block[:, None] == block[None, :]) & second[:, None] & ((index & half) == 0)[None, :]
    return tl.exp(-tl.abs(total - at_reference)), keep


@triton.jit
def _rounded(x, factor):
    """Multiply x by a factor in fp32, and round the product to the dtype of x."""
    return (x.to(tl.float32) * factor).to(x.dtype)


@triton.jit
def operands_kernel(
    q_ptr, k_ptr, g_ptr, cu_ptr, total_ptr, norm_ptr, p_ptr, similarity_ptr, q_read_ptr, k_read_ptr, k_write_ptr,
    tokens, documents, q_t, q_h, k_t, k_h, g_t, g_h, scale, H: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, LEVELS: tl.constexpr, DOCUMENTS: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
    NEED_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For one chunk and head, compute the running sums of g, the inverse norms, P, and the operands of the scans.

    Also compute the sums Σ_c e^{G_i − G_j} k̂_i k̂_j, from which A is computed.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    head, index = tl.program_id(1).to(tl.int64), tl.arange(0, C)
    at, count = head * tokens + first, (end - first).to(tl.int32)
    inside, columns = index < count, tl.arange(0, BLOCK_K)[None, :]
    both = inside[:, None] & (columns < DK)
    at_rows = at * DK + index[:, None] * DK + columns

    # Compute the running sums of g, [C, BLOCK_K]. Other threads read them below.
    g = load_rows(g_ptr + head * g_h + first * g_t, index, g_t, count, DK, BLOCK_K).to(tl.float32)
    total = tl.cumsum(tl.where(g < LEAST_DECAY, LEAST_DECAY, g), 0)
    tl.store(total_ptr + at_rows, total, mask=both)
    tl.debug_barrier()
    whole = tl.load(total_ptr + (at + count - 1) * DK + columns, mask=columns < DK, other=0.0)

    # Store the operands of the scans.
    k = load_rows(k_ptr + head * k_h + first * k_t, index, k_t, count, DK, BLOCK_K)
    k_norm = inverse_norms(k, NORMALIZE, EPS)
    tl.store(norm_ptr + at + index, k_norm, mask=inside)
    unit = k.to(tl.float32) * k_norm[:, None]
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    tl.store(k_read_ptr + at_rows, (unit * tl.exp(total)).to(dtype), mask=both)
    tl.store(k_write_ptr + at_rows, (unit * tl.exp(whole - total)).to(dtype), mask=both)
    diagonal = index[:, None] == index[None, :]
    if NEED_P:
        q = load_rows(q_ptr + head * q_h + first * q_t, index, q_t, count, DK, BLOCK_K)
        q_norm = inverse_norms(q, NORMALIZE, EPS)
        tl.store(norm_ptr + (H * tokens + at) + index, q_norm, mask=inside)
        q_norm *= scale
        tl.store(q_read_ptr + at_rows, (q.to(tl.float32) * q_norm[:, None] * tl.exp(total)).to(dtype), mask=both)
        product = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        p = tl.where(diagonal, product[:, None], 0.0)

    # For each level, add the products of the pairs of tokens, [C, C].
    similarity = tl.zeros([C, C], tl.float32)
    for level in tl.range(0, LEVELS, num_stages=1):
        factor, keep = _level(total_ptr + at * DK, total, level, count, C, DK, DK, BLOCK_K)
        keys = _rounded(k, factor)
        similarity += tl.where(keep, tl.dot(keys, tl.trans(keys), input_precision=PRECISION), 0.0)
        if NEED_P:
            queries = _rounded(q, factor)
            p += tl.where(keep, tl.dot(queries, tl.trans(keys), input_precision=PRECISION), 0.0)

    at_pairs = at * C + index[:, None] * C + index[None, :]
    similarity *= k_norm[:, None] * k_norm[None, :]
    tl.store(similarity_ptr + at_pairs, similarity, mask=inside[:, None])
    if NEED_P:
        p *= q_norm[:, None] * k_norm[None, :]
        tl.store(p_ptr + at_pairs, p.to(dtype), mask=inside[:, None])


@triton.jit
def _load_block(similarity_ptr, beta_ptr, beta_t, count, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    """Load a block [16, 16] of M. Elements beyond the last token are 0."""
    rows, columns = ROW + tl.arange(0, 16), COLUMN + tl.arange(0, 16)
    inside = rows < count
    beta = tl.load(beta_ptr + rows * beta_t, mask=inside, other=0.0).to(tl.float32)
    at = similarity_ptr + rows[:, None] * C + columns[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0) * beta[:, None]


@triton.jit
def kimi_inverse_kernel(
    similarity_ptr, beta_ptr, cu_ptr, a_ptr, tokens, documents, beta_t, beta_h, C: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute A of one chunk and head from β and the sums Σ_c e^{G_i − G_j} k̂_i k̂_j."""
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    head, count = tl.program_id(1).to(tl.int64), (end - first).to(tl.int32)
    at, beta = (head * tokens + first) * C, beta_ptr + head * beta_h + first * beta_t
    similarity_ptr += at
    store_inverse(
        a_ptr + at, count,
        _load_block(similarity_ptr, beta, beta_t, count, 0, 0, C),
        _load_block(similarity_ptr, beta, beta_t, count, 16, 16, C),
        _load_block(similarity_ptr, beta, beta_t, count, 32, 32, C),
        _load_block(similarity_ptr, beta, beta_t, count, 48, 48, C),
        _load_block(similarity_ptr, beta, beta_t, count, 16, 0, C),
        _load_block(similarity_ptr, beta, beta_t, count, 32, 0, C),
        _load_block(similarity_ptr, beta, beta_t, count, 32, 16, C),
        _load_block(similarity_ptr, beta, beta_t, count, 48, 0, C),
        _load_block(similarity_ptr, beta, beta_t, count, 48, 16, C),
        _load_block(similarity_ptr, beta, beta_t, count, 48, 32, C),
        C, PRECISION,
    )  # fmt: skip


@triton.jit
def _scan(
    program, q_read_ptr, k_read_ptr, k_write_ptr, v_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, initial_ptr,
    out_ptr, final_ptr, states_ptr, d_ptr, tokens, v_t, v_h, beta_t, beta_h, H: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_OUT: tl.constexpr, STORE_STATES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of a document in order, and store the final state and, with STORE_OUT, the output.

    With STORE_STATES (for the backward), store D and the state before each chunk instead of the final state.
    """
    n, head, _, v_columns = owned_columns(program, H, 1, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_read_ptr.dtype.element_ty

    # Offsets within a chunk: [C, BLOCK_K] for operands, [C, BLOCK_V] for v, o and d, and [C, C] for A and P.
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_k, inside_v = (k_columns < DK)[None, :], (v_columns < DV)[None, :]
    inside_state = (k_columns < DK)[:, None] & inside_v
    at_state = k_columns[:, None] * DV + v_columns[None, :]
    at_k, at_a = index[:, None] * DK + k_columns[None, :], index[:, None] * C + index[None, :]
    at_v, at_out = index[:, None] * v_t + v_columns[None, :], index[:, None] * (H * DV) + v_columns[None, :]
    at_d = index[:, None] * DV + v_columns[None, :]

    # Set pointers to the first chunk. Each step moves them on by a chunk.
    row = head * tokens + start
    q_read_ptr += row * DK
    k_read_ptr += row * DK
    k_write_ptr += row * DK
    total_ptr += row * DK
    v_ptr += head * v_h + start * v_t
    beta_ptr += head * beta_h + start * beta_t
    out_ptr += (start * H + head) * DV
    d_ptr += row * DV
    a_ptr += row * C
    p_ptr += row * C
    states_ptr += ((start // C + n) * H + head) * (DK * DV)

    # S [BLOCK_K, BLOCK_V] is in registers, in fp32.
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + (n * H + head) * (DK * DV) + at_state, mask=inside_state, other=0.0)
    length = (end - start).to(tl.int32)
    for number in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        remaining = length - number * C
        rows = (index < remaining)[:, None]
        k_read = tl.load(k_read_ptr + at_k, mask=rows & inside_k, other=0.0)
        k_write = tl.load(k_write_ptr + at_k, mask=rows & inside_k, other=0.0)
        a = tl.load(a_ptr + at_a, mask=rows, other=0.0)
        v = tl.load(v_ptr + at_v, mask=rows & inside_v, other=0.0)
        beta = tl.load(beta_ptr + index * beta_t, mask=index < remaining, other=0.0).to(tl.float32)
        last = (tl.minimum(remaining, C) - 1) * DK
        whole = tl.load(total_ptr + last + k_columns, mask=k_columns < DK, other=0.0)

        # Compute X = β · (V − Kʳ S) and D = A X, [C, BLOCK_V] each.
        rounded = state.to(dtype)
        read = tl.dot(k_read, rounded, input_precision=PRECISION)
        x = beta[:, None] * (v.to(tl.float32) - read)
        d = tl.dot(a, x.to(dtype), input_precision=PRECISION).to(dtype)

        # Compute O = Qʳ S + P D, [C, BLOCK_V].
        if STORE_OUT:
            q_read = tl.load(q_read_ptr + at_k, mask=rows & inside_k, other=0.0)
            p = tl.load(p_ptr + at_a, mask=rows, other=0.0)
            out = tl.dot(q_read, rounded, input_precision=PRECISION)
            out = tl.dot(p, d, out, input_precision=PRECISION)
            tl.store(out_ptr + at_out, out.to(dtype), mask=rows & inside_v)
        if STORE_STATES:
            tl.store(states_ptr + at_state, rounded, mask=inside_state)
            tl.store(d_ptr + at_d, d, mask=rows & inside_v)

        # Update S ← e^G · S + Kʷᵀ D.
        state = tl.dot(tl.trans(k_write), d, state * tl.exp(whole)[:, None], input_precision=PRECISION)

        q_read_ptr += C * DK
        k_read_ptr += C * DK
        k_write_ptr += C * DK
        total_ptr += C * DK
        v_ptr += C * v_t
        beta_ptr += C * beta_t
        out_ptr += C * H * DV
        d_ptr += C * DV
        a_ptr += C * C
        p_ptr += C * C
        states_ptr += H * DK * DV

    if not STORE_STATES:
        tl.store(final_ptr + (n * H + head) * (DK * DV) + at_state, state, mask=inside_state)


@triton.jit
def kimi_scan_kernel(
    q_read_ptr, k_read_ptr, k_write_ptr, v_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, initial_ptr, out_ptr,
    final_ptr, tokens, v_t, v_h, beta_t, beta_h, H: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_OUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run `_scan` in the forward."""
    _scan(
        tl.program_id(0), q_read_ptr, k_read_ptr, k_write_ptr, v_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr,
        initial_ptr, out_ptr, final_ptr, out_ptr, out_ptr, tokens, v_t, v_h, beta_t, beta_h, H, C, DK, BLOCK_K, DV,
        BLOCK_V, HAS_INITIAL, STORE_OUT, False, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def _scan_back(
    program, q_read_ptr, k_read_ptr, k_write_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, d_out_ptr, d_final_ptr,
    d_states_ptr, dx_ptr, d_initial_ptr, tokens, d_out_t, d_out_h, beta_t, beta_h, H: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_FINAL: tl.constexpr, STORE_INITIAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dX, dS (the gradient of the state after each chunk), and the gradient of the initial state.

    This function goes from the last chunk to the first, and is otherwise built like `_scan`.
    """
    n, head, _, v_columns = owned_columns(program, H, 1, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_read_ptr.dtype.element_ty

    # Offsets within a chunk: [C, BLOCK_K] for operands, [C, BLOCK_V] for dO and dX, and [C, C] for A and P.
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_k, inside_v = (k_columns < DK)[None, :], (v_columns < DV)[None, :]
    inside_state = (k_columns < DK)[:, None] & inside_v
    at_state = k_columns[:, None] * DV + v_columns[None, :]
    at_k, at_a = index[:, None] * DK + k_columns[None, :], index[:, None] * C + index[None, :]
    at_d_out, at_dx = index[:, None] * d_out_t + v_columns[None, :], index[:, None] * DV + v_columns[None, :]

    # Set pointers to the last chunk. Each step moves them back by a chunk.
    length = (end - start).to(tl.int32)
    chunks = tl.cdiv(length, C)
    last = start + (chunks - 1) * C
    row = head * tokens + last
    q_read_ptr += row * DK
    k_read_ptr += row * DK
    k_write_ptr += row * DK
    total_ptr += row * DK
    d_out_ptr += head * d_out_h + last * d_out_t
    beta_ptr += head * beta_h + last * beta_t
    dx_ptr += row * DV
    a_ptr += row * C
    p_ptr += row * C
    d_states_ptr += ((start // C + n + chunks - 1) * H + head) * (DK * DV)

    # dS [BLOCK_K, BLOCK_V] is in registers, in fp32.
    d_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_FINAL:
        d_state = tl.load(d_final_ptr + (n * H + head) * (DK * DV) + at_state, mask=inside_state, other=0.0)
    for step in tl.range(0, chunks, num_stages=STAGES):
        remaining = length - (chunks - 1 - step) * C
        rows = (index < remaining)[:, None]
        k_read = tl.load(k_read_ptr + at_k, mask=rows & inside_k, other=0.0)
        k_write = tl.load(k_write_ptr + at_k, mask=rows & inside_k, other=0.0)
        a = tl.load(a_ptr + at_a, mask=rows, other=0.0)
        beta = tl.load(beta_ptr + index * beta_t, mask=index < remaining, other=0.0).to(tl.float32)
        end_row = (tl.minimum(remaining, C) - 1) * DK
        whole = tl.load(total_ptr + end_row + k_columns, mask=k_columns < DK, other=0.0)

        # Compute dD = Pᵀ dO + Kʷ dS, [C, BLOCK_V], and the part of dS that comes from O.
        rounded = d_state.to(dtype)
        tl.store(d_states_ptr + at_state, rounded, mask=inside_state)
        dd = tl.dot(k_write, rounded, input_precision=PRECISION)
        d_state *= tl.exp(whole)[:, None]
        if HAS_OUT:
            q_read = tl.load(q_read_ptr + at_k, mask=rows & inside_k, other=0.0)
            p = tl.load(p_ptr + at_a, mask=rows, other=0.0)
            d_out = tl.load(d_out_ptr + at_d_out, mask=rows & inside_v, other=0.0)
            dd = tl.dot(tl.trans(p), d_out, dd, input_precision=PRECISION)
            d_state = tl.dot(tl.trans(q_read), d_out, d_state, input_precision=PRECISION)

        # Compute dX = Aᵀ dD, and the part of dS that comes from X.
        dx = tl.dot(tl.trans(a), dd.to(dtype), input_precision=PRECISION)
        tl.store(dx_ptr + at_dx, dx.to(dtype), mask=rows & inside_v)
        d_read = (-dx * beta[:, None]).to(dtype)
        d_state = tl.dot(tl.trans(k_read), d_read, d_state, input_precision=PRECISION)

        q_read_ptr -= C * DK
        k_read_ptr -= C * DK
        k_write_ptr -= C * DK
        total_ptr -= C * DK
        d_out_ptr -= C * d_out_t
        beta_ptr -= C * beta_t
        dx_ptr -= C * DV
        a_ptr -= C * C
        p_ptr -= C * C
        d_states_ptr -= H * DK * DV

    if STORE_INITIAL:
        tl.store(d_initial_ptr + (n * H + head) * (DK * DV) + at_state, d_state, mask=inside_state)


@triton.jit
def kimi_scans_kernel(
    q_read_ptr, k_read_ptr, k_write_ptr, v_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, initial_ptr, states_ptr,
    d_ptr, d_out_ptr, d_final_ptr, d_states_ptr, dx_ptr, d_initial_ptr, tokens, v_t, v_h, beta_t, beta_h, d_out_t,
    d_out_h, H: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_OUT: tl.constexpr, HAS_FINAL: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run the two scans of the backward at the same time, each in one half of the programs, as in the gated delta
    rule."""
    programs = tl.num_programs(0) // 2
    program = tl.program_id(0)
    if program < programs:
        _scan_back(
            program, q_read_ptr, k_read_ptr, k_write_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, d_out_ptr,
            d_final_ptr, d_states_ptr, dx_ptr, d_initial_ptr, tokens, d_out_t, d_out_h, beta_t, beta_h, H, C, DK,
            BLOCK_K, DV, BLOCK_V, HAS_OUT, HAS_FINAL, HAS_INITIAL, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _scan(
            program - programs, q_read_ptr, k_read_ptr, k_write_ptr, v_ptr, beta_ptr, cu_ptr, a_ptr, p_ptr, total_ptr,
            initial_ptr, d_ptr, initial_ptr, states_ptr, d_ptr, tokens, v_t, v_h, beta_t, beta_h, H, C, DK, BLOCK_K,
            DV, BLOCK_V, HAS_INITIAL, False, True, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _load_state(ptr, start, DK: tl.constexpr, first, BLOCK: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr):
    """Load the part of a state that begins at row ``first`` and column ``start``, transposed to [BLOCK_V, BLOCK]."""
    columns, rows = start + tl.arange(0, BLOCK_V), first + tl.arange(0, BLOCK)
    inside = (columns < DV)[:, None] & (rows < DK)[None, :]
    return tl.load(ptr + rows[None, :] * DV + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _store_gradient(
    out_ptr, raw_ptr, x_ptr, x_t, norm, along, count, row_size: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x [C, DK], where x is q or k.

    ``norm`` is the inverse L2 norm of x. Let x̂ = x · norm be the normalized x. ``raw_ptr`` points to a matrix R, which
    is ``norm`` times the gradient of x̂. ``along`` holds the dot product of each row of R and the same row of x̂.
    """
    tl.debug_barrier()  # wait until other threads have stored what is read below
    index = tl.arange(0, C)
    for first in tl.range(0, DK, BLOCK, num_stages=1):
        dx = load_rows(raw_ptr + first, index, DK, count, DK - first, BLOCK)
        if NORMALIZE:
            x = load_rows(x_ptr + first, index, x_t, count, DK - first, BLOCK).to(tl.float32)
            dx -= x * (norm * along)[:, None]
        columns = first + tl.arange(0, BLOCK)[None, :]
        at = out_ptr + index[:, None] * row_size + columns
        tl.store(at, dx.to(out_ptr.dtype.element_ty), mask=(index < count)[:, None] & (columns < DK))


@triton.jit
def kimi_query_gradients_kernel(
    d_out_ptr, d_ptr, states_ptr, q_ptr, k_ptr, cu_ptr, total_ptr, norm_ptr, pairs_ptr, d_total_ptr, raw_ptr, dq_ptr,
    tokens, documents, d_out_t, d_out_h, q_t, q_h, k_t, k_h, scale, H: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, LEVELS: tl.constexpr, DOCUMENTS: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For one chunk and head, compute dq, dP scaled by norms, and the terms of dG that contain q̂.

    This kernel computes BLOCK channels at a time, as the kernel for the keys does. With more channels at a time,
    registers would spill.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    slot, head, index = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, C)
    at, count = head * tokens + first, (end - first).to(tl.int32)
    inside, at_pairs = index < count, at * C + index[:, None] * C + index[None, :]
    states_ptr += (slot * H + head) * (DK * DV)
    d_out_ptr += head * d_out_h + first * d_out_t
    d_ptr += at * DV
    q_ptr += head * q_h + first * q_t
    k_ptr += head * k_h + first * k_t
    total_ptr += at * DK
    d_total_ptr += at * DK
    raw_ptr += at * DK

    # Compute dP = dO Dᵀ, [C, C], scaled by norms.
    q_norm = tl.load(norm_ptr + (H * tokens + at) + index, mask=inside, other=0.0)
    k_norm = tl.load(norm_ptr + at + index, mask=inside, other=0.0)
    pairs = tl.zeros([C, C], tl.float32)
    for start in tl.range(0, DV, BLOCK_V, num_stages=1):
        d_out = load_rows(d_out_ptr + start, index, d_out_t, count, DV - start, BLOCK_V)
        d = load_rows(d_ptr + start, index, DV, count, DV - start, BLOCK_V)
        pairs = tl.dot(d_out, tl.trans(d), pairs, input_precision=PRECISION)
    dp = (pairs * ((q_norm * scale)[:, None] * k_norm[None, :])).to(pairs_ptr.dtype.element_ty)
    tl.store(pairs_ptr + at_pairs, dp, mask=inside[:, None])
    itself = tl.sum(tl.where(index[:, None] == index[None, :], dp.to(tl.float32), 0.0), 1)

    along = tl.zeros([C], tl.float32)
    for channel in tl.range(0, DK, BLOCK, num_stages=1):
        width = DK - channel

        # Compute dO Sᵀ [C, BLOCK], and continue through the queries' norms and decays.
        dq = tl.zeros([C, BLOCK], tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=1):
            d_out = load_rows(d_out_ptr + start, index, d_out_t, count, DV - start, BLOCK_V)
            state = _load_state(states_ptr, start, DK, channel, BLOCK, DV, BLOCK_V)
            dq = tl.dot(d_out, state, dq, input_precision=PRECISION)
        q = load_rows(q_ptr + channel, index, q_t, count, width, BLOCK)
        k = load_rows(k_ptr + channel, index, k_t, count, width, BLOCK)
        total = load_rows(total_ptr + channel, index, DK, count, width, BLOCK)
        dq *= tl.exp(total) * (q_norm * scale)[:, None]
        d_total = dq * q.to(tl.float32)

        # Add the terms of the pairs of tokens. The pair of a token with itself does not depend on decays.
        dq += itself[:, None] * k.to(tl.float32)
        for level in tl.range(0, LEVELS, num_stages=1):
            factor, keep = _level(total_ptr + channel, total, level, count, C, DK, width, BLOCK)
            kept = tl.where(keep, dp, tl.zeros_like(dp))
            product = tl.dot(kept, _rounded(k, factor), input_precision=PRECISION)
            dq += product * factor
            d_total += product * _rounded(q, factor).to(tl.float32)

        columns = channel + tl.arange(0, BLOCK)[None, :]
        at_rows, mask = index[:, None] * DK + columns, inside[:, None] & (columns < DK)
        tl.store(d_total_ptr + at_rows, d_total, mask=mask)
        tl.store(raw_ptr + at_rows, dq, mask=mask)
        along += tl.sum(dq * q.to(tl.float32), 1) * q_norm

    at_dq = dq_ptr + (first * H + head) * DK
    _store_gradient(at_dq, raw_ptr, q_ptr, q_t, q_norm, along, count, H * DK, C, DK, BLOCK, NORMALIZE)


@triton.jit
def kimi_key_gradients_kernel(
    d_ptr, dx_ptr, states_ptr, d_states_ptr, q_ptr, k_ptr, v_ptr, beta_ptr, cu_ptr, total_ptr, norm_ptr, similarity_ptr,
    pairs_ptr, d_total_ptr, raw_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, tokens, documents, q_t, q_h, k_t, k_h, v_t, v_h,
    beta_t, beta_h, H: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK: tl.constexpr, DV: tl.constexpr,
    BLOCK_V: tl.constexpr, LEVELS: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_OUT: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv, dβ and dg of one chunk and head, BLOCK channels of k and g at a time."""
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    slot, head, index = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, C)
    at, count = head * tokens + first, (end - first).to(tl.int32)
    inside, at_pairs = index < count, at * C + index[:, None] * C + index[None, :]
    at_state, at_out = (slot * H + head) * (DK * DV), first * H + head
    q_ptr += head * q_h + first * q_t
    k_ptr += head * k_h + first * k_t
    v_ptr += head * v_h + first * v_t
    d_ptr += at * DV
    dx_ptr += at * DV
    total_ptr += at * DK
    d_total_ptr += at * DK
    raw_ptr += at * DK
    beta = tl.load(beta_ptr + head * beta_h + (first + index) * beta_t, mask=inside, other=0.0).to(tl.float32)
    k_norm = tl.load(norm_ptr + at + index, mask=inside, other=0.0)

    # Compute Y = dX Dᵀ [C, C] and dX · V [C], and store dV = β · dX.
    y, d_beta = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    for start in tl.range(0, DV, BLOCK_V, num_stages=1):
        dx = load_rows(dx_ptr + start, index, DV, count, DV - start, BLOCK_V)
        d = load_rows(d_ptr + start, index, DV, count, DV - start, BLOCK_V)
        y = tl.dot(dx, tl.trans(d), y, input_precision=PRECISION)
        v = load_rows(v_ptr + start, index, v_t, count, DV - start, BLOCK_V)
        d_beta += tl.sum(dx.to(tl.float32) * v.to(tl.float32), 1)
        columns = start + tl.arange(0, BLOCK_V)[None, :]
        at_dv = dv_ptr + at_out * DV + index[:, None] * (H * DV) + columns
        tl.store(at_dv, (dx.to(tl.float32) * beta[:, None]).to(dx.dtype), mask=inside[:, None] & (columns < DV))

    # −Y is the gradient of M, so Y contributes to the gradient of β. Afterwards, Y is scaled by β and by the norms.
    y = tl.where(index[:, None] > index[None, :], y, 0.0)
    d_beta -= tl.sum(y * tl.load(similarity_ptr + at_pairs, mask=inside[:, None], other=0.0), 1)
    scaled = (y * ((beta * k_norm)[:, None] * k_norm[None, :])).to(pairs_ptr.dtype.element_ty)
    if HAS_OUT:
        dp = tl.load(pairs_ptr + at_pairs, mask=inside[:, None] & inside[None, :], other=0.0)
        itself = tl.sum(tl.where(index[:, None] == index[None, :], dp.to(tl.float32), 0.0), 1)

    along = tl.zeros([C], tl.float32)
    for channel in tl.range(0, DK, BLOCK, num_stages=1):
        width, columns = DK - channel, channel + tl.arange(0, BLOCK)
        at_rows, mask = index[:, None] * DK + columns[None, :], inside[:, None] & (columns < DK)[None, :]

        # Compute dX Sᵀ and D dSᵀ [C, BLOCK], and the row sums of S ∘ dS, which are the gradient of the whole chunk's
        # decay.
        read, write = tl.zeros([C, BLOCK], tl.float32), tl.zeros([C, BLOCK], tl.float32)
        d_whole = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=1):
            state = _load_state(states_ptr + at_state, start, DK, channel, BLOCK, DV, BLOCK_V)
            dx = load_rows(dx_ptr + start, index, DV, count, DV - start, BLOCK_V)
            read = tl.dot(dx, state, read, input_precision=PRECISION)
            d_state = _load_state(d_states_ptr + at_state, start, DK, channel, BLOCK, DV, BLOCK_V)
            d = load_rows(d_ptr + start, index, DV, count, DV - start, BLOCK_V)
            write = tl.dot(d, d_state, write, input_precision=PRECISION)
            d_whole += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 0)

        # Continue through the keys' norms and decays.
        k = load_rows(k_ptr + channel, index, k_t, count, width, BLOCK)
        total = load_rows(total_ptr + channel, index, DK, count, width, BLOCK)
        whole = tl.load(total_ptr + (count - 1) * DK + columns, mask=columns < DK, other=0.0)
        read *= tl.exp(total) * k_norm[:, None]
        write *= tl.exp(whole[None, :] - total) * k_norm[:, None]
        dk = write - read * beta[:, None]
        read *= k.to(tl.float32)
        write = tl.where(mask, write * k.to(tl.float32), 0.0)
        d_beta -= tl.sum(read, 1)
        d_whole = d_whole * tl.exp(whole) + tl.sum(write, 0)
        d_total = -write - read * beta[:, None]
        if HAS_OUT:
            d_total += load_rows(d_total_ptr + channel, index, DK, count, width, BLOCK)
            q = load_rows(q_ptr + channel, index, q_t, count, width, BLOCK)
            dk += itself[:, None] * q.to(tl.float32)

        # Add the terms of the pairs of tokens. At each level, a token of the second half of its block only reads, and a
        # token of the first half only writes.
        for level in tl.range(0, LEVELS, num_stages=1):
            factor, keep = _level(total_ptr + channel, total, level, count, C, DK, width, BLOCK)
            keys = _rounded(k, factor)
            kept = tl.where(keep, scaled, tl.zeros_like(scaled))
            product = tl.dot(kept + tl.trans(kept), keys, input_precision=PRECISION)
            if HAS_OUT:
                kept = tl.where(keep, dp, tl.zeros_like(dp))
                product -= tl.dot(tl.trans(kept), _rounded(q, factor), input_precision=PRECISION)
            dk -= product * factor
            sign = tl.where((index >> level & 1) != 0, -1.0, 1.0)
            d_total += product * keys.to(tl.float32) * sign[:, None]

        # A token's g is part of the running sums of this token and all later tokens.
        dg = tl.cumsum(tl.where(mask, d_total, 0.0), 0, reverse=True) + d_whole[None, :]
        at_dg = dg_ptr + at_out * DK + index[:, None] * (H * DK) + columns[None, :]
        tl.store(at_dg, dg.to(dg_ptr.dtype.element_ty), mask=mask)
        tl.store(raw_ptr + at_rows, dk, mask=mask)
        along += tl.sum(dk * k.to(tl.float32), 1) * k_norm

    tl.store(dbeta_ptr + at_out + index * H, d_beta.to(dbeta_ptr.dtype.element_ty), mask=inside)
    _store_gradient(dk_ptr + at_out * DK, raw_ptr, k_ptr, k_t, k_norm, along, count, H * DK, C, DK, BLOCK, NORMALIZE)
