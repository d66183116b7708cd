"""The base class of vision-language models: a decoder with a vision tower, and a processor for its inputs."""

from typing import Any, ClassVar

from torch import Tensor, nn

from liger_models.base.causal_lm import CausalLM
from liger_models.base.processor import Processor
from liger_models.common.errors import check_integers
from liger_models.convert.config_map import write_config
from liger_models.layers.decoder import check_policy
from liger_models.layers.layer import set_policy


class VisionLanguageModel(CausalLM):
    """A decoder for text with images."""

    tower_class: ClassVar[Any]
    """The class of the vision tower, which is called with ``(config, kernels)``; see `build_visual`."""
    processor_class: ClassVar[type[Processor]]

    def build_visual(self, config: Any) -> nn.Module:
        """The vision tower."""
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
            policy, offload_layers, budget, tokens: for the blocks of the language model.
            vision_policy: policy for the blocks of the tower. Default: ``policy`` if it is one for all blocks, that of
                the first block with "auto", else "none".
        """
        super().set_checkpointing(policy, offload_layers=offload_layers, budget=budget, tokens=tokens)
        if vision_policy is None:
            if policy == "auto":
                return
            vision_policy = policy if isinstance(policy, str) else "none"
        check_policy("vision_policy", vision_policy)
        set_policy(self.visual, vision_policy)

    def repeat_prompts(self, input_ids: Tensor, inputs: dict[str, Any], times: int) -> dict[str, Any]:
        """The inputs of prompts [B, T] whose rows are each repeated ``times``, as for beams.

        Args:
            input_ids: [B, T] int64, the prompts before they are repeated.
            inputs: `prompt_inputs`; None is kept.
            times: how often each row is repeated, one after the other.
        """
        return {name: x.repeat_interleave(times, 0) if isinstance(x, Tensor) else x for name, x in inputs.items()}

    @property
    def tower_is_sharded(self) -> bool:
        """Whether FSDP holds parameters of the tower, so that all ranks must use them together.

        They may be in groups of blocks, of the tower, or of the whole model.
        """
        return any(hasattr(module, "reshard") for module in (self, *self.visual.modules()))

    @property
    def processor(self) -> Any:
        """The processor, which turns texts and images into model inputs by the settings in the checkpoint.

        Raises:
            ValueError: the checkpoint has no tokenizer or no settings, or they do not fit the model.
        """
        if "_processor" not in self.__dict__:
            processor = self.processor_class.of(self)
            processor.files = self.assets
            processor.hf_config = write_config(self.config, self.hf_config, self.dtype)
            self.__dict__["_processor"] = processor
        return self.__dict__["_processor"]

    def current_assets(self) -> dict[str, bytes]:
        """The files that are saved with the checkpoint, including changes to the tokenizer and the processor."""
        processor: Processor | None = self.__dict__.get("_processor")
        return super().current_assets() | (processor.changed_files() if processor else {})


def check_input_ids(input_ids: Tensor) -> None:
    """Raise ValueError unless token ids are integers [B, T]."""
    check_integers(input_ids=input_ids)
    if input_ids.dim() != 2:
        raise ValueError(f"forward: input_ids must be [B, T], got {list(input_ids.shape)}.")


def check_placeholders(found: int, expected: int, torn: int, images: int | None, number: str = "") -> None:
    """Raise ValueError unless the placeholders of images in a batch are those of its images.

    Args:
        found: number of placeholders.
        expected: number of image tokens.
        torn: number of placeholders that are apart from the one before; see `count_torn`.
        images: number of images; None without pixels.
        number: the number of placeholders of each image, for the error, if it is the same for all.
    """
    if found != 0 and images is None:
        raise ValueError(
            f"forward: {found} image placeholders in input_ids must have pixel_values, got none. Pass what the "
            "processor returns."
        )
    if found != expected:
        raise ValueError(
            f"forward: input_ids must have one image placeholder for each of the {expected} image tokens "
            f"({images or 0} images), got {found}. Expand them as the processor does; was the text truncated?"
        )
    if torn != 0:
        raise ValueError(
            f"forward: the {number}placeholders of each image must be contiguous in input_ids and in one document, got "
            f"{torn} apart from the one before. Expand them as the processor does."
        )


def repeated_items(counts: list[int], times: int) -> list[int]:
    """The items of each row, ``times`` one after the other; ``counts`` says how many items each row has."""
    starts = [sum(counts[:row]) for row in range(len(counts))]
    return [i for start, n in zip(starts, counts, strict=True) for _ in range(times) for i in range(start, start + n)]
