"""State-space scan of Mamba-2: linear attention in which each head has one decay per token for its whole state.

S [N, P] is the state of a head, x [P] is its input, and B and C [N] are shared by the heads of a group. δ is the step
size, and g = A · δ is the logarithm of the decay. The forward computes, for each head and token, in fp32::

    S ← exp(g) · S + B (δ · x)ᵀ,   y = Cᵀ S + D · x

The kernels process `CHUNK` tokens at a time. Within a chunk, let G_i = Σ_{j ≤ i} g_j, and let G be the last G_i. Let
E_ij = exp(G_i − G_j) for i ≥ j, and 0 otherwise. S is the state before the chunk. In all other matrices, each row
belongs to one token::

    M_ij = C_i·B_j · E_ij · δ_j,   Y = M X + e^{G_i} · C S + D · X,   S ← e^G · S + Bᵀ (δ · e^{G − G_i} · X)

A first kernel computes the running sums G_i. A second kernel goes through the chunks in order and stores the state
before each chunk. Each program of the second kernel holds some columns of the state of one head in registers. A third
kernel computes Y of all chunks. In the backward, one launch runs two scans. The first scan recomputes the state before
each chunk. The second scan goes through the chunks in the opposite order, and computes the gradient of the state after
each chunk: dS ← e^G · dS + (e^{G_i} · C)ᵀ dY. Then::

    U = (C·Bᵀ ∘ E)ᵀ dY + e^{G − G_i} · B dS,   dX = δ · U + D · dY,   dδ_i = x_i·U_i,   dD = Σ_i dy_i·x_i
    W_ij = Σ_heads dy_i·x_j · E_ij · δ_j
    dC = W B + Σ_heads e^{G_i} · dY Sᵀ,   dB = Wᵀ C + Σ_heads δ · e^{G − G_i} · X dSᵀ

In the backward, the tokens of a chunk are divided into two tiles. An exponential per pair of tokens is then needed only
for pairs within a tile. Let m be the last token of the first tile. For a token j of the first tile and a token i of the
second tile, the decay from j to i is the product of two decays, from j to m and from m to i. Both are at most 1: E_ij =
e^{G_i − G_m} · e^{G_m − G_j}.

Every decay from a token before k to token k or to a later token contains the decay of token k as a factor. dg_k is
therefore a sum with one term for each of these decays, computed in fp32. The elements on the diagonal of M contain no
decay, so they are left out of this sum. The operands of products are in the dtype of x, and the products are summed in
fp32. If a group has more than `MOST_HEADS` heads, the heads are split among several programs, each of which sums dB and
dC over its heads. A final sum in fp32 adds the results of the programs. The forward saves only the inputs.

For a few tokens without gradients, as in decoding, a separate kernel computes the recurrence token by token.

Source: https://arxiv.org/abs/2405.21060.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from liger_models.common.errors import check_documents, check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import fitting_stages, is_differentiable, on_device_of, use_triton
from liger_models.kernels.linear_attention.documents import bounds, count_documents, flat, slots
from liger_models.kernels.linear_attention.in_chunks import in_chunks
from liger_models.kernels.linear_attention.ssd_kernels import (
    decay_kernel,
    head_gradients_kernel,
    read_kernel,
    scan_kernel,
    scans_kernel,
    shared_gradients_kernel,
    step_kernel,
    sums_kernel,
)
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.tiles import cdiv, next_power_of_2

CHUNK = 128
"""Number of tokens in a chunk. With larger chunks, states take less memory and traffic, but the products within chunks
take more operations."""

STEP_TOKENS = 16
"""Maximum number of tokens for which the recurrence is computed token by token if no gradient is needed."""

MOST_STATE = 256
"""Maximum number of rows (N) of a head's state for which there are kernels."""

SUM_HEADS = 16
SCAN_BLOCK, SCANS_BLOCK = (128, 32), (64, 64)
"""Number of rows and number of columns of one head's state that a program of a scan holds: first for the forward, then
for the backward. In the forward, 64 heads with 64 columns each take 128 programs, so that a single sequence occupies a
GPU."""
SCAN_WARPS, SCAN_STAGES = 4, 3

LEAST_COLUMNS = 64
"""Minimum width of tiles in half precision. The assembler that Triton 3.6 uses for Hopper (ptxas 12.8) can lose the
address of a narrower operand if the address stays the same in all iterations of a loop. The products are then wrong."""

