"""The configuration of Llama 3.2 Vision."""

import math
from dataclasses import dataclass, field

from liger_models.layers.config import PLAIN_ACTIVATIONS, RMSNormDecoderConfig, check_multiple, check_values


@dataclass(frozen=True, kw_only=True)
class MllamaVisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: the sizes do not fit together, or the activation is not supported.
    """

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 32
    num_global_layers: int = 8
    attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 448
    patch_size: int = 14
    max_num_tiles: int = 4
    hidden_act: str = "gelu"
    norm_eps: float = 1e-5
    vision_output_dim: int = 7680
    intermediate_layers_indices: list[int] = field(default_factory=lambda: [3, 7, 15, 23, 30])
    supported_aspect_ratios: list[list[int]] = field(
        default_factory=lambda: [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    )
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        name, C, layers = type(self).__name__, self.hidden_size, self.intermediate_layers_indices
        check_multiple(self, hidden_size="attention_heads", image_size="patch_size")
        if layers != sorted(set(layers)) or not all(0 <= layer < self.num_hidden_layers for layer in layers):
            raise ValueError(
                f"{name}: intermediate_layers_indices must ascend and be below num_hidden_layers "
                f"({self.num_hidden_layers}), got {layers}. Check config.json."
            )
        if self.vision_output_dim != (1 + len(layers)) * C:
            raise ValueError(
                f"{name}: vision_output_dim ({self.vision_output_dim}) must be hidden_size ({C}) times 1 plus the "
                f"number of intermediate_layers_indices ({len(layers)}). Check config.json."
            )
        if not all(
            len(ratio) == 2 and math.prod(ratio) <= self.max_num_tiles for ratio in self.supported_aspect_ratios
        ):
            raise ValueError(
                f"{name}: supported_aspect_ratios must be rows and columns of at most max_num_tiles "
                f"({self.max_num_tiles}) tiles, got {self.supported_aspect_ratios}. Check config.json."
            )
        check_values(self, hidden_act=PLAIN_ACTIVATIONS)

    @property
    def tokens_per_tile(self) -> int:
        """Number of tokens per tile: one for each patch, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True, kw_only=True)
class MllamaConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Llama 3.2 Vision model; ``vision_config`` holds the sizes of the vision tower."""

    vocab_size: int = 128256
    intermediate_size: int = 14336
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    pad_token_id: int | None = 128004
    cross_attention_layers: list[int] = field(default_factory=lambda: [3, 8, 13, 18, 23, 28, 33, 38])
    image_token_index: int = 128256
    vision_config: MllamaVisionConfig = field(default_factory=MllamaVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, tie_word_embeddings=(False,))
        crossing, layers = self.cross_attention_layers, self.num_hidden_layers
        if len(set(crossing)) != len(crossing) or not all(0 <= layer < layers for layer in crossing):
            raise ValueError(
                f"MllamaConfig: cross_attention_layers must be distinct and below num_hidden_layers ({layers}), got "
                f"{crossing}. Check config.json."
            )
