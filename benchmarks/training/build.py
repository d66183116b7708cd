"""The model of a mode, either on one GPU in bf16 or sharded over several GPUs. All libraries have the same weights.

There are three exceptions, in which weights differ but have the same distribution: experts, if transformers has all
experts of a layer in one tensor; weights whose names transformers changes when loading; and models that are too large
for one GPU.

A library is imported only when its model is built, because a process that measures one library must not spend time on
importing another one.
"""

import functools
import math
import os
import tempfile
import zlib
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .frozen import LAYOUTS, build_frozen
from .modes import Mode

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
MEDUSA_HEADS = 5

DEVICE = "cuda"
"""Device of the models. Tests change it."""

WHOLE = 12e9
"""Maximum number of parameters for which every GPU builds the whole model in fp32 before sharding."""
IN_SHARDS = {
    "8bit", "ac", "adamw", "balanced", "bf16", "compile", "cp", "ep", "full", "hsdp", "inbackward", "liger", "moments",
    "offload", "selective", "tp",
}  # fmt: skip
"""Words that a mode may have if weights are drawn in shards. These words do not affect which weights are drawn."""

PATCHED_IN_PARTS = ("internvl", "llava", "smolvlm")
"""Model types whose language model and tower Liger Kernel patches only if it gets an existing model."""

WITHOUT_OUT_PROJ = ("falcon_h1", "mamba2", "nemotron_h")
"""Model types for which PEFT refuses adapters of ``out_proj``. In this package, ``out_proj`` then gets none, either."""


def build(config: dict, mode: Mode) -> nn.Module:
    """The model on one GPU."""
    if mode.library == "ours":
        return build_ours(config, mode)
    model = build_hf(config, liger="liger" in mode, recompute="ac" in mode)
    if "medusa" in mode:
        from .medusa import MedusaLoss

        return MedusaLoss(model, MEDUSA_HEADS, liger="liger" in mode)
    return adapt_hf(model, nf4="nf4" in mode, experts="noexperts" not in mode) if "lora" in mode else model


def weight(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """The weight with a Hugging Face name: from the checkpoint in $START, or random with a seed from the name."""
    if "START" in os.environ:
        return checkpoint(os.environ["START"])[name].to(device)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    # Each name has its own seed, so that the order of parameters does not matter.
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) * 0.02