MOST_HEADS = 8
"""Maximum number of heads of a group that a program processes. The program computes one product of B and C for these
heads, and sums the gradients of B and C over these heads."""

READ_WARPS, READ_STAGES, READ_COLUMNS = 4, 2, 64
HEAD_WARPS, HEAD_STAGES = 4, 1
WIDE_STATE, WIDE_WARPS = 64 * 1024, 8
"""If a state has at least `WIDE_STATE` bytes, a program of `head_gradients_kernel` has `WIDE_WARPS` warps. Such a
program needs at least half of the shared memory of an H200's multiprocessor, so no second program can run on the same
multiprocessor."""
SHARED_WARPS, SHARED_STAGES = 4, 1
SHARED_COLUMNS = 128
"""Maximum number of columns of dB or dC that a program computes. Each column is summed over the program's heads."""

STEP_WARPS, STEP_COLUMNS = 4, 32


def ssd_scan_reference(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    delta: Tensor,
    g: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the output and the final states of `ssd_scan` in plain PyTorch.

    The function is differentiable, and keeps fp64 inputs in fp64.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, group = x.to(dtype), x.shape[2] // B.shape[2]
    keys, queries = (shared.to(dtype).repeat_interleave(group, 2).transpose(1, 2) for shared in (B, C))
    values = (wide * delta.to(dtype)[..., None]).transpose(1, 2)
    decays = g.to(dtype).transpose(1, 2)
    out, state = in_chunks(
        queries, keys, values, decays, None, initial_state=initial_state, cu_seqlens=cu_seqlens
    )  # fmt: skip
    out = out.transpose(1, 2)
    out = out if D is None else out + D.to(dtype)[:, None] * wide
    return out.to(x.dtype), state


class _Sizes:
    """Sizes and constants that all kernels of one call share."""

    def __init__(self, x: Tensor, B: Tensor, cu_seqlens: Tensor | None) -> None:
        (self.B, self.T, self.H, self.P), (self.G, self.N) = x.shape, B.shape[2:]
        self.tokens, self.group = self.B * self.T, self.H // self.G
        self._bounded = x, cu_seqlens
        self.documents = count_documents(x, cu_seqlens)
        self.slots = slots(self.tokens, self.documents, CHUNK)
        least = LEAST_COLUMNS if x.element_size() == 2 else 16
        self.block_n, self.block_p = (max(next_power_of_2(size), least) for size in (self.N, self.P))
        # A program computes as many heads of a group as possible, but at most MOST_HEADS.
        self.heads = next(heads for heads in range(min(self.group, MOST_HEADS), 0, -1) if self.group % heads == 0)
        self.parts = self.H // self.heads
        self.counts = self.tokens, self.documents
        precision = "ieee" if torch.version.hip is not None else "tf32x3"
        self.shape = {"H": self.H, "GROUP": self.group, "C": CHUNK, "N": self.N, "P": self.P, "PRECISION": precision}
        self.chunked = {"DOCUMENTS": next_power_of_2(self.documents)}

    @functools.cached_property
    def cu(self) -> Tensor:
        """The bounds of the documents, computed on first use. The kernel for a few tokens does not use these bounds."""
        return bounds(*self._bounded)

    def scan(self, x: Tensor, block: tuple[int, int]) -> tuple[int, dict[str, Any]]:
        """Return the number of programs of one scan, and the constants of the scan.

        Each program holds a block of the state of one head.
        """
        rows, columns = min(self.block_n, block[0]), min(self.block_p, block[1])
        programs = self.documents * self.H * cdiv(self.N, rows) * cdiv(self.P, columns)
        stages = fitting_stages(x, SCAN_STAGES, CHUNK * (rows + columns) * x.element_size())
        constants = {"BLOCK_N": rows, "BLOCK_P": columns, "STAGES": stages, "num_warps": SCAN_WARPS}
        return programs, self.shape | constants

    def tiles(
        self, x: Tensor, rows: int, stages: int, warps: int, *, block_n: int | None = None, block_p: int | None = None
    ) -> dict[str, Any]:
        """Return the constants of a kernel that processes the chunks in parallel.

        For each head, the kernel loads a block [block_n, block_p] of a state, and a total of ``rows`` rows of x and dy.
        If a size of the block is None, the block extends over the whole state in this dimension.
        """
        block_n, block_p = block_n or self.block_n, block_p or self.block_p
        stage = block_p * (block_n + rows) * x.element_size()
        outside = CHUNK * self.block_n * x.element_size()
        while stages > 1 and fitting_stages(x, stages, stage + cdiv(outside, stages)) == 1:
            stages -= 1
        constants = {"BLOCK_N": block_n, "BLOCK_P": block_p, "HEADS": self.heads, "STAGES": stages}
        return self.shape | self.chunked | constants | {"num_warps": warps}

    def shared(self, gradient: Tensor) -> Tensor:
        """Return the tensor to which a kernel writes the gradient of B or of C.

        If one program sums over all heads of a group, this tensor is the gradient [tokens, G, N] itself. Otherwise,
        this tensor is [programs · tokens, G, N] and holds the programs' sums in fp32.
        """
        parts = self.group // self.heads
        return (
            gradient
            if parts == 1
            else gradient.new_empty(parts * self.tokens, *gradient.shape[1:], dtype=torch.float32)
        )


def _running_sums(delta: Tensor, g: Tensor, sizes: _Sizes) -> Tensor:
    """Return the running sums of g within each chunk, and δ, as [2, H, tokens] fp32."""
    sums = g.new_empty(2, sizes.H, sizes.tokens, dtype=torch.float32)
    heads = min(next_power_of_2(sizes.H), SUM_HEADS)
    sums_kernel[(sizes.slots, cdiv(sizes.H, heads))](
        g, delta, sizes.cu, sums, *sizes.counts, *g.stride(), *delta.stride(), sizes.H, C=CHUNK, HEADS=heads,
        num_warps=4, **sizes.chunked,
    )  # fmt: skip
    return sums


def _ssd_scan(
    x: Tensor, B: Tensor, C: Tensor, delta: Tensor, g: Tensor, D: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = _Sizes(x, B, cu_seqlens)
    out, final = _outputs(x, B, cu_seqlens)
    if not final.numel() or not sizes.tokens:
        return out, final.zero_() if initial_state is None else final.copy_(initial_state)
    x, B, C, delta, g = map(flat, (x, B, C, delta, g))
    states = x.new_empty(sizes.slots * sizes.H, sizes.N, sizes.P)
    programs, constants = sizes.scan(x, SCAN_BLOCK)
    with on_device_of(x):
        sums = _running_sums(delta, g, sizes)
        # Arguments that the kernels do not use must also be tensors.
        scan_kernel[(programs,)](
            B, x, sizes.cu, sums, sums if initial_state is None else initial_state.contiguous(), final, states,
            sizes.tokens, *B.stride()[:2], *x.stride()[:2], HAS_INITIAL=initial_state is not None, **constants,
        )  # fmt: skip
        constants = sizes.tiles(x, CHUNK, READ_STAGES, READ_WARPS, block_p=min(sizes.block_p, READ_COLUMNS))
        read_kernel[(sizes.slots, sizes.parts, cdiv(sizes.P, constants["BLOCK_P"]))](
            C, B, x, sums if D is None else D.contiguous(), sizes.cu, sums, states, out, *sizes.counts,
            *C.stride()[:2], *B.stride()[:2], *x.stride()[:2], HAS_D=D is not None, **constants,
        )  # fmt: skip
    return out, final


def _ssd_scan_backward(
    dy: Tensor, d_final: Tensor | None, x: Tensor, B: Tensor, C: Tensor, delta: Tensor, g: Tensor, D: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = _gradients_like(x, B, C, delta, g, D, initial_state)
    _write_gradients(dy, d_final, x, B, C, delta, g, D, initial_state, cu_seqlens, *grads)
    return grads


def _write_gradients(
    dy: Tensor, d_final: Tensor | None, x: Tensor, B: Tensor, C: Tensor, delta: Tensor, g: Tensor, D: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, dx: Tensor, d_b: Tensor, d_c: Tensor, d_delta: Tensor,
    dg: Tensor, d_d: Tensor, d_initial: Tensor,
) -> None:  # fmt: skip
    """Compute the gradients, and write them to dx, d_b, d_c, d_delta, dg, d_d and d_initial.

    dx, d_b and d_c may be column slices of a wider tensor, whose rows are the tokens.
    """
    sizes = _Sizes(x, B, cu_seqlens)
    if not x.numel() or not B.numel():
        if d_final is not None and initial_state is not None:
            d_initial.copy_(d_final)
        d_d.zero_()
        return
    dy, x, B, C, delta, g = map(flat, (dy, x, B, C, delta, g))
    dx, d_b, d_c = (t.flatten(0, 1) for t in (dx, d_b, d_c))  # views
    states, d_states = (x.new_empty(sizes.slots * sizes.H, sizes.N, sizes.P) for _ in range(2))
    programs, constants = sizes.scan(x, SCANS_BLOCK)
    columns = min(sizes.block_n, SHARED_COLUMNS)
    blocks = cdiv(sizes.N, columns)
    with on_device_of(x):
        sums = _running_sums(delta, g, sizes)
        # Arguments that the kernels do not use must also be tensors.
        scans_kernel[(2 * programs,)](
            B, x, C, dy, sizes.cu, sums, sums if initial_state is None else initial_state.contiguous(),
            sums if d_final is None else d_final.contiguous(), states, d_states, d_initial, sizes.tokens,
            *B.stride()[:2], *x.stride()[:2], *C.stride()[:2], *dy.stride()[:2], HAS_INITIAL=initial_state is not None,
            HAS_FINAL=d_final is not None, **constants,
        )  # fmt: skip

        # Compute the gradients of x, δ and D.
        partial_d = sums.new_empty(2 * sizes.slots, sizes.H)
        d_steps = sums.new_empty(sizes.tokens, sizes.H)
        pairs = x.new_empty(sizes.parts, sizes.tokens, CHUNK)
        d_sums = sums.new_empty(3, sizes.H, sizes.tokens)
        read = sums.new_empty(blocks, sizes.H, sizes.tokens)
        written, kept = sums.new_empty(sizes.H, sizes.tokens), sums.new_empty(sizes.slots, sizes.H)
        shared_b, shared_c = sizes.shared(d_b), sizes.shared(d_c)
        state_bytes = sizes.block_n * sizes.block_p * x.element_size()
        head_warps = HEAD_WARPS if state_bytes < WIDE_STATE else WIDE_WARPS
        head_gradients_kernel[(3 * sizes.slots, sizes.parts)](
            B, C, x, dy, sums if D is None else D.contiguous(), sizes.cu, sums, states, d_states, dx, d_steps,
            partial_d, pairs, d_sums, written, kept, *sizes.counts, *B.stride()[:2], *C.stride()[:2],
            *x.stride()[:2], *dy.stride()[:2], dx.stride(0), HAS_D=D is not None,
            **sizes.tiles(x, 3 * CHUNK // 2, HEAD_STAGES, head_warps),
        )  # fmt: skip
        d_delta.copy_(d_steps.view(d_delta.shape))
        if D is not None:
            sum_partials(partial_d, d_d)

        # Compute the gradients of B, C and g.
        grid = 2 * sizes.slots, sizes.parts, blocks
        constants = sizes.tiles(x, CHUNK // 2, SHARED_STAGES, SHARED_WARPS, block_n=columns)
        shared_gradients_kernel[grid](
            dy, C, B, sizes.cu, sums, states, pairs, read, shared_c, *sizes.counts, *dy.stride()[:2], *C.stride()[:2],
            *B.stride()[:2], shared_c.stride(0), REVERSE=False, **constants,
        )  # fmt: skip
        shared_gradients_kernel[grid](
            x, B, C, sizes.cu, sums, d_states, pairs, read, shared_b, *sizes.counts, *x.stride()[:2], *B.stride()[:2],
            *C.stride()[:2], shared_b.stride(0), REVERSE=True, **constants,
        )  # fmt: skip
        for shared, gradient in ((shared_b, d_b), (shared_c, d_c)):
            if shared is not gradient:
                gradient.copy_(shared.view(-1, *gradient.shape).sum(0))
        heads = min(next_power_of_2(sizes.H), SUM_HEADS)
        decay_kernel[(sizes.slots, cdiv(sizes.H, heads))](
            sizes.cu, d_sums, read, written, kept, dg, *sizes.counts, sizes.H, C=CHUNK, HEADS=heads, BLOCKS=blocks,
            num_warps=4, **sizes.chunked,
        )  # fmt: skip


def _ssd_scan_packed(
    packed: Tensor, delta: Tensor, g: Tensor, D: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, head_dim: int, groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parts = split_packed(packed, delta.shape[2], head_dim, groups)
    return _ssd_scan(*parts, delta, g, D, initial_state, cu_seqlens)


def _ssd_scan_packed_backward(
    dy: Tensor, d_final: Tensor | None, packed: Tensor, delta: Tensor, g: Tensor, D: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, head_dim: int, groups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    sizes = delta.shape[2], head_dim, groups
    inputs = *split_packed(packed, *sizes), delta, g, D, initial_state
    d_packed, others = packed.new_empty(packed.shape), _gradients_of_others(delta, g, D, initial_state)
    _write_gradients(dy, d_final, *inputs, cu_seqlens, *split_packed(d_packed, *sizes), *others)
    return d_packed, *others


def _ssd_step(
    x: Tensor, B: Tensor, C: Tensor, delta: Tensor, g: Tensor, D: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    sizes = _Sizes(x, B, None)
    out, final = _outputs(x, B, None)
    if final.numel():
        x, B, C, delta, g = map(flat, (x, B, C, delta, g))
        columns = min(sizes.block_p, STEP_COLUMNS)
        with on_device_of(x):
            step_kernel[(sizes.B * sizes.H * cdiv(sizes.P, columns),)](
                x, B, C, delta, g, g if D is None else D.contiguous(),
                final if initial_state is None else initial_state.contiguous(), out, final, sizes.T, *x.stride()[:2],
                *B.stride()[:2], *C.stride()[:2], *delta.stride(), *g.stride(), H=sizes.H, GROUP=sizes.group,
                N=sizes.N, BLOCK_N=sizes.block_n, P=sizes.P, BLOCK_P=columns, HAS_INITIAL=initial_state is not None,
                HAS_D=D is not None, num_warps=STEP_WARPS,
            )  # fmt: skip
    return out, final


def _outputs(x: Tensor, B: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    documents = count_documents(x, cu_seqlens)
    return x.new_empty(x.shape), x.new_empty(documents, x.shape[2], B.shape[3], x.shape[3], dtype=torch.float32)


def _gradients_like(
    x: Tensor, B: Tensor, C: Tensor, delta: Tensor, g: Tensor, D: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, ...]:
    """Allocate the gradients. The gradients of missing inputs are empty."""
    return *(tensor.new_empty(tensor.shape) for tensor in (x, B, C)), *_gradients_of_others(delta, g, D, initial_state)


def _gradients_of_others(
    delta: Tensor, g: Tensor, D: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, ...]:
    d_d, d_initial = (
        g.new_empty(0, dtype=torch.float32) if tensor is None else tensor.new_empty(tensor.shape)
        for tensor in (D, initial_state)
    )
    return delta.new_empty(delta.shape), g.new_empty(g.shape, dtype=torch.float32), d_d, d_initial


def split_packed(packed: Tensor, heads: int, head_dim: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views x [B, T, H, P], B and C [B, T, G, N] of a tensor whose columns are x, then B, then C."""
    channels = (packed.shape[2] - heads * head_dim) // 2
    x, B, C = packed.split([heads * head_dim, channels, channels], -1)
    return x.unflatten(-1, (heads, head_dim)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))


def _gradients(
    dy: Tensor | None, d_final: Tensor | None, x: Tensor, B: Tensor, C: Tensor, delta: Tensor, g: Tensor,
    D: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dy = torch.zeros_like(x) if dy is None else dy
    return BACKWARD(dy, d_final, x, B, C, delta, g, D, initial_state, cu_seqlens)


def _packed_gradients(
    dy: Tensor | None, d_final: Tensor | None, packed: Tensor, delta: Tensor, g: Tensor, D: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, head_dim: int, groups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    if dy is None:
        dy = torch.zeros_like(split_packed(packed, delta.shape[2], head_dim, groups)[0])
    return PACKED_BACKWARD(dy, d_final, packed, delta, g, D, initial_state, cu_seqlens, head_dim, groups)


def _packed_outputs(
    packed: Tensor, delta: Tensor, g: Tensor, D: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, head_dim: int, groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x, B, _ = split_packed(packed, delta.shape[2], head_dim, groups)
    return _outputs(x, B, cu_seqlens)


BACKWARD = define_op(
    "ssd_scan_backward", _ssd_scan_backward, lambda dy, d_final, *inputs: _gradients_like(*inputs[:7]),
    outputs="x B C delta g D initial_state",
)  # fmt: skip
FORWARD = define_op(
    "ssd_scan", _ssd_scan, lambda x, B, *others: _outputs(x, B, others[-1]),
    outputs="y final", backward=_gradients, gradients="x B C delta g D initial_state",
)  # fmt: skip
PACKED_BACKWARD = define_op(
    "ssd_scan_packed_backward", _ssd_scan_packed_backward,
    lambda dy, d_final, packed, *inputs: (packed.new_empty(packed.shape), *_gradients_of_others(*inputs[:4])),
    outputs="packed delta g D initial_state",
)  # fmt: skip
PACKED_FORWARD = define_op(
    "ssd_scan_packed", _ssd_scan_packed, _packed_outputs,
    outputs="y final", backward=_packed_gradients, gradients="packed delta g D initial_state",
)  # fmt: skip
STEP = define_op("ssd_step", _ssd_step, lambda x, B, *_: _outputs(x, B, None))


def _check(
    op: str, x: Tensor, B: Tensor, C: Tensor, delta: Tensor, g: Tensor, D: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    check_floating(op, x=x, B=B, C=C, delta=delta, g=g, D=D, initial_state=initial_state)
    if not x.dtype == B.dtype == C.dtype:
        raise TypeError(f"{op}: x, B and C must have one dtype, got {x.dtype}, {B.dtype} and {C.dtype}.")
    if not (x.dim() == B.dim() == 4 and B.shape == C.shape and x.shape[:2] == B.shape[:2]):
        raise ValueError(
            f"{op}: x must be [B, T, H, P] and B and C [B, T, G, N], got {list(x.shape)}, {list(B.shape)} and "
            f"{list(C.shape)}."
        )
    (rows, T, H, P), (G, N) = x.shape, B.shape[2:]
    if H % G != 0:
        raise ValueError(f"{op}: the number of heads ({H}) must be a multiple of the number of groups ({G}).")
    if not delta.shape == g.shape == x.shape[:3]:
        raise ValueError(f"{op}: delta and g must be {list(x.shape[:3])}, got {list(delta.shape)} and {list(g.shape)}.")
    if D is not None and D.shape != (H,):
        raise ValueError(f"{op}: D must be {[H]}, got {list(D.shape)}.")
    documents = check_documents(op, cu_seqlens, rows, T)
    if initial_state is not None and initial_state.dtype != torch.promote_types(x.dtype, torch.float32):
        raise TypeError(f"{op}: initial_state must be float32, got {initial_state.dtype}.")
    if initial_state is not None and initial_state.shape != (documents, H, N, P):
        raise ValueError(f"{op}: initial_state must be {[documents, H, N, P]}, got {list(initial_state.shape)}.")


def is_fused(x: Tensor, B: Tensor) -> bool:
    """Return whether the scan is computed by Triton kernels instead of plain PyTorch.

    The kernels require an accelerator, half precision, sizes P and N that fill whole 16-byte vectors, and an N of at
    most 256. Tiles in float32 would not fit into the shared memory of a GPU, so float32 runs in plain PyTorch.
    """
    in_half = x.dtype != torch.float32 or x.device.type == "cpu"
    fits = B.shape[-1] <= MOST_STATE and not any(tensor.shape[-1] * tensor.itemsize % 16 for tensor in (x, B))
    return use_triton(x) and in_half and fits


def ssd_scan(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    delta: Tensor,
    g: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the state-space scan for whole sequences, for packed documents, or for the next tokens of a sequence.

    Args:
        x: [B, T, H, P], float32, float16 or bfloat16. If `is_fused` is False, the scan runs in plain PyTorch.
        B, C: [B, T, G, N], in the dtype of x. H / G consecutive heads share B and C.
        delta: [B, T, H], the step sizes; see `step_sizes`.
        g: [B, T, H] float32, the logarithm of the decay, at most 0.
        D: [H], the factor of each head in the term D · x of the output; None if there is no such term.
        initial_state: [B, H, N, P] float32, the state before the first token, or [documents, H, N, P] with a state for
            each document. If None, this state is 0.
        return_state: whether to also return the state after the last token.
        cu_seqlens: [documents + 1] int32 or int64, the bounds of packed documents, ascending from 0 to T. The batch
            must have one row. No state passes from one document to the next.

    Returns:
        The output [B, T, H, P] in the dtype of x. With ``return_state``, also the final state, in the shape of
        ``initial_state``.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor has the wrong dtype.
    """
    _check("ssd_scan", x, B, C, delta, g, D, initial_state, cu_seqlens)
    inputs = x, B, C, delta, g, D, initial_state
    if not is_fused(x, B):
        out, state = ssd_scan_reference(*inputs[:6], initial_state=initial_state, cu_seqlens=cu_seqlens)
    elif cu_seqlens is None and x.shape[1] <= STEP_TOKENS and not is_differentiable(*inputs):
        out, state = STEP(*inputs)
    else:
        out, state = FORWARD(*inputs, cu_seqlens)
    return (out, state) if return_state else out


def ssd_scan_packed(
    packed: Tensor,
    delta: Tensor,
    g: Tensor,
    D: Tensor | None = None,
    *,
    head_dim: int,
    groups: int,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `ssd_scan` for x, B and C that are packed in one tensor. The backward also writes their gradients to one
    tensor.

    Args:
        packed: [B, T, H · P + 2 · G · N], where the columns of x come first, then the columns of B, then the columns of
            C.
        delta, g, D: as in `ssd_scan`.
        head_dim: P.
        groups: G.
        initial_state, return_state, cu_seqlens: as in `ssd_scan`.

    Returns:
        The same results as `ssd_scan`.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor has the wrong dtype.
    """
    op = "ssd_scan_packed"
    shared = packed.shape[2] - delta.shape[2] * head_dim if packed.dim() == delta.dim() == 3 else -1
    if shared <= 0 or shared % (2 * groups):
        raise ValueError(
            f"{op}: packed must be [B, T, H · P + 2 · G · N] and delta [B, T, H], where P is {head_dim} and G is "
            f"{groups}, got {list(packed.shape)} and {list(delta.shape)}."
        )
    parts = split_packed(packed, delta.shape[2], head_dim, groups)
    options: dict[str, Any] = {"initial_state": initial_state, "return_state": return_state, "cu_seqlens": cu_seqlens}
    if not is_fused(*parts[:2]) or not is_differentiable(packed, delta, g, D, initial_state):
        return ssd_scan(*parts, delta, g, D, **options)
    _check(op, *parts, delta, g, D, initial_state, cu_seqlens)
    out, state = PACKED_FORWARD(packed, delta, g, D, initial_state, cu_seqlens, head_dim, groups)
    return (out, state) if return_state else out


def ssd_scan_packed_reference(
    packed: Tensor, delta: Tensor, g: Tensor, D: Tensor | None = None, *, head_dim: int, groups: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute the output and the final states of `ssd_scan_packed` in plain PyTorch, as `ssd_scan_reference` does."""
    return ssd_scan_reference(*split_packed(packed, delta.shape[2], head_dim, groups), delta, g, D, **options)


def ssd_transition(
    x: Tensor, B: Tensor, delta: Tensor, g: Tensor, *, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``a`` and ``b`` in ``state after = a · state before + b``.

    ``a`` and ``b`` describe the effect of the tokens on any state. If ranks hold consecutive parts of a sequence, they
    exchange ``a`` and ``b``, whose sizes do not depend on the number of tokens. `states_before` of
    `gated_delta_rule.py` then computes the initial state of each rank.

    Args:
        x, B, delta, g: as in `ssd_scan`.
        cu_seqlens: as in `ssd_scan`. ``a`` and ``b`` map the state before the first document to the state after the
            last document.

    Returns:
        ``a`` [B, H] and ``b`` [B, H, N, P] in float32.

    Raises:
        ValueError, TypeError: as in `ssd_scan`.
    """
    result = ssd_scan(x, B, B, delta, g, return_state=True, cu_seqlens=cu_seqlens)
    b = result[1]
    decay = g.to(b.dtype).sum(1).exp()
    if cu_seqlens is not None:
        # ``last`` is the last document that has tokens. The state after this document depends on the state before the
        # first document only if all tokens belong to one document.
        T = x.shape[1]
        last = torch.searchsorted(cu_seqlens, torch.full([1], T, device=x.device)) - 1
        b = b.index_select(0, last.clamp_min(0))
        decay = decay * ((cu_seqlens > 0) & (cu_seqlens < T)).logical_not().all()
    return decay, b
