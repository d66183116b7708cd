"""Functions that add low-rank adapters to a model, switch them off, and merge them into the weights."""

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from liger_models.adapters.lora_config import LoRAConfig
from liger_models.adapters.lora_experts import ExpertAdapter, LoRAExperts
from liger_models.adapters.lora_layers import (
    ADAPTED,
    LoRALinear,
    adapted_layers,
    adapter_config,
    adapters_of,
    short_name,
)
from liger_models.adapters.patterns import Pattern
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import format_of
from liger_models.convert.sharded import moves_rows
from liger_models.convert.weight_map import Expression, Name
from liger_models.layers.frozen import frozen_parts
from liger_models.layers.layer import layers_of, named_layers
from liger_models.layers.linear import is_sharded
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.moe import MATRICES, LigerMoE

Model = TypeVar("Model", bound=CausalLM)


def apply_lora(model: Model, config: LoRAConfig | None = None) -> Model:
    """Freeze a model and add trainable adapters in place. B starts at 0, so the model's output does not change.

    Call this function before `apply_fsdp` and before compiling the model. Adapters are float32 (float64 in a float64
    model), and the forward casts them to the dtype of the activations. Routers and the embedding get no adapters.
    Routed experts get adapters only if ``config`` includes them explicitly, because adapters for all experts have many
    parameters.

    Args:
        model: the model. If all ranks call ``torch.manual_seed`` with the same seed, they get the same adapters. The
            model may be on the meta device, as in ``from_pretrained(folder, shard=lambda model:
            apply_fsdp(apply_lora(model, config)))``. Each rank then reads only its own shards, and the adapters are
            initialized after that.
        config: settings of the adapters, by default rank 8 for all linear layers of the blocks.

    Returns:
        ``model``. `adapter_config` returns the settings of its adapters.

    Raises:
        ValueError: a name in ``config`` matches neither a linear layer nor experts, ``config`` combines DoRA with
            experts, or the model already has adapters or is sharded.
    """
    config = config or LoRAConfig()
    name = type(model).__name__
    if adapter_config(model) is not None:
        raise ValueError(f"apply_lora: {name} must not have adapters yet, got one that has. Merge them first.")
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            f"apply_lora: {name} must not be sharded yet, got sharded parameters. Add the adapters, then shard."
        )
    unsupported = unsupported_linears(model)
    if unsupported:
        raise ValueError(
            f"apply_lora: linear layers must be nn.Linear, got {', '.join(unsupported)}. Add the adapters before you "
            "replace layers."
        )
    if not isinstance(model.lm_head, LigerLMHead):
        raise ValueError(
            f"apply_lora: {name} must have packed projections and its own head, got {type(model.lm_head).__name__}. "
            "Call pack() on what unpack_projections returned."
        )

    # Find the matrices that get adapters.
    linears, experts = adaptable_layers(model), adaptable_experts(model)
    chosen = _choose([name for _, expression in linears.values() for name in expression.names()], model, config)
    if config.use_dora and any(name in chosen for weights in experts.values() for name, _ in weights.values()):
        raise ValueError(
            "apply_lora: routed experts must have adapters without DoRA, got use_dora=True. Leave it or the experts "
            "out."
        )

    # Freeze the model before the trainable parameters are added.
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    for path, (linear, expression) in linears.items():
        names = [name for name in expression.names() if name in chosen]
        if names:
            model.set_submodule(path, ADAPTED[type(linear)].around(linear, expression, names, config))

    # A layer with experts is not replaced. It gets the adapters as a submodule.
    for path, weights in experts.items():
        moe: Any = model.get_submodule(path)
        exchanged = format_of(type(model)).peft_exchanges
        adapters = {
            weight: ExpertAdapter(moe.matrices(weight), name, expression, config, exchanged=exchanged)
            for weight, (name, expression) in weights.items()
            if name in chosen
        }
        if adapters:
            moe.lora = LoRAExperts(adapters, moe.active_share, config)
    return model


def remove_adapters(model: CausalLM) -> None:
    """Undo `apply_lora` in place. The parameters stay frozen."""
    for path, layer in adapted_layers(model).items():
        if isinstance(layer, LoRALinear):
            model.set_submodule(path, layer.without_adapters())
        else:
            moe: Any = model.get_submodule(path.rpartition(".")[0])
            moe.lora = None


