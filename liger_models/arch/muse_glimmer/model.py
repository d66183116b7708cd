"""Muse Glimmer (30B) with images and videos: model_type ``muse_glimmer``.

The language model differs from Llama: each branch has a norm before it and a norm after it. The norms of the branches
multiply by 1 + weight. The norms after the branches have a separate epsilon. Each head of q and k is normalized without
a weight, and q is multiplied by ``qk_scale_factor``. This package applies ``qk_scale_factor`` to the scale of the
attention scores instead, with the same effect. The output of attention is multiplied by the sigmoid of a gate before
the output projection. Every fourth layer, counted back from the last layer, attends to all tokens and does not use
RoPE. The other layers attend only to the last ``sliding_window`` tokens. Token embeddings are normalized without a
weight; ``inputs_embeds`` that the caller passes are not normalized. Logits are multiplied by ``output_multiplier`` and
capped.

The vision tower has LayerNorms, biases, learned positions that are interpolated to the grid of the image, and RoPE by
column and row. Most of its layers attend within windows of patches. Image tokens are ordinary tokens of the text:
attention is causal, and positions have one dimension.

Source: transformers ``models/muse_glimmer``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from liger_models.arch.muse_glimmer.processor import MuseGlimmerProcessor
from liger_models.arch.muse_glimmer.tower import MuseGlimmerTower, MuseGlimmerVisionConfig
from liger_models.arch.registry import add_family
from liger_models.base.grid_images import GridImageModel
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import Cat, Expression, Rearrange, WeightMap, decoder_map, tower_rows
from liger_models.kernels.norm.rms_norm import rms_norm, rms_norm_reference
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import SandwichNormBlock
from liger_models.layers.config import (
    PLAIN_ACTIVATIONS,
    RMSNormDecoderConfig,
    check_values,
    is_sliding,
)
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.norm import LigerRMSNorm, fp32_norm, zero_centered_norm
from liger_models.layers.qk_norm_attention import LigerGatedAttention


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Muse Glimmer model; ``vision_config`` holds the sizes of the vision tower.

    In config.json, ``hidden_act`` is called ``hidden_activation``. ``layer_rope_theta`` has an entry for each layer.
    The entry is 0 if the layer does not use RoPE. All other layers have the rotary base ``rope_theta``.

    Raises:
        ValueError: the sizes of the tower and the adapter do not fit together, or ``layer_rope_theta`` does not have a
            number for each layer.
    """

    vocab_size: int = 202048
    hidden_size: int = 6656
    intermediate_size: int = 19968
    num_hidden_layers: int = 52
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    attention_bias: bool = False
    sliding_window: int | None = 2048
    layer_types: list[str] | None = None
    layer_rope_theta: list[float] | None = None
    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    final_logit_softcapping: float = 20.0
    bos_token_id: int | None = 200000
    eos_token_id: int | list[int] | None = 200001
    image_token_id: int = 200092
    video_token_id: int = 200091
    out_hidden_size: int = 6144
    projector_hidden_size: int = 4096
    projector_hidden_act: str = "gelu"
    vision_config: MuseGlimmerVisionConfig = field(default_factory=MuseGlimmerVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        name, vision, thetas = type(self).__name__, self.vision_config, self.layer_rope_theta
        check_values(self, attention_bias=(False,), projector_hidden_act=PLAIN_ACTIVATIONS)
        if thetas is not None and len(thetas) != self.num_hidden_layers:
            raise ValueError(
                f"{name}: layer_rope_theta must hold {self.num_hidden_layers} numbers, got {len(thetas)}. Check "
                "config.json."
            )
        if self.out_hidden_size != vision.hidden_size * vision.merge_size**2:
            raise ValueError(
                f"{name}: out_hidden_size ({self.out_hidden_size}) must be vision_config.hidden_size · merge_size² "
                f"({vision.hidden_size} · {vision.merge_size}²). Check config.json."
            )

    def _is_full_by_default(self, layer: int) -> bool:
        return (self.num_hidden_layers - 1 - layer) % 4 == 0

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        sliding = is_sliding(layer, self.layer_types, default=not self._is_full_by_default(layer))
        return self.sliding_window if sliding else None

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates q and k."""
        if self.layer_rope_theta is None:
            return not self._is_full_by_default(layer)
        return self.layer_rope_theta[layer] != 0


class MuseGlimmerEmbedding(LigerEmbedding):
    """A token embedding that normalizes the rows after the lookup, without a weight.

    Args:
        config: sizes and constants of the model.
        kernel: False runs plain PyTorch instead of a kernel.
    """

    is_lookup = False

    def __init__(self, config: MuseGlimmerConfig, kernel: bool) -> None:
        super().__init__(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.eps, self.kernel = config.rms_norm_eps, kernel

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map input_ids [...] int64 or int32 to embeddings [..., C]."""
        x = super().forward(input_ids)
        return (rms_norm if self.kernel else rms_norm_reference)(x, x.new_ones(self.embedding_dim), self.eps)


class MuseGlimmerBlock(SandwichNormBlock):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``; each addition is fused with the next norm."""

    norm_factory = staticmethod(zero_centered_norm)
    post_attention_layernorm: LigerRMSNorm
    post_feedforward_layernorm: LigerRMSNorm

    def __init__(self, config: MuseGlimmerConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__(config, layer, kernels)
        # The norms after the branches have their own eps.
        self.post_attention_layernorm.eps = self.post_feedforward_layernorm.eps = config.post_norm_eps

    def build_attention(self, config: MuseGlimmerConfig, layer: int, kernels: KernelOptions) -> LigerGatedAttention:
        return LigerGatedAttention.from_config(
            config,
            layer,
            kernels,
            norm=partial(LigerRMSNorm, eps=config.rms_norm_eps, elementwise_affine=False, kernel=kernels.rms_norm),
            scale=config.qk_scale_factor * config.head_size**-0.5,
            window=config.window(layer),
            rotary="default" if config.rotates(layer) else None,
        )


class LigerMuseGlimmer(GridImageModel):
    """Muse Glimmer with its language-model head."""

    config_class = MuseGlimmerConfig
    block_class = MuseGlimmerBlock
    tower_class = MuseGlimmerTower
    processor_class = MuseGlimmerProcessor
    frames_apart = True

    def build_embedding(self, config: MuseGlimmerConfig) -> LigerEmbedding:
        """An embedding with normalized rows."""
        return MuseGlimmerEmbedding(config, self.kernels.rms_norm)

    def build_norm(self, config: MuseGlimmerConfig) -> LigerRMSNorm:
        """A norm that multiplies by its weight, unlike the norms of the blocks."""
        return fp32_norm(config, self.kernels)(config.hidden_size)

    def build_head(self, config: MuseGlimmerConfig) -> LigerLMHead:
        """A head with scaled and capped logits."""
        return LigerLMHead(
            config.hidden_size, config.vocab_size,
            logit_scale=config.output_multiplier, softcap=config.final_logit_softcapping, kernels=self.kernels,
        )  # fmt: skip

    def ids_to_embed(self, input_ids: Tensor) -> Tensor:
        """Return the ids, with every placeholder replaced by 0, even placeholders that the model has generated."""
        media = (input_ids == self.config.image_token_id) | (input_ids == self.config.video_token_id)
        return input_ids.masked_fill(media, 0)


IGNORED_KEYS = (
    "max_position_embeddings",  # a key of the tower, which has no such limit
)
TOP = (
    "image_token_id", "video_token_id", "out_hidden_size", "projector_hidden_size", "projector_hidden_act",
    "vision_config", "tie_word_embeddings",
)  # fmt: skip
"""Keys of config.json that do not belong to the language model."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level, rename ``hidden_activation``, and read the tower's rope keys.

    Raises:
        ValueError: the tower's rope parameters are not supported.
    """
    keys = of_text(MuseGlimmerConfig, hf, hf.get("text_config") or {}, TOP)
    keys["hidden_act"] = keys.pop("hidden_activation", None)
    vision = dict(hf.get("vision_config") or {})
    axial = dict(vision.pop("rope_parameters", None) or {})
    rope_type = axial.pop("rope_type", "axial")
    if rope_type not in ("axial", "default"):
        raise ValueError(f"config.json: the tower's rope_type must be 'axial' or 'default', got {rope_type!r}.")
    return keys | {"vision_config": vision | axial}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    vision = dict(keys["vision_config"])
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
    text = {key: value for key, value in keys.items() if key not in TOP}
    text["hidden_activation"] = text.pop("hidden_act")
    return {key: keys[key] for key in TOP} | {"vision_config": vision, "text_config": text}


NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Names of a block's norms, which are the same in this package and in checkpoints."""


def weight_map(config: MuseGlimmerConfig) -> WeightMap:
    """Maps the parameters of Muse Glimmer to the tensors of a Hugging Face checkpoint."""
    vision, text, visual = config.vision_config, "model.language_model", "model.vision_tower"
    block, heads, kinds = f"{visual}.layers.{{b}}", vision.num_attention_heads, ("weight", "bias")
    tower: dict[str, Expression | str] = {
        "visual.patch_embed.weight": f"{visual}.patch_embedder.patch_embedding.weight",
        "visual.pos_embed.weight": f"{visual}.patch_embedder.position_embedding_table.weight",
        "visual.adapter.fc1.weight": "model.vision_adapter.fc1.weight",
        "visual.adapter.fc2.weight": "model.vision_adapter.fc2.weight",
        "visual.projection.weight": "model.vision_projection.weight",
    }
    for kind in kinds:
        tower |= {f"visual.{norm}.{kind}": f"{visual}.{norm}.{kind}" for norm in ("ln_pre", "ln_post")}
        parts = ("norm1", "norm2", "mlp.fc1", "mlp.fc2")
        tower |= {f"visual.blocks.{{b}}.{part}.{kind}": f"{block}.{part}.{kind}" for part in parts}
        tower[f"visual.blocks.{{b}}.attn.o_proj.{kind}"] = f"{block}.attn.proj.{kind}"
        rows = tower_rows(f"{block}.attn", kind, heads, vision.hidden_size)
        tower[f"visual.blocks.{{b}}.attn.qkv_proj.{kind}"] = rows
    return decoder_map(
        config,
        norms=NORMS,
        instead={"self_attn.qkv_proj.weight": _gated_qkv_rows(config, f"{text}.layers.{{i}}.self_attn")},
        also=tower,
        over={"b": range(vision.num_hidden_layers)},
        prefix=text,
    )


def _gated_qkv_rows(config: MuseGlimmerConfig, theirs: str) -> Expression:
    """Return the rows of the packed projection of `LigerGatedAttention`: for each KV head, the queries, their gates,
    the key and the value."""
    G, D = config.kv_heads, config.head_size
    names = [f"{theirs}.{part}_proj.weight" for part in ("q", "gate", "k", "v")]
    queries = config.num_attention_heads // G * D
    groups = [Rearrange("(g n) ... -> g n ...", name, g=G) for name in names]
    return Rearrange("g n ... -> (g n) ...", Cat(groups, dim=1, sizes=[queries, queries, D, D]), g=G)


add_family(
    LigerMuseGlimmer,
    model_type="muse_glimmer",
    hf_class="MuseGlimmerForConditionalGeneration",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
