"""Recomputation: blocks and layers save only their input, and the backward recomputes everything else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_models.kernels.matmul.batch_invariance import batch_invariant, is_batch_invariant
from liger_models.layers.layer import routed_layers


@dataclass
class BlockRun:
    """A run of a block in `run_again`: the forward's run, or the backward's recomputation.

    Attributes:
        repeats: whether this is the recomputation.
        choices: what `keep_choice` has kept in the forward's run.
        remaining: in the recomputation, an iterator over ``choices``.
    """

    repeats: bool = False
    choices: list[Tensor] = field(default_factory=list)
    remaining: Iterator[Tensor] = field(default_factory=lambda: iter(()))


_RUN: ContextVar[BlockRun | None] = ContextVar("run", default=None)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module runs code other than its class's forward: hooks, or a replaced forward.

    Hooks whose attribute ``only_checks`` is True are ignored, because they only raise errors.
    """
    return "forward" in module.__dict__ or has_hooks(module)


def has_hooks(module: nn.Module, ignored: tuple[str, ...] = ("only_checks",)) -> bool:
    """Whether a module has hooks, not counting hooks that have one of the attributes named in ``ignored``."""
    registries = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    # Nothing is created for empty registries, because every fused layer calls this function in every forward.
    for registry in registries:
        if registry and not all(any(getattr(hook, name, False) for name in ignored) for hook in registry.values()):
            return True
    return False


def run_preparing_hooks(module: nn.Module) -> None:
    """Run the hooks of a module that have the attribute ``only_prepares``.

    Such a hook updates the model before a forward if the tree of modules has changed since the last call. Otherwise,
    the hook does nothing, so a captured graph need not repeat it.
    """
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "only_prepares", False):
            hook(module, ())


def _current_run() -> BlockRun | None:
    """The run of a block in which the calling code runs; None outside of `run_again`."""
    return None if torch.compiler.is_compiling() else _RUN.get()


def repeats() -> bool | None:
    """Whether the current run of a block is the backward's recomputation; None outside of `run_again`.

    The recomputation of a block stops as soon as it has computed the last tensor that the backward needs.
    """
    run = _current_run()
    return None if run is None else run.repeats


def keep_choice(choice: Tensor) -> None:
    """In the first run of a block in `run_again`, keep a choice for `earlier_choice`. Otherwise, do nothing.

    The choice consists of integers below 2¹⁵, which are kept in 16 bits.
    """
    run = _current_run()
    if run is not None and not run.repeats:
        run.choices.append(choice.to(torch.int16))


def earlier_choice() -> Tensor | None:
    """In a recomputation of a block, return the next choice of the first run; None outside of recomputations.

    A layer that chooses, such as a router, must make the same choices again. A second forward may choose differently,
    for example because an autotuned kernel sums in another order.
    """
    run = _current_run()
    return next(run.remaining) if run is not None and run.repeats else None


def run_for_backward(op: Callable[..., Any]) -> Any:
    """Run a fused op in the recomputation of a block, so that the op saves its tensors for the backward.

    Args:
        op: returns y, or a tuple that begins with y, and leaves y uninitialized if it gets ``need_y=False``. Both calls
            must give the same results.
    """
    # If the backward needs no tensor of a later layer, the recomputation stops inside this call. Otherwise, the later
    # layers need y.
    outputs = op(need_y=False)
    with torch.no_grad():
        y, again = (out if isinstance(out, Tensor) else out[0] for out in (outputs, op()))
        y.data.copy_(again)  # autograd forbids in-place writes to one of several results
    return outputs


def recomputes(part: Any) -> bool:
    """Whether the backward must recompute this part of a block separately.

    The result is False if the whole block is recomputed.
    """
    return bool(part.recompute) and torch.is_grad_enabled() and repeats() is None


def draws(part: nn.Module, dropout: float) -> bool:
    """Whether a part of a block may draw random numbers.

    Dropout, hooks and replaced forwards may draw random numbers. In training, layers that are defined neither in this
    package nor in PyTorch may also draw random numbers.
    """
    return (part.training and dropout > 0) or any(
        is_hooked(module)
        or (isinstance(module, nn.Dropout) and module.training and module.p > 0)
        or (module.training and not type(module).__module__.startswith(("liger_models.", "torch.")))
        for module in part.modules()
    )


