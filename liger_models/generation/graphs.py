"""Decoding steps, which compute one token per row. A step is captured as a CUDA graph and replayed for every token.

A step launches hundreds of small kernels. The host needs more time to launch these kernels one by one than the GPU
needs to run them. A graph needs only one launch. The kernels in the graph read the tokens, their positions and the
cache from tensors at fixed addresses, so one graph serves all lengths up to the capacity of its cache.

A step and its cache have a fixed number of rows and a fixed capacity in tokens, both rounded up. If a model is in eval
mode, a few captured steps are kept for later calls; see `MOST_STEPS` and `MOST_MEMORY`. The kept steps are dropped when
the model changes in a way that a captured step would not notice. Captured steps read the current values of the
parameters, so the steps remain valid when parameters are updated in place. `release_steps` drops all steps at once.
"""

import functools
import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_models.generation.model_state import ModelState, state_of
from liger_models.generation.prefill import (
    MOST_GRAPHS,
    PromptBatch,
    PromptGraph,
    can_move_padding,
    most_tokens,
    padded_length,
)
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.overlap import overlapping
from liger_models.layers import paged_cache
from liger_models.layers.decoder import Decoder
from liger_models.layers.derived import DerivedTensors
from liger_models.layers.layer import modules_of
from liger_models.layers.paged_cache import PagedCache

MOST_STEPS = 4
MOST_MEMORY = 1 / 32
"""Maximum number of steps that are kept for a model, and maximum fraction of GPU memory for the tensors of these steps.

A step that needs more than this fraction is not kept. In addition, a graph needs the memory of its activations: a few
MiB for one token per row, and more for prompts.
"""

FIRST_TOKENS = 2048
"""Number of new tokens per row for which a step initially has room. When the room is used up, it is doubled."""

EVERY_BATCH = 16
"""A number of rows up to this limit is rounded up to a power of two, and a larger number to a multiple of the limit."""

_kept: WeakKeyDictionary[nn.Module, list["DecodeStep"]] = WeakKeyDictionary()


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all graphs of a GPU are captured."""
    return torch.cuda.Stream(device)


@contextmanager
def keeps_random_numbers(device: torch.device) -> Iterator[None]:
    """Context manager that restores a GPU's random generator, which a failed capture leaves unusable."""
    random = torch.cuda.default_generators[device.index]
    unharmed = random.clone_state()
    try:
        yield
    except BaseException:
        random.graphsafe_set_state(unharmed)
        raise


@contextmanager
def collects_no_garbage() -> Iterator[None]:
    """Context manager that disables Python's garbage collector.

    If the collector frees a CUDA graph while another graph is captured, the capture fails
    (https://github.com/pytorch/pytorch/pull/161037).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def record(
    graph: torch.cuda.CUDAGraph, run: Callable[[], Any], device: torch.device, pool: Any = None,
    generator: torch.Generator | None = None,
) -> Any:  # fmt: skip
    """Capture ``run()`` in a graph. Returns the tensors to which each replay writes its results.

    Args:
        graph: an empty graph.
        run: the function.
        device: a GPU.
        pool: memory pool that several graphs share; None for a new pool.
        generator: a random generator that the function uses in addition to the global generator.

    Raises:
        RuntimeError: ``run()`` can't be captured.
    """
    # `torch.cuda.graph` is not used, because it would first return all cached memory to the driver. If `run` fails,
    # `capture_end` fails as well, and its error must not hide the error of `run`.
    cause, stream = None, capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with (
            collects_no_garbage(), keeps_random_numbers(device), torch.cuda.device(device), torch.cuda.stream(stream),
        ):  # fmt: skip
            if generator is not None:
                graph.register_generator_state(generator)
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                return run()
            except RuntimeError as error:
                cause = error
                raise
            finally:
                graph.capture_end()
    except RuntimeError as error:
        raise cause or error from None


def try_record(step: str, run: Callable[[], Any], device: torch.device, **options: Any) -> tuple[Any, Any] | None:
    """Capture ``run()`` in a new graph. If this fails, warn and return None.

    Args:
        step: name of the captured step, for the warning.
        run, device, options: see `record`.

    Returns:
        The graph, and the tensors to which each replay writes its results.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        return graph, record(graph, run, device, **options)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"{step} can't be captured as a CUDA graph, so tokens take longer: {reason}"
        warnings.warn(message, stacklevel=3)
        return None


