"""SmolVLM2 (256M, 500M, 2.2B): model_type ``smolvlm``.

The architecture is the same as in Idefics3. Checkpoints of the first SmolVLM have the model_type ``idefics3``. Videos
are not supported.

Source: https://arxiv.org/abs/2504.05299, transformers ``models/smolvlm``.
"""

from dataclasses import dataclass

from liger_models.arch.idefics3 import model
from liger_models.arch.idefics3.tower import Idefics3Config
from liger_models.arch.registry import add_family


@dataclass(frozen=True, kw_only=True)
class SmolVLMConfig(Idefics3Config):
    """Sizes and constants of a SmolVLM model; ``vision_config`` holds the sizes of the vision tower."""


class LigerSmolVLM(model.Idefics3Model):
    """SmolVLM with its language-model head."""

    config_class = SmolVLMConfig


add_family(
    LigerSmolVLM,
    model_type="smolvlm",
    hf_class="SmolVLMForConditionalGeneration",
    weight_map=model.weight_map,
    from_json=model.from_json,
    to_json=model.to_json,
    ignored_keys=model.IGNORED_KEYS,
)
