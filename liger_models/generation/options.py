"""The options of `generate` and `stream`, and how their defaults are read from the checkpoint.

Options that a call does not set are read from the checkpoint's generation_config.json, so that a chat model samples
as its authors intended. Stop and padding tokens may also be read from config.json.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from liger_models.common.foreign import translate
from liger_models.common.json_files import parse_json
from liger_models.generation.stop_strings import StopStrings
from liger_models.layers.decoder import Decoder
from liger_models.layers.kv_cache import DecodeCache

Function = TypeVar("Function", bound=Callable[..., Any])

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""A function that changes the logits of the next token: ``(input_ids [B, T], logits [B, V]) -> logits [B, V]``."""

DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Options that have an effect only with ``do_sample``."""

UNFILTERED: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": [], "suppress_tokens": [],
    "min_new_tokens": 0, "stop_strings": [],
}  # fmt: skip
"""Maps options to their defaults. With these values, the model's distribution is unchanged, and only stop tokens end a
row."""

READ = {*DRAWING, *UNFILTERED, "do_sample", "eos_token_id", "pad_token_id"}
"""Keys of generation_config.json that are options of this package."""

HARMLESS = {
    "transformers_version", "bos_token_id", "decoder_start_token_id",
    # The number of new tokens is an argument of the call.
    "max_length", "max_new_tokens",
    # These keys only matter for beam search, which num_beams selects.
    "early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups",
    # Probabilities are always normalized, and NaN is an error.
    "renormalize_logits", "remove_invalid_values",
    # These keys select what is returned in addition to the tokens.
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    # These keys concern caches, drafts and compilation, which affect only the speed.
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size",
    "compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "speculation_type",
}  # fmt: skip
"""Keys of generation_config.json that do not affect the tokens. Keys outside of this set and `READ` cause a warning."""

IDLE = {
    "num_beams": 1, "num_return_sequences": 1, "guidance_scale": 1, "encoder_repetition_penalty": 1, "penalty_alpha": 0,
    "min_length": 0, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip
"""Maps further keys of generation_config.json to the value with which the key has no effect. Null, false and empty
values never have an effect.
"""


class Range(NamedTuple):
    """The values that an option may have, and the advice that an error message gives for any other value.

    Attributes:
        allows: function that returns whether a value is in the range.
        text: description of the range that completes a sentence beginning with "must be".
        advice: the end of the error message, which says how to turn the option off.
        number: the type that the number must have.
    """

    allows: Callable[[Any], bool]
    text: str
    advice: str = ""
    number: type = Real


BLOCK_DRAFTS = 2
"""Default number of tokens that a multi-token prediction block drafts in a round."""
FOR_ALL = "Set 0 for all tokens."
RANGES = {
    "max_new_tokens": Range(lambda value: value >= 1, "at least 1", "", Integral),
    "temperature": Range(lambda value: value > 0, "positive", "For the most likely tokens set do_sample=False."),
    "top_k": Range(lambda value: value >= 0, "at least 1", FOR_ALL, Integral),
    "top_p": Range(lambda value: 0 < value <= 1, "in (0, 1]", "Set 1 for all tokens."),
    "min_p": Range(lambda value: 0 <= value <= 1, "in [0, 1]", FOR_ALL),
    "typical_p": Range(lambda value: 0 < value <= 1, "in (0, 1]", "Set 1 for all tokens."),
    "epsilon_cutoff": Range(lambda value: 0 <= value < 1, "in [0, 1)", FOR_ALL),
    "eta_cutoff": Range(lambda value: 0 <= value < 1, "in [0, 1)", FOR_ALL),
    "repetition_penalty": Range(lambda value: value > 0, "positive", "Set 1 for no penalty."),
}
COUNTS = {
    "no_repeat_ngram_size": (0, "Set 0 for no such rule."),
    "min_new_tokens": (0, "Set 0 for no minimum."),
    "num_return_sequences": (1, "Set 1 for one continuation of each prompt."),
    "num_draft_tokens": (1, "Omit draft_model for no drafts."),
}
"""Maps each integer option to its smallest value and to advice for the error message about any other value."""


class PromptInputs(TypedDict, total=False):
    """Inputs, other than tokens, that belong to prompts. A model accepts only inputs that its ``forward`` takes."""

    pixel_values: Tensor | None
    pixel_attention_mask: Tensor | None
    image_grid_thw: Tensor | None
    image_position_ids: Tensor | None
    image_sizes: Tensor | None
    spatial_shapes: Tensor | None
    pixel_values_videos: Tensor | None
    video_grid_thw: Tensor | None
    second_per_grid_ts: Tensor | list[float] | None
    mm_token_type_ids: Tensor | None
    token_type_ids: Tensor | None
    aspect_ratio_ids: Tensor | None
    aspect_ratio_mask: Tensor | None
    cross_attention_mask: Tensor | None


class Options(PromptInputs, total=False):
    """Keyword arguments of `generate` and `stream`, including the fields of `PromptInputs`.

    An option that is missing or None is read from the checkpoint: from generation_config.json, or else from
    config.json. If neither file has the option, the default in parentheses applies.

    Attributes:
        attention_mask: [B, T], nonzero for tokens and 0 for padding. Not allowed with a list of prompts. By default,
            as in transformers, all tokens that equal ``pad_token_id`` are padding if this id is not also a stop token.
        do_sample: whether to sample tokens instead of taking the most likely token. (False)
        temperature: positive divisor of the logits. (1)
        top_k: number of most likely tokens to sample from. Tokens that are as likely as the last of these are included,
            too. 0 samples from all tokens. (0)
        top_p: number in (0, 1]. Tokens are sampled from the smallest set of most likely tokens whose probabilities add
            up to at least this number. (1)
        min_p: number in [0, 1]. Only tokens whose probability is at least this fraction of the highest probability
            are sampled. (0)
        typical_p: number in (0, 1], for locally typical sampling. Tokens are ranked by how close their information
            content is to the entropy. The next token is sampled from the smallest set of top-ranked tokens whose
            probabilities add up to at least this number. (1)
        epsilon_cutoff: number in [0, 1). Only tokens with at least this probability are sampled. (0)
        eta_cutoff: number ε in [0, 1). Like ``epsilon_cutoff``, but the minimum probability is the smaller of ε and
            √ε · exp(−entropy). (0)
        repetition_penalty: positive number. For tokens that are already in the row, positive logits are divided by this
            number, and negative logits are multiplied by it. (1)
        no_repeat_ngram_size: number of tokens. No sequence of this length occurs twice in the same row. 0 for no limit.
            (0)
        bad_words_ids: sequences of tokens that are never generated. (none)
        suppress_tokens: tokens that are never generated. (none)
        logits_processor: function ``(input_ids, logits) -> logits``, or a list of such functions, for example a
            ``LogitsProcessorList`` of transformers. A function takes the tokens so far, [B, T] int64 including
            padding, and the logits [B, V] fp32. The functions are called after the other options that affect greedy
            decoding, and before temperature and the options that restrict sampling. (none)
        min_new_tokens: minimum number of new tokens before a stop token may be chosen. (0)
        eos_token_id: one or several stop tokens, which end a row; ``[]`` for no stop tokens. (none)
        stop_strings: one or several strings that end a row. The token that completes a string is the last token of
            the row. The host searches for the strings after every step. (none)
        tokenizer: the tokenizer that decodes tokens for ``stop_strings``. (the model's tokenizer)
        pad_token_id: token that fills a row after its end, and pads lists of prompts on the left. (the first stop
            token)
        num_return_sequences: number of continuations of each prompt, in consecutive rows of the result. Each prompt is
            computed once. More than 1 needs ``do_sample``. (1)
        generator: random number generator on the model's device. (the global generator)
        seed: an integer, or a list of one integer per row of the result. If given, the random draws of a row depend
            only on the row's seed and tokens, not on other rows, the device or earlier draws. With a single integer
            ``s``, the rows have the seeds ``s``, ``s + 1`` and so on. (draws come from ``generator``)
        use_cache: whether to use the decode cache instead of recomputing the whole sequence for each token. (True)
        cache: a `DecodeCache` with room for the prompts and all new tokens but the last. After the call, the cache
            holds these tokens, and can be passed to the next call, for example in a conversation. The next call then
            computes only the tokens after the longest prefix that the new prompts share with the cache. The model's
            weights must not change in between. Not allowed with images. (none)
        draft_model: a smaller model with the same tokenizer, or a `LigerMTP` or `LigerMedusa` of the model. It
            proposes tokens, and the model verifies several of them in one forward. The result is the same as without
            a draft, up to rounding. Sampling requires ``seed``, except with `LigerMTP`. With `LigerMTP` and without
            ``seed``, sampled tokens have the same distribution as without a draft. A model with recurrent states
            supports only `LigerMTP`. (none)
        num_draft_tokens: number of tokens that the draft proposes at a time. (5; 2 for a `LigerMTP`; the number of
            heads of a `LigerMedusa`)
    """

    attention_mask: Tensor | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    min_new_tokens: int | None
    eos_token_id: int | Sequence[int] | None
    stop_strings: str | Sequence[str] | None
    tokenizer: Any
    pad_token_id: int | None
    num_return_sequences: int | None
    generator: torch.Generator | None
    seed: int | Sequence[int] | None
    use_cache: bool | None
    cache: DecodeCache | None
    draft_model: Any
    num_draft_tokens: int | None


def shows_options(function: Function) -> Function:
    """Decorator that makes ``help`` list the options of a function with ``**options: Unpack[Options]``."""
    signature = inspect.signature(function)
    *usual, _ = signature.parameters.values()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in Options.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*usual, *options])  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`Options` with all defaults filled in. ``pad_token_id`` is None if there are neither stop nor padding tokens."""

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: list[list[int]]
    suppress_tokens: list[int]
    logits_processor: list[LogitsProcessor]
    min_new_tokens: int
    eos_token_id: list[int]
    stop_strings: StopStrings | None
    pad_token_id: int | None
    num_return_sequences: int
    generator: torch.Generator | None
    seed: int | list[int] | None
    use_cache: bool
    cache: DecodeCache | None
    draft_model: Any
    num_draft_tokens: int

    def __post_init__(self) -> None:
        # Check numbers with a range. A tensor with one element counts as a number.
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if not isinstance(number, allowed.number) or isinstance(number, bool):
                article = "an integer" if allowed.number is Integral else "a number"
                raise ValueError(f"generate: {name} must be {article}, got {value!r}.")
            if not allowed.allows(value):
                raise ValueError(f"generate: {name} must be {allowed.text}, got {value}. {allowed.advice}".rstrip())

        # Check integers with a smallest value.
        for name, (least, advice) in COUNTS.items():
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= least):
                raise ValueError(f"generate: {name} must be an integer of at least {least}, got {value!r}. {advice}")

        # Check options that depend on others.
        if self.num_return_sequences != 1 and not self.do_sample:
            raise ValueError(
                f"generate: num_return_sequences must be 1 without do_sample, got {self.num_return_sequences}. The "
                "most likely tokens are the same in every sequence: set do_sample=True."
            )
        if not all(map(callable, self.logits_processor)):
            raise ValueError(
                "generate: logits_processor must be a function or a list of functions, got "
                f"{', '.join(type(processor).__name__ for processor in self.logits_processor)}."
            )


