"""``generate`` for the models of `liger_models.hf`, on the decoding engine of `liger_models.generation`.

transformers' ``generate`` reads the generation config, checks all arguments, and creates the lists of logits processors
and stopping criteria. For greedy decoding and sampling, it then calls ``_sample``, which is the loop over the new
tokens. `EngineGenerationMixin` replaces this loop by the engine. If `fallback_reason` returns a reason, transformers'
loop runs instead.

For most logits processors, the engine has an equivalent option (`OPTIONS`). If the list has a processor without such an
option, or if the order of the list differs from the engine's order, the engine calls the whole list after each step.
The engine itself implements the stopping criteria for the length and for stop tokens. All other criteria are called
only once every few steps, but then for each of the new tokens. If a criterion ends generation at one of these tokens,
all later tokens are discarded.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from liger_models.base.causal_lm import CausalLM
from liger_models.common.errors import is_traced
from liger_models.distributed.groups import ParallelGroups
from liger_models.generation.eval_mode import evaluating
from liger_models.generation.loop import STEPS_AHEAD, run_steps
from liger_models.generation.options import UNFILTERED, Settings
from liger_models.generation.prompts import check_ids
from liger_models.generation.rows import Step
from liger_models.hf.cache import LigerCache
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.linear import is_sharded
from liger_models.layers.recompute import has_hooks, is_compiled

logger = logging.get_logger(__name__)

STEPS_PER_CHECK = 8
"""Number of steps after which the stopping criteria are called on an accelerator. On the CPU or with a streamer, they
are called after each step.

A criterion usually reads tokens on the host, so the host must wait for all launched steps.
"""

METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods that transformers' loop calls for each token in addition to the forward. The decoding engine does not call
these methods, so transformers' loop runs if other code has replaced one of them.
"""

WRAPPERS = ("accelerate.utils.operations", "torch.amp.autocast_mode", "trl.trainer.utils")
"""Modules whose functions trainers wrap around the forward. The decoding engine may run although it does not call these
functions.

Accelerate's function casts in the forward, whereas the engine computes in the dtype of the weights. TRL's function
adds a loss.
"""

KNOWN = (criteria.MaxLengthCriteria, criteria.EosTokenCriteria, criteria.MaxTimeCriteria)
"""Stopping criteria that the decoding engine need not call for every token."""

UNREAD = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position",
    "token_type_ids", "tokenizer", "assistant_tokenizer",
}  # fmt: skip
"""Names of the arguments of ``generate`` with which the decoding engine can run, besides the family's image inputs."""


Method = TypeVar("Method", bound=Callable[..., Any])


def with_stored_signature(method: Method) -> Method:
    """Store a method's signature in the method, because ``generate`` calls `inspect.signature` several times."""
    method.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return method


