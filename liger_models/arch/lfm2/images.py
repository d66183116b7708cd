"""LFM2-VL and LFM2.5-VL (450M to 3B): model_type ``lfm2_vl``.

The language model is LFM2. A large image is cut into tiles, and a small copy of the whole image is added as one more
tile. A small image is a single tile, which may have any size. The vision tower is SigLIP 2, whose learned positions are
resampled to each tile. The features of each square of ``downsample_factor`` x ``downsample_factor`` patches are
concatenated and normalized, and a plain MLP projects them to one image token.

Source: https://arxiv.org/abs/2511.23404, transformers ``models/lfm2_vl``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_models.arch._towers.siglip import siglip_entries
from liger_models.arch.lfm2 import block, dense
from liger_models.arch.lfm2.block import Lfm2Model, lfm2_map
from liger_models.arch.lfm2.dense import Lfm2DenseBlock, mlp_entries
from liger_models.arch.lfm2.processor import Lfm2VlProcessor
from liger_models.arch.lfm2.tower import Lfm2VlConfig, Lfm2VlTower
from liger_models.arch.registry import add_family
from liger_models.base.image_tokens import ImageTokenModel
from liger_models.base.vision_language import check_placeholders
from liger_models.common.errors import check_integers, check_tensors, is_traced
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import WeightMap
from liger_models.layers.decoder import CausalLMOutput
from liger_models.layers.patches import count_torn


class LigerLfm2Vl(Lfm2Model, ImageTokenModel):
    """LFM2-VL with its language-model head."""

    config_class = Lfm2VlConfig
    block_class = Lfm2DenseBlock
    tower_class = Lfm2VlTower
    processor_class = Lfm2VlProcessor
    placeholder_key = "image_token_id"
    image_inputs = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "spatial_shapes", "pixel_attention_mask")

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """For text with or without images, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [tiles, P, channels · patch²], the patches of each tile row by row, and then padding. The
                tiles are in the order of their placeholders.
            spatial_shapes: [tiles, 2] int64, the number of rows and columns of patches of each tile.
            pixel_attention_mask: [tiles, P], which is 1 on patches and 0 on padding. The mask is used only to check
                ``spatial_shapes``. Default: no check.
            options: as in `Decoder.forward`; images need ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of image tokens, or the shapes do not fit
                the patches; otherwise as in `Decoder.forward`.
        """
        images = self.images_of(pixel_values, spatial_shapes, pixel_attention_mask)
        return self.run_with_images(input_ids, images, **options)

    def images_of(
        self, pixels: Tensor | None, shapes: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, ...] | None:
        """Return the arguments of the tower, or None if there are no images.

        Raises:
            TypeError, ValueError: the tensors do not have the types or shapes that `forward` requires.
        """
        check_tensors(pixel_values=pixels, spatial_shapes=shapes, pixel_attention_mask=mask)
        if pixels is None:
            if shapes is not None and len(shapes):
                raise ValueError(f"forward: spatial_shapes needs pixel_values, got {len(shapes)} shapes without them.")
            return None
        vision, merge = self.config.vision_config, self.config.downsample_factor
        width = vision.num_channels * vision.patch_size**2
        if pixels.dim() != 3 or pixels.shape[2] != width:
            raise ValueError(
                f"forward: pixel_values must be [tiles, patches, {width}], got {list(pixels.shape)}. Pass what the "
                "processor returns."
            )
        n, P, _ = pixels.shape
        if shapes is None:
            raise ValueError("forward: pixel_values needs spatial_shapes, got none. Pass what the processor returns.")
        check_integers(spatial_shapes=shapes)
        if tuple(shapes.shape) != (n, 2):
            raise ValueError(f"forward: spatial_shapes must be [{n}, 2], got {list(shapes.shape)}.")
        if mask is not None and tuple(mask.shape) != (n, P):
            raise ValueError(f"forward: pixel_attention_mask must be [{n}, {P}], got {list(mask.shape)}.")
        shapes = shapes.to(pixels.device)
        if not is_traced():
            wrong = (shapes < merge).any(1) | (shapes % merge != 0).any(1) | (shapes.prod(1) > P)
            if mask is not None:
                counted = torch.arange(P, device=pixels.device) < shapes.prod(1)[:, None]
                wrong = wrong | (counted != (mask.to(pixels.device) != 0)).any(1)
            if bool(wrong.any()):
                raise ValueError(
                    f"forward: spatial_shapes must be positive multiples of {merge} with at most {P} patches, as many "
                    f"as pixel_attention_mask has ones at the beginning, got {shapes.tolist()}. Pass what the "
                    "processor returns."
                )
        return (pixels, shapes) if n else None

    def check_images(
        self, input_ids: Tensor, places: Tensor, images: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> None:
        """See `ImageTokenModel.check_images`. In addition, the tokens of a tile must be contiguous."""
        sizes = input_ids.new_zeros(0) if images is None else self.token_counts(images).to(input_ids)
        # Copy all numbers together, so that the host waits for the device only once.
        numbers = torch.stack([places.sum(), sizes.sum(), count_torn(places, sizes, sizes, cu_seqlens)])
        tokens, expected, torn = map(int, numbers.tolist())
        check_placeholders(tokens, expected, torn, None if images is None else len(sizes))

    def blank_image(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """See `ImageTokenModel.blank_image`."""
        merge, width = self.config.downsample_factor, self.visual.patch_embed.in_features
        return embeds.new_zeros(1, merge**2, width), torch.tensor([[merge, merge]], device=embeds.device)

    def token_counts(self, images: tuple[Tensor, ...]) -> Tensor:
        """See `ImageTokenModel.token_counts`."""
        counts: Tensor = images[1].prod(1) // self.config.downsample_factor**2
        return counts

    def image_features(
        self, pixel_values: Tensor, spatial_shapes: Tensor, pixel_attention_mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the image tokens [tokens, C] of each tile. The arguments are the same as in `forward`."""
        images = self.images_of(pixel_values, spatial_shapes, pixel_attention_mask)
        if images is None:
            return ()
        parts: tuple[Tensor, ...] = self.visual(*images).split(self.token_counts(images).tolist())
        return parts


