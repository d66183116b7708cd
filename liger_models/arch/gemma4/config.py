"""The configuration of the Gemma 4 language models."""

from dataclasses import dataclass

from liger_models.layers.config import RMSNormDecoderConfig, check_values


@dataclass(frozen=True, kw_only=True)
class Gemma4TextConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Gemma 4 language model. In config.json, ``hidden_act`` is called ``hidden_activation``.

    ``head_dim``, ``num_key_value_heads`` and ``rope_local_base_freq`` apply to layers with a window.
    ``global_head_dim``, ``rope_theta`` and ``partial_rotary_factor`` apply to layers without a window. If
    ``attention_k_eq_v`` is set, ``num_global_key_value_heads`` is the number of KV heads of layers without a window.
    """

    activations = ("gelu_pytorch_tanh", "gelu_new")

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.25
    rope_local_base_freq: float = 10000.0
    attention_bias: bool = False
    sliding_window: int = 512
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        name, H = type(self).__name__, self.num_attention_heads
        check_values(self, use_bidirectional_attention=(None, "vision"), rope_scaling=(None,))
        # Layers without a window may have another number of KV heads.
        groups = {self.kv_heads_of(layer) for layer in range(self.num_hidden_layers)}
        if not all(H % G == 0 for G in groups) or self.global_head_dim % 2 != 0:
            raise ValueError(
                f"{name}: num_attention_heads ({H}) must be a multiple of num_global_key_value_heads "
                f"({self.num_global_key_value_heads}), and global_head_dim ({self.global_head_dim}) even."
            )
        # Layers that share keys and values need an earlier layer of their type that computes them.
        computed = {self.layer_type(layer) for layer in range(self.num_hidden_layers) if not self.shares(layer)}
        used = {self.layer_type(layer) for layer in range(self.num_hidden_layers)}
        if not (computed == used and self.num_kv_shared_layers < self.num_hidden_layers):
            raise ValueError(
                f"{name}: num_kv_shared_layers ({self.num_kv_shared_layers}) must leave a layer of each type with keys "
                f"and values of its own, got {self.num_hidden_layers} layers. Check config.json."
            )
        # A mixture of experts needs all of its sizes.
        sizes = (self.num_experts, self.top_k_experts, self.moe_intermediate_size)
        if self.enable_moe_block and None in sizes:
            raise ValueError(
                f"{name}: enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size, got {sizes}."
            )

    def layer_type(self, layer: int) -> str:
        """Type of a layer, which is also the name of its rotary embedding: "sliding_attention" or "full_attention"."""
        if layer == self.num_hidden_layers - 1:
            return "full_attention"  # whatever layer_types says
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if (layer + 1) % 6 else "full_attention"

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        return self.sliding_window if self.layer_type(layer) == "sliding_attention" else None

    def shares(self, layer: int) -> bool:
        """Whether a layer uses keys and values of an earlier layer of its type instead of computing its own."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def keys_are_values(self, layer: int) -> bool:
        """Whether a layer uses its keys, before norm and RoPE, as its values."""
        return self.attention_k_eq_v and self.window(layer) is None

    def kv_heads_of(self, layer: int) -> int:
        """Number of KV heads of a layer."""
        heads = self.num_global_key_value_heads if self.keys_are_values(layer) else None
        return self.kv_heads if heads is None else heads

    def head_size_of(self, layer: int) -> int:
        """Dimension of a layer's heads."""
        return self.head_size if self.window(layer) is not None else self.global_head_dim

    def mlp_size_of(self, layer: int) -> int:
        """Width of a layer's MLP."""
        return self.intermediate_size * (2 if self.use_double_wide_mlp and self.shares(layer) else 1)
