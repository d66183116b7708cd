"""Kimi delta rule (KDA): the gated delta rule with a decay for each channel of the keys.

S [Dk, Dv] is the state of a head, and q̂ and k̂ are the L2-normalized query and key. The forward computes, for each
head and token, in fp32::

    S ← diag(exp(g)) S,   d = β · (v − k̂ᵀ S),   S ← S + k̂ dᵀ,   o = scale · q̂ᵀ S

The kernels process `CHUNK` tokens at a time. Within a chunk, let G_i = Σ_{j ≤ i} g_j, a vector of size Dk, and let G be
the last G_i. ∘ is the elementwise product. S is the state before the chunk. In all other matrices, each row belongs to
one token::

    Qʳ_i = scale · e^{G_i} ∘ q̂_i,   Kʳ_i = e^{G_i} ∘ k̂_i,   Kʷ_i = e^{G − G_i} ∘ k̂_i
    M_ij = β_i · Σ_c e^{G_i − G_j} k̂_i k̂_j  (i > j),   A = (I + M)⁻¹
    P_ij = scale · Σ_c e^{G_i − G_j} q̂_i k̂_j  (i ≥ j)
    X = β · (V − Kʳ S),   D = A X,   O = Qʳ S + P D,   S ← diag(e^G) S + Kʷᵀ D

Σ_c is the sum over channels. The decay e^{G_i − G_j} differs between the channels, so it cannot be moved out of this
sum. It cannot be split into e^{G_i} and e^{−G_j} either, because e^{−G_j} would overflow. The pairs of tokens are
therefore grouped into log₂ C levels. At level n, the chunk is divided into blocks of 2^(n + 1) tokens. A pair of this
level consists of a token i in the second half of a block and a token j in the first half of the same block. Let r be
the last token of the first half. Then e^{G_i − G_j} = e^{G_i − G_r} · e^{G_r − G_j}, and both exponents are at most 0,
because j ≤ r < i and G decreases from token to token. One matrix product computes all pairs of a level. Before this
product, the rows of both operands are multiplied by F_i = e^{−|G_i − G_r|}, which cannot overflow.

The backward goes through the chunks in the opposite order. dS is the gradient of the state after the chunk::

    dD = Pᵀ dO + Kʷ dS,   dX = Aᵀ dD,   dV = β · dX,   dS ← diag(e^G) dS + Qʳᵀ dO − (β · Kʳ)ᵀ dX

The launch that computes dS also recomputes S and D. Let dP = dO Dᵀ (i ≥ j) and Y = dX Dᵀ (i > j). The other gradients
of a chunk are::

    dq̂_i = scale · (e^{G_i} ∘ (dO Sᵀ)_i + Σ_j dP_ij e^{G_i − G_j} ∘ k̂_j)
    R_i = e^{G_i} ∘ (dX Sᵀ)_i + Σ_j Y_ij e^{G_i − G_j} ∘ k̂_j,   dβ_i = dX_i·V_i − k̂_i·R_i
    W_j = e^{G − G_j} ∘ (D dSᵀ)_j + Σ_i e^{G_i − G_j} ∘ (scale · dP_ij q̂_i − β_i Y_ij k̂_i),   dk̂ = W − β · R
    dG_i = q̂_i ∘ dq̂_i − k̂_i ∘ (β_i R_i + W_i),   dG ← dG + e^G ∘ rowsum(S ∘ dS) + Σ_j k̂_j ∘ e^{G − G_j} ∘ (D dSᵀ)_j

The sums over pairs are computed level by level, like P. Each pair of tokens adds two terms to dG: one to the row of
each token. In the gradient of a g that comes before both tokens, the two terms must cancel. Both terms are therefore
computed from the same rounded numbers. The operands of products are in the dtype of q, k and v, and the products are
summed in fp32. The state and the decay are in fp32. The forward saves the inputs, and A in the dtype of the inputs. The
backward recomputes everything else.

For a few tokens without gradients, as in decoding, a separate kernel computes the recurrence token by token.

Source: https://arxiv.org/abs/2510.26692.
"""

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels.dispatch import fitting_stages
from liger_models.kernels.linear_attention.gated_delta_rule import (
    CHUNK,
    KEY_COLUMNS,
    L2_EPS,
    DeltaRule,
    check_delta_rule,
    delta_transition,
    gated_delta_rule_reference,
    register_delta_rule,
    run_delta_rule,
)
from liger_models.kernels.linear_attention.kimi_delta_kernels import (
    kimi_inverse_kernel,
    kimi_key_gradients_kernel,
    kimi_query_gradients_kernel,
    kimi_scan_kernel,
    kimi_scans_kernel,
    operands_kernel,
)

