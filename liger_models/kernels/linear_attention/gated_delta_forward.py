"""Forward kernels of the gated delta rule: P and A of each chunk, the scan over the chunks, and the recurrence.

The formulas are in the docstring of `gated_delta_rule.py`. The backward runs the scan again to store the states.
"""

from liger_models.kernels.dispatch import tl, triton
from liger_models.kernels.linear_attention.documents import locate
from liger_models.kernels.tiles import exp

LEAST_DECAY = tl.constexpr(-87.0)
"""Lower bound of the logarithm of a token's decay, about log(1e-38). A smaller logarithm is replaced by this number.
The logarithm of the decay between two tokens is a difference of two running sums within a chunk. Large running sums
would make this difference inaccurate."""


@triton.jit
def load_rows(ptr, rows, stride, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of a matrix [tokens, WIDTH]. Row ``end`` and all later rows are 0."""
    columns = tl.arange(0, BLOCK)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns, mask=(rows < end)[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def inverse_norms(x, NORMALIZE: tl.constexpr, EPS: tl.constexpr):
    """Compute 1 / |x| [rows] for each row of x. Without NORMALIZE, return 1."""
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    return 1.0 / tl.sqrt(square + EPS) if NORMALIZE else tl.zeros_like(square) + 1.0


@triton.jit
def decays(left, right, keep):
    """Compute exp(left_i − right_j) where ``keep`` is True, and 0 elsewhere."""
    return exp(tl.where(keep, left[:, None] - right[None, :], float("-inf")))


@triton.jit
def similarity_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, cu_ptr, p_ptr, total_ptr, q_norm_ptr, k_norm_ptr, factor_ptr, tokens, documents, q_t,
    q_h, k_t, k_h, g_t, g_h, beta_t, beta_h, scale, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr, NEED_P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """For one chunk and key head, compute P, the running sums of g, the inverse norms of q and k, and the coefficients
    of each row.

    Each row has four coefficients: (1) β, (2) the coefficient of −K S in X, (3) the coefficient of D in the next state,
    and (4) the coefficient of Q S in O. Coefficients (2), (3) and (4) are already multiplied by the inverse norm of k
    or q.
    """
    key_head = tl.program_id(1).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return

    # Compute inverse norms of keys and queries, [C] each, and q̂ · k̂ᵀ [C, C], which all value heads share.
    index = tl.arange(0, C)
    rows = first + index
    inside = rows < end
    k = load_rows(k_ptr + key_head * k_h, rows, k_t, end, DK, BLOCK_K)
    k_norm = inverse_norms(k, NORMALIZE, EPS)
    tl.store(k_norm_ptr + key_head * tokens + rows, k_norm, mask=inside)
    if NEED_P:
        q = load_rows(q_ptr + key_head * q_h, rows, q_t, end, DK, BLOCK_K)
        q_norm = inverse_norms(q, NORMALIZE, EPS)
        tl.store(q_norm_ptr + key_head * tokens + rows, q_norm, mask=inside)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * q_norm[:, None] * k_norm[None, :])

    # For each value head, compute the running sums of g [C], the coefficients of rows [C], and P [C, C].
    for head in range(key_head * GROUP, (key_head + 1) * GROUP):
        g = tl.load(g_ptr + head * g_h + rows * g_t, mask=inside, other=0.0).to(tl.float32)
        total = tl.cumsum(tl.where(g < LEAST_DECAY, LEAST_DECAY, g), 0)
        beta = tl.load(beta_ptr + head * beta_h + rows * beta_t, mask=inside, other=0.0).to(tl.float32)
        tl.store(total_ptr + head * tokens + rows, total, mask=inside)
        factors = factor_ptr + 4 * head * tokens + rows
        tl.store(factors, beta, mask=inside)
        tl.store(factors + tokens, beta * exp(total) * k_norm, mask=inside)
        whole = tl.sum(tl.where(rows == end - 1, total, 0.0), 0)
        tl.store(factors + 2 * tokens, exp(whole - total) * k_norm, mask=inside)
        if NEED_P:
            p = qk * decays(total, total, index[:, None] >= index[None, :])
            at = (head * tokens + rows)[:, None] * C + index[None, :]
            tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside[:, None])
            tl.store(factors + 3 * tokens, exp(total) * q_norm * scale, mask=inside)


@triton.jit
def _times(left, right, PRECISION: tl.constexpr):
    """Compute left @ right as a batched matrix product with a batch size of 1.

    For each product that is not batched, the compiler of Triton searches for all other products that depend on this
    product, or on which this product depends. For the 40 products from which an inverse is computed, this search took
    half of the compilation time. Batched products are not searched in this way.
    """
    return tl.reshape(tl.dot(left[None], right[None], input_precision=PRECISION), left.shape)


@triton.jit
def _add_dots(sum, left, right, PRECISION: tl.constexpr):
    """Compute sum + left @ rightᵀ."""
    return tl.dot(left, tl.trans(right), sum, input_precision=PRECISION)


@triton.jit
def _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, ROW: tl.constexpr):
    """Load three numbers for each of the 16 rows from ``ROW`` on: the running sum of g, β / |k|, and 1 / |k|."""
    rows = ROW + tl.arange(0, 16)
    norm = tl.load(k_norm_ptr + rows, mask=rows < count, other=0.0)
    beta = tl.load(factor_ptr + rows, mask=rows < count, other=0.0)
    return tl.load(total_ptr + tl.minimum(rows, count - 1)), beta * norm, norm


@triton.jit
def _scale_block(products, left, right, keep):
    """Compute a block of M from the products k_i·k_j and the coefficients of the block's rows and columns."""
    return products * decays(left[0], right[0], keep) * left[1][:, None] * right[2][None, :]


@triton.jit
def _invert_block(m, PRECISION: tl.constexpr):
    """Compute (I + m)⁻¹ for a diagonal block m [16, 16] of M.

    The inverse is built up from inverses of diagonal blocks: first of size 2, then of size 4, then of size 8.
    """
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    a = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -m, 0.0))
    for i in tl.static_range(1, 4):
        apart = (row >> i != column >> i) & (row >> (i + 1) == column >> (i + 1))
        a -= _times(a, _times(tl.where(apart, m, 0.0), a, PRECISION), PRECISION)
    return a


