"""The shell that vision-language models share: image tokens take the place of their placeholders in the text."""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels.dispatch import check

from .causal_lm import CausalLM, CausalLMOutput, check_policy, set_recompute
from .cross_attention import ImageStates, tiles_seen
from .patches import count_torn, mrope_positions
from .sequence import DecodeCache

if TYPE_CHECKING:
    from liger_models.processing.gemma3 import Gemma3Processor
    from liger_models.processing.mllama import MllamaProcessor
    from liger_models.processing.qwen_vl import QwenVLProcessor


class ImageFeatures(NamedTuple):
    """Result of a vision tower.

    Attributes:
        tokens: [n, C], what takes the place of the placeholders, in their order.
        deepstack: [n, C] each, what is added to the stream at the placeholders behind the first blocks.
    """

    tokens: Tensor
    deepstack: list[Tensor]


class VisionLanguageModel(CausalLM):
    """A decoder whose text has images in it. Architectures set ``visual`` besides what `CausalLM` has."""

    visual: Any
    """A vision tower, with its blocks in ``blocks``."""

    def set_checkpointing(
        self, policy: str | list[str], *, offload_layers: int = 0, vision_policy: str | None = None
    ) -> None:
        """Choose what is kept for the backward, and where; see `CausalLM.set_checkpointing`.

        Args:
            policy, offload_layers: of the language model's blocks.
            vision_policy: of the tower's blocks. Default: ``policy``, if that is one for all blocks, or "none".
        """
        super().set_checkpointing(policy, offload_layers=offload_layers)
        if vision_policy is None:
            vision_policy = policy if isinstance(policy, str) else "none"
        check_policy("vision_policy", vision_policy)
        set_recompute(self.visual, vision_policy)

    @property
    def tower_is_sharded(self) -> bool:
        """Whether all ranks gather the tower's weights together (FSDP)."""
        return hasattr(self.visual.blocks[0], "reshard")


