"""Save and load adapters in PEFT's files."""

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor, nn

from liger_models.adapters.lora import adaptable_experts, adaptable_layers, apply_lora, expert_names, matches
from liger_models.adapters.lora_layers import (
    ExpertAdapter,
    LoRAConfig,
    LoRAExperts,
    LoRALinear,
    adapted_layers,
    adapter_config,
    short_name,
)
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.files import open_safetensors, read_json, write_json
from liger_models.convert.folder import check_complete, write_folder
from liger_models.distributed.ranks import raise_on_all_ranks, rank
from liger_models.layers.linear import is_sharded

Model = TypeVar("Model", bound=CausalLM)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's files."""

REFUSED = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "exclude_modules", "fan_in_fan_out", "kasa_config",
    "layer_replication", "layers_to_transform", "lora_bias", "modules_to_save", "monteclora_config", "rank_pattern",
    "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Keys of adapter_config.json for features that are not implemented; they must be empty."""
INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base weights unchanged. PEFT's others (PiSSA, OLoRA, LoftQ) modify
them."""


def save_adapter(model: CausalLM, folder: str | os.PathLike[str], *, base: str | None = None) -> None:
    """Write the adapters as PEFT does, in adapter_config.json and adapter_model.safetensors. Every rank must call it.

    Args:
        model: with adapters, sharded or not.
        folder: created if it does not exist.
        base: name on the hub, or folder, of the base model. PEFT and vLLM read it.

    Raises:
        ValueError: the model has no adapters.
    """
    config = adapter_config(model)
    if config is None:
        raise ValueError(f"save_adapter: {type(model).__name__} must have adapters, got none (or merged ones).")
    tensors, names, experts = {}, set(), set()
    for layer in adapted_layers(model).values():
        of_layer = {name for name, _ in layer.adapters()}
        if isinstance(layer, LoRAExperts):
            experts |= of_layer
        else:
            names |= {name.removesuffix(".weight") for name in of_layer}
        for peft_name, tensor in peft_tensors(layer).items():
            whole: Any = tensor.parameter.detach()
            whole = whole.full_tensor() if is_sharded(whole) else whole
            tensors[peft_name] = tensor.write(whole.cpu()).contiguous()
    as_parameters = set() if config.use_dora else {name for name in names if short_name(name) in _misread(model)}
    names -= as_parameters
    targets: Sequence[str] | str = config.target_modules
    if targets == "all-linear" and model.visual is None:
        targets = sorted(set(map(short_name, names)))
    elif isinstance(targets, str) or model.visual is not None:
        # Whole names, or PEFT would adapt more: in a tower, linear layers and other modules share endings ("proj").
        targets = sorted(names)
    else:
        targets = [each for each in targets if any(matches(name, each) for name in names)]
    endings = {".".join(name.split(".")[-2:]) for name in experts}
    every = {name for parts in adaptable_experts(model).values() for name, _ in parts.values()}
    if experts != {name for name in every if any(matches(name, each) for each in endings)}:
        endings = experts
    keys: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        "target_modules": list(targets),
        "target_parameters": sorted({*endings, *(f"{name}.weight" for name in as_parameters)}) or None,
        # PEFT loads no adapters of parameters with dropout, which is for training alone.
        "lora_dropout": 0.0 if experts or as_parameters else config.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }

    def write(place: Path) -> None:
        write_json(place / CONFIG, keys)
        save_file(tensors, place / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(place / CONFIG, place / WEIGHTS)  # safetensors creates files that only the owner can read

    with raise_on_all_ranks():
        if rank() == 0:
            write_folder(Path(folder), write, last=CONFIG)


def _misread(model: CausalLM) -> set[str]:
    """Last parts of names that PEFT takes for those of experts, wherever they are in a list or a pattern of modules.

    These are the names of matrices that a checkpoint has for each expert by itself, while transformers has those of all
    experts in one parameter. A shared expert or a dense layer may have the same names.
    """
    names = expert_names(model)
    apart = any(called != parameter for called, parameter in names.items())
    return {called.rpartition(".")[2] for called in names} if apart else set()


def load_adapter(model: Model, folder: str | os.PathLike[str]) -> Model:
    """Add the adapters that PEFT or `save_adapter` wrote to a folder, in place, to train them further or merge them.

    Args:
        model: as for `apply_lora`.
        folder: holds adapter_config.json and adapter_model.safetensors.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: another kind of adapter, or adapters of another model. The model is then unchanged.
    """
    place = Path(folder)
    check_complete(place, CONFIG)
    for name in (CONFIG, WEIGHTS):
        if not (place / name).is_file():
            raise FileNotFoundError(f"{place}: must hold {name}, got no such file. Give the folder of PEFT adapters.")
    keys = read_json(place / CONFIG)
    if keys.get("peft_type") != "LORA" or keys.get("bias", "none") != "none":
        raise ValueError(
            f"{place / CONFIG}: peft_type must be LORA and bias none, got {keys.get('peft_type')!r} and "
            f"{keys.get('bias')!r}. Other adapters are not implemented."
        )
    for name in REFUSED:
        if keys.get(name):
            raise ValueError(
                f"{place / CONFIG}: {name} must be empty, got {keys.get(name)!r}. Merge the adapter with PEFT."
            )
    initial, targets = keys.get("init_lora_weights"), keys.get("target_modules")
    if initial not in INITIAL:
        raise ValueError(
            f"{place / CONFIG}: init_lora_weights must be one of {INITIAL}, which leave the base weights unchanged, "
            f"got {initial!r}. Convert it with PEFT: save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)."
        )
    parameters = tuple(keys.get("target_parameters") or ())
    if targets is None and parameters:
        targets = []
    if not isinstance(targets, str | list):
        raise ValueError(
            f"{place / CONFIG}: target_modules must be a list of names or a string, got {targets!r}. Add what is "
            "adapted."
        )
    weights = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]  # of linear layers
    keys["target_parameters"] = tuple(name for name in parameters if not name.endswith(".weight"))
    if isinstance(targets, list):
        targets = [*targets, *weights]
    elif weights and targets != "all-linear":
        targets = rf"(?:{targets})|(?:.*\.)?(?:{'|'.join(map(re.escape, weights))})"
    keys["target_modules"] = targets
    with open_safetensors(place / WEIGHTS) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if isinstance(targets, list):
        # A list may name layers that this model lacks: PEFT only requires that one of them matches.
        linears = adaptable_layers(model).values()
        modules = [name.removesuffix(".weight") for _, expression in linears for name in expression.names()]
        modules += [name.partition(".lora_")[0] for name in stored]
        keys["target_modules"] = [each for each in targets if any(matches(name, each) for name in modules)] or targets
    known = {field.name for field in dataclasses.fields(LoRAConfig)}
    config = LoRAConfig(**{name: value for name, value in keys.items() if name in known})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    apply_lora(model, config)
    try:
        _fill_adapters(model, stored, place / WEIGHTS)
    except ValueError:
        for path, layer in adapted_layers(model).items():
            if isinstance(layer, LoRAExperts):
                moe: Any = model.get_submodule(path.rpartition(".")[0])
                moe.lora = None
            else:
                layer.plain._parameters = layer._parameters
                model.set_submodule(path, layer.plain)
        for parameter in trainable:
            parameter.requires_grad_(True)
        raise
    return model


class PeftTensor(NamedTuple):
    """A parameter of an adapter, and how PEFT's files hold it.

    Attributes:
        parameter: the parameter.
        write: a tensor of its shape -> the tensor in the file.
        read: the inverse.
    """

    parameter: nn.Parameter
    write: Callable[[Tensor], Tensor] = lambda tensor: tensor
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor


def peft_tensors(layer: LoRALinear | LoRAExperts) -> dict[str, PeftTensor]:
    """The parameters of a layer's adapters by their names in PEFT's files."""
    if isinstance(layer, LoRAExperts):
        adapters = [adapter for _, adapter in layer.adapters()]
        # PEFT wraps the module of the experts once for each parameter, the first inside of the second.
        return {
            name: tensor
            for inside, adapter in zip(["", ".base_layer"], reversed(adapters), strict=False)
            for name, tensor in _of_experts(PREFIX + adapter.name.rpartition(".")[0] + inside, adapter).items()
        }
    found: dict[str, PeftTensor] = {}
    for name, adapter in layer.adapters():
        stem = PREFIX + name.removesuffix(".weight")
        found[f"{stem}.lora_A.weight"] = PeftTensor(adapter.lora_A)
        found[f"{stem}.lora_B.weight"] = PeftTensor(adapter.lora_B)
        if adapter.lora_magnitude_vector is not None:
            found[f"{stem}.lora_magnitude_vector"] = PeftTensor(adapter.lora_magnitude_vector)
    return found


def _of_experts(stem: str, adapter: ExpertAdapter) -> dict[str, PeftTensor]:
    """A is [X r, in], expert by expert; B is [out, r X] with the experts innermost, and its rows are transformers'."""
    (X, out, _), expression, name = adapter.lora_B.shape, adapter.expression, adapter.name
    # The parameter is [X, out, in] or [X, in, out], and B has r for "in".
    probe = expression.unpack(torch.empty(X, out, out + 2, device="meta"))[name]
    ours = "x o r" if probe.shape[1] == out else "x r o"
    return {
        f"{stem}.lora_A.weight": PeftTensor(
            adapter.lora_A, lambda A: A.flatten(0, 1), lambda A: A.unflatten(0, (X, -1))
        ),
        f"{stem}.lora_B.weight": PeftTensor(
            adapter.lora_B,
            lambda B: rearrange(expression.unpack(B)[name], f"{ours} -> o (r x)"),
            lambda B: expression.pack({name: rearrange(B, f"o (r x) -> {ours}", x=X)}),
        ),
    }


