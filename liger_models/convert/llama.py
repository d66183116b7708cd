"""Llama checkpoints: the weights of ``arch/llama.py`` under Hugging Face's names."""

from liger_models.arch.llama import LlamaConfig
from liger_models.convert.weight_map import Expression, WeightMap, gate_up_rows, qkv_rows

HF_CLASS = "LlamaForCausalLM"


def weight_map(config: LlamaConfig) -> WeightMap:
    """Llama's parameters over the tensors of a Hugging Face checkpoint."""
    attention = ["weight", "bias"] if config.attention_bias else ["weight"]
    mlp = ["weight", "bias"] if config.mlp_bias else ["weight"]
    layer, hf_layer = "layers.{i}", "model.layers.{i}"

    entries: dict[str, Expression | str] = {
        "embed_tokens.weight": "model.embed_tokens.weight",
        f"{layer}.input_layernorm.weight": f"{hf_layer}.input_layernorm.weight",
        f"{layer}.post_attention_layernorm.weight": f"{hf_layer}.post_attention_layernorm.weight",
        "norm.weight": "model.norm.weight",
    }
    for kind in attention:
        entries[f"{layer}.self_attn.qkv_proj.{kind}"] = qkv_rows(
            *(f"{hf_layer}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_size,
        )
        entries[f"{layer}.self_attn.o_proj.{kind}"] = f"{hf_layer}.self_attn.o_proj.{kind}"
    for kind in mlp:
        entries[f"{layer}.mlp.gate_up_proj.{kind}"] = gate_up_rows(
            f"{hf_layer}.mlp.gate_proj.{kind}", f"{hf_layer}.mlp.up_proj.{kind}"
        )
        entries[f"{layer}.mlp.down_proj.{kind}"] = f"{hf_layer}.mlp.down_proj.{kind}"

    # Llama 2 files store the rotary frequencies, which follow from the config; some tied checkpoints store the head.
    skip = [f"{hf_layer}.self_attn.rotary_emb.inv_freq"]
    if config.tie_word_embeddings:
        skip.append("lm_head.weight")
    else:
        entries["lm_head.weight"] = "lm_head.weight"
    return WeightMap(entries, over={"i": range(config.num_hidden_layers)}, skip=skip)
