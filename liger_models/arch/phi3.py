"""Phi-3 mini and medium, Phi-3.5-mini, Phi-4, Phi-4-mini: model_type ``phi3``.

Differs from Llama: if ``sliding_window`` is set (Phi-3-mini-4k), all layers attend only to the last ``sliding_window``
tokens. The long-context models use LongRoPE, which has two sets of divisors for the rotary frequencies: one for
sequences of up to ``original_max_position_embeddings`` tokens, and one for longer sequences. Phi-4-mini rotates only
the first dimensions of each head; ``partial_rotary_factor`` is the rotated fraction. There are no biases. In
checkpoints, one tensor holds the q, k and v projections, and another holds the gate and up projections.

Source: https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2503.01743, https://arxiv.org/abs/2402.13753 (LongRoPE),
transformers ``models/phi3``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map, fused_gate_up_rows, fused_qkv_rows
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.rope import LongRopeScaling


@dataclass(frozen=True, kw_only=True)
class Phi3Config(RMSNormDecoderConfig):
    """Sizes and constants of a Phi-3 model."""

    rope_aliases: ClassVar[Mapping[str, str]] = {"su": "longrope", "yarn": "longrope"}
    original_length: ClassVar[int | None] = 4096

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    resid_pdrop: float = 0.0
    eos_token_id: int | list[int] | None = 32000
    pad_token_id: int | None = 32000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, LongRopeScaling):
            raise ValueError(
                f"Phi3Config: rope_scaling must be LongRopeScaling or None, got {self.rope_scaling}. Phi-3 has no "
                "other."
            )
        if self.resid_pdrop != 0:
            raise ValueError(
                f"Phi3Config: resid_pdrop must be 0, got {self.resid_pdrop}. Residual dropout is not implemented."
            )

    @property
    def rotary_width(self) -> int:
        """Number of rotated dimensions of a head."""
        return int(self.head_size * (self.partial_rotary_factor or 1))


class Phi3Block(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: Phi3Config, layer: int) -> dict[str, Any]:
        return {"window": config.sliding_window}


class LigerPhi3(CausalLM):
    """Phi-3 with its language-model head."""

    config_class = Phi3Config
    block_class = Phi3Block


# These keys are read by the code that came with the first releases, but not by transformers.
IGNORED_KEYS = (
    "attention_bias",
    "embd_pdrop",
    "full_attn_mod",
    "interpolate_factor",
    "lm_head_bias",
    "mlp_bias",
)


def weight_map(config: Phi3Config) -> WeightMap:
    """Maps the parameters of Phi-3 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        # The checkpoint stores q, k and v one after the other in one matrix, and gate and up in another matrix.
        instead={
            "self_attn.qkv_proj.weight": fused_qkv_rows(
                "model.layers.{i}.self_attn.qkv_proj.weight",
                heads=config.num_attention_heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_size,
            ),
            "mlp.gate_up_proj.weight": fused_gate_up_rows("model.layers.{i}.mlp.gate_up_proj.weight"),
        },
    )


add_family(LigerPhi3, model_type="phi3", hf_class="Phi3ForCausalLM", weight_map=weight_map, ignored_keys=IGNORED_KEYS)
