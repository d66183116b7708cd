"""Layout of the workspace of `causal_attention`: which tiles of weights a launch writes, and where.

The workspace is a stack of tiles [BLOCK_M queries, BLOCK_N keys]. The index of a tile in the stack is its *place*. One
launch fills the workspace for some query heads, its *slots*, and for a part of the queries. A tile has a place only if
it has visible pairs, so later tiles of queries have more tiles of keys. To make every slot a rectangle, the tiles of
queries are paired so that all pairs see about equally many keys: the last with the first, the last but one with the
second, and so on. If their number is odd, the last tile stays alone. For example, the tiles of queries 0 to 4 make 3
pairs with 5 places each. The table shows the tile of queries at each place; its tiles of keys are in order::

    pair 0    4 4 4 4 4
    pair 1    3 3 3 3 0
    pair 2    2 2 2 1 1

`first_place` and `tile_at` map between tiles and places on the device; `launches` cuts heads and queries into launches
on the host.
"""

import math
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from liger_models.kernels.dispatch import tl, triton

PAIRS, LEAST_ROWS = 2**26, 2048
"""Visible pairs of a query and a key whose p and ds the workspace holds (4 bytes a pair in half precision). Beyond
32768 keys it grows, to hold `LEAST_ROWS` queries. The forward, which writes weights alone, holds twice as many. dk and
dv are summed over launches in fp32."""


class Part(NamedTuple):
    """The heads and queries of a launch.

    Kernels take these numbers one by one and pack them again, because Triton would specialize the entries of a tuple
    and compile a kernel for each launch.

    Attributes:
        T, S: queries and keys of a row of the batch; query i is token i + S − T.
        kv_head: the first KV head, of the B · G of all rows of the batch.
        query_head: the first query head of each KV head.
        query_heads: query heads of each KV head.
        query: the first query.
        tiles: tiles of queries.
        width: places of a pair of tiles of queries.
    """

    T: int
    S: int
    kv_head: int
    query_head: int
    query_heads: int
    query: int
    tiles: int
    width: int


VARYING = ["kv_head", "query_head", "query_heads", "query", "tiles", "width", "slots", "later", "finished"]
"""Arguments that differ between the launches of one op, which all run the same compiled kernel."""


