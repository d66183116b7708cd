"""The towers of LLaVA and LLaVA-NeXT with their projectors."""

from typing import Any

from torch import Tensor

from liger_models.arch._towers.clip import ClipTower
from liger_models.arch._towers.pixtral import PixtralTower
from liger_models.kernels.options import KernelOptions
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP


def projection(config: Any, kernels: KernelOptions) -> LigerMLP:
    """The MLP that projects patches to image tokens."""
    return LigerMLP(
        config.vision_config.hidden_size, config.hidden_size, config.hidden_size,
        act=ACTIVATIONS[config.projector_hidden_act], bias=config.multimodal_projector_bias, kernel=kernels.swiglu,
    )  # fmt: skip


class LlavaClipTower(ClipTower):
    """CLIP and the projector, which together turn images of one size into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Any, kernels: KernelOptions) -> None:
        super().__init__(config.vision_config, config.vision_layers, kernels)
        self.projection = projection(config, kernels)
        self.first = int(config.drops_class_token)
        """Index of the first token that the language model reads."""
        self.tokens = self.pos_embed.num_embeddings - self.first
        """Number of tokens per image."""

    def project(self, pixels: Tensor) -> Tensor:
        """Turn pixels [n, channels, side, side] into image tokens [n · tokens, C]."""
        tokens: Tensor = self.projection(self.run_blocks(pixels)[:, self.first :])
        return tokens.flatten(0, 1)


class LlavaTower(LlavaClipTower):
    """The tower of LLaVA 1.5."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn pixels [n, channels, side, side] into image tokens [n · tokens, C]."""
        return self.project(pixels)


class LlavaPixtralTower(PixtralTower):
    """Pixtral's tower and the projector, which together turn images of any size into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Any, kernels: KernelOptions) -> None:
        super().__init__(config.vision_config, config.vision_layers, 1, kernels)
        self.projection = projection(config, kernels)

    def forward(self, pixels: Tensor, sizes: Tensor) -> Tensor:
        """Turn pixels [n, channels, height, width] of images with ``sizes`` [n, 2] into image tokens [N, C].

        In a compiled graph, the result also has rows for padding, which come last.
        """
        x, residual = self.run_blocks(pixels, sizes)
        tokens: Tensor = self.projection((residual if x is None else residual + x)[0])
        return tokens
