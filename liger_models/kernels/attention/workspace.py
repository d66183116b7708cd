"""Layout of the workspace of `causal_attention`: which tiles of attention weights a launch writes, and where.

The workspace is a stack of tiles [BLOCK_M queries, BLOCK_N keys]. The index of a tile in the stack is its *place*. One
launch fills the workspace for a part of the queries and for some query heads. These query heads are called the *slots*
of the launch. A tile has a place only if, under the causal mask alone, at least one of its queries sees at least one of
its keys. Later queries see more keys, so a later query tile has more places than an earlier query tile. Query tiles are
paired such that every pair sees about the same number of keys in total. The places of a slot then form a rectangle with
one row for each pair. If the number of query tiles is even, the last tile is paired with the first, the second to last
with the second, and so on. If the number of query tiles is odd, the last tile has no partner, and the other tiles are
paired in the same way. For example, query tiles 0 to 4 make 3 pairs with 5 places each. The key tiles of a query tile
are at consecutive places, in ascending order. In this example, the places belong to the following query tiles::

    pair 0    4 4 4 4 4
    pair 1    3 3 3 3 0
    pair 2    2 2 2 1 1

On the device, `first_place` maps a query tile to the place of its first key tile, and `tile_at` maps a place to its
tile. On the host, `launches` splits the heads and queries into launches.
"""

import math
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from liger_models.kernels.dispatch import tl, triton
from liger_models.kernels.tiles import cdiv

PAIRS, LEAST_ROWS = 2**26, 2048
"""In the backward, the workspace holds the attention weights p and the gradients ds of the scores for up to `PAIRS`
visible pairs of a query and a key. In half precision, p and ds together take 4 bytes per pair. With more than 32768
keys, the workspace is larger, so that it holds at least `LEAST_ROWS` queries. In the forward, which writes only p, the
workspace holds twice as many pairs. dk and dv are summed over launches in fp32."""


class Part(NamedTuple):
    """The heads and queries of a launch.

    Kernels take the fields as separate arguments and build the tuple from them. If a kernel took the tuple itself,
    Triton would specialize the kernel for the values in the tuple, and would therefore compile a new kernel for each
    launch.

    Attributes:
        T: number of queries in a row of the batch.
        S: number of keys in a row of the batch. Query i is token i + S − T.
        kv_head: index of the launch's first KV head among the B · G KV heads of all rows.
        query_head: index of the launch's first query head among the query heads of a KV head.
        query_heads: number of query heads per KV head in the launch.
        query: index of the first query.
        tiles: number of query tiles.
        width: number of places per pair of query tiles.
    """

    T: int
    S: int
    kv_head: int
    query_head: int
    query_heads: int
    query: int
    tiles: int
    width: int


VARYING = [
    "kv_head", "query_head", "query_heads", "query", "tiles", "width", "slots", "kv_heads", "key_tiles", "later",
    "finished",
]  # fmt: skip
"""Names of the kernel arguments that differ between the launches of an op. Triton does not specialize kernels for their
values, so all launches run the same compiled kernel."""


