"""Add low-rank adapters to a model, switch them off, and merge them into its weights."""

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from liger_models.adapters.lora_layers import (
    ADAPTED,
    ExpertAdapter,
    LoRAConfig,
    LoRAExperts,
    LoRALinear,
    adapted_layers,
    adapter_config,
    short_name,
)
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import format_of
from liger_models.convert.sharded import moves_rows
from liger_models.convert.weight_map import Expression, Name
from liger_models.layers.layer import layers_of, named_layers
from liger_models.layers.linear import is_sharded
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.moe import MATRICES, LigerMoE

Model = TypeVar("Model", bound=CausalLM)


def apply_lora(model: Model, config: LoRAConfig | None = None) -> Model:
    """Freeze a model and add trainable adapters, in place. B starts at 0, so the model's output does not change.

    Call it before `apply_fsdp` and before compiling. Adapters are float32 (float64 in a float64 model), and are cast to
    the dtype of the activations when they are used. Routers and the embedding have no adapters; routed experts have
    them if ``config`` names them, because they multiply the trained parameters by the number of experts.

    Args:
        model: on every rank the same ``torch.manual_seed`` gives the same adapters. A model on the meta device works
            inside ``from_pretrained(folder, shard=lambda model: apply_fsdp(apply_lora(model, config)))``, which then
            reads only each rank's shards and draws the adapters.
        config: default: rank 8 for all linear layers of the blocks.

    Returns:
        ``model``; `adapter_config` returns its config.

    Raises:
        ValueError: a name in ``config`` matches no linear layer or no experts, DoRA is asked for on experts, or the
            model already has adapters or is sharded.
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
    layers, experts = adaptable_layers(model), adaptable_experts(model)
    chosen = _choose([name for _, expression in layers.values() for name in expression.names()], model, config)
    if config.use_dora and any(name in chosen for parts in experts.values() for name, _ in parts.values()):
        raise ValueError(
            "apply_lora: routed experts must have adapters without DoRA, got use_dora=True. Leave it or the experts "
            "out."
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for path, (linear, expression) in layers.items():
        names = [name for name in expression.names() if name in chosen]
        if names:
            model.set_submodule(path, ADAPTED[type(linear)].around(linear, expression, names, config))
    for path, parts in experts.items():
        moe: Any = model.get_submodule(path)
        adapters = {
            parameter: ExpertAdapter(getattr(moe, parameter), name, expression, config)
            for parameter, (name, expression) in parts.items()
            if name in chosen
        }
        if adapters:
            moe.lora = LoRAExperts(adapters, moe.active_share, config)
    return model


def language_targets(model: CausalLM, targets: Sequence[str] | str = "all-linear") -> list[str]:
    """The layers that ``targets`` means, without those of the vision tower and its projection to image tokens.

    Args:
        model: with images; without adapters.
        targets: as ``LoRAConfig.target_modules``.

    Returns:
        Whole names, in the Hugging Face checkpoint or of transformers' parameters of routed experts, for
        ``LoRAConfig(target_modules=...)``.

    Raises:
        ValueError: a name matches no linear layer.
    """
    paths = {name: path for path, (_, expression) in adaptable_layers(model).items() for name in expression.names()}
    chosen = _choose(list(paths), model, LoRAConfig(target_modules=targets))
    return sorted(name.removesuffix(".weight") for name in chosen if not paths.get(name, "").startswith("visual."))


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside it, a model computes as if it had no adapters: the reference of a preference loss needs no second model.

    What is computed inside and needs a backward must run that backward inside too. Usually there is none
    (``torch.no_grad()``).

    Raises:
        ValueError: the model has no adapters.
    """
    layers = adapted_layers(model).values()
    _check_adapted("without_adapters", model)
    before = [layer.active for layer in layers]
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer.active = active