@triton.jit
def _store_block(a_ptr, x, count, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    """Store a block [16, 16] of A [C, C], except for rows beyond the last token."""
    rows, columns = ROW + tl.arange(0, 16), COLUMN + tl.arange(0, 16)
    at = a_ptr + rows[:, None] * C + columns[None, :]
    tl.store(at, x.to(a_ptr.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def store_inverse(
    a_ptr, count, m00, m11, m22, m33, m10, m20, m21, m30, m31, m32, C: tl.constexpr, PRECISION: tl.constexpr
):
    """Compute A [C, C] of a chunk from the ten blocks [16, 16] of M that are on or below the diagonal, and store A."""
    none = tl.zeros([16, 16], tl.float32)
    a00, a11 = _invert_block(m00, PRECISION), _invert_block(m11, PRECISION)
    a22, a33 = _invert_block(m22, PRECISION), _invert_block(m33, PRECISION)
    # Each block is stored as soon as no later product needs it, which frees its registers. The blocks above the
    # diagonal are 0.
    _store_block(a_ptr, none, count, 0, 16, C)
    _store_block(a_ptr, none, count, 0, 32, C)
    _store_block(a_ptr, none, count, 0, 48, C)
    _store_block(a_ptr, none, count, 16, 32, C)
    _store_block(a_ptr, none, count, 16, 48, C)
    _store_block(a_ptr, none, count, 32, 48, C)

    # Forward substitution: A_ij = −A_ii · Σ_{j ≤ l < i} M_il · A_lj.
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
def inverse_kernel(
    k_ptr, total_ptr, factor_ptr, k_norm_ptr, cu_ptr, a_ptr, tokens, documents, k_t, k_h, GROUP: tl.constexpr,
    C: tl.constexpr, DK: tl.constexpr, BLOCK: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute A of one chunk and value head in blocks of 16 x 16.

    First the diagonal blocks are inverted. Then the blocks below the diagonal are computed as products.
    """
    head = tl.program_id(1).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return

    # Set all pointers to the first token of the chunk.
    count, index = (end - first).to(tl.int32), tl.arange(0, 16)
    k_ptr += head // GROUP * k_h + first * k_t
    k_norm_ptr += head // GROUP * tokens + first
    total_ptr += head * tokens + first
    factor_ptr += 4 * head * tokens + first
    a_ptr += (head * tokens + first) * C

    # Compute the ten blocks [16, 16] of k · kᵀ on and below the diagonal, summing over BLOCK columns at a time.
    none = tl.zeros([16, 16], tl.float32)
    m00, m11, m22, m33, m10, m20, m21, m30, m31, m32 = none, none, none, none, none, none, none, none, none, none
    for start in tl.range(0, DK, BLOCK, num_stages=STAGES):
        k0 = load_rows(k_ptr + start, index, k_t, count, DK - start, BLOCK)
        k1 = load_rows(k_ptr + start, 16 + index, k_t, count, DK - start, BLOCK)
        k2 = load_rows(k_ptr + start, 32 + index, k_t, count, DK - start, BLOCK)
        k3 = load_rows(k_ptr + start, 48 + index, k_t, count, DK - start, BLOCK)
        m00, m11 = _add_dots(m00, k0, k0, PRECISION), _add_dots(m11, k1, k1, PRECISION)
        m22, m33 = _add_dots(m22, k2, k2, PRECISION), _add_dots(m33, k3, k3, PRECISION)
        m10, m20 = _add_dots(m10, k1, k0, PRECISION), _add_dots(m20, k2, k0, PRECISION)
        m21, m30 = _add_dots(m21, k2, k1, PRECISION), _add_dots(m30, k3, k0, PRECISION)
        m31, m32 = _add_dots(m31, k3, k1, PRECISION), _add_dots(m32, k3, k2, PRECISION)

    # Scale the blocks of k · kᵀ to obtain the blocks of M.
    f0 = _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, 0)
    f1 = _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, 16)
    f2 = _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, 32)
    f3 = _load_factors(total_ptr, factor_ptr, k_norm_ptr, count, 48)
    lower = index[:, None] > index[None, :]
    m00, m11 = _scale_block(m00, f0, f0, lower), _scale_block(m11, f1, f1, lower)
    m22, m33 = _scale_block(m22, f2, f2, lower), _scale_block(m33, f3, f3, lower)
    m10, m20, m21 = _scale_block(m10, f1, f0, True), _scale_block(m20, f2, f0, True), _scale_block(m21, f2, f1, True)
    m30, m31, m32 = _scale_block(m30, f3, f0, True), _scale_block(m31, f3, f1, True), _scale_block(m32, f3, f2, True)
    store_inverse(a_ptr, count, m00, m11, m22, m33, m10, m20, m21, m30, m31, m32, C, PRECISION)


@triton.jit
def owned_columns(program, Hv: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return what a program of a scan processes: its document, value head, key head, and columns of the state."""
    BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    head = (program // BLOCKS % Hv).to(tl.int64)
    columns = program % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    return (program // (BLOCKS * Hv)).to(tl.int64), head, head // GROUP, columns


@triton.jit
def scan(
    program, q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, out_ptr, final_ptr,
    states_ptr, d_ptr, tokens, q_t, q_h, k_t, k_h, v_t, v_h, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_OUT: tl.constexpr, STORE_STATES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of a document in order, and store the final state and, with STORE_OUT, the output.

    With STORE_STATES (for the backward), store D and the state before each chunk instead of the final state. There are
    few programs per multiprocessor, so each step must be short. To shorten the steps, earlier kernels compute
    everything that all columns share, and offsets within a chunk are 32-bit numbers.
    """
    n, head, key_head, v_columns = owned_columns(program, Hv, GROUP, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_ptr.dtype.element_ty

    # Offsets within a chunk: [C, BLOCK_K] for q and k, [C, BLOCK_V] for v, o and d, and [C, C] for A and P.
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_v = (v_columns < DV)[None, :]
    inside_k = (k_columns < DK)[None, :]
    inside_state = (k_columns < DK)[:, None] & inside_v
    at_state = k_columns[:, None] * DV + v_columns[None, :]
    at_q, at_k = index[:, None] * q_t + k_columns[None, :], index[:, None] * k_t + k_columns[None, :]
    at_v, at_out = index[:, None] * v_t + v_columns[None, :], index[:, None] * (Hv * DV) + v_columns[None, :]
    at_d, at_a = index[:, None] * DV + v_columns[None, :], index[:, None] * C + index[None, :]

    # Set pointers to the first chunk. Each step moves them on by a chunk.
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

    # S [BLOCK_K, BLOCK_V] is in registers, in fp32.
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + (n * Hv + head) * (DK * DV) + at_state, mask=inside_state, other=0.0)
    length = (end - start).to(tl.int32)
    for number in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        remaining = length - number * C
        inside = index < remaining
        rows = inside[:, None]
        k = tl.load(k_ptr + at_k, mask=rows & inside_k, other=0.0)
        a = tl.load(a_ptr + at_a, mask=rows, other=0.0)
        v = tl.load(v_ptr + at_v, mask=rows & inside_v, other=0.0)
        beta = tl.load(factor_ptr + index, mask=inside, other=0.0)
        read_factor = tl.load(factor_ptr + tokens + index, mask=inside, other=0.0)
        write_factor = tl.load(factor_ptr + 2 * tokens + index, mask=inside, other=0.0)
        whole = tl.load(total_ptr + tl.minimum(remaining, C) - 1)

        # Compute X = β · (V − e^G · K̂ S) and D = A X, [C, BLOCK_V] each.
        rounded = state.to(dtype)
        read = tl.dot(k, rounded, input_precision=PRECISION)
        x = beta[:, None] * v.to(tl.float32) - read_factor[:, None] * read
        d = tl.dot(a, x.to(dtype), input_precision=PRECISION)

        # Compute O = scale · e^G · Q̂ S + P D, [C, BLOCK_V].
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

        # Update S ← e^G · S + (e^{G − G_i} · K̂)ᵀ D.
        update = (d * write_factor[:, None]).to(dtype)
        state = tl.dot(tl.trans(k), update, state * exp(whole), input_precision=PRECISION)

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
def scan_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, out_ptr, final_ptr, tokens, q_t, q_h,
    k_t, k_h, v_t, v_h, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_OUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run `scan` in the forward."""
    scan(
        tl.program_id(0), q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, out_ptr,
        final_ptr, out_ptr, out_ptr, tokens, q_t, q_h, k_t, k_h, v_t, v_h, Hv, GROUP, C, DK, BLOCK_K, DV, BLOCK_V,
        HAS_INITIAL, STORE_OUT, False, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, initial_ptr, out_ptr, final_ptr, T, q_t, q_h, k_t, k_h, v_t, v_h,
    g_t, g_h, beta_t, beta_h, scale, Hv: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Compute the recurrence token by token. Each head has one decay or, with BY_CHANNEL, one decay per channel of its
    keys.
    """
    n, head, key_head, v_columns = owned_columns(tl.program_id(0), Hv, GROUP, DV, BLOCK_V)
    k_columns = tl.arange(0, BLOCK_K)
    inside_k, inside_v = k_columns < DK, v_columns < DV
    inside_state = inside_k[:, None] & inside_v[None, :]
    at_state = (n * Hv + head) * (DK * DV) + k_columns[:, None] * DV + v_columns[None, :]

    # S [BLOCK_K, BLOCK_V] is in registers, in fp32.
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + at_state, mask=inside_state, other=0.0)
    for row in range(n * T, (n + 1) * T):
        q = tl.load(q_ptr + row * q_t + key_head * q_h + k_columns, mask=inside_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + row * k_t + key_head * k_h + k_columns, mask=inside_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * v_t + head * v_h + v_columns, mask=inside_v, other=0.0).to(tl.float32)
        if BY_CHANNEL:
            g = tl.load(g_ptr + row * g_t + head * g_h + k_columns, mask=inside_k, other=0.0).to(tl.float32)[:, None]
        else:
            g = tl.load(g_ptr + row * g_t + head * g_h).to(tl.float32)
        beta = tl.load(beta_ptr + row * beta_t + head * beta_h).to(tl.float32)
        if NORMALIZE:
            q = q / tl.sqrt(tl.sum(q * q, 0) + EPS)
            k = k / tl.sqrt(tl.sum(k * k, 0) + EPS)

        # Decay the state, read it with the key, write to it, and read it with the query.
        state *= tl.exp(g)
        d = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * d[None, :]
        out = tl.sum(state * (q * scale)[:, None], 0)
        tl.store(out_ptr + (row * Hv + head) * DV + v_columns, out.to(out_ptr.dtype.element_ty), mask=inside_v)
    tl.store(final_ptr + at_state, state, mask=inside_state)
