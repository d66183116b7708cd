"""Continuing prompts: greedy decoding and sampling, with the names and the semantics of transformers' ``generate``.

What is not given is taken from the checkpoint's generation_config.json, then (stop and padding tokens) from its
config.json: so a chat model samples as its authors meant it to. Where this differs from transformers: top-k is off
unless somebody asks for it (transformers keeps 50 tokens), and padding does not count as a repeated token.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoint import parse_json
from liger_models.kernels.dispatch import check
from liger_models.layers.sequence import DecodeCache

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from liger_models.layers.causal_lm import CausalLM

Prompts = Tensor | Sequence[int] | Sequence[Tensor] | Sequence[Sequence[int]]

NOT_HERE = (
    "num_beams", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_length",
    "min_new_tokens", "bad_words_ids", "suppress_tokens", "stop_strings",
)  # fmt: skip
"""Keys of a generation_config.json that would change the tokens and that are not implemented: a warning names them."""


class PromptInputs(TypedDict, total=False):
    """What prompts have besides their tokens, for models with the same arguments of ``forward``."""

    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    pixel_values_videos: Tensor | None
    video_grid_thw: Tensor | None
    second_per_grid_ts: Tensor | list[float] | None
    mm_token_type_ids: Tensor | None
    token_type_ids: Tensor | None
    aspect_ratio_ids: Tensor | None
    aspect_ratio_mask: Tensor | None
    cross_attention_mask: Tensor | None


class Options(PromptInputs, total=False):
    """Keyword arguments of `generate` and `stream`; those of `PromptInputs`, too.

    None, or none given, stands for what the checkpoint says (generation_config.json, then config.json), and for what is
    given here in brackets if it says nothing.

    Attributes:
        attention_mask: [B, T], nonzero for tokens, 0 for padding. Default: as in transformers, ``pad_token_id`` is
            padding wherever it stands, unless it is a stop token too. Not with a list.
        do_sample: draw tokens; False takes the likeliest. (False)
        temperature: divisor of the logits, positive. (1)
        top_k: draw from the k likeliest tokens and those as likely as the last of them; 0 for all. (0)
        top_p: draw from the fewest likeliest tokens that hold this probability, in (0, 1]. (1)
        repetition_penalty: what positive logits of tokens that stand in the row are divided by and negative ones
            multiplied with, positive. (1)
        eos_token_id: token or tokens that end a row; ``[]`` for none. (none)
        pad_token_id: fills ended rows, and lists on the left. (the first stop token)
        generator: source of the draws, on the model's device; None for the global one.
        use_cache: False runs the whole sequence anew for each token. (True)
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
    use_cache: bool


def generate(model: "CausalLM", input_ids: Prompts, *, max_new_tokens: int, **options: "Unpack[Options]") -> Tensor:
    """Continue the prompts.

    The model runs in eval mode without gradients, and is left as it was.

    Args:
        model: a language model.
        input_ids: [B, T] integers, rows of unequal length padded on the left; or a list of prompts, each a 1-D tensor
            or a list of ids, which is padded here; or a single prompt.
        max_new_tokens: stop after so many, at least 1.
        options: see `Options`.

    Returns:
        [B, T + new] int64 on the model's device: the (padded) prompts and their continuations, up to the step in which
        the last row ended.

    Raises:
        TypeError: an argument that `Options` does not have.
        ValueError: an argument out of its range, an empty prompt, a mask that does not fit or pads on the right.
    """
    settings = _resolve(model, max_new_tokens, options)
    ids, mask = _batch(model, input_ids, options.get("attention_mask"), settings)
    return torch.cat([ids, torch.stack(list(_steps(model, ids, mask, settings, _inputs(model, options))), 1)], 1)


def stream(
    model: "CausalLM", input_ids: Prompts, *, max_new_tokens: int, **options: "Unpack[Options]"
) -> Iterator[Tensor]:
    """Continue the prompts step by step.

    Args:
        model, input_ids, max_new_tokens, options: as `generate`; they are checked at once, not with the first token.

    Returns:
        Iterator over the new tokens, [B] int64 of each step. The model is in eval mode only while it computes one.

    Raises:
        TypeError, ValueError: as `generate`.
    """
    settings = _resolve(model, max_new_tokens, options)
    ids, mask = _batch(model, input_ids, options.get("attention_mask"), settings)
    return _steps(model, ids, mask, settings, _inputs(model, options))


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """`Options` with nothing left open; ``pad_token_id`` is None where nothing ends and nothing pads."""

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
            "For the likeliest tokens set do_sample=False.",
        )
        check(self.top_k >= 0, f"generate: top_k must be at least 1, got {self.top_k}. Set 0 to draw from all tokens.")
        check(
            0 < self.top_p <= 1, f"generate: top_p must be in (0, 1], got {self.top_p}. Set 1 to draw from all tokens."
        )
        check(
            self.repetition_penalty > 0,
            f"generate: repetition_penalty must be positive, got {self.repetition_penalty}. Set 1 for none.",
        )


