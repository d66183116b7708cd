"""Saving and loading of adapters in PEFT's file format."""

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor, nn

from liger_models.adapters.lora import (
    adaptable_experts,
    adaptable_layers,
    apply_lora,
    expert_names,
    matches,
    remove_adapters,
)
from liger_models.adapters.lora_config import LoRAConfig
from liger_models.adapters.lora_experts import ExpertAdapter, LoRAExperts
from liger_models.adapters.lora_layers import LoRALinear, adapted_layers, adapter_config, short_name
from liger_models.base.causal_lm import CausalLM
from liger_models.common.device import empty_on
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
"""Keys of adapter_config.json that belong to features that are not implemented. Their values must be empty."""
INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which PEFT leaves the base weights unchanged.

PEFT's other values (PiSSA, OLoRA, LoftQ) change the base weights.
"""


def save_adapter(model: CausalLM, folder: str | os.PathLike[str], *, base: str | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as PEFT does. Every rank must call this function.

    Args:
        model: a model with adapters. It may be sharded.
        folder: the folder, which is created if it does not exist.
        base: folder of the base model, or its name on the hub. PEFT and vLLM read this name from the file.

    Raises:
        ValueError: the model has no adapters.
    """
    config = adapter_config(model)
    if config is None:
        raise ValueError(f"save_adapter: {type(model).__name__} must have adapters, got none (or merged ones).")

    # Gather each tensor from all ranks, one after the other.
    tensors: dict[str, Tensor] = {}
    for layer in adapted_layers(model).values():
        for name, tensor in peft_tensors(layer).items():
            whole: Any = tensor.parameter.detach()
            whole = whole.full_tensor() if is_sharded(whole) else whole
            tensors[name] = tensor.write(whole.cpu()).contiguous()

    # Write the config.
    targets, target_parameters = _targets(model, config)
    keys: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        "target_modules": targets,
        "target_parameters": target_parameters or None,
        # PEFT does not support dropout for adapters of parameters. Only training needs dropout, so 0 can be written.
        "lora_dropout": 0.0 if target_parameters else config.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }

    def write(target: Path) -> None:
        write_json(target / CONFIG, keys)
        save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(target / CONFIG, target / WEIGHTS)  # safetensors creates files that only their owner can read

    with raise_on_all_ranks():
        if rank() == 0:
            write_folder(Path(folder), write, last=CONFIG)


def _targets(model: CausalLM, config: LoRAConfig) -> tuple[list[str], list[str]]:
    """Return the ``target_modules`` and ``target_parameters`` that make PEFT adapt the same matrices as ``model``."""
    names: set[str] = set()
    experts: set[str] = set()
    for layer in adapted_layers(model).values():
        if isinstance(layer, LoRAExperts):
            experts |= layer.by_name().keys()
        else:
            names |= {name.removesuffix(".weight") for name in layer.lora.by_name()}

    misread = set() if config.use_dora else {name for name in names if short_name(name) in _misread(model)}
    names -= misread

    # Keep the config's targets if PEFT understands them in the same way. Otherwise, write module names.
    targets = config.target_modules
    short = sorted(set(map(short_name, names)))
    if targets == "all-linear" and model.visual is None and not any(map(str.isdigit, short)):
        targets = short
    elif isinstance(targets, str) or model.visual is not None:
        # Write full names. If only the last part of a name were written, PEFT would adapt every module whose name ends
        # with this part. For example, a vision tower may also have a "proj", and if the last part is the index of a
        # projection in a list, a block may have the same index.
        targets = sorted(names)
    else:
        targets = [target for target in targets if any(matches(name, target) for name in names)]

    # Write the last parts of the names of experts' parameters, unless these would also match experts without adapters.
    endings = {".".join(name.split(".")[-2:]) for name in experts}
    all_experts = {name for weights in adaptable_experts(model).values() for name, _ in weights.values()}
    if experts != {name for name in all_experts if any(matches(name, ending) for ending in endings)}:
        endings = experts
    return targets, sorted({*endings, *(f"{name}.weight" for name in misread)})


def _misread(model: CausalLM) -> set[str]:
    """Return the last parts of module names that PEFT would misread as names of experts in ``target_modules``.

    A checkpoint has a separate tensor for each matrix of each expert, such as ``experts.3.gate_proj``, whereas
    transformers has one parameter for all experts. The last part of the tensor's name, ``gate_proj``, may also be the
    last part of the name of a linear layer in a shared expert or in a dense MLP.
    """
    names = expert_names(model)
    apart = any(alias != parameter for alias, parameter in names.items())
    return {alias.rpartition(".")[2] for alias in names} if apart else set()


