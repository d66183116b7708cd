"""The gated MLP in one op: residual addition, norm, gate and up projection, gated activation, and down projection.

Let N be `rms_norm` or `layer_norm`, followed by a cast to the dtype of the weights, and let A be `gated_act`. Without a
norm weight, N only casts. The forward is::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    u = N(h) @ Wguᵀ + bgu                 gate and up interleaved
    y = A(u) @ Wdᵀ + bd

Each projection may have its own low-rank term (LoRA), as in `norm_linear`. The two matrices of a low-rank term get
gradients. If there are many rows and R is at most `low_rank_gated_act.MOST_RANKS`, no product adds the low-rank terms
of u and of dp, which is defined below. The kernels of the activation add these terms to the tiles that they load. u is
then the product without its term, and a pass over u and a pass over dp are saved.

In the backward, let dh be the gradient of the new residual stream. The steps run in this order::

    dp = dy @ Wd                          one kernel then computes du = A'(dp), and overwrites dp with p = A(u)
    dWd = dyᵀ @ p,   dbd = Σ_rows dy      p is then freed
    dn = du @ Wgu                         one kernel then computes dx = N'(dn) + dh, the norm's gradients, and N(h)
    dWgu = duᵀ @ N(h),   dbgu = Σ_rows du

The forward saves h, the weights, u, and the fp32 statistics of the norm for each row. If the activation's kernels add
the low-rank terms, the forward also saves N(h) @ Aᵀ and A(u) @ Aᵀ. With ``recompute``, u and these two products are not
saved. The backward then recomputes u from h, bitwise identical to the u of the forward, and overwrites u with du. With
``gate_up_8bit``, the forward saves u in 8 bits, and the backward computes A'(dp) and A(u) from the rounded u (see
`low_rank_gated_act`). The normalized rows N(h) and the gated product p are never saved. Frozen weights may be
quantized, and are then used as in `norm_linear`. Gradients that are not needed are not computed. Every other gradient
has the dtype of its input. The backward is a single op, so that compilers do not see that tensors are recomputed. A
compiler that saw the recomputation would save the tensors in the forward instead.

If u is not saved and there are many rows, the forward and the backward process the rows in chunks, so that u, p, dn and
N(h) exist only for one chunk at a time. The gradients of the weights are then summed over the chunks in fp32, and
rounded once. If u is saved and the weights are frozen but not quantized, only the backward processes the rows in
chunks, so that du, p, dn and N(h) exist only for one chunk at a time. With sequence parallelism, rows are processed in
chunks only if u is not saved.

With ``ranks``, the gates and ups are divided among the ranks, and each rank has the columns of Wd that belong to its
gates and ups. The y of a rank is then only a partial result: the complete y is the sum over the ranks. In the backward,
dn is summed over the ranks before N' is applied. With ``ranks.sequence_parallel``, each rank also has its own tokens.
N(h) is then gathered before the products with Wgu and du, and dn is reduce-scattered. y covers all tokens, but h covers
only the rank's own tokens.

`_forward_rows` and `_backward_rows` compute the formulas above. For each chunk, `_forward_chunks` calls
`_forward_rows`, and `_backward_chunks` calls `_backward_rows`.

Source: https://arxiv.org/abs/2002.05202; recomputation as in https://arxiv.org/abs/2205.05198.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.ops import Op
from liger_models.distributed.collectives import (
    Group,
    copy_to_region,
    gather_rows,
    gathered_shape,
    rows_by_rank,
    rows_in_order,
)
from liger_models.kernels.activation.gated_act import check_act, gated_act_reference
from liger_models.kernels.activation.low_rank_gated_act import (
    Codes,
    empty_codes,
    low_rank_gated_act,
    low_rank_gated_act_backward,
    takes_term,
)
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.float8.frozen_product import product_of
from liger_models.kernels.frozen.products import Weight
from liger_models.kernels.linear.norm_linear import (
    NormLinearGradients,
    NormLinearNeeds,
    NormLinearSaved,
    norm_linear_backward,
)
from liger_models.kernels.linear.projection import (
    RANKS,
    NormGradients,
    Product,
    Projection,
    ProjectionGradients,
    ProjectionNeeds,
    check_linear,
    check_low_rank,
    keeps_low,
    linear,
    low_fake,
    mark_constants,
    norm_gradients_fake,
    of_stream,
    projection_gradients_fake,
)
from liger_models.kernels.matmul.row_linear import LowRank
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.tiles import cdiv

WORKSPACE_MIB = 1024
"""Maximum size of u for one chunk, in MiB, unless a chunk would then have fewer than `MIN_CHUNK` rows. For Llama-3-8B
in bf16, a chunk has up to 18,724 rows. For this model, the weight gradients of an MLP, which are summed over the chunks
in fp32, take another 0.7 GiB, so a smaller limit would save little memory."""

MIN_CHUNK = 16384
"""Lower bound of the maximum number of rows per chunk, regardless of `WORKSPACE_MIB`. Each chunk reads and writes the
fp32 sums of the weight gradients once. On an H200, these reads and writes should take 1.5% of the time of a chunk's
backward for a chunk of this size, and 3% for half as many rows (calculated, not measured). The two percentages do not
depend on C and F."""

FROZEN_ROWS = 12288
"""Maximum number of rows per chunk of a backward in which u is saved and the weights need no gradients, as with LoRA.
Such a backward sums no gradients of weights, and matrix products with more rows are not faster. If the weights are
quantized, all rows are processed at once, because each chunk would dequantize the weights again."""


def _even_rows(N: int, limit: int) -> int:
    """Divide N rows into the fewest chunks of at most ``limit`` rows, with about equal numbers of rows.

    Return the number of rows per chunk.
    """
    chunks = max(cdiv(N, limit), 1)
    return max(cdiv(N, chunks), 1)


def _chunk_rows(N: int, row_bytes: int) -> int:
    """Return the number of rows per chunk if u (gate and up) is not saved. ``row_bytes`` is the size of a row of u."""
    return _even_rows(N, max(WORKSPACE_MIB * 2**20 // max(row_bytes, 1), MIN_CHUNK))


def gated_mlp_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None,
    gate_up_weight: Weight,
    down_weight: Weight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: str = "silu",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    norm: str = "rms_norm",
    norm_bias: Tensor | None = None,
    ranks: Group | None = None,
    gate_up_low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_mlp` in plain PyTorch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    normed = FusedNorm(norm_weight, norm_bias, norm, eps, weight_offset, scale_in_fp32).reference(residual)
    gate_up = linear(copy_to_region(normed, ranks), gate_up_weight, gate_up_bias, gate_up_low_rank)
    return linear(gated_act_reference(gate_up, act), down_weight, down_bias, down_low_rank), residual


class GatedMLPInputs(NamedTuple):
    """Inputs of the op `gated_mlp`, which correspond to the arguments of the function `gated_mlp`."""

    x: Tensor | None
    residual: Tensor
    norm: FusedNorm
    gate_up: Projection
    down: Projection
    act: str
    recompute: bool
    need_y: bool
    ranks: Annotated[Group | None, RANKS] = None
    keeps_low: bool = False
    gate_up_8bit: bool = False


class GatedMLPOutputs(NamedTuple):
    """Outputs of the op `gated_mlp`, or the gradients of these outputs.

    Attributes:
        y: [..., O].
        h: [..., C], the residual stream. Without x, h is None, because an op must not return one of its inputs.
        statistics: statistics of each row, from which the norm can be recomputed.
        u: [..., 2 F], interleaved gates and ups; None with ``recompute``. With ``keeps_low``, u does not contain the
            low-rank term. With ``gate_up_8bit``, u holds int8 codes of the sum.
        gate_up_low, down_low: N(h) @ Aᵀ and A(u) @ Aᵀ [N, R] of the two low-rank terms; None without ``keeps_low``, and
            with ``recompute``.
        u_scales: [N, G, 2], the scales of the codes, as in `Codes`; None if u holds no codes.
    """

    y: Tensor
    h: Tensor | None
    statistics: Tensor
    u: Tensor | None
    gate_up_low: Tensor | None = None
    down_low: Tensor | None = None
    u_scales: Tensor | None = None


class GatedMLPSaved(NamedTuple):
    """Tensors and constants that the forward saves for the backward.

    The bias of the gate and up projection is saved only if u is recomputed. The bias of the down projection is never
    saved.
    """

    h: Tensor
    statistics: Tensor
    u: Tensor | None
    norm: FusedNorm
    gate_up: Projection
    down: Projection
    act: str
    ranks: Annotated[Group | None, RANKS] = None
    keeps_low: bool = False
    gate_up_low: Tensor | None = None
    down_low: Tensor | None = None
    u_scales: Tensor | None = None


class GatedMLPGradients(NamedTuple):
    """The gradients of the op's inputs. In `GatedMLPNeeds`, the fields are bools that say which gradients are needed.

    The backward op returns the gradient of the residual stream in the field ``residual``, and None in the field ``x``.
    """

    x: Any = None
    residual: Any = None
    norm: NormGradients = NormGradients()
    gate_up: ProjectionGradients = ProjectionGradients()
    down: ProjectionGradients = ProjectionGradients()


GatedMLPNeeds = Annotated[GatedMLPGradients, bool]


class GatedMLPUpstream(NamedTuple):
    """Inputs of the op `gated_mlp_backward`."""

    dy: Tensor
    dh: Tensor | None
    saved: GatedMLPSaved
    needs: GatedMLPNeeds


class Products(NamedTuple):
    """The `Product` of the gate and up projection, and the `Product` of the down projection."""

    gate_up: Product
    down: Product


def split_rows(
    N: int, gate_up_weight: Weight, ranks: Group | None, recompute: bool, *, frozen: bool = False
) -> tuple[int, int]:
    """Return the number of this rank's own rows in a chunk, and the number of ranks whose rows are in u.

    With sequence parallelism, u has rows of all ranks. Otherwise, the second number is 1. ``frozen`` says whether this
    is a backward in which the weights need no gradients.
    """
    num_ranks = ranks.size if ranks is not None and ranks.sequence_parallel else 1
    if recompute:
        row_bytes = gate_up_weight.shape[0] * gate_up_weight.itemsize
        return cdiv(_chunk_rows(N * num_ranks, row_bytes), num_ranks), num_ranks
    # Quantized weights would be dequantized again for each chunk.
    if frozen and num_ranks == 1 and isinstance(gate_up_weight, Tensor):
        return _even_rows(N, FROZEN_ROWS), num_ranks
    return N, num_ranks


def gated_mlp_forward(inputs: GatedMLPInputs, products: Products) -> GatedMLPOutputs:
    """Compute the forward of `gated_mlp`. ``products`` may hold objects of any subclass of `Product`."""
    x, residual, norm, ranks = inputs.x, inputs.residual, inputs.norm, inputs.ranks
    shape, C = residual.shape[:-1], residual.shape[-1]

    # View the tokens as rows [N, C], and process all rows at once or in chunks.
    inputs = inputs._replace(x=None if x is None else x.reshape(-1, C), residual=residual.reshape(-1, C))
    rows, num_ranks = split_rows(shape.numel(), products.gate_up.weight, ranks, inputs.recompute)
    if rows >= shape.numel():
        outputs = _forward_rows(inputs, products)
    else:
        outputs = _forward_chunks(inputs, products, rows, num_ranks)
    h, u = outputs.h, outputs.u
    return outputs._replace(
        y=rows_in_order(outputs.y, shape, ranks),
        h=None if h is None else h.view(*shape, C),
        statistics=outputs.statistics.view(norm.statistics_shape(shape)),
        u=None if u is None else u.view(*gathered_shape(shape, ranks), u.shape[-1]),  # the first rank's tokens first
    )


def _forward_chunks(inputs: GatedMLPInputs, products: Products, rows: int, num_ranks: int) -> GatedMLPOutputs:
    """Compute the outputs for rows [N, C] in chunks of ``rows`` rows. u is not saved."""
    x, residual, weight = inputs.x, inputs.residual, products.down.weight
    N = len(residual)
    y = weight.new_empty(num_ranks, N, weight.shape[0])  # [R, N, O], R > 1 with sequence parallelism
    h = None if x is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    statistics = residual.new_empty(inputs.norm.statistics_shape((N,)), dtype=torch.float32)
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        part = inputs._replace(x=None if x is None else x[chunk], residual=residual[chunk])
        outputs = _forward_rows(part, products)
        statistics[chunk] = outputs.statistics
        if h is not None and outputs.h is not None:
            h[chunk] = outputs.h
        if inputs.need_y:
            y[:, chunk] = outputs.y.unflatten(0, (num_ranks, -1))
        del outputs
    return GatedMLPOutputs(y.flatten(0, 1), h, statistics, None)


def _forward_rows(inputs: GatedMLPInputs, products: Products) -> GatedMLPOutputs:
    """Compute the outputs for rows [N, C], which are either all rows or the rows of one chunk."""
    (gate_up, down), ranks = products, inputs.ranks
    normed, stream, statistics = gate_up.normed(inputs.norm, inputs.x, inputs.residual)
    h = None if inputs.x is None else stream
    if inputs.recompute and not inputs.need_y:
        y = down.weight.new_empty(*gathered_shape(inputs.residual.shape[:-1], ranks), down.weight.shape[0])
        return GatedMLPOutputs(y, h, statistics, None)

    normed = gather_rows(normed, ranks)
    keeps = inputs.keeps_low and gate_up.low_rank is not None
    gate_up_low = gate_up.low(normed.to(gate_up.dtype)) if keeps else None  # [N, R]
    codes = None
    if gate_up_low is None and not inputs.gate_up_8bit:
        u, product = gate_up.gated_forward(normed, inputs.act)  # [N, 2 F], [N, F]
        del normed
        product = down.gated(u, inputs.act) if product is None else product
    else:
        u = (gate_up if gate_up_low is None else gate_up.without_low_rank()).forward(normed)
        del normed
        codes = empty_codes(u) if inputs.gate_up_8bit else None
        term = None if gate_up_low is None else gate_up.term(gate_up_low)
        product = low_rank_gated_act(u, inputs.act, term, codes)
    kept = None if inputs.recompute else u
    u_scales = None
    if codes is not None:
        kept, u_scales = codes
    del u  # frees u before the last product, unless u is saved
    down_low = down.low(product) if inputs.keeps_low else None  # [N, R]
    y = down.forward(product, down_low)
    if inputs.recompute:
        gate_up_low = down_low = None
    return GatedMLPOutputs(y, h, statistics, kept, gate_up_low, down_low, u_scales)


def gated_mlp_backward(upstream: GatedMLPUpstream, products: Products) -> GatedMLPGradients:
    """Compute the backward of `gated_mlp`. ``products`` may hold objects of any subclass of `Product`."""
    dy, dh, saved, needs = upstream
    shape, C, u, ranks = saved.h.shape, saved.h.shape[-1], saved.u, saved.ranks
    N = shape[:-1].numel()

    # View the tokens as rows: dy [N, O] and u [N, 2 F] for all ranks' tokens, dh and h [N, C] for the rank's own
    # tokens. Process all rows at once or in chunks.
    upstream = GatedMLPUpstream(
        dy=rows_by_rank(dy, ranks),
        dh=None if dh is None else dh.reshape(-1, C),
        saved=saved._replace(
            h=saved.h.reshape(-1, C),
            statistics=saved.statistics.reshape(saved.norm.statistics_shape((N,))),
            u=None if u is None else u.reshape(-1, u.shape[-1]),
        ),
        needs=needs,
    )
    frozen = not (needs.gate_up.weight or needs.down.weight)
    rows, num_ranks = split_rows(N, saved.gate_up.weight, ranks, u is None, frozen=frozen)
    if rows >= N:
        gradients = _backward_rows(upstream, products)
    else:
        gradients = _backward_chunks(upstream, products, rows, num_ranks)
    dx = gradients.residual
    return gradients._replace(residual=None if dx is None else dx.view(shape))


def _backward_chunks(upstream: GatedMLPUpstream, products: Products, rows: int, num_ranks: int) -> GatedMLPGradients:
    """Compute the gradients in chunks of ``rows`` rows. The parameters' gradients are summed over the chunks."""
    dy, dh, saved, needs = upstream
    dy = dy.unflatten(0, (num_ranks, -1))  # [R, N, O]
    dx = torch.empty_like(saved.h, memory_format=torch.contiguous_format) if needs.x or needs.residual else None
    totals = GatedMLPGradients()
    for start in range(0, len(saved.h), rows):
        chunk = slice(start, start + rows)
        part = GatedMLPUpstream(
            dy=dy[:, chunk].reshape(-1, dy.shape[-1]),
            dh=None if dh is None else dh[chunk],
            # If u is saved, there is only one rank, so u and the low-rank products have the same rows as h.
            saved=saved._replace(
                h=saved.h[chunk],
                statistics=saved.statistics[chunk],
                u=None if saved.u is None else saved.u[chunk],
                gate_up_low=None if saved.gate_up_low is None else saved.gate_up_low[chunk],
                down_low=None if saved.down_low is None else saved.down_low[chunk],
                u_scales=None if saved.u_scales is None else saved.u_scales[chunk],
            ),
            needs=needs,
        )
        totals = _backward_rows(part, products, totals)
        if dx is not None and totals.residual is not None:
            dx[chunk] = totals.residual
        totals = totals._replace(residual=None)  # frees the chunk's dx
    return _rounded(totals, saved.norm, products.gate_up.dtype)._replace(residual=dx)


