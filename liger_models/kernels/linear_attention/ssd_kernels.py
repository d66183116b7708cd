"""Kernels of the state-space scan. The formulas are in the docstring of `ssd_scan.py`."""

from liger_models.kernels.dispatch import tl, triton
from liger_models.kernels.linear_attention.documents import locate
from liger_models.kernels.linear_attention.gated_delta_forward import LEAST_DECAY, decays, load_rows


@triton.jit
def sums_kernel(
    g_ptr, delta_ptr, cu_ptr, sums_ptr, tokens, documents, g_t, g_h, delta_t, delta_h, H, C: tl.constexpr,
    HEADS: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Store the running sums of g within each chunk, and δ, as [2, H, tokens], for HEADS heads of one chunk."""
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[None, :]
    rows = (first + tl.arange(0, C))[:, None]
    mask = (rows < end) & (heads < H)
    g = tl.load(g_ptr + rows * g_t + heads * g_h, mask=mask, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + rows * delta_t + heads * delta_h, mask=mask, other=0.0).to(tl.float32)
    total = tl.cumsum(tl.where(g < LEAST_DECAY, LEAST_DECAY, g), 0)
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

    With REVERSE, go through the chunks in the opposite order, and store the gradient of the state after each chunk and
    before the first chunk. ``left`` and ``right`` are B and x or, with REVERSE, C and dy.
    """
    # The document, the head, and the rows and columns of the state that the program computes.
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

        # S ← e^G · S + Bᵀ (δ · e^{G − G_i} · x), or dS ← e^G · dS + Cᵀ (e^{G_i} · dy).
        if REVERSE:
            factor = tl.exp(total)
        else:
            delta = tl.load(sums_ptr + H * tokens + index, mask=inside, other=0.0)
            factor = delta * tl.exp(tl.where(inside, whole - total, 0.0))
        scaled = (right.to(tl.float32) * factor[:, None]).to(dtype)
        state = tl.dot(tl.trans(left), scaled, state * tl.exp(whole), input_precision=PRECISION)

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
    """Run both scans of the backward, each in half of the programs. The scans do not depend on each other."""
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
def _products(
    left_ptr, right_ptr, left_t, right_t, left_rows, right_rows, end, N: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute left_i · right_j of two sets of rows, which are multiplied BLOCK_N columns at a time."""
    product = tl.zeros([left_rows.shape[0], right_rows.shape[0]], tl.float32)
    for start in tl.static_range(0, N, BLOCK_N):
        left = load_rows(left_ptr + start, left_rows, left_t, end, N - start, BLOCK_N)
        right = load_rows(right_ptr + start, right_rows, right_t, end, N - start, BLOCK_N)
        product = tl.dot(left, tl.trans(right), product, input_precision=PRECISION)
    return product


@triton.jit
def read_kernel(
    left_ptr, right_ptr, v_ptr, x_ptr, d_ptr, cu_ptr, sums_ptr, states_ptr, out_ptr, d_delta_ptr, d_d_ptr, tokens,
    documents, left_t, left_h, right_t, right_h, v_t, v_h, x_t, x_h, H: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_D: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y of HEADS heads of one chunk or, with REVERSE, dx, dδ and a partial sum of dD.

    ``left``, ``right`` and ``v`` are C, B and x or, with REVERSE, B, C and dy.
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        if REVERSE and HAS_D:
            for head in range(tl.program_id(1) * HEADS, (tl.program_id(1) + 1) * HEADS):
                tl.store(d_d_ptr + tl.program_id(0).to(tl.int64) * H + head, 0.0)
        return
    slot, first_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * HEADS
    rows = first + tl.arange(0, C)
    index, inside = tl.arange(0, C), rows < end
    columns = tl.arange(0, BLOCK_P)
    dtype: tl.constexpr = v_ptr.dtype.element_ty

    # All heads of the group share the products of B and C, [C, C].
    left_ptr += first_head // GROUP * left_h
    right_ptr += first_head // GROUP * right_h
    products = _products(left_ptr, right_ptr, left_t, right_t, rows, rows, end, N, BLOCK_N, PRECISION)
    keep = (index[:, None] <= index[None, :]) if REVERSE else (index[:, None] >= index[None, :])
    keep = keep & inside[:, None] & inside[None, :]
    left = load_rows(left_ptr, rows, left_t, end, N, BLOCK_N)

    for head in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        total = tl.load(sums_ptr + head * tokens + rows, mask=inside, other=0.0)
        delta = tl.load(sums_ptr + (H + head) * tokens + rows, mask=inside, other=0.0)
        # The weights of the chunk's tokens, and the decay between the state and each token.
        if REVERSE:
            whole = tl.load(sums_ptr + head * tokens + end - 1)
            pairs = products * tl.exp(tl.where(keep, total[None, :] - total[:, None], float("-inf")))
            since = tl.exp(tl.where(inside, whole - total, 0.0))
        else:
            pairs = products * decays(total, total, keep) * delta[None, :]
            since = tl.exp(total)
        pairs = pairs.to(dtype)
        if HAS_D:
            skip = tl.load(d_ptr + head).to(tl.float32)
        d_delta, d_skip = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for start in tl.static_range(0, P, BLOCK_P):
            inside_p = (start + columns < P)[None, :]
            # y_i = e^{G_i} · C_i S + Σ_j ..., [C, BLOCK_P]
            at_state = states_ptr + (slot * H + head) * (N * P) + start + columns[None, :]
            out = tl.zeros([C, BLOCK_P], tl.float32)
            for k in tl.static_range(0, N, BLOCK_N):
                n = k + tl.arange(0, BLOCK_N)[:, None]
                state = tl.load(at_state + n * P, mask=(n < N) & inside_p, other=0.0)
                if N > BLOCK_N:
                    left = load_rows(left_ptr + k, rows, left_t, end, N - k, BLOCK_N)
                out = tl.dot(left, state, out, input_precision=PRECISION)
            out *= since[:, None]
            v = load_rows(v_ptr + head * v_h + start, rows, v_t, end, P - start, BLOCK_P)
            out = tl.dot(pairs, v, out, input_precision=PRECISION)
            if REVERSE:
                x = load_rows(x_ptr + head * x_h + start, rows, x_t, end, P - start, BLOCK_P).to(tl.float32)
                d_delta += tl.sum(x * out, 1)
                out *= delta[:, None]
                if HAS_D:
                    d_skip += tl.sum(x * v.to(tl.float32), 1)
            if HAS_D:
                out += skip * v.to(tl.float32)
            at_out = out_ptr + (rows[:, None] * H + head) * P + start + columns[None, :]
            tl.store(at_out, out.to(dtype), mask=inside[:, None] & inside_p)
        if REVERSE:
            tl.store(d_delta_ptr + rows * H + head, d_delta, mask=inside)
            if HAS_D:
                tl.store(d_d_ptr + slot * H + head, tl.sum(d_skip, 0))


@triton.jit
def pair_kernel(
    b_ptr, c_ptr, x_ptr, dy_ptr, cu_ptr, sums_ptr, pairs_ptr, d_sums_ptr, tokens, documents, b_t, b_h, c_t, c_h, x_t,
    x_h, dy_t, dy_h, H: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of C_i · B_j over HEADS heads, for a tile of i and a tile of j of one chunk.

    The kernel also computes what the decays between these tokens add to the gradients of the running sums of g:
    ``d_sums`` [2, H, tokens] has the terms of pairs in one tile, and then those of pairs in two tiles.
    """
    _, _, _, chunk, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if chunk == end:
        return
    # A chunk has two tiles, and three pairs of tiles: (0, 0), (1, 0) and (1, 1).
    pair, first_head = tl.program_id(2), tl.program_id(1).to(tl.int64) * HEADS
    tile_i, tile_j = (pair + 1) // 2, pair // 2
    index = tl.arange(0, TILE)
    i, j = chunk + tile_i * TILE + index, chunk + tile_j * TILE + index
    keep = (i[:, None] >= j[None, :]) & (i < end)[:, None]
    strict = i[:, None] > j[None, :]

    at_b, at_c = b_ptr + first_head // GROUP * b_h, c_ptr + first_head // GROUP * c_h
    products = _products(at_c, at_b, c_t, b_t, i, j, end, N, BLOCK_N, PRECISION)
    pairs = tl.zeros([TILE, TILE], tl.float32)
    for head in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        total_i = tl.load(sums_ptr + head * tokens + i, mask=i < end, other=0.0)
        total_j = tl.load(sums_ptr + head * tokens + j, mask=j < end, other=0.0)
        delta = tl.load(sums_ptr + (H + head) * tokens + j, mask=j < end, other=0.0)
        product = _products(
            dy_ptr + head * dy_h, x_ptr + head * x_h, dy_t, x_t, i, j, end, P, BLOCK_P, PRECISION
        )  # fmt: skip
        product *= decays(total_i, total_j, keep) * delta[None, :]
        pairs += product
        by_decay = tl.where(strict, product * products, 0.0)
        by_row, by_column = tl.sum(by_decay, 1), tl.sum(by_decay, 0)
        at = d_sums_ptr + head * tokens
        if tile_i == tile_j:
            tl.store(at + i, by_row - by_column, mask=i < end)
        else:
            tl.store(at + H * tokens + i, by_row, mask=i < end)
            tl.store(at + H * tokens + j, -by_column, mask=j < end)
    at_pairs = pairs_ptr + (tl.program_id(1).to(tl.int64) * tokens + i[:, None]) * C + (j - chunk)[None, :]
    tl.store(at_pairs, pairs.to(pairs_ptr.dtype.element_ty), mask=(i < end)[:, None])


@triton.jit
def shared_gradients_kernel(
    v_ptr, own_ptr, other_ptr, cu_ptr, sums_ptr, states_ptr, other_states_ptr, pairs_ptr, along_ptr, kept_ptr, out_ptr,
    tokens, documents, v_t, v_h, own_t, own_h, other_t, other_h, H: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of dC or, with REVERSE, of dB, for one chunk and group.

    ``v``, ``own``, ``other`` and ``states`` are dy, C, B and S or, with REVERSE, x, B, C and dS. The kernel also
    computes, for each head, the terms C_i · dC_i and B_j · dB_j that go through the state, ``along`` [blocks, H,
    tokens], and with REVERSE e^G · Σ S ∘ dS, ``kept`` [blocks, slots, H].
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    slot, group, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    index = tl.arange(0, C)
    rows = first + index
    inside = rows < end
    n, columns = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    own = load_rows(own_ptr + group * own_h + block * BLOCK_N, rows, own_t, end, N - block * BLOCK_N, BLOCK_N)
    own = own.to(tl.float32)

    gradient = tl.zeros([C, BLOCK_N], tl.float32)
    for head in tl.range(group * GROUP, (group + 1) * GROUP, num_stages=STAGES):
        total = tl.load(sums_ptr + head * tokens + rows, mask=inside, other=0.0)
        whole = tl.load(sums_ptr + head * tokens + end - 1)
        if REVERSE:
            delta = tl.load(sums_ptr + (H + head) * tokens + rows, mask=inside, other=0.0)
            factor = delta * tl.exp(tl.where(inside, whole - total, 0.0))
        else:
            factor = tl.exp(total)
        product = tl.zeros([C, BLOCK_N], tl.float32)
        kept = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.static_range(0, P, BLOCK_P):
            v = load_rows(v_ptr + head * v_h + start, rows, v_t, end, P - start, BLOCK_P)
            at = (slot * H + head) * (N * P) + n[:, None] * P + start + columns[None, :]
            mask = (n < N)[:, None] & (start + columns < P)[None, :]
            state = tl.load(states_ptr + at, mask=mask, other=0.0)
            product = tl.dot(v, tl.trans(state), product, input_precision=PRECISION)
            if REVERSE:
                other = tl.load(other_states_ptr + at, mask=mask, other=0.0).to(tl.float32)
                kept += tl.sum(other * state.to(tl.float32), 1)
        product *= factor[:, None]
        tl.store(along_ptr + (block * H + head) * tokens + rows, tl.sum(product * own, 1), mask=inside)
        gradient += product
        if REVERSE:
            at_kept = kept_ptr + (block * tl.num_programs(0) + slot) * H + head
            tl.store(at_kept, tl.sum(kept, 0) * tl.exp(whole))

    # Add the products with the tokens of the chunk. The loop is separate from the one above, in which Triton would
    # otherwise give the product to only some of the warps.
    other = load_rows(
        other_ptr + group * other_h + block * BLOCK_N, rows, other_t, end, N - block * BLOCK_N, BLOCK_N
    )  # fmt: skip
    for part in tl.range(group * (GROUP // HEADS), (group + 1) * (GROUP // HEADS), num_stages=1):
        at_pairs = pairs_ptr + (part * tokens + rows)[:, None] * C + index[None, :]
        keep = (index[:, None] >= index[None, :]) & inside[:, None]
        pairs = tl.load(at_pairs, mask=keep, other=0.0)
        pairs = tl.trans(pairs) if REVERSE else pairs
        gradient = tl.dot(pairs, other, gradient, input_precision=PRECISION)
    at_out = out_ptr + (rows[:, None] * (H // GROUP) + group) * N + n[None, :]
    tl.store(at_out, gradient.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (n < N)[None, :])


@triton.jit
def decay_kernel(
    cu_ptr, d_sums_ptr, read_ptr, written_ptr, kept_ptr, dg_ptr, tokens, documents, H: tl.constexpr, C: tl.constexpr,
    BLOCKS: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Compute dg of one chunk and head.

    The decay of a token is in the decays between each earlier and each later token, between the state and each later
    token (``read``), between each earlier token and the next state (``written``), and between both states (``kept``).
    """
    _, _, _, first, end = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, C)
    if first == end:
        return
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows = first + tl.arange(0, C)
    inside = rows < end
    at = head * tokens + rows
    later = tl.load(d_sums_ptr + at, mask=inside, other=0.0)
    later += tl.load(d_sums_ptr + H * tokens + at, mask=inside, other=0.0)
    earlier, kept = tl.zeros([C], tl.float32), 0.0
    for block in tl.static_range(BLOCKS):
        later += tl.load(read_ptr + block * H * tokens + at, mask=inside, other=0.0)
        # The sum of the terms of all earlier tokens of the chunk excludes the token itself.
        before = inside & (rows > first)
        earlier += tl.load(written_ptr + block * H * tokens + at - 1, mask=before, other=0.0)
        kept += tl.load(kept_ptr + (block * tl.num_programs(0) + slot) * H + head)
    dg = tl.cumsum(later, 0, reverse=True) + tl.cumsum(earlier, 0) + kept
    tl.store(dg_ptr + rows * H + head, dg, mask=inside)


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