def merge_lora(model: Model, *, reversible: bool = False) -> Model:
    """Add the adapters to the weights, in place. The model is a plain one again, as fast, and can be saved as one.

    Its parameters stay frozen. If the head is tied and has an adapter, merging unties it.

    Args:
        model: with adapters, not sharded.
        reversible: keep the original weights in host memory for `unmerge_lora`.

    Raises:
        ValueError: the model has no adapters, or is sharded.
    """
    _check_adapted("merge_lora", model)
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise ValueError(
            "merge_lora: the model must not be sharded. Save the adapters, and merge them in a process without "
            "sharding."
        )
    kept: dict[str, tuple[LoRALinear | LoRAExperts | None, dict[str, Tensor]]] = {}
    config = model.config
    for path, moe in _experts(model).items():
        adapters, names = moe.lora, {*moe.adapted, *moe.quantized_weights}
        weights = {name: getattr(moe, name).detach() for name in names}
        for name in names:
            merged = moe.adapted_weight(name, merge=name in moe.adapted)
            setattr(moe, name, nn.Parameter(merged, requires_grad=False))
        moe.lora = None
        if reversible and names:
            kept[path] = adapters, {name: weight.cpu() for name, weight in weights.items()}
    for path, layer in adapted_layers(model).items():
        assert isinstance(layer, LoRALinear)
        merged = layer.merged()
        plain = layer.plain
        plain.weight = nn.Parameter(merged, requires_grad=False)
        plain.bias = layer.bias
        if path == "lm_head" and config.tie_word_embeddings:
            model.config = dataclasses.replace(config, tie_word_embeddings=False)
        model.set_submodule(path, plain)
        if reversible:
            kept[path] = layer, {"weight": layer.weight.detach().cpu()}
            layer._parameters["weight"] = None
    model.__dict__["_unmerged"] = (config, kept)
    return model


def unmerge_lora(model: Model) -> Model:
    """Undo ``merge_lora(model, reversible=True)``: the adapters are separate again, the weights as before, bit for bit.

    Raises:
        ValueError: the model was not merged with ``reversible=True``.
    """
    config, kept = model.__dict__.pop("_unmerged", (None, {}))
    if not kept:
        raise ValueError("unmerge_lora: the model must come from merge_lora(model, reversible=True), got another.")
    model.config = config
    for path, (layer, weights) in kept.items():
        plain = model.get_submodule(path)
        if isinstance(plain, LigerMoE):
            device = plain.down_weight.device
            for name, weight in weights.items():
                setattr(plain, name, nn.Parameter(weight.to(device), requires_grad=False))
            plain.lora = layer and layer.to(device)
            continue
        assert isinstance(layer, LoRALinear)
        assert isinstance(plain, nn.Linear)
        layer.to(plain.weight.device)
        layer.weight = nn.Parameter(weights["weight"].to(plain.weight.device), requires_grad=False)
        plain._parameters = dict.fromkeys(plain._parameters)
        model.set_submodule(path, layer)
    model.tie_weights()
    return model


def unsupported_linears(model: nn.Module) -> list[str]:
    """The classes of linear layers that can't have adapters, because something has wrapped or replaced them."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return sorted({type(linear).__name__ for linear in linears if linear._parameters and type(linear) not in ADAPTED})


def adaptable_layers(model: CausalLM) -> dict[str, tuple[nn.Linear, Expression]]:
    """The linear layers that can have adapters, by their path, each with its weight's entry in the weight map."""
    entries = _entries(model)
    routers = {id(each) for layer in layers_of(model) if layer.router is not None for each in layer.router.modules()}
    found = {
        path: (layer, entries.get(f"{path}.weight", Name(f"{path}.weight")))  # a tied head has no entry
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and type(layer) in ADAPTED and id(layer) not in routers
    }
    return {path: pair for path, pair in found.items() if moves_rows(pair[1], pair[0].weight)}


def adaptable_experts(model: CausalLM) -> dict[str, dict[str, tuple[str, Expression]]]:
    """The layers with routed experts, by their path: name of each parameter with matrices of the experts -> the name of
    that parameter in transformers, and its entry in the weight map."""
    entries = format_of(type(model)).expert_map(model.config).entries
    found: dict[str, dict[str, tuple[str, Expression]]] = {}
    for path in _experts(model):
        both = {name: entries.get(f"{path}.{name}") for name in MATRICES}
        # A map of a user's own may know the experts only one by one; PEFT has no names for their adapters.
        found[path] = {name: (each.names()[0], each) for name, each in both.items() if each and len(each.names()) == 1}
    return found