def _resolve(model: "CausalLM", max_new_tokens: int, options: Options) -> _Settings:
    """Fill in what the checkpoint says, and check the ranges."""
    known = [key for key in Options.__annotations__ if key not in PromptInputs.__annotations__]
    known += model.prompt_inputs
    if options.keys() - known:
        raise TypeError(
            f"generate: options must be among max_new_tokens, {', '.join(known)}, "
            f"got {', '.join(sorted(options.keys() - known))}."
        )
    stored = _generation_config(model)

    def said(name: str, *otherwise: Any) -> Any:
        return _first(options.get(name), stored.get(name), *otherwise)

    do_sample = bool(said("do_sample", False))
    if not do_sample:
        drawing = ("temperature", "top_k", "top_p")
        stored = {name: value for name, value in stored.items() if name not in drawing}
        idle = {name: value for name, value in options.items() if name in drawing and value not in (None, 0, 1)}
        if idle:
            warnings.warn(f"generate: without do_sample=True nothing is drawn, {idle} has no effect.", stacklevel=3)
    eos = torch.as_tensor(said("eos_token_id", getattr(model.config, "eos_token_id", None), [])).flatten().tolist()
    vocab, pad, generator = model.config.vocab_size, options.get("pad_token_id"), options.get("generator")
    check(
        pad is None or 0 <= pad < vocab,
        f"generate: pad_token_id must be in [0, {vocab}), got {pad}. Leave it out to pad with the stop token.",
    )
    # Some checkpoints say −1 for no padding token.
    pads = [pad, stored.get("pad_token_id"), getattr(model.config, "pad_token_id", None), *eos]
    check(
        generator is None or generator.device.type == model.device.type,
        f"generate: generator must be on {model.device.type} like the model, "
        f"got {None if generator is None else generator.device}. Make it with torch.Generator({model.device.type!r}).",
    )
    return _Settings(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=said("temperature", 1.0),
        top_k=said("top_k", 0),
        top_p=said("top_p", 1.0),
        repetition_penalty=said("repetition_penalty", 1.0),
        eos_token_id=eos,
        pad_token_id=next((pad for pad in pads if pad is not None and 0 <= pad < vocab), None),
        generator=generator,
        use_cache=options.get("use_cache", True),
    )


def _inputs(model: "CausalLM", options: Options) -> dict[str, Any]:
    """What belongs to the prompts besides their tokens, on the model's device like these."""
    return {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in options.items()
        if name in model.prompt_inputs
    }


def _generation_config(model: "CausalLM") -> dict[str, Any]:
    """The content of the checkpoint's generation_config.json, {} without one."""
    name = "generation_config.json"
    stored = parse_json(model.assets.get(name, b"{}"), name)
    absent = [key for key in NOT_HERE if stored.get(key) not in (None, 0, 1, [])]
    if absent:
        names = ", ".join(absent)
        warnings.warn(f"generation_config.json: not implemented and without effect: {names}.", stacklevel=4)
    return stored


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _batch(
    model: "CausalLM", prompts: Prompts, attention_mask: Tensor | None, settings: _Settings
) -> tuple[Tensor, Tensor | None]:
    """``(ids, mask)``, each [B, T] int64 on the model's device; ``mask`` is None if nothing is padded."""
    where, vocab = model.device, model.embed_tokens.num_embeddings  # a placeholder may be no word of the head's
    if isinstance(prompts, Tensor):
        ids = prompts[None] if prompts.dim() == 1 else prompts
        mask = attention_mask
    else:
        check(attention_mask is None, "generate: attention_mask goes with a tensor, got a list. It pads by itself.")
        ids, mask = _pad(prompts, settings.pad_token_id or 0)
    check(ids.dim() == 2, f"generate: input_ids must be [B, T], got {list(ids.shape)}.")
    check(ids.numel() > 0, f"generate: input_ids must hold at least one token per row, got {list(ids.shape)}.")
    check(
        not (ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool),
        f"generate: input_ids must be integers, got {ids.dtype}.",
    )
    ids = ids.to(where, torch.int64)
    low, high = (int(bound) for bound in ids.aminmax())
    check(
        low >= 0 and high < vocab,
        f"generate: input_ids must be in [0, {vocab}), got {low} to {high}. Does the tokenizer belong to the model?",
    )
    check(
        mask is None or mask.shape == ids.shape,
        f"generate: attention_mask must be {list(ids.shape)} like input_ids, "
        f"got {None if mask is None else list(mask.shape)}.",
    )
    if mask is None and settings.pad_token_id is not None and settings.pad_token_id not in settings.eos_token_id:
        mask = ids != settings.pad_token_id
    if mask is None:
        return ids, None
    mask = (mask != 0).to(where, torch.int64)
    wrong = (mask[:, -1] == 0).nonzero().flatten().tolist()
    check(
        not wrong,
        f"generate: each row must end with a token, got padding at the end of rows {wrong}. Pad on the left, give a "
        "list of prompts, or an attention_mask if those are tokens.",
    )
    return ids, None if bool(mask.all()) else mask


