"""Gemma 4 with images (E2B, E4B, 26B-A4B, 31B): model_type ``gemma4``.

The language model is ``gemma4_text``. In E2B and E4B, the blocks have a second input. For an image token, the second
input is computed from the image token itself and from the second embedding of the padding token.

Source: transformers ``models/gemma4``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from liger_models.arch.gemma4 import images, names
from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.arch.gemma4.images import Gemma4WithImages, Placeholders
from liger_models.arch.gemma4.names import text_map
from liger_models.arch.gemma4.tower import Gemma4Tower, Gemma4VisionConfig
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import Expression, Rearrange, Stack, WeightMap


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(Placeholders, Gemma4TextConfig):
    """Sizes and constants, as in `Gemma4TextConfig`; ``vision_config`` holds the sizes of the vision tower."""

    vision_config: Gemma4VisionConfig = field(default_factory=Gemma4VisionConfig)


class LigerGemma4(Gemma4WithImages):
    """Gemma 4 for text and images, with its language-model head."""

    config_class = Gemma4Config
    tower_class = Gemma4Tower


IGNORED_KEYS = (
    *images.IGNORED_KEYS,
    "default_output_length",
    "attention_bias",  # a key of the tower, which has no biases; transformers does not read it
    "global_head_dim",  # this key and the next two are also keys of the tower that are not read
    "max_position_embeddings",
    "initializer_range",
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level, and convert the keys of the language model and of the tower to
    fields of the config.

    Raises:
        ValueError: a rope type is not supported, or layers of the same type have different sizes.
    """
    vision = dict(hf.get("vision_config") or {})
    rope = dict(vision.pop("rope_parameters", None) or {})
    rope_type = rope.pop("rope_type", "axial")
    if rope_type not in ("axial", "default") or rope.keys() - {"rope_theta"}:
        raise ValueError(
            "config.json: vision_config.rope_parameters must be of type 'axial' or 'default' with a rope_theta, got "
            f"{rope_type!r} with {', '.join(rope)}. The architecture supports nothing else."
        )
    return images.from_json(Gemma4Config, hf, vision | rope)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    # Copy the dictionary, because the caller's dictionary must not change.
    vision = dict(keys["vision_config"])
    vision["rope_parameters"] = {"rope_type": "default", "rope_theta": vision.pop("rope_theta")}
    return images.to_json(keys, vision, names.to_json)


def weight_map(config: Gemma4Config) -> WeightMap:
    """Maps the parameters of Gemma 4 to the tensors of a Hugging Face checkpoint."""
    vision, tower = config.vision_config, "model.vision_tower"
    block, ours = f"{tower}.encoder.layers.{{b}}", "visual.blocks.{b}"
    linears = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    norms = [f"{position}_layernorm" for position in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
    # The tower: embeddings, norms, linear layers and the projection.
    also: dict[str, Expression | str] = {
        "visual.patch_embed.weight": f"{tower}.patch_embedder.input_proj.weight",
        "visual.pos_embed.weight": Rearrange(
            "two p c -> (two p) c", f"{tower}.patch_embedder.position_embedding_table", two=2
        ),
        "visual.projection.weight": "model.embed_vision.embedding_projection.weight",
        **{f"{ours}.{norm}.weight": f"{block}.{norm}.weight" for norm in norms},
        **{f"{ours}.{linear}.linear.weight": f"{block}.{linear}.linear.weight" for linear in linears},
    }
    # RoPE rotates pairs of dimensions. In the checkpoint, a head has the first and then the second dimensions of the
    # column pairs, followed by the first and then the second dimensions of the row pairs. In this package, a head has
    # the first dimensions of all pairs, followed by the second dimensions of all pairs.
    for part in "qk":
        rows = f"self_attn.{part}_proj.linear.weight"
        also[f"{ours}.{rows}"] = Rearrange(
            "(h a half f) ... -> (h half a f) ...", f"{block}.{rows}", h=vision.num_attention_heads, a=2, half=2
        )
        norm = f"self_attn.{part}_norm.weight"
        also[f"{ours}.{norm}"] = Rearrange("(a half f) -> (half a f)", f"{block}.{norm}", a=2, half=2)
    # The bounds of the clipped layers (E2B, E4B), and the constants of the standardization (26B-A4B, 31B).
    if vision.use_clipped_linears:
        for linear in linears:
            for name, bound in (("least", "min"), ("most", "max")):
                sides = [f"{block}.{linear}.{side}_{bound}" for side in ("input", "output")]
                also[f"{ours}.{linear}.{name}"] = Stack(sides, dim=0)
    if vision.standardize:
        also |= {f"visual.standard.{part}": f"{tower}.std_{part}" for part in ("bias", "scale")}
    return text_map(
        config,
        "model.language_model",
        also,
        {"b": range(vision.num_hidden_layers)},
        kept=("model.audio_tower.", "model.embed_audio."),
    )


add_family(
    LigerGemma4,
    model_type="gemma4",
    hf_class="Gemma4ForConditionalGeneration",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
