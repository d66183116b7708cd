"""Idefics3 (8B) and SmolVLM (256M, 500M, 2.2B): model_type ``idefics3``. SmolVLM2 has model_type ``smolvlm``.

``idefics3`` and ``smolvlm`` are two model types with the same architecture. The language model is Llama. An image is
cut into square tiles, and a small copy of the whole image is added as one more tile. The vision tower is SigLIP; the
features of each square of ``scale_factor`` x ``scale_factor`` patches are concatenated and projected to one image
token.

transformers treats every tile whose pixels are all exactly 0 as padding and removes it, so an image of a single color
can vanish. In this package, ``pixel_attention_mask`` decides which tiles are padding. If this mask is missing, a tile
whose pixels are all 0 counts as padding.

Source: https://arxiv.org/abs/2408.12637, https://arxiv.org/abs/2504.05299, transformers ``models/idefics3``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from liger_models.arch._tiles.model import TileModel
from liger_models.arch._towers.siglip import siglip_entries
from liger_models.arch.idefics3.processor import Idefics3Processor
from liger_models.arch.idefics3.tower import Idefics3Config, Idefics3Tower
from liger_models.arch.registry import add_family
from liger_models.common.errors import check_tensors
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import PreNormBlock
from liger_models.layers.decoder import CausalLMOutput


class Idefics3Block(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""


class Idefics3Model(TileModel):
    """The forward of Idefics3 and SmolVLM."""

    block_class = Idefics3Block
    tower_class = Idefics3Tower
    processor_class = Idefics3Processor
    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_attention_mask")

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """For text with or without images, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [tiles, channels, height, width] in the order of their placeholders, or [B, M, channels,
                height, width] with up to M tiles for each row, as the processor returns them. Tiles are square.
            pixel_attention_mask: [B, M, height, width], which is 1 on tiles and 0 on padding. Without this mask, a tile
                is padding if all of its pixels are 0. A tile must not consist partly of padding.
            options: as in `Decoder.forward`; images need ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of image tokens, or a tile is not square or
                consists partly of padding; otherwise as in `Decoder.forward`.
        """
        tiles = self._tiles(pixel_values, pixel_attention_mask)
        return self.run_with_images(input_ids, None if tiles is None else (tiles,), **options)

    def _tiles(self, pixels: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Return the tiles [n, channels, side, side] without the padding."""
        check_tensors(pixel_values=pixels, pixel_attention_mask=mask)
        if pixels is None:
            return None
        channels, shuffle = self.config.vision_config.num_channels, self.config.scale_factor
        shape, side = list(pixels.shape), pixels.shape[-1] // self.config.vision_config.patch_size
        if len(shape) not in (4, 5) or shape[-3] != channels or shape[-1] != shape[-2] or side == 0 or side % shuffle:
            raise ValueError(
                f"forward: pixel_values must be [tiles, {channels}, side, side] or [B, M, {channels}, side, side], "
                f"with a multiple of {shuffle} rows of patches, got {shape}."
            )
        if mask is not None and mask.shape != (*shape[:-3], *shape[-2:]):
            raise ValueError(
                f"forward: pixel_attention_mask must have the shape of pixel_values without channels, got "
                f"{list(mask.shape)} for {shape}."
            )
        if len(shape) == 4 and mask is None:
            return pixels
        tiles = pixels.flatten(0, -4)
        if mask is None:
            return tiles[(tiles != 0).flatten(1).any(1)]
        valid = mask.flatten(0, -3).flatten(1) != 0
        real = valid.any(1)
        if bool((real != valid.all(1)).any()):
            raise ValueError(
                "forward: pixel_attention_mask must be 1 or 0 on the whole of each tile, got tiles that are padded in "
                "part. Resize them as the processor does."
            )
        return tiles[real]

    def tokens_of(self, pixels: Tensor | None) -> int:
        """See `EqualImageModel.tokens_of`. The size of the tiles may differ from the size in the config."""
        if pixels is None:
            return super().tokens_of(None)
        return int(pixels.shape[-1] // self.config.vision_config.patch_size // self.config.scale_factor) ** 2

    def image_features(  # type: ignore[override]
        self, pixel_values: Tensor, pixel_attention_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the image tokens [tiles, tokens, C]. If the pixels are [B, M, ...], return one tensor [tokens, C] for
        each of the B rows instead."""
        tiles = self._tiles(pixel_values, pixel_attention_mask)
        assert tiles is not None
        tokens: Tensor = self.visual(tiles).unflatten(0, (len(tiles), -1))
        if pixel_values.dim() == 4:
            return tokens
        if pixel_attention_mask is None:
            real = (pixel_values != 0).flatten(2).any(2)
        else:
            real = (pixel_attention_mask != 0).flatten(2).any(2)
        return tuple(part.flatten(0, 1) for part in tokens.split(real.sum(1).tolist()))

    def repeat_prompts(self, input_ids: Tensor, inputs: dict[str, Any], times: int) -> dict[str, Any]:
        """Return inputs for repeated prompts, with all tiles in one tensor; see `ImageTokenModel.repeat_prompts`."""
        tiles = self._tiles(inputs.get("pixel_values"), inputs.get("pixel_attention_mask"))
        changed = {**inputs, "pixel_values": tiles, "pixel_attention_mask": None}
        return super().repeat_prompts(input_ids, {name: changed[name] for name in inputs}, times)


class LigerIdefics3(Idefics3Model):
    """Idefics3 with its language-model head."""

    config_class = Idefics3Config


IGNORED_KEYS = (
    # Keys of released files that transformers does not read.
    "_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "qk_layer_norms",
    "transformers.js_config", "use_resampler", "use_base_siglip", "max_image_size", "size", "tie_word_embeddings",
    "_pad_token_id",  # written by transformers 5
)  # fmt: skip
TOP = ("image_token_id", "scale_factor", "vision_config", "tie_word_embeddings")
"""Keys of config.json that do not belong to the language model."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level.

    Raises:
        ValueError: the language model is not Llama.
    """
    text = dict(hf.get("text_config") or {"rms_norm_eps": 1e-5})
    if text.get("model_type", "llama") != "llama":
        raise ValueError(f"config.json: text_config.model_type must be 'llama', got {text['model_type']!r}.")
    return of_text(Idefics3Config, hf, text, TOP)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    text = {key: value for key, value in keys.items() if key not in TOP}
    return {key: keys[key] for key in TOP} | {"text_config": text | {"model_type": "llama"}}


def weight_map(config: Idefics3Config) -> WeightMap:
    """Maps the parameters of Idefics3 to the tensors of a Hugging Face checkpoint."""
    tower = siglip_entries(config.vision_config, "model.vision_model")
    tower["visual.projection.weight"] = "model.connector.modality_projection.proj.weight"
    return decoder_map(
        config,
        prefix="model.text_model",
        also=tower,
    )


add_family(
    LigerIdefics3,
    model_type="idefics3",
    hf_class="Idefics3ForConditionalGeneration",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
