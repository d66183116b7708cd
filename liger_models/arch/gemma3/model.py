"""Gemma 3 with images (4B, 12B, 27B) and MedGemma: model_type ``gemma3``.

The language model is ``gemma3_text``, except that the tokens of an image attend to each other in both directions. The
vision tower is SigLIP: all images have one size, positions are learned, blocks are pre-norm with LayerNorm and biases,
and there is no rotary embedding. The tower's output is averaged over squares of patches, normalized and projected.

Source: https://arxiv.org/abs/2503.19786, https://arxiv.org/abs/2303.15343, transformers ``models/gemma3``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.arch.gemma3 import text
from liger_models.arch.gemma3.processor import Gemma3Processor
from liger_models.arch.gemma3.text import Gemma3Decoder, Gemma3TextConfig
from liger_models.arch.registry import add_family
from liger_models.base.vision_language import VisionLanguageModel, check_input_ids, check_placeholders, repeated_items
from liger_models.common.errors import check_tensors
from liger_models.convert.config_map import of_text
from liger_models.convert.format import CheckpointFormat
from liger_models.convert.weight_map import Rearrange, WeightMap, decoder_map, qkv_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.decoder import CausalLMOutput, take_cu_seqlens
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm, zero_centered_norm
from liger_models.layers.patches import count_torn, ends_of_runs
from liger_models.layers.vision import VisionBlock


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: ``hidden_size`` is not a multiple of the number of heads, ``image_size`` is not a multiple of
            ``patch_size``, or the activation, attention dropout or head is not supported.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    vision_use_head: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"Gemma3VisionConfig: hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}). Check config.json."
            )
        if self.vision_use_head:
            raise ValueError(
                "Gemma3VisionConfig: vision_use_head must be False, got True. The tower has no head, nor has any "
                "release."
            )
        if self.image_size % self.patch_size != 0:
            raise ValueError(
                f"Gemma3VisionConfig: image_size ({self.image_size}) must be a multiple of patch_size "
                f"({self.patch_size}). Check config.json."
            )
        if self.hidden_act not in ("quick_gelu", "gelu", "gelu_pytorch_tanh") or self.attention_dropout != 0.0:
            raise ValueError(
                "Gemma3VisionConfig: hidden_act must be 'quick_gelu', 'gelu' or 'gelu_pytorch_tanh' and "
                f"attention_dropout 0, got {self.hidden_act!r} and {self.attention_dropout}. Nothing else is "
                "implemented."
            )

    @property
    def patches_per_side(self) -> int:
        """Number of rows and columns of patches."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma3TextConfig):
    """Sizes and constants of a Gemma 3 model; ``vision_config`` holds the sizes of the tower."""

    image_token_index: int = 262144
    boi_token_index: int = 255999
    eoi_token_index: int = 256000
    mm_tokens_per_image: int = 256
    vision_config: Gemma3VisionConfig = field(default_factory=Gemma3VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        side, patches = self.tokens_per_side, self.vision_config.patches_per_side
        if not (side**2 == self.mm_tokens_per_image and side > 0 and patches % side == 0):
            raise ValueError(
                f"Gemma3Config: mm_tokens_per_image ({self.mm_tokens_per_image}) must be the square of a number that "
                f"divides the number of rows of patches ({patches}). Check config.json."
            )

    @property
    def tokens_per_side(self) -> int:
        """Number of rows and columns of image tokens."""
        return int(self.mm_tokens_per_image**0.5)


class Gemma3Tower(nn.Module):
    """The vision tower, which turns images into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts run on fused kernels.
    """

    def __init__(self, config: Gemma3Config, kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        self.patch, self.side, C = vision.patch_size, config.tokens_per_side, vision.hidden_size
        layer_norm = partial(LigerLayerNorm, C, vision.layer_norm_eps, kernel=kernels.layer_norm)
        # Patches are flattened first, so the checkpoint's convolution becomes a linear layer.
        self.patch_embed = nn.Linear(vision.num_channels * vision.patch_size**2, C)
        self.pos_embed = nn.Embedding(vision.patches_per_side**2, C)
        self.blocks = nn.ModuleList(
            VisionBlock(
                C, vision.num_attention_heads, layer_norm,
                LigerMLP(C, vision.intermediate_size, act=ACTIVATIONS[vision.hidden_act], kernel=kernels.swiglu),
                kernels, rotary=None,
            )
            for _ in range(vision.num_hidden_layers)
        )  # fmt: skip
        self.post_layernorm = layer_norm()
        # The projector from tower to decoder uses the decoder's norm with the tower's eps.
        self.soft_emb_norm = zero_centered_norm(config, kernels)(C, eps=vision.layer_norm_eps)
        self.projection = nn.Linear(C, config.hidden_size, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn pixels [n, channels, image_size, image_size] into image tokens [n · tokens, C]."""
        # [n, patches, channels · side²]
        patches = rearrange(pixels, "n c (h y) (w x) -> n (h w) (c y x)", y=self.patch, x=self.patch)
        embedded = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x, residual = None, embedded + local(self.pos_embed.weight)
        # All patches of an image attend to each other, without rotation.
        layout = BatchLayout.bidirectional(torch.arange(residual.shape[1], device=residual.device)[None], {}, None)
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        seen = self.post_layernorm.add(x, residual)[0]
        # Each image token is the mean over a square of patches: [n, tokens, patches per token, C].
        side = int(seen.shape[1] ** 0.5)
        squares = rearrange(
            seen, "n (h y w x) c -> n (h w) (y x) c", h=self.side, w=self.side, y=side // self.side, x=side // self.side
        )
        tokens: Tensor = self.projection(self.soft_emb_norm(squares.mean(2)))
        return tokens.flatten(0, 1)


class LigerGemma3(VisionLanguageModel, Gemma3Decoder):
    """Gemma 3 with images and its language-model head."""

    config_class = Gemma3Config
    tower_class = Gemma3Tower
    processor_class = Gemma3Processor
    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "token_type_ids")

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """For text with or without images, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [images, channels, height, width]; the images are in the order of their placeholders.
            token_type_ids: ignored; accepted because the processor of transformers returns it.
            position_ids, attention_mask, cu_seqlens, inputs_embeds, cache, options: as in `Decoder.forward`. If there
                are images, ``input_ids`` is required.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of image tokens; otherwise as in
                `Decoder.forward`.
        """
        cu_seqlens = take_cu_seqlens(cu_seqlens, options)
        # Without input_ids there are no images.
        if input_ids is None or inputs_embeds is not None:
            if pixel_values is not None:
                raise ValueError("forward: pixels need input_ids, which say where the images are.")
            return super().forward(
                input_ids, inputs_embeds=inputs_embeds, position_ids=position_ids, attention_mask=attention_mask,
                cu_seqlens=cu_seqlens, cache=cache, **options,
            )  # fmt: skip
        check_input_ids(input_ids)
        check_tensors(pixel_values=pixel_values)
        vision, per_image = self.config.vision_config, self.config.mm_tokens_per_image
        size = (vision.num_channels, vision.image_size, vision.image_size)
        if pixel_values is not None and (pixel_values.dim() != 4 or tuple(pixel_values.shape[1:]) != size):
            raise ValueError(
                f"forward: pixel_values must be [images, {', '.join(map(str, size))}], got {list(pixel_values.shape)}."
            )
        here = input_ids == self.config.image_token_index
        decoding = cache is not None and cache.length > 0 and pixel_values is None
        if not decoding and not torch.compiler.is_compiling():
            images = None if pixel_values is None else len(pixel_values)
            sizes = input_ids.new_full((images or 0,), per_image)
            # Both numbers are read with one synchronization.
            tokens, torn = torch.stack([here.sum(), count_torn(here, sizes, sizes, cu_seqlens)]).tolist()
            check_placeholders(tokens, (images or 0) * per_image, torn, images, f"{per_image} ")

        # Image tokens replace the embeddings of the placeholders, whose id may lie outside the embedding.
        outside = self.config.image_token_index >= self.config.vocab_size
        embeds = self.embed_tokens(input_ids.masked_fill(here, 0) if outside else input_ids)
        if pixel_values is None and self.tower_is_sharded and not decoding:
            # All ranks must gather the weights of a sharded tower together, including ranks that have no images.
            unused = self.visual(embeds.new_zeros(1, *size))
            embeds = embeds + 0 * unused.sum().to(embeds.dtype)
        # The tokens of an image attend to each other, so each of them attends up to the end of its image.
        visible_until = None
        if pixel_values is not None:
            embeds = embeds.masked_scatter(here[..., None], self.visual(pixel_values).to(embeds.dtype))
            visible_until = ends_of_runs(here)
        layout = self.layout(
            (embeds.shape[0], embeds.shape[1]), embeds, position_ids=position_ids, attention_mask=attention_mask,
            cu_seqlens=cu_seqlens, cache=cache, visible_until=visible_until,
        )  # fmt: skip
        return self.run(embeds, layout, **options)

    def image_features(self, pixel_values: Tensor) -> Tensor:
        """Return the image tokens [images, tokens, C] of ``pixel_values``, which has the shape given in `forward`."""
        tokens: Tensor = self.visual(pixel_values).unflatten(0, (len(pixel_values), -1))
        return tokens

    def repeat_prompts(self, input_ids: Tensor, inputs: dict[str, Any], times: int) -> dict[str, Any]:
        """See `VisionLanguageModel.repeat_prompts`; the images are in the order of their placeholders."""
        repeated = super().repeat_prompts(input_ids, inputs, times)
        if isinstance(inputs.get("pixel_values"), Tensor):
            counts = (input_ids == self.config.image_token_index).sum(1) // self.config.mm_tokens_per_image
            repeated["pixel_values"] = inputs["pixel_values"][repeated_items(counts.tolist(), times)]
        return repeated


IGNORED_KEYS = (
    *text.IGNORED_KEYS,
    "final_logit_softcapping",  # not read by transformers in the model with images
)
TOP = (
    "image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "vision_config",
    "tie_word_embeddings", "eos_token_id", "initializer_range",
)  # fmt: skip
"""Keys of config.json that do not belong to the language model."""

IMAGE_TOKENS = ("image_token_id", "boi_token_id", "eoi_token_id")


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top, and rename ``hidden_activation`` to ``hidden_act``.

    ``image_token_id`` is also accepted for ``image_token_index``, ``boi_token_id`` for ``boi_token_index``, and
    ``eoi_token_id`` for ``eoi_token_index``.
    """
    hf = {f"{key.removesuffix('_id')}_index" if key in IMAGE_TOKENS else key: value for key, value in hf.items()}
    return of_text(Gemma3Config, hf, text.from_json(hf.get("text_config") or {}), TOP)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `from_json`: move the language model's keys back into ``text_config``."""
    text_keys = {key: value for key, value in keys.items() if key not in TOP}
    return {key: keys[key] for key in TOP if key in keys} | {"text_config": text.to_json(text_keys)}


def weight_map(config: Gemma3Config) -> WeightMap:
    """Maps the parameters of Gemma 3 to the tensors of a Hugging Face checkpoint."""
    return _map(config, "language_model.model", "vision_tower.vision_model", "", "language_model.lm_head.weight")


def other_maps(config: Gemma3Config) -> list[WeightMap]:
    """The layouts of new models in transformers 5, of its modules in memory, and of transformers 4.52 to 4.57."""
    return [
        _map(config, "language_model.model", "vision_tower", "", "language_model.lm_head.weight"),
        _map(config, "model.language_model", "model.vision_tower", "model.", "lm_head.weight"),
        _map(config, "model.language_model", "model.vision_tower.vision_model", "model.", "lm_head.weight"),
    ]


def _map(config: Gemma3Config, prefix: str, visual: str, projector: str, head: str) -> WeightMap:
    vision, block = config.vision_config, f"{visual}.encoder.layers.{{b}}"
    kinds, heads = ("weight", "bias"), vision.num_attention_heads
    # The tower has as many key heads as query heads.
    attention = {
        f"visual.blocks.{{b}}.attn.qkv_proj.{k}": qkv_rows(
            *(f"{block}.self_attn.{part}_proj.{k}" for part in "qkv"),
            heads=heads,
            kv_heads=heads,
            head_dim=vision.hidden_size // heads,
        )
        for k in kinds
    }
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=text.NORMS,
        prefix=prefix,
        head=head,
        also={
            "visual.patch_embed.weight": Rearrange(
                "c p y x -> c (p y x)",
                f"{visual}.embeddings.patch_embedding.weight",
                p=vision.num_channels,
                y=vision.patch_size,
            ),
            "visual.patch_embed.bias": f"{visual}.embeddings.patch_embedding.bias",
            "visual.pos_embed.weight": f"{visual}.embeddings.position_embedding.weight",
            **attention,
            # Norms and MLPs of the blocks have other names in the checkpoint.
            **{f"visual.blocks.{{b}}.norm{n}.{k}": f"{block}.layer_norm{n}.{k}" for n in (1, 2) for k in kinds},
            **{f"visual.blocks.{{b}}.attn.o_proj.{k}": f"{block}.self_attn.out_proj.{k}" for k in kinds},
            **{f"visual.blocks.{{b}}.mlp.{fc}.{k}": f"{block}.mlp.{fc}.{k}" for fc in ("fc1", "fc2") for k in kinds},
            **{f"visual.post_layernorm.{k}": f"{visual}.post_layernorm.{k}" for k in kinds},
            # The projection is stored as a parameter [in, out], not as a linear layer.
            "visual.soft_emb_norm.weight": f"{projector}multi_modal_projector.mm_soft_emb_norm.weight",
            "visual.projection.weight": Rearrange(
                "i o -> o i", f"{projector}multi_modal_projector.mm_input_projection_weight"
            ),
        },
        over={"b": range(vision.num_hidden_layers)},
    )


add_family(
    LigerGemma3,
    CheckpointFormat(
        model_type="gemma3",
        hf_class="Gemma3ForConditionalGeneration",
        weight_map=weight_map,
        other_maps=other_maps,
        from_json=from_json,
        to_json=to_json,
        ignored_keys=IGNORED_KEYS,
    ),
)