def _fill_adapters(model: CausalLM, stored: dict[str, Tensor], file: Path) -> None:
    """Copy the tensors of a file into the model's adapters; the two must match exactly."""
    head = stored.pop(f"{PREFIX}lm_head.base_layer.weight", None)  # PEFT saves it with the head's adapter
    if head is not None and not torch.equal(head.to(model.lm_head.weight), model.lm_head.weight):
        raise ValueError(
            f"{file}: the head's weight must equal the model's, got another. Load the model that was adapted."
        )
    wanted = {name: each for layer in adapted_layers(model).values() for name, each in peft_tensors(layer).items()}
    odd = sorted(wanted.keys() ^ stored.keys())
    if odd:
        raise ValueError(
            f"{file}: must hold exactly the adapters that {CONFIG} describes for {type(model).__name__}, got "
            f"{len(odd)} too many or too few: {', '.join(odd[:3])}. Load them into the model that they were trained on."
        )
    for name, (parameter, write, read) in wanted.items():
        shape = write(torch.empty_like(parameter, device="meta")).shape
        if stored[name].shape != shape:
            raise ValueError(
                f"{file}: {name} must be {list(shape)}, got {list(stored[name].shape)}. Load it into the model that it "
                "was trained on."
            )
        parameter.data.copy_(read(stored[name]))
