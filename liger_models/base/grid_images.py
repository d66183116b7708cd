"""The base class of models whose images and videos are patches in a grid of frames, rows and columns."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_models.base.vision_language import VisionLanguageModel, check_input_ids, insert_tokens, repeated_images
from liger_models.common.device import as_tensor
from liger_models.common.errors import check_integers, check_tensors, is_traced
from liger_models.layers.batch import BatchLayout
from liger_models.layers.decoder import CausalLMOutput, take_cu_seqlens
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.patches import count_torn


@dataclass(frozen=True, eq=False)
class GridLayout(BatchLayout):
    """The layout of a batch of text with images or videos.

    Attributes:
        deepstack: a list of DeepStack features, each [B, T, C]. Entry i is added to the residual stream after block i.
            If the tokens are split among R ranks, each entry is [B, T / R, C] and covers only this rank's tokens.
    """

    deepstack: list[Tensor] = field(default_factory=list)


class GridImageModel(VisionLanguageModel):
    """A vision-language model that takes the patches and the grid of each image and each video.

    The vision tower takes patches [N, values], and grids [n, 3] with the frames, rows and columns of each image or
    video. It returns the image tokens [N / merge², C] and a list of DeepStack features, which may be empty. Each
    DeepStack feature has the shape of the image tokens. The tower has the attribute ``merge``, and turns each square of
    ``merge`` × ``merge`` patches into one image token. The tower's layer ``patch_embed`` embeds patches.
    """

    layout_class = GridLayout
    prompt_inputs: ClassVar[tuple[str, ...]] = (
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "second_per_grid_ts",
        "mm_token_type_ids",
    )
    frames_apart: ClassVar[bool] = False
    """Whether each frame of a video has its own timestamp and placeholders in the text."""

    @property
    def images_take_parents(self) -> bool:
        """See `Decoder.images_take_parents`."""
        return True

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | list[float] | None = None,
        mm_token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """For text with or without images and videos, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [N, values], the patches of all images, concatenated. The processor determines the order of
                the values of a patch.
            image_grid_thw: [images, 3] int64, the number of frames, rows and columns of patches of each image. The
                images are in the order of the text.
            pixel_values_videos, video_grid_thw: patches and grids of videos.
            second_per_grid_ts: [videos], the seconds between two consecutive frames of a video's grid, for models whose
                positions depend on this time. Default: 1.
            mm_token_type_ids: ignored; accepted because the processors of transformers return it.
            position_ids: as in `BatchLayout.build`. Default: the positions that the model computes.
            attention_mask, cu_seqlens, parents, inputs_embeds, cache, options: as in `Decoder.forward`; images need
                ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of image tokens; otherwise as in
                `Decoder.forward`.
        """
        cu_seqlens = take_cu_seqlens(cu_seqlens, options)
        embeds, layout = self.prepare(
            input_ids,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            second_per_grid_ts=second_per_grid_ts,
            position_ids=position_ids,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            parents=parents,
            inputs_embeds=inputs_embeds,
            cache=cache,
        )
        # The embeddings [B, T, C] already hold the image tokens; the decoder runs as it does for text.
        return self.run(embeds, layout, **options)

    def prepare(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | list[float] | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
    ) -> tuple[Tensor, BatchLayout]:
        """Return the arguments of `run`: the embeddings with image tokens in place of placeholders, and the layout.

        Args: as in `forward`.
        """
        # Pairs of pixels and grids, or None.
        images = _pair("pixel_values", pixel_values, "image_grid_thw", image_grid_thw)
        videos = _pair("pixel_values_videos", pixel_values_videos, "video_grid_thw", video_grid_thw)
        masks: dict[str, Any] = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "cache": cache}
        masks["parents"] = parents
        if input_ids is None or inputs_embeds is not None:
            if images is not None or videos is not None:
                raise ValueError("forward: pixels need input_ids, which say where the images are.")
            return super().prepare(input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, **masks)
        # Check that the placeholders match the patches. Decoding steps have no placeholders, and compiled code can't
        # read values.
        check_input_ids(input_ids)
        check_tensors(attention_mask=attention_mask)
        self.groups.check_tokens(input_ids.shape[1], whole=False)
        decoding = cache is not None and cache.length > 0 and images is None and videos is None
        if not decoding and not is_traced():
            self._check_counts(input_ids, images, videos, cu_seqlens)
        # The tower runs on all images. Each rank keeps the DeepStack features of its own tokens.
        embeds, levels = self._insert(input_ids, images, videos, cu_seqlens, skip=decoding)
        levels = [self.groups.local_tokens(level) for level in levels]
        # The host launches the small operations that compute positions while the device is busy with the tower.
        if position_ids is None:
            position_ids = self._positions(
                input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, attention_mask, cu_seqlens, parents,
                cache,
            )  # fmt: skip
        shape = embeds.shape[0], embeds.shape[1]
        layout = self.layout(shape, embeds, position_ids=position_ids, deepstack=levels, **masks)
        return embeds, layout

    def image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> tuple[Tensor, ...]:
        """Return the image tokens [tokens, C] of each image or video; the arguments are the same as in `forward`."""
        tokens, _ = self.visual(pixel_values, image_grid_thw.to(pixel_values.device))
        counts = image_grid_thw.prod(1) // self.visual.merge**2
        parts: tuple[Tensor, ...] = tokens.split(counts.tolist())
        return parts

    def after_block(self, index: int, residual: Tensor, layout: BatchLayout) -> Tensor:
        """Return the residual stream after a block.

        DeepStack feature i, if there is one, is added after block i.
        """
        assert isinstance(layout, GridLayout)
        return residual + layout.deepstack[index] if index < len(layout.deepstack) else residual

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
        """Return the positions of the uncached tokens; None if these are the default positions of text."""
        if second_per_grid_ts is not None:
            raise ValueError(
                f"forward: second_per_grid_ts must not be given: positions of {type(self).__name__} do not depend on "
                "it."
            )
        return None

    def media_places(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the masks of the image placeholders and of the video placeholders, each [B, T] bool.

        Args:
            input_ids: [B, T] int64.
            cu_seqlens: [n + 1], boundaries of packed documents, or None.
        """
        return input_ids == self.config.image_token_id, input_ids == self.config.video_token_id

    def ids_to_embed(self, input_ids: Tensor) -> Tensor:
        """Return the ids [B, T] to embed. A model may override this method to replace placeholders with other ids."""
        return input_ids

    def _insert(
        self,
        input_ids: Tensor,
        images: tuple[Tensor, Tensor] | None,
        videos: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
        *,
        skip: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the embeddings with image tokens in place of placeholders, and the DeepStack features.

        The embeddings and each DeepStack feature are [B, T, C]. DeepStack features are 0 for text tokens. The tower
        runs once for images and videos together. If there are no images or videos, a sharded tower runs on zeros,
        because all ranks must gather the tower's weights together.
        """
        embeds = self.embed_tokens(self.ids_to_embed(input_ids))
        side = self.visual.merge
        pairs = (images, videos)
        if all(pair is None for pair in pairs) and (skip or not self.tower_is_sharded):
            return embeds, []
        if all(pair is None for pair in pairs):
            # The tower's output is multiplied by 0, so that the result is unchanged and the tower still takes part in
            # the backward.
            nothing = embeds.new_zeros(side**2, self.visual.patch_embed.in_features)
            unused, unused_levels = self.visual(nothing, torch.tensor([[1, side, side]], device=embeds.device))
            total = sum((level.sum() for level in unused_levels), unused.sum())
            return embeds + 0 * total.to(embeds.dtype), []

        # For images and videos: pixels, grid, and mask of the placeholders.
        places = self.media_places(input_ids, cu_seqlens)
        media = [(*pair, here) for pair, here in zip(pairs, places, strict=True) if pair is not None]
        tokens, levels = self.visual(
            torch.cat([pixels for pixels, _, _ in media]),
            torch.cat([grid.to(pixels.device) for pixels, grid, _ in media]),
        )  # [image tokens, C], and the same shape for each DeepStack feature
        counts = [len(pixels) // side**2 for pixels, _, _ in media]

        def insert(base: Tensor, tokens: Tensor) -> Tensor:
            """Return ``base`` [B, T, C] with the tokens in place of their placeholders."""
            for part, (_, _, here) in zip(tokens.split(counts), media, strict=True):
                base = insert_tokens(base, here, part)
            return base

        return insert(embeds, tokens), [insert(torch.zeros_like(embeds), level) for level in levels]

    def _check_counts(
        self,
        input_ids: Tensor,
        images: tuple[Tensor, Tensor] | None,
        videos: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Raise ValueError unless the placeholders match the patches. This method synchronizes with the device once."""
        side, width = self.visual.merge, self.visual.patch_embed.in_features
        image_places, video_places = self.media_places(input_ids, cu_seqlens)  # [B, T] each
        media = (
            ("image", images, image_places, "pixel_values", "image_grid_thw"),
            ("video", videos, video_places, "pixel_values_videos", "video_grid_thw"),
        )
        counts = []
        for medium, pair, here, _, _ in media:
            # Each number that the checks need is a tensor []. All numbers are copied to the host together.
            thw = input_ids.new_zeros(0, 3) if pair is None else pair[1].to(input_ids)
            frame = thw[:, 1:].prod(1) // side**2  # placeholders of a frame
            size = frame * thw[:, 0]
            uneven = (thw < 1).sum() + (thw[:, 1:] % side).sum()
            together = frame if medium == "video" and self.frames_apart else size
            counts += [here.sum(), thw.prod(1).sum(), uneven, count_torn(here, size, together, cu_seqlens)]

        numbers = torch.stack(counts).view(2, 4).tolist()
        for (medium, pair, _, pixels, grid), (tokens, expected, uneven, torn) in zip(media, numbers, strict=True):
            # The numbers are on the host now, so check them.
            rows = 0 if pair is None else pair[0].shape[0]
            if pair is not None and pair[0].shape[1] != width:
                raise ValueError(f"forward: {pixels} must be [patches, {width}], got {list(pair[0].shape)}.")
            if uneven:
                raise ValueError(
                    f"forward: {grid} must have at least one frame, and rows and columns that are multiples of {side}, "
                    f"got {None if pair is None else pair[1].tolist()}."
                )
            if tokens != 0 and pair is None:
                raise ValueError(
                    f"forward: {tokens} {medium} placeholders in input_ids must have {pixels}, got none. Pass what the "
                    "processor returns."
                )
            if rows != expected:
                raise ValueError(
                    f"forward: {pixels} must hold the {expected} patches that {grid} describes, got {rows}."
                )
            if tokens * side**2 != rows:
                raise ValueError(
                    f"forward: input_ids must have one {medium} placeholder for each of the {rows // side**2} {medium} "
                    f"tokens, got {tokens}. Expand them as the processor does; was the text truncated?"
                )
            if torn != 0:
                raise ValueError(
                    f"forward: the placeholders of each {medium} must be contiguous in input_ids and in one document, "
                    f"got {torn} apart from the one before. Are {pixels} and {grid} in the order of the text?"
                )

    def repeat_prompts(self, input_ids: Tensor, inputs: dict[str, Any], times: int) -> dict[str, Any]:
        """See `VisionLanguageModel.repeat_prompts`. Images and videos are in the order of their placeholders."""
        of_rows = {name: x for name, x in inputs.items() if name == "mm_token_type_ids"}
        repeated = inputs | super().repeat_prompts(input_ids, of_rows, times)
        names = (("image", "pixel_values"), ("video", "pixel_values_videos"))
        for (medium, pixels), here in zip(names, self.media_places(input_ids), strict=True):
            grid = inputs.get(f"{medium}_grid_thw")
            if not isinstance(grid, Tensor) or not len(grid):
                continue
            patches = grid.prod(1)
            chosen = repeated_images(here.sum(1), patches // self.visual.merge**2, times)
            parts = inputs[pixels].split(patches.tolist())
            repeated[pixels] = torch.cat([parts[i] for i in chosen])
            repeated[f"{medium}_grid_thw"] = grid[chosen]
            seconds = inputs.get("second_per_grid_ts")
            if medium == "video" and seconds is not None:
                repeated["second_per_grid_ts"] = as_tensor(seconds)[chosen]
        return repeated


def _pair(pixels_name: str, pixels: Tensor | None, grid_name: str, grid: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if pixels is None and grid is None:
        return None
    check_tensors(**{pixels_name: pixels})
    check_integers(**{grid_name: grid})
    if pixels is None or grid is None:
        raise ValueError(f"forward: {pixels_name} and {grid_name} must be given together, got only one of them.")
    assert pixels is not None
    assert grid is not None
    if pixels.dim() != 2 or grid.dim() != 2 or grid.shape[1] != 3:
        raise ValueError(
            f"forward: {pixels_name} must be [patches, values] and {grid_name} [items, 3], got {list(pixels.shape)} "
            f"and {list(grid.shape)}."
        )
    return (pixels, grid) if len(pixels) or len(grid) else None  # collators pass empty tensors for text-only batches