class EngineGenerationMixin(GenerationMixin):
    """Makes our decoding engine compute the tokens of ``generate`` if `fallback_reason` returns None."""

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        reason = fallback_reason(self, input_ids, generation_config, stopping_criteria, synced_gpus, model_kwargs)
        _use_cache(model_kwargs)
        if reason is None:
            return _run(self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
        _report(reason)
        return super()._sample(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
        )

    @functools.wraps(GenerationMixin._beam_search)
    def _beam_search(self, *args: Any, **options: Any) -> Any:
        _report("num_beams")
        _use_cache(options)
        return super()._beam_search(*args, **options)

    @functools.wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(self, *args: Any, **options: Any) -> Any:
        given: Any = inspect.signature(GenerationMixin._assisted_decoding).bind(self, *args, **options).arguments
        if getattr(given.get("generation_config"), "use_mtp", None):
            raise ValueError(
                f"generate: use_mtp must be left out, got it for {type(self).__name__}, which has no block for "
                "multi-token prediction. Load the checkpoint by liger_models.AutoLigerModel, and pass "
                "draft_model=LigerMTP(model) to its generate."
            )
        if getattr(given.get("generation_config"), "assistant_early_exit", None):
            # transformers would reduce the number of layers in the configuration for the draft. After an error, it
            # would not restore the configuration.
            raise ValueError(
                "generate: assistant_early_exit must be left out, got it: a model of liger_models always runs all of "
                "its layers. Pass a smaller model as assistant_model, or prompt_lookup_num_tokens."
            )
        _report("drafts of an assistant")
        _use_cache(options)
        return super()._assisted_decoding(*args, **options)

    @functools.wraps(GenerationMixin._get_candidate_generator)
    def _get_candidate_generator(self, *args: Any, **options: Any) -> Any:
        given: Any = inspect.signature(GenerationMixin._get_candidate_generator).bind(self, *args, **options).arguments
        draft = given.get("assistant_model")
        if draft is not None:
            # A draft model with another tokenizer gets tokens of its own vocabulary, which need no check.
            largest, size = int(given["input_ids"].max()), len(draft.get_input_embeddings().weight)
            if given.get("assistant_tokenizer") is None and largest >= size:
                raise ValueError(
                    "generate: assistant_model must have an embedding for each token of the prompt, image placeholders "
                    f"included, got {size} embeddings and token {largest}. Pass another model, or no assistant_model."
                )
            # A text-only draft model gets no pixels, because its ``generate`` would refuse them.
            model: Any = self
            unread = {*model.model.decoder.prompt_inputs} - {*inspect.signature(draft.forward).parameters}
            inputs = given["model_kwargs"].items()
            given["model_kwargs"] = {name: value for name, value in inputs if name not in unread}
        del given["self"]
        return super()._get_candidate_generator(**given)


def _use_cache(inputs: dict[str, Any]) -> None:
    """Mark the cache in a decoding loop's arguments as used, so that a later call continues from this cache."""
    cache = inputs.get("past_key_values")
    if isinstance(cache, LigerCache):
        cache.is_unused = False


def _report(reason: str) -> None:
    logger.debug(f"generate: the loop of transformers runs, because of {reason}.")


def fallback_reason(
    model: Any, input_ids: Tensor, config: Any, stopping_criteria: Any, synced_gpus: bool, inputs: dict[str, Any]
) -> str | None:
    """Return why transformers' loop must run instead of our decoding engine; None if the engine can run.

    Args:
        model: a model of `liger_models.hf`.
        input_ids: [B, T] integers.
        config: the generation config of the call.
        stopping_criteria: the ``StoppingCriteriaList`` of the call.
        synced_gpus: whether all ranks must run the same number of forwards.
        inputs: the other arguments of ``_sample``, which transformers passes to the forward.
    """
    # Check for outputs and modes of generation that the engine does not support.
    if synced_gpus or is_traced():
        return "synced_gpus" if synced_gpus else "compilation"
    for name in ("is_assistant", "output_attentions", "output_hidden_states", "prefill_chunk_size"):
        if getattr(config, name, None):
            return name

    if stopping_criteria.max_length is None:
        return "stopping_criteria without a maximum length"

    # Check for inputs that the engine does not support.
    decoder: CausalLM = model.model.decoder
    for name, value in inputs.items():
        if value is not None and name not in UNREAD and name not in decoder.prompt_inputs:
            return f"the argument {name}"
    cache, positions, mask = (inputs.get(name) for name in ("past_key_values", "position_ids", "attention_mask"))
    if cache is not None and not (isinstance(cache, LigerCache) and cache.is_unused):
        return "past_key_values"
    if positions is not None and (
        positions.shape[-1] != input_ids.shape[1] or (positions.dim() == 3 and len(positions) != 3)
    ):
        return "the shape of position_ids"
    if mask is not None:
        if mask.shape != input_ids.shape or mask.is_floating_point():
            return "the shape or dtype of attention_mask"
        rises = (mask[:, 1:] >= mask[:, :-1]).all() & (mask[:, -1] == 1).all()
        if not bool(rises):
            return "an attention_mask with other padding than on the left"

    # Check for code that the engine would not run: replaced methods, and hooks of the two outer modules.
    for module in (model, model.model):
        if has_hooks(module, ignored=("only_checks", "only_prepares")):
            return f"hooks of {type(module).__name__}"
        if is_compiled(module) or not _is_usual(module.forward):
            return f"a replaced or compiled forward of {type(module).__name__}"
    for name in METHODS:
        owner = inspect.unwrap(getattr(model, name)).__module__
        if not owner.startswith(("liger_models.hf.", "transformers.generation.")):
            return f"{name} of {owner}"

    # Check for parameters that only a forward of the whole model gathers.
    shards = [next(module.parameters(), None) for module in (decoder.embed_tokens, *decoder.blocks)]
    if decoder.groups != ParallelGroups() or any(is_sharded(x) or hasattr(x, "ds_id") for x in shards):
        return "sharded parameters"
    return "parameters on the meta device" if decoder.device.type == "meta" else None


def _is_usual(forward: Any) -> bool:
    """Whether a forward comes from `liger_models.hf`. Functions from the modules in `WRAPPERS` may be wrapped around
    the forward."""
    while True:
        function = getattr(forward, "__func__", forward)
        module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if module not in WRAPPERS:
            return bool(module.startswith("liger_models.hf."))
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))
        # TRL's function wraps the class's forward, but calls the object's forward.
        forward = cells["original_forward"].cell_contents if "original_forward" in cells else function.__wrapped__