def _backward_rows(
    inputs: GatedMLPUpstream, products: Products, totals: GatedMLPGradients | None = None
) -> GatedMLPGradients:
    """Compute the gradients for all rows or for a chunk of rows.

    For a chunk, ``totals`` holds the sums of the parameters' gradients over the previous chunks. The inputs are dy [N,
    O], dh and h [N, C], and u [N, 2 F]. With sequence parallelism, dy and u hold the rows of all ranks.
    """
    dy, dh, saved, needs = inputs
    h, statistics, u, norm, _, _, act, ranks, keeps, gate_up_low, down_low, u_scales = saved
    gate_up, down = products
    need_dn = needs.x or needs.residual or needs.norm.weight or needs.norm.bias
    need_du = need_dn or needs.gate_up.by_rows or needs.gate_up.bias
    d_norm, d_gate_up = NormGradients(), ProjectionGradients()
    dx = du = g = product = None

    # Recompute u, bitwise identical to the u of the forward.
    recomputed = u is None
    if recomputed and (need_du or needs.down.by_rows):
        normed = gather_rows(gate_up.normed_again(norm, h, statistics, for_weight=False), ranks)
        gate_up_low = gate_up.low(normed.to(gate_up.dtype)) if keeps and gate_up.low_rank is not None else None
        u = (gate_up if gate_up_low is None else gate_up.without_low_rank()).forward(normed)
        del normed

    # Continue the backward through the down projection and the activation, whose kernel also writes the gated product.
    # If u was recomputed, du overwrites u.
    dy_operand = down.upstream(dy, for_rows=need_du, for_weight=needs.down.weight)
    if u is not None and (keeps or u_scales is not None):
        du, product, g = _backward_of_terms(
            dy_operand, u if u_scales is None else Codes(u, u_scales), gate_up_low, act, products, need_du, needs.down,
            recomputed,
        )  # fmt: skip
    elif u is not None and need_du:
        d_product, g = down.rows_gradient(dy_operand)  # [N, F]
        du, product = gate_up.gated_backward(
            d_product, u, act, down, for_rows=need_dn, needs=needs.gate_up, need_product=needs.down.by_rows,
            overwrite_gate_up=recomputed,
        )  # fmt: skip
        del d_product
    elif u is not None and needs.down.by_rows:
        product = down.gated_again(u, act)
    del u

    # Compute the gradients of the down projection's parameters.
    d_down = down.gradients(dy_operand, g, product, needs.down, None if totals is None else totals.down, down_low)
    del dy_operand, product, g

    # Continue the backward through the gate and up projection and the norm, and compute the gradients of their
    # parameters.
    if du is not None:
        _, dx, d_norm, d_gate_up = norm_linear_backward(
            du,
            dh,
            NormLinearSaved(h, statistics, norm, saved.gate_up, ranks, gate_up_low),
            gate_up,
            NormLinearNeeds(needs.x, needs.residual, needs.norm, needs.gate_up),
            None if totals is None else NormLinearGradients(norm=totals.norm, projection=totals.gate_up),
        )
    return GatedMLPGradients(None, dx, d_norm, d_gate_up, d_down)


