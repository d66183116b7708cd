"""Kernels of the state-space scan. The formulas are in the docstring of `ssd_scan.py`."""

from liger_models.kernels.dispatch import tl, triton
from liger_models.kernels.linear_attention.documents import locate
from liger_models.kernels.linear_attention.gated_delta_forward import LEAST_DECAY


@triton.jit
def sums_kernel(
    g_ptr, delta_ptr, cu_ptr, sums_ptr, tokens, documents, g_t, g_h, delta_t, delta_h, H, C: tl.constexpr,
    HEADS: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store G · log2(e) and δ as [2, H, tokens]. G holds the running sums of g within each chunk.

    A program computes HEADS heads of one chunk. G is multiplied by log2(e) once in this kernel, which saves one
    multiplication per exponential in the other kernels.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[None, :]
    rows = (first + tl.arange(0, C))[:, None]
    mask = (rows < end) & (heads < H)
    g = tl.load(g_ptr + rows * g_t + heads * g_h, mask=mask, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + rows * delta_t + heads * delta_h, mask=mask, other=0.0).to(tl.float32)
    total = tl.cumsum(tl.where(g < LEAST_DECAY, LEAST_DECAY, g) * 1.4426950408889634, 0)
    tl.store(sums_ptr + heads * tokens + rows, total, mask=mask)
    tl.store(sums_ptr + (H + heads) * tokens + rows, delta, mask=mask)


@triton.jit
def scan(
    program, left_ptr, right_ptr, cu_ptr, sums_ptr, initial_ptr, final_ptr, states_ptr, tokens, left_t, left_h, right_t,
    right_h, H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE_FINAL: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of a document in order, and store the state before each chunk and after the last chunk.

    With REVERSE, go through the chunks in the opposite order, and store the gradients of the state after each chunk and
    of the state before the first chunk. ``left`` and ``right`` are B and x or, with REVERSE, C and dy.
    """
    # Find the document, the head, and the rows and columns of the state that the program computes.
    BLOCKS_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCKS_P: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    BLOCKS: tl.constexpr = BLOCKS_N * BLOCKS_P
    columns_n = program // BLOCKS_P % BLOCKS_N * BLOCK_N + tl.arange(0, BLOCK_N)
    columns_p = program % BLOCKS_P * BLOCK_P + tl.arange(0, BLOCK_P)
    head, n = (program // BLOCKS % H).to(tl.int64), (program // (BLOCKS * H)).to(tl.int64)
    start, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    dtype: tl.constexpr = left_ptr.dtype.element_ty

    # Offsets within a chunk: [C, BLOCK_N] for left, [C, BLOCK_P] for right, [BLOCK_N, BLOCK_P] for the state.
    index = tl.arange(0, C)
    inside_n, inside_p = (columns_n < N)[None, :], (columns_p < P)[None, :]
    inside_state = (columns_n < N)[:, None] & inside_p
    at_state = columns_n[:, None] * P + columns_p[None, :]
    at_left = index[:, None] * left_t + columns_n[None, :]
    at_right = index[:, None] * right_t + columns_p[None, :]

    # Set pointers to the first chunk that is visited. Each step moves them by a chunk.
    length = (end - start).to(tl.int32)
    chunks = tl.cdiv(length, C)
    number = 0
    move: tl.constexpr = -C if REVERSE else C
    if REVERSE:
        number = chunks - 1
    left_ptr += head // GROUP * left_h + (start + number * C) * left_t
    right_ptr += head * right_h + (start + number * C) * right_t
    sums_ptr += head * tokens + start + number * C
    states_ptr += ((start // C + n + number) * H + head) * (N * P)

    # The state [BLOCK_N, BLOCK_P] is in registers, in fp32.
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + (n * H + head) * (N * P) + at_state, mask=inside_state, other=0.0)
    for step in tl.range(0, chunks, num_stages=STAGES):
        remaining = length - (chunks - 1 - step if REVERSE else step) * C
        inside = index < remaining
        left = tl.load(left_ptr + at_left, mask=inside[:, None] & inside_n, other=0.0)
        right = tl.load(right_ptr + at_right, mask=inside[:, None] & inside_p, other=0.0)
        total = tl.load(sums_ptr + index, mask=inside, other=0.0)
        whole = tl.load(sums_ptr + tl.minimum(remaining, C) - 1)
        tl.store(states_ptr + at_state, state.to(dtype), mask=inside_state)

        # Compute S ← e^G · S + Bᵀ (δ · e^{G − G_i} · x) or, with REVERSE, dS ← e^G · dS + Cᵀ (e^{G_i} · dy).
        if REVERSE:
            factor = tl.exp2(total)
        else:
            delta = tl.load(sums_ptr + H * tokens + index, mask=inside, other=0.0)
            factor = delta * tl.exp2(tl.where(inside, whole - total, 0.0))
        scaled = (right.to(tl.float32) * factor[:, None]).to(dtype)
        state = tl.dot(tl.trans(left), scaled, state * tl.exp2(whole), input_precision=PRECISION)

        left_ptr += move * left_t
        right_ptr += move * right_t
        sums_ptr += move
        states_ptr += (-H if REVERSE else H) * N * P

    if STORE_FINAL:
        tl.store(final_ptr + (n * H + head) * (N * P) + at_state, state, mask=inside_state)


@triton.jit
def scan_kernel(
    b_ptr, x_ptr, cu_ptr, sums_ptr, initial_ptr, final_ptr, states_ptr, tokens, b_t, b_h, x_t, x_h, H: tl.constexpr,
    GROUP: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_INITIAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run `scan` in the forward."""
    scan(
        tl.program_id(0), b_ptr, x_ptr, cu_ptr, sums_ptr, initial_ptr, final_ptr, states_ptr, tokens, b_t, b_h, x_t,
        x_h, H, GROUP, C, N, BLOCK_N, P, BLOCK_P, HAS_INITIAL, True, False, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def scans_kernel(
    b_ptr, x_ptr, c_ptr, dy_ptr, cu_ptr, sums_ptr, initial_ptr, d_final_ptr, states_ptr, d_states_ptr, d_initial_ptr,
    tokens, b_t, b_h, x_t, x_h, c_t, c_h, dy_t, dy_h, H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run the two scans of the backward at the same time, each in one half of the programs. The scans do not depend on
    each other.
    """
    programs = tl.num_programs(0) // 2
    program = tl.program_id(0)
    if program < programs:
        scan(
            program, c_ptr, dy_ptr, cu_ptr, sums_ptr, d_final_ptr, d_initial_ptr, d_states_ptr, tokens, c_t, c_h, dy_t,
            dy_h, H, GROUP, C, N, BLOCK_N, P, BLOCK_P, HAS_FINAL, HAS_INITIAL, True, PRECISION, STAGES,
        )  # fmt: skip
    else:
        scan(
            program - programs, b_ptr, x_ptr, cu_ptr, sums_ptr, initial_ptr, d_initial_ptr, states_ptr, tokens, b_t,
            b_h, x_t, x_h, H, GROUP, C, N, BLOCK_N, P, BLOCK_P, HAS_INITIAL, False, False, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _load_tile(ptr, index, stride, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, start=0):
    """Load a tile [rows, BLOCK] of a matrix [tokens, WIDTH], beginning at column ``start``, with 32-bit offsets.

    Row ``count`` and all later rows are 0.
    """
    columns = start + tl.arange(0, BLOCK)[None, :]
    mask = (index < count)[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)
    return tl.load(ptr + (index[:, None] * stride + columns), mask=mask, other=0.0)


@triton.jit
def _load_state(ptr, N: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, start=0):
    """Load all rows of a state [N, P], but only the BLOCK_P columns from column ``start`` on."""
    rows, columns = tl.arange(0, BLOCK_N)[:, None], start + tl.arange(0, BLOCK_P)[None, :]
    if N == BLOCK_N and P % BLOCK_P == 0:
        return tl.load(ptr + (rows * P + columns))
    return tl.load(ptr + (rows * P + columns), mask=(rows < N) & (columns < P), other=0.0)


@triton.jit
def read_kernel(
    c_ptr, b_ptr, x_ptr, d_ptr, cu_ptr, sums_ptr, states_ptr, out_ptr, tokens, documents, c_t, c_h, b_t, b_h, x_t, x_h,
    H: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_D: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_P columns of y for HEADS heads of one chunk."""
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    slot, first_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * HEADS
    count = (end - first).to(tl.int32)
    index, start = tl.arange(0, C), tl.program_id(2) * BLOCK_P
    columns = start + tl.arange(0, BLOCK_P)
    inside = index < count
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    # All heads of the group share the products of B and C, [C, C].
    c = _load_tile(c_ptr + (first_head // GROUP * c_h + first * c_t), index, c_t, count, N, BLOCK_N)
    b = _load_tile(b_ptr + (first_head // GROUP * b_h + first * b_t), index, b_t, count, N, BLOCK_N)
    keep = index[:, None] >= index[None, :]
    products = tl.where(keep, tl.dot(c, tl.trans(b), input_precision=PRECISION), 0.0)
    x_ptr += first * x_t
    out_ptr += first * (H * P)
    for head in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        at = sums_ptr + head * tokens + first
        total = tl.load(at + index, mask=inside, other=0.0)
        delta = tl.load(at + H * tokens + index, mask=inside, other=0.0)
        pairs = products * tl.exp2(tl.minimum(total[:, None] - total[None, :], 0.0)) * delta[None, :]
        state = _load_state(states_ptr + (slot * H + head) * (N * P), N, BLOCK_N, P, BLOCK_P, start)
        x = _load_tile(x_ptr + head * x_h, index, x_t, count, P, BLOCK_P, start)

        # Compute y_i = e^{G_i} · C_i S + Σ_j M_ij x_j, [C, BLOCK_P].
        y = tl.dot(c, state, input_precision=PRECISION) * tl.exp2(total)[:, None]
        y = tl.dot(pairs.to(dtype), x, y, input_precision=PRECISION)
        if HAS_D:
            y += tl.load(d_ptr + head).to(tl.float32) * x.to(tl.float32)
        at_out = out_ptr + head * P + (index[:, None] * (H * P) + columns[None, :])
        tl.store(at_out, y.to(dtype), mask=inside[:, None] & (columns < P)[None, :])


@triton.jit
def _head_gradients(
    b_ptr, c_ptr, x_ptr, dy_ptr, d_ptr, sums_ptr, states_ptr, d_states_ptr, dx_ptr, d_delta_ptr, d_d_ptr, pairs_ptr,
    d_sums_ptr, written_ptr, kept_ptr, tokens, first, count, first_head, b_t, c_t, x_t, x_h, dy_t, dy_h, dx_t, slot,
    H: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_D: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For one of the two tiles of a chunk, compute dx, dδ and a partial sum of dD. For all pairs of tokens that are
    both in this tile, compute the terms of ``pairs`` and ``d_sums``; see `head_gradients_kernel`.
    """
    TILE: tl.constexpr = C // 2
    BEGIN: tl.constexpr = 0 if FIRST else TILE
    index, columns = tl.arange(0, TILE), tl.arange(0, BLOCK_P)
    inside = index < count - BEGIN
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    # All heads of the group share the products of B_j and C_i, [TILE, TILE], where j is the row and i is the column.
    b = _load_tile(b_ptr + BEGIN * b_t, index, b_t, count - BEGIN, N, BLOCK_N)
    c = _load_tile(c_ptr + BEGIN * c_t, index, c_t, count - BEGIN, N, BLOCK_N)
    keep, strict = index[:, None] <= index[None, :], index[:, None] < index[None, :]
    products = tl.where(keep, tl.dot(b, tl.trans(c), input_precision=PRECISION), 0.0)
    if FIRST:
        c = _load_tile(c_ptr + TILE * c_t, index, c_t, count - TILE, N, BLOCK_N)
        far_products = tl.dot(b, tl.trans(c), input_precision=PRECISION)

    pairs = tl.zeros([TILE, TILE], tl.float32)
    for head in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        at = sums_ptr + head * tokens + first
        total, whole = tl.load(at + BEGIN + index, mask=inside, other=0.0), tl.load(at + count - 1)
        delta = tl.load(at + H * tokens + BEGIN + index, mask=inside, other=0.0)
        x = _load_tile(x_ptr + head * x_h + BEGIN * x_t, index, x_t, count - BEGIN, P, BLOCK_P)
        dy = _load_tile(dy_ptr + head * dy_h + BEGIN * dy_t, index, dy_t, count - BEGIN, P, BLOCK_P)
        d_state = _load_state(d_states_ptr + (slot * H + head) * (N * P), N, BLOCK_N, P, BLOCK_P)

        # Compute U_j = e^{G − G_j} · B_j dS + Σ_i (C_i·B_j) E_ij dy_i, [TILE, BLOCK_P].
        u = tl.dot(b, d_state, input_precision=PRECISION)
        if FIRST:
            middle = tl.load(at + tl.minimum(count, TILE) - 1)
            dy_far = _load_tile(dy_ptr + head * dy_h + TILE * dy_t, index, dy_t, count - TILE, P, BLOCK_P)
            until = tl.exp2(middle - total)
            u *= tl.exp2(whole - middle)
            written = tl.sum(x.to(tl.float32) * u, 1) * until * delta
            far = tl.load(at + TILE + index, mask=index < count - TILE, other=float("-inf"))
            weights = far_products * tl.exp2(far - middle)[None, :]
            u = tl.dot(weights.to(dtype), dy_far, u, input_precision=PRECISION) * until[:, None]
        else:
            u *= tl.exp2(whole - total)[:, None]
            written = tl.sum(x.to(tl.float32) * u, 1) * delta
        decay = tl.exp2(tl.minimum(total[None, :] - total[:, None], 0.0))
        u = tl.dot((products * decay).to(dtype), dy, u, input_precision=PRECISION)
        at_rows = head * tokens + first + BEGIN + index
        tl.store(written_ptr + at_rows, written, mask=inside)
        at_step = (first + BEGIN + index) * H + head
        tl.store(d_delta_ptr + at_step, tl.sum(x.to(tl.float32) * u, 1), mask=inside)
        u *= delta[:, None]
        if HAS_D:
            skipped = dy.to(tl.float32)
            u += tl.load(d_ptr + head).to(tl.float32) * skipped
            d_skip = tl.sum(x.to(tl.float32) * skipped)
            tl.store(d_d_ptr + (2 * slot + (0 if FIRST else 1)) * H + head, d_skip)
        at_out = dx_ptr + (first + BEGIN) * dx_t + head * P + (index[:, None] * dx_t + columns[None, :])
        tl.store(at_out, u.to(dtype), mask=inside[:, None] & (columns < P)[None, :])

        # Sum the gradients of C_i · B_j, and compute the terms that the decays from j to i add to the gradients of the
        # running sums.
        product = tl.dot(x, tl.trans(dy), input_precision=PRECISION) * decay * delta[:, None]
        pairs += product
        by_decay = tl.where(strict, product * products, 0.0)
        tl.store(d_sums_ptr + at_rows, tl.sum(by_decay, 0), mask=inside)
        tl.store(d_sums_ptr + H * tokens + at_rows, tl.sum(by_decay, 1), mask=inside)
        if not FIRST:
            state = _load_state(states_ptr + (slot * H + head) * (N * P), N, BLOCK_N, P, BLOCK_P)
            both = tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
            tl.store(kept_ptr + slot * H + head, both * tl.exp2(whole))

    at_pairs = pairs_ptr + (first_head // HEADS * tokens + first + BEGIN) * C + BEGIN
    at_pairs += index[:, None] * C + index[None, :]
    tl.store(at_pairs, tl.where(keep, pairs, 0.0).to(dtype), mask=inside[:, None])


@triton.jit
def _far_pairs(
    b_ptr, c_ptr, x_ptr, dy_ptr, sums_ptr, pairs_ptr, d_sums_ptr, tokens, first, count, first_head, b_t, c_t, x_t, x_h,
    dy_t, dy_h, H: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For all pairs of tokens (j, i) with j in the first tile of a chunk and i in the second tile, compute the terms of
    ``pairs`` and ``d_sums``; see `head_gradients_kernel`.
    """
    TILE: tl.constexpr = C // 2
    index = tl.arange(0, TILE)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    b = _load_tile(b_ptr, index, b_t, count, N, BLOCK_N)
    c = _load_tile(c_ptr + TILE * c_t, index, c_t, count - TILE, N, BLOCK_N)
    products = tl.dot(b, tl.trans(c), input_precision=PRECISION)
    pairs = tl.zeros([TILE, TILE], tl.float32)
    for head in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        at = sums_ptr + head * tokens + first
        middle = tl.load(at + tl.minimum(count, TILE) - 1)
        delta = tl.load(at + H * tokens + index, mask=index < count, other=0.0)
        near = tl.load(at + index, mask=index < count, other=0.0)
        far = tl.load(at + TILE + index, mask=index < count - TILE, other=float("-inf"))
        until, since = tl.exp2(middle - near) * delta, tl.exp2(far - middle)
        x = _load_tile(x_ptr + head * x_h, index, x_t, count, P, BLOCK_P)
        dy = _load_tile(dy_ptr + head * dy_h + TILE * dy_t, index, dy_t, count - TILE, P, BLOCK_P)
        product = tl.dot(x, tl.trans(dy), input_precision=PRECISION) * until[:, None] * since[None, :]
        pairs += product
        product *= products
        at_far = d_sums_ptr + (2 * H + head) * tokens + first + index
        tl.store(at_far, tl.sum(product, 1), mask=index < count)
        tl.store(at_far + TILE, tl.sum(product, 0), mask=index < count - TILE)
    at_pairs = pairs_ptr + (first_head // HEADS * tokens + first) * C + TILE + (index[:, None] * C + index[None, :])
    tl.store(at_pairs, pairs.to(dtype), mask=(index < count)[:, None])


@triton.jit
def head_gradients_kernel(
    b_ptr, c_ptr, x_ptr, dy_ptr, d_ptr, cu_ptr, sums_ptr, states_ptr, d_states_ptr, dx_ptr, d_delta_ptr, d_d_ptr,
    pairs_ptr, d_sums_ptr, written_ptr, kept_ptr, tokens, documents, b_t, b_h, c_t, c_h, x_t, x_h, dy_t, dy_h, dx_t,
    H: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_D: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """For HEADS heads, compute dx, dδ and partial sums of dD. Store the gradient of each product C_i · B_j, summed over
    these heads, in ``pairs``.

    A chunk has two tiles of tokens and three programs: one program for each tile, and one for the pairs of tokens in
    different tiles. The decays between tokens depend on the running sums of g. The kernel therefore also computes what
    these decays add to the gradients of the running sums. ``d_sums`` [3, H, tokens] holds three sums over pairs for
    each token: (1) over its pairs with earlier tokens of the same tile, (2) over its pairs with later tokens of the
    same tile, and (3) over its pairs with tokens of the other tile.
    """
    role, slot = tl.program_id(0) % 3, (tl.program_id(0) // 3).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0) // 3, documents, DOCUMENTS, C)
    first_head = tl.program_id(1).to(tl.int64) * HEADS
    count = (end - first).to(tl.int32)
    if count == 0:
        if HAS_D and role < 2:
            for head in range(first_head, first_head + HEADS):
                tl.store(d_d_ptr + (2 * slot + role) * H + head, 0.0)
        return
    b_ptr += first_head // GROUP * b_h + first * b_t
    c_ptr += first_head // GROUP * c_h + first * c_t
    x_ptr += first * x_t
    dy_ptr += first * dy_t
    if role == 0:
        _head_gradients(
            b_ptr, c_ptr, x_ptr, dy_ptr, d_ptr, sums_ptr, states_ptr, d_states_ptr, dx_ptr, d_delta_ptr, d_d_ptr,
            pairs_ptr, d_sums_ptr, written_ptr, kept_ptr, tokens, first, count, first_head, b_t, c_t, x_t, x_h, dy_t,
            dy_h, dx_t, slot, H, HEADS, C, N, BLOCK_N, P, BLOCK_P, HAS_D, True, PRECISION, STAGES,
        )  # fmt: skip
    elif role == 1:
        _head_gradients(
            b_ptr, c_ptr, x_ptr, dy_ptr, d_ptr, sums_ptr, states_ptr, d_states_ptr, dx_ptr, d_delta_ptr, d_d_ptr,
            pairs_ptr, d_sums_ptr, written_ptr, kept_ptr, tokens, first, count, first_head, b_t, c_t, x_t, x_h, dy_t,
            dy_h, dx_t, slot, H, HEADS, C, N, BLOCK_N, P, BLOCK_P, HAS_D, False, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _far_pairs(
            b_ptr, c_ptr, x_ptr, dy_ptr, sums_ptr, pairs_ptr, d_sums_ptr, tokens, first, count, first_head, b_t, c_t,
            x_t, x_h, dy_t, dy_h, H, HEADS, C, N, BLOCK_N, P, BLOCK_P, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def shared_gradients_kernel(
    v_ptr, own_ptr, other_ptr, cu_ptr, sums_ptr, states_ptr, pairs_ptr, read_ptr, out_ptr, tokens, documents, v_t, v_h,
    own_t, own_h, other_t, other_h, out_t, H: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, DOCUMENTS: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of dC or, with REVERSE, of dB, summed over HEADS heads, for a tile of tokens of a chunk.

    Without REVERSE, ``v``, ``own``, ``other`` and ``states`` are dy, C, B and S. With REVERSE, these arguments are x,
    B, C and dS. Without REVERSE, the kernel also computes ``read`` [blocks, H, tokens]: for each block of BLOCK_N
    columns and each head, the part of C_i · dC_i that comes from the state before the chunk.
    """
    TILE: tl.constexpr = C // 2
    tile, slot = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0) // 2, documents, DOCUMENTS, C)
    begin = tile * TILE
    count = (end - first).to(tl.int32)
    if count <= begin:
        return
    part, block = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group, first_head = part * HEADS // GROUP, part * HEADS
    index = tl.arange(0, TILE)
    near, inside = tl.minimum(begin + index, count - 1), index < count - begin
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    n, columns = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    at_state, inside_n = n[:, None] * P + columns[None, :], (n < N)[None, :]
    inside_state = (n < N)[:, None] & (columns < P)[None, :]
    v_ptr += (first + begin) * v_t
    if not REVERSE:
        at_own = own_ptr + group * own_h + (first + begin) * own_t + (index[:, None] * own_t + n[None, :])
        own = tl.load(at_own, mask=inside[:, None] & inside_n, other=0.0)

    # The gradient is transposed, [BLOCK_N, TILE]. On Hopper, Triton 3.6 can compute a wrong sum of products if their
    # left operands are computed in the loop and are therefore in registers.
    gradient = tl.zeros([BLOCK_N, TILE], tl.float32)
    for head in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        at = sums_ptr + head * tokens + first
        v = _load_tile(v_ptr + head * v_h, index, v_t, count - begin, P, BLOCK_P)
        state = tl.load(states_ptr + (slot * H + head) * (N * P) + at_state, mask=inside_state, other=0.0)
        total = tl.load(at + near)
        if REVERSE:
            delta = tl.load(at + H * tokens + begin + index, mask=inside, other=0.0)
            factor = delta * tl.exp2(tl.load(at + count - 1) - total)
        else:
            factor = tl.exp2(total)
            read = tl.sum(v.to(tl.float32) * tl.dot(own, state, input_precision=PRECISION), 1) * factor
            tl.store(read_ptr + (block * H + head) * tokens + first + begin + index, read, mask=inside)
        scaled = (v.to(tl.float32) * factor[:, None]).to(dtype)
        gradient = tl.dot(state, tl.trans(scaled), gradient, input_precision=PRECISION)

    # Add the products with the tokens of the chunk: for dC, the tokens of this and the previous tile; for dB, the
    # tokens of this and the next tile. ``pairs`` has a row for each j and a column for each i. The loop is separate,
    # because otherwise only some of the warps would compute the products.
    first_tile, last_tile = (tile, 1) if REVERSE else (0, tile)
    for other_tile in tl.range(first_tile, last_tile + 1, num_stages=1):
        start = other_tile * TILE
        at_other = other_ptr + group * other_h + (first + start) * other_t + (index[:, None] * other_t + n[None, :])
        other = tl.load(at_other, mask=(index < count - start)[:, None] & inside_n, other=0.0)
        j, i = (begin, start) if REVERSE else (start, begin)
        at_pairs = pairs_ptr + (part * tokens + first + j) * C + i + (index[:, None] * C + index[None, :])
        pairs = tl.load(at_pairs, mask=(index < count - j)[:, None], other=0.0)
        pairs = tl.trans(pairs) if REVERSE else pairs
        gradient = tl.dot(tl.trans(other), pairs, gradient, input_precision=PRECISION)
    PARTS: tl.constexpr = GROUP // HEADS
    rows = part % PARTS * tokens + first + begin + index
    at_out = (rows * out_t + group * N)[:, None] + n[None, :]
    tl.store(out_ptr + at_out, tl.trans(gradient.to(out_ptr.dtype.element_ty)), mask=inside[:, None] & inside_n)


@triton.jit
def decay_kernel(
    cu_ptr, d_sums_ptr, read_ptr, written_ptr, kept_ptr, dg_ptr, tokens, documents, H, C: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Compute dg of HEADS heads of one chunk.

    The decay of token k is a factor of four kinds of decays. dg of token k is the sum of the gradients from all four
    kinds. For each kind, a previous kernel has stored sums in one of these tensors::

        d_sums     from a token before k to token k or a later token
        read       from the state before the chunk to token k or a later token
        written    from a token before k to the state after the chunk
        kept       from the state before the chunk to the state after the chunk
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    slot = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    rows = first + tl.arange(0, C)
    inside = (rows < end)[:, None] & (heads < H)[None, :]
    at = heads[None, :] * tokens + rows[:, None]
    size = tl.cast(H, tl.int64) * tokens  # of one part. If H is 1, Triton makes H a constant, which has no `to`
    # The term of a pair is added to the gradient of the later token's running sum, and subtracted from that of the
    # earlier token's.
    later = tl.load(d_sums_ptr + at, mask=inside, other=0.0)
    later -= tl.load(d_sums_ptr + size + at, mask=inside, other=0.0)
    between = tl.load(d_sums_ptr + 2 * size + at, mask=inside, other=0.0)
    later += tl.where((rows < first + C // 2)[:, None], -between, between)
    for block in tl.static_range(BLOCKS):
        later += tl.load(read_ptr + block * size + at, mask=inside, other=0.0)
    # The sum over all earlier tokens of the chunk excludes the token itself.
    earlier = tl.load(written_ptr + at - 1, mask=inside & (rows > first)[:, None], other=0.0)
    kept = tl.load(kept_ptr + slot * H + heads, mask=heads < H, other=0.0)
    dg = tl.cumsum(later, 0, reverse=True) + tl.cumsum(earlier, 0) + kept[None, :]
    tl.store(dg_ptr + rows[:, None] * H + heads[None, :], dg, mask=inside)


@triton.jit
def step_kernel(
    x_ptr, b_ptr, c_ptr, delta_ptr, g_ptr, d_ptr, initial_ptr, out_ptr, final_ptr, T, x_t, x_h, b_t, b_h, c_t, c_h,
    delta_t, delta_h, g_t, g_h, H: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """Compute the recurrence token by token, for BLOCK_P columns of the state of one head."""
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    program = tl.program_id(0)
    columns, rows = program % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    head, batch = (program // BLOCKS % H).to(tl.int64), (program // (BLOCKS * H)).to(tl.int64)
    inside_n, inside_p = rows < N, columns < P
    mask = inside_n[:, None] & inside_p[None, :]
    at_state = (batch * H + head) * (N * P) + rows[:, None] * P + columns[None, :]

    # S [BLOCK_N, BLOCK_P] is in registers, in fp32.
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + at_state, mask=mask, other=0.0)
    for t in range(batch * T, (batch + 1) * T):
        x = tl.load(x_ptr + t * x_t + head * x_h + columns, mask=inside_p, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + t * b_t + head // GROUP * b_h + rows, mask=inside_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * c_t + head // GROUP * c_h + rows, mask=inside_n, other=0.0).to(tl.float32)
        delta = tl.load(delta_ptr + t * delta_t + head * delta_h).to(tl.float32)
        decay = tl.exp(tl.load(g_ptr + t * g_t + head * g_h).to(tl.float32))
        state = state * decay + b[:, None] * (delta * x)[None, :]
        out = tl.sum(state * c[:, None], 0)
        if HAS_D:
            out += tl.load(d_ptr + head).to(tl.float32) * x
        tl.store(out_ptr + (t * H + head) * P + columns, out.to(out_ptr.dtype.element_ty), mask=inside_p)
    tl.store(final_ptr + at_state, state, mask=mask)
