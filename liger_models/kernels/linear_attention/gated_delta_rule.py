"""Gated delta rule: linear attention that decays its state and updates it by the delta rule.

S [Dk, Dv] is the state of a value head, and q̂ and k̂ are the L2-normalized query and key. The forward computes, for
each value head and token, in fp32::

    S ← exp(g) · S,   d = β · (v − k̂ᵀ S),   S ← S + k̂ dᵀ,   o = scale · q̂ᵀ S

The kernels process `CHUNK` tokens at a time. Within a chunk, let G_i = Σ_{j ≤ i} g_j, and let G be the last G_i. Let
E_ij = exp(G_i − G_j) for i ≥ j, and 0 otherwise. S is the state before the chunk. In all other matrices, each row
belongs to one token::

    M_ij = β_i · E_ij · k̂_i·k̂_j  (i > j),   A = (I + M)⁻¹,   P_ij = scale · E_ij · q̂_i·k̂_j
    X = β · (V − e^{G_i} · K̂ S),   D = A X,   O = scale · e^{G_i} · Q̂ S + P D,   S ← e^G · S + (e^{G − G_i} · K̂)ᵀ D

A first kernel computes P for all chunks, and the coefficients of the rows of Q, K and X. A second kernel computes A. A
third kernel goes through the chunks in order, and each of its programs holds some columns of S in registers. The
backward goes through the chunks in the opposite order. dS is the gradient of the state after the chunk::

    dD = Pᵀ dO + e^{G − G_i} · K̂ dS,   dX = Aᵀ dD,   dV = β · dX
    dS ← e^G · dS + (scale · e^{G_i} · Q̂)ᵀ dO − (β · e^{G_i} · K̂)ᵀ dX

S and D depend on no gradient. The launch that computes dS therefore recomputes them at the same time. Within a chunk,
queries and keys read from the state, and keys write to it. dQ̂ and −β · R are the gradients through the reads. W and the
last term of dK̂ are the gradients through the writes. ∘ is the elementwise product::

    dQ̂ = scale · (e^{G_i} · dO Sᵀ + (E ∘ dO Dᵀ) K̂)
    R = e^{G_i} · dX Sᵀ + (E ∘ dX Dᵀ) K̂    (i > j),   dβ_i = dX_i·V_i − k̂_i·R_i
    W = e^{G − G_i} · D dSᵀ − (E ∘ dV Dᵀ)ᵀ K̂    (i > j),   dK̂ = W − β · R + scale · (E ∘ dO Dᵀ)ᵀ Q̂

If several value heads share a key head, one program sums over these value heads. A first kernel computes E ∘ dO Dᵀ and
−β · E ∘ dX Dᵀ, summed over the value heads. Two other kernels compute the terms that contain S and dS. These kernels
also multiply the sums from the first kernel by K̂ and Q̂, and add the products to the terms. The operands of products
are in the dtype of q, k and v, and the products are summed in fp32. The state and the decay are in fp32. The inverse A
is computed from matrix products whose errors are at most 2⁻¹⁶. The forward saves the inputs, and A in the dtype of the
inputs. The backward recomputes P, S and D.

For a few tokens without gradients, as in decoding, a separate kernel computes the recurrence token by token.

Source: https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2406.06484 (computation in chunks).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_models.common.errors import check_documents, check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import (
    INTERPRET,
    TensorDescriptor,
    fitting_stages,
    is_differentiable,
    on_device_of,
    use_triton,
)
from liger_models.kernels.linear_attention.documents import bounds, count_documents, flat, slots
from liger_models.kernels.linear_attention.gated_delta_backward import (
    key_gradients_kernel,
    pair_kernel,
    query_gradients_kernel,
    scans_kernel,
)
from liger_models.kernels.linear_attention.gated_delta_forward import (
    inverse_kernel,
    scan_kernel,
    similarity_kernel,
    step_kernel,
)
from liger_models.kernels.linear_attention.in_chunks import in_chunks
from liger_models.kernels.tiles import cdiv, dot_tile, next_power_of_2

CHUNK = 64
"""Number of tokens in a chunk. A chunk consists of four blocks of 16 tokens, because 16 is the smallest size that
tensor cores multiply."""

L2_EPS = 1e-6

STEP_TOKENS = 16
"""Maximum number of tokens for which the recurrence is computed token by token if no gradient is needed."""

SIMILARITY_WARPS, INVERSE_WARPS, INVERSE_STAGES = 8, 1, 3
SCAN_WARPS, SCAN_STAGES, SCAN_COLUMNS = 4, 3, 32
"""SCAN_COLUMNS is the number of columns of one head's state that a program of a scan holds. With 32 columns, a head of
128 columns has four programs, so that a single sequence with 32 heads occupies a GPU."""

BACK_STAGES = 2
"""Number of pipeline stages in the scans of the backward. With more stages, two programs would not fit into the shared
memory of a Hopper multiprocessor."""

GRADIENT_WARPS, GRADIENT_STAGES, GRADIENT_COLUMNS = 4, 3, 64
"""GRADIENT_COLUMNS is the maximum number of columns of v that the kernels for the gradients within chunks process at a
time. These kernels also process at most half of v's columns at a time. On Hopper, four warps were faster than eight,
both with unlimited registers and with at most 128 registers per thread."""

QUERY_STAGES, QUERY_COLUMNS = 2, 128
"""Constants of the kernel for the gradient of q. QUERY_COLUMNS is the maximum number of columns of v in a tile."""

KEY_COLUMNS = 64
"""Number of columns of q and k in a block. Kernels process blocks of this size or of twice this size. Other sizes gave
wrong results on Hopper with Triton 3.6."""

STEP_WARPS, STEP_COLUMNS = 4, 32


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the output and the final states of `gated_delta_rule` in plain PyTorch.

    The function is differentiable, and keeps fp64 inputs in fp64.
    """
    result_dtype, dtype = v.dtype, torch.promote_types(v.dtype, torch.float32)
    (Hk, Dk), Hv = k.shape[2:], v.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
    g, beta = (x.to(dtype).transpose(1, 2) for x in (g, beta))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q = q * (Dk**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(Hv // Hk, 1) for x in (q, k))

    out, state = in_chunks(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return out.transpose(1, 2).to(result_dtype), state


class DeltaRule:
    """The sizes, constants and inputs of one call to a delta rule. The inputs are stored as rows [B · T, ...].

    Each rule has a derived class, which launches the kernels of the rule in `prepare`, `scan` and `differentiate`.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, scale: float,
        normalize: bool,
    ) -> None:  # fmt: skip
        (self.B, self.T, self.Hk, self.Dk), (self.Hv, self.Dv) = k.shape, v.shape[2:]
        self.tokens = self.B * self.T
        self._bounded = k, cu_seqlens
        self.documents = count_documents(k, cu_seqlens)
        self.counts = self.tokens, self.documents
        self.slots = slots(self.tokens, self.documents, CHUNK)
        self.q, self.k, self.v, self.g, self.beta = map(flat, (q, k, v, g, beta))
        self.q_strides, self.k_strides, self.v_strides = (x.stride()[:2] for x in (self.q, self.k, self.v))
        self.scale, self.normalize = scale, normalize

        # Choose the padded width of q and k, the padded width of v, and the number of columns of v per program of a
        # scan.
        block_k = KEY_COLUMNS if self.Dk <= KEY_COLUMNS else 2 * KEY_COLUMNS
        block_v = dot_tile(self.Dv)
        columns = min(block_v, SCAN_COLUMNS)
        self.shape = {"GROUP": self.Hv // self.Hk, "C": CHUNK, "DK": self.Dk, "BLOCK_K": block_k}
        # Three TF32 products, which run on tensor cores, are as accurate as one fp32 product. Three bfloat16 products
        # take half as many instructions and have errors of 2⁻¹⁶, which is far less than the rounding error of an
        # inverse that is stored in half precision. Triton's interpreter does not support the bfloat16 products.
        is_amd, in_half = torch.version.hip is not None, k.element_size() == 2 and not INTERPRET
        self.precision = {"PRECISION": "ieee" if is_amd else "tf32x3"}
        self.inverse_precision = "ieee" if is_amd else "bf16x3" if in_half else "tf32x3"
        self.chunked = {"DOCUMENTS": next_power_of_2(self.documents)}
        self.scan_programs = self.documents * self.Hv * cdiv(self.Dv, columns)
        self.columns, self.block_v = columns, block_v

    @functools.cached_property
    def cu(self) -> Tensor:
        """The bounds of the documents, computed on first use. The kernel for a few tokens does not use these bounds."""
        return bounds(*self._bounded)

    def prepare(self, need_p: bool, inverse: Tensor | None = None) -> tuple[Tensor, ...]:
        """Compute A, P, the running sums of g, and further tensors that `scan` and `differentiate` need.

        The module's docstring defines A and P. A, P and the running sums have one entry per value head in their first
        dimension. If A is already known, it is passed as ``inverse``; otherwise ``inverse`` is None.
        """
        raise NotImplementedError

    def scan(self, initial: Tensor, out: Tensor, final: Tensor, **flags: bool) -> Tensor:
        """Write the output and the final states to ``out`` and ``final``, and return A.

        Args:
            initial: the initial states, or any tensor if ``HAS_INITIAL`` is not set.
            out, final: tensors to which the output and the final states are written. ``out`` is empty if it is not
                needed.
            flags: ``HAS_INITIAL`` (whether there are initial states) and ``STORE_OUT`` (whether the output is needed).
        """
        raise NotImplementedError

    def differentiate(
        self, d_out: Tensor, d_final: Tensor | None, initial: Tensor | None, inverse: Tensor,
        grads: tuple[Tensor, ...], **flags: bool,
    ) -> None:  # fmt: skip
        """Compute the gradients of q, k, v, g, beta and the initial states, and write them to ``grads``.

        Args:
            d_out: rows of the output's gradient, or any tensor if ``HAS_OUT`` is not set.
            d_final: gradient of the final states, or None.
            initial: the initial states, or None.
            inverse: A.
            grads: tensors to which the gradients are written.
            flags: ``HAS_INITIAL``, ``HAS_OUT`` and ``HAS_FINAL``, which say whether there are initial states, a
                gradient of the output, and a gradient of the final states.
        """
        raise NotImplementedError

    def states_and_values(self) -> tuple[Tensor, ...]:
        """Allocate the tensors from which the gradients within chunks are computed.

        These tensors are S before each chunk, dS after each chunk, D, and dX.
        """
        states, d_states = (self.k.new_empty(self.slots * self.Hv, self.Dk, self.Dv) for _ in range(2))
        d, dx = (self.k.new_empty(self.Hv, self.tokens, self.Dv) for _ in range(2))
        return states, d_states, d, dx


class GatedDeltaRule(DeltaRule):
    """The gated delta rule, whose decay is one number per head and token."""

    def scan_constants(self, stages: int) -> dict[str, Any]:
        """Return the constants of the scans."""
        # Each pipeline stage holds a chunk of q, k, A, P, and v or dO in shared memory.
        stage = CHUNK * (2 * self.shape["BLOCK_K"] + 2 * CHUNK + self.columns) * self.k.element_size()
        return self.shape | self.precision | {
            "Hv": self.Hv, "DV": self.Dv, "BLOCK_V": self.columns, "STAGES": fitting_stages(self.k, stages, stage),
            "num_warps": SCAN_WARPS,
        }  # fmt: skip

    def prepare(self, need_p: bool, inverse: Tensor | None = None) -> tuple[Tensor, ...]:
        """See `DeltaRule.prepare`.

        The results include the coefficients of each row, and the inverse norms of q and k.
        """
        q, k, g, beta = self.q, self.k, self.g, self.beta
        p = k.new_empty(self.Hv, self.tokens, CHUNK)
        total = k.new_empty(self.Hv, self.tokens, dtype=torch.float32)
        q_norm, k_norm = (total.new_empty(self.Hk, self.tokens) for _ in range(2))
        factors = total.new_empty(self.Hv, 4, self.tokens)

        # Compute P, running sums and coefficients for each chunk and key head, then A for each chunk and value head.
        similarity_kernel[(self.slots, self.Hk)](
            q, k, g, beta, self.cu, p, total, q_norm, k_norm, factors, *self.counts, *self.q_strides,
            *self.k_strides, *g.stride(), *beta.stride(), self.scale, NORMALIZE=self.normalize, EPS=L2_EPS,
            NEED_P=need_p, num_warps=SIMILARITY_WARPS, **self.shape, **self.precision, **self.chunked,
        )  # fmt: skip
        if inverse is None:
            inverse = torch.empty_like(p)
            inverse_kernel[(self.slots, self.Hv)](
                k, total, factors, k_norm, self.cu, inverse, *self.counts, *self.k_strides, GROUP=self.Hv // self.Hk,
                C=CHUNK, DK=self.Dk, BLOCK=KEY_COLUMNS, PRECISION=self.inverse_precision, STAGES=INVERSE_STAGES,
                num_warps=INVERSE_WARPS, **self.chunked,
            )  # fmt: skip
        return inverse, p, total, factors, q_norm, k_norm

    def scan(self, initial: Tensor, out: Tensor, final: Tensor, **flags: bool) -> Tensor:
        """See `DeltaRule.scan`."""
        inverse, p, total, factors, _, _ = self.prepare(flags["STORE_OUT"])
        # Arguments that the kernel does not use must also be tensors.
        scan_kernel[(self.scan_programs,)](
            self.q, self.k, self.v, self.cu, inverse, p, total, factors, initial, out, final, self.tokens,
            *self.q_strides, *self.k_strides, *self.v_strides, **flags, **self.scan_constants(SCAN_STAGES),
        )  # fmt: skip
        return inverse

    def differentiate(
        self, d_out: Tensor, d_final: Tensor | None, initial: Tensor | None, inverse: Tensor,
        grads: tuple[Tensor, ...], **flags: bool,
    ) -> None:  # fmt: skip
        """See `DeltaRule.differentiate`."""
        q, k, v = self.q, self.k, self.v
        dq, dk, dv, dg, dbeta, d_initial = grads
        strides, has_out = (*self.q_strides, *self.k_strides), flags["HAS_OUT"]
        states, d_states, d, dx = self.states_and_values()
        _, p, total, factors, q_norm, k_norm = self.prepare(has_out, inverse)
        # Arguments that the kernel does not use must also be tensors.
        scans_kernel[(2 * self.scan_programs,)](
            q, k, v, self.cu, inverse, p, total, factors, total if initial is None else initial, states, d, d_out,
            total if d_final is None else d_final, d_states, dx, d_initial, self.tokens, *strides, *self.v_strides,
            *d_out.stride()[:2], **flags, **self.scan_constants(BACK_STAGES),
        )  # fmt: skip

        # The three kernels for the gradients within a chunk share these constants.
        block_v = max(min(self.block_v // 2, GRADIENT_COLUMNS), 16)
        stage = (2 * self.shape["BLOCK_K"] + CHUNK) * block_v * k.element_size()  # S, dS and D
        common = self.shape | self.chunked | self.precision | {
            "Hv": self.Hv, "DV": self.Dv, "BLOCK_V": block_v, "STAGES": fitting_stages(k, GRADIENT_STAGES, stage),
            "num_warps": GRADIENT_WARPS,
        }  # fmt: skip
        grid = self.slots, self.Hk

        # These descriptors load tiles from tensors [heads or slots, rows, columns].
        d_tiles, d_out_tiles, dx_tiles = (_matrices(x, CHUNK, block_v) for x in (d, d_out.transpose(0, 1), dx))
        state_tiles, d_state_tiles = (_matrices(x, self.shape["BLOCK_K"], block_v) for x in (states, d_states))
        queries, keys = (_matrices(x.transpose(0, 1), CHUNK, self.shape["BLOCK_K"]) for x in (q, k))

        # Compute E ∘ dO Dᵀ and −β · E ∘ dX Dᵀ for each chunk, and their contributions to the gradients of β and of the
        # running sums of g.
        q_pairs, k_pairs = (k.new_empty(self.Hk, self.tokens, CHUNK) for _ in range(2))
        d_total, d_beta = (torch.empty_like(total) for _ in range(2))
        pair_kernel[grid](
            d_tiles, d_out_tiles, dx_tiles, _matrices(v.transpose(0, 1), CHUNK, block_v), q, k, self.cu, total,
            factors, q_norm, k_norm, dv, q_pairs, k_pairs, d_total, d_beta, *self.counts, *strides, self.scale,
            HAS_OUT=has_out, **common,
        )  # fmt: skip
        if has_out:
            # A stage holds all columns of S and dO, and a tile of q.
            columns = min(self.block_v, QUERY_COLUMNS)
            stage = (self.shape["BLOCK_K"] * (self.block_v + CHUNK) + CHUNK * self.block_v) * k.element_size()
            query_gradients_kernel[grid](
                _matrices(d_out.transpose(0, 1), CHUNK, columns), _matrices(states, self.shape["BLOCK_K"], columns),
                queries, k, self.cu, total, q_norm, q_pairs, d_total, dq, *self.counts, *self.k_strides, self.scale,
                NORMALIZE=self.normalize,
                **common | {"BLOCK_V": columns, "STAGES": fitting_stages(k, QUERY_STAGES, stage)},
            )  # fmt: skip
        key_gradients_kernel[grid](
            d_tiles, dx_tiles, state_tiles, d_state_tiles, keys, q, k, self.cu, total, factors, k_norm, q_pairs,
            k_pairs, d_total, d_beta, dk, dg, dbeta, *self.counts, *strides, HAS_OUT=has_out,
            NORMALIZE=self.normalize, **common,
        )  # fmt: skip


def _matrices(x: Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor with which kernels load tiles [rows, columns] of the matrices x [matrices, ..., ...]."""
    if x.data_ptr() % 16 or any(not size or size * x.itemsize % 16 for size in x.stride()[:2]):
        x = x.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, columns])


def _gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rule = DeltaRule(q, k, v, g, beta, None, scale, normalize)
    out, final = delta_outputs(k, v, None, True)
    if final.numel():
        columns = min(rule.block_v, STEP_COLUMNS)
        with on_device_of(k):
            step_kernel[(rule.B * rule.Hv * cdiv(rule.Dv, columns),)](
                rule.q, rule.k, rule.v, rule.g, rule.beta,
                final if initial_state is None else initial_state.contiguous(), out, final, rule.T, *rule.q_strides,
                *rule.k_strides, *rule.v_strides, *rule.g.stride()[:2], *rule.beta.stride(), scale, Hv=rule.Hv,
                GROUP=rule.Hv // rule.Hk, DK=rule.Dk, BLOCK_K=rule.shape["BLOCK_K"], DV=rule.Dv, BLOCK_V=columns,
                HAS_INITIAL=initial_state is not None, NORMALIZE=normalize, EPS=L2_EPS, BY_CHANNEL=rule.g.dim() == 3,
                num_warps=STEP_WARPS,
            )  # fmt: skip
    return out, final


def delta_outputs(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, need_out: bool) -> tuple[Tensor, Tensor]:
    """Allocate the output and the final states. The output is empty if it is not needed."""
    documents = count_documents(k, cu_seqlens)
    out = v.new_empty(v.shape if need_out else 0)
    return out, v.new_empty(documents, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


def inverse_like(k: Tensor, v: Tensor) -> Tensor:
    """Allocate A, the inverse matrix of every chunk."""
    return k.new_empty(v.shape[2], k.shape[0] * k.shape[1], CHUNK)


def gradients_like(
    d_out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, ...]:
    """Allocate the gradients. If the output has no gradient (``d_out`` is None), q has no gradient either, and dq is
    empty.
    """
    d_initial = (
        g.new_empty(0, dtype=torch.float32)
        if initial_state is None
        else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    )
    return q.new_empty(0 if d_out is None else q.shape), *(x.new_empty(x.shape) for x in (k, v, g, beta)), d_initial


def _fake(q, k, v, g, beta, initial_state, cu_seqlens, scale, normalize, need_out):
    return *delta_outputs(k, v, cu_seqlens, need_out), inverse_like(k, v)


def _backward_fake(d_out, d_final, q, k, v, g, beta, initial_state, *_):
    return gradients_like(d_out, q, k, v, g, beta, initial_state)


def register_delta_rule(name: str, rule: type[DeltaRule]) -> Callable[..., Any]:
    """Register an op called ``name`` that computes a delta rule, and its backward op ``{name}_backward``. Return the
    first of these ops.

    The returned op takes q, k, v, g, beta, initial_state, cu_seqlens, scale, normalize and need_out, and returns the
    output, the final states and A.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
        cu_seqlens: Tensor | None, scale: float, normalize: bool, need_out: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        out, final = delta_outputs(k, v, cu_seqlens, need_out)
        if not final.numel() or not k.shape[0] * k.shape[1]:
            if initial_state is not None:
                final.copy_(initial_state)
            return out, final if initial_state is not None else final.zero_(), inverse_like(k, v)
        initial = final if initial_state is None else initial_state.contiguous()
        call = rule(q, k, v, g, beta, cu_seqlens, scale, normalize)
        with on_device_of(k):
            inverse = call.scan(initial, out, final, HAS_INITIAL=initial_state is not None, STORE_OUT=need_out)
        return out, final, inverse

    def backward(
        d_out: Tensor | None, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
        initial_state: Tensor | None, cu_seqlens: Tensor | None, inverse: Tensor, scale: float, normalize: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        grads = gradients_like(d_out, q, k, v, g, beta, initial_state)
        if not k.numel() or not v.numel():
            if d_final is not None and initial_state is not None:
                grads[-1].copy_(d_final)
            return grads
        call = rule(q, k, v, g, beta, cu_seqlens, scale, normalize)
        initial, d_last = (None if x is None else x.contiguous() for x in (initial_state, d_final))
        with on_device_of(k):
            call.differentiate(
                call.v if d_out is None else flat(d_out), d_last, initial, inverse, grads,
                HAS_INITIAL=initial is not None, HAS_OUT=d_out is not None, HAS_FINAL=d_last is not None,
            )  # fmt: skip
        return grads

    gradients = "q k v g beta initial_state"
    run_backward = define_op(f"{name}_backward", backward, _backward_fake, outputs=gradients)

    def differentiate(
        d_out: Tensor | None, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
        initial_state: Tensor | None, cu_seqlens: Tensor | None, inverse: Tensor, scale: float, normalize: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        dq, *others = run_backward(
            d_out, d_final, q, k, v, g, beta, initial_state, cu_seqlens, inverse, scale, normalize
        )
        return None if d_out is None else dq, *others  # q affects only the output

    return define_op(
        name, forward, _fake,
        outputs="out final inverse", constants="inverse", backward=differentiate, gradients=gradients,
    )  # fmt: skip


STEP = define_op("gated_delta_step", _gated_delta_step, lambda q, k, v, *_: delta_outputs(k, v, None, True))
FORWARD = register_delta_rule("gated_delta_rule", GatedDeltaRule)


def check_delta_rule(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, *, by_channel: bool = False,
) -> None:  # fmt: skip
    """Raise an error unless the arguments of a delta rule match. If ``by_channel`` is set, g must be [B, T, H, Dk]."""
    check_floating(op, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    if not (q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[:2] == v.shape[:2]):
        raise ValueError(
            f"{op}: q and k must be [B, T, Hk, Dk] and v [B, T, Hv, Dv], got {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}."
        )
    (B, T, Hk, Dk), (Hv, Dv) = k.shape, v.shape[2:]
    if Hv % Hk != 0:
        raise ValueError(f"{op}: the number of value heads ({Hv}) must be a multiple of that of key heads ({Hk}).")
    if by_channel and not (Hk == Hv and g.shape == k.shape and beta.shape == k.shape[:3]):
        raise ValueError(
            f"{op}: k and g must be [B, T, H, Dk], v [B, T, H, Dv] and beta [B, T, H], got {list(k.shape)}, "
            f"{list(g.shape)}, {list(v.shape)} and {list(beta.shape)}."
        )
    if not by_channel and not g.shape == beta.shape == v.shape[:3]:
        raise ValueError(f"{op}: g and beta must be {list(v.shape[:3])}, got {list(g.shape)} and {list(beta.shape)}.")
    documents = check_documents(op, cu_seqlens, B, T)
    if initial_state is not None and initial_state.dtype != torch.promote_types(v.dtype, torch.float32):
        raise TypeError(f"{op}: initial_state must be float32, got {initial_state.dtype}.")
    if initial_state is not None and initial_state.shape != (documents, Hv, Dk, Dv):
        raise ValueError(f"{op}: initial_state must be {[documents, Hv, Dk, Dv]}, got {list(initial_state.shape)}.")


def is_fused(k: Tensor, v: Tensor) -> bool:
    """Return whether the rule is computed by Triton kernels instead of plain PyTorch.

    The kernels require an accelerator, half precision, head dimensions that fill whole 16-byte vectors, and keys with
    at most 128 columns. In float32, the backward kernels gave wrong results on a GPU, so float32 runs in plain PyTorch.
    """
    in_half = k.dtype != torch.float32 or k.device.type == "cpu"
    fits = k.shape[-1] <= 2 * KEY_COLUMNS and not any(x.shape[-1] * x.itemsize % 16 for x in (k, v))
    return use_triton(k) and in_half and fits


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the gated delta rule for whole sequences, for packed documents, or for the next tokens of a sequence.

    Args:
        q, k: [B, T, Hk, Dk], float32, float16 or bfloat16. If `is_fused` is False, the rule runs in plain PyTorch.
        v: [B, T, Hv, Dv], in the dtype of q. Hv / Hk consecutive value heads share a key head.
        g: [B, T, Hv] float32, the logarithm of the decay, at most 0.
        beta: [B, T, Hv], the fraction by which a token's value replaces the value that the state holds for the token's
            key.
        scale: number by which the queries are multiplied; None for Dk^-0.5.
        normalize: whether to normalize each query and key, ``x · rsqrt(Σ x² + 1e-6)``.
        initial_state: [B, Hv, Dk, Dv] float32, the state before the first token, or [documents, Hv, Dk, Dv] with a
            state for each document. If None, this state is 0.
        return_state: whether to also return the state after the last token.
        cu_seqlens: [documents + 1] int32 or int64, the bounds of packed documents, ascending from 0 to T. B must be 1.
            No state passes from one document to the next.

    Returns:
        The output [B, T, Hv, Dv] in the dtype of v. With ``return_state``, also the final state, in the shape of
        ``initial_state``.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor has the wrong dtype.
    """
    check_delta_rule("gated_delta_rule", q, k, v, g, beta, initial_state, cu_seqlens)
    inputs = q, k, v, g, beta, initial_state
    out, state = run_delta_rule(FORWARD, *inputs, cu_seqlens, scale, normalize)
    return (out, state) if return_state else out


def run_delta_rule(
    op: Callable[..., tuple[Tensor, ...]], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float | None, normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the output and the final states of a delta rule.

    If `is_fused` is False, the rule runs in plain PyTorch. Otherwise, `step_kernel` computes short sequences (at most
    `STEP_TOKENS` tokens, not packed) without gradients, and ``op`` computes everything else.
    """
    T, Dk = k.shape[1], k.shape[3]
    scale = Dk**-0.5 if scale is None else float(scale)
    inputs = q, k, v, g, beta, initial_state
    if not is_fused(k, v):
        return gated_delta_rule_reference(
            q, k, v, g, beta, scale=scale, normalize=normalize, initial_state=initial_state, cu_seqlens=cu_seqlens
        )
    if cu_seqlens is None and T <= STEP_TOKENS and not is_differentiable(*inputs):
        return STEP(*inputs, scale, normalize)
    out, state, _ = op(*inputs, cu_seqlens, scale, normalize, True)
    return out, state


def gated_delta_transition(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, normalize: bool = True, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute A and b, which describe the effect of tokens on any state: ``state after = A @ state before + b``.

    If ranks hold consecutive parts of a sequence, they exchange A and b, whose sizes do not depend on the number of
    tokens. `states_before` then computes the initial state of each rank.

    Args:
        k, v, g, beta, normalize: as in `gated_delta_rule`.
        cu_seqlens: as in `gated_delta_rule`. A and b map the state before the first document to the state after the
            last document.

    Returns:
        A [B, Hv, Dk, Dk] and b [B, Hv, Dk, Dv] in float32.

    Raises:
        ValueError, TypeError: as in `gated_delta_rule`.
    """
    check_delta_rule("gated_delta_transition", k, k, v, g, beta, None, cu_seqlens)
    return delta_transition(FORWARD, k, v, g, beta, normalize, cu_seqlens)


def delta_transition(
    op: Callable[..., tuple[Tensor, ...]], k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `gated_delta_transition` with ``op``, the op of a delta rule that `register_delta_rule` returned."""
    (B, T, _, Dk), Hv = k.shape, v.shape[2]
    identity = torch.eye(Dk, device=k.device, dtype=torch.promote_types(k.dtype, torch.float32))
    first = last = None
    if cu_seqlens is not None:  # empty documents before the first token and after the last token are ignored
        last = torch.searchsorted(cu_seqlens, torch.full([1], T, device=k.device)) - 1
        first = torch.searchsorted(cu_seqlens, torch.zeros(1, dtype=torch.int64, device=k.device), right=True) - 1
        identity = identity * (torch.arange(len(cu_seqlens) - 1, device=k.device) == first)[:, None, None, None]
        identity = identity.expand(-1, Hv, -1, -1)
    else:
        identity = identity.expand(B, Hv, Dk, Dk)

    def final_state(v: Tensor, initial_state: Tensor | None) -> Tensor:
        if is_fused(k, v):
            inputs = k, k, v, g, beta, initial_state, cu_seqlens
            state = op(*inputs, 1.0, normalize, False)[1]
        else:
            _, state = gated_delta_rule_reference(
                k, k, v, g, beta, normalize=normalize, initial_state=initial_state, cu_seqlens=cu_seqlens
            )
        return state if last is None else state.index_select(0, last)

    none = v.new_zeros(1, 1, 1, Dk).expand(B, T, Hv, Dk)
    return final_state(none, identity), final_state(v, None)


def states_before(A: Tensor, b: Tensor, initial_state: Tensor | None = None) -> Tensor:
    """Compute the state before each part of a sequence that is divided into consecutive parts.

    Args:
        A, b: [parts, B, Hv, Dk, Dk] and [parts, B, Hv, Dk, Dv], the results of `gated_delta_transition` for each part;
            or [parts, B, H] and [parts, B, H, N, P], the results of `ssd_transition` for each part.
        initial_state: [B, Hv, Dk, Dv], the state before the first part; None if this state is 0.

    Returns:
        [parts, B, Hv, Dk, Dv], the state before each part.
    """
    states = [torch.zeros_like(b[0]) if initial_state is None else initial_state]
    for part in range(len(A) - 1):
        decayed = A[part] @ states[-1] if A.dim() == b.dim() else A[part, ..., None, None] * states[-1]
        states.append(decayed + b[part])
    return torch.stack(states)