def _experts(model: CausalLM) -> dict[str, LigerMoE]:
    """The layers with routed experts, by their path."""
    return {path: layer for path, layer in named_layers(model) if isinstance(layer, LigerMoE)}


def matches(module: str, target: str) -> bool:
    """Whether ``target`` is a module's name in the checkpoint, or ends it."""
    return module == target or module.endswith("." + target)


def _check_adapted(function: str, model: nn.Module) -> None:
    if adapter_config(model) is None:
        raise ValueError(f"{function}: {type(model).__name__} must have adapters, got none. Call apply_lora first.")


def _entries(model: CausalLM) -> dict[str, Expression]:
    """The entries of the weight map whose names PEFT's files use."""
    return format_of(type(model)).module_map(model.config).entries


def expert_names(model: CausalLM) -> dict[str, str]:
    """What people call the experts' matrices -> the name of the parameter in transformers that holds them.

    These are the names in all layouts of a checkpoint, without the number of the expert: ``experts.gate_proj``,
    ``experts.up_proj`` and ``experts.gate_up_proj`` are the same parameter.
    """
    maps = format_of(type(model)).weight_maps(model.config)
    found = {}
    for path, parts in adaptable_experts(model).items():
        for parameter, (name, _) in parts.items():
            for other in (each.entries[f"{path}.{parameter}"] for each in maps):
                called = (re.sub(r"\.experts\.\d+\.", ".experts.", each) for each in other.names())
                found.update(dict.fromkeys((each.removesuffix(".weight") for each in called), name))
            found[name] = name
    return found


def _choose(names: list[str], model: CausalLM, config: LoRAConfig) -> set[str]:
    """Those of the checkpoint's names, and of the experts' in transformers, that ``config`` means."""
    modules, experts = {name.removesuffix(".weight"): name for name in names}, expert_names(model)
    targets = config.target_modules
    chosen: set[str] = set()
    for target in config.target_parameters:
        found = {name for name in experts.values() if matches(name, target)}
        if not found:
            raise ValueError(
                f"apply_lora: target_parameters must name parameters of routed experts ({_some_experts(experts)}), got "
                f"{target!r}. Name linear layers in target_modules."
            )
        chosen |= found
    if targets == "all-linear":
        return chosen | {name for module, name in modules.items() if module != "lm_head"}
    short = sorted(set(map(short_name, names)))
    entries = _entries(model)
    others = {short_name(name) for expression in entries.values() for name in expression.names()} - set(short)
    if len(targets) == 0 and not chosen:
        raise ValueError(f"apply_lora: target_modules must name linear layers ({', '.join(short)}), got none.")
    for target in [targets] if isinstance(targets, str) else targets:
        if isinstance(targets, str):
            try:
                found = {name for module, name in modules.items() if re.fullmatch(target, module)}
            except re.error as error:
                message = (
                    f"apply_lora: target_modules must be a regular expression, got {target!r}: {error}. Correct it."
                )
                raise ValueError(message) from error
        else:
            found = {name for module, name in modules.items() if matches(module, target)}
            if "experts." in target:
                found |= {name for called, name in experts.items() if matches(called, target)}
        near = difflib.get_close_matches(target, short, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        if isinstance(targets, str):
            hint = f" A string is a regular expression for whole names. To give endings, pass a list: [{target!r}]."
        last = target.rpartition(".")[2]
        if last in others:
            hint = " Routers, norms and the embedding have no adapters."
        if last in map(short_name, experts):
            hint = f" Routed experts are named {_some_experts(experts)}, also in target_parameters."
        if not found:
            raise ValueError(
                f"apply_lora: target_modules must name linear layers of {type(model).__name__} ({', '.join(short)}), "
                f"got {target!r}.{hint}"
            )
        chosen |= found
    return chosen


def _some_experts(experts: Mapping[str, str]) -> str:
    """The names of the experts' parameters without those of their layers, for errors."""
    return ", ".join(sorted({".".join(name.split(".")[-2:]) for name in experts.values()})) or "none here"
