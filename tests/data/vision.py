"""Tiny models of every family with images, and chats about pictures in files."""

from pathlib import Path
from typing import Any

import torch

from liger_models.base.vision_language import VisionLanguageModel

from ..base import conftest as qwen
from ..base import test_processor_gemma3 as gemma3
from ..base import test_processor_gemma4 as gemma4
from ..base import test_processor_idefics3 as idefics3
from ..base import test_processor_internvl as internvl
from ..base import test_processor_lfm2_vl as lfm2_vl
from ..base import test_processor_llama4 as llama4
from ..base import test_processor_llava as llava
from ..base import test_processor_mllama as mllama
from ..base import test_processor_muse_glimmer as muse_glimmer
from ..base import test_processor_paligemma as paligemma
from ..base import test_processor_pixtral as pixtral
from ..base.conftest import picture

FAMILIES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "gemma4", "llama4", "mllama", "mistral3",
    "muse_glimmer", "llava", "internvl", "llava_next", "idefics3", "lfm2_vl", "paligemma",
)  # fmt: skip
BOUNDS = {"min_pixels": 64, "max_pixels": 1024}
"""From 1 to 16 tokens of Qwen-VL."""
SIZES = ((40, 28), (90, 30), (23, 61), (64, 64), (33, 57))


def make_model(family: str, **settings: Any) -> VisionLanguageModel:
    """A model with random weights whose tokenizer has bytes as tokens; every image has some tokens."""
    torch.manual_seed(0)
    if family in ("gemma3", "gemma4"):
        model = {"gemma3": gemma3, "gemma4": gemma4}[family].make(**settings)
        config = model.assets["tokenizer_config.json"]  # its template calls the assistant by two names
        model.assets["tokenizer_config.json"] = config.replace(b"<start>model", b"<start>assistant")
        return model
    if family == "muse_glimmer":
        return muse_glimmer.make(**settings)
    if family == "llama4":
        return llama4.make(**{"max_patches": 4, **settings})
    if family in ("llava", "llava_next"):
        return llava.make(family, **settings)
    if family == "mistral3":
        return pixtral.make(**settings)
    if family == "internvl":
        return internvl.make(**settings)
    if family == "paligemma":
        return paligemma.make(**settings)
    if family == "idefics3":
        return idefics3.make(**settings)
    if family == "lfm2_vl":
        return lfm2_vl.make(**settings)
    if family == "mllama":
        model = mllama.make(**settings)
        with torch.no_grad():  # open the gates, so that images matter
            for name, parameter in model.named_parameters():
                if "gate" in name:
                    parameter.fill_(0.5)
        return model
    bounds = {"patch_size": 4, **BOUNDS, **settings}
    return qwen.make_model(family, preprocessor_config=bounds, video_preprocessor_config=bounds)


def save_pictures(folder: Path, number: int = 5) -> list[Path]:
    """Pictures of several sizes and formats."""
    kinds = ("png", "jpg", "webp", "bmp", "tiff")
    paths = [folder / f"{index}.{kinds[index % 5]}" for index in range(number)]
    for index, path in enumerate(paths):
        picture(*SIZES[index % 5], seed=index).save(path)
    return paths


def chat(*images: Any, question: str = "What?", answer: str = "Noise.") -> list[dict[str, Any]]:
    """A question about images and its answer."""
    parts = [{"type": "image", "image": image} for image in images]
    content = [*parts, {"type": "text", "text": question}] if parts else question
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def alone(model: VisionLanguageModel, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The inputs that the processor makes of a chat, with labels on the last answer."""
    batch = model.processor.apply_chat_template([messages], padding_side="right")
    before = model.processor.apply_chat_template([messages[:-1]], add_generation_prompt=True, padding_side="right")
    batch.pop("token_type_ids", None)  # without answers they would count the whole chat as PaliGemma's prefix
    labels = batch["input_ids"].clone()
    labels[:, : before["input_ids"].shape[1]] = -100
    labels[:, -1] = -100  # the line break behind the end of the turn
    return {**batch, "labels": labels}
