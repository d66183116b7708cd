"""`liger-models verify --adapter`: checks that all tensors of a LoRA adapter are trained, used and read by servers."""

import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from liger_models.adapters.check import Finding, adapter_parameters
from liger_models.adapters.lora import adaptable_experts, adaptable_layers, expert_names, matches, without_adapters
from liger_models.adapters.peft_files import load_adapter
from liger_models.arch.auto import load_by_name
from liger_models.base.causal_lm import CausalLM
from liger_models.cli.compare import LIMIT, random_text, relative_error, unknown_to
from liger_models.cli.served import SERVERS, check_served
from liger_models.convert.encodings import quantization_of
from liger_models.convert.files import read_quantization
from liger_models.convert.format import format_of

WEIGHTS = "adapter_model.safetensors"


def verify_adapter(
    name: str, adapter: Path, *, served: bool, device: str, progress: bool
) -> Iterator[tuple[str, list[Finding]]]:
    """Check an adapter together with the model that it belongs to.

    Args:
        name: folder of the model, or its name on the hub.
        adapter: folder that `save_adapter` or PEFT has written.
        served: whether to check the layout that vLLM and SGLang load.
        device: device on which the model runs, in float32.
        progress: whether loading shows a progress bar.

    Yields:
        For each check, a description with the measured numbers, and a list of problems.
    """
    model = load_by_name(name, dtype=torch.float32, device=device, progress=progress)
    config = _read(adapter)

    # First check only the files, because loading them into the model may fail.
    yield "every target name matches a module", list(_unmatched(model, config))
    if served:
        tensors = _names(adapter)
        modules = module_names(model)
        for server in SERVERS:
            yield f"{server} loads all {len(tensors)} tensors", list(check_served(server, adapter, tensors, modules))
    try:
        load_adapter(model, adapter)
    except ValueError as error:
        yield "the model loads the adapter", [Finding(str(adapter), str(error))]
        return

    # Check the tensors, and run one backward through them.
    parameters = adapter_parameters(model)
    yield f"all {len(parameters)} tensors moved from their initial values", list(_unmoved(parameters))
    ids = random_text(model.config, 2, 64).to(device)
    model.eval()
    with torch.no_grad(), without_adapters(model):
        before = _logits(model, ids)
    after = _logits(model, ids)
    after.float().log_softmax(-1)[:, :, 0].sum().backward()
    logits = after.detach()
    yield "a gradient reaches every tensor", list(_without_gradient(model, parameters))
    change = relative_error(logits, before)
    no_change = [Finding(WEIGHTS, "the logits are the same with and without it. Train it, or save it again.")]
    yield f"logits change by {change:.1e} of their norm", [] if change > 0 else no_change
    if "lm_head" in str(sorted(parameters)) and model.config.tie_word_embeddings:
        yield (
            "the head and the embedding are one weight",
            [
                Finding(
                    "lm_head",
                    "only the head is adapted, not the embedding, which shares its weight. Remove lm_head from "
                    "target_modules, or serve the merged model, whose head is separate.",
                )
            ],
        )

    # Compare the logits with those of transformers' model to which PEFT has added the same adapter.
    different = _compare_with_peft(name, model, adapter, ids, logits)
    if isinstance(different, str):
        yield f"logits not compared with PEFT: {different}", []
    else:
        wrong = Finding(WEIGHTS, f"the logits differ from PEFT's by {different:.1e} (limit {LIMIT:.0e}).")
        yield f"logits equal those of PEFT on transformers ({different:.1e})", [] if different <= LIMIT else [wrong]


def module_names(model: CausalLM) -> set[str]:
    """Return the names of a model's linear layers in all checkpoint layouts."""
    names = set()
    for weights in format_of(type(model)).weight_maps(model.config):
        for path, (_, expression) in adaptable_layers(model).items():
            names |= {*weights.entries.get(f"{path}.weight", expression).names()}
    return {name.removesuffix(".weight") for name in names}


def _read(adapter: Path) -> dict[str, Any]:
    for name in ("adapter_config.json", WEIGHTS):
        if not (adapter / name).is_file():
            raise FileNotFoundError(f"{adapter}: must hold {name}, got no such file. Give the folder of PEFT adapters.")
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    return config


def _names(adapter: Path) -> list[str]:
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        return sorted(file.keys())


def _unmatched(model: CausalLM, config: dict[str, Any]) -> Iterator[Finding]:
    """Yield the targets of a config that match nothing in the model."""
    modules = module_names(model) | {*expert_names(model)}
    parameters = {name for weights in adaptable_experts(model).values() for name, _ in weights.values()}
    parameters |= {f"{module}.weight" for module in modules}
    targets = config.get("target_modules") or []
    for target in [] if isinstance(targets, str) else targets:
        if not any(matches(module, target) for module in modules):
            endings = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
            yield Finding(f"target_modules {target!r}", f"matches no linear layer ({endings}). Correct or remove it.")
    for target in config.get("target_parameters") or []:
        if not any(matches(parameter, target) for parameter in parameters):
            yield Finding(f"target_parameters {target!r}", "matches no parameter of the model. Correct or remove it.")


def _unmoved(parameters: dict[str, torch.nn.Parameter]) -> Iterator[Finding]:
    for name, parameter in parameters.items():
        if not bool(parameter.isfinite().all()):
            yield Finding(name, "is not finite. Lower the learning rate, and train again.")
        elif not bool(parameter.any()):
            kind = "B starts at 0 and did not move" if ".lora_B" in name else "is 0, so B gets no gradient"
            yield Finding(name, f"{kind}. Check that its layer was trained, and that the data reach it.")


def _without_gradient(model: CausalLM, parameters: dict[str, torch.nn.Parameter]) -> Iterator[Finding]:
    """Yield a finding for each tensor that is frozen or got no gradient.

    Tensors that are used only for images need no gradient.
    """
    paths = [path for path, _ in model.named_parameters()]
    unreached = ("visual.", *{path.partition("cross_attn.")[0] for path in paths if "cross_attn." in path})
    images = {id(parameter) for path, parameter in model.named_parameters() if path.startswith(unreached)}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            yield Finding(name, "is frozen. Call requires_grad_(True) on it.")
        elif id(parameter) not in images and (parameter.grad is None or not bool(parameter.grad.any())):
            yield Finding(
                name, "gets no gradient. If its partner A or B is 0, train again; otherwise remove its target."
            )


def _logits(model: CausalLM, ids: Tensor) -> Tensor:
    logits: Tensor | None = model(ids).logits
    assert logits is not None
    return logits


def _compare_with_peft(name: str, model: CausalLM, adapter: Path, ids: Tensor, logits: Tensor) -> float | str:
    """Return the difference between our logits and PEFT's, or the reason why they are not compared."""
    try:
        peft: Any = importlib.import_module("peft")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        return f"{error.name} is not installed"
    quantization = read_quantization(Path(name)) if Path(name).is_dir() else quantization_of(model.hf_config) or {}
    if unknown := unknown_to(transformers, format_of(type(model)).model_type, quantization):
        return unknown
    auto = transformers.AutoModelForCausalLM if model.visual is None else transformers.AutoModelForImageTextToText
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the warnings are about features that no adapter of this package uses
        try:
            theirs = auto.from_pretrained(name, dtype=torch.float32, attn_implementation="eager").to(ids.device)
        except ImportError as error:  # a missing library for a quantized format
            return f"transformers can't load the checkpoint: {error}"
        try:
            theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
        except ValueError as error:  # such as one about output projections of state-space layers
            return f"PEFT refuses the adapter: {error}"
        return relative_error(logits, theirs(input_ids=ids).logits)
