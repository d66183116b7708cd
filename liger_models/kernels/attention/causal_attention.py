"""Causal attention for head dimensions up to 576. The attention kernels in other libraries support head dimensions up
to 256.

Queries and keys have D columns, and values have V columns. There are T queries and S keys, and query i is token i + S −
T. A query sees a key if the key belongs to the query's document, is not after the query, and is fewer than ``window``
tokens before the query. Let s_ij = scale · log2 e · q_i · k_j, and let m_i be either 0 or the largest s_ij of query i,
rounded up (see below). Sums over j are over the keys that query i sees. The forward computes in fp32::

    Σ_i  = Σ_j exp2(s_ij − m_i)
    p_ij = exp2(s_ij − m_i) / Σ_i
    o_i  = Σ_j p_ij · v_j

In the backward, let δ_i = do_i · o_i. The gradients are as follows, where dk and dv are also summed over the query
heads that share a KV head::

    dv_j = Σ_i p_ij · do_i
    ds_ij = scale · p_ij · (do_i · v_j − δ_i)
    dq_i = Σ_j ds_ij · k_j,   dk_j = Σ_i ds_ij · q_i

The forward saves q, k, v, o, m and 1 / Σ for the backward. Saving a single log-sum-exp in place of m and Σ would make p
inaccurate: a log-sum-exp can be far from 0, and then has a large rounding error. The backward rounds p and ds to the
dtype of q, just as the forward rounds the attention weights.

The forward and the backward each run several kernels, because a single kernel would need too many registers. With a
head dimension of 512, the o of 128 queries would fill all registers of a Hopper multiprocessor, and so would the dk and
dv of 64 keys. With fewer queries or keys per program, the kernel would have to load more bytes per second than the
multiprocessors can take in. At this head dimension, writing and reading the attention weights takes little time
compared with the matrix products that use them. One kernel therefore writes the visible tiles of the attention weights
to a workspace, for some queries and heads at a time. In the backward, another kernel writes the tiles of p and ds.
Plain matrix products then read these tiles. The forward takes 2 matrix products and the backward takes 5, including the
products from which the tiles are computed. The kernels run in this order::

    forward                                             backward
    weights_kernel         tiles of exp2(s − m)         row_products_kernel      δ
    sums_kernel            m, 1 / Σ                     score_gradients_kernel   tiles of p and ds
    sum_over_keys_kernel   o = weights · v / Σ          gradients_kernel         dq = ds · k, dk = dsᵀ · q, dv = pᵀ · do

The kernels are in `causal_attention_kernels.py`, and the layout of the workspace is in `workspace.py`. This file has
the tile sizes for each kind of device, the constants that the launches share (`LaunchPlan`), the forward and
backward of the op, and the public function.

For each tile, the first kernel of the forward writes the weights exp2(s_ij − m). For each row of the tile, this kernel
also writes m and the sum of the weights. In bf16 and fp32, m is 0 if the largest s of the row is between −64 and 64,
because these dtypes represent weights around 2^64 as accurately as weights around 1. In all other cases, m is the
largest s of the row, rounded up. The second kernel adds the sums of all tiles of a query. If the tiles of a query have
different m, the second kernel also multiplies the weights in the workspace by powers of 2. These products are exact,
except for tiny weights, which may underflow. The product of the weights and v is then a plain matrix product. The
weights are not rescaled in the loop of this product, because with Triton 3.6, such a loop overwrites registers that the
asynchronous products of the previous step still read.

Source: https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.attention.causal_attention_kernels import (
    gradients_kernel,
    row_products_kernel,
    score_gradients_kernel,
    sum_over_keys_kernel,
    sums_kernel,
    weights_kernel,
)
from liger_models.kernels.attention.heads import check_heads
from liger_models.kernels.attention.workspace import Launch, launches
from liger_models.kernels.dispatch import TensorDescriptor, fitting_stages, num_programs, on_device_of, use_triton
from liger_models.kernels.tiles import cdiv, dot_precision, dot_tile


class Tiles(NamedTuple):
    """Sizes of tiles and launch options for one kind of device.

    Attributes:
        block_m, block_n: number of queries and number of keys in a tile of attention weights (forward) or of p and ds
            (backward).
        block_d: number of columns of a head over which a kernel sums in one step of q · kᵀ or do · vᵀ.
        weights, scores: launch options of the kernels that write tiles of weights (forward), and of p and ds
            (backward).
        columns: number of columns of a tile of o, dq, dk and dv.
        step: number of queries or keys per step of the kernels that write o, dq, dk and dv.
        products: launch options of the kernels that write o, dq, dk and dv.
    """

    block_m: int
    block_n: int
    block_d: int
    weights: Mapping[str, int]
    scores: Mapping[str, int]
    columns: int
    step: int
    products: Mapping[str, int]


LARGE = Tiles(
    128, 128, 64,
    weights={"num_warps": 4, "num_stages": 3}, scores={"num_warps": 8, "num_stages": 3},
    columns=256, step=64, products={"num_warps": 8, "num_stages": 4},
)  # fmt: skip
"""Tiles for half precision on GPUs with at least 226 KB of shared memory (Hopper, Blackwell). In the forward, two
programs take 208 of the 227 KB of shared memory of a Hopper multiprocessor, so that one program computes exponentials
while the other multiplies."""

SMALL = Tiles(
    64, 64, 32,
    weights={"num_warps": 8, "num_stages": 2}, scores={"num_warps": 4, "num_stages": 2},
    columns=64, step=32, products={"num_warps": 4, "num_stages": 2},
)  # fmt: skip
"""Tiles for all other dtypes and devices, such as fp32, or GPUs with less shared memory."""

FAR = {torch.float32: 64.0, torch.bfloat16: 64.0, torch.float16: -1.0}
"""The kernels subtract a number m from the scores s of a row in a tile. If the absolute value of the largest of these
scores is at most FAR, m is 0. In float16, which cannot represent 2^64, m is always the largest score, rounded up."""

PARTS = 64
SUMS_PROGRAMS = 4
"""A program of `sums_kernel` loads the sums of `PARTS` key tiles at a time. Each query tile has `SUMS_PROGRAMS`
programs."""


def choose_tiles(x: Tensor) -> Tiles:
    """Choose the tile sizes for the dtype and device of x."""
    return LARGE if x.element_size() == 2 and fitting_stages(x, 2, 113 * 2**10) == 2 else SMALL


def causal_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, scale: float, window: int | None = None
) -> Tensor:
    """Compute `causal_attention` in plain PyTorch.

    All scores are in memory at once. If the inputs are fp64, so are all computations.
    """
    T, S, queries = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(queries, 1) for x in (k, v))
    key = torch.arange(S, device=q.device)
    distance = key[S - T :, None] - key
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if documents is not None:
        visible = visible & (documents[:, None, S - T :, None] == documents[:, None, None, :])
    scores = ((q @ k.transpose(-1, -2)) * scale).masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def bounds(documents: Tensor | None, window: int | None, B: int, S: int, like: Tensor) -> tuple[Tensor, ...]:
    """Return ``documents``, ``low`` and ``last`` ([B, S] int32 each), which bound the keys that a query sees.

    Token i and all later tokens see no key before ``low[i]``. ``last[j]`` is the last token i with ``low[i] <= j``.
    Without documents and window, the three tensors are empty, and the kernels do not read them. For example, documents
    0 0 1 1 2 give low 0 0 2 2 4 and last 1 1 3 3 4. Documents 0 0 1 1 0 give low 0 0 0 0 0 and last 4 4 4 4 4: document
    0 consists of two pieces, so the last token sees the first token, and no key can be left out.
    """
    if documents is None and window is None:
        nothing = torch.empty(0, dtype=torch.int32, device=like.device)
        return nothing, nothing, nothing
    token = torch.arange(S, device=like.device).expand(B, -1)

    # low is the later of two tokens: the first token of the window, and the earliest token of the documents to which
    # this token or any later token belongs. Later tokens count because the tokens of documents may be in any order.
    low = torch.zeros_like(token) if window is None else (token - (window - 1)).clamp_min(0)
    if documents is None:
        documents = token
    else:
        number = documents.long() - documents.amin()  # the numbers start at 0
        number = number.clamp_max(S)  # keeps the index below in bounds if a document is S or larger
        first = torch.full((B, S + 1), S, device=like.device).scatter_reduce(1, number, token, "amin")
        low = torch.maximum(low, first.gather(1, number).flip(1).cummin(1)[0].flip(1))
    last = torch.searchsorted(low.contiguous(), token.contiguous(), right=True) - 1
    return documents.int().contiguous(), low.int().contiguous(), last.int().contiguous()


class LaunchPlan:
    """The kernel launches of an op, and the bounds, tile sizes and constants that all the launches share.

    Args:
        q, k: [B, T, H, D] and [B, S, G, D].
        documents, window: as in `causal_attention`.
        backward: whether to plan the backward instead of the forward.

    Attributes:
        launches: the heads and queries of each launch.
        room: number of places (tiles) in the workspace, which all launches share.
        documents, low, last: see `bounds`.
        score_constants: constants of the kernels that compute scores.
        sum_constants: constants of the kernel that adds the sums of tiles.
        product_constants: constants of the kernels that multiply the tiles of the workspace, except the constants that
            depend on the width of a head.
    """

    def __init__(self, q: Tensor, k: Tensor, documents: Tensor | None, window: int | None, *, backward: bool) -> None:
        (B, _, H, D), (_, S, G, _) = q.shape, k.shape
        self.tiles = tiles = choose_tiles(q)
        self.launches = launches(q, k, tiles.block_m, tiles.block_n, backward)
        self.room = max(launch.places for launch in self.launches)
        self.documents, self.low, self.last = bounds(documents, window, B, S, q)
        self.bounded = documents is not None or window is not None

        common: dict[str, Any] = {"H": H, "GROUP": H // G, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
        heads = {**common, "PRECISION": dot_precision(q)}
        masks = {"HAS_DOCUMENTS": documents is not None, "HAS_WINDOW": window is not None}
        self.score_constants = {**heads, **masks, "D": D, "BLOCK_D": tiles.block_d}
        self.sum_constants = {**common, "BOUNDED": self.bounded, "PARTS": PARTS, "num_warps": 8}
        self.product_constants = {**heads, "BOUNDED": self.bounded, "STEP": tiles.step, **tiles.products}

    def programs(self, q: Tensor, launch: Launch, per_sm: int) -> int:
        """Return the number of programs that write the workspace in a launch.

        With documents or a window, each tile has its own program, because some tiles take longer than others.
        Otherwise, there are at most ``per_sm`` programs per multiprocessor, and each of them may write several tiles.
        """
        return launch.places if self.bounded else min(launch.places, num_programs(q, per_sm))

    def columns(self, width: int) -> int:
        """For heads with ``width`` columns, return the number of columns of a tile of o, dq, dk or dv."""
        return min(self.tiles.columns, dot_tile(width))

    def workspace(self, like: Tensor) -> Tensor:
        """Allocate an uninitialized workspace [places · BLOCK_M, BLOCK_N]."""
        return like.new_empty(self.room * self.tiles.block_m, self.tiles.block_n)


def _aligned(x: Tensor) -> Tensor:
    """Return x [B, T, H, D] itself or, if its memory layout does not suit tile descriptors, a padded copy of x.

    A descriptor requires that the D elements of each head are contiguous and begin at a multiple of 16 bytes.
    """
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(not size or size * x.itemsize % 16 for size in x.stride()[:3]):
        x = torch.nn.functional.pad(x, (0, -x.shape[3] % 8)).contiguous()
    return x


def _heads(x: Tensor, rows: int, columns: int) -> Any:
    """Make a descriptor that loads tiles [rows, columns] of a head of an aligned x [B, T, H, D].

    The descriptor views x as [B, H, T, D].
    """
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def _strips(x: Tensor, rows: int, columns: int) -> Any:
    """Make a descriptor that loads tiles [rows, columns] of a workspace [places · BLOCK_M, BLOCK_N]."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernels of the forward. Return o [B, T, H, V], m [B, H, T] and 1 / Σ [B, H, T]."""
    (B, T, H, _), V = q.shape, v.shape[3]
    out = torch.empty(B, T, H, V, dtype=q.dtype, device=q.device)
    m, inverse = (torch.empty(B, H, T, dtype=torch.float32, device=q.device) for _ in range(2))
    if not out.numel():
        return out, m, inverse
    plan = LaunchPlan(q, k, documents, window, backward=False)
    tiles, columns = plan.tiles, plan.columns(V)

    with on_device_of(q):
        # Create descriptors of the tiles of q and k from which the weights are computed, and of the tiles of v.
        q, k, v = map(_aligned, (q, k, v))
        queries, keys = _heads(q, tiles.block_m, tiles.block_d), _heads(k, tiles.block_n, tiles.block_d)
        values = _heads(v, tiles.step, columns)

        # Allocate the workspace, and tensors for m and the sum of each row of its tiles. Create a descriptor of the
        # strips of weights that the product with v reads.
        weights = plan.workspace(q)
        tile_m, tile_sums = torch.empty(2, plan.room, tiles.block_m, dtype=torch.float32, device=q.device)
        strips = _strips(weights, tiles.block_m, tiles.step)

        for launch in plan.launches:
            weights_kernel[(plan.programs(q, launch, 2),)](
                queries, keys, weights, tile_m, tile_sums, plan.documents, plan.low, window or 0, scale, *launch.part,
                launch.slots, FAR=FAR[q.dtype], **plan.score_constants, **tiles.weights,
            )  # fmt: skip
            sums_kernel[(SUMS_PROGRAMS, launch.slots, launch.part.tiles)](
                weights, tile_m, tile_sums, m, inverse, plan.low, *launch.part, **plan.sum_constants
            )
            sum_over_keys_kernel[(cdiv(V, columns), launch.slots, launch.part.tiles)](
                strips, values, out, inverse, plan.low, *launch.part, D=V, BLOCK_D=columns, **plan.product_constants
            )
    return out, m, inverse


