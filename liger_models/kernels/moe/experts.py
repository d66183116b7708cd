"""The experts of a mixture: gated MLPs as grouped products over the tokens sorted by expert.

With the N · K copies of the tokens sorted as in `permutation` (copy k of token n in row j = slot[n, k]), and
A = `gated_act`::

    r_j = x_n                             permute
    u_j = Wgu_e · r_j                     grouped product; gate and up interleaved
    o_j = Wd_e · A(u_j)                   grouped product
    y_n = Σ_k w_nk · o_slot[n,k]          unpermute

Backward. The routing weight is a factor between linear maps, so it is applied where rows are narrow and read anyway:
the gradient dy is copied unweighted, and one kernel over u and g does all other element-wise work::

    d_j = dy_n                            permute
    g_j = Wd_eᵀ · d_j                     grouped product; the gradient of A(u_j) without the weight
    dw_nk = g_j · A(u_j)                  equals dy_n · o_j, so the experts' outputs are neither saved nor recomputed
    du_j = w_nk · A'(u_j)(g_j),   p_j = w_nk · A(u_j)     p overwrites g
    dWd_e = Σ_j d_j ⊗ p_j,   dWgu_e = Σ_j du_j ⊗ r_j      grouped outer products
    dx_n = Σ_k Wgu_eᵀ · du_slot[n,k]      grouped product, then unpermute without weights

Saved: x (unless no backward needs it), the weights, order, slot, ends, and u. With ``recompute`` u is not saved: the
backward recomputes it bit for bit, and du overwrites it. The sorted copies of x and the gated product are never saved.
Gradients that nobody needs cost nothing; every gradient has the dtype of its input. The backward is one op, so a
compiler cannot see what it recomputes and save the forward's instead.

Source: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2211.15841; the gradient of the routing weights without
the experts' outputs: https://arxiv.org/abs/2512.14080.
"""

import torch
from torch import Tensor

from liger_models.kernels.checks import check, check_floating
from liger_models.kernels.dispatch import LIBRARY, on_device_of, tl, triton, use_triton
from liger_models.kernels.gated_act import _activation, _load_pairs, check_act, gated_act_forward, gated_act_reference
from liger_models.kernels.norm_linear import given_or_empty

from .grouped_mm import grouped_mm, grouped_outer, library_runs
from .permutation import MAX_COPIES, MAX_EXPERTS, permute, sort_by_expert, unpermute

ACT_BLOCK = 1024
"""Gate and up pairs per step of the activation's backward. A program walks a whole row: its dot product is one sum."""


