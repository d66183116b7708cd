"""Functions that free FSDP's gathered parameters, end an interrupted pass, or gather all parameters for sampling."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from liger_models.distributed.groups import ParallelGroups
from liger_models.layers.decoder import Decoder
from liger_models.layers.layer import layers_of
from liger_models.layers.recompute import is_compiled

Model = TypeVar("Model", bound=Decoder)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP shards. The parameters of each module form one group."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, but already imported if a model is sharded
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of a model.

    After a forward without a backward, FSDP2 keeps the parameters of some groups gathered, and ``model.parameters()``
    returns the gathered parameters of these groups until this function is called.
    """
    for module in fsdp_modules(model):
        module.reshard()


def end_pass(model: nn.Module) -> None:
    """Clean up after an exception has interrupted a forward or backward.

    Without this call, FSDP2 would treat the next forward as a part of the interrupted pass. Gradients that FSDP2 has
    not reduced yet are dropped. The process group must have only one rank.
    """
    states: list[Any] = [module._get_fsdp_state() for module in fsdp_modules(model)]
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        state._modules_to_run_forward.clear()

    # Do what FSDP2 does at the end of a backward. Without gradients, there is nothing to reduce.
    for state in states:
        if state._is_root:
            state._root_post_backward_final_callback()


@contextmanager
def unsharded(model: Model) -> Iterator[Model]:
    """Context manager that yields a copy of ``model`` with all parameters gathered. The copy needs no communication.

    The copy is meant for sampling between two optimizer steps. Ranks may run different numbers of forwards, decoding
    uses CUDA graphs as on one GPU, and `rollout` accepts the model. Every rank needs memory for all parameters in the
    ``param_dtype`` of `apply_fsdp`. All ranks must enter and leave the context together.

    Args:
        model: the model, sharded only by `apply_fsdp`. If the model is unsharded, the context manager yields
            ``model`` itself.

    Returns:
        A context manager that yields a model. Except for its parameters, the yielded model shares all attributes with
        ``model``. It is not compiled and has no hooks. Do not train it, and do not use it after the context, because
        leaving the context frees its parameters.

    Raises:
        ValueError: the model is also sharded by `apply_tp`, `apply_cp` or `apply_ep`.
    """
    groups = fsdp_modules(model)
    if not groups:
        yield model
        return
    used = [model.groups, *(layer.groups for layer in layers_of(model))]
    if not all(each.tensor is each.context is each.expert is None for each in used):
        raise ValueError(
            "unsharded: the model must be sharded by apply_fsdp alone, got one that apply_tp, apply_cp or apply_ep has "
            "sharded, too. Generate with the model itself."
        )
    from liger_models.parallel.float8_gather import Float8Gather  # slow to import

    # Compute the maxima of float8 weights, because these weights are rounded when they are gathered.
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Float8Gather):
            hook.refresh()
    for module in groups:
        module.unshard()
    try:
        found = _without_hooks(model, {})
        found.groups = ParallelGroups()
        yield found
    finally:
        for module in groups:
            module.reshard()


def _without_hooks(module: Any, made: dict[nn.Module, Any]) -> Any:
    """Copy a module and its submodules, with the same parameters and the original classes, but without hooks.

    Args:
        module: the module.
        made: maps modules that were copied already to their copies, so that a shared module is copied only once.
    """
    from torch.distributed.fsdp import FSDPModule

    if module not in made:
        # FSDP2 derives a class from FSDPModule and the module's class. Take the module's class, which comes right after
        # FSDPModule.
        kinds = type(module).__mro__
        kind: Any = kinds[kinds.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else kinds[0]
        made[module] = copy = kind.__new__(kind)
        state = {name: type(value)() if "_hooks" in name else value for name, value in vars(module).items()}
        if is_compiled(module):
            state["_compiled_call_impl"] = None
            state.pop("forward", None)
        children = {name: child and _without_hooks(child, made) for name, child in module._modules.items()}
        copy.__dict__ = {**state, "_parameters": dict(module._parameters), "_modules": children}
    return made[module]
