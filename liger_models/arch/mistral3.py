"""Mistral Small 3.1 and 3.2 with images: model_type ``mistral3`` with a ``mistral`` language model.

The language model is Mistral. The vision tower is Pixtral's, which takes images of any size. The outputs of the tower
are normalized with the epsilon of the language model. A linear layer then merges each square of patches, and a plain
MLP projects the result to an image token. In the text, each row of image tokens is followed by a token that marks the
end of the row. Image tokens attend only to earlier tokens, like text tokens.

The released files lack ``tie_word_embeddings``, and the head in them is not tied to the embedding. transformers 5 reads
the missing key as true, but then unties the head while it loads the weights. This package reads the missing key as
false.

A family with another language model derives its classes from `Mistral3Images` and `Mistral3Vision`.

Source: https://mistral.ai/news/mistral-small-3-1, transformers ``models/mistral3``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from liger_models.arch._llava.names import HUB, IGNORED_KEYS, MODULES, Prefixes, mlp_entries, read_llava, write_llava
from liger_models.arch._llava.sizes import ImageSizesModel
from liger_models.arch._llava.text import LlavaBlock, MistralTextConfig
from liger_models.arch._towers.pixtral import PixtralTower, PixtralVisionConfig, pixtral_entries
from liger_models.arch._towers.pixtral_processor import PixtralProcessor
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import Expression, WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.config import check_values
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerRMSNorm


@dataclass(frozen=True, kw_only=True)
class Mistral3Vision:
    """The fields that the config of a Mistral 3 model with images has in addition to the language model's fields.

    Raises:
        ValueError: ``spatial_merge_size`` is not positive, or ``vision_feature_layer`` or ``projector_hidden_act`` is
            not supported.
    """

    image_token_index: int = 10
    projector_hidden_act: str = "gelu"
    vision_feature_layer: int = -1
    multimodal_projector_bias: bool = False
    spatial_merge_size: int = 2
    vision_config: PixtralVisionConfig = field(default_factory=PixtralVisionConfig)

    def check_vision(self) -> None:
        """Raise ValueError if ``vision_feature_layer`` or ``projector_hidden_act`` is not supported."""
        acts = ("gelu", "gelu_pytorch_tanh", "quick_gelu")
        check_values(self, projector_hidden_act=acts, vision_feature_layer=(-1,))


@dataclass(frozen=True, kw_only=True)
class Mistral3Config(Mistral3Vision, MistralTextConfig):
    """Sizes and constants of a Mistral Small 3 model; ``vision_config`` holds the sizes of the vision tower."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_vision()


class Mistral3Tower(PixtralTower):
    """The vision tower and the projector, which turn images into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Any, kernels: KernelOptions) -> None:
        vision, C = config.vision_config, config.vision_config.hidden_size
        super().__init__(vision, vision.num_hidden_layers, config.spatial_merge_size, kernels)
        self.norm = LigerRMSNorm(C, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.merging = nn.Linear(C * self.merge**2, C, bias=False)
        self.projection = LigerMLP(
            C, config.hidden_size, config.hidden_size,
            act=ACTIVATIONS[config.projector_hidden_act], bias=config.multimodal_projector_bias, kernel=kernels.swiglu,
        )  # fmt: skip

    def forward(self, pixels: Tensor, sizes: Tensor) -> Tensor:
        """Turn pixels [n, channels, height, width] of images with ``sizes`` [n, 2] into image tokens [N / merge², C].

        In a compiled graph, the result also has rows for padding, which come last.
        """
        normed = self.norm.add(*self.run_blocks(pixels, sizes))[0]
        # The patches of a square are adjacent. As in the checkpoint, the inputs of the merging layer are ordered by
        # channel and then by patch. The layer's matrix and adapters therefore have the same format as in the
        # checkpoint.
        squares = rearrange(normed, "one (n m) c -> (one n) (c m)", m=self.merge**2)  # [N / merge², C · merge²]
        tokens: Tensor = self.projection(self.merging(squares))
        return tokens


class Mistral3Images(ImageSizesModel):
    """The part of a Mistral 3 model that handles images. A derived class adds the configuration and the blocks of the
    language model."""

    tower_class = Mistral3Tower
    processor_class = PixtralProcessor


class LigerMistral3(Mistral3Images):
    """Mistral Small 3 for text and images, with its language-model head."""

    config_class = Mistral3Config
    block_class = LlavaBlock


TOP = (
    "image_token_index", "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias",
    "spatial_merge_size", "tie_word_embeddings", "vision_config",
)  # fmt: skip
"""Keys of config.json that do not belong to the language model."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read config.json as `read_llava` does.

    Raises:
        ValueError: the language model is not Mistral.
    """
    text_type = (hf.get("text_config") or {}).get("model_type", "mistral")
    if text_type != "mistral":
        raise ValueError(
            f"config.json: text_config.model_type must be 'mistral' in a model with images, got {text_type!r}. If it "
            f"is 'mistral4', liger_models.arch.get_arch('mistral4').from_pretrained(folder) loads the language model."
        )
    return read_llava(Mistral3Config, hf, TOP)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    return write_llava(keys, TOP, "mistral", "pixtral")


def vision_entries(config: Any, names: Prefixes) -> dict[str, Expression | str]:
    """The entries of a weight map for the tower and the projector."""
    projector = f"{names.top}multi_modal_projector"
    linears = (f"{projector}.linear_1", f"{projector}.linear_2")
    return {
        **pixtral_entries(config.vision_config, config.vision_config.num_hidden_layers, names.tower),
        "visual.norm.weight": f"{projector}.norm.weight",
        "visual.merging.weight": f"{projector}.patch_merger.merging_layer.weight",
        **mlp_entries("visual.projection", linears, bias=config.multimodal_projector_bias),
    }  # fmt: skip


def weight_map(config: Mistral3Config) -> WeightMap:
    """Maps the parameters of Mistral Small 3 to the tensors of a Hugging Face checkpoint."""
    return _map(config, HUB)


def other_maps(config: Mistral3Config) -> list[WeightMap]:
    """The weight map for the tensor names of transformers' modules since version 4.52. Some versions of transformers
    also wrote these names to checkpoints."""
    return [_map(config, MODULES)]


def _map(config: Mistral3Config, names: Prefixes) -> WeightMap:
    return decoder_map(config, prefix=names.text, head=names.head, also=vision_entries(config, names))


add_family(
    LigerMistral3,
    model_type="mistral3",
    hf_class="Mistral3ForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
