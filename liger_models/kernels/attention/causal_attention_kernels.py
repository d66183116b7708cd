"""The kernels of causal attention. Their formulas and their order are in the docstring of `causal_attention.py`.

In every kernel, a program first determines which tile it must compute, and then computes this tile. A kernel takes the
fields of a `Part` as separate arguments (``T, S, kv_head, query_head, query_heads, query, tiles, width``) and builds
the `Part` from them. All kernels use these names::

    batch, head    row of the batch, and query head; the KV head is ``head // GROUP``
    place          index of a tile in the workspace, see `workspace.py`
    query, key     first query and first key of a tile
    position       token index of the tile's first query; query i is token i + S − T
    low, last      bounds of the keys that a query sees, see `causal_attention.bounds`; read only if BOUNDED

BLOCK_M, BLOCK_N and BLOCK_D are the numbers of queries, keys and columns of a tile. STEP is the number of queries or
keys over which one step of a matrix product sums.
"""

from liger_models.kernels.attention.heads import LOG2_E
from liger_models.kernels.attention.workspace import VARYING, Part, first_place, slot_head, tile_at
from liger_models.kernels.dispatch import tl, triton


@triton.jit
def _scale_and_mask(
    scores, scale, position, key, S, window, documents_ptr, HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Turn the products q · kᵀ [BLOCK_M, BLOCK_N] into the scores s. Where a query does not see a key, s is -inf."""
    # The factor log2 e is needed because the hardware computes powers of 2 instead of powers of e.
    scores *= scale * LOG2_E
    # Without documents and a window, a tile below the diagonal is entirely visible and needs no mask.
    if HAS_DOCUMENTS or HAS_WINDOW or key + BLOCK_N > position:
        positions = position + tl.arange(0, BLOCK_M)
        keys = key + tl.arange(0, BLOCK_N)
        visible = (positions[:, None] >= keys[None, :]) & (keys < S)[None, :]  # [BLOCK_M, BLOCK_N]
        if HAS_WINDOW:
            visible = visible & (positions[:, None] - keys[None, :] < window)
        if HAS_DOCUMENTS:
            # The two fill values differ, so that queries and keys past the last token are never in the same
            # document.
            document = tl.load(documents_ptr + positions, mask=positions < S, other=-3)
            key_document = tl.load(documents_ptr + keys, mask=keys < S, other=-2)
            visible = visible & (document[:, None] == key_document[None, :])
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _load_tile(x, batch, head, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile [ROWS, COLUMNS] of a head from a descriptor of a tensor [B, heads, rows, D].

    Elements beyond the tensor's bounds are 0.
    """
    return x.load([batch, head, row, column]).reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=VARYING)