def _causal_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, m: Tensor, inverse: Tensor,
    documents: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the kernels of the backward. Return dq, dk and dv."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not out.numel():
        return dq, dk.zero_(), dv.zero_()
    plan = LaunchPlan(q, k, documents, window, backward=True)
    tiles, step = plan.tiles, plan.tiles.step
    D, V = q.shape[3], v.shape[3]
    columns_k, columns_v = plan.columns(D), plan.columns(V)
    across_k, across_v = cdiv(D, columns_k), cdiv(V, columns_v)

    with on_device_of(q):
        # Allocate a workspace for p and one for ds. If several launches add to dk and dv, the sums stay in fp32
        # until the last launch.
        q, k, v, d_out = map(_aligned, (q, k, v, d_out))
        p, ds = plan.workspace(q), plan.workspace(q)
        has_sums = any(launch.later for launch in plan.launches)
        dk_sum, dv_sum = (
            torch.empty(x.shape if has_sums else 0, dtype=torch.float32, device=x.device) for x in (dk, dv)
        )

        # Create descriptors of the tiles from which p and ds are computed, and of the two factors of each product: dq =
        # ds · k, dk = dsᵀ · q and dv = pᵀ · do.
        queries, d_queries = (_heads(x, tiles.block_m, tiles.block_d) for x in (q, d_out))
        keys, values = (_heads(x, tiles.block_n, tiles.block_d) for x in (k, v))
        dq_factors = _strips(ds, tiles.block_m, step), _heads(k, step, columns_k)
        dk_factors = _strips(ds, step, tiles.block_n), _heads(q, step, columns_k)
        dv_factors = _strips(p, step, tiles.block_n), _heads(d_out, step, columns_v)

        delta = _row_products(out.contiguous(), d_out, m)
        for launch in plan.launches:
            score_gradients_kernel[(plan.programs(q, launch, 1),)](
                queries, keys, values, d_queries, p, ds, m, inverse, delta, plan.documents, plan.low, window or 0,
                scale, *launch.part, launch.slots, V=V, **plan.score_constants, **tiles.scores,
            )  # fmt: skip
            programs = across_k * launch.slots + (across_k + across_v) * launch.kv_heads
            gradients_kernel[(programs, max(launch.part.tiles, launch.key_tiles))](
                *dq_factors, *dk_factors, *dv_factors, dq, dk, dk_sum, dv, dv_sum, plan.low, plan.last, *launch.part,
                launch.kv_heads, launch.key_tiles, int(launch.later), launch.finished, D=D, V=V, BLOCK_D=columns_k,
                BLOCK_V=columns_v, **plan.product_constants,
            )  # fmt: skip
    return dq, dk, dv


