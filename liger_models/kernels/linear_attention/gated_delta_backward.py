"""Backward kernels of the gated delta rule: two scans over the chunks, then the gradients within each chunk.

The formulas are in the docstring of `gated_delta_rule.py`.
"""

from liger_models.kernels.dispatch import tl, triton
from liger_models.kernels.linear_attention.documents import locate
from liger_models.kernels.linear_attention.gated_delta_forward import load_rows, owned_columns, scan
from liger_models.kernels.tiles import exp


@triton.jit
def _scan_back(
    program, q_ptr, k_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, d_out_ptr, d_final_ptr, d_states_ptr, dx_ptr,
    d_initial_ptr, tokens, q_t, q_h, k_t, k_h, d_out_t, d_out_h, Hv: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_FINAL: tl.constexpr, STORE_INITIAL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dX, dS (the gradient of the state after each chunk), and the gradient of the initial state.

    This function goes from the last chunk to the first, and is otherwise built like `scan`.
    """
    n, head, key_head, v_columns = owned_columns(program, Hv, GROUP, DV, BLOCK_V)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = k_ptr.dtype.element_ty

    # Offsets within a chunk: [C, BLOCK_K] for q and k, [C, BLOCK_V] for dO and dX, and [C, C] for A and P.
    k_columns, index = tl.arange(0, BLOCK_K), tl.arange(0, C)
    inside_v = (v_columns < DV)[None, :]
    inside_k = (k_columns < DK)[None, :]
    inside_state = (k_columns < DK)[:, None] & inside_v
    at_state = k_columns[:, None] * DV + v_columns[None, :]
    at_q, at_k = index[:, None] * q_t + k_columns[None, :], index[:, None] * k_t + k_columns[None, :]
    at_d_out, at_dx = index[:, None] * d_out_t + v_columns[None, :], index[:, None] * DV + v_columns[None, :]
    at_a = index[:, None] * C + index[None, :]

    # Set pointers to the last chunk. Each step moves them back by a chunk.
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

    # dS [BLOCK_K, BLOCK_V] is in registers, in fp32.
    d_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_FINAL:
        d_state = tl.load(d_final_ptr + (n * Hv + head) * (DK * DV) + at_state, mask=inside_state, other=0.0)
    for step in tl.range(0, chunks, num_stages=STAGES):
        remaining = length - (chunks - 1 - step) * C
        inside = index < remaining
        rows = inside[:, None]
        k = tl.load(k_ptr + at_k, mask=rows & inside_k, other=0.0)
        a = tl.load(a_ptr + at_a, mask=rows, other=0.0)
        read_factor = tl.load(factor_ptr + tokens + index, mask=inside, other=0.0)
        write_factor = tl.load(factor_ptr + 2 * tokens + index, mask=inside, other=0.0)
        whole = tl.load(total_ptr + tl.minimum(remaining, C) - 1)

        # Compute dD = Pᵀ dO + e^{G − G_i} · K̂ dS, [C, BLOCK_V], and the part of dS that comes from O.
        rounded = d_state.to(dtype)
        tl.store(d_states_ptr + at_state, rounded, mask=inside_state)
        dd = tl.dot(k, rounded, input_precision=PRECISION) * write_factor[:, None]
        d_state *= exp(whole)
        if HAS_OUT:
            q = tl.load(q_ptr + at_q, mask=rows & inside_k, other=0.0)
            p = tl.load(p_ptr + at_a, mask=rows, other=0.0)
            q_factor = tl.load(factor_ptr + 3 * tokens + index, mask=inside, other=0.0)
            d_out = tl.load(d_out_ptr + at_d_out, mask=rows & inside_v, other=0.0)
            dd = tl.dot(tl.trans(p), d_out, dd, input_precision=PRECISION)
            scaled = d_out.to(tl.float32) * q_factor[:, None]
            d_state = tl.dot(tl.trans(q), scaled.to(dtype), d_state, input_precision=PRECISION)

        # Compute dX = Aᵀ dD, and the part of dS that comes from X.
        dx = tl.dot(tl.trans(a), dd.to(dtype), input_precision=PRECISION)
        tl.store(dx_ptr + at_dx, dx.to(dtype), mask=rows & inside_v)
        d_read = (-dx * read_factor[:, None]).to(dtype)
        d_state = tl.dot(tl.trans(k), d_read, d_state, input_precision=PRECISION)

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
def scans_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, states_ptr, d_ptr, d_out_ptr,
    d_final_ptr, d_states_ptr, dx_ptr, d_initial_ptr, tokens, q_t, q_h, k_t, k_h, v_t, v_h, d_out_t, d_out_h,
    Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_FINAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run the two scans of the backward at the same time, each in one half of the programs. The scans do not depend on
    each other.

    The programs of the longer scan come first. On an H200, this launch takes 0.8 times as long as two launches, one for
    each scan.
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
        scan(
            program - programs, q_ptr, k_ptr, v_ptr, cu_ptr, a_ptr, p_ptr, total_ptr, factor_ptr, initial_ptr, d_ptr,
            initial_ptr, states_ptr, d_ptr, tokens, q_t, q_h, k_t, k_h, v_t, v_h, Hv, GROUP, C, DK, BLOCK_K, DV,
            BLOCK_V, HAS_INITIAL, False, True, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _tile(tensor, i, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile [ROWS, COLUMNS] of the i-th matrix in a tensor that holds many matrices, through the tensor's
    descriptor.

    Elements outside the matrix are 0.
    """
    return tensor.load([i, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def _decays(total):
    """Compute the matrix exp(total_i − total_j). The caller masks the elements with i < j, which are capped at 1."""
    return exp(tl.minimum(total[:, None] - total[None, :], 0.0))


@triton.jit
def pair_kernel(
    d, d_out, dx, v, q_ptr, k_ptr, cu_ptr, total_ptr, factor_ptr, q_norm_ptr, k_norm_ptr, dv_ptr,
    q_pairs_ptr, k_pairs_ptr, d_total_ptr, d_beta_ptr, tokens, documents, q_t, q_h, k_t, k_h, scale,
    Hv: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_OUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For one chunk and key head, compute dV and two matrices [C, C] with an element for each pair of tokens.

    The matrices are E ∘ dO Dᵀ and −β · E ∘ dX Dᵀ, summed over the value heads. Each element is multiplied by two
    inverse norms: the norm of the query (first matrix) or key (second matrix) of its row, and the norm of the key of
    its column. The first matrix is also multiplied by ``scale``. The kernel also computes what these matrices add to dβ
    and to the gradients of the running sums of g. A tile that is loaded through a descriptor may contain tokens beyond
    the end of the document. The products are therefore masked beyond this end.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    key_head, rows, at = tl.program_id(1).to(tl.int64), tl.arange(0, C), first.to(tl.int32)
    count = end.to(tl.int32) - at
    inside, square = rows < count, rows[:, None] * C + rows[None, :]
    keep, strict = (rows[:, None] >= rows[None, :]) & inside[:, None], rows[:, None] > rows[None, :]

    # Compute k̂ · k̂ᵀ [C, C] below the diagonal, which all value heads share.
    k = load_rows(k_ptr + key_head * k_h + first * k_t, rows, k_t, count, DK, BLOCK_K)
    k_norm = tl.load(k_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0)
    at_pairs = (key_head * tokens + first) * C
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    kk = tl.where(strict, kk * (k_norm[:, None] * k_norm[None, :]), 0.0)

    # Sum −β · E ∘ dX Dᵀ over the value heads, and store dV = β · dX.
    pairs = tl.zeros([C, C], tl.float32)
    for n in range(GROUP):
        head = key_head * GROUP + n
        matrix, at_head = head.to(tl.int32), head * tokens + first
        total = tl.load(total_ptr + at_head + rows, mask=inside, other=0.0)
        beta = tl.load(factor_ptr + 3 * head * tokens + at_head + rows, mask=inside, other=0.0)
        product, along = tl.zeros_like(kk), tl.zeros([C], tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
            d_tile, x = _tile(d, matrix, at, start, C, BLOCK_V), _tile(dx, matrix, at, start, C, BLOCK_V)
            product = tl.dot(x, tl.trans(d_tile), product, input_precision=PRECISION)
            wide, columns = x.to(tl.float32), start + tl.arange(0, BLOCK_V)[None, :]
            along += tl.sum(wide * _tile(v, matrix, at, start, C, BLOCK_V).to(tl.float32), 1)
            at_dv = dv_ptr + (first * Hv + head) * DV + (rows[:, None] * (Hv * DV) + columns)
            tl.store(at_dv, (wide * beta[:, None]).to(k.dtype), mask=inside[:, None] & (columns < DV))

        # dβ and the gradients of the running sums of g contain sums over rows and columns of E ∘ dX Dᵀ ∘ k̂ · k̂ᵀ.
        product = tl.where(keep, product * _decays(total), 0.0)
        by_decay = product * kk
        by_row = tl.sum(by_decay, 1)
        tl.store(d_beta_ptr + at_head + rows, along - by_row, mask=inside)
        pairs -= product * beta[:, None]
        by_decay *= beta[:, None]
        tl.store(d_total_ptr + at_head + rows, tl.sum(by_decay, 0) - by_row * beta, mask=inside)

    pairs = tl.where(strict, pairs * (k_norm[:, None] * k_norm[None, :]), 0.0)
    tl.store(k_pairs_ptr + at_pairs + square, pairs.to(k.dtype), mask=inside[:, None])
    if HAS_OUT:
        tl.debug_barrier()  # the sums stored above are read below by other threads
        k = load_rows(k_ptr + key_head * k_h + first * k_t, rows, k_t, count, DK, BLOCK_K)
        q = load_rows(q_ptr + key_head * q_h + first * q_t, rows, q_t, count, DK, BLOCK_K)
        q_norm = tl.load(q_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0) * scale
        k_norm = tl.load(k_norm_ptr + key_head * tokens + first + rows, mask=inside, other=0.0)

        # Sum E ∘ dO Dᵀ over the value heads, and add its contribution to the gradients of the running sums of g.
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (q_norm[:, None] * k_norm[None, :])
        pairs = tl.zeros([C, C], tl.float32)
        for n in range(GROUP):
            head = key_head * GROUP + n
            matrix, at_head = head.to(tl.int32), head * tokens + first
            total = tl.load(total_ptr + at_head + rows, mask=inside, other=0.0)
            d_total = tl.load(d_total_ptr + at_head + rows, mask=inside, other=0.0)
            product = tl.zeros_like(qk)
            for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
                d_tile, out = _tile(d, matrix, at, start, C, BLOCK_V), _tile(d_out, matrix, at, start, C, BLOCK_V)
                product = tl.dot(out, tl.trans(d_tile), product, input_precision=PRECISION)
            product = tl.where(keep, product * _decays(total), 0.0)
            pairs += product
            product *= qk
            tl.store(d_total_ptr + at_head + rows, d_total + tl.sum(product, 1) - tl.sum(product, 0), mask=inside)
        pairs *= q_norm[:, None] * k_norm[None, :]
        tl.store(q_pairs_ptr + at_pairs + square, pairs.to(k.dtype), mask=inside[:, None])


@triton.jit
def _through_state(
    x, states, head, row, slot, factor, y, inside, C: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the product factor · x Sᵀ for the rows x of a chunk, and the dot product of each row of this product with
    the same row of y.
    """
    product = tl.zeros([C, BLOCK_K], tl.float32)
    for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
        state = tl.trans(_tile(states, slot, 0, start, BLOCK_K, BLOCK_V))
        product = tl.dot(_tile(x, head, row, start, C, BLOCK_V), state, product, input_precision=PRECISION)
    product *= factor[:, None]
    return product, tl.where(inside, tl.sum(product * y.to(tl.float32), 1), 0.0)


@triton.jit
def _add_pairs(sum, pairs, x, once, PRECISION: tl.constexpr):
    """Compute ``sum`` + pairs @ x.

    The product is in a loop with ``once`` iterations. ``once`` is always 1, but the compiler does not know this.
    Without the loop, only half of the warps would compute the product.
    """
    for _ in tl.range(0, once, num_stages=1):
        sum = tl.dot(pairs, x, sum, input_precision=PRECISION)
    return sum


@triton.jit
def _store_gradient(
    ptr, dx, x, norm, inside, row_size: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x, where x is q or k.

    ``norm`` is the inverse L2 norm of x, so x̂ = x · norm is the normalized x. ``dx`` is ``norm`` multiplied by the
    gradient of x̂.
    """
    if NORMALIZE:
        unit = x.to(tl.float32) * norm[:, None]
        dx -= unit * tl.sum(dx * unit, 1)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    at = ptr + tl.arange(0, C)[:, None] * row_size + columns
    tl.store(at, dx.to(ptr.dtype.element_ty), mask=inside[:, None] & (columns < DK))


@triton.jit
def query_gradients_kernel(
    d_out, states, queries, k_ptr, cu_ptr, total_ptr, q_norm_ptr, q_pairs_ptr, d_total_ptr, dq_ptr, tokens, documents,
    k_t, k_h, scale, Hv: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For one chunk and key head, compute dq. Add the terms that contain states to the gradients of the running sums of
    g.

    Rows of q are multiplied elementwise by rows of a matrix product, and the results are summed. These rows of q are
    loaded through a descriptor. If they were loaded through pointers, Triton would convert the whole matrix product to
    another register layout before the sum. For the same reason, `key_gradients_kernel` loads rows of k through a
    descriptor.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    key_head, rows, at = tl.program_id(1).to(tl.int64), tl.arange(0, C), first.to(tl.int32)
    slot, count = tl.program_id(0) * Hv, end.to(tl.int32) - at
    inside, once = rows < count, tl.minimum(count, 1)
    square, both = rows[:, None] * C + rows[None, :], inside[:, None] & inside[None, :]
    at_rows, key_matrix = key_head * tokens + first, key_head.to(tl.int32)
    q_norm = tl.load(q_norm_ptr + at_rows + rows, mask=inside, other=0.0)

    # Compute the gradient through S, scale · e^G · dO Sᵀ [C, BLOCK_K], summed over the value heads.
    dq = tl.zeros([C, BLOCK_K], tl.float32)
    for n in tl.range(0, GROUP, num_stages=STAGES):
        head = key_head * GROUP + n
        matrix, at_head = head.to(tl.int32), head * tokens + first
        total = tl.load(total_ptr + at_head + rows, mask=inside, other=0.0)
        d_total = tl.load(d_total_ptr + at_head + rows, mask=inside, other=0.0)
        factor = exp(total) * q_norm * scale
        for start in tl.static_range(0, DV, BLOCK_V):
            state = _tile(states, slot + matrix, 0, start, BLOCK_K, BLOCK_V)
            out = _tile(d_out, matrix, at, start, C, BLOCK_V)
            read = tl.dot(out, tl.trans(state), input_precision=PRECISION) * factor[:, None]
            dq += read
            q = _tile(queries, key_matrix, at, 0, C, BLOCK_K)
            d_total += tl.where(inside, tl.sum(read * q.to(tl.float32), 1), 0.0)
        tl.store(d_total_ptr + at_head + rows, d_total, mask=inside)

    # Add the gradient through the pairs of tokens in the chunk, and continue the backward through the norm.
    pairs = tl.load(q_pairs_ptr + at_rows * C + square, mask=both, other=0.0)
    k = load_rows(k_ptr + key_head * k_h + first * k_t, rows, k_t, count, DK, BLOCK_K)
    dq = _add_pairs(dq, pairs, k, once, PRECISION)
    q = _tile(queries, key_matrix, at, 0, C, BLOCK_K)
    at_x = first * (Hv // GROUP * DK) + key_head * DK
    _store_gradient(dq_ptr + at_x, dq, q, q_norm, inside, Hv // GROUP * DK, DK, C, BLOCK_K, NORMALIZE)


@triton.jit
def key_gradients_kernel(
    d, dx, states, d_states, keys, q_ptr, k_ptr, cu_ptr, total_ptr, factor_ptr, k_norm_ptr, q_pairs_ptr, k_pairs_ptr,
    d_total_ptr, d_beta_ptr, dk_ptr, dg_ptr, dbeta_ptr, tokens, documents, q_t, q_h, k_t, k_h, Hv: tl.constexpr,
    GROUP: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr,
    BLOCK_V: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_OUT: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dk, dβ and dg of one chunk and key head.

    This kernel computes the terms with S and dS, and adds them to the terms that previous kernels have computed. S ∘ dS
    is summed in a separate loop, because one more accumulator in the main loop would make registers spill.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    key_head, rows, at = tl.program_id(1).to(tl.int64), tl.arange(0, C), first.to(tl.int32)
    slot, count = tl.program_id(0) * Hv, end.to(tl.int32) - at
    inside, once = rows < count, tl.minimum(count, 1)
    square, both = rows[:, None] * C + rows[None, :], inside[:, None] & inside[None, :]
    at_rows, key_matrix = key_head * tokens + first, key_head.to(tl.int32)
    k_norm = tl.load(k_norm_ptr + at_rows + rows, mask=inside, other=0.0)

    # Compute the gradient through S and dS, [C, BLOCK_K], summed over the value heads.
    dk = tl.zeros([C, BLOCK_K], tl.float32)
    for n in range(GROUP):
        head = key_head * GROUP + n
        matrix, at_head, at_out = head.to(tl.int32), head * tokens + first, first * Hv + head + rows * Hv

        # Load everything early, so that the loads do not wait for one another.
        total = tl.load(total_ptr + at_head + rows, mask=inside, other=0.0)
        beta = tl.load(factor_ptr + 3 * head * tokens + at_head + rows, mask=inside, other=0.0)
        whole = tl.load(total_ptr + at_head + count - 1)
        d_beta = tl.load(d_beta_ptr + at_head + rows, mask=inside, other=0.0)
        d_total = tl.load(d_total_ptr + at_head + rows, mask=inside, other=0.0)
        y = _tile(keys, key_matrix, at, 0, C, BLOCK_K)

        # Sum S ∘ dS, which is the gradient of the whole chunk's decay. `carried` is the gradient of its logarithm.
        product = tl.zeros([BLOCK_K], tl.float32)
        for start in tl.range(0, DV, BLOCK_V, num_stages=STAGES):
            d_state = _tile(d_states, slot + matrix, 0, start, BLOCK_K, BLOCK_V)
            state = _tile(states, slot + matrix, 0, start, BLOCK_K, BLOCK_V)
            product += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
        carried = tl.sum(product, 0) * exp(whole)

        # Compute the part of R that comes from S. R enters dβ and dk with a negative sign.
        read, along = _through_state(
            dx, states, matrix, at, slot + matrix, exp(total) * k_norm, y, inside, C, BLOCK_K, DV, BLOCK_V, PRECISION,
            STAGES,
        )  # fmt: skip
        dk -= read * beta[:, None]
        tl.store(dbeta_ptr + at_out, d_beta - along, mask=inside)
        d_total -= along * beta

        # Compute the part of W that comes from dS.
        factor = exp(tl.where(inside, whole - total, float("-inf"))) * k_norm
        write, along = _through_state(
            d, d_states, matrix, at, slot + matrix, factor, y, inside, C, BLOCK_K, DV, BLOCK_V, PRECISION, STAGES,
        )  # fmt: skip
        dk += write

        # Compute dg from the gradients of the running sums. A token's g is part of the running sums of this token and
        # all later tokens.
        dg = tl.cumsum(d_total - along, 0, reverse=True) + (carried + tl.sum(along, 0))
        tl.store(dg_ptr + at_out, dg, mask=inside)

    # Add the gradient through the pairs of tokens in the chunk, and continue the backward through the norm.
    q_ptr += key_head * q_h + first * q_t
    k_ptr += key_head * k_h + first * k_t
    if HAS_OUT:
        pairs = tl.load(q_pairs_ptr + at_rows * C + square, mask=both, other=0.0)
        q = load_rows(q_ptr, rows, q_t, count, DK, BLOCK_K)
        dk = _add_pairs(dk, tl.trans(pairs), q, once, PRECISION)
    k = load_rows(k_ptr, rows, k_t, count, DK, BLOCK_K)
    pairs = tl.load(k_pairs_ptr + at_rows * C + square, mask=both, other=0.0)
    dk = _add_pairs(dk, pairs, k, once, PRECISION)
    dk = _add_pairs(dk, tl.trans(pairs), k, once, PRECISION)
    k = _tile(keys, key_matrix, at, 0, C, BLOCK_K)
    at_x = first * (Hv // GROUP * DK) + key_head * DK
    _store_gradient(dk_ptr + at_x, dk, k, k_norm, inside, Hv // GROUP * DK, DK, C, BLOCK_K, NORMALIZE)