def _run(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, config: Any, streamer: Any,
    inputs: dict[str, Any],
) -> Any:  # fmt: skip
    """Generate with the engine. The arguments and the result are as in transformers' method ``_sample``."""
    model.model.apply_edits()
    decoder: CausalLM = model.model.decoder
    ids = check_ids(decoder, input_ids)
    mask = inputs.get("attention_mask")
    mask = None if mask is None else mask.to(ids.device, torch.int64)
    pixels = {name: inputs[name] for name in decoder.prompt_inputs if inputs.get(name) is not None}
    pixels = {name: x.to(ids.device) if isinstance(x, Tensor) else x for name, x in pixels.items()}

    # Separate the criteria that need not be called for every token: the criteria for length, stop tokens and time.
    known: dict[type, list[Any]] = {kind: [] for kind in KNOWN}
    others = criteria.StoppingCriteriaList()
    for criterion in stopping_criteria:
        known.get(type(criterion), others).append(criterion)
    lengths, stops, limits = known.values()
    new = min(criterion.max_length for criterion in lengths) - ids.shape[1]
    eos = [token for criterion in stops for token in criterion.eos_token_id.tolist()]
    pad = _padding_token(stopping_criteria, config)

    # Collect the options of the engine. Sampled rows with the same prompt are passed as one repeated prompt.
    positions, is_usual = _positions(decoder, ids, mask, new, pixels, inputs.get("position_ids"))
    options = options_of(logits_processor, ids, mask, eos, decoder.config.vocab_size)
    if options is None:
        options = {"logits_processor": [lambda ids, logits: logits_processor(ids.contiguous(), logits)]}
    do_sample = bool(config.do_sample)
    shares_prompts = do_sample and inputs.get("use_cache") and is_usual and not pixels
    repeats = count_repeats(ids, mask) if shares_prompts else 1
    settings = _settings(
        max_new_tokens=new, do_sample=do_sample, eos_token_id=eos, pad_token_id=pad, num_return_sequences=repeats,
        use_cache=bool(inputs.get("use_cache")), **options,
    )  # fmt: skip

    # Run the steps. Every few steps, call all other criteria.
    records = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    output = Output(ids, new, pad, others, limits, streamer, keeps_scores=bool(config.output_scores and records))
    every = STEPS_PER_CHECK if ids.device.type in ACCELERATORS and streamer is None else 1
    first = slice(None, None, repeats)
    steps = run_steps(
        decoder,
        ids[first],
        None if mask is None else mask[first],
        settings,
        pixels,
        positions=positions[..., first, :] if positions.shape[-2] > 1 else positions,
        returns_logits=records,
        copies_tokens=streamer is not None and not others,
        ahead=_steps_ahead(ids.device, logits_processor, others, streamer),
    )
    with closing(steps):
        for step in steps:
            output.steps.append(step)
            if output.is_checked and len(output.steps) - output.length >= every and output.check():
                break
    if output.is_checked:
        output.check()

    # Build the result.
    sequences = output.sequences().to(input_ids.device)
    for criterion in lengths:
        criterion(sequences[:, :-1], None)  # the criterion warns about rows that exceed the model's positions
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return sequences

    cache = inputs.get("past_key_values")
    if cache is not None:
        # The sequences are cloned, because the caller may change them before the cache is filled. If images shift
        # positions, the decoder must compute the positions, because otherwise the cache would not keep the shift.
        filled = None if is_usual and decoder.images_shift_positions else positions
        cache.fill_later(_filling(decoder, sequences[:, :-1].clone(), ids.shape[1], mask, filled, pixels))
    kept = output.steps
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(step.scores for step in kept) if config.output_scores else None,
        logits=tuple(step.logits for step in kept) if config.output_logits else None,
        past_key_values=cache,
    )