@triton.jit
def key_tiles(tile, position, S, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the number of key tiles that a query tile sees.

    ``position`` is the token index of the first query of query tile 0.
    """
    return tl.cdiv(tl.minimum(position + (tile + 1) * BLOCK_M, S), BLOCK_N)


@triton.jit
def slot_head(slot, part, H: tl.constexpr, GROUP: tl.constexpr):
    """Return the row of the batch and the query head of a slot. GROUP query heads share a KV head."""
    kv_head = part.kv_head + slot // part.query_heads
    return kv_head // (H // GROUP), kv_head % (H // GROUP) * GROUP + part.query_head + slot % part.query_heads


@triton.jit
def first_place(slot, tile, part, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the place of the first key tile that a query tile sees.

    The other key tiles that the query tile sees are at the places after this one.
    """
    upper = tile >= part.tiles // 2  # True for the later tile of a pair, whose places come first
    pair = tl.where(upper, part.tiles - 1 - tile, tile + part.tiles % 2)
    position = part.query + part.S - part.T
    before = tl.where(upper, 0, key_tiles(part.tiles - 1 - pair, position, part.S, BLOCK_M, BLOCK_N))
    return (slot * ((part.tiles + 1) // 2) + pair) * part.width + before


@triton.jit
def tile_at(
    place, part, low_ptr, H: tl.constexpr, GROUP: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the batch row, query head, first query, first key and visibility of the tile at a place.

    With bounds (a window or documents), a tile is visible if at least one of its queries may see at least one of its
    keys. Without bounds, all tiles count as visible.
    """
    pairs = (part.tiles + 1) // 2
    pair = place // part.width % pairs
    tile = part.tiles - 1 - pair
    key_tile = place % part.width

    # The places after the key tiles of the pair's later query tile belong to the earlier query tile.
    count = key_tiles(tile, part.query + part.S - part.T, part.S, BLOCK_M, BLOCK_N)
    earlier = key_tile >= count
    tile = tl.where(earlier, pair - part.tiles % 2, tile)  # -1 stands for no tile
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
    """The heads and queries of one launch, whose attention weights fit into the workspace together.

    Attributes:
        part: the heads and queries.
        kv_heads: number of KV heads in this launch, out of the B · G KV heads of all rows.
        key_tiles: number of key tiles that the queries see.
        later: whether an earlier launch has already begun the sums of dk and dv for these keys and KV heads. If so,
            this launch adds to these sums.
        finished: index of the first key tile for which no later launch adds to the sums of these KV heads.
    """

    part: Part
    kv_heads: int
    key_tiles: int
    later: bool
    finished: int

    @property
    def slots(self) -> int:
        """The number of slots, which are the query heads of this launch."""
        return self.kv_heads * self.part.query_heads

    @property
    def places(self) -> int:
        """The number of places (tiles of the workspace) that this launch uses."""
        return self.slots * ((self.part.tiles + 1) // 2) * self.part.width


def parts_of_queries(
    T: int, S: int, block_m: int, block_n: int, matrices: int
) -> tuple[int, list[tuple[int, int, int]]]:
    """Divide the queries into parts with about equal numbers of visible pairs of a query and a key.

    Return the number of heads per launch, and the parts. Each part is a tuple: its first query, its number of query
    tiles, and the number of places per pair of query tiles. The workspace has room for one part of this number of
    heads.

    Args:
        T: number of queries.
        S: number of keys.
        block_m: number of queries in a tile.
        block_n: number of keys in a tile.
        matrices: number of matrices that a launch writes, 1 for p and 2 for p and ds.
    """
    queries, keys = cdiv(T, block_m) * block_m, cdiv(S, block_n) * block_n
    before = keys - queries  # number of keys before the first query

    # Part i consists of the query tiles [edges[i], edges[i + 1]). The queries up to position p have about p² / 2
    # visible pairs. The edges that give all parts equally many pairs are therefore computed with square roots.
    twice_pairs = keys**2 - before**2  # twice the number of visible pairs of a head
    count = cdiv(twice_pairs * matrices, 4 * max(PAIRS, LEAST_ROWS * keys))
    edges = sorted({(math.isqrt(before**2 + twice_pairs * i // count) - before) // block_m for i in range(count + 1)})

    # The width of a part is the largest number of key tiles that a pair of its query tiles sees.
    parts = []
    for start, end in pairwise(edges):
        seen = [cdiv(min((tile + 1) * block_m + S - T, S), block_n) for tile in range(start, end)]
        paired = [0] * (len(seen) % 2) + seen  # with an odd number of tiles, the last one has no partner
        width = max(first + last for first, last in zip(paired, reversed(paired), strict=True))
        parts.append((start * block_m, len(seen), width))
    heads = min(max(4 * PAIRS // (twice_pairs * matrices), 1), 2**15)
    return heads, parts


def launches(q: Tensor, k: Tensor, block_m: int, block_n: int, backward: bool) -> list[Launch]:
    """Split the work on q [B, T, H, D] and k [B, S, G, D] into launches, each for some heads and queries.

    The forward processes all query heads of a KV head before the next KV head, so that keys are still in the cache when
    they are read again. A launch of the backward first takes one query head of as many KV heads as fit. Each additional
    KV head adds tiles of dk and dv, which are computed in parallel. An additional query head of the same KV head adds
    no such tiles. A launch of the backward therefore takes several query heads per KV head only if all KV heads fit.
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
        # The last part comes first. Its queries see all keys, so its launch begins the sums for all keys, and later
        # launches add to these sums.
        for index, (query, tiles, width) in reversed([*enumerate(parts)]):
            seen = cdiv(min(query + tiles * block_m, T) + S - T, block_n)
            seen_before = cdiv(query + S - T, block_n) if index else 0
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
