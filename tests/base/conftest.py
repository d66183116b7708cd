"""A tokenizer with placeholders and a chat template, and pictures."""

import io
import json

import pytest
import torch
from PIL import Image

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]
GLM = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
"""The tokens around images and videos of GLM-4.1V, in place of those in `TEMPLATE`."""


def around(arch: str, kind: str) -> tuple[str, str]:
    """The tokens around the placeholder of an image or a video."""
    if not arch.startswith("glm4v"):
        return "<|vision_start|>", "<|vision_end|>"
    return GLM[2 * (kind == "video")], GLM[2 * (kind == "video") + 1]


def tokenizer_files(arch: str = "qwen2_vl") -> dict[str, bytes]:
    """A tokenizer of bytes, with placeholders from id 256 on."""
    from ..text.folders import byte_tokens  # not before pytest_configure: it imports the package

    tokenizer = byte_tokens(*SPECIAL, *(GLM if arch.startswith("glm4v") else []))
    template = TEMPLATE
    for kind in ("image", "video"):
        pad = f"<|{kind}_pad|>"
        template = template.replace(pad.join(around("", kind)), pad.join(around(arch, kind)))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": template}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def make_model(arch: str, **assets: dict):
    """A model with random weights, a tokenizer, and preprocessor settings from keyword arguments."""
    from liger_models.arch import get_arch  # these not before pytest_configure: they define kernels
    from liger_models.convert.config_map import read_config

    from ..arch.families import tiny

    sizes = tiny(arch)[next(iter(tiny(arch)))]
    changes = {"image_token_id": 256, "video_token_id": 257, "text_config": {**sizes["text_config"], "vocab_size": 262}}
    if arch.startswith("glm4v"):
        changes["text_config"]["vocab_size"] += len(GLM)
        changes |= {"video_start_token_id": 264, "video_end_token_id": 265}
    model_class = get_arch(arch)
    config = read_config(model_class.config_class, {**sizes, **changes, "model_type": arch}, strict=True)
    torch.manual_seed(0)
    model = model_class.from_config(config)
    model.assets = tokenizer_files(arch) | {
        f"{name}.json": json.dumps(value).encode() for name, value in assets.items()
    }
    return model


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """An image of noise on a gradient, for which no resize is trivial."""
    generator = torch.Generator().manual_seed(seed)
    channels = len(Image.new(mode, (1, 1)).getbands())
    noise = torch.randint(0, 128, (height, width, channels), generator=generator)
    pixels = (noise + torch.arange(width)[None, :, None] * 127 // width).to(torch.uint8)
    return Image.frombytes(mode, (width, height), bytes(pixels.flatten().tolist()))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


@pytest.fixture(params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def arch(request: pytest.FixtureRequest) -> str:
    return request.param