@triton.jit
def key_tiles(tile, position, S, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles of keys a tile of queries sees if tile 0 begins at ``position`` of the S keys."""
    return tl.cdiv(tl.minimum(position + (tile + 1) * BLOCK_M, S), BLOCK_N)


@triton.jit
def slot_head(slot, part, H: tl.constexpr, GROUP: tl.constexpr):
    """Row of the batch and query head of a slot; GROUP query heads share a KV head."""
    kv_head = part.kv_head + slot // part.query_heads
    return kv_head // (H // GROUP), kv_head % (H // GROUP) * GROUP + part.query_head + slot % part.query_heads


@triton.jit
def first_place(slot, tile, part, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Place of the first tile of keys that a tile of queries sees; the places of the others follow."""
    upper = tile >= part.tiles // 2  # the later tile of its pair, which comes first
    pair = tl.where(upper, part.tiles - 1 - tile, tile + part.tiles % 2)
    position = part.query + part.S - part.T
    before = tl.where(upper, 0, key_tiles(part.tiles - 1 - pair, position, part.S, BLOCK_M, BLOCK_N))
    return (slot * ((part.tiles + 1) // 2) + pair) * part.width + before


@triton.jit
def tile_at(
    place, part, low_ptr, H: tl.constexpr, GROUP: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tile at a place: row of the batch, query head, first query, first key, and whether it has visible pairs.

    Visibility is exact only with bounds (a window or documents); without bounds, all tiles are written.
    """
    pairs = (part.tiles + 1) // 2
    pair = place // part.width % pairs
    tile = part.tiles - 1 - pair
    key_tile = place % part.width

    # Places after the keys of the pair's later tile belong to its earlier one.
    count = key_tiles(tile, part.query + part.S - part.T, part.S, BLOCK_M, BLOCK_N)
    earlier = key_tile >= count
    tile = tl.where(earlier, pair - part.tiles % 2, tile)  # -1: no tile
    key_tile = tl.where(earlier, key_tile - count, key_tile)
    batch, head = slot_head(place // part.width // pairs, part, H, GROUP)
    query = part.query + tile * BLOCK_M
    key = key_tile * BLOCK_N

    visible = tile >= 0
    if BOUNDED:
        position = query + part.S - part.T
        lowest = tl.load(low_ptr + batch * part.S + position, mask=tile >= 0, other=0)
        visible = visible & (key < position + BLOCK_M) & (key + BLOCK_N > lowest)
    return batch, head, query, key, visible


class Launch(NamedTuple):
    """A part of the heads and queries whose weights the workspace holds together.

    Attributes:
        part: which heads and queries.
        kv_heads: KV heads, of the B · G of all rows.
        key_tiles: tiles of keys that the queries see.
        later: whether an earlier launch sees some of these keys with query heads of the same KV heads.
        finished: index of the first tile of keys that no later launch sees.
    """

    part: Part
    kv_heads: int
    key_tiles: int
    later: bool
    finished: int

    @property
    def slots(self) -> int:
        """Query heads."""
        return self.kv_heads * self.part.query_heads

    @property
    def places(self) -> int:
        """Tiles of weights in the workspace."""
        return self.slots * ((self.part.tiles + 1) // 2) * self.part.width


def parts_of_queries(
    T: int, S: int, block_m: int, block_n: int, matrices: int
) -> tuple[int, list[tuple[int, int, int]]]:
    """How many heads one launch takes, and the parts of the queries, which have about equally many visible keys.

    A part is its first query, its number of tiles of queries, and the number of places of a pair of them. ``matrices``
    is how many matrices of weights a launch writes.
    """
    queries, keys = triton.cdiv(T, block_m) * block_m, triton.cdiv(S, block_n) * block_n
    before = keys - queries

    # Queries up to position i see about i² / 2 pairs, so that edges of equal parts lie at square roots.
    seen = keys**2 - before**2  # twice the pairs of a head
    count = triton.cdiv(seen * matrices, 4 * max(PAIRS, LEAST_ROWS * keys))
    edges = sorted({(math.isqrt(before**2 + seen * part // count) - before) // block_m for part in range(count + 1)})

    parts = []
    for top, bottom in pairwise(edges):
        counts = [-(-min((tile + 1) * block_m + S - T, S) // block_n) for tile in range(top, bottom)]
        folded = [0] * (len(counts) % 2) + counts
        width = max(first + last for first, last in zip(folded, reversed(folded), strict=True))
        parts.append((top * block_m, len(counts), width))
    return min(max(4 * PAIRS // (seen * matrices), 1), 2**15), parts


def launches(q: Tensor, k: Tensor, block_m: int, block_n: int, backward: bool) -> list[Launch]:
    """Cut the heads and queries of q [B, T, H, D] and k [B, S, G, D] into launches.

    The forward takes all query heads of a KV head before the next KV head, while its keys are in the cache. The
    backward takes one query head of all KV heads before the second one, so that sums over queries have more tiles.
    """
    (B, T, H, _), (_, S, G, _) = q.shape, k.shape
    heads, parts = parts_of_queries(T, S, block_m, block_n, matrices=2 if backward else 1)
    if backward:
        kv_heads = min(heads, B * G)
        query_heads = min(heads // kv_heads, H // G)
    else:
        query_heads = min(heads, H // G)
        kv_heads = min(heads // query_heads, B * G)

    result = []
    for kv_head in range(0, B * G, kv_heads):
        # The last part comes first. It sees all keys, so its launch begins their sums, and later launches add to them.
        for index, (query, tiles, width) in reversed([*enumerate(parts)]):
            seen = triton.cdiv(min(query + tiles * block_m, T) + S - T, block_n)
            seen_before = triton.cdiv(query + S - T, block_n) if index else 0
            for query_head in range(0, H // G, query_heads):
                count = min(query_heads, H // G - query_head)
                result.append(
                    Launch(
                        Part(T, S, kv_head, query_head, count, query, tiles, width),
                        kv_heads=min(kv_heads, B * G - kv_head),
                        key_tiles=seen,
                        later=index < len(parts) - 1 or query_head > 0,
                        finished=seen_before if query_head + count == H // G else seen,
                    )
                )
    return result