def last_logits(model: Decoder, ids: Tensor, **options: Any) -> Tensor:
    """Return the logits of the last tokens of a forward, [B, V]."""
    logits: Tensor = model(ids, logits_to_keep=1, **options).logits
    return logits[:, -1]


class DecodeStep:
    """The forward of one token per row. The second call captures this forward as a CUDA graph.

    The first call is an ordinary forward, which compiles kernels and lets libraries allocate their memory. If a step
    with the same shapes has run before, even the first call is captured.

    Args:
        cache: the cache that the step reads and extends.
        captured: whether to capture the step.
        model_state: the result of `state_of` for the model; None if the state is not known.
        records_routing: whether to store in ``routed_experts`` the experts that each step chooses.
        returns_hidden: whether to return the input of the head, [B, C], instead of the logits.
    """

    def __init__(
        self,
        cache: PagedCache,
        *,
        captured: bool,
        model_state: ModelState | None = None,
        records_routing: bool = False,
        returns_hidden: bool = False,
    ) -> None:
        self.cache, self.captured, self.model_state = cache, captured, model_state
        self.records_routing, self.returns_hidden = records_routing, returns_hidden
        self.derived = DerivedTensors()
        """Tensors derived from weights. A captured step reads them in addition to the parameters and the cache."""
        self.routed_experts: Tensor | None = None
        """The experts that the last step chose, [rows, L, K] int16. The next step may overwrite this tensor."""
        rows, device = cache.rows, cache.lengths.device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.most_prompt_tokens = 0
        """Prompts are captured if they have at most this many tokens, including padding; 0 to capture no prompts."""
        self.moves_padding = False
        """Whether the padding of prompts is moved to the right."""
        self._prompts: dict[Hashable, PromptGraph] = {}
        self._seen: set[Hashable] = set()
        """The values of `PromptBatch.key` for all prompts so far."""
        self._pool: Any = None
        self._called = False
        self._tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._positions: Tensor | None = None
        self._logits = self._tokens

    @property
    def num_bytes(self) -> int:
        """Number of bytes of device memory in the tensors that the step keeps."""
        return self.cache.num_bytes + self.derived.num_bytes

    def prefill(
        self,
        model: Decoder,
        ids: Tensor,
        *,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        repeats: int = 1,
        **inputs: Any,
    ) -> Tensor:
        """Empty the cache and run a forward of the prompts.

        Args:
            model: the model.
            ids: [B, T] int64.
            position_ids: [1 or B, T] int64, or [3, 1 or B, T].
            attention_mask: [B, T], which is 0 for padding on the left; None for no padding.
            repeats: number of consecutive rows for each prompt.
            inputs: other arguments of the forward, such as images.

        Returns:
            The logits of the last tokens, [B, V].
        """
        (B, T), length = ids.shape, padded_length(ids.shape[1])
        is_captured = B * length <= self.most_prompt_tokens and length <= self.cache.capacity
        if not inputs and (is_captured or (self.moves_padding and attention_mask is not None)):
            batch = PromptBatch(ids, position_ids, length if is_captured else T, attention_mask)
            logits = self._prefill_padded(model, batch, repeats, is_captured)
            self.cache.length = T
        else:
            self.cache.start(B, T, attention_mask, repeats)
            logits = last_logits(
                model, ids, position_ids=position_ids, attention_mask=attention_mask, cache=self.cache, **inputs
            )
        if not self.cache.settle():
            self.graph, self._called = None, False
        return logits

    def _prefill_padded(self, model: Decoder, batch: PromptBatch, repeats: int, is_captured: bool) -> Tensor:
        """Run a forward of prompts that are padded on the right.

        If ``is_captured`` is True, the graph for this shape is replayed. If there is no such graph, the prompts run in
        an ordinary forward. The graph is captured when this shape occurs for the second time, because a capture takes
        at least as long as an ordinary forward.
        """
        B, length = batch.ids.shape
        self.cache.start(B, length, batch.mask, repeats)
        if not is_captured:
            return batch.logits(model, self.cache)
        captured = self._prompts.get(batch.key)
        if captured is not None:
            self.derived.current |= captured.derived
            return captured.replay(batch, self.cache.slots)

        # While the device runs the prompts, the host captures the graph for the next prompts of this shape.
        logits = batch.logits(model, self.cache)
        if self.cache.extra:
            self.most_prompt_tokens = 0
        elif batch.key in self._seen:
            self._capture_prompts(model, batch)
        self._seen.add(batch.key)
        return logits

    def reserve(self, tokens: int, most: int) -> None:
        """Make room for ``tokens`` tokens per row.

        If the capacity must grow, it is at least doubled, but it never exceeds ``most``.
        """
        if tokens > self.cache.capacity:
            self.cache.grow(min(max(tokens, 2 * self.cache.capacity), most))
            self.graph, self._called = None, False
            self._prompts.clear()

    def __call__(self, model: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run a forward of one token per row.

        Args:
            model: the model.
            tokens: [B] int64.
            positions: [1 or B, 1] int64, or [3, 1 or B, 1].

        Returns:
            The logits, [B, V], or the hidden states, [B, C].
        """
        B = len(tokens)
        positions = positions.expand(*positions.shape[:-2], B, 1)
        if self._positions is None or self._positions.dim() != positions.dim():  # only some calls have images
            self._positions = positions.new_empty(*positions.shape[:-2], self.cache.rows, 1)
            self.graph, self._called = None, False

        # A graph reads its inputs from these two tensors. They have all rows of the cache, although B may be smaller.
        self._tokens.copy_(self.cache.of_rows(tokens)[:, None])
        self._positions.copy_(self.cache.of_rows(positions, -2))
        if self.captured and self.graph is None and self._is_ready():
            self._capture(model)
        if self.graph is not None:
            self.derived.refresh()  # the graph reads these derived tensors, but does not compute them
            self.graph.replay()
            return self._logits[:B].clone()  # the next call overwrites the logits

        # The first call is an ordinary forward, and so is every call of a step that must not be captured.
        logits = self._run(model)
        self._called = True
        self.captured = self.captured and self.cache.is_settled
        if self.model_state is not None and self.captured:
            self.model_state.add_step(self._kind())
        return logits[:B]

    def _kind(self) -> Hashable:
        """Return everything, apart from the model, that determines the shapes of the step."""
        cache, dims = self.cache, None if self._positions is None else self._positions.dim()
        of_pool = getattr(cache, "groups", False), getattr(cache, "cache_dtype", None)
        return type(cache), cache.rows, cache.capacity, *of_pool, dims, self.records_routing, self.returns_hidden

    def _is_ready(self) -> bool:
        """Whether the step can be captured without an earlier ordinary call."""
        state = self.model_state
        return self._called or (state is not None and self.cache.is_settled and state.is_ready(self._kind()))

    def _run(self, model: Decoder) -> Tensor:
        self.cache.step()
        kept: dict[str, Any] = {"return_logits": False} if self.returns_hidden else {"logits_to_keep": 1}
        with overlapping(self.captured):  # without a capture, FSDP may write weights during a step
            out = model(self._tokens, position_ids=self._positions, cache=self.cache, **kept)
        if self.records_routing:
            self.routed_experts = model.choose_experts(out.router_logits)
        result: Tensor = out.hidden_states[-1] if self.returns_hidden else out.logits
        return result[:, -1]

    def _capture(self, model: Decoder) -> None:
        step = f"generate: a step of {type(model).__name__}"
        recorded = try_record(step, lambda: self._run(model), self._tokens.device)
        if recorded is None:
            self.captured = False
        else:
            self.graph, self._logits = recorded

    def _capture_prompts(self, model: Decoder, batch: PromptBatch) -> None:
        """Capture the forward of prompts. After a failed capture, no further captures of prompts are tried."""
        # The graphs never run at the same time, and their results are copied, so the graphs can share memory.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, slots = torch.cuda.CUDAGraph(), self.cache.slots
        # A replay with changed weights must compute all derived tensors again.
        self.derived.renew()
        self.cache.length = 0
        try:
            logits = record(graph, lambda: batch.logits(model, self.cache), self._tokens.device, self._pool)
        except RuntimeError:
            self.most_prompt_tokens = 0
        else:
            self._keep_prompts(PromptGraph(graph, batch, slots, logits, frozenset(self.derived.current)))

    def _keep_prompts(self, captured: PromptGraph) -> None:
        if len(self._prompts) >= MOST_GRAPHS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[captured.batch.key] = captured


@contextmanager
def borrow_step(model: Decoder, state: ModelState, B: int, tokens: int) -> Iterator[DecodeStep]:
    """Context manager that yields a `DecodeStep` for B rows of up to ``tokens`` tokens each.

    The step is the smallest kept step that is large enough. If there is no such step, a new one is made.

    Args:
        model: the model. The step is kept for later calls if the model is on one GPU and no module is in training
            mode. Under tensor parallelism, no step is kept, because a process group can't be destroyed while a graph
            uses it.
        state: the result of `state_of` for the model.
        B: number of rows.
        tokens: number of tokens per row for which the cache must have room.
    """
    if not can_capture(model, state):
        step = DecodeStep(PagedCache(B, tokens, model.device), captured=False)
        step.moves_padding = can_move_padding(model)
        yield step
        return

    # Take the smallest kept step that is large enough, or make a new step. Drop steps for an earlier state of the
    # model.
    rows = rounded_rows(B)
    kept = _kept.setdefault(model, [])
    kept[:] = [step for step in kept if step.model_state is state]
    fits = [step for step in kept if step.cache.rows == rows and step.cache.capacity >= tokens]
    if fits:
        step = min(fits, key=lambda step: step.cache.capacity)
        kept.remove(step)
        step.derived.renew()
    else:
        cache = PagedCache(rows, rounded_tokens(tokens), model.device)
        step = DecodeStep(cache, captured=True, model_state=state)
        step.moves_padding = can_move_padding(model)
        if is_kept(model):
            step.most_prompt_tokens = most_tokens(model)
    # Keep the step, and drop the oldest steps if there are too many of them or if they take too much memory.
    try:
        yield step
    finally:
        if is_kept(model):
            kept.append(step)
        most = MOST_MEMORY * torch.cuda.get_device_properties(model.device).total_memory
        while len(kept) > MOST_STEPS or sum(step.num_bytes for step in kept) > most:
            kept.pop(0)


def is_kept(model: Decoder) -> bool:
    """Return whether steps of a model are kept for later calls.

    The forward of prompts is captured only if steps are kept, because a graph that is not kept would be used only once.
    """
    return model.groups.tensor is None and not any(module.training for module in modules_of(model))


def release_steps(model: Decoder) -> None:
    """Drop all steps that are kept for a model, and free their memory."""
    _kept.pop(model, None)


def can_capture(model: Decoder, state: ModelState | None = None) -> bool:
    """Return whether steps of a model run as CUDA graphs. ``state`` is the result of `state_of`, if it is known.

    The model must be on one GPU or sharded by `apply_tp`, whose all-reduces are captured, too. No module may be
    compiled, and autocast must be off. Modules may have only two kinds of hooks: hooks that merely check something
    (``only_checks``), and hooks that `run_preparing_hooks` has already run.
    """
    device = model.device.type
    return (
        device == "cuda"
        and use_triton(model.embed_tokens.weight)
        and not torch.is_autocast_enabled(device)  # autocast frees the cast weights when it ends
        and (state or state_of(model)).can_capture
    )


def rounded_rows(B: int) -> int:
    """Return how many rows the step for B rows has: B rounded up to a power of two or a multiple of `EVERY_BATCH`."""
    return 1 << (B - 1).bit_length() if B <= EVERY_BATCH else -(-B // EVERY_BATCH) * EVERY_BATCH


def rounded_tokens(tokens: int) -> int:
    """Round a number of tokens per row up to the capacity of a step.

    The capacity is a whole number of pages, and at most about a quarter larger than ``tokens``.
    """
    unit = max(1 << max(tokens.bit_length() - 3, 0), paged_cache.PAGE)
    return -(-tokens // unit) * unit