def load_adapter(model: Model, folder: str | os.PathLike[str]) -> Model:
    """Add adapters to a model in place, from a folder written by PEFT or `save_adapter`.

    Args:
        model: as in `apply_lora`.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: the adapters have a form that is not supported, or belong to another model. In this case, the model
            does not change.
    """
    folder = Path(folder)
    check_complete(folder, CONFIG)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            inner = [path.name for path in sorted(folder.glob("*")) if (path / name).is_file()]
            advice = f"Give its folder {inner[0]}." if inner else "Give the folder of PEFT adapters."
            raise FileNotFoundError(f"{folder}: must hold {name}, got no such file. {advice}")
    with open_safetensors(folder / WEIGHTS) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = _read_config(folder / CONFIG, model, tensors)
    ranks = [tensor.shape[0] for name, tensor in tensors.items() if ".lora_A" in name and tensor.dim() > 0]
    if config.r > max(ranks, default=0):  # allocate nothing of this size
        raise ValueError(
            f"{folder / CONFIG}: r must be the rank of the adapters in {WEIGHTS}, got {config.r} and at most "
            f"{max(ranks, default=0)} rows in a matrix A. Correct it, or save the adapters again."
        )

    # If anything fails, restore the model.
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = adapter_config(model) is None
    try:
        apply_lora(model, config)
        _fill_adapters(model, tensors, folder / WEIGHTS)
    except BaseException:
        if plain:  # otherwise the model already had adapters, and `apply_lora` has refused it
            remove_adapters(model)
            for parameter in trainable:
                parameter.requires_grad_(True)
        raise
    return model