def _row_products(out: Tensor, d_out: Tensor, like: Tensor) -> Tensor:
    """Compute δ of all queries from o and do [B, T, H, V].

    The result [B, H, T] has the shape, dtype and device of ``like``.
    """
    B, T, H, V = out.shape
    delta, vectors = torch.empty_like(like), B * T * H
    row_products_kernel[(cdiv(vectors, 4),)](
        out, d_out, delta, vectors, T, *d_out.stride()[:3], H=H, D=V, BLOCK_D=dot_tile(V), ROWS=4
    )
    return delta


def _causal_attention_fake(q, k, v, documents, scale, window):
    m, inverse = (q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) for _ in range(2))
    return q.new_empty(*q.shape[:3], v.shape[3]), m, inverse


BACKWARD = define_op("causal_attention_backward", _causal_attention_backward, "q k v")
FORWARD = define_op(
    "causal_attention", _causal_attention, _causal_attention_fake,
    outputs="out m inverse", constants="m inverse", backward=BACKWARD, gradients="q k v",
)  # fmt: skip


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention, optionally only within documents or a sliding window.

    For the backward, only q, k, v, the result, and two numbers per query and head are saved.

    Args:
        q: [B, T, H, D], float32, float16 or bfloat16, where D is at most 576.
        k, v: [B, S, G, D] and [B, S, G, V] in the dtype of q, where S is at least T, V is at most 576, and H is a
            multiple of G. The queries belong to the last T of the S tokens.
        documents: [B, S] integers below S: the index of each token's document, or −1 for padding. A token sees only
            its own document. If None, all tokens of a row belong to one document.
        scale: factor by which q·k is multiplied; None for D^-0.5.
        window: number of tokens that a token sees, including itself; None for no limit.

    Returns:
        [B, T, H, V] in the dtype of q.

    Raises:
        ValueError: shapes do not match, heads are wider than 576, or the window is below 1.
        TypeError: the tensors are not floating-point or differ in dtype, or the documents are not integers.
    """
    op = "causal_attention"
    check_floating(op, q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3]
    fits = fits and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not (fits and q.shape[1] <= k.shape[1] and k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0):
        raise ValueError(
            f"{op}: q must be [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] with S >= T and H a multiple of G, got "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    D, S = q.shape[3], k.shape[1]
    check_heads(op, q.shape[2], max(D, v.shape[3]), window, None, "Wider ones need PyTorch's attention.")
    if documents is not None:
        if documents.dtype.is_floating_point or documents.dtype.is_complex:
            raise TypeError(f"{op}: documents must be integers, got {documents.dtype}.")
        if documents.shape != k.shape[:2]:
            raise ValueError(f"{op}: documents must be {[q.shape[0], S]}, got {list(documents.shape)}.")
    scale = 1 / math.sqrt(D) if scale is None else scale
    if not use_triton(q):
        return causal_attention_reference(q, k, v, documents, scale=scale, window=window)
    return FORWARD(q, k, v, documents, scale, window)[0]
