"""Gemma 3 with images (4B, 12B, 27B) and MedGemma: model_type ``gemma3``.

The language model is ``gemma3_text``, except that the tokens of an image attend to each other in both directions. The
vision tower is SigLIP, which has learned positions and takes images of one size. The tower's blocks are pre-norm, with
LayerNorm and biases, and do not rotate queries and keys. The tower's output is averaged over squares of patches,
normalized and projected.

Source: https://arxiv.org/abs/2503.19786, https://arxiv.org/abs/2303.15343, transformers ``models/gemma3``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from liger_models.arch._towers.siglip import siglip_entries
from liger_models.arch.gemma3 import text
from liger_models.arch.gemma3.processor import Gemma3Processor
from liger_models.arch.gemma3.text import Gemma3Decoder
from liger_models.arch.gemma3.tower import Gemma3Config, Gemma3Tower
from liger_models.arch.registry import add_family
from liger_models.base.image_tokens import EqualImageModel
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import Rearrange, WeightMap, decoder_map
from liger_models.layers.decoder import CausalLMOutput


class LigerGemma3(EqualImageModel, Gemma3Decoder):
    """Gemma 3 for text and images, with its language-model head."""

    config_class = Gemma3Config
    tower_class = Gemma3Tower
    processor_class = Gemma3Processor
    images_are_bidirectional = True
    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "token_type_ids")

    def forward(self, input_ids: Tensor | None = None, *, token_type_ids: Any = None, **options: Any) -> CausalLMOutput:
        """See `EqualImageModel.forward`.

        If ``inputs_embeds`` are given, ``token_type_ids`` [B, T] must be 1 at image tokens. Otherwise
        ``token_type_ids`` are not read, and the placeholders in ``input_ids`` show where the images are.
        """
        return super().forward(input_ids, types=token_type_ids, **options)

    def tokens_of(self, pixels: Tensor | None) -> int:
        """See `EqualImageModel.tokens_of`."""
        tokens: int = self.config.mm_tokens_per_image
        return tokens


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
    """Move the keys of ``text_config`` to the top level, and rename ``hidden_activation`` to ``hidden_act``.

    ``image_token_id``, ``boi_token_id`` and ``eoi_token_id`` are accepted as other names of ``image_token_index``,
    ``boi_token_index`` and ``eoi_token_index``.
    """
    hf = {f"{key.removesuffix('_id')}_index" if key in IMAGE_TOKENS else key: value for key, value in hf.items()}
    return of_text(Gemma3Config, hf, text.from_json(hf.get("text_config") or {}), TOP)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    text_keys = {key: value for key, value in keys.items() if key not in TOP}
    return {key: keys[key] for key in TOP if key in keys} | {"text_config": text.to_json(text_keys)}


def weight_map(config: Gemma3Config) -> WeightMap:
    """Maps the parameters of Gemma 3 to the tensors of a Hugging Face checkpoint."""
    return _map(config, "language_model.model", "vision_tower.vision_model", "", "language_model.lm_head.weight")


def other_maps(config: Gemma3Config) -> list[WeightMap]:
    """Return the weight maps for the other naming schemes that can be read.

    There are three such schemes. The first is in checkpoints that transformers 5 writes for newly created models, the
    second has the names of transformers 5's modules, and the third is in checkpoints that transformers 4.52 to 4.57
    write.
    """
    return [
        _map(config, "language_model.model", "vision_tower", "", "language_model.lm_head.weight"),
        _map(config, "model.language_model", "model.vision_tower", "model.", "lm_head.weight"),
        _map(config, "model.language_model", "model.vision_tower.vision_model", "model.", "lm_head.weight"),
    ]


def _map(config: Gemma3Config, prefix: str, visual: str, projector: str, head: str) -> WeightMap:
    return decoder_map(
        config,
        norms=text.NORMS,
        prefix=prefix,
        head=head,
        also={
            **siglip_entries(config.vision_config, visual),
            # The projection is stored as a parameter [in, out], not as a linear layer.
            "visual.soft_emb_norm.weight": f"{projector}multi_modal_projector.mm_soft_emb_norm.weight",
            "visual.projection.weight": Rearrange(
                "i o -> o i", f"{projector}multi_modal_projector.mm_input_projection_weight"
            ),
        },
    )


add_family(
    LigerGemma3,
    model_type="gemma3",
    hf_class="Gemma3ForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
