"""The base class of vision-language models: a decoder with a vision tower, and a processor for its inputs."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.base.causal_lm import CausalLM
from liger_models.base.processor import Processor
from liger_models.common.errors import check_integers
from liger_models.convert.config_map import write_config
from liger_models.layers.decoder import check_policy
from liger_models.layers.layer import set_policy


class VisionLanguageModel(CausalLM):
    """A decoder with a vision tower, for text with or without images."""

    tower_class: ClassVar[Any]
    """The class of the vision tower. `build_visual` calls it with ``(config, kernels)``."""
    processor_class: ClassVar[type[Processor]]

    def build_visual(self, config: Any) -> nn.Module:
        """Build the vision tower."""
        tower: nn.Module = self.tower_class(config, self.kernels)
        return tower

    def set_checkpointing(
        self,
        policy: str | list[str],
        *,
        offload_layers: int = 0,
        vision_policy: str | None = None,
        budget: int | str | None = None,
        tokens: int | None = None,
    ) -> None:
        """Choose which activations are saved for the backward, and where; see `CausalLM.set_checkpointing`.

        Args:
            policy, offload_layers, budget, tokens: settings for the blocks of the language model.
            vision_policy: policy for the blocks of the tower. Default: ``policy`` if it is one policy for all blocks;
                the policy that the plan chooses for the first block if ``policy`` is "auto"; "none" if ``policy`` is a
                list.
        """
        super().set_checkpointing(policy, offload_layers=offload_layers, budget=budget, tokens=tokens)
        if vision_policy is None:
            if policy == "auto":  # the plan has set the policy of the tower
                return
            vision_policy = policy if isinstance(policy, str) else "none"
        check_policy("vision_policy", vision_policy)
        set_policy(self.visual, vision_policy)

    def repeat_prompts(self, input_ids: Tensor, inputs: dict[str, Any], times: int) -> dict[str, Any]:
        """Repeat each of B prompts ``times`` times, as beam search does, and return the inputs of the resulting batch.

        Args:
            input_ids: [B, T] int64, the prompts before they are repeated.
            inputs: the arguments named in `prompt_inputs` and their values. A value of None stays None.
            times: number of consecutive copies of each prompt.
        """
        return {name: x.repeat_interleave(times, 0) if isinstance(x, Tensor) else x for name, x in inputs.items()}

    @property
    def tower_is_sharded(self) -> bool:
        """Whether FSDP shards parameters of the tower, so that all ranks must run the tower together.

        The property is True if FSDP has sharded the tower's blocks, the tower, or the whole model.
        """
        return any(hasattr(module, "reshard") for module in (self, *self.visual.modules()))

    @property
    def processor(self) -> Any:
        """The processor, which converts texts and images into model inputs with the settings of the checkpoint.

        Raises:
            ValueError: the checkpoint has no tokenizer or no image settings, or the tokenizer or settings do not fit
                the model.
        """
        if "_processor" not in self.__dict__:
            # The processor is built only once, so that changes to its settings are saved with the model.
            processor = self.processor_class.of(self)
            processor.files = self.assets
            processor.hf_config = write_config(self.config, self.hf_config, self.dtype)
            self.__dict__["_processor"] = processor
        return self.__dict__["_processor"]

    def current_assets(self) -> dict[str, bytes]:
        """Return the files that are saved next to the weights, including changes to the tokenizer and the processor."""
        processor: Processor | None = self.__dict__.get("_processor")
        return super().current_assets() | (processor.changed_files() if processor else {})


class _Insert(torch.autograd.Function):
    """See `insert_tokens`.

    Unlike the backward of ``masked_scatter``, the backward of this op does not make the host wait until the device has
    counted the placeholders.
    """

    @staticmethod
    def forward(ctx: Any, embeds: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(tokens)
        return embeds.masked_scatter(places[..., None], tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (places,) = ctx.saved_tensors
        embeds = tokens = None
        if ctx.needs_input_grad[0]:
            embeds = grad.masked_fill(places[..., None], 0)
        if ctx.needs_input_grad[2]:
            # The row of each token in [B · T, C], or −1 for tokens without a placeholder.
            rows = places.flatten().nonzero_static(size=ctx.count)[:, 0]
            tokens = grad.flatten(0, 1)[rows.clamp(min=0)].masked_fill((rows < 0)[:, None], 0)
        return embeds, None, tokens


def insert_tokens(embeds: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """Return embeddings with image tokens in place of their placeholders, without waiting for the device.

    Args:
        embeds: [B, T, C].
        places: [B, T] bool, where the placeholders are.
        tokens: [n, C] in any dtype, with at least as many rows as there are placeholders. Surplus rows at the end are
            ignored.
    """
    inserted: Tensor = _Insert.apply(embeds, places, tokens.to(embeds.dtype))  # type: ignore[no-untyped-call]
    return inserted


def check_input_ids(input_ids: Tensor) -> None:
    """Raise ValueError unless token ids are integers [B, T]."""
    check_integers(input_ids=input_ids)
    if input_ids.dim() != 2:
        raise ValueError(f"forward: input_ids must be [B, T], got {list(input_ids.shape)}.")


def placeholder_ids(config: Any) -> list[int]:
    """For any model's config, return the ids of the tokens that stand for images, videos and audio, in this order.

    Some of these ids can lie outside of the head's vocabulary.
    """
    names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
    return [getattr(config, name) for name in names if getattr(config, name, None) is not None]


def check_placeholders(count: int, expected: int, torn: int, images: int | None, number: str = "") -> None:
    """Raise ValueError unless the image placeholders of a batch match its images.

    Args:
        count: number of placeholders.
        expected: number of image tokens.
        torn: number of placeholders that are not adjacent to the previous placeholder; see `count_torn`.
        images: number of images; None if there are no pixels.
        number: if all images have the same number of placeholders, this number as text for the error message.
    """
    if count != 0 and images is None:
        raise ValueError(
            f"forward: {count} image placeholders in input_ids must have pixel_values, got none. Pass what the "
            "processor returns."
        )
    if count != expected:
        raise ValueError(
            f"forward: input_ids must have one image placeholder for each of the {expected} image tokens "
            f"({images or 0} images), got {count}. Expand them as the processor does; was the text truncated?"
        )
    if torn != 0:
        raise ValueError(
            f"forward: the {number}placeholders of each image must be contiguous in input_ids and in one document, got "
            f"{torn} apart from the one before. Expand them as the processor does."
        )


def repeated_images(placeholders: Tensor, tokens: Tensor, times: int) -> list[int]:
    """Return the indices of the images for a batch in which each row is repeated ``times`` times.

    Args:
        placeholders: [B], number of placeholders of each row.
        tokens: [images], number of image tokens of each image. The images are in the order of the text.
        times: number of consecutive copies of each row.
    """
    # An image belongs to the row that has the placeholder of the image's last token.
    ends = tokens.to(placeholders.device).cumsum(0)
    after = torch.searchsorted(ends, placeholders.cumsum(0), right=True).tolist()
    rows = zip([0, *after], after, strict=False)
    return [image for first, last in rows for _ in range(times) for image in range(first, last)]
