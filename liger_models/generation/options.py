"""The options of `generate` and `stream`, and their defaults from the checkpoint.

An option that the call omits comes from the checkpoint's generation_config.json; stop and padding tokens may also come
from config.json. So a chat model samples as its authors intended.
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
"""``(input_ids [B, T], logits [B, V]) -> logits [B, V]``."""

DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Options that have no effect without ``do_sample``."""

UNFILTERED: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": [], "suppress_tokens": [],
    "min_new_tokens": 0, "stop_strings": [],
}  # fmt: skip
"""The defaults: tokens are drawn from the model's own distribution, and only stop tokens end a row."""

READ = {*DRAWING, *UNFILTERED, "do_sample", "eos_token_id", "pad_token_id"}
"""Keys of generation_config.json that are options."""

HARMLESS = {
    "transformers_version", "bos_token_id", "decoder_start_token_id",
    # The call says how many tokens there may be.
    "max_length", "max_new_tokens",
    # Parts of beam search, of which num_beams speaks.
    "early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups",
    # Probabilities are normalized anyway, and NaN is an error.
    "renormalize_logits", "remove_invalid_values",
    # What is returned besides the tokens.
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    # Caches, drafts and compilation, which change the time alone.
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size",
    "compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "speculation_type",
}  # fmt: skip
"""Keys of generation_config.json that do not affect the tokens. A warning names all others that are not `READ`."""