def weights_kernel(
    q, k, weights_ptr, tile_m_ptr, tile_sum_ptr, documents_ptr, low_ptr, window, scale,
    T, S, kv_head, query_head, query_heads, query, tiles, width, slots,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write tiles of the weights exp2(s − m). For each row of a tile, also write m and the sum of the row's weights. A
    program may write many tiles.
    """
    BOUNDED: tl.constexpr = HAS_DOCUMENTS or HAS_WINDOW
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    places = slots * ((tiles + 1) // 2) * width
    rows = tl.arange(0, BLOCK_M)
    for place in tl.range(tl.program_id(0), places, tl.num_programs(0), flatten=not BOUNDED):
        batch, head, first_query, key, visible = tile_at(place, part, low_ptr, H, GROUP, BOUNDED, BLOCK_M, BLOCK_N)
        position = first_query + S - T
        if not BOUNDED or visible:
            # s = scale · log2 e · q · kᵀ, summed over BLOCK_D columns of the heads at a time.
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for column in range(0, D, BLOCK_D):
                q_tile = _load_tile(q, batch, head, first_query, column, BLOCK_M, BLOCK_D)
                k_tile = _load_tile(k, batch, head // GROUP, key, column, BLOCK_N, BLOCK_D)
                scores = tl.dot(q_tile, tl.trans(k_tile), scores, input_precision=PRECISION)
            scores = _scale_and_mask(
                scores, scale, position, key, S, window, documents_ptr + batch * S, HAS_DOCUMENTS, HAS_WINDOW,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip

            # m of each row [BLOCK_M]: 0 unless the row's largest score is far from 0, and -inf if the row sees no key.
            largest = tl.max(scores, 1)
            is_near = (tl.abs(largest) <= FAR) | (largest == float("-inf"))
            m = tl.where(is_near, 0.0, tl.ceil(largest))
            p = tl.exp2(scores - m[:, None])  # [BLOCK_M, BLOCK_N]

            tl.store(tile_m_ptr + place * BLOCK_M + rows, tl.where(largest == float("-inf"), largest, m))
            tl.store(tile_sum_ptr + place * BLOCK_M + rows, tl.sum(p, 1))
            entries = (place * BLOCK_M + rows).to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(weights_ptr + entries, p.to(weights_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=VARYING)
def sums_kernel(
    weights_ptr, tile_m_ptr, tile_sum_ptr, m_ptr, inverse_ptr, low_ptr,
    T, S, kv_head, query_head, query_heads, query, tiles, width, H: tl.constexpr, GROUP: tl.constexpr,
    BOUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """For each query, write one m that applies to all of its weights, and the inverse of the sum of these weights ([B,
    H, T] each).

    SUMS_PROGRAMS programs share a tile of queries. Each of these programs computes m and the inverse of the sum for all
    queries of the tile. The programs then split the tile's weights among them, and rescale the weights that were
    written with a different m.
    """
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    slot = tl.program_id(1)
    tile = tl.program_id(2)
    batch, head = slot_head(slot, part, H, GROUP)
    place = first_place(slot, tile, part, BLOCK_M, BLOCK_N)
    position = query + tile * BLOCK_M + S - T

    # Find the key tiles that the queries see.
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + batch * S + position) // BLOCK_N
    end = tl.cdiv(tl.minimum(position + BLOCK_M, S), BLOCK_N)

    # Compute m, the sum of exp2(s − m), and the largest |m| of any tile ([BLOCK_M] each), reading PARTS tiles at a
    # time.
    rows = tl.arange(0, BLOCK_M)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest_m = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, PARTS):
        key_tile = start + tl.arange(0, PARTS)[:, None]
        entries = (place + key_tile) * BLOCK_M + rows[None, :]  # [PARTS, BLOCK_M]
        tile_m = tl.load(tile_m_ptr + entries, mask=key_tile < end, other=float("-inf"))
        sums = tl.load(tile_sum_ptr + entries, mask=key_tile < end, other=0.0)
        largest_m = tl.maximum(largest_m, tl.max(tl.where(tile_m == float("-inf"), 0.0, tl.abs(tile_m)), 0))
        new_m = tl.maximum(m, tl.max(tile_m, 0))
        finite_m = tl.where(new_m == float("-inf"), 0.0, new_m)  # -inf is the m of a query that has seen no key yet
        total = total * tl.exp2(m - finite_m) + tl.sum(sums * tl.exp2(tile_m - finite_m[None, :]), 0)
        m = new_m
    m = tl.where(total == 0.0, 0.0, m)  # for rows past the last query
    total = tl.where(total == 0.0, 1.0, total)

    if tl.program_id(0) == 0:
        queries = query + tile * BLOCK_M + rows
        entries = (batch.to(tl.int64) * H + head) * T + queries
        tl.store(m_ptr + entries, m, mask=queries < T)
        tl.store(inverse_ptr + entries, 1.0 / total, mask=queries < T)

    # Tiles whose m differs from the query's m are multiplied by a power of 2. If all m are 0, no tile needs this.
    if tl.max(largest_m) > 0.0:
        for key_tile in range(begin + tl.program_id(0), end, tl.num_programs(0)):
            entries = (place + key_tile) * BLOCK_M + rows
            tile_m = tl.load(tile_m_ptr + entries)
            factor = tl.where(tile_m == float("-inf"), 1.0, tl.exp2(tile_m - m))
            if tl.min(factor) < 1.0:
                pointers = weights_ptr + entries.to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                p = tl.load(pointers)  # [BLOCK_M, BLOCK_N]
                tl.store(pointers, (p * factor[:, None]).to(p.dtype))


@triton.jit
def _sum_over_keys(
    weights, factors, out_ptr, inverse_ptr, low_ptr, part, slot, tile, column, H: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, HAS_INVERSE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write a tile of o = weights · v / Σ or of dq = ds · k, where o and dq are [B, T, H, D].

    The tile consists of BLOCK_D columns for BLOCK_M queries of a slot, which is a query head of this launch. D is the
    width of the result.
    """
    batch, head = slot_head(slot, part, H, GROUP)
    place = first_place(slot, tile, part, BLOCK_M, BLOCK_N)
    position = part.query + tile * BLOCK_M + part.S - part.T
    begin = 0
    if BOUNDED:
        begin = tl.load(low_ptr + batch * part.S + position) // BLOCK_N * BLOCK_N

    queries = part.query + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inverse = 1.0
    if HAS_INVERSE:
        entries = (batch.to(tl.int64) * H + head) * part.T + queries
        inverse = tl.load(inverse_ptr + entries, mask=queries < part.T, other=0.0)[:, None]  # [BLOCK_M, 1]

    # Compute the product, STEP keys at a time. In fp32, the product of each step is computed separately and then added
    # to the total. Accumulating over all keys inside `tl.dot` would cause rounding errors larger than the differences
    # do · v − δ in the backward.
    BY_STEP: tl.constexpr = HAS_INVERSE and out_ptr.dtype.element_ty == tl.float32
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key in range(begin, tl.minimum(position + BLOCK_M, part.S), STEP):
        strip = weights.load([(place + key // BLOCK_N) * BLOCK_M, key % BLOCK_N])  # [BLOCK_M, STEP]
        factor = _load_tile(factors, batch, head // GROUP, key, column, STEP, BLOCK_D)
        if BY_STEP:
            total += tl.dot(strip, factor, input_precision=PRECISION) * inverse
        else:
            total = tl.dot(strip, factor, total, input_precision=PRECISION)
    if HAS_INVERSE and not BY_STEP:
        total *= inverse

    columns = column + tl.arange(0, BLOCK_D)
    out = out_ptr + ((batch.to(tl.int64) * part.T + queries) * H + head)[:, None] * D + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(queries < part.T)[:, None] & (columns < D)[None, :])


@triton.jit(do_not_specialize=VARYING)
def sum_over_keys_kernel(
    weights, factors, out_ptr, inverse_ptr, low_ptr,
    T, S, kv_head, query_head, query_heads, query, tiles, width, H: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the result o = weights · v / Σ, [B, T, H, D]. A program writes BLOCK_D columns of o for BLOCK_M queries."""
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    tile = tiles - 1 - tl.program_id(2)  # the queries with the most keys first
    _sum_over_keys(
        weights, factors, out_ptr, inverse_ptr, low_ptr, part, tl.program_id(1), tile, tl.program_id(0) * BLOCK_D,
        H, GROUP, D, True, BOUNDED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, STEP,
    )  # fmt: skip


@triton.jit
def row_products_kernel(
    out_ptr, d_out_ptr, delta_ptr, N, T, d_b, d_t, d_h, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write δ [B, H, T]: for each query and head, the dot product of o and do. o and do are [B, T, H, D], where D is
    the width of the values.

    A program computes ROWS of the N = B · T · H elements of δ.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % H
    token = row // H
    batch = token // T
    position = token % T
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < N)[:, None] & (column < D)  # [ROWS, BLOCK_D]
    out = tl.load(out_ptr + row[:, None] * D + column, mask=inside, other=0.0).to(tl.float32)
    start = batch * d_b + position * d_t + head * d_h
    d_out = tl.load(d_out_ptr + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + (batch * H + head) * T + position, tl.sum(out * d_out, 1), mask=row < N)


@triton.jit(do_not_specialize=VARYING)
def score_gradients_kernel(
    q, k, v, d_out, p_ptr, ds_ptr, m_ptr, inverse_ptr, delta_ptr, documents_ptr, low_ptr, window, scale,
    T, S, kv_head, query_head, query_heads, query, tiles, width, slots,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write tiles of p and ds to two workspaces, in the same layout as the forward's weights."""
    BOUNDED: tl.constexpr = HAS_DOCUMENTS or HAS_WINDOW
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    places = slots * ((tiles + 1) // 2) * width
    rows = tl.arange(0, BLOCK_M)
    for place in tl.range(tl.program_id(0), places, tl.num_programs(0), flatten=not BOUNDED):
        batch, head, first_query, key, visible = tile_at(place, part, low_ptr, H, GROUP, BOUNDED, BLOCK_M, BLOCK_N)
        position = first_query + S - T
        if not BOUNDED or visible:
            # s = scale · log2 e · q · kᵀ and dp = do · vᵀ, [BLOCK_M, BLOCK_N] each.
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for column in range(0, D, BLOCK_D):
                q_tile = _load_tile(q, batch, head, first_query, column, BLOCK_M, BLOCK_D)
                k_tile = _load_tile(k, batch, head // GROUP, key, column, BLOCK_N, BLOCK_D)
                scores = tl.dot(q_tile, tl.trans(k_tile), scores, input_precision=PRECISION)
                if D == V:  # if q and v have the same width, one loop computes both
                    do_tile = _load_tile(d_out, batch, head, first_query, column, BLOCK_M, BLOCK_D)
                    v_tile = _load_tile(v, batch, head // GROUP, key, column, BLOCK_N, BLOCK_D)
                    dp = tl.dot(do_tile, tl.trans(v_tile), dp, input_precision=PRECISION)
            if D != V:
                for column in range(0, V, BLOCK_D):
                    do_tile = _load_tile(d_out, batch, head, first_query, column, BLOCK_M, BLOCK_D)
                    v_tile = _load_tile(v, batch, head // GROUP, key, column, BLOCK_N, BLOCK_D)
                    dp = tl.dot(do_tile, tl.trans(v_tile), dp, input_precision=PRECISION)
            scores = _scale_and_mask(
                scores, scale, position, key, S, window, documents_ptr + batch * S, HAS_DOCUMENTS, HAS_WINDOW,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip

            # m, 1 / Σ and δ of the queries, [BLOCK_M] each.
            entries = (batch.to(tl.int64) * H + head) * T + first_query + rows
            inside = (first_query + rows >= 0) & (first_query + rows < T)
            m = tl.load(m_ptr + entries, mask=inside, other=0.0)
            inverse = tl.load(inverse_ptr + entries, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + entries, mask=inside, other=0.0)

            p = tl.exp2(scores - m[:, None]) * inverse[:, None]
            ds = p * (dp - delta[:, None]) * scale
            entries = (place * BLOCK_M + rows).to(tl.int64)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(p_ptr + entries, p.to(p_ptr.dtype.element_ty))
            tl.store(ds_ptr + entries, ds.to(ds_ptr.dtype.element_ty))


@triton.jit
def _sum_over_queries(
    weights, factors, out_ptr, sum_ptr, last_ptr, part, first_slot, key_tile, column, later, finished, H: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write a tile of dv = pᵀ · do or dk = dsᵀ · q for a KV head, summed over the query heads of this KV head that are
    in this launch.

    ``first_slot`` is the slot of the first of these query heads. The tile consists of BLOCK_D columns for BLOCK_N keys.
    D is the width of the result.

    If several launches contribute to a tile, ``sum_ptr`` holds the tile's sum between the launches. After this launch,
    the sums of key tile ``finished`` and of all later key tiles are complete.
    """
    key = key_tile * BLOCK_N
    batch, first_head = slot_head(first_slot, part, H, GROUP)

    # Find the range of queries for which this launch has tiles with these keys. Queries are counted from the part's
    # first query.
    begin = tl.maximum(key - (part.S - part.T) - part.query, 0) // BLOCK_M * BLOCK_M
    end = tl.minimum(part.tiles * BLOCK_M, part.T - part.query)
    if BOUNDED:
        last = tl.load(last_ptr + batch * part.S + tl.minimum(key + BLOCK_N, part.S) - 1)
        end = tl.minimum(end, last + 1 - (part.S - part.T) - part.query)

    # Compute the product, STEP queries at a time, one query head after the other.
    steps = tl.maximum((end - begin + STEP - 1) // STEP, 0)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(0, part.query_heads * steps):
        group_head = i // steps
        row = begin + i % steps * STEP
        place = first_place(first_slot + group_head, row // BLOCK_M, part, BLOCK_M, BLOCK_N) + key_tile
        strip = weights.load([place * BLOCK_M + row % BLOCK_M, 0])  # [STEP, BLOCK_N]
        factor = _load_tile(factors, batch, first_head + group_head, part.query + row, column, STEP, BLOCK_D)
        total = tl.dot(tl.trans(strip), factor, total, input_precision=PRECISION)

    # The sums stay in fp32 until the last launch that adds to them.
    keys = key + tl.arange(0, BLOCK_N)
    columns = column + tl.arange(0, BLOCK_D)
    entries = (batch.to(tl.int64) * part.S + keys) * (H // GROUP) + first_head // GROUP
    entries = entries[:, None] * D + columns[None, :]  # [BLOCK_N, BLOCK_D]
    inside = (keys < part.S)[:, None] & (columns < D)[None, :]
    if later != 0:
        total += tl.load(sum_ptr + entries, mask=inside, other=0.0)
    if key_tile >= finished:
        # No later launch adds to this sum, so the sum is rounded only once.
        tl.store(out_ptr + entries, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(sum_ptr + entries, total, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def gradients_kernel(
    ds_rows, k, ds_columns, q, p_columns, d_out, dq_ptr, dk_ptr, dk_sum_ptr, dv_ptr, dv_sum_ptr, low_ptr, last_ptr,
    T, S, kv_head, query_head, query_heads, query, tiles, width, kv_heads, key_tiles, later, finished,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Each program writes one tile of dv, dk or dq.

    A tile is a sum over queries or keys, and these sums have very unequal lengths. One launch computes all three
    gradients, so that a multiprocessor that has finished a long sum finds a shorter sum to compute next. The tiles are
    ordered by the lengths of their sums, the longest first. The second index of a program is the rank of its tile in
    this order. For dq, tiles whose queries see the most keys come first. For dk and dv, tiles whose keys are seen by
    the most queries come first.
    """
    part = Part(T, S, kv_head, query_head, query_heads, query, tiles, width)
    ACROSS_K: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    ACROSS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    index, rank = tl.program_id(0), tl.program_id(1)
    # The programs for dv come first, then the programs for dk, then the programs for dq.
    before_k = kv_heads * ACROSS_V
    before_q = before_k + kv_heads * ACROSS_K
    # The three branches are not nested, because Triton reuses shared memory only among tiles of consecutive
    # branches.
    if (index < before_k) & (rank < key_tiles):
        _sum_over_queries(
            p_columns, d_out, dv_ptr, dv_sum_ptr, last_ptr, part, index // ACROSS_V * query_heads, rank,
            index % ACROSS_V * BLOCK_V, later, finished, H, GROUP, V, BOUNDED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_V,
            STEP,
        )  # fmt: skip
    if (index >= before_k) & (index < before_q) & (rank < key_tiles):
        of_k = index - before_k
        _sum_over_queries(
            ds_columns, q, dk_ptr, dk_sum_ptr, last_ptr, part, of_k // ACROSS_K * query_heads, rank,
            of_k % ACROSS_K * BLOCK_D, later, finished, H, GROUP, D, BOUNDED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
            STEP,
        )  # fmt: skip
    if (index >= before_q) & (rank < tiles):
        of_q = index - before_q
        _sum_over_keys(
            ds_rows, k, dq_ptr, dq_ptr, low_ptr, part, of_q // ACROSS_K, tiles - 1 - rank, of_q % ACROSS_K * BLOCK_D,
            H, GROUP, D, False, BOUNDED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, STEP,
        )  # fmt: skip
