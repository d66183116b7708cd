"""Gemma 4, the language models (E2B, E4B, 12B, 26B-A4B, 31B): model_type ``gemma4_text``.

Differs from Gemma 3: norms scale by their weight instead of 1 + weight, and values are also normed, without a weight;
scores are not scaled. Layers without a window have wider heads (``global_head_dim``). With ``attention_k_eq_v`` they
also have their own number of KV heads and no projection for values, because the keys before norm and rotation are the
values. In these layers only the first ``partial_rotary_factor`` of a head's pairs rotate. The last
``num_kv_shared_layers`` layers attend to the keys and values of the last earlier layer of their type that computes its
own. At its end a block multiplies the stream by a factor.

E2B and E4B embed each token a second time, which gives each block a second input. This input gates a small projection
of the stream that is added to the stream. 26B-A4B has experts beside the MLP of each block, and their router has its
own norm.

Source: transformers ``models/gemma4``.
"""

from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.arch.gemma4.decoder import Gemma4Decoder
from liger_models.arch.gemma4.names import IGNORED_KEYS, from_json, text_map, to_json
from liger_models.arch.registry import add_family


class LigerGemma4Text(Gemma4Decoder):
    """A Gemma 4 language model with its head."""

    config_class = Gemma4TextConfig


add_family(
    LigerGemma4Text,
    model_type="gemma4_text",
    hf_class="Gemma4ForCausalLM",
    weight_map=text_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