def is_compiled(block: nn.Module) -> bool:
    """Whether the block is compiled."""
    # ``block.forward`` would create a bound method, which takes longer. Generation checks every module.
    forward = vars(block).get("forward", type(block).forward)
    return block._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def can_run_again(block: nn.Module) -> bool:
    """Whether `run_again` can run a block that `is_replayable`, in its present state: not if the block is compiled.

    Nor if the block has routed experts, and a module in it is compiled, has a replaced forward, or is wrapped in a
    checkpoint. Such code does not keep choices, and may run a second time outside of `run_again`.
    """
    if is_compiled(block):
        return False
    own = any(
        is_compiled(module) or "forward" in vars(module) or hasattr(module, "checkpoint_fn")
        for module in block.modules()
    )
    return not (own and routed_layers(block))


def run_twice(function: Callable[..., Any], *args: Any, modules: tuple[Any, ...] = (), **options: Any) -> Any:
    """Call ``function(*args)`` and save only the tensors in ``args``. The backward calls the function again.

    Args:
        function: function that computes the same results when it is called again.
        args: the function's arguments.
        modules: further modules whose parameters the function reads. Modules in ``args`` need not be listed. If the
            function is a bound method, its module need not be listed either.
        options: further options of `torch.utils.checkpoint.checkpoint`.

    Raises:
        RuntimeError: (raised in the backward) a parameter was changed in place after the first call, so the gradient
            would not match the loss.
    """
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, **options)
    # PyTorch detects in-place changes of the tensors in `args`, because it saves these tensors. It does not detect
    # changes of parameters that the function reads.
    owners = [x for x in (getattr(function, "__self__", None), *modules, *args) if isinstance(x, nn.Module)]
    read = [
        (name, parameter, parameter._version)
        for owner in owners
        for name, parameter in owner.named_parameters()
        if not parameter.is_inference()
    ]

    # Before the backward begins, the caller may have left the context manager `batch_invariant`, and PEFT may have
    # removed hooks that it sets for one call. The second call of the function restores both.
    invariant = is_batch_invariant()
    hooked = [module for owner in owners for module in owner.modules() if module._forward_pre_hooks]
    hooks = [(module._forward_pre_hooks.copy(), module._forward_pre_hooks_with_kwargs.copy()) for module in hooked]
    is_second = False

    def call(*args: Any) -> Any:
        nonlocal is_second
        for name, parameter, version in read:
            if parameter._version != version:
                raise RuntimeError(
                    f"backward: {name} {list(parameter.shape)} must not be changed in place between forward and "
                    "backward, because the backward reads it again (set_checkpointing), got version "
                    f"{parameter._version} instead of {version}. Call backward before optimizer.step() and other "
                    "changes of the weights."
                )
        replaced = _pre_hooks(hooked, hooks) if is_second else nullcontext()
        is_second = True
        with batch_invariant(invariant), replaced:
            return function(*args)

    return checkpoint(call, *args, use_reentrant=False, **options)


@contextmanager
def _pre_hooks(modules: list[nn.Module], hooks: list[tuple[Any, Any]]) -> Iterator[None]:
    """Context manager that temporarily replaces the forward pre-hooks of modules."""
    now = [(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs) for module in modules]
    try:
        for module, pair in zip(modules, hooks, strict=True):
            module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs = pair
        yield
    finally:
        for module, pair in zip(modules, now, strict=True):
            module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs = pair


def run_again(block: nn.Module, x: Tensor | None, residual: Tensor, layout: Any) -> Any:
    """Run ``block(x, residual, layout)`` and save only ``residual + x`` [B, T, C] and what `keep_choice` keeps.

    The backward recomputes the rest.
    """
    state = BlockRun()

    def run(total: Tensor, layout: Any) -> Any:
        state.remaining = iter(state.choices)
        token = _RUN.set(state)
        try:
            return block(None, total, layout)
        finally:
            _RUN.reset(token)
            state.repeats = True

    total = residual if x is None else (residual + x).to(residual.dtype)
    return run_twice(run, total, layout, modules=(block,))
