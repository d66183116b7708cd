"""Every registered architecture with its tiny configurations, and the same model in transformers beside ours."""

import copy
import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from liger_models.arch import get_arch, list_archs
from liger_models.convert import get_map
from liger_models.layers.causal_lm import CausalLM

DATA = Path(__file__).parents[1] / "data"
ARCHS = list_archs()


def tiny(arch: str) -> dict[str, dict]:
    """Variant -> keyword arguments of transformers' configuration class. One file per architecture, no code."""
    file = json.loads((DATA / arch / "tiny.json").read_text())
    return {name: {**file["base"], **changes} for name, changes in file["variants"].items()}


CASES = [(arch, variant) for arch in ARCHS for variant in tiny(arch)]
FIRST_CASES = [(arch, next(iter(tiny(arch)))) for arch in ARCHS]

every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case_each = pytest.mark.parametrize("pair", FIRST_CASES, indirect=True, ids="-".join)

LIMIT = 1e-5
"""Largest relative error in fp32."""


@cache
def make_folder(arch: str, variant: str, root: Path) -> Path:
    folder = root / f"{arch}-{variant}"
    config = AutoConfig.for_model(arch, **tiny(arch)[variant])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Also norms and biases away from the ones and zeros that they start from.
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
    model.save_pretrained(folder)
    return folder


def hf_model(folder: Path, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def hf_gradients(model) -> dict[str, Tensor]:
    """Gradients under the names of the checkpoint: saved like weights, since transformers may hold several in one."""
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, source in zip(gradients.parameters(), model.parameters(), strict=True):
            assert source.grad is not None
            parameter.copy_(source.grad)
    with tempfile.TemporaryDirectory() as folder:
        gradients.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def our_gradients(model: CausalLM) -> dict[str, Tensor]:
    """Gradients under Hugging Face's names, taken apart by the weight map."""
    weights = get_map(type(model).__module__.rpartition(".")[2])(model.config)
    named = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        named.update(weights.entries[name].unpack(parameter.grad))
    return named


def load(arch: str, folder: Path, **options) -> CausalLM:
    return get_arch(arch).from_pretrained(folder, progress=False, strict=True, **options)


def error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    theirs = theirs.detach().double().cpu()
    return ((ours.detach().double().cpu() - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


def tokens(arch: str, variant: str, B: int, T: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny(arch)[variant]["vocab_size"], (B, T), generator=generator)


def assert_same_gradients(ours: CausalLM, theirs, limit: float = LIMIT) -> None:
    ours, theirs = our_gradients(ours), hf_gradients(theirs)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert error(ours[name], gradient) <= limit, name