def _backward_of_terms(
    dy: Tensor, u: Tensor | Codes, gate_up_low: Tensor | None, act: str, products: Products, need_du: bool,
    needs: ProjectionNeeds, overwrite_u: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the backward of the down projection and of the activation if the activation's kernel reads codes or adds
    the low-rank terms to u and to the gradient of its output.

    Args:
        dy: [N, O].
        u: [N, 2 F], without the low-rank term, or the codes of the sum.
        gate_up_low: N(h) @ Aᵀ [N, R]; None if the gate and up projection has no low-rank term.
        act: name of the activation.
        products: the products of the two projections.
        need_du: whether du is needed.
        needs: which gradients of the down projection are needed.
        overwrite_u: whether du may overwrite u.

    Returns:
        du [N, 2 F], the gated product [N, F], and ``dy @ B`` [N, R] of the down projection. A result is None if it is
        not needed or does not exist.
    """
    gate_up, down = products
    if not need_du and not needs.by_rows:
        return None, None, None
    # Codes hold the sum of u and the low-rank term.
    term = None if gate_up_low is None or isinstance(u, Codes) else gate_up.term(gate_up_low)
    if not need_du:
        if isinstance(u, Codes):  # only the kernel of the backward reads codes, and dy does not affect the product
            N, width = u.codes.shape
            _, product = low_rank_gated_act_backward(dy.new_empty(N, width // 2), u, act, True, None, None)
            return None, product, None
        return None, down.gated_again(u, act) if term is None else low_rank_gated_act(u, act, term), None

    d_term = None
    g: Tensor | None
    if down.low_rank is not None and takes_term(down.low_rank):
        A, B = down.low_rank
        d_product, _ = down.without_low_rank().rows_gradient(dy)  # [N, F]
        g = dy @ B  # [N, R]
        d_term = g, A
    else:
        d_product, g = down.rows_gradient(dy)
    du, product = low_rank_gated_act_backward(d_product, u, act, needs.by_rows, term, d_term, overwrite_u=overwrite_u)
    return du, product, g


def _rounded(gradients: GatedMLPGradients, norm: FusedNorm, dtype: torch.dtype) -> GatedMLPGradients:
    """Round the parameters' gradients to the dtypes of the parameters. The gradients are fp32 sums over the chunks."""
    d_norm = gradients.norm
    if norm.weight is not None:
        d_norm = NormGradients(*(None if total is None else total.to(norm.weight.dtype) for total in d_norm))
    return gradients._replace(norm=d_norm, gate_up=gradients.gate_up.to(dtype), down=gradients.down.to(dtype))


def gated_mlp_fake(inputs: GatedMLPInputs) -> GatedMLPOutputs:
    """Return the outputs of the forward for fake tensors."""
    tokens = inputs.residual.shape[:-1]
    gate_up, down = inputs.gate_up.weight, inputs.down.weight
    rows = gathered_shape(tokens, inputs.ranks)
    y = down.new_empty(*rows, down.shape[0])
    keeps = inputs.keeps_low and not inputs.recompute
    u = None if inputs.recompute else gate_up.new_empty(*rows, gate_up.shape[0])
    u_scales = None
    if u is not None and inputs.gate_up_8bit:
        codes, u_scales = empty_codes(u.view(y.numel() // y.shape[-1], u.shape[-1]))
        u = codes.view(u.shape)
    return GatedMLPOutputs(
        y=y,
        h=None if inputs.x is None else inputs.residual.new_empty(inputs.residual.shape),
        statistics=inputs.residual.new_empty(inputs.norm.statistics_shape(tokens), dtype=torch.float32),
        u=u,
        gate_up_low=low_fake(y, inputs.gate_up) if keeps else None,
        down_low=low_fake(y, inputs.down) if keeps else None,
        u_scales=u_scales,
    )


def gated_mlp_backward_fake(inputs: GatedMLPUpstream) -> GatedMLPGradients:
    """Return the gradients of the backward for fake tensors."""
    saved, needs = inputs.saved, inputs.needs
    return GatedMLPGradients(
        residual=saved.h.new_empty(saved.h.shape) if needs.x or needs.residual else None,
        norm=norm_gradients_fake(saved.norm, needs.norm),
        gate_up=projection_gradients_fake(saved.gate_up, needs.gate_up),
        down=projection_gradients_fake(saved.down, needs.down),
    )


def gated_mlp_save(
    ctx: Any, inputs: GatedMLPInputs, outputs: GatedMLPOutputs, needs: GatedMLPNeeds, *constants: Tensor
) -> GatedMLPSaved:
    """Return the tensors and constants that autograd saves for the backward.

    ``constants`` are further outputs of the op. They have no gradients, and are marked as not differentiable.
    """
    h, statistics, *kept = outputs[1:]
    mark_constants(ctx, h, needs.x or needs.residual, statistics, *kept, *constants)
    return GatedMLPSaved(
        h=inputs.residual if h is None else h,
        statistics=outputs.statistics,
        u=outputs.u,
        norm=inputs.norm,
        gate_up=inputs.gate_up if outputs.u is None else inputs.gate_up.without_bias(),
        down=inputs.down.without_bias(),
        act=inputs.act,
        ranks=inputs.ranks,
        keeps_low=inputs.keeps_low,
        gate_up_low=outputs.gate_up_low,
        down_low=outputs.down_low if needs.down.low_rank_B else None,
        u_scales=outputs.u_scales,
    )


def _forward(inputs: GatedMLPInputs) -> GatedMLPOutputs:
    products = Products(product_of(inputs.gate_up, inputs.ranks), product_of(inputs.down, inputs.ranks))
    return gated_mlp_forward(inputs, products)


def _backward(inputs: GatedMLPUpstream) -> GatedMLPGradients:
    saved = inputs.saved
    products = Products(product_of(saved.gate_up, saved.ranks), product_of(saved.down, saved.ranks))
    return gated_mlp_backward(inputs, products)


def _gradients(saved: GatedMLPSaved, needs: GatedMLPNeeds, upstream: Any) -> GatedMLPGradients:
    if upstream.y is None:  # only the residual stream has a gradient
        return of_stream(GatedMLPGradients(), upstream.h, needs)
    gradients = BACKWARD(GatedMLPUpstream(upstream.y, upstream.h, saved, needs))
    return of_stream(gradients, gradients.residual, needs)


FORWARD = Op("gated_mlp", _forward, gated_mlp_fake)
BACKWARD = Op("gated_mlp_backward", _backward, gated_mlp_backward_fake)
FORWARD.differentiable(gated_mlp_save, _gradients)


def gated_mlp(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None,
    gate_up_weight: Weight,
    down_weight: Weight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: str = "silu",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    norm: str = "rms_norm",
    norm_bias: Tensor | None = None,
    recompute: bool = False,
    need_y: bool = True,
    gate_up_8bit: bool = False,
    ranks: Group | None = None,
    gate_up_low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``residual = residual + x``, then ``y = gated_act(norm(residual) @ Wguᵀ + bgu) @ Wdᵀ + bd``.

    Args:
        x: [..., C], the output of the previous sublayer, which is added to the residual stream; None to add nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm_weight: [C], or None for no norm.
        gate_up_weight: [2 F, C], a tensor or a `FrozenWeight`. Row 2f is gate f, and row 2f + 1 is up f.
        down_weight: [O, F] in the dtype of gate_up_weight. y has this dtype, which may differ from the dtype of the
            residual stream. Autocast does not change the dtype of y.
        gate_up_bias: [2 F].
        down_bias: [O].
        act: "silu", "gelu_tanh" or "gelu".
        eps, weight_offset, scale_in_fp32: as in `rms_norm`. A LayerNorm uses only ``eps``.
        norm: "rms_norm" or "layer_norm".
        norm_bias: [C], the bias of a LayerNorm; None for no bias.
        recompute: whether to recompute gate and up in the backward instead of saving them, at the cost of one more
            matrix product. The gradients do not change. The reference backend ignores this option.
        need_y: whether the caller uses the values of y. If not, and with ``recompute``, y is left uninitialized. The
            gradients do not change. The reference backend ignores this option.
        gate_up_8bit: whether to save gate and up in 8 bits for the backward, rounded as in `low_rank_gated_act`. The
            results do not change, but the gradients do, because the backward computes the activation and its
            derivative from the rounded gate and up. Ignored with ``recompute`` and by the reference backend.
        ranks: tensor-parallel ranks, each of which has its own pairs of gate and up; None for one rank. With ranks, y
            is the rank's part of a sum over the ranks, so down_bias must be None, and the caller adds the bias to the
            sum. With ``ranks.sequence_parallel``, x and residual hold the rank's own tokens, y covers all tokens, and
            the gradients of the norm's weights are sums over the rank's own tokens.
        gate_up_low_rank: ``(A [R, C], B [2 F, R])`` in the dtype of the weights. ``(norm(residual) @ Aᵀ) @ Bᵀ`` is
            added to gate and up.
        down_low_rank: ``(A [R, F], B [O, R])``, the low-rank term of the down projection. With ranks, B of
            gate_up_low_rank has the rank's own rows, and A of down_low_rank has the rank's own columns. The other two
            matrices are the same on all ranks, and each of their gradients is the rank's part of a sum over the ranks.

    Returns:
        ``(y, residual)``, where y is [..., O] in the dtype of the weights, and the new residual stream is [..., C] in
        the dtype of ``residual``. Without x, the second result is the ``residual`` that was passed.

    Raises:
        ValueError: the shapes do not fit together, or the activation or norm is unknown.
        TypeError: a tensor is not floating-point, or the weights and low-rank terms differ in dtype.
    """
    check_act("gated_mlp", act)
    fused_norm = FusedNorm(norm_weight, norm_bias, norm, eps, weight_offset, scale_in_fp32)
    fused_norm.check("gated_mlp", x, residual)
    check_linear("gated_mlp", "gate_up_weight", gate_up_weight, gate_up_bias, residual.shape[-1])
    if gate_up_weight.shape[0] % 2:
        raise ValueError(f"gated_mlp: gate_up_weight holds pairs of rows, got {list(gate_up_weight.shape)}.")
    check_linear("gated_mlp", "down_weight", down_weight, down_bias, gate_up_weight.shape[0] // 2)
    if gate_up_weight.dtype != down_weight.dtype:
        raise TypeError(
            "gated_mlp: gate_up_weight and down_weight must have one dtype, "
            f"got {gate_up_weight.dtype} and {down_weight.dtype}."
        )
    check_low_rank("gated_mlp", "gate_up_low_rank", gate_up_low_rank, gate_up_weight)
    check_low_rank("gated_mlp", "down_low_rank", down_low_rank, down_weight)
    if ranks is not None and down_bias is not None:
        raise ValueError("gated_mlp: down_bias must be None with ranks. Add it to their sum.")
    if not use_triton(residual):
        return gated_mlp_reference(
            x, residual, norm_weight, gate_up_weight, down_weight, gate_up_bias, down_bias, act=act, eps=eps,
            weight_offset=weight_offset, scale_in_fp32=scale_in_fp32, norm=norm, norm_bias=norm_bias, ranks=ranks,
            gate_up_low_rank=gate_up_low_rank, down_low_rank=down_low_rank,
        )  # fmt: skip
    # If gradients are disabled, u is not saved, so that it can be freed before the last product.
    recompute = recompute or not torch.is_grad_enabled()
    low_ranks = gate_up_low_rank, down_low_rank
    outputs = FORWARD(
        GatedMLPInputs(
            x=x,
            residual=residual,
            norm=fused_norm,
            gate_up=Projection(gate_up_weight, gate_up_bias, gate_up_low_rank),
            down=Projection(down_weight, down_bias, down_low_rank),
            act=act,
            recompute=recompute,
            need_y=need_y,
            ranks=ranks,
            keeps_low=keeps_low(residual, *low_ranks) and all(map(takes_term, low_ranks)),
            gate_up_8bit=gate_up_8bit and not recompute,
        )
    )
    return outputs.y, residual if outputs.h is None else outputs.h