def resolve(model: Decoder, max_new_tokens: int, options: Options) -> Settings:
    """Fill in defaults, including the checkpoint's, and check that all options are valid."""
    if model.bidirectional:
        raise ValueError(
            "generate: the model must be causal, got one that attends to later tokens. Call set_bidirectional(False)."
        )
    # Options of the call override options of the checkpoint.
    names = [name for name in Options.__annotations__ if name not in PromptInputs.__annotations__]
    options = cast(Options, translate("generate", options, ["max_new_tokens", *names, *model.prompt_inputs]))
    stored = _generation_config(model)

    def option(name: str, *defaults: Any) -> Any:
        return _first(options.get(name), stored.get(name), *defaults)

    # Sampling options have no effect without do_sample.
    do_sample = bool(option("do_sample", False))
    if not do_sample:
        stored = {name: value for name, value in stored.items() if name not in DRAWING}
        idle = {name: value for name, value in options.items() if name in DRAWING and value not in (None, 0, 1)}
        if idle:
            warnings.warn(f"generate: {idle} has no effect without do_sample=True.", stacklevel=3)

    # The stop tokens, the stop strings, and the padding token. Some checkpoints use -1 if they have no padding token.
    vocab = model.config.vocab_size
    eos = _stop_tokens(option("eos_token_id", getattr(model.config, "eos_token_id", None), []))
    strings, tokenizer = option("stop_strings", []), options.get("tokenizer")
    strings = list(strings) if isinstance(strings, list | tuple) else [strings]
    if strings and tokenizer is None and "tokenizer.json" in model.assets:
        tokenizer = getattr(model, "tokenizer")  # noqa: B009  not of `Decoder`
    pad = options.get("pad_token_id")
    if pad is not None and not 0 <= pad < vocab:
        raise ValueError(
            f"generate: pad_token_id must be in [0, {vocab}), got {pad}. Omit it to pad with the stop token."
        )
    pads = [pad, stored.get("pad_token_id"), getattr(model.config, "pad_token_id", None), *eos]

    # Check `min_new_tokens` only if the call sets it. The checkpoint's value may exceed the call's `max_new_tokens`.
    least, limit = options.get("min_new_tokens"), cast(Any, max_new_tokens)
    if isinstance(least, int) and isinstance(limit, Real) and least > max_new_tokens:
        raise ValueError(f"generate: min_new_tokens must be at most max_new_tokens ({max_new_tokens}), got {least}.")

    # A cache that the caller keeps must contain no images.
    cache, inputs = options.get("cache"), [name for name in model.prompt_inputs if options.get(name) is not None]
    if cache is not None and (not isinstance(cache, DecodeCache) or options.get("use_cache") is False or inputs):
        raise ValueError(
            f"generate: cache must be a DecodeCache, without {', '.join(inputs) or 'use_cache=False'}, got "
            f"{type(cache).__name__}."
        )

    processors: Any = _first(options.get("logits_processor"), [])
    is_list = isinstance(processors, Sequence) and not callable(processors)
    numbers = {name: option(name, UNFILTERED.get(name, 1.0)) for name in RANGES if name != "max_new_tokens"}
    words, suppressed = _banned_tokens(option("bad_words_ids", []), option("suppress_tokens", []), vocab)
    generator, seed = _source_of_noise(model, options)
    return Settings(
        **numbers,
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        no_repeat_ngram_size=option("no_repeat_ngram_size", 0),
        bad_words_ids=words,
        suppress_tokens=suppressed,
        logits_processor=list(processors) if is_list else [processors],
        min_new_tokens=option("min_new_tokens", 0),
        eos_token_id=eos,
        stop_strings=StopStrings(strings, tokenizer) if strings else None,
        pad_token_id=next((pad for pad in pads if pad is not None and 0 <= pad < vocab), None),
        num_return_sequences=_first(options.get("num_return_sequences"), 1),
        generator=generator,
        seed=seed,
        use_cache=_first(options.get("use_cache"), True),
        cache=cache,
        draft_model=options.get("draft_model"),
        num_draft_tokens=_draft_tokens(model, options, do_sample),
    )


