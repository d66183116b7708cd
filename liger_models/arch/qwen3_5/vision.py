"""The sizes of Qwen3.5's vision tower, which is that of Qwen3-VL without DeepStack."""

from dataclasses import dataclass, field

from liger_models.arch._qwen_vl.deepstack import Qwen3VLVisionConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3_5VisionConfig(Qwen3VLVisionConfig):
    """Sizes of the vision tower.

    Raises:
        ValueError: as in `Qwen3VLVisionConfig`, or there is DeepStack.
    """

    deepstack_visual_indexes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deepstack_visual_indexes:
            raise ValueError(
                f"Qwen3_5VisionConfig: deepstack_visual_indexes must be empty, got {self.deepstack_visual_indexes}. "
                "The architecture has no DeepStack."
            )