def language_targets(model: CausalLM, targets: Sequence[str] | str = "all-linear") -> list[str]:
    """Return the names of the layers that ``targets`` selects in the language model of a vision-language model.

    The layers of the vision tower, and of its projection to image tokens, are left out.

    Args:
        model: a vision-language model without adapters.
        targets: names as in ``LoRAConfig.target_modules``.

    Returns:
        Full names for ``LoRAConfig(target_modules=...)``. For linear layers, these are the names in the Hugging Face
        checkpoint. For routed experts, they are the names of the parameters in transformers.

    Raises:
        ValueError: a name matches no linear layer.
    """
    paths = {name: path for path, (_, expression) in adaptable_layers(model).items() for name in expression.names()}
    chosen = _choose(list(paths), model, LoRAConfig(target_modules=targets))
    return sorted(name.removesuffix(".weight") for name in chosen if not paths.get(name, "").startswith("visual."))


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager within which a model runs without adapters, for example as the reference model of a loss.

    If the forward runs within the context, its backward must also run within the context.

    Raises:
        ValueError: the model has no adapters.
    """
    _check_adapted("without_adapters", model)
    # Contexts may be nested, so restore the state from before this context.
    adapters = [adapters_of(layer) for layer in adapted_layers(model).values()]
    before = [adapter.active for adapter in adapters]
    for adapter in adapters:
        adapter.active = False
    try:
        yield
    finally:
        for adapter, active in zip(adapters, before, strict=True):
            adapter.active = active


def merge_lora(model: Model, *, reversible: bool = False) -> Model:
    """Add the adapters to the weights in place. The result is a plain model that is as fast as before `apply_lora`.

    The merged model can be saved as a checkpoint. Its parameters stay frozen. If a tied head has an adapter, merging
    unties the head from the embedding.

    Args:
        model: a model with adapters that is not sharded.
        reversible: whether to keep the original weights in host memory for `unmerge_lora`.

    Raises:
        ValueError: the model has no adapters, or is sharded.
    """
    _check_adapted("merge_lora", model)
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise ValueError(
            "merge_lora: the model must not be sharded. Save the adapters, and merge them in a process without "
            "sharding."
        )
    config = model.config
    originals: dict[str, Original] = {}

    # The experts' matrices become plain parameters, even if they were quantized. The only exceptions are matrices
    # without adapters that are stored in the checkpoint's own format, which do not change.
    for path, moe in _experts(model).items():
        parts = frozen_parts(moe)
        kept = {name: part for name, part in parts.items() if part.format.is_kept and name not in moe.adapted}
        adapters, stored, names = moe.lora, moe.stored, {*moe.adapted, *(parts.keys() - kept)}
        weights = {name: getattr(moe, name).detach() for name in names}
        for name in names:
            merged = moe.adapted_weight(name, merge=name in moe.adapted)
            setattr(moe, name, nn.Parameter(merged, requires_grad=False))
        moe.lora, moe.stored = None, nn.ModuleDict(kept) if kept else None
        if reversible and names:
            originals[path] = Original(
                adapters, {name: weight.cpu() for name, weight in weights.items()}, stored and stored.cpu()
            )

    # Merge linear layers. A tied head that had an adapter now differs from the embedding.
    for path, layer in adapted_layers(model).items():
        assert isinstance(layer, LoRALinear)
        if path == "lm_head" and config.tie_word_embeddings:
            model.config = dataclasses.replace(config, tie_word_embeddings=False)
        model.set_submodule(path, layer.without_adapters(layer.merged()))
        if reversible:
            originals[path] = Original(layer, {"weight": layer.weight.detach().cpu()})
            layer.register_parameter("weight", None)  # frees the memory

    vars(model)["_unmerged"] = config, originals  # setattr would register the layers as submodules
    return model


def unmerge_lora(model: Model) -> Model:
    """Undo ``merge_lora(model, reversible=True)``.

    Adapters and weights are then bitwise identical to their state before the merge.

    Raises:
        ValueError: the model was not merged with ``reversible=True``.
    """
    config, originals = vars(model).pop("_unmerged", (None, {}))
    if not originals:
        raise ValueError("unmerge_lora: the model must come from merge_lora(model, reversible=True), got another.")
    model.config = config

    # Restore weights and adapters on the merged layer's current device, because the layer may have been moved.
    for path, (layer, weights, stored) in originals.items():
        merged: Any = model.get_submodule(path)
        device = next(merged.parameters()).device
        restored = {name: nn.Parameter(weight.to(device), requires_grad=False) for name, weight in weights.items()}
        if isinstance(merged, LigerMoE):
            for name, weight in restored.items():
                setattr(merged, name, weight)
            merged.lora = layer and layer.to(device)
            merged.stored = stored and stored.to(device)
        else:
            assert isinstance(layer, LoRALinear)
            layer.to(device)
            layer.weight = restored["weight"]
            model.set_submodule(path, layer)
    model.tie_weights()
    return model


class Original(NamedTuple):
    """The state that `unmerge_lora` restores.

    Attributes:
        layer: a linear layer with adapters, the adapters of experts, or None for experts without adapters.
        weights: the frozen weights, on the CPU.
        stored: the submodule that holds all tensors of quantized experts other than the codes; None for dense experts.
    """

    layer: LoRALinear | LoRAExperts | None
    weights: dict[str, Tensor]
    stored: nn.Module | None = None


def unsupported_linears(model: nn.Module) -> list[str]:
    """Return the class names of linear layers that can't have adapters, because a tool has wrapped or replaced them."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return sorted({type(linear).__name__ for linear in linears if linear._parameters and type(linear) not in ADAPTED})