def _read_config(file: Path, model: CausalLM, tensors: Mapping[str, Tensor]) -> LoRAConfig:
    """Read an adapter_config.json. Targets that match nothing in the model are left out.

    Raises ValueError as `load_adapter` does.
    """
    # Raise an error for features that are not implemented.
    keys = read_json(file)
    if keys.get("peft_type") != "LORA" or keys.get("bias", "none") != "none":
        raise ValueError(
            f"{file}: peft_type must be LORA and bias none, got {keys.get('peft_type')!r} and {keys.get('bias')!r}. "
            "Other adapters are not implemented."
        )
    for name in REFUSED:
        if keys.get(name):
            raise ValueError(f"{file}: {name} must be empty, got {keys.get(name)!r}. Merge the adapter with PEFT.")
    initial = keys.get("init_lora_weights")
    if initial not in INITIAL:
        raise ValueError(
            f"{file}: init_lora_weights must be one of {INITIAL}, which leave the base weights unchanged, got "
            f"{initial!r}. Convert it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )

    # Read the targets. A file that lists parameters need not list modules.
    parameters = keys.get("target_parameters") or []
    targets = keys.get("target_modules")
    if targets is None and parameters:
        targets = []
    if not isinstance(targets, str) and not _are_names(targets):
        raise ValueError(
            f"{file}: target_modules must be a list of names or a string, got {targets!r}. Add what is adapted."
        )
    if not _are_names(parameters):
        raise ValueError(f"{file}: target_parameters must be a list of names, got {parameters!r}. Add what is adapted.")

    # If the name of a linear layer could also refer to experts, PEFT's files list the layer's weight as a parameter.
    linears = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
    keys["target_parameters"] = tuple(name for name in parameters if not name.endswith(".weight"))
    if isinstance(targets, list):
        targets = [*targets, *linears]
        # A list may contain names that this model does not have: PEFT only requires that at least one name matches.
        layers = adaptable_layers(model).values()
        modules = [name.removesuffix(".weight") for _, expression in layers for name in expression.names()]
        modules += [name.partition(".lora_")[0] for name in tensors]
        targets = [target for target in targets if any(matches(name, target) for name in modules)] or targets
    elif linears and targets != "all-linear":
        targets = rf"(?:{targets})|(?:.*\.)?(?:{'|'.join(map(re.escape, linears))})"
    keys["target_modules"] = targets

    fields = {field.name for field in dataclasses.fields(LoRAConfig)}
    try:
        return LoRAConfig(**{name: value for name, value in keys.items() if name in fields})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _are_names(value: Any) -> bool:
    """Whether a value of adapter_config.json is a list of strings."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


class PeftTensor(NamedTuple):
    """A parameter of an adapter, and the conversions between it and the tensor in PEFT's files.

    Attributes:
        parameter: the parameter.
        write: function from a tensor with the shape of the parameter to the tensor in the file.
        read: the inverse of ``write``.
    """

    parameter: nn.Parameter
    write: Callable[[Tensor], Tensor] = lambda tensor: tensor
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor


def peft_tensors(layer: LoRALinear | LoRAExperts) -> dict[str, PeftTensor]:
    """Map the names in PEFT's files to the parameters of a layer's adapters."""
    if isinstance(layer, LoRAExperts):
        # PEFT wraps the module of the experts once per parameter. The wrapper for the first parameter is inside the
        # wrapper for the second.
        wrapped = zip(["", ".base_layer"], reversed(layer.by_name().values()), strict=False)
        return {
            name: tensor
            for inside, adapter in wrapped
            for name, tensor in _expert_tensors(PREFIX + adapter.name.rpartition(".")[0] + inside, adapter).items()
        }

    tensors: dict[str, PeftTensor] = {}
    for name, adapter in layer.lora.by_name().items():
        stem = PREFIX + name.removesuffix(".weight")
        tensors[f"{stem}.lora_A.weight"] = PeftTensor(adapter.lora_A)
        tensors[f"{stem}.lora_B.weight"] = PeftTensor(adapter.lora_B)
        if adapter.lora_magnitude_vector is not None:
            tensors[f"{stem}.lora_magnitude_vector"] = PeftTensor(adapter.lora_magnitude_vector)
    return tensors


def _expert_tensors(stem: str, adapter: ExpertAdapter) -> dict[str, PeftTensor]:
    """Map the names in PEFT's files to the tensors of an expert adapter.

    In the files, A is [X · r, in], and the rows of each expert are contiguous. B is [out, r · X]. Each run of X columns
    in B has one column per expert, in the order of the experts. The rows of B are in transformers' order. If A and B
    are swapped, the file stores the transposed B of each expert as A, and the transposed A as B. The product of the
    two stored matrices is the transposed product of B and A.
    """
    (X, out, _), expression, name = adapter.lora_B.shape, adapter.expression, adapter.name
    if adapter.exchanged:
        return {
            f"{stem}.lora_A.weight": PeftTensor(
                adapter.lora_B,
                lambda B: expression.unpack(B)[name].flatten(0, 1),
                lambda A: expression.pack({name: A.unflatten(0, (X, -1))}),
            ),
            f"{stem}.lora_B.weight": PeftTensor(
                adapter.lora_A,
                lambda A: rearrange(A, "x r i -> i (r x)"),
                lambda B: rearrange(B, "i (r x) -> x r i", x=X),
            ),
        }
    # The parameter in transformers is [X, out, in] or [X, in, out]. Accordingly, B is unpacked to [X, out, r] or
    # [X, r, out]. A probe with in ≠ out shows which of the two cases it is.
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


def _fill_adapters(model: CausalLM, tensors: dict[str, Tensor], file: Path) -> None:
    """Copy a file's tensors into the adapters of a model. Names and shapes must match exactly."""
    # If the file has a head, it must equal the model's head, and is not loaded.
    head = tensors.pop(f"{PREFIX}lm_head.base_layer.weight", None)  # PEFT saves the head along with its adapter
    if head is not None and not torch.equal(head.to(model.lm_head.weight), model.lm_head.weight):
        raise ValueError(
            f"{file}: the head's weight must equal the model's, got another. Load the model that was adapted."
        )

    # Check the names.
    targets: dict[str, PeftTensor] = {}
    for layer in adapted_layers(model).values():
        targets |= peft_tensors(layer)
    mismatched = sorted(targets.keys() ^ tensors.keys())
    if mismatched:
        raise ValueError(
            f"{file}: must hold exactly the adapters that {CONFIG} describes for {type(model).__name__}, got "
            f"{len(mismatched)} too many or too few: {', '.join(mismatched[:3])}. Load them into the model that they "
            "were trained on."
        )

    # Check that each tensor has the shape that this model would write, and copy the values.
    for name, (parameter, write, read) in targets.items():
        shape, tensor = write(empty_on("meta", parameter)).shape, tensors[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{file}: {name} must be floats {list(shape)}, got {tensor.dtype} {list(tensor.shape)}. Load it into "
                "the model that it was trained on."
            )
        parameter.data.copy_(read(tensor))
