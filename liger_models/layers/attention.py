"""Grouped-query attention on the packed QKV projection."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from liger_models.kernels.dispatch import ACCELERATORS, check
from liger_models.kernels.rope import rope_qkv, rope_qkv_reference

from .norm import LigerRMSNorm, add_norm_linear
from .sequence import Sequence

CAUSAL_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,  # H200, head dim 128, S 8192: ahead of flash by about a quarter
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Never cuDNN with a mask: its gradient of q has been NaN for some lengths (pytorch#196678)."""


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _flex_attention() -> Any:
    # Uncompiled it would build the T x T scores; inside a compiled graph it is compiled with the rest.
    return flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()


def attention(q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Causal attention within each document of ``sequence``.

    SDPA on the fastest backend where causality is all there is; flex_attention on an accelerator for documents and
    padding, so that no T × T mask exists; SDPA with a mask on the CPU and for single-token decoding.

    Args:
        q: [B, T, H, D].
        k, v: [B, S, G, D], S = cached + T; H is a multiple of G.
        scale: factor of q·k.
        dropout: probability of dropping an attention weight.

    Returns:
        [B, T, H, D].

    Raises:
        ValueError: dropout together with documents on an accelerator, which flex_attention does not have.
    """
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    on_accelerator = q.device.type in ACCELERATORS
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    if sequence.block_mask is not None:
        check(
            dropout == 0.0,
            f"attention: dropout must be 0 with packed or padded batches on {q.device.type}, got {dropout}. "
            "Set attention_dropout=0.",
        )
        out = _flex_attention()(queries, keys, values, block_mask=sequence.block_mask, scale=scale, enable_gqa=H != G)
        y: Tensor = out.transpose(1, 2)
        return y
    if T == 1 and sequence.cache is not None:
        # One query per head: the heads of a group are rows that share keys, so keys and values are not repeated.
        rows = queries.reshape(q.shape[0], G, H // G, q.shape[3])
        sdpa = functools.partial(F.scaled_dot_product_attention, scale=scale)
        if sequence.dense_mask is not None and on_accelerator:
            with sdpa_kernel(MASKED_BACKENDS):
                out = sdpa(rows, keys, values, attn_mask=sequence.dense_mask)
        else:
            out = sdpa(rows, keys, values, attn_mask=sequence.dense_mask)
        return out.reshape(q.shape)
    sdpa = functools.partial(
        F.scaled_dot_product_attention, queries, keys, values, dropout_p=dropout, scale=scale, enable_gqa=H != G
    )
    if sequence.dense_mask is not None:
        out = sdpa(attn_mask=sequence.dense_mask)
    elif on_accelerator:
        with sdpa_kernel(CAUSAL_BACKENDS, set_priority=True):
            out = sdpa(is_causal=True)
    else:
        out = sdpa(is_causal=True)
    return out.transpose(1, 2)


class LigerAttention(nn.Module):
    """Causal grouped-query attention with rotary embedding, on one projection for q, k and v.

    The rows of ``qkv_proj`` are grouped by KV head: for each one its H / G query heads, then k, then v.

    Args:
        hidden_size: C.
        num_heads, num_kv_heads: H and G; H is a multiple of G.
        head_dim: D.
        layer: index of the layer, its place in the decode cache.
        bias: biases in all projections.
        dropout: probability of dropping an attention weight in training.
        rope_kernel: False for plain torch.

    Raises:
        ValueError: H is not a multiple of G.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer: int,
        bias: bool = False,
        dropout: float = 0.0,
        rope_kernel: bool = True,
    ) -> None:
        super().__init__()
        check(
            num_heads % num_kv_heads == 0,
            f"LigerAttention: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads}).",
        )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer, self.dropout, self.rope_kernel = layer, dropout, rope_kernel
        self.scale = head_dim**-0.5
        self.recompute = False
        """True keeps only the inputs and makes everything again in the backward (checkpointing policy "full")."""
        self.qkv_proj = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, sequence: Sequence) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        return self._attend(self.qkv_proj(x), sequence)

    def add_norm(
        self, norm: LigerRMSNorm, x: Tensor | None, residual: Tensor, sequence: Sequence
    ) -> tuple[Tensor, Tensor]:
        """``residual = residual + x; attention(norm(residual))``: ``(y, residual)``, each [B, T, C].

        The normed activations are recomputed in the backward; with ``recompute`` all but the output projection.
        """
        if self.recompute and torch.is_grad_enabled():
            y, residual = checkpoint(
                self._add_norm, norm, x, residual, sequence,
                use_reentrant=False, preserve_rng_state=self.training and self.dropout > 0,
            )  # fmt: skip
            return y, residual
        return self._add_norm(norm, x, residual, sequence)

    def _add_norm(
        self, norm: LigerRMSNorm, x: Tensor | None, residual: Tensor, sequence: Sequence
    ) -> tuple[Tensor, Tensor]:
        qkv, residual = add_norm_linear(norm, self.qkv_proj, x, residual)
        return self._attend(qkv, sequence), residual

    def _attend(self, qkv: Tensor, sequence: Sequence) -> Tensor:
        split = rope_qkv if self.rope_kernel else rope_qkv_reference
        q, k, v = split(qkv, sequence.cos, sequence.sin, self.num_heads, self.num_kv_heads, self.head_dim)
        if sequence.cache is not None:
            k, v = sequence.cache.extend(self.layer, k, v)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, sequence, scale=self.scale, dropout=dropout)
        y: Tensor = self.o_proj(out.flatten(2))  # [B, T, H · D]
        return y