IDLE = {
    "num_beams": 1, "num_return_sequences": 1, "guidance_scale": 1, "encoder_repetition_penalty": 1, "penalty_alpha": 0,
    "min_length": 0, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip
"""Values with which other keys have no effect, besides null, false and empty ones."""


class Range(NamedTuple):
    """The values that an option may have, and the advice for other values.

    Attributes:
        allows: whether a value is in the range.
        text: the range, as the end of a sentence that begins with "must be".
        advice: what to pass to switch the option off.
        number: the type of the number.
    """

    allows: Callable[[Any], bool]
    text: str
    advice: str = ""
    number: type = Real


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
"""Option that is an integer -> its smallest value, and the advice for other values."""


class PromptInputs(TypedDict, total=False):
    """Inputs besides the tokens that belong to the prompts. A model accepts the inputs that its ``forward`` has."""

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
    """Keyword arguments of `generate` and `stream`, including the fields of `PromptInputs`.

    An option that is missing or None is taken from the checkpoint (generation_config.json, then config.json). If it is
    not set there either, the default in parentheses applies.

    Attributes:
        attention_mask: [B, T], nonzero for tokens, 0 for padding; not allowed with a list of prompts. Default: as in
            transformers, every ``pad_token_id`` is padding, unless it is also a stop token.
        do_sample: sample tokens; False takes the most likely token. (False)
        temperature: positive divisor of the logits. (1)
        top_k: sample from the k most likely tokens, and from tokens tied with the last of them; 0 for all tokens. (0)
        top_p: sample from the smallest set of most likely tokens whose probabilities reach this sum, in (0, 1]. (1)
        min_p: sample from tokens whose probability is at least this fraction, in [0, 1], of the highest one. (0)
        typical_p: sample from the tokens whose information content is closest to the entropy: the smallest set whose
            probabilities sum to at least this, in (0, 1] (locally typical sampling). (1)
        epsilon_cutoff: sample from the tokens that have at least this probability, in [0, 1). (0)
        eta_cutoff: ε, in [0, 1): like ``epsilon_cutoff`` with the lower of ε and √ε · exp(−entropy). (0)
        repetition_penalty: positive number by which the logits of tokens already in the row are divided if they are
            positive, or multiplied if they are negative. (1)
        no_repeat_ngram_size: length of the token sequences that occur at most once in each row; 0 for no such rule. (0)
        bad_words_ids: sequences of tokens that are never generated. (none)
        suppress_tokens: tokens that are never generated. (none)
        logits_processor: function ``(input_ids, logits) -> logits`` of the tokens so far [B, T] int64, padding
            included, and the logits [B, V] fp32; or a list of such functions, for example transformers'
            ``LogitsProcessorList``. They run after the other options that affect greedy decoding, and before
            temperature and the options that restrict sampling. (none)
        min_new_tokens: minimum number of new tokens before a stop token. (0)
        eos_token_id: token or tokens that end a row; ``[]`` for none. (none)
        stop_strings: text or texts that end a row. The token that completes a text is the last of its row. The host
            searches for the texts after every step. (none)
        tokenizer: decodes tokens for ``stop_strings``. (the model's)
        pad_token_id: token that fills ended rows, and pads lists of prompts on the left. (the first stop token)
        num_return_sequences: number of continuations of each prompt, in consecutive rows of the result. Each prompt is
            computed once. More than 1 needs ``do_sample``. (1)
        generator: random number generator on the model's device. (the global one)
        seed: an integer, or one for each row of the result. The draws of a row then depend on its seed and its tokens
            alone, not on other rows, the device, or earlier draws. A single integer s gives the rows the seeds s,
            s + 1, .... (draws come from ``generator``)
        use_cache: use the decode cache; False recomputes the whole sequence for each token. (True)
        cache: a `DecodeCache` with room for the prompts and all new tokens but the last. It holds these tokens after
            the call and can be passed to the next one, as in a conversation: only tokens that follow the common
            beginning are computed. The model's weights must be the same. Not allowed with images. (none)
        draft_model: a smaller model with the same tokenizer, or `LigerMedusa` around the model. It proposes tokens, and
            the model checks several at a time. The result is the same as without a draft, up to rounding. Sampling
            needs ``seed``. Neither model may have recurrent states. (none)
        num_draft_tokens: number of tokens that the draft proposes at a time. (5; with `LigerMedusa` one for each head)
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
    """Decorate a function with ``**options: Unpack[Options]``, so that ``help`` shows the options one by one."""
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
    """`Options` with all defaults filled in. Without stop and padding tokens, ``pad_token_id`` is None."""

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
        # Numbers in a range. A tensor of one number is one, too.
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            is_number = isinstance(value, Tensor) or (isinstance(value, allowed.number) and not isinstance(value, bool))
            if not is_number:
                article = "an integer" if allowed.number is Integral else "a number"
                raise ValueError(f"generate: {name} must be {article}, got {value!r}.")
            if not allowed.allows(value):
                raise ValueError(f"generate: {name} must be {allowed.text}, got {value}. {allowed.advice}".rstrip())

        # Integers with a smallest value.
        for name, (least, advice) in COUNTS.items():
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= least):
                raise ValueError(f"generate: {name} must be an integer of at least {least}, got {value!r}. {advice}")

        # Options that depend on others.
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
    """Fill in the defaults of the checkpoint, and check that all options are valid."""
    # The options of the call come before those of the checkpoint.
    names = [name for name in Options.__annotations__ if name not in PromptInputs.__annotations__]
    options = cast(Options, translate("generate", options, ["max_new_tokens", *names, *model.prompt_inputs]))
    stored = _generation_config(model)

    def option(name: str, *defaults: Any) -> Any:
        return _first(options.get(name), stored.get(name), *defaults)

    # Options of sampling have no effect without it.
    do_sample = bool(option("do_sample", False))
    if not do_sample:
        stored = {name: value for name, value in stored.items() if name not in DRAWING}
        idle = {name: value for name, value in options.items() if name in DRAWING and value not in (None, 0, 1)}
        if idle:
            warnings.warn(f"generate: {idle} has no effect without do_sample=True.", stacklevel=3)

    # Tokens that end rows and fill them.
    vocab = model.config.vocab_size
    stops: Any = option("eos_token_id", getattr(model.config, "eos_token_id", None), [])
    stops = stops.tolist() if hasattr(stops, "tolist") else stops
    eos: list[Any] = [stops] if isinstance(stops, str | Real) else [*stops]
    if not all(isinstance(token, int) for token in eos):
        raise ValueError(f"generate: eos_token_id must be a token or a list of tokens, got {stops!r}.")
    pad = options.get("pad_token_id")
    if pad is not None and not 0 <= pad < vocab:
        raise ValueError(
            f"generate: pad_token_id must be in [0, {vocab}), got {pad}. Omit it to pad with the stop token."
        )
    # Some checkpoints use −1 for no padding token.
    pads = [pad, stored.get("pad_token_id"), getattr(model.config, "pad_token_id", None), *eos]
    strings, tokenizer = option("stop_strings", []), options.get("tokenizer")
    strings = list(strings) if isinstance(strings, list | tuple) else [strings]
    if strings and tokenizer is None and "tokenizer.json" in model.assets:
        tokenizer = getattr(model, "tokenizer")  # noqa: B009  not of `Decoder`

    # Tokens that are not generated.
    def are_tokens(tokens: Any) -> bool:
        return isinstance(tokens, Sequence) and all(isinstance(token, int) and 0 <= token < vocab for token in tokens)

    words, suppressed = option("bad_words_ids", []), option("suppress_tokens", [])
    if not isinstance(words, Sequence) or not all(are_tokens(word) and len(word) for word in words):
        raise ValueError(f"generate: bad_words_ids must be lists of tokens in [0, {vocab}), got {words}.")
    if not are_tokens(suppressed):
        raise ValueError(f"generate: suppress_tokens must be tokens in [0, {vocab}), got {suppressed}.")
    # The checkpoint's minimum may be more than a short call asks for.
    least, limit = options.get("min_new_tokens"), cast(Any, max_new_tokens)
    if isinstance(least, int) and isinstance(limit, Real) and least > max_new_tokens:
        raise ValueError(f"generate: min_new_tokens must be at most max_new_tokens ({max_new_tokens}), got {least}.")

    # Random numbers: a generator or seeds.
    generator, seed = options.get("generator"), cast(Any, options.get("seed"))
    if generator is not None and generator.device.type != model.device.type:
        raise ValueError(
            f"generate: generator must be on {model.device.type} like the model, got {generator.device}. Use "
            f"torch.Generator({model.device.type!r})."
        )
    seeds = seed if isinstance(seed, Sequence) else [] if seed is None else [seed]
    if seed is not None and generator is not None:
        raise ValueError("generate: seed and generator exclude each other, got both. Pass one.")
    if not all(isinstance(number, int) and 0 <= number < 2**62 for number in seeds):
        raise ValueError(f"generate: seed must be an integer in [0, 2**62) or a list of them, got {seed!r}.")

    # A cache that the caller keeps holds tokens only, no images.
    cache, inputs = options.get("cache"), [name for name in model.prompt_inputs if options.get(name) is not None]
    if cache is not None and (not isinstance(cache, DecodeCache) or options.get("use_cache") is False or inputs):
        raise ValueError(
            f"generate: cache must be a DecodeCache, without {', '.join(inputs) or 'use_cache=False'}, got "
            f"{type(cache).__name__}."
        )

    processors: Any = _first(options.get("logits_processor"), [])
    is_list = isinstance(processors, Sequence) and not callable(processors)
    numbers = {name: option(name, UNFILTERED.get(name, 1.0)) for name in RANGES if name != "max_new_tokens"}
    return Settings(
        **numbers,
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        no_repeat_ngram_size=option("no_repeat_ngram_size", 0),
        bad_words_ids=[list(word) for word in words],
        suppress_tokens=list(suppressed),
        logits_processor=list(processors) if is_list else [processors],
        min_new_tokens=option("min_new_tokens", 0),
        eos_token_id=eos,
        stop_strings=StopStrings(strings, tokenizer) if strings else None,
        pad_token_id=next((pad for pad in pads if pad is not None and 0 <= pad < vocab), None),
        num_return_sequences=_first(options.get("num_return_sequences"), 1),
        generator=generator,
        seed=list(seeds) if isinstance(seed, Sequence) else seed,
        use_cache=_first(options.get("use_cache"), True),
        cache=cache,
        draft_model=options.get("draft_model"),
        num_draft_tokens=_draft_tokens(model, options, do_sample),
    )


def _draft_tokens(model: Decoder, options: Options, do_sample: bool) -> int:
    """Check the options of a draft, and return the number of tokens that it proposes at a time."""
    draft, count = options.get("draft_model"), options.get("num_draft_tokens")
    if draft is None:
        return _first(count, 1)  # type: ignore[no-any-return]

    # The draft, and options that it excludes.
    is_model = isinstance(draft, Decoder)
    if not is_model and (not hasattr(draft, "draft_logits") or draft.model is not model):
        raise ValueError(
            "generate: draft_model must be a model of this package, or LigerMedusa around this model, got "
            f"{type(draft).__name__}."
        )
    if is_model and draft.device != model.device:
        raise ValueError(
            f"generate: draft_model must be on {model.device} like the model, got {getattr(draft, 'device', None)}."
        )
    if options.get("cache") is not None or options.get("use_cache") is False:
        raise ValueError("generate: draft_model must be given without cache and use_cache=False, got both. Omit one.")
    if options.get("seed") is None and do_sample:
        raise ValueError(
            "generate: draft_model needs seed with do_sample=True, because other draws would depend on the drafts. "
            "Pass seed=0, or do_sample=False."
        )

    # The number of tokens: any with a model, at most one for each head with heads.
    if is_model:
        return _first(count, 5)  # type: ignore[no-any-return]
    heads = len(draft.heads)
    if count is not None and count > heads:
        raise ValueError(f"generate: num_draft_tokens must be at most the number of heads ({heads}), got {count}.")
    return heads if count is None else count


def select_inputs(model: Decoder, options: Options) -> dict[str, Any]:
    """The options that are inputs of the model (see `Decoder.prompt_inputs`), on its device."""
    return {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in options.items()
        if name in model.prompt_inputs
    }


def _generation_config(model: Decoder) -> dict[str, Any]:
    """The content of the checkpoint's generation_config.json; {} if there is no such file."""
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
