"""The model of a mode, on the GPU in bf16. Both libraries start from the same weights.

Where transformers has the experts of a layer in one tensor, their random numbers are others of the same distribution.

A library is imported when its model is built: a process that measures one must not pay for the other.
"""

import functools
import os
import tempfile
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .modes import Mode

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
MEDUSA_HEADS = 5

WITHOUT_SDPA = ("gpt_oss",)
"""Families for which transformers has no SDPA."""


def build(config: dict, mode: Mode) -> nn.Module:
    """The model on one GPU."""
    if mode.library == "ours":
        return build_ours(config, mode)
    model = build_hf(config, liger="liger" in mode, recompute="ac" in mode)
    if "medusa" in mode:
        from .medusa import MedusaLoss

        return MedusaLoss(model, liger="liger" in mode)
    return adapt_hf(model, nf4="nf4" in mode) if "lora" in mode else model


def weight(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """The weight of this Hugging Face name: from the checkpoint in $START, or random numbers seeded by the name."""
    if "START" in os.environ:
        return checkpoint(os.environ["START"])[name].to(device)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) * 0.02


@functools.cache
def checkpoint(folder: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@torch.no_grad()
def build_hf(config: dict, liger: bool, recompute: bool, attention: str = "sdpa") -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    if config["model_type"] in WITHOUT_SDPA:
        attention = "eager"
    if liger:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        MODEL_TYPE_TO_APPLY_LIGER_FN[config["model_type"]]()
    with torch.device("cuda"):
        model = auto_class.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation=attention
        )
    for name, parameter in model.named_parameters():
        parameter.copy_(weight(name, parameter.shape, parameter.device))
    model.config.use_cache = False
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def adapt_hf(model: nn.Module, nf4: bool) -> nn.Module:
    """Add PEFT's adapters. bitsandbytes quantises while it loads, so 4-bit weights take a detour over a checkpoint."""
    import peft
    from transformers import BitsAndBytesConfig

    if nf4:
        bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model_class = type(model)
            model = model.to("meta")
            model = model_class.from_pretrained(
                folder, dtype=torch.bfloat16, quantization_config=bits, device_map={"": 0}
            )
        model.config.use_cache = False
    return peft.get_peft_model(model, peft.LoraConfig(**LORA | hf_targets(model), task_type="CAUSAL_LM"))


def hf_targets(model: nn.Module) -> dict:
    """PEFT's options where it does not adapt just all linear layers: no vision towers, and experts of mixtures."""
    if any("language_model." in name for name, _ in model.named_modules()):
        return {"target_modules": r".*language_model\..*layers\..*(_proj)"}
    names = ("experts.gate_up_proj", "experts.down_proj")
    if not all(any(name.endswith(each) for name, _ in model.named_parameters()) for each in names):
        return {}
    # From "all-linear" PEFT would infer twice the rank for gate and up, and an adapter of the router.
    linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    return {"target_modules": sorted(linear - {"lm_head"}), "target_parameters": names}


def our_targets(model: nn.Module) -> dict:
    """The same for this package."""
    from liger_models.adapters.lora import adaptable_experts, language_targets
    from liger_models.adapters.lora_layers import EXPERTS

    options: dict = {} if model.visual is None else {"target_modules": language_targets(model)}
    return options | ({"target_parameters": EXPERTS} if any(adaptable_experts(model).values()) else {})


@torch.no_grad()
def build_ours(config: dict, mode: Mode) -> nn.Module:
    from liger_models import AutoLigerModel
    from liger_models.convert import format_of

    model = AutoLigerModel.from_config(config, dtype=torch.bfloat16, device="cuda")
    weights = format_of(type(model)).module_map(model.config)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # a buffer in transformers
            continue
        expression = weights.entries[name]
        theirs = expression.unpack(torch.empty_like(parameter, device="meta"))
        parameter.copy_(expression.pack({n: weight(n, t.shape, parameter.device) for n, t in theirs.items()}))
    if "peft" in mode:
        import peft

        from liger_models.adapters import unpack_projections

        set_policies(model, mode)
        return peft.get_peft_model(unpack_projections(model), peft.LoraConfig(**LORA))
    if "lora" in mode:
        from liger_models.adapters import LoRAConfig, apply_lora

        apply_lora(model, LoRAConfig(**LORA | our_targets(model)))
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


def set_policies(model: nn.Module, mode: Mode) -> None:
    """Offload and recompute in as many blocks as the mode says. Blocks that are not offloaded recompute first."""
    total = len(model.layers)
    offloaded = mode.blocks("offload", total)
    model.set_checkpointing("none", offload_layers=offloaded)
    stay = [i for i in range(total) if i not in model.offloaded]
    policies = ["none"] * total
    for policy in ("selective", "full"):
        count = mode.blocks(policy, total)
        for i in (stay if count <= len(stay) else range(total))[:count]:
            policies[i] = policy
    model.set_checkpointing(policies, offload_layers=offloaded)


def shard(model: nn.Module, ours: bool, context: bool = False, blocks: bool = False) -> nn.Module:
    """Wrap a model with FSDP2: weights in fp32, computation in bf16.

    Args:
        ours: it is a model of this package. A model of transformers is wrapped block by block.
        context: context parallel over all GPUs.
        blocks: compile each block of a model of transformers. What FSDP2 does between them is not compiled.
    """
    model = model.float()
    if ours:
        from liger_models.parallel import apply_cp, apply_fsdp

        if context:
            apply_cp(model, init_device_mesh("cuda", (torch.distributed.get_world_size(),)))
        return apply_fsdp(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        if blocks:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)
