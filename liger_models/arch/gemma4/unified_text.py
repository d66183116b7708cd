"""Gemma 4 Unified, the language model (12B): model_type ``gemma4_unified_text``.

It is the language model of ``gemma4_text`` without experts and without inputs for each block, with other defaults.

Source: transformers ``models/gemma4_unified``.
"""

from liger_models.arch.gemma4.decoder import IGNORED_KEYS, Gemma4Decoder, from_json, text_map
from liger_models.arch.gemma4.unified_config import Gemma4UnifiedTextConfig, to_json
from liger_models.arch.registry import add_family
from liger_models.convert.format import CheckpointFormat


class LigerGemma4UnifiedText(Gemma4Decoder):
    """A Gemma 4 Unified language model with its head."""

    config_class = Gemma4UnifiedTextConfig


add_family(
    LigerGemma4UnifiedText,
    CheckpointFormat(
        model_type="gemma4_unified_text",
        hf_class="Gemma4UnifiedForCausalLM",
        weight_map=text_map,
        from_json=from_json,
        to_json=to_json,
        ignored_keys=IGNORED_KEYS,
    ),
)