def moe_mlp_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *, act: str = "silu"
) -> Tensor:
    """`moe_mlp` in plain torch (differentiable; fp64 stays fp64).

    The loop over the experts is an op of its own, so a compiler need not trace it: the host must wait for the experts'
    row counts.
    """
    N, K = experts.shape
    chosen = experts.reshape(-1)
    order = chosen.argsort(stable=True)
    every = torch.arange(gate_up_weight.shape[0], device=x.device)
    ends = torch.searchsorted(chosen[order], every, right=True)
    product = torch.ops.liger_models.grouped_product
    gate_up = product(x.to(gate_up_weight.dtype)[order // K], gate_up_weight.transpose(1, 2), ends)
    sorted_rows = product(gated_act_reference(gate_up, act), down_weight.transpose(1, 2), ends)
    rows: Tensor = sorted_rows[order.argsort()].view(N, K, x.shape[1])
    compute = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(compute) * weights.to(compute).unsqueeze(-1)).sum(1).to(rows.dtype)


@triton.jit
def _act_backward_kernel(
    g_ptr, gate_up_ptr, weights_ptr, order_ptr, d_gate_up_ptr, product_ptr, d_weights_ptr, F,
    ACT: tl.constexpr, READ_G: tl.constexpr, STORE_D_GATE_UP: tl.constexpr, STORE_PRODUCT: tl.constexpr,
    STORE_D_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * F
    copy = tl.load(order_ptr + tl.program_id(0))
    w = tl.load(weights_ptr + copy).to(tl.float32)
    dtype = gate_up_ptr.dtype.element_ty
    results = tl.arange(0, BLOCK)
    elements = tl.arange(0, 2 * BLOCK)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, F, BLOCK):
        left = F - start
        gate, up = _load_pairs(gate_up_ptr + 2 * (row + start), left, BLOCK)
        a, slope = _activation(gate, ACT)
        a = a.to(dtype).to(tl.float32)
        p = (a * up).to(dtype).to(tl.float32)  # the input of the forward's down projection
        if READ_G:
            g = tl.load(g_ptr + row + start + results, mask=results < left, other=0.0).to(tl.float32)
            dot += g * p
            if STORE_D_GATE_UP:
                gradient = tl.interleave((w * g * up * slope).to(dtype), (w * g * a).to(dtype))
                tl.store(d_gate_up_ptr + 2 * (row + start) + elements, gradient, mask=elements < 2 * left)
        if STORE_PRODUCT:
            tl.store(product_ptr + row + start + results, (w * p).to(dtype), mask=results < left)
    if STORE_D_WEIGHTS:
        tl.store(d_weights_ptr + copy, tl.sum(dot, 0).to(d_weights_ptr.dtype.element_ty))


def _act_backward(
    g: Tensor | None, gate_up: Tensor, weights: Tensor, order: Tensor, act: str, *,
    need_d_gate_up: bool, need_product: bool, need_d_weights: bool, overwrite_gate_up: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch the activation's backward: ``(d_gate_up, weighted product, d_weights)``. The product overwrites g."""
    S, F = gate_up.shape[0], gate_up.shape[1] // 2
    d_gate_up = (gate_up if overwrite_gate_up else torch.empty_like(gate_up)) if need_d_gate_up else None
    product = None
    if need_product:
        product = torch.empty(S, F, dtype=gate_up.dtype, device=gate_up.device) if g is None else g
    d_weights = torch.empty_like(weights) if need_d_weights else None
    # With fewer than 128 pairs, threads of a warp would hold duplicates.
    block = max(min(triton.next_power_of_2(F), ACT_BLOCK), 128)
    with on_device_of(gate_up):
        _act_backward_kernel[(S,)](
            gate_up if g is None else g, gate_up, weights, order, gate_up if d_gate_up is None else d_gate_up,
            gate_up if product is None else product, weights if d_weights is None else d_weights, F,
            ACT=act, READ_G=g is not None, STORE_D_GATE_UP=need_d_gate_up, STORE_PRODUCT=need_product,
            STORE_D_WEIGHTS=need_d_weights, BLOCK=block, num_warps=block // 128,
        )  # fmt: skip
    return d_gate_up, product, d_weights


LIBRARY.define(
    "moe_mlp(Tensor x, Tensor weights, Tensor experts, Tensor gate_up_weight, Tensor down_weight, str act,"
    " bool recompute) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "moe_mlp_backward(Tensor dy, Tensor? x, Tensor weights, Tensor order, Tensor slot, Tensor ends, Tensor? gate_up,"
    " Tensor gate_up_weight, Tensor down_weight, str act, ScalarType x_dtype, bool[4] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "moe_mlp", "CompositeExplicitAutograd")
def _moe_mlp(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_weight: Tensor, down_weight: Tensor, act: str, recompute: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gate_up_weight, down_weight = gate_up_weight.contiguous(), down_weight.contiguous()
    X, dtype = gate_up_weight.shape[0], gate_up_weight.dtype
    if weights.numel() == 0:
        empty = experts.new_zeros(0, dtype=torch.int32)
        gate_up = gate_up_weight.new_empty(0) if recompute else gate_up_weight.new_empty(0, gate_up_weight.shape[1])
        return x.new_empty(x.shape, dtype=dtype), empty, empty.clone(), empty.new_zeros(X), gate_up
    library = library_runs(gate_up_weight, down_weight)
    order, slot, ends = sort_by_expert(experts, X)
    rows = permute(x, slot, dtype)
    gate_up = grouped_mm(rows, gate_up_weight.transpose(1, 2), ends, library)
    del rows
    product = gated_act_forward(gate_up, act)
    if recompute:
        gate_up = gate_up.new_empty(0)
    rows = grouped_mm(product, down_weight.transpose(1, 2), ends, library)
    del product
    return unpermute(rows, slot, weights.contiguous(), x.shape[0], dtype), order, slot, ends, gate_up


@torch.library.impl(LIBRARY, "moe_mlp_backward", "CompositeExplicitAutograd")
def _moe_mlp_backward(
    dy: Tensor, x: Tensor | None, weights: Tensor, order: Tensor, slot: Tensor, ends: Tensor, gate_up: Tensor | None,
    gate_up_weight: Tensor, down_weight: Tensor, act: str, x_dtype: torch.dtype, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    need_x, need_weights, need_gate_up, need_down = needs
    need_d_gate_up = need_x or need_gate_up
    N, dtype = dy.shape[0], gate_up_weight.dtype
    likes = dy.new_empty(0, dtype=x_dtype), weights, gate_up_weight, down_weight
    if weights.numel() == 0:
        shapes = dy.shape, weights.shape, gate_up_weight.shape, down_weight.shape
        shaped = zip(likes, shapes, needs, strict=True)
        return tuple(like.new_zeros(shape if need else 0) for like, shape, need in shaped)
    gate_up_weight, down_weight = gate_up_weight.contiguous(), down_weight.contiguous()
    library = library_runs(gate_up_weight, down_weight)
    dx = d_gate_up_weight = d_down_weight = rows = g = None
    own = gate_up is None
    if gate_up is None:
        assert x is not None
        rows = permute(x, slot, dtype)
        gate_up = grouped_mm(rows, gate_up_weight.transpose(1, 2), ends, library)
        if not need_gate_up:
            rows = None
    d_rows = permute(dy, slot, dtype)
    if need_d_gate_up or need_weights:
        g = grouped_mm(d_rows, down_weight, ends, library)
    d_gate_up, product, d_weights = _act_backward(
        g, gate_up, weights.contiguous(), order, act, need_d_gate_up=need_d_gate_up, need_product=need_down,
        need_d_weights=need_weights, overwrite_gate_up=own,
    )  # fmt: skip
    del g, gate_up
    if product is not None:
        d_down_weight = grouped_outer(d_rows, product, ends, library)
    del d_rows, product
    if d_gate_up is not None and need_gate_up:
        if rows is None:
            assert x is not None
            rows = permute(x, slot, dtype)
        d_gate_up_weight = grouped_outer(d_gate_up, rows, ends, library)
        del rows
    if d_gate_up is not None and need_x:
        d_rows = grouped_mm(d_gate_up, gate_up_weight, ends, library)
        del d_gate_up
        dx = unpermute(d_rows, slot, None, N, x_dtype)
    return given_or_empty((dx, d_weights, d_gate_up_weight, d_down_weight), likes)


@torch.library.register_fake("liger_models::moe_mlp", lib=LIBRARY)
def _moe_mlp_fake(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_weight: Tensor, down_weight: Tensor, act: str, recompute: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    X, width, _ = gate_up_weight.shape
    copies = experts.numel()
    order = experts.new_empty(copies, dtype=torch.int32)
    gate_up = gate_up_weight.new_empty(0 if recompute else (copies, width))
    return gate_up_weight.new_empty(x.shape), order, torch.empty_like(order), order.new_empty(X), gate_up


@torch.library.register_fake("liger_models::moe_mlp_backward", lib=LIBRARY)
def _moe_mlp_backward_fake(
    dy: Tensor, x: Tensor | None, weights: Tensor, order: Tensor, slot: Tensor, ends: Tensor, gate_up: Tensor | None,
    gate_up_weight: Tensor, down_weight: Tensor, act: str, x_dtype: torch.dtype, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    likes = dy.to(x_dtype), weights, gate_up_weight, down_weight
    return tuple(like.new_empty(like.shape if need else 0) for like, need in zip(likes, needs, strict=True))


def _setup(ctx, inputs, output):
    x, weights, _, gate_up_weight, down_weight, ctx.act, recompute = inputs
    _, order, slot, ends, gate_up = output
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype
    ctx.mark_non_differentiable(order, slot, ends, gate_up)
    need_rows = recompute or ctx.needs_input_grad[3]
    ctx.save_for_backward(
        x if need_rows else None, weights, order, slot, ends, None if recompute else gate_up,
        gate_up_weight, down_weight,
    )  # fmt: skip


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 7
    need_x, need_weights, _, need_gate_up, need_down, *_ = ctx.needs_input_grad
    needs = [need_x, need_weights, need_gate_up, need_down]
    grads = torch.ops.liger_models.moe_mlp_backward(dy, *ctx.saved_tensors, ctx.act, ctx.x_dtype, needs)
    dx, d_weights, d_gate_up, d_down = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dx, d_weights, None, d_gate_up, d_down, None, None


torch.library.register_autograd("liger_models::moe_mlp", _backward, setup_context=_setup, lib=LIBRARY)


def moe_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    *,
    act: str = "silu",
    recompute: bool = False,
) -> Tensor:
    """``y[n] = Σ_k weights[n, k] · (gated_act(x[n] @ Wguᵀ) @ Wdᵀ)`` with the matrices of expert ``experts[n, k]``.

    Args:
        x: [N, C], float32, float16 or bfloat16.
        weights: [N, K], from `route`.
        experts: [N, K] int64, in 0 to X − 1.
        gate_up_weight: [X, 2 F, C]; in each expert row 2f is gate f and row 2f + 1 is up f.
        down_weight: [X, C, F], in the dtype of gate_up_weight. That is also the dtype of y; it may differ from x's, and
            autocast does not change it.
        act: "silu", "gelu_tanh" or "gelu".
        recompute: do not save gate and up; the backward recomputes them at the cost of one more grouped product. The
            gradients are the same. The reference backend ignores it.

    Returns:
        [N, C] in the dtype of the weights.

    Raises:
        ValueError: the shapes do not match, or the activation is unknown.
        TypeError: a tensor is not floating-point, experts are not int64, or the two weights differ in dtype.
    """
    check_act("moe_mlp", act)
    check_floating("moe_mlp", x=x, weights=weights, gate_up_weight=gate_up_weight, down_weight=down_weight)
    if experts.dtype != torch.int64:
        raise TypeError(f"moe_mlp: experts must be int64, got {experts.dtype}.")
    check(x.dim() == 2, f"moe_mlp: x must be [N, C], got {list(x.shape)}.")
    check(
        weights.dim() == 2
        and weights.shape == experts.shape
        and weights.shape[:1] == x.shape[:1]
        and weights.shape[1] > 0,
        f"moe_mlp: weights and experts must be [{x.shape[0]}, K], got {list(weights.shape)} and {list(experts.shape)}.",
    )
    check(
        gate_up_weight.dim() == 3 and gate_up_weight.shape[2] == x.shape[1] and gate_up_weight.shape[1] % 2 == 0,
        f"moe_mlp: gate_up_weight must be [X, 2 F, {x.shape[1]}], got {list(gate_up_weight.shape)}.",
    )
    X, width, C = gate_up_weight.shape
    check(
        tuple(down_weight.shape) == (X, C, width // 2),
        f"moe_mlp: down_weight must be {[X, C, width // 2]}, got {list(down_weight.shape)}.",
    )
    check(
        X <= MAX_EXPERTS and experts.numel() <= MAX_COPIES,
        f"moe_mlp: at most {MAX_EXPERTS} experts and {MAX_COPIES} copies of tokens, got {X} and {experts.numel()}.",
    )
    if gate_up_weight.dtype != down_weight.dtype:
        raise TypeError(
            "moe_mlp: gate_up_weight and down_weight must have one dtype, "
            f"got {gate_up_weight.dtype} and {down_weight.dtype}."
        )
    if not (use_triton(x) and use_triton(gate_up_weight)):
        return moe_mlp_reference(x, weights, experts, gate_up_weight, down_weight, act=act)
    # Without gradients nothing is saved: gate and up are freed before the last product.
    recompute = recompute or not torch.is_grad_enabled()
    y: Tensor = torch.ops.liger_models.moe_mlp(x, weights, experts, gate_up_weight, down_weight, act, recompute)[0]
    return y