def adaptable_layers(model: CausalLM) -> dict[str, tuple[nn.Linear, Expression]]:
    """Map the path of each linear layer that can have adapters to (layer, expression).

    The `Expression` computes the layer's weight from checkpoint tensors.
    """
    entries = _entries(model)
    routers = [layer.router for layer in layers_of(model) if layer.router is not None]
    of_routers = {id(module) for router in routers for module in router.modules()}
    layers = {}
    # A weight must consist of whole rows of the checkpoint's matrices, so that B can have the same rows.
    for path, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and type(linear) in ADAPTED and id(linear) not in of_routers:
            expression = entries.get(f"{path}.weight", Name(f"{path}.weight"))  # a tied head has no entry
            if moves_rows(expression, linear.weight):
                layers[path] = linear, expression
    return layers


def adaptable_experts(model: CausalLM) -> dict[str, dict[str, tuple[str, Expression]]]:
    """For each layer with routed experts, find the parameters that can have adapters.

    Returns:
        A mapping from the path of each layer to a dict. This dict maps the name of each parameter in this package to a
        pair: the parameter's name in transformers, and the `Expression` that computes the parameter from checkpoint
        tensors.
    """
    entries = format_of(type(model)).expert_map(model.config).entries
    experts: dict[str, dict[str, tuple[str, Expression]]] = {}
    for path in _experts(model):
        expressions = {name: entries.get(f"{path}.{name}") for name in MATRICES}
        # In a custom architecture, each expert may have its own tensor. PEFT has no names for adapters of such experts.
        experts[path] = {
            name: (expression.names()[0], expression)
            for name, expression in expressions.items()
            if expression is not None and len(expression.names()) == 1
        }
    return experts


def _experts(model: CausalLM) -> dict[str, LigerMoE]:
    """Map the path of each layer with routed experts to the layer."""
    return {path: layer for path, layer in named_layers(model) if isinstance(layer, LigerMoE)}


def matches(module: str, target: str) -> bool:
    """Whether ``target`` is the checkpoint name ``module``, or consists of the last parts of this name."""
    return module == target or module.endswith("." + target)


def _check_adapted(function: str, model: nn.Module) -> None:
    if adapter_config(model) is None:
        raise ValueError(f"{function}: {type(model).__name__} must have adapters, got none. Call apply_lora first.")


def _entries(model: CausalLM) -> dict[str, Expression]:
    """Map each parameter's name to the `Expression` that computes the parameter from tensors with PEFT's names."""
    return format_of(type(model)).module_map(model.config).entries