LEVELS = CHUNK.bit_length() - 1

OPERAND_WARPS, INVERSE_WARPS, GRADIENT_WARPS = 8, 1, 8
SCAN_WARPS, SCAN_STAGES = 4, 2
GRADIENT_COLUMNS = 64
"""Number of columns of v that the kernels for the gradients process at a time."""


kimi_delta_rule_reference = gated_delta_rule_reference
"""The reference implementation of `gated_delta_rule` also accepts one decay per channel."""


class KimiDeltaRule(DeltaRule):
    """The Kimi delta rule, which has one decay for each channel of each key."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.grid = self.slots, self.Hv
        self.shape = {"H": self.Hv, "C": CHUNK, "DK": self.Dk, "BLOCK_K": self.shape["BLOCK_K"]}
        # Each pipeline stage holds a chunk of Qʳ, Kʳ, Kʷ, A, P, and v or dO in shared memory.
        stage = CHUNK * (3 * self.shape["BLOCK_K"] + 2 * CHUNK + self.columns) * self.k.element_size()
        self.scan_constants = self.shape | self.precision | {
            "DV": self.Dv, "BLOCK_V": self.columns, "STAGES": fitting_stages(self.k, SCAN_STAGES, stage),
            "num_warps": SCAN_WARPS,
        }  # fmt: skip

    def prepare(self, need_p: bool, inverse: Tensor | None = None) -> tuple[Tensor, ...]:
        """See `DeltaRule.prepare`.

        The results include Σ_c e^{G_i − G_j} k̂_i k̂_j for all pairs of tokens (i > j), the inverse norms of k and q,
        and Qʳ, Kʳ and Kʷ.
        """
        q, k, g, beta = self.q, self.k, self.g, self.beta
        heads, tokens = self.Hv, self.tokens
        total = k.new_empty(heads, tokens, self.Dk, dtype=torch.float32)
        similarity, norms = total.new_empty(heads, tokens, CHUNK), total.new_empty(2, heads, tokens)
        p = k.new_empty(heads, tokens, CHUNK)
        operands = [torch.empty_like(total, dtype=k.dtype) for _ in range(3)]
        operands_kernel[self.grid](
            q, k, g, self.cu, total, norms, p, similarity, *operands, *self.counts, *self.q_strides, *self.k_strides,
            *g.stride()[:2], self.scale, LEVELS=LEVELS, NORMALIZE=self.normalize, EPS=L2_EPS, NEED_P=need_p,
            num_warps=OPERAND_WARPS, **self.shape, **self.precision, **self.chunked,
        )  # fmt: skip
        if inverse is None:
            inverse = torch.empty_like(p)
            kimi_inverse_kernel[self.grid](
                similarity, beta, self.cu, inverse, *self.counts, *beta.stride(), C=CHUNK,
                PRECISION=self.inverse_precision, num_warps=INVERSE_WARPS, **self.chunked,
            )  # fmt: skip
        return inverse, p, total, similarity, norms, *operands

    def scan(self, initial: Tensor, out: Tensor, final: Tensor, **flags: bool) -> Tensor:
        """See `DeltaRule.scan`."""
        inverse, p, total, _, _, *operands = self.prepare(flags["STORE_OUT"])
        # Arguments that the kernel does not use must also be tensors.
        kimi_scan_kernel[(self.scan_programs,)](
            *operands, self.v, self.beta, self.cu, inverse, p, total, initial, out, final, self.tokens,
            *self.v_strides, *self.beta.stride(), **flags, **self.scan_constants,
        )  # fmt: skip
        return inverse

    def differentiate(
        self, d_out: Tensor, d_final: Tensor | None, initial: Tensor | None, inverse: Tensor,
        grads: tuple[Tensor, ...], **flags: bool,
    ) -> None:  # fmt: skip
        """See `DeltaRule.differentiate`."""
        q, k, v, beta = self.q, self.k, self.v, self.beta
        dq, dk, dv, dg, dbeta, d_initial = grads
        states, d_states, d, dx = self.states_and_values()
        _, p, total, similarity, norms, *operands = self.prepare(flags["HAS_OUT"], inverse)
        # Arguments that the kernel does not use must also be tensors.
        kimi_scans_kernel[(2 * self.scan_programs,)](
            *operands, v, beta, self.cu, inverse, p, total, total if initial is None else initial, states, d, d_out,
            total if d_final is None else d_final, d_states, dx, d_initial, self.tokens, *self.v_strides,
            *beta.stride(), *d_out.stride()[:2], **flags, **self.scan_constants,
        )  # fmt: skip

        # The first kernel stores dP, scaled by norms, and its part of dG for the second kernel.
        common: dict[str, Any] = self.chunked | self.precision | {
            "H": self.Hv, "C": CHUNK, "DK": self.Dk, "BLOCK": KEY_COLUMNS, "DV": self.Dv,
            "BLOCK_V": min(self.block_v, GRADIENT_COLUMNS), "LEVELS": LEVELS, "NORMALIZE": self.normalize,
            "num_warps": GRADIENT_WARPS,
        }  # fmt: skip
        pairs, d_total, raw = torch.empty_like(p), torch.empty_like(total), torch.empty_like(total)
        strides = *self.q_strides, *self.k_strides
        if flags["HAS_OUT"]:
            kimi_query_gradients_kernel[self.grid](
                d_out, d, states, q, k, self.cu, total, norms, pairs, d_total, raw, dq, *self.counts,
                *d_out.stride()[:2], *strides, self.scale, **common,
            )  # fmt: skip
        kimi_key_gradients_kernel[self.grid](
            d, dx, states, d_states, q, k, v, beta, self.cu, total, norms, similarity, pairs, d_total, raw, dk, dv,
            dg, dbeta, *self.counts, *strides, *self.v_strides, *beta.stride(), HAS_OUT=flags["HAS_OUT"], **common,
        )  # fmt: skip


FORWARD = register_delta_rule("kimi_delta_rule", KimiDeltaRule)


def kimi_delta_rule(
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
    """Compute the Kimi delta rule for whole sequences, for packed documents, or for the next tokens of a sequence.

    Args:
        q, k: [B, T, H, Dk], float32, float16 or bfloat16. The kernels have the same limits as the kernels of
            `gated_delta_rule` (see `is_fused`). Beyond these limits, and in float32 on a GPU, the rule runs in plain
            PyTorch.
        v: [B, T, H, Dv], in the dtype of q.
        g: [B, T, H, Dk] float32, the logarithm of the decay of each channel of the keys, at most 0.
        beta: [B, T, H], the fraction by which a token's value replaces the value that the state holds for the token's
            key.
        scale: number by which the queries are multiplied; None for Dk^-0.5.
        normalize: whether to normalize each query and key, ``x · rsqrt(Σ x² + 1e-6)``.
        initial_state: [B, H, Dk, Dv] float32, the state before the first token, or [documents, H, Dk, Dv] with a state
            for each document. If None, this state is 0.
        return_state: whether to also return the state after the last token.
        cu_seqlens: [documents + 1] int32 or int64, the bounds of packed documents, ascending from 0 to T. B must be 1.
            No state passes from one document to the next.

    Returns:
        The output [B, T, H, Dv] in the dtype of v. With ``return_state``, also the final state, in the shape of
        ``initial_state``.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor has the wrong dtype.
    """
    check_delta_rule("kimi_delta_rule", q, k, v, g, beta, initial_state, cu_seqlens, by_channel=True)
    inputs = q, k, v, g, beta, initial_state
    out, state = run_delta_rule(FORWARD, *inputs, cu_seqlens, scale, normalize)
    return (out, state) if return_state else out


def kimi_delta_transition(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, normalize: bool = True, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute A and b, which describe the effect of tokens on any state: ``state after = A @ state before + b``.

    See `gated_delta_transition`. `states_before` computes the initial state of each rank from A and b.

    Args:
        k, v, g, beta, normalize: as in `kimi_delta_rule`.
        cu_seqlens: as in `kimi_delta_rule`. A and b map the state before the first document to the state after the
            last document.

    Returns:
        A [B, H, Dk, Dk] and b [B, H, Dk, Dv] in float32.

    Raises:
        ValueError, TypeError: as in `kimi_delta_rule`.
    """
    check_delta_rule("kimi_delta_transition", k, k, v, g, beta, None, cu_seqlens, by_channel=True)
    return delta_transition(FORWARD, k, v, g, beta, normalize, cu_seqlens)