IGNORED_KEYS = (
    *block.IGNORED_KEYS,
    # Settings of the processor, which reads them from its own files.
    "do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches", "max_pixels_tolerance",
    "max_tiles", "min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail",
    # Keys of released files that transformers does not read.
    "image_size", "vision_feature_layer", "vision_feature_select_strategy",
)  # fmt: skip
TOP = (
    "image_token_id", "projector_hidden_act", "projector_hidden_size", "projector_bias", "projector_use_layernorm",
    "downsample_factor", "tie_word_embeddings", "vision_config",
)  # fmt: skip
"""Keys of config.json that do not belong to the language model."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level.

    Raises:
        ValueError: the language model is not LFM2.
    """
    # As in transformers, image_token_id overrides image_token_index, and tie_embedding overrides tie_word_embeddings.
    hf = dict(hf)
    if "image_token_index" in hf:
        hf.setdefault("image_token_id", hf.pop("image_token_index"))
    if "tie_embedding" in hf:
        hf["tie_word_embeddings"] = hf.pop("tie_embedding")
    text = dict(hf.get("text_config") or {})
    if text.get("model_type", "lfm2") != "lfm2":
        raise ValueError(f"config.json: text_config.model_type must be 'lfm2', got {text['model_type']!r}.")
    return of_text(Lfm2VlConfig, hf, dense.from_json(text), TOP)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    tied = ("tie_word_embeddings", "tie_embedding")  # these keys are read only at the top level
    text = {key: value for key, value in dense.to_json(keys).items() if key not in (*TOP, *tied)}
    vision = {**keys["vision_config"], "model_type": "siglip2_vision_model"}
    return {key: keys[key] for key in TOP} | {"vision_config": vision, "text_config": {**text, "model_type": "lfm2"}}


def weight_map(config: Lfm2VlConfig) -> WeightMap:
    """Maps the parameters of LFM2-VL to the tensors of a Hugging Face checkpoint."""
    return _map(config, "model.vision_tower.vision_model")


def other_maps(config: Lfm2VlConfig) -> list[WeightMap]:
    """The weight map for the tensor names of transformers 5's modules, in which the tower's names lack
    ``vision_model``."""
    return [_map(config, "model.vision_tower")]


def _map(config: Lfm2VlConfig, tower: str) -> WeightMap:
    text, projector = "model.language_model", "model.multi_modal_projector"
    entries = {
        **mlp_entries(text),
        **siglip_entries(config.vision_config, tower),
        "visual.patch_embed.weight": f"{tower}.embeddings.patch_embedding.weight",  # also linear in the checkpoint
    }
    for kind in ("weight", "bias") if config.projector_bias else ("weight",):
        entries |= {f"visual.projection.fc{i}.{kind}": f"{projector}.linear_{i}.{kind}" for i in (1, 2)}
    if config.projector_use_layernorm:
        entries |= {f"visual.norm.{kind}": f"{projector}.layer_norm.{kind}" for kind in ("weight", "bias")}
    # Keep the head of the tower, which the language model does not read.
    return lfm2_map(config, entries, {}, prefix=text, kept=[f"{tower}.head."])


add_family(
    LigerLfm2Vl,
    model_type="lfm2_vl",
    aliases=("lfm2-vl",),
    hf_class="Lfm2VlForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    module="model.vision_tower.post_layernorm",
)