def _padding_token(stopping_criteria: Any, config: Any) -> int | None:
    """Return the token that fills a row after its end; None if no criterion has stop tokens."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
        return None
    if config._pad_token_tensor is None:
        raise ValueError(
            "generate: pad_token_id must be given with a stopping criterion that has stop tokens, got None. Pass "
            "the token that fills rows after their end."
        )
    return int(config._pad_token_tensor)


def _steps_ahead(device: torch.device, logits_processor: Any, others: Any, streamer: Any) -> int:
    """Return how many steps may run before the tokens of earlier steps have been read.

    If the user has passed a custom logits processor, no step may run ahead, because the processor would also be called
    for steps after the last row has ended. With a streamer, at most one step may run ahead: the step that runs while
    the streamer reads a token.
    """
    if device.type not in ACCELERATORS or not all(map(_is_from_transformers, logits_processor)):
        return 0
    if streamer is None:
        return STEPS_AHEAD
    return 0 if others else 1


class Output:
    """The new tokens, and the stopping criteria and the streamer that read them.

    Args:
        prompts: [B, T] int64.
        new: maximum number of new tokens.
        pad: the token that fills a row after its end; None if every row continues until the last row ends.
        criteria: the criteria that are called for every token.
        limits: the criteria that limit the time.
        streamer: transformers' streamer, which gets the tokens of each step; None for no streamer.
        keeps_scores: whether the scores are passed to the criteria.

    Attributes:
        steps: the steps so far.
        length: number of steps that `check` has read.
    """

    def __init__(
        self,
        prompts: Tensor,
        new: int,
        pad: int | None,
        criteria: Any,
        limits: list[Any],
        streamer: Any,
        *,
        keeps_scores: bool,
    ) -> None:
        self.prompts, self.pad, self.criteria, self.limits = prompts, pad, criteria, limits
        self.streamer, self.keeps_scores = streamer, keeps_scores
        self.steps: list[Step] = []
        self.length, self.has_ended = 0, False
        self.is_checked = bool(criteria or limits) or streamer is not None
        if self.is_checked:
            self.ids = nn.functional.pad(prompts, (0, new))
            self.unfinished = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)

    def check(self) -> bool:
        """Call the criteria for each unread step, in order, and return whether all rows have ended.

        Steps that ran after the end of all rows are dropped.
        """
        while self.length < len(self.steps) and not self.has_ended:
            self._read(self.steps[self.length])
        if self.has_ended:
            del self.steps[self.length :]
        elif self.limits:
            column = self.ids[:, self.prompts.shape[1] + self.length - 1]
            column.tolist()  # wait until these tokens have been computed
            self.has_ended = any(bool(limit(column[:, None], None).all()) for limit in self.limits)
        return self.has_ended

    def _read(self, step: Step) -> None:
        column = self.prompts.shape[1] + self.length
        self.length += 1
        tokens = step.tokens
        if self.pad is not None:
            tokens = tokens.where(self.unfinished, self.pad)
        self.ids[:, column] = tokens
        if self.criteria:
            scores = tuple(step.scores for step in self.steps[: self.length]) if self.keeps_scores else None
            done = self.criteria(self.ids[:, : column + 1].contiguous(), scores)
            self.unfinished = self.unfinished & ~(done | step.ended)
            self.has_ended = not bool(self.unfinished.any())
        if self.streamer is not None:
            self.streamer.put(tokens.cpu() if step.read_tokens is None else step.read_tokens())

    def sequences(self) -> Tensor:
        """Return the prompts and the new tokens, [B, T + n] int64."""
        if self.is_checked:
            return self.ids[:, : self.prompts.shape[1] + self.length].contiguous()
        return torch.cat([self.prompts, torch.stack([step.tokens for step in self.steps], 1)], 1)


def _is_from_transformers(value: Any) -> bool:
    return type(value).__module__.startswith("transformers.")


def _settings(**options: Any) -> Settings:
    """Return the settings of the decoding engine. Options that are not given get values that have no effect."""
    neutral: dict[str, Any] = {
        **UNFILTERED, "temperature": 1.0, "stop_strings": None, "logits_processor": [], "generator": None, "seed": None,
        "cache": None, "draft_model": None, "num_draft_tokens": 1,
    }  # fmt: skip
    return Settings(**neutral | options)


def _positions(
    decoder: CausalLM, ids: Tensor, mask: Tensor | None, new: int, pixels: dict[str, Any], given: Tensor | None
) -> tuple[Tensor, bool]:
    """Return the positions of prompts and new tokens, and whether the decoder itself would compute the same positions.

    ``given`` are the positions of the prompts that the caller has passed, or None.
    """
    usual = decoder.prompt_positions(ids, mask, new, pixels)
    if given is None:
        return usual, True
    T = ids.shape[1]
    given = given.to(ids.device)
    if given.dim() == usual.dim() and torch.equal(*torch.broadcast_tensors(given, usual[..., :T])):
        return usual, True
    following = given[..., -1:] + 1 + torch.arange(new, device=given.device)
    return torch.cat([given, following], -1), False


def _filling(
    decoder: CausalLM, ids: Tensor, length: int, mask: Tensor | None, positions: Tensor | None, pixels: dict[str, Any]
) -> Callable[[], DecodeCache]:
    """Return a function that computes the cache for the tokens ``ids`` [B, S] of prompts and answers.

    ``length``, ``mask`` and ``pixels`` belong to the prompts. ``positions`` holds the positions of all tokens in
    ``ids``; None if the decoder computes the positions.
    """

    def fill() -> DecodeCache:
        S, cache = ids.shape[1], DecodeCache()
        padded = None if mask is None else nn.functional.pad(mask, (0, S - mask.shape[1]), value=1)
        # Answers may contain placeholders of images, so pixels are passed only with the prompts.
        bounds = sorted({0, length, S}) if decoder.prompt_inputs else [0, S]
        with torch.no_grad(), evaluating(list(decoder.modules())):
            for first, last in itertools.pairwise(bounds):
                decoder(
                    ids[:, first:last].to(decoder.device), cache=cache, return_logits=False,
                    attention_mask=None if padded is None else padded[:, :last],
                    position_ids=None if positions is None else positions[..., first:last],
                    **({} if first else pixels),
                )  # fmt: skip
        return cache

    return fill


def count_repeats(ids: Tensor, mask: Tensor | None) -> int:
    """Return the largest n for which the prompts consist of groups of n consecutive equal rows.

    The engine processes the prompt of each group only once. Groups result from the argument ``num_return_sequences`` of
    ``generate``, and from trainers that sample several answers per prompt. This function synchronizes with the device.

    Args:
        ids: [B, T] int64.
        mask: [B, T], 0 for padding; None for no padding.
    """
    if len(ids) == 1:
        return 1
    differs = (ids[1:] != ids[:-1]).any(1)
    if mask is not None:
        differs |= (mask[1:] != mask[:-1]).any(1)
    starts = itertools.compress(itertools.count(1), differs.tolist())
    return math.gcd(len(ids), *starts)


OPTIONS = {
    processors.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    processors.NoRepeatNGramLogitsProcessor: ("no_repeat_ngram_size", "ngram_size"),
    processors.NoBadWordsLogitsProcessor: ("bad_words_ids", "sequence_bias"),
    processors.MinLengthLogitsProcessor: ("min_new_tokens", "min_length"),
    processors.MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
    processors.SuppressTokensLogitsProcessor: ("suppress_tokens", "suppress_tokens"),
    processors.TemperatureLogitsWarper: ("temperature", "temperature"),
    processors.TopKLogitsWarper: ("top_k", "top_k"),
    processors.TopPLogitsWarper: ("top_p", "top_p"),
    processors.MinPLogitsWarper: ("min_p", "min_p"),
    processors.TypicalLogitsWarper: ("typical_p", "mass"),
    processors.EpsilonLogitsWarper: ("epsilon_cutoff", "epsilon"),
    processors.EtaLogitsWarper: ("eta_cutoff", "epsilon"),
}
"""Maps a class of logits processors to (the equivalent option of the decoding engine, the attribute with its value).