def expert_names(model: CausalLM) -> dict[str, str]:
    """Map the name of each matrix of an expert to the name of the transformers parameter that holds this matrix.

    The keys are the names in all checkpoint layouts, without the index of the expert. For example,
    ``experts.gate_proj``, ``experts.up_proj`` and ``experts.gate_up_proj`` belong to the same parameter.
    """
    maps = format_of(type(model)).weight_maps(model.config)
    names: dict[str, str] = {}
    for path, weights in adaptable_experts(model).items():
        for parameter, (name, _) in weights.items():
            for weight_map in maps:
                for tensor in weight_map.entries[f"{path}.{parameter}"].names():
                    alias = re.sub(r"\.experts\.\d+\.", ".experts.", tensor)
                    names[alias.removesuffix(".weight")] = name
            names[name] = name
    return names


def _choose(names: list[str], model: CausalLM, config: LoRAConfig) -> set[str]:
    """Return the names of the matrices that the targets of ``config`` select.

    Matrices of linear layers are given by their checkpoint names, and matrices of experts by the names of their
    parameters in transformers.

    Args:
        names: the names, in the checkpoint, of the weights of all linear layers.
        model: the model.
        config: settings of the adapters.
    """
    modules = {name.removesuffix(".weight"): name for name in names}
    experts = expert_names(model)
    targets = config.target_modules

    # Find the experts' parameters that `target_parameters` selects.
    chosen: set[str] = set()
    for target in config.target_parameters:
        parameters = {name for name in experts.values() if matches(name, target)}
        if not parameters:
            raise ValueError(
                f"apply_lora: target_parameters must name parameters of routed experts ({_some_experts(experts)}), got "
                f"{target!r}. Name linear layers in target_modules."
            )
        chosen |= parameters

    # "all-linear" selects all linear layers of the blocks.
    if targets == "all-linear":
        return chosen | {name for module, name in modules.items() if module != "lm_head"}

    if len(targets) == 0 and not chosen:
        endings = ", ".join(sorted(set(map(short_name, names))))
        raise ValueError(f"apply_lora: target_modules must name linear layers ({endings}), got none.")

    # A string is a pattern for full names. A list has names or last parts of names, which may also refer to experts.
    for target in [targets] if isinstance(targets, str) else targets:
        if isinstance(targets, str):
            matched = _matched(target, modules)
        else:
            matched = {name for module, name in modules.items() if matches(module, target)}
            if "experts." in target:
                matched |= {name for alias, name in experts.items() if matches(alias, target)}
        if not matched:
            endings = ", ".join(sorted(set(map(short_name, names))))
            raise ValueError(
                f"apply_lora: target_modules must name linear layers of {type(model).__name__} ({endings}), "
                f"got {target!r}.{_hint(target, names, experts, model, isinstance(targets, str))}"
            )
        chosen |= matched
    return chosen


def _matched(target: str, modules: Mapping[str, str]) -> set[str]:
    """Return the values in ``modules`` whose keys match the regular expression ``target`` in full."""
    try:
        pattern = Pattern(target)
        return {name for module, name in modules.items() if pattern.fullmatch(module)}
    except ValueError as error:
        raise ValueError(f"apply_lora: target_modules {error}") from error


def _hint(target: str, names: list[str], experts: dict[str, str], model: CausalLM, is_pattern: bool) -> str:
    """Return advice for the error message about a target that matches nothing."""
    # The target may refer to experts or to modules that can't have adapters, may be a pattern, or may be misspelled.
    endings = sorted(set(map(short_name, names)))
    short_names = {short_name(name) for expression in _entries(model).values() for name in expression.names()}
    last = target.rpartition(".")[2]
    if last in map(short_name, experts):
        return f" Routed experts are named {_some_experts(experts)}, also in target_parameters."
    if last in short_names - set(endings):
        return " Routers, norms and the embedding have no adapters."
    if is_pattern:
        return f" A string is a regular expression for whole names. To give endings, pass a list: [{target!r}]."
    similar = difflib.get_close_matches(target, endings, 1)
    return f" Did you mean {similar[0]}?" if similar else ""


def _some_experts(experts: Mapping[str, str]) -> str:
    """Return, for an error message, the names of the experts' parameters without the paths of their layers."""
    return ", ".join(sorted({".".join(name.split(".")[-2:]) for name in experts.values()})) or "none here"