def _pad(prompts: Sequence[Any], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """A list of prompts, or a single one, as ``(ids, mask)`` [B, T], padded on the left."""
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    rows = [torch.as_tensor(prompt) for prompt in prompts]
    shapes = [list(row.shape) for row in rows]
    check(
        bool(rows) and all(row.dim() == 1 and len(row) for row in rows),
        f"generate: input_ids must be a list of prompts with at least one token each, got shapes {shapes}.",
    )
    T = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (T - len(row), 0), value=pad_token_id) for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return ids, torch.arange(T, device=ids.device) >= T - lengths[:, None]


@torch.no_grad()
def _steps(
    model: "CausalLM", prompts: Tensor, mask: Tensor | None, settings: _Settings, inputs: dict[str, Any]
) -> Iterator[Tensor]:
    """The new tokens of each step, [B] int64, until every row has ended.

    Args:
        prompts: [B, T] int64.
        mask: [B, T] int64, 0 for padding; None: there is none.
        inputs: what belongs to the prompts besides their tokens.
    """
    B, T = prompts.shape
    S = T + settings.max_new_tokens
    ids = nn.functional.pad(prompts, (0, settings.max_new_tokens))  # [B, S], filled as tokens come
    positions = model.prompt_positions(prompts, mask, settings.max_new_tokens, inputs)
    if mask is not None:
        mask = nn.functional.pad(mask, (0, settings.max_new_tokens), value=1)
    # Columns in which all frequencies switch (longrope): the keys cached before have the old ones.
    lengths = [getattr(rotary, "switch_length", None) for rotary in model.rotary.values()]
    furthest = positions.flatten(0, -2).amax(0)
    switches = [int((furthest < length).sum()) for length in lengths if length is not None]
    seen = None
    if settings.repetition_penalty != 1:
        tokens = prompts if mask is None else torch.where(mask[:, :T] != 0, prompts, prompts[:, -1:])
        known = model.embed_tokens.num_embeddings
        seen = torch.zeros(B, known, dtype=torch.bool, device=ids.device).scatter_(1, tokens, True)
        seen = seen[:, : model.config.vocab_size]
    stops = torch.tensor(settings.eos_token_id, dtype=torch.int64, device=ids.device)
    ended = torch.zeros(B, dtype=torch.bool, device=ids.device)
    cache = DecodeCache(S - 1) if settings.use_cache else None  # nothing comes after the last token
    modules = list(model.modules())

    for end in range(T, S):
        if cache is not None and any(cache.length <= switch < end for switch in switches):
            cache.length = 0
        new = slice(cache.length if cache is not None else 0, end)
        with _evaluating(modules):
            logits = model(
                ids[:, new],
                position_ids=positions[..., new],
                attention_mask=None if mask is None else mask[:, :end],
                logits_to_keep=1,
                cache=cache,
                **(inputs if new.start == 0 else {}),
            ).logits
        tokens = _choose(logits[:, -1].float(), seen, settings)
        if len(stops):
            tokens = tokens.masked_fill(ended, _first(settings.pad_token_id, 0))
            ended |= torch.isin(tokens, stops)
        ids[:, end] = tokens
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        yield tokens
        if len(stops) and bool(ended.all()):
            return


@contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Eval mode for a while; each module gets its own mode back."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _choose(logits: Tensor, seen: Tensor | None, settings: _Settings) -> Tensor:
    """The next tokens [B], by logits [B, V] fp32 and tokens ``seen`` [B, V] bool."""
    if seen is not None:
        logits = penalize_repetition(logits, seen, settings.repetition_penalty)
    if not settings.do_sample:
        return logits.argmax(1)
    logits = logits / settings.temperature
    if settings.top_k:
        logits = keep_top_k(logits, settings.top_k)
    if settings.top_p < 1:
        logits = keep_top_p(logits, settings.top_p)
    return torch.multinomial(logits.softmax(1), 1, generator=settings.generator)[:, 0]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the tokens in ``seen`` less likely: positive logits divided by ``penalty``, negative ones multiplied.

    Args:
        logits: [B, V] fp32.
        seen: [B, V] bool.
        penalty: more than 1 to discourage repetition.

    Source: CTRL (https://arxiv.org/abs/1909.05858).
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the ``k`` largest logits of a row, and those equal to the last of them, set to −∞; logits [B, V] fp32."""
    last = logits.topk(min(k, logits.shape[1])).values[:, -1:]
    return logits.masked_fill(logits < last, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The least likely tokens, which together have at most 1 − ``p``, set to −∞; the likeliest one always stays.

    Args:
        logits: [B, V] fp32.
        p: in (0, 1].

    Source: https://arxiv.org/abs/1904.09751.
    """
    ascending, order = logits.sort(1)
    share, rest = ascending.softmax(1), 1 - p
    if torch.are_deterministic_algorithms_enabled():  # on a GPU cumsum then takes integers only
        share, rest = (share.double() * 2**53).long(), int(rest * 2**53)
    drop = share.cumsum(1) <= rest
    drop[:, -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
