"""The options of `generate` and `stream`, and their defaults from the checkpoint.

Options that are not given come from the checkpoint's generation_config.json, then (stop and padding tokens) from its
config.json, so that a chat model samples as its authors intended.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from liger_models.kernels.checks import check
from liger_models.layers.decoder import Decoder
from liger_models.lazy.foreign import translate
from liger_models.text.json_files import parse_json

Function = TypeVar("Function", bound=Callable[..., Any])

NOT_HERE = (
    "num_beams", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_length",
    "min_new_tokens", "bad_words_ids", "suppress_tokens", "stop_strings",
)  # fmt: skip
"""Keys of generation_config.json that affect the tokens but are not implemented. A warning names them."""


class PromptInputs(TypedDict, total=False):
    """Inputs that belong to the prompts besides their tokens; each model accepts those that its ``forward`` has."""

    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    image_position_ids: Tensor | None
    pixel_values_videos: Tensor | None
    video_grid_thw: Tensor | None
    second_per_grid_ts: Tensor | list[float] | None
    mm_token_type_ids: Tensor | None
    token_type_ids: Tensor | None
    aspect_ratio_ids: Tensor | None
    aspect_ratio_mask: Tensor | None
    cross_attention_mask: Tensor | None


class Options(PromptInputs, total=False):
    """Keyword arguments of `generate` and `stream`, in addition to those of `PromptInputs`.

    An option that is missing or None is taken from the checkpoint (generation_config.json, then config.json). If it is
    not set there either, the default in parentheses applies.

    Attributes:
        attention_mask: [B, T], nonzero for tokens, 0 for padding; not with a list of prompts. Default: as in
            transformers, every ``pad_token_id`` is padding, unless it is also a stop token.
        do_sample: sample tokens; False takes the most likely token. (False)
        temperature: positive divisor of the logits. (1)
        top_k: sample from the k most likely tokens, and those tied with the last of them; 0 for all. (0)
        top_p: sample from the smallest set of most likely tokens that has this probability, in (0, 1]. (1)
        repetition_penalty: positive number by which the logits of tokens already in the row are divided if they are
            positive, or multiplied if they are negative. (1)
        eos_token_id: token or tokens that end a row; ``[]`` for none. (none)
        pad_token_id: token that fills ended rows, and pads lists of prompts on the left. (the first stop token)
        generator: random number generator on the model's device. (the global one)
        use_cache: use the decode cache; False recomputes the whole sequence for each token. (True)
    """

    attention_mask: Tensor | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    generator: torch.Generator | None
    use_cache: bool | None


def shows_options(function: Function) -> Function:
    """Decorate a function with ``**options: Unpack[Options]``, so that ``help`` shows the options one by one."""
    signature = inspect.signature(function)
    *usual, _ = signature.parameters.values()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in Options.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*usual, *options])  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`Options` with all defaults filled in; ``pad_token_id`` is None if there are neither stop nor padding tokens."""

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    eos_token_id: list[int]
    pad_token_id: int | None
    generator: torch.Generator | None
    use_cache: bool

    def __post_init__(self) -> None:
        check(self.max_new_tokens >= 1, f"generate: max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        check(
            self.temperature > 0,
            f"generate: temperature must be positive, got {self.temperature}. "
            "For the most likely tokens set do_sample=False.",
        )
        check(self.top_k >= 0, f"generate: top_k must be at least 1, got {self.top_k}. Set 0 for all tokens.")
        check(0 < self.top_p <= 1, f"generate: top_p must be in (0, 1], got {self.top_p}. Set 1 for all tokens.")
        check(
            self.repetition_penalty > 0,
            f"generate: repetition_penalty must be positive, got {self.repetition_penalty}. Set 1 for no penalty.",
        )


def resolve(model: Decoder, max_new_tokens: int, options: Options) -> Settings:
    """Fill in the defaults of the checkpoint, and check that all options are valid."""
    known = [key for key in Options.__annotations__ if key not in PromptInputs.__annotations__]
    known += model.prompt_inputs
    translate("generate", options, ["max_new_tokens", *known])
    stored = _generation_config(model)

    def said(name: str, *otherwise: Any) -> Any:
        return _first(options.get(name), stored.get(name), *otherwise)

    do_sample = bool(said("do_sample", False))
    if not do_sample:
        drawing = ("temperature", "top_k", "top_p")
        stored = {name: value for name, value in stored.items() if name not in drawing}
        idle = {name: value for name, value in options.items() if name in drawing and value not in (None, 0, 1)}
        if idle:
            warnings.warn(f"generate: {idle} has no effect without do_sample=True.", stacklevel=3)
    eos = torch.as_tensor(said("eos_token_id", getattr(model.config, "eos_token_id", None), [])).flatten().tolist()
    vocab, pad, generator = model.config.vocab_size, options.get("pad_token_id"), options.get("generator")
    check(
        pad is None or 0 <= pad < vocab,
        f"generate: pad_token_id must be in [0, {vocab}), got {pad}. Omit it to pad with the stop token.",
    )
    # Some checkpoints use −1 for no padding token.
    pads = [pad, stored.get("pad_token_id"), getattr(model.config, "pad_token_id", None), *eos]
    check(
        generator is None or generator.device.type == model.device.type,
        f"generate: generator must be on {model.device.type} like the model, "
        f"got {None if generator is None else generator.device}. Use torch.Generator({model.device.type!r}).",
    )
    return Settings(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=said("temperature", 1.0),
        top_k=said("top_k", 0),
        top_p=said("top_p", 1.0),
        repetition_penalty=said("repetition_penalty", 1.0),
        eos_token_id=eos,
        pad_token_id=next((pad for pad in pads if pad is not None and 0 <= pad < vocab), None),
        generator=generator,
        use_cache=_first(options.get("use_cache"), True),
    )


def select_inputs(model: Decoder, options: Options) -> dict[str, Any]:
    """The options that are inputs of the model (see `Decoder.prompt_inputs`), on its device."""
    return {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in options.items()
        if name in model.prompt_inputs
    }


def _generation_config(model: Decoder) -> dict[str, Any]:
    """The content of the checkpoint's generation_config.json; {} if it has none."""
    name = "generation_config.json"
    stored = parse_json(model.assets.get(name, b"{}"), name)
    absent = [key for key in NOT_HERE if stored.get(key) not in (None, 0, 1, [])]
    if absent:
        names = ", ".join(absent)
        warnings.warn(f"generation_config.json: not implemented and ignored: {names}.", stacklevel=4)
    return stored


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
