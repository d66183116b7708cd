"""Base class of the Qwen-VL families, which take images and videos and have positions in time, height and width."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.arch._qwen_vl.processor import QwenVLProcessor
from liger_models.base.grid_images import GridImageModel
from liger_models.common.device import as_tensor
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.patches import mrope_positions
from liger_models.layers.rope import MultimodalRotaryEmbedding

POSITION_OFFSET = "position_offset"
"""Key in the decode cache. Its value [B, 1] int64 is the next position of each row minus the row's number of tokens.

The two numbers differ if there are images, because an image takes fewer positions than tokens.
"""


class MRopeModel(GridImageModel):
    """A vision-language model that takes images and videos and has positions in time, height and width (M-RoPE)."""

    processor_class = QwenVLProcessor
    images_shift_positions = True
    interleaved: ClassVar[bool] = False
    """Whether the rotary frequencies of time, height and width alternate. If False, each of the three has its own
    section of the frequencies."""

    def build_visual(self, config: Any) -> nn.Module:
        """The vision tower."""
        tower: nn.Module = self.tower_class(config.vision_config, self.kernels)
        return tower

    def build_rotary(self, config: Any) -> dict[str, nn.Module]:
        """A rotary embedding of positions in time, height and width."""
        rotary = MultimodalRotaryEmbedding(
            config.rotary_width, config.rope_theta, config.rope_scaling, config.max_position_embeddings,
            sections=config.mrope_section, interleaved=self.interleaved,
        )  # fmt: skip
        return {"default": rotary}

    def multimodal_positions(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        *,
        second_per_grid_ts: Tensor | list[float] | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Tensor:
        """Compute the positions [3, B, T] int64 of tokens in time, height and width; see `mrope_positions`.

        Args:
            input_ids: [B, T] int64.
            image_grid_thw, video_grid_thw, second_per_grid_ts: as in `forward`.
            attention_mask: [B, T], 0 for padding. Positions do not count padding.
            cu_seqlens: [n + 1], boundaries of packed documents. Positions start from 0 in each document.
            parents: [n], the documents that the documents continue; see `BatchLayout.build`.

        Raises:
            ValueError: ``second_per_grid_ts`` is given, but the model's positions do not depend on it.
        """
        grids = image_grid_thw, video_grid_thw
        return self._count(input_ids, *grids, second_per_grid_ts, attention_mask, cu_seqlens, parents)[0]

    def _count(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        second_per_grid_ts: Tensor | list[float] | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `multimodal_positions`, and the next position [B, 1] of each row."""
        rate = getattr(self.config.vision_config, "tokens_per_second", None)
        if rate is None and second_per_grid_ts is not None:
            raise ValueError(
                f"forward: second_per_grid_ts must not be given: positions of {type(self).__name__} do not depend on "
                "it."
            )
        if mask is not None and mask.shape != input_ids.shape:
            raise ValueError(
                f"forward: attention_mask must be {list(input_ids.shape)} like input_ids, preceded by the cached "
                f"tokens if there are any, got {None if mask is None else list(mask.shape)}."
            )
        # In some models, the number of positions from one frame of a video to the next depends on the frame rate.
        interval = None
        if rate is not None and video_grid_thw is not None:
            seconds = [1.0] * len(video_grid_thw) if second_per_grid_ts is None else second_per_grid_ts
            interval = as_tensor(seconds, torch.float32) * rate
            if interval.shape != video_grid_thw.shape[:1]:
                raise ValueError(
                    f"forward: second_per_grid_ts must have a number for each of the {len(video_grid_thw)} videos, got "
                    f"{list(interval.shape)}."
                )
        of_images, of_videos = self.media_places(input_ids, cu_seqlens)
        return mrope_positions(
            of_images.long() + 2 * of_videos, [image_grid_thw, video_grid_thw],
            merge=self.visual.merge, mask=mask, cu_seqlens=cu_seqlens, parents=parents,
            frames_apart=self.frames_apart, interval=interval,
        )  # fmt: skip

    def _positions(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        second_per_grid_ts: Tensor | list[float] | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        parents: Tensor | None,
        cache: DecodeCache | None,
    ) -> Tensor | None:
        """See `GridImageModel._positions`."""
        plain = cache is None or (POSITION_OFFSET not in cache.extra and attention_mask is None)
        if image_grid_thw is None and video_grid_thw is None and plain:
            return None
        B, T = input_ids.shape
        mask = None if attention_mask is None else attention_mask[..., -T:]
        positions, following = self._count(
            input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, mask, cu_seqlens, parents
        )
        if cache is None:
            return positions
        # Images take fewer positions than tokens. The cache keeps the difference for later tokens.
        tokens = torch.full((B, 1), cache.length + T, device=input_ids.device)
        before = torch.full((B, 1), cache.length, device=input_ids.device)
        if attention_mask is not None:
            seen = (attention_mask != 0).long()
            tokens, before = seen.sum(1, keepdim=True), seen[:, :-T].sum(1, keepdim=True)
        if POSITION_OFFSET in cache.extra:
            before = before + cache.extra[POSITION_OFFSET]
        cache.extra[POSITION_OFFSET] = before + following - tokens
        return positions + before

    def prompt_positions(self, prompts: Tensor, mask: Tensor | None, new: int, inputs: dict[str, Any]) -> Tensor:
        """See `Decoder.prompt_positions`. If there are images or videos, each token has positions in time, height and
        width."""
        grids = inputs.get("image_grid_thw"), inputs.get("video_grid_thw")
        if all(grid is None for grid in grids):
            return super().prompt_positions(prompts, mask, new, inputs)
        positions, following = self._count(prompts, *grids, inputs.get("second_per_grid_ts"), mask)
        following = following + torch.arange(new, device=prompts.device)
        return torch.cat([positions, following.expand(3, -1, -1)], -1)
