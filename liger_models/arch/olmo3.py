"""OLMo 3: model_type ``olmo3``.

Differs from Llama: attention and the MLP have a norm after them instead of before them. Queries and keys are normalized
before the rotation, with one norm over all heads of a token. Norms multiply by their weight in fp32. Three of every
four layers attend only to the last ``sliding_window`` tokens and do not use ``rope_scaling``.

Source: https://arxiv.org/abs/2512.13961, transformers ``models/olmo3``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import flat_rope
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig, check_layer_types
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm, fp32_norm
from liger_models.layers.qk_norm_attention import LigerQKNormAttention
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(RMSNormDecoderConfig):
    """Sizes and constants of an OLMo 3 model.

    ``rope_theta`` and ``rope_scaling`` apply to the layers without a window. ``rope_local_base_freq`` is the rotary
    base of the layers with a window; the name comes from Gemma 3.
    """

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_local_base_freq: float = 500_000.0
    attention_bias: bool = False
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 50279
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types("Olmo3Config", self.layer_types, self.num_hidden_layers)

    def layer_type(self, layer: int) -> str:
        """Type of a layer and name of its rotary embedding: "sliding_attention" or "full_attention"."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if (layer + 1) % 4 else "full_attention"


class Olmo3Block(nn.Module):
    """``h += norm(attention(h)); h += norm(mlp(h))``; only the sums h are saved for the backward."""

    def __init__(self, config: Olmo3Config, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = fp32_norm(config, kernels)
        layer_type = config.layer_type(layer)
        # The norms of q and k span all heads. There is no norm before a branch.
        self.self_attn = LigerQKNormAttention.from_config(
            config,
            layer,
            kernels,
            norm=norm,
            whole_projection=True,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            window=config.sliding_window if layer_type == "sliding_attention" else None,
            rotary=layer_type,
        )
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return the next ``(x, residual)``."""
        # The output of a branch is normalized before it is added to the residual stream.
        x, residual = self.self_attn.add_norm(None, x, residual, layout)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(None, x, residual)
        return self.post_feedforward_layernorm(x), residual


class LigerOlmo3(CausalLM):
    """OLMo 3 with its language-model head."""

    config_class = Olmo3Config
    block_class = Olmo3Block

    def build_norm(self, config: Olmo3Config) -> LigerRMSNorm:
        """A norm that multiplies by its weight in fp32."""
        return fp32_norm(config, self.kernels)(config.hidden_size)

    def build_rotary(self, config: Olmo3Config) -> dict[str, nn.Module]:
        """One rotary embedding per layer type. The base of layers with a window is ``rope_local_base_freq``."""
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        return {"full_attention": super().build_rotary(config)["default"], "sliding_attention": sliding}


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``rope_parameters`` per layer type, as written by transformers 5.

    Only ``rope_parameters`` contains the rotary base of the layers with a window.
    """
    values = {key: value for key, value in hf.items() if key != "rope_local_base_freq"}
    return flat_rope(values, Olmo3Config.rope_theta)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Also write ``rope_parameters`` if the rotary base of layers with a window is not that of the released models.

    transformers 5 reads this key; it applies the older ``rope_theta`` only to the layers without a window. transformers
    4 has one base for all layers.
    """
    out = dict(keys)
    # Released files have one base for all layers, which every version of transformers reads.
    local = out.pop("rope_local_base_freq")
    if local != Olmo3Config.rope_local_base_freq:
        full = {"rope_type": "default", **(keys["rope_scaling"] or {}), "rope_theta": keys["rope_theta"]}
        sliding = {"rope_type": "default", "rope_theta": local}
        out["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    return out


def weight_map(config: Olmo3Config) -> WeightMap:
    """Maps the parameters of OLMo 3 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"),
    )


add_family(
    LigerOlmo3,
    model_type="olmo3",
    hf_class="Olmo3ForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
)
