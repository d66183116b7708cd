"""The configuration of Gemma 3 with images, and its vision tower, which is SigLIP."""

from dataclasses import dataclass, field

from einops import rearrange
from torch import Tensor, nn

from liger_models.arch._towers.siglip import SiglipTower, SiglipVisionConfig
from liger_models.arch.gemma3.text import Gemma3TextConfig
from liger_models.kernels.options import KernelOptions
from liger_models.layers.norm import zero_centered_norm


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma3TextConfig):
    """Sizes and constants of a Gemma 3 model; ``vision_config`` holds the sizes of the vision tower."""

    image_token_index: int = 262144
    boi_token_index: int = 255999
    eoi_token_index: int = 256000
    mm_tokens_per_image: int = 256
    vision_config: SiglipVisionConfig = field(default_factory=SiglipVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        side, patches = self.tokens_per_side, self.vision_config.patches_per_side
        if not (side**2 == self.mm_tokens_per_image and side > 0 and patches % side == 0):
            raise ValueError(
                f"Gemma3Config: mm_tokens_per_image ({self.mm_tokens_per_image}) must be the square of a number that "
                f"divides the number of rows of patches ({patches}). Check config.json."
            )

    @property
    def tokens_per_side(self) -> int:
        """Number of rows and columns of image tokens."""
        return int(self.mm_tokens_per_image**0.5)


class Gemma3Tower(SiglipTower):
    """The vision tower, which turns images into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Gemma3Config, kernels: KernelOptions) -> None:
        vision = config.vision_config
        super().__init__(vision, kernels)
        self.side, C = config.tokens_per_side, vision.hidden_size
        # These layers connect the tower to the decoder. The norm has the type of the decoder's norms and the eps of the
        # tower.
        self.soft_emb_norm = zero_centered_norm(config, kernels)(C, eps=vision.layer_norm_eps)
        self.projection = nn.Linear(C, config.hidden_size, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn pixels [n, channels, image_size, image_size] into image tokens [n · tokens, C]."""
        seen = self.run_blocks(pixels)
        # Image tokens are means over squares of patches: [n, tokens, patches of a token, C].
        side = int(seen.shape[1] ** 0.5)
        squares = rearrange(
            seen, "n (h y w x) c -> n (h w) (y x) c", h=self.side, w=self.side, y=side // self.side, x=side // self.side
        )
        tokens: Tensor = self.projection(self.soft_emb_norm(squares.mean(2)))
        return tokens.flatten(0, 1)