@functools.cache
def checkpoint(folder: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def build_sharded(config: dict, mode: Mode) -> nn.Module:
    """The model, sharded over the GPUs of the process group."""
    empty = build_empty(config, mode)
    if sum(parameter.numel() for parameter in empty.parameters()) <= WHOLE:
        return shard(build(config, mode).to(dtype_of(mode)), mode)
    unknown = mode.extras.keys() - IN_SHARDS
    if mode.library == "ours":
        unknown -= {"lora", "noexperts"}
    if unknown:
        raise ValueError(f"{'+'.join(sorted(unknown))}: is not for models that are drawn in shards.")
    return fill_shards(shard(empty, mode), mode)


def dtype_of(mode: Mode) -> torch.dtype:
    """The dtype of a sharded model's parameters."""
    return torch.bfloat16 if "bf16" in mode else torch.float32


def build_empty(config: dict, mode: Mode) -> nn.Module:
    """The model on the meta device."""
    if mode.library == "hf":
        return empty_hf(config, dtype_of(mode), torch.device("meta"), liger="liger" in mode, recompute="ac" in mode)
    from liger_models import AutoLigerModel

    model = AutoLigerModel.from_config(config, dtype=dtype_of(mode), device="meta")
    adapt_ours(model, mode)
    set_policies(model, mode)
    return model


@torch.no_grad()
def fill_shards(model: nn.Module, mode: Mode) -> nn.Module:
    """Draw the weights of each rank's shards. Replicas get equal weights.

    As in Megatron-LM, embeddings have large values and outputs of blocks have small values. Random routers then
    choose all experts about equally often, as trained routers do.
    """
    model.to_empty(device=DEVICE)
    if mode.library == "hf":  # buffers on the meta device have no values
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(DEVICE)

    # The seed is the rank within a replica.
    ranks = torch.distributed.get_world_size() // (mode.extras.get("hsdp") or 1)
    torch.manual_seed(torch.distributed.get_rank() % ranks)
    small = 0.02 / math.sqrt(2 * model.config.num_hidden_layers)

    # The name of a parameter determines the standard deviation. The weights of norms are 1.
    stds = {"embed_tokens": 1.0, "o_proj": small, "down": small}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        std = next((std for part, std in stds.items() if part in name), 0.02)
        local.fill_(1.0) if "norm" in name else local.normal_(std=std)
    return model


@torch.no_grad()
def build_hf(config: dict, liger: bool, recompute: bool, attention: str | None = None) -> nn.Module:
    model = empty_hf(config, torch.bfloat16, torch.device(DEVICE), liger, recompute, attention)
    for name, parameter in model.named_parameters():
        parameter.copy_(weight(name, parameter.shape, parameter.device))
    return model


def empty_hf(
    config: dict, dtype: torch.dtype, device: torch.device, liger: bool, recompute: bool, attention: str | None = None
) -> nn.Module:
    """The transformers model with arbitrary values. Each part uses SDPA if transformers supports SDPA for this part.

    Raises:
        KeyError: Liger Kernel does not patch models of this type.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    # Liger Kernel patches the classes, so patch before creating the model.
    auto_class = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    in_parts = config["model_type"] in PATCHED_IN_PARTS
    if liger:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        apply_liger = MODEL_TYPE_TO_APPLY_LIGER_FN[config["model_type"]]
        if not in_parts:
            apply_liger()
    with device:
        model = auto_class.from_config(AutoConfig.for_model(**config), dtype=dtype, attn_implementation=attention)
    if liger and in_parts:
        apply_liger(model=model)
    model.config.use_cache = False
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def adapt_hf(model: nn.Module, nf4: bool, experts: bool = True) -> nn.Module:
    """Add PEFT's adapters. bitsandbytes quantizes only while loading, so save and load 4-bit weights first."""
    from transformers import BitsAndBytesConfig

    if nf4:
        bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model_class = type(model)
            model = model.to("meta")  # frees its memory
            model = model_class.from_pretrained(
                folder, dtype=torch.bfloat16, quantization_config=bits, device_map={"": 0}
            )
        model.config.use_cache = False
    return with_peft(model, hf_targets(model, experts))


def with_peft(model: nn.Module, targets: dict) -> nn.Module:
    """Add PEFT's adapters to exactly the matrices of `hf_targets`.

    For some families, PEFT would otherwise mistake names of linear layers, such as "up_proj" of shared experts, for
    old names of experts. It would leave out these layers, and double the rank of the experts' gate and up.
    """
    import peft
    from peft.utils import transformers_weight_conversion

    with patch.dict(transformers_weight_conversion._MODEL_TO_CONVERSION_PATTERN):
        transformers_weight_conversion._MODEL_TO_CONVERSION_PATTERN.pop(model.config.model_type, None)
        return peft.get_peft_model(model, peft.LoraConfig(**LORA | targets, task_type="CAUSAL_LM"))


def hf_targets(model: nn.Module, experts: bool = True) -> dict:
    """PEFT's options that choose the adapted matrices. Vision towers get no adapters, and experts may get adapters."""
    if any("language_model." in name for name, _ in model.named_modules()):
        return {"target_modules": r".*language_model\..*layers\..*(_proj)"}
    found = {".".join(name.split(".")[-2:]) for name, weight in model.named_parameters() if weight.dim() == 3}
    names = sorted(found & {"experts.gate_up_proj", "experts.up_proj", "experts.down_proj"})
    refused = model.config.model_type in WITHOUT_OUT_PROJ
    if not names and not refused:
        return {}
    # With "all-linear", PEFT would use twice the rank for gate and up, and would adapt the router.
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    modules = {"target_modules": sorted(linear - {"lm_head"} - ({"out_proj"} if refused else set()))}
    return modules | ({"target_parameters": names} if names and experts else {})


def our_targets(model: nn.Module, experts: bool = True) -> dict:
    """The options of this package that choose the same matrices as `hf_targets`."""
    from liger_models.adapters.lora import adaptable_experts, adaptable_layers, language_targets
    from liger_models.convert import format_of

    options: dict = {} if model.visual is None else {"target_modules": language_targets(model)}
    if format_of(type(model)).model_type in WITHOUT_OUT_PROJ:
        full = [name for _, expression in adaptable_layers(model).values() for name in expression.names()]
        linear = {name.removesuffix(".weight").rpartition(".")[2] for name in full}
        options["target_modules"] = sorted(linear - {"lm_head", "out_proj"})
    names = {name for weights in adaptable_experts(model).values() for name, _ in weights.values()}
    parameters = sorted({".".join(name.split(".")[-2:]) for name in names})
    return options | ({"target_parameters": parameters} if parameters and experts else {})


@torch.no_grad()
def build_ours(config: dict, mode: Mode) -> nn.Module:
    from liger_models import AutoLigerModel

    stored = next(iter(LAYOUTS.keys() & mode.extras.keys()), None)
    if stored:
        model = build_frozen(config, stored, DEVICE)
    else:
        model = AutoLigerModel.from_config(config, dtype=torch.bfloat16, device=DEVICE)
        draw_weights(model)

    # Add adapters and freeze weights before setting policies and float8.
    if "peft" in mode:
        import peft

        from liger_models.adapters import unpack_projections

        set_policies(model, mode)
        return peft.get_peft_model(unpack_projections(model), peft.LoraConfig(**LORA))
    adapt_ours(model, mode)
    for extra in {"nf4", "float8"} & mode.extras.keys():
        from liger_models.adapters import quantize_base

        quantize_base(model, dtype=extra)
    set_policies(model, mode)
    for extra in {"fp8", "fp8rowwise"} & mode.extras.keys():
        from liger_models.adapters.float8 import convert_to_float8

        convert_to_float8(model, extra.removeprefix("fp8") or "tensorwise")

    if "blocks" in mode:
        for block in model.layers:
            block.compile(fullgraph=True)
    if "medusa" in mode:
        from liger_models.adapters.medusa import LigerMedusa

        return LigerMedusa(model, MEDUSA_HEADS)
    return model


def adapt_ours(model: nn.Module, mode: Mode) -> None:
    """Add adapters to a model of this package, if the mode asks for them."""
    if "lora" in mode:
        from liger_models.adapters import LoRAConfig, apply_lora

        apply_lora(model, LoRAConfig(**LORA | our_targets(model, experts="noexperts" not in mode)))


def draw_weights(model: nn.Module) -> None:
    """Fill a model of this package: draw the weights under their names in Hugging Face's format, and pack them."""
    from liger_models.convert import format_of

    weights = format_of(type(model)).module_map(model.config)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # a buffer in transformers
            continue
        expression = weights.entries[name]
        theirs = expression.unpack(torch.empty_like(parameter, device="meta"))
        parameter.copy_(expression.pack({n: weight(n, t.shape, parameter.device) for n, t in theirs.items()}))


def set_policies(model: nn.Module, mode: Mode) -> None:
    """Offload and recompute as many blocks as the mode says. If possible, recompute blocks that are not offloaded."""
    total = len(model.layers)
    offloaded = mode.number("offload", total)
    model.set_checkpointing("none", offload_layers=offloaded)
    stay = [i for i in range(total) if i not in model.offloaded]
    policies = ["none"] * total

    # Prefer blocks that are not offloaded. If there are too few of them, take the first of all blocks.
    for policy in ("selective", "full"):
        count = mode.number(policy, total)
        for i in (stay if count <= len(stay) else range(total))[:count]:
            policies[i] = policy
    model.set_checkpointing(policies, offload_layers=offloaded)
    if "gateup8" in mode:
        model.set_gate_up_8bit()


def shard(model: nn.Module, mode: Mode) -> nn.Module:
    """Shard a model with FSDP2, and compute in bf16. A transformers model is sharded block by block."""
    if mode.library == "ours":
        from liger_models.parallel import apply_cp, apply_ep, apply_fsdp, apply_tp

        mesh = mesh_of(mode)
        if "tp" in mode:
            apply_tp(model, mesh, sequence_parallel=True)
        if "ep" in mode:
            apply_ep(model, mesh)
        if "cp" in mode:
            apply_cp(model, mesh)
        return apply_fsdp(model, mesh)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        if "compile" in mode:  # FSDP2's work between blocks is not compiled
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def mesh_of(mode: Mode) -> DeviceMesh:
    """A mesh of all GPUs, with a dimension for the mode's kind of parallelism."""
    gpus = torch.distributed.get_world_size()
    for word in ("tp", "ep", "cp"):
        if word in mode:
            size = mode.number(word, gpus)
            return init_device_mesh(DEVICE, (gpus // size, size), mesh_dim_names=("dp", word))
    copies = mode.number("hsdp", gpus)
    if copies:
        return init_device_mesh(DEVICE, (copies, gpus // copies), mesh_dim_names=("copies", "dp"))
    return init_device_mesh(DEVICE, (gpus,))
