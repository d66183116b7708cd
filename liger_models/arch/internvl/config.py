"""The configuration of InternVL."""

from dataclasses import dataclass, field

from liger_models.layers.config import (
    PLAIN_ACTIVATIONS,
    RMSNormDecoderConfig,
    check_multiple,
    check_values,
    is_sliding,
)


@dataclass(frozen=True, kw_only=True)
class InternVLVisionConfig:
    """Sizes of the vision tower. ``image_size`` and ``patch_size`` are each one number, or a height and a width.

    Raises:
        ValueError: the sizes do not fit together, tiles or patches are not square, or a setting is not supported.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int | list[int] = field(default_factory=lambda: [448, 448])
    patch_size: int | list[int] = field(default_factory=lambda: [14, 14])
    attention_bias: bool = False
    use_qk_norm: bool = False
    hidden_act: str = "gelu"
    norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-6
    layer_scale_init_value: float = 0.1
    use_mean_pooling: bool = True
    use_mask_token: bool = False
    use_absolute_position_embeddings: bool = True
    hidden_dropout_prob: float = 0.0
    attention_dropout: float = 0.0
    projection_dropout: float = 0.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        name = type(self).__name__
        for size in ("image_size", "patch_size"):
            value = getattr(self, size)
            if isinstance(value, list) and not (len(value) == 2 and value[0] == value[1]):
                raise ValueError(f"{name}: {size} must be a number, or height and width that are equal, got {value}.")
        if self.side % self.patch != 0:
            raise ValueError(
                f"{name}: image_size ({self.side}) must be a multiple of patch_size ({self.patch}). Check config.json."
            )
        check_multiple(self, hidden_size="num_attention_heads")
        check_values(
            self, hidden_act=PLAIN_ACTIVATIONS, norm_type=("layer_norm", "rms_norm"), use_mask_token=(False,),
            use_absolute_position_embeddings=(True,), hidden_dropout_prob=(0.0,), attention_dropout=(0.0,),
            projection_dropout=(0.0,),
        )  # fmt: skip

    @property
    def side(self) -> int:
        """Height and width of a tile in pixels."""
        return self.image_size[0] if isinstance(self.image_size, list) else self.image_size

    @property
    def patch(self) -> int:
        """Height and width of a patch in pixels."""
        return self.patch_size[0] if isinstance(self.patch_size, list) else self.patch_size

    @property
    def patches_per_side(self) -> int:
        """Number of rows and columns of patches in a tile."""
        return self.side // self.patch


TEXT_TYPES = ("qwen2", "qwen3", "qwen3_moe")
"""The supported values of ``text_config.model_type``."""


@dataclass(frozen=True, kw_only=True)
class InternVLConfig(RMSNormDecoderConfig):
    """Sizes and constants of an InternVL model; ``vision_config`` holds the sizes of the vision tower.

    ``text_type`` is the ``model_type`` of the language model in config.json. The fields from ``decoder_sparse_step`` to
    ``mlp_only_layers`` apply to ``qwen3_moe``, and ``attention_bias`` applies to ``qwen3`` and ``qwen3_moe``.

    Raises:
        ValueError: the language model is not supported, or the sizes of tower and projector do not fit together.
    """

    text_type: str = "qwen2"
    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    num_experts: int = 128
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: list[int] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    image_token_id: int = 151667
    downsample_ratio: float = 0.5
    projector_hidden_act: str = "gelu"
    vision_feature_layer: int = -1
    vision_feature_select_strategy: str = "default"
    vision_config: InternVLVisionConfig = field(default_factory=InternVLVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.text_type not in TEXT_TYPES:
            raise ValueError(
                f"{name}: text_config.model_type must be {', '.join(TEXT_TYPES)}, got {self.text_type!r}. Checkpoints "
                "with other language models can't be loaded."
            )
        check_values(
            self, projector_hidden_act=PLAIN_ACTIVATIONS, vision_feature_layer=(-1,),
            vision_feature_select_strategy=("default",),
        )  # fmt: skip
        patches = self.vision_config.patches_per_side
        if not 0 < self.downsample_ratio <= 1 or patches % self.shuffle != 0:
            raise ValueError(
                f"{name}: downsample_ratio ({self.downsample_ratio}) must be 1 over a number that divides the rows of "
                f"patches of a tile ({patches}). Check config.json."
            )

    @property
    def shuffle(self) -> int:
        """Side of the square of patches that becomes one image token."""
        return int(1 / self.downsample_ratio)

    @property
    def tokens_per_tile(self) -> int:
        """Number of image tokens per tile."""
        return (self.vision_config.patches_per_side // self.shuffle) ** 2

    @property
    def normalizes_heads(self) -> bool:
        """Whether each head of q and k is normalized."""
        return self.text_type != "qwen2"

    @property
    def projection_biases(self) -> tuple[bool, bool]:
        """Whether the q, k and v projections have biases, and whether the output projection has a bias."""
        return (True, False) if self.text_type == "qwen2" else (self.attention_bias, self.attention_bias)

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        if self.text_type == "qwen3_moe":
            return self.sliding_window if self.use_sliding_window else None
        sliding = is_sliding(layer, self.layer_types, default=layer >= self.max_window_layers)
        return self.sliding_window if self.use_sliding_window and sliding else None

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        step = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return self.text_type == "qwen3_moe" and step and layer not in (self.mlp_only_layers or ())