def _stop_tokens(stops: Any) -> list[int]:
    """Return stop tokens as a list, given a single token, a list of tokens or a tensor."""
    stops = stops.tolist() if hasattr(stops, "tolist") else stops
    eos: list[Any] = [stops] if isinstance(stops, str | Real) else [*stops]
    if not all(isinstance(token, int) for token in eos):
        raise ValueError(f"generate: eos_token_id must be a token or a list of tokens, got {stops!r}.")
    return eos


def _banned_tokens(words: Any, suppressed: Any, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Check ``bad_words_ids`` and ``suppress_tokens``, and return them as lists."""

    def are_tokens(tokens: Any) -> bool:
        return isinstance(tokens, Sequence) and all(isinstance(token, int) and 0 <= token < vocab for token in tokens)

    if not isinstance(words, Sequence) or not all(are_tokens(word) and len(word) for word in words):
        raise ValueError(f"generate: bad_words_ids must be lists of tokens in [0, {vocab}), got {words}.")
    if not are_tokens(suppressed):
        raise ValueError(f"generate: suppress_tokens must be tokens in [0, {vocab}), got {suppressed}.")
    return [list(word) for word in words], list(suppressed)


def _source_of_noise(model: Decoder, options: Options) -> tuple[torch.Generator | None, int | list[int] | None]:
    """Check that ``generator`` and ``seed`` are valid and not both given, and return the two options."""
    generator, seed = options.get("generator"), cast(Any, options.get("seed"))
    if generator is not None and generator.device.type != model.device.type:
        raise ValueError(
            f"generate: generator must be on {model.device.type} like the model, got {generator.device}. Use "
            f"torch.Generator({model.device.type!r})."
        )
    if seed is not None and generator is not None:
        raise ValueError("generate: seed and generator exclude each other, got both. Pass one.")
    seeds = seed if isinstance(seed, Sequence) else [] if seed is None else [seed]
    if not all(isinstance(number, int) and 0 <= number < 2**62 for number in seeds):
        raise ValueError(f"generate: seed must be an integer in [0, 2**62) or a list of them, got {seed!r}.")
    return generator, list(seed) if isinstance(seed, Sequence) else seed


def _draft_tokens(model: Decoder, options: Options, do_sample: bool) -> int:
    """Check the draft options. Returns the number of tokens that the draft proposes at a time."""
    draft, count = options.get("draft_model"), options.get("num_draft_tokens")
    if draft is None:
        return _first(count, 1)  # type: ignore[no-any-return]

    # Check the draft, and the options that can't be combined with it.
    is_model, is_block = isinstance(draft, Decoder), is_draft_block(draft)
    if not is_model and not ((is_block or hasattr(draft, "draft_logits")) and draft.model is model):
        raise ValueError(
            "generate: draft_model must be a model of this package, or LigerMTP or LigerMedusa around this model, got "
            f"{type(draft).__name__}."
        )
    if is_block and (model.groups.data or model.groups.tensor is not None):
        raise ValueError(
            f"generate: draft_model needs a whole model on each rank, got a sharded {type(model).__name__}. Omit it."
        )
    if is_model and draft.device != model.device:
        raise ValueError(
            f"generate: draft_model must be on {model.device} like the model, got {getattr(draft, 'device', None)}."
        )
    if options.get("cache") is not None or options.get("use_cache") is False:
        raise ValueError("generate: draft_model must be given without cache and use_cache=False, got both. Omit one.")
    if options.get("seed") is None and do_sample and not is_block:
        raise ValueError(
            "generate: draft_model needs seed with do_sample=True, because other draws would depend on the drafts. "
            "Pass seed=0, or do_sample=False."
        )

    # Models and blocks may propose any number of tokens. Each Medusa head proposes at most one token.
    if is_model or is_block:
        return _first(count, 5 if is_model else BLOCK_DRAFTS)  # type: ignore[no-any-return]
    heads = len(draft.heads)
    if count is not None and count > heads:
        raise ValueError(f"generate: num_draft_tokens must be at most the number of heads ({heads}), got {count}.")
    return heads if count is None else count


def is_draft_block(draft: Any) -> bool:
    """Return whether a ``draft_model`` is a multi-token prediction block, such as `LigerMTP`."""
    return not isinstance(draft, Decoder) and hasattr(draft, "predict")


def select_inputs(model: Decoder, options: Options) -> dict[str, Any]:
    """Return the options that are model inputs, on the model's device; see `Decoder.prompt_inputs`."""
    return {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in options.items()
        if name in model.prompt_inputs
    }


def _generation_config(model: Decoder) -> dict[str, Any]:
    """Return the content of the checkpoint's generation_config.json, or {} if there is no such file."""
    name = "generation_config.json"
    stored = parse_json(model.assets.get(name, b"{}"), name)
    others = {key: value for key, value in stored.items() if key not in READ | HARMLESS and not key.startswith("_")}
    ignored = [
        key for key, value in others.items() if value not in (IDLE.get(key), None, [], {}) and value is not False
    ]
    if ignored:
        names = ", ".join(ignored)
        warnings.warn(f"generation_config.json: not implemented and ignored: {names}.", stacklevel=4)
    return stored


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