class MRopeModel(VisionLanguageModel):
    """A vision-language model with videos, and positions in time, height and width (M-RoPE)."""

    prompt_inputs: ClassVar[tuple[str, ...]] = (
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "second_per_grid_ts",
        "mm_token_type_ids",
    )
    frames_apart: ClassVar[bool] = False
    """Whether each frame of a video stands for itself in the text."""

    @property
    def processor(self) -> "QwenVLProcessor":
        """Makes the model's inputs of texts, images and videos, by the settings that came with the checkpoint.

        Raises:
            ValueError: the checkpoint had no tokenizer.
        """
        from liger_models.processing.qwen_vl import QwenVLProcessor

        if "_processor" not in self.__dict__:
            self.__dict__["_processor"] = QwenVLProcessor.of(self)
        processor: QwenVLProcessor = self.__dict__["_processor"]
        return processor

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
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Logits, or with ``labels`` the loss; without pixels, of a text.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [N, channels · frames · height · width], the patches of all images, end to end.
            image_grid_thw: [images, 3] int64, frames, rows and columns of patches of each, in the order of the text.
            pixel_values_videos, video_grid_thw: the same of all videos.
            second_per_grid_ts: [videos], seconds from one frame of patches to the next, where positions count them.
                Default: 1.
            mm_token_type_ids: not used, the token ids say it; transformers' processors give it.
            position_ids: as in `Sequence.build`. Default: `multimodal_positions`.
            attention_mask, cu_seqlens, inputs_embeds, cache, options: as in `CausalLM.forward`; images need
                ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: placeholders and image tokens that differ in number; otherwise as `CausalLM.forward`.
        """
        images = _pair("pixel_values", pixel_values, "image_grid_thw", image_grid_thw)
        videos = _pair("pixel_values_videos", pixel_values_videos, "video_grid_thw", video_grid_thw)
        if input_ids is None or inputs_embeds is not None:
            check(images is None and videos is None, "forward: pixels need input_ids, which say where images stand.")
            return super().forward(
                input_ids, position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens,
                inputs_embeds=inputs_embeds, cache=cache, **options,
            )  # fmt: skip
        check(input_ids.dim() == 2, f"forward: input_ids must be [B, T], got {list(input_ids.shape)}.")
        decoding = cache is not None and cache.length > 0 and images is None and videos is None
        if not decoding and not torch.compiler.is_compiling():
            self._check_counts(input_ids, images, videos, cu_seqlens)
        if position_ids is None:
            position_ids = self._positions(
                input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, attention_mask, cu_seqlens, cache
            )
        embeds, deepstack = self._insert(input_ids, images, videos, skip=decoding)
        return super().forward(
            position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, inputs_embeds=embeds,
            cache=cache, deepstack=deepstack, **options,
        )  # fmt: skip

    def _insert(
        self,
        input_ids: Tensor,
        images: tuple[Tensor, Tensor] | None,
        videos: tuple[Tensor, Tensor] | None,
        *,
        skip: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """The embeddings, image tokens in their places, and what is added behind the first blocks, [B, T, C] each.

        The tower runs once for images and videos. Sharded, it runs even without any, on zeros: all ranks must gather
        its weights together, whichever of them has images.
        """
        embeds = self.embed_tokens(input_ids)
        side = self.config.vision_config.spatial_merge_size
        kinds = (images, self.config.image_token_id), (videos, self.config.video_token_id)
        given = [(*pair, token) for pair, token in kinds if pair is not None]
        if not given and (skip or not self.tower_is_sharded):
            return embeds, []
        if not given:
            nothing = embeds.new_zeros(side**2, self.visual.patch_embed.in_features)
            unused = self.visual(nothing, torch.tensor([[1, side, side]], device=embeds.device))
            total = sum((level.sum() for level in unused.deepstack), unused.tokens.sum())
            return embeds + 0 * total.to(embeds.dtype), []
        features = self.visual(
            torch.cat([pixels for pixels, _, _ in given]),
            torch.cat([grid.to(pixels.device) for pixels, grid, _ in given]),
        )
        counts = [len(pixels) // side**2 for pixels, _, _ in given]

        def place(base: Tensor, tokens: Tensor) -> Tensor:
            for part, (_, _, token) in zip(tokens.to(base.dtype).split(counts), given, strict=True):
                base = base.masked_scatter((input_ids == token)[..., None], part)
            return base

        deepstack = [place(torch.zeros_like(embeds), level) for level in features.deepstack]
        return place(embeds, features.tokens), deepstack

    def _check_counts(
        self,
        input_ids: Tensor,
        images: tuple[Tensor, Tensor] | None,
        videos: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Refuse placeholders and patches that do not fit. Asks the device once."""
        side, width = self.config.vision_config.spatial_merge_size, self.visual.patch_embed.in_features
        counts = []
        for given, token in (images, self.config.image_token_id), (videos, self.config.video_token_id):
            here = input_ids == token
            thw = input_ids.new_zeros(0, 3) if given is None else given[1].to(input_ids)
            frame, apart = thw[:, 1:].prod(1) // side**2, self.frames_apart and given is videos
            size = frame * thw[:, 0]
            uneven = (thw < 1).sum() + (thw[:, 1:] % side).sum()
            torn = count_torn(here, size, frame if apart else size, cu_seqlens)
            counts += [here.sum(), thw.prod(1).sum(), uneven, torn]
        numbers = torch.stack(counts).tolist()
        for kind, given, (tokens, expected, wrong, torn) in zip(
            ("image", "video"), (images, videos), (numbers[:4], numbers[4:]), strict=True
        ):
            pixels, grid = ("pixel_values", "image_grid_thw") if kind == "image" else (
                "pixel_values_videos", "video_grid_thw"
            )  # fmt: skip
            rows = 0 if given is None else given[0].shape[0]
            check(
                given is None or given[0].shape[1] == width,
                f"forward: {pixels} must be [patches, {width}], got {given and list(given[0].shape)}.",
            )
            check(
                not wrong,
                f"forward: {grid} must have frames, and rows and columns of patches that are multiples of {side}, got "
                f"{given[1].tolist() if given is not None and wrong else None}.",
            )
            check(
                tokens == 0 or given is not None,
                f"forward: {tokens} {kind} placeholders in input_ids must have {pixels}, got none. Pass what the "
                "processor returns.",
            )
            check(
                rows == expected,
                f"forward: {pixels} must hold the {expected} patches that {grid} describes, got {rows}.",
            )
            check(
                tokens * side**2 == rows,
                f"forward: input_ids must have one {kind} placeholder for each of the {rows // side**2} {kind} tokens, "
                f"got {tokens}. Expand them as the processor does; was the text cut off?",
            )
            check(
                torn == 0,
                f"forward: the placeholders of each {kind} must stand together in input_ids and in one document, got "
                f"{torn} apart from the one before. Must {pixels} and {grid} be in another order?",
            )

    def multimodal_positions(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        *,
        second_per_grid_ts: Tensor | list[float] | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Positions in time, height and width, [3, B, T] int64; see `mrope_positions`.

        Args:
            input_ids: [B, T] int64.
            image_grid_thw, video_grid_thw, second_per_grid_ts: as in `forward`.
            attention_mask: [B, T], 0 for padding, which is not counted.
            cu_seqlens: [n + 1], boundaries of packed documents, each counts from 0.

        Raises:
            ValueError: ``second_per_grid_ts`` for a model whose positions count frames.
        """
        return self._count(input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, attention_mask, cu_seqlens)[0]

    def _count(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        second_per_grid_ts: Tensor | list[float] | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`multimodal_positions`, and the position [B, 1] of what follows."""
        rate = getattr(self.config.vision_config, "tokens_per_second", None)
        check(
            rate is not None or second_per_grid_ts is None,
            f"forward: second_per_grid_ts must not be given, {type(self).__name__}'s positions do not depend on it.",
        )
        check(
            mask is None or mask.shape == input_ids.shape,
            f"forward: attention_mask must be {list(input_ids.shape)} like input_ids, or with what is cached in front, "
            f"got {None if mask is None else list(mask.shape)}.",
        )
        interval = None
        if rate is not None and video_grid_thw is not None:
            seconds = torch.ones(len(video_grid_thw)) if second_per_grid_ts is None else second_per_grid_ts
            interval = torch.as_tensor(seconds, dtype=torch.float32) * rate
            check(
                interval.shape == video_grid_thw.shape[:1],
                f"forward: second_per_grid_ts must have a number for each of the {len(video_grid_thw)} videos, got "
                f"{list(interval.shape)}.",
            )
        kinds = (input_ids == self.config.image_token_id).long() + 2 * (input_ids == self.config.video_token_id)
        return mrope_positions(
            kinds, [image_grid_thw, video_grid_thw],
            merge=self.config.vision_config.spatial_merge_size, mask=mask, cu_seqlens=cu_seqlens,
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
        cache: DecodeCache | None,
    ) -> Tensor | None:
        """Positions of the tokens behind those that are cached; None where a text counts by itself."""
        plain = cache is None or (cache.position_offset is None and attention_mask is None)
        if image_grid_thw is None and video_grid_thw is None and plain:
            return None
        B, T = input_ids.shape
        mask = None if attention_mask is None else attention_mask[..., -T:]
        positions, following = self._count(
            input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, mask, cu_seqlens
        )
        if cache is None:
            return positions
        tokens = torch.full((B, 1), cache.length + T, device=input_ids.device)
        before = torch.full((B, 1), cache.length, device=input_ids.device)
        if attention_mask is not None:
            seen = (attention_mask != 0).long()
            tokens, before = seen.sum(1, keepdim=True), seen[:, :-T].sum(1, keepdim=True)
        if cache.position_offset is not None:
            before = before + cache.position_offset
        cache.position_offset = before + following - tokens
        return positions + before

    def prompt_positions(self, prompts: Tensor, mask: Tensor | None, new: int, inputs: dict[str, Any]) -> Tensor:
        """As in `CausalLM`, in time, height and width if there are images."""
        grids = inputs.get("image_grid_thw"), inputs.get("video_grid_thw")
        if all(grid is None for grid in grids):
            return super().prompt_positions(prompts, mask, new, inputs)
        positions, following = self._count(prompts, *grids, inputs.get("second_per_grid_ts"), mask)
        following = following + torch.arange(new, device=prompts.device)
        return torch.cat([positions, following.expand(3, -1, -1)], -1)


def _check_tensors(**given: object) -> None:
    for name, value in given.items():
        check(
            value is None or isinstance(value, Tensor),
            f"forward: {name} must be a tensor, got {type(value).__name__}. Ask a processor for return_tensors='pt'.",
        )


def _pair(pixels_name: str, pixels: Tensor | None, grid_name: str, grid: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if pixels is None and grid is None:
        return None
    _check_tensors(**{pixels_name: pixels, grid_name: grid})
    check(
        pixels is not None and grid is not None,
        f"forward: {pixels_name} and {grid_name} must be given together, got only one of them.",
    )
    assert pixels is not None
    assert grid is not None
    check(
        pixels.dim() == 2 and grid.dim() == 2 and grid.shape[1] == 3,
        f"forward: {pixels_name} must be [patches, values] and {grid_name} [items, 3], "
        f"got {list(pixels.shape)} and {list(grid.shape)}.",
    )
    return (pixels, grid) if len(pixels) or len(grid) else None  # a collator's batch without any


class SquareImageModel(VisionLanguageModel):
    """A vision-language model whose images have one size, and whose image tokens see all of their own image."""

    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "token_type_ids")

    @property
    def processor(self) -> "Gemma3Processor":
        """Makes the model's inputs of texts and images, by the settings that came with the checkpoint.

        Raises:
            ValueError: the checkpoint had no tokenizer.
        """
        from liger_models.processing.gemma3 import Gemma3Processor

        if "_processor" not in self.__dict__:
            self.__dict__["_processor"] = Gemma3Processor.of(self)
        processor: Gemma3Processor = self.__dict__["_processor"]
        return processor

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Logits, or with ``labels`` the loss; without pixels, of a text.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [images, channels, height, width], in the order of the text.
            token_type_ids: not used, the token ids say it; transformers' processor gives it.
            inputs_embeds, cache, options: as in `CausalLM.forward`; images need ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: placeholders and image tokens that differ in number; otherwise as `CausalLM.forward`.
        """
        if input_ids is None or inputs_embeds is not None:
            check(pixel_values is None, "forward: pixels need input_ids, which say where images stand.")
            return super().forward(input_ids, inputs_embeds=inputs_embeds, cache=cache, **options)
        check(input_ids.dim() == 2, f"forward: input_ids must be [B, T], got {list(input_ids.shape)}.")
        _check_tensors(pixel_values=pixel_values)
        vision, per_image = self.config.vision_config, self.config.mm_tokens_per_image
        size = (vision.num_channels, vision.image_size, vision.image_size)
        check(
            pixel_values is None or (pixel_values.dim() == 4 and tuple(pixel_values.shape[1:]) == size),
            f"forward: pixel_values must be [images, {', '.join(map(str, size))}], "
            f"got {None if pixel_values is None else list(pixel_values.shape)}.",
        )
        here = input_ids == self.config.image_token_index
        decoding = cache is not None and cache.length > 0 and pixel_values is None
        if not decoding and not torch.compiler.is_compiling():
            images = 0 if pixel_values is None else len(pixel_values)
            sizes = input_ids.new_full((images,), per_image)
            found, torn = torch.stack([here.sum(), count_torn(here, sizes, sizes, options.get("cu_seqlens"))]).tolist()
            check(
                found == 0 or pixel_values is not None,
                f"forward: {found} image placeholders in input_ids must have pixel_values, got none. Pass what the "
                "processor returns.",
            )
            check(
                found == images * per_image,
                f"forward: input_ids must have one image placeholder for each of the {images * per_image} image tokens "
                f"({images} images), got {found}. Expand them as the processor does; was the text cut off?",
            )
            check(
                torn == 0,
                f"forward: the {per_image} placeholders of each image must stand together in input_ids and in one "
                f"document, got {torn} apart from the one before. Expand them as the processor does.",
            )
        embeds = self.embed_tokens(input_ids.masked_fill(here, 0))  # the placeholder may be no word
        if pixel_values is None and self.tower_is_sharded and not decoding:
            unused = self.visual(embeds.new_zeros(1, *size))
            embeds = embeds + 0 * unused.sum().to(embeds.dtype)
        if pixel_values is None:
            return super().forward(inputs_embeds=embeds, cache=cache, **options)
        embeds = embeds.masked_scatter(here[..., None], self.visual(pixel_values).to(embeds.dtype))
        return super().forward(inputs_embeds=embeds, cache=cache, visible_until=ends_of_runs(here), **options)


def ends_of_runs(inside: Tensor) -> Tensor:
    """Of [B, T] bool the last place of the run of True that each is in, of others the place itself: [B, T] int64."""
    T = inside.shape[1]
    place = torch.arange(T, device=inside.device).expand_as(inside)
    last = inside & ~torch.nn.functional.pad(inside, (0, 1))[:, 1:]
    ends = torch.where(last, place, T).flip(1).cummin(1).values.flip(1)
    return torch.where(inside, ends, place)


class TiledImageModel(VisionLanguageModel):
    """A vision-language model whose images come in tiles, and whose text attends to them in layers of their own."""

    prompt_inputs: ClassVar[tuple[str, ...]] = (
        "pixel_values",
        "aspect_ratio_ids",
        "aspect_ratio_mask",
        "cross_attention_mask",
    )

    @property
    def processor(self) -> "MllamaProcessor":
        """Makes the model's inputs of texts and images, by the settings that came with the checkpoint.

        Raises:
            ValueError: the checkpoint had no tokenizer.
        """
        from liger_models.processing.mllama import MllamaProcessor

        if "_processor" not in self.__dict__:
            self.__dict__["_processor"] = MllamaProcessor.of(self)
        processor: MllamaProcessor = self.__dict__["_processor"]
        return processor

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Logits, or with ``labels`` the loss; without pixels, of a text.

        Args:
            input_ids: [B, T] int64, with one placeholder per image.
            pixel_values: [B, M, tiles, channels, height, width], the M images of each row in the order of its text; a
                row with fewer has anything in the other places.
            aspect_ratio_ids: [B, M] int64, 1 + the number of each image's aspect ratio, 0 for no image.
            aspect_ratio_mask: not used, the aspect ratios say it; transformers' processor gives it.
            cross_attention_mask: [B, T, M, tiles], nonzero where a token sees a tile; what comes later sees what the
                last token sees. Default: by the placeholders, see `tiles_seen`.
            cu_seqlens, inputs_embeds, cache, options: as in `CausalLM.forward`; images need ``input_ids``, and come
                with the first tokens of a cache.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: placeholders and images that differ in number, or shapes that do not fit; otherwise as
                `CausalLM.forward`.
        """
        given = pixel_values is not None
        check(
            given == (aspect_ratio_ids is not None) and (given or cross_attention_mask is None),
            "forward: pixel_values and aspect_ratio_ids must be given together, and cross_attention_mask with them.",
        )
        past = 0 if cache is None else cache.length
        if input_ids is None or inputs_embeds is not None:
            check(not given, "forward: pixels need input_ids, which say where images stand.")
            images = self._cached(inputs_embeds, cache) if past else None
            return super().forward(
                input_ids, inputs_embeds=inputs_embeds, cu_seqlens=cu_seqlens, cache=cache, images=images, **options
            )
        check(input_ids.dim() == 2, f"forward: input_ids must be [B, T], got {list(input_ids.shape)}.")
        check(
            not (given and past), "forward: images must come with the first tokens of a cache. Begin with all of them."
        )
        _check_tensors(
            pixel_values=pixel_values, aspect_ratio_ids=aspect_ratio_ids, cross_attention_mask=cross_attention_mask
        )
        here = input_ids == self.config.image_token_index
        checked = not past and not torch.compiler.is_compiling()
        if checked and not self._check_images(here, pixel_values, aspect_ratio_ids):
            pixel_values = None  # places for images, such as rows without any of a batch with some
        if pixel_values is not None and aspect_ratio_ids is not None:
            images = self._look(here, pixel_values, aspect_ratio_ids, cross_attention_mask, cu_seqlens, cache)
        elif past:
            images = self._cached(input_ids, cache)
        else:
            if cache is not None:
                cache.images_seen = None
            images = self._nothing(here) if self.tower_is_sharded else None
        return super().forward(input_ids, cu_seqlens=cu_seqlens, cache=cache, images=images, **options)

    def _look(
        self,
        here: Tensor,
        pixels: Tensor,
        ratios: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: DecodeCache | None,
    ) -> ImageStates:
        """The images that there are through the tower, and who sees them."""
        vision = self.config.vision_config
        ratios = ratios.to(pixels.device)
        real, number = ratios > 0, torch.arange(vision.max_num_tiles, device=pixels.device)
        counts = [0, *(rows * columns for rows, columns in vision.supported_aspect_ratios)]
        used = number < torch.tensor(counts, device=pixels.device)[ratios][..., None]  # [B, M, tiles]
        features = self.visual(pixels[real], ratios[real], used[real])  # [n, tokens, C]
        tokens = features.new_zeros(*real.shape, *features.shape[1:])
        tokens = tokens.masked_scatter(real[..., None, None], features).flatten(1, 2)
        seen, own = tiles_seen(here, real, used, cu_seqlens)
        if mask is not None:
            T, size = here.shape[1], [len(here), min(here.shape[1], mask.shape[1]), *used.shape[1:]]
            check(
                list(mask[:, :T].shape) == size,
                f"forward: cross_attention_mask must be {size}, got {list(mask.shape)}.",
            )
            mask = torch.cat([mask[:, :T], mask[:, -1:].expand(-1, max(T - mask.shape[1], 0), -1, -1)], 1)
            seen = (mask != 0).flatten(2).to(pixels.device)
        if cache is not None:
            cache.images_seen = torch.stack([seen[:, -1], own[:, -1]], 1)
        return ImageStates.build(tokens, seen, own, vision.tokens_per_tile, cache, self.ranks, self.context_ranks)

    def _cached(self, new: Tensor | None, cache: DecodeCache | None) -> ImageStates | None:
        """The states that new tokens [B, T, ...] see, whose keys and values are cached; None without images."""
        if cache is None or cache.images_seen is None or new is None:
            return None
        seen, own = (each[:, None].expand(-1, new.shape[1], -1) for each in cache.images_seen.unbind(1))
        return ImageStates.build(None, seen, own, self.config.vision_config.tokens_per_tile, cache)

    def _nothing(self, here: Tensor) -> ImageStates:
        """One image of zeros that nobody sees: all ranks must gather weights together, whichever of them has images."""
        vision, device = self.config.vision_config, here.device
        size = (vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        used = torch.ones(1, vision.max_num_tiles, dtype=torch.bool, device=device)
        tokens = self.visual(
            torch.zeros(1, *size, device=device), torch.ones(1, dtype=torch.int64, device=device), used
        )
        nobody = torch.zeros(*here.shape, vision.max_num_tiles, dtype=torch.bool, device=device)
        return ImageStates.build(
            tokens.expand(len(here), -1, -1), nobody, nobody[:, :1], vision.tokens_per_tile, None, self.ranks,
            self.context_ranks,
        )  # fmt: skip

    def _check_images(self, here: Tensor, pixels: Tensor | None, ratios: Tensor | None) -> int:
        """The number of images; refuses placeholders and images that do not fit. Asks the device once."""
        if pixels is None or ratios is None:
            found = int(here.sum())
            check(
                found == 0,
                f"forward: {found} image placeholders in input_ids must have pixel_values, got none. Pass what the "
                "processor returns.",
            )
            return 0
        vision = self.config.vision_config
        size = (vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        check(
            pixels.dim() == 6 and len(pixels) == len(here) and tuple(pixels.shape[2:]) == size,
            f"forward: pixel_values must be [{len(here)}, images, {', '.join(map(str, size))}], "
            f"got {list(pixels.shape)}.",
        )
        check(
            ratios.shape == pixels.shape[:2],
            f"forward: aspect_ratio_ids must be {list(pixels.shape[:2])} like pixel_values, got {list(ratios.shape)}.",
        )
        ratios, kinds = ratios.to(here.device), len(vision.supported_aspect_ratios)
        wrong = (ratios < 0) | (ratios > kinds)
        placeholders, images, unknown = torch.stack([here.sum(1), (ratios > 0).sum(1), wrong.sum(1)]).tolist()
        check(sum(unknown) == 0, f"forward: aspect_ratio_ids must be 0 (no image) to {kinds}, got {ratios.tolist()}.")
        check(
            placeholders == images,
            f"forward: input_ids must have a placeholder for each image of a row ({images}), got {placeholders}. "
            "Pass what the processor returns; was the text cut off?",
        )
        return sum(images)