The classes are in the order in which the engine applies the options.
"""


def options_of(chain: Any, prompts: Tensor, mask: Tensor | None, stops: list[int], vocab: int) -> dict[str, Any] | None:
    """Return options of the decoding engine that have the same effect as a list of logits processors; None if there are
    no such options.

    Args:
        chain: the ``LogitsProcessorList``.
        prompts: [B, T] int64.
        mask: [B, T], 0 for padding on the left; None for no padding.
        stops: the stop tokens.
        vocab: number of logits.
    """
    order = [[*OPTIONS].index(type(processor)) for processor in chain if type(processor) in OPTIONS]
    if len(order) < len(chain) or order != sorted({*order}):
        return None
    options: dict[str, Any] = {}
    for processor in chain:
        name, attribute = OPTIONS[type(processor)]
        value = getattr(processor, attribute)
        value = value.tolist() if isinstance(value, Tensor) else value
        # A caller may have created a processor with a value that the engine does not support.
        if (
            getattr(processor, "filter_value", -math.inf) != -math.inf
            or getattr(processor, "min_tokens_to_keep", 1) > 1
        ):
            return None
        if name == "top_p" and value == 0:
            return None
        if name == "repetition_penalty":
            ignored = processor.prompt_ignore_length
            padding = None if mask is None else (mask != 0).int().argmax(1)
            is_usual = ignored is None if padding is None else isinstance(ignored, Tensor)
            if not is_usual or (padding is not None and not torch.equal(ignored.to(padding.device), padding)):
                return None
        # In transformers, n-grams may also contain padding.
        if name == "no_repeat_ngram_size" and mask is not None:
            return None
        if name == "bad_words_ids":
            value = [[*word] for word in value]
            if max(map(max, value)) >= vocab or (mask is not None and max(map(len, value)) > 1):
                return None
        if name == "min_new_tokens":
            if processor.eos_token_id.tolist() != stops:
                return None
            if attribute == "min_length":
                value -= prompts.shape[1]
            elif processor.prompt_length_to_skip != prompts.shape[1]:
                return None
            value = max(value, options.get(name, 0))
        options[name] = value
    return options
