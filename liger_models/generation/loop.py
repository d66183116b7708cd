"""Greedy decoding and sampling, with the argument names and semantics of ``generate`` in transformers.

There are two differences from transformers. Top-k is off by default, whereas transformers keeps the 50 most likely
tokens. With ``no_repeat_ngram_size``, padding never counts as part of a sequence that must not be repeated.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from liger_models.generation.eval_mode import evaluating, resharded
from liger_models.generation.lockstep import in_lockstep
from liger_models.generation.logits import next_logits
from liger_models.generation.options import Options, Settings, is_draft_block, resolve, select_inputs, shows_options
from liger_models.generation.prompts import Prompts, batch_prompts
from liger_models.generation.rollouts import drafted_steps
from liger_models.generation.rows import Rows, Step, copy_later
from liger_models.generation.speculation import speculate
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.layers.decoder import Decoder
from liger_models.layers.layer import modules_of
from liger_models.layers.recompute import run_preparing_hooks

if TYPE_CHECKING:
    from typing_extensions import Unpack

STEPS_AHEAD = 2
"""Number of steps that run ahead: `generate` launches this many further steps before it reads whether a step ended all
rows.

If the host read each step before it launched the next step, the GPU would be idle between steps.
"""


class GenerateOutput(NamedTuple):
    """The result of `generate` with ``return_logprobs``.

    Attributes:
        sequences: [B, T + new] int64, the padded prompts and their continuations.
        logprobs: [B, new] fp32, the log-probability of each new token under the model's own distribution, without
            ``repetition_penalty``, ``temperature`` or any other option; 0 for the padding after the end of a row.
        finish_reasons: for each row, "length" if ``max_new_tokens`` ended the row, otherwise "stop".
    """

    sequences: Tensor
    logprobs: Tensor
    finish_reasons: tuple[str, ...]


@overload
def generate(
    model: Decoder,
    input_ids: Prompts,
    *,
    max_new_tokens: int,
    return_logprobs: Literal[False] = False,
    **options: "Unpack[Options]",
) -> Tensor: ...
@overload
def generate(
    model: Decoder,
    input_ids: Prompts,
    *,
    max_new_tokens: int,
    return_logprobs: Literal[True],
    **options: "Unpack[Options]",
) -> GenerateOutput: ...
@shows_options
def generate(
    model: Decoder,
    input_ids: Prompts,
    *,
    max_new_tokens: int,
    return_logprobs: bool = False,
    **options: "Unpack[Options]",
) -> Tensor | GenerateOutput:
    """Generate continuations of prompts.

    The model runs in eval mode without gradients. The mode of each module is restored afterwards.

    Args:
        model: a language model. If it is sharded by `apply_fsdp`, all ranks must call this function, each with its own
            prompts. With images, a draft or ``use_cache=False``, all ranks must then also run the same number of
            forwards.
        input_ids: [B, T] integers, with shorter rows padded on the left; or a single prompt; or a list of prompts of
            different lengths. A prompt is a 1-D tensor or a list of ids.
        max_new_tokens: maximum number of new tokens, at least 1.
        return_logprobs: whether to return a `GenerateOutput`, which has the log-probability of each new token.
        options: see `Options`.

    Returns:
        [B, T + new] int64 on the model's device: the padded prompts and their continuations. The result ends with the
        step in which the last row ended. Each prompt has ``num_return_sequences`` consecutive rows.

    Raises:
        TypeError: an argument is not in `Options`. Other arguments of transformers are accepted if their value has no
            effect.
        ValueError: an argument is out of range, a prompt is empty, the mask has another shape than the prompts, or the
            mask has padding on the right.
    """
    settings = resolve(model, max_new_tokens, options)
    ids, mask = batch_prompts(model, input_ids, options.get("attention_mask"), settings)
    given = select_inputs(model, options)
    inputs = model.complete_inputs(ids, given)
    computed: Iterator[Step]
    if settings.draft_model is None:
        ahead = steps_ahead(model.device, settings)
        computed = run_steps(model, ids, mask, settings, inputs, logprobs=return_logprobs, ahead=ahead)
    else:
        draft = drafted_steps if is_draft_block(settings.draft_model) else speculate
        computed = draft(model, ids, mask, settings, inputs, logprobs=return_logprobs)

    # Under FSDP, a rank that has finished runs further forwards of one token with a cache, until all ranks have
    # finished. The collectives of these forwards match only if the forwards of the other ranks also take tokens and use
    # a cache.
    alike = settings.draft_model is None and settings.use_cache and not given
    with resharded(model, settings.draft_model), in_lockstep(model) if alike else nullcontext():
        steps = list(computed)
    ids = ids.repeat_interleave(settings.num_return_sequences, 0)
    sequences = torch.cat([ids, torch.stack([step.tokens for step in steps], 1)], 1)
    if not return_logprobs:
        return sequences
    reasons = tuple("stop" if ended else "length" for ended in steps[-1].ended.tolist())
    logprobs = [step.logprobs for step in steps if step.logprobs is not None]
    return GenerateOutput(sequences, torch.stack(logprobs, 1), reasons)


@shows_options
def stream(
    model: Decoder, input_ids: Prompts, *, max_new_tokens: int, **options: "Unpack[Options]"
) -> Iterator[Tensor]:
    """Generate continuations of prompts, and yield the new tokens of each step.

    Args:
        model, input_ids, max_new_tokens, options: see `generate`. All arguments are checked when this function is
            called, with one exception: whether ``draft_model`` supports the options is checked when the first token is
            requested.

    Returns:
        An iterator over the new tokens, [B] int64 for each step. The model is in eval mode only while a step is
        computed. Weights and adapters must not change before the iterator ends.

    Raises:
        TypeError, ValueError: see `generate`.
    """
    settings = resolve(model, max_new_tokens, options)
    ids, mask = batch_prompts(model, input_ids, options.get("attention_mask"), settings)
    drafted = drafted_steps if is_draft_block(settings.draft_model) else speculate
    run = run_steps if settings.draft_model is None else drafted
    inputs = model.complete_inputs(ids, select_inputs(model, options))
    return _tokens(model, settings, run(model, ids, mask, settings, inputs))


def _tokens(model: Decoder, settings: Settings, steps: Iterator[Step]) -> Iterator[Tensor]:
    with resharded(model, settings.draft_model):
        for step in steps:
            yield step.tokens


def steps_ahead(device: torch.device, settings: Settings) -> int:
    """Return how many further steps `generate` may launch before it notices that all rows have ended.

    The number is 0 if the user has passed a cache, a ``logits_processor`` or stop strings: steps after the end would
    write to the cache and call the user's functions.
    """
    noticed = settings.cache is not None or settings.logits_processor or settings.stop_strings is not None
    return 0 if noticed or device.type not in ACCELERATORS else STEPS_AHEAD


@torch.no_grad()
def run_steps(
    model: Decoder,
    prompts: Tensor,
    mask: Tensor | None,
    settings: Settings,
    inputs: dict[str, Any],
    *,
    positions: Tensor | None = None,
    logprobs: bool = False,
    returns_logits: bool = False,
    copies_tokens: bool = False,
    ahead: int = 0,
) -> Generator[Step, None, None]:
    """Yield the new tokens of each step, until every row has ended.

    Args:
        prompts: [B, T] int64.
        mask: [B, T] int64, which is 0 for padding; None for no padding.
        inputs: inputs of the model that belong to the prompts, in addition to the tokens.
        positions: the positions of the prompts and of the new tokens, in the shape that `Decoder.prompt_positions`
            returns. Default: the result of `Decoder.prompt_positions`.
        logprobs: whether to compute log-probabilities.
        returns_logits: whether each step includes its logits.
        copies_tokens: whether to start a copy of each step's tokens to the host.
        ahead: number of further steps to launch before the host reads whether a step has ended all rows.
    """
    run_preparing_hooks(model)
    T, repeats = prompts.shape[1], settings.num_return_sequences
    S = T + settings.max_new_tokens
    if positions is None:
        positions = model.prompt_positions(prompts, mask, settings.max_new_tokens, inputs)

    # Repeat each prompt for all of its rows. Without a cache, images are computed for every row.
    if repeats > 1:
        if not settings.use_cache and inputs:
            with_images: Any = model
            inputs = with_images.repeat_prompts(prompts, inputs, repeats)
        prompts = prompts.repeat_interleave(repeats, 0)
        mask = None if mask is None else mask.repeat_interleave(repeats, 0)
        positions = positions.repeat_interleave(repeats, -2) if positions.shape[-2] > 1 else positions

    rows = Rows(prompts, mask, settings, model.config.vocab_size, logprobs=logprobs, returns_logits=returns_logits)
    if mask is not None:
        mask = nn.functional.pad(mask, (0, settings.max_new_tokens), value=1)

    # Steps that are launched but not yielded yet. The function of a step waits for the step, and returns whether all
    # rows have ended.
    modules = modules_of(model)
    computed: deque[tuple[Step, Callable[[], bool]]] = deque()

    with next_logits(model, rows, mask, positions, inputs, settings) as logits_of:
        for end in range(T, S):
            with evaluating(modules):
                logits = logits_of(end)
            step = rows.step(logits)
            if copies_tokens:
                step = step._replace(read_tokens=copy_later(step.tokens))
            computed.append((step, rows.read_later()))
            while len(computed) > (ahead if end < S - 1 else 0):
                step, all_ended = computed.popleft()
                yield step
                # No step follows the last one, so the host need not wait for its result.
                if (computed or end < S - 1) and all_ended():
                    return
