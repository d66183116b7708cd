"""OLMo 3: model_type ``olmo3``.

Differs from OLMo 2: three of every four layers attend only to the last ``sliding_window`` tokens and do not use
``rope_scaling``.

Source: https://arxiv.org/abs/2512.13961, transformers ``models/olmo3``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_models.arch.olmo2.olmo2 import LigerOlmo2, Olmo2Block, Olmo2Config, weight_map
from liger_models.arch.registry import add_family
from liger_models.convert.config_map import flat_rope
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """Sizes and constants of an OLMo 3 model.

    ``rope_theta`` and ``rope_scaling`` apply to the layers without a window. ``rope_local_base_freq`` is the rotary
    base of the layers with a window; the name comes from Gemma 3.
    """

    rope_theta: float = 500_000.0
    rope_local_base_freq: float = 500_000.0
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def layer_type(self, layer: int) -> str:
        """Type of a layer, which is also the name of its rotary embedding: "sliding_attention" or "full_attention"."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if (layer + 1) % 4 else "full_attention"


class Olmo3Block(Olmo2Block):
    """The block of OLMo 2. The type of a layer determines its window and its rotary embedding."""

    def attention_options(self, config: Olmo3Config, layer: int) -> dict[str, Any]:
        """Return the window of a layer and the name of its rotary embedding."""
        layer_type = config.layer_type(layer)
        window = config.sliding_window if layer_type == "sliding_attention" else None
        return {**super().attention_options(config, layer), "window": window, "rotary": layer_type}


class LigerOlmo3(LigerOlmo2):
    """OLMo 3 with its language-model head."""

    config_class = Olmo3Config
    block_class = Olmo3Block

    def build_rotary(self, config: Olmo3Config) -> dict[str, nn.Module]:
        """One rotary embedding per layer type. The base of layers with a window is ``rope_local_base_freq``."""
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        return {"full_attention": super().build_rotary(config)["default"], "sliding_attention": sliding}


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the ``rope_parameters`` that transformers 5 writes, with an entry for each layer type.

    The rotary base of the layers with a window is read only from ``rope_parameters``.
    """
    values = {key: value for key, value in hf.items() if key != "rope_local_base_freq"}
    return flat_rope(values, Olmo3Config.rope_theta)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """If the rotary base of the layers with a window differs from the base of the released models, also write
    ``rope_parameters``.

    transformers 5 reads the bases of both layer types from ``rope_parameters``, and applies the older key
    ``rope_theta`` only to the layers without a window. transformers 4 has one base for all layers.
    """
    out = dict(keys)
    # Released files have one base for all layers, which every version of transformers reads.
    local = out.pop("rope_local_base_freq")
    if local != Olmo3Config.rope_local_base_freq:
        full = {"rope_type": "default", **(keys["rope_scaling"] or {}), "rope_theta": keys["rope_theta"]}
        sliding = {"rope_type": "default", "rope_theta": local}
        out["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    return out


add_family(
    LigerOlmo3,
    model_type="olmo3",
    hf_class="Olmo3ForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
)
