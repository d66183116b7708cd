import importlib
import json
import sys
import types
from unittest import mock

import pytest
import torch
from PIL import Image

from liger_models import AutoLigerProcessor, LigerLlama4
from liger_models.arch.llama4.processor import Llama4Images, canvases
from liger_models.arch.llama4.tower import Llama4Config, Llama4VisionConfig
from liger_models.base.processor import MediaSize

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

processing = Late("transformers.models.llama4.processing_llama4")

TEMPLATE = (
    "<bos>{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|image|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
SPECIAL = [
    "<bos>", "<start>", "<end>", "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
    "<|tile_y_separator|>",
]  # fmt: skip
SIDE = 28


@pytest.fixture(scope="module")
def theirs():
    """transformers' module. Its image processor needs torchvision, of which this has the two functions besides resize.

    Torchvision's resize of bytes differs from Pillow's by rounding, so Pillow's takes its place.
    """
    functional = types.ModuleType("torchvision.transforms.v2.functional")
    functional.pad = lambda images, padding, fill: torch.nn.functional.pad(images, (0, padding[2], 0, padding[3]))

    def normalize(image, mean, std, inplace):
        mean, std = (torch.tensor(x, dtype=image.dtype)[:, None, None] for x in (mean, std))
        return image.sub(mean).div_(std)

    functional.normalize = normalize
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules = {name: types.ModuleType(name) for name in names} | {functional.__name__: functional}
    modules[names[2]].functional = functional
    backends = importlib.import_module("transformers.image_processing_backends")
    with mock.patch.dict(sys.modules, modules):
        module = importlib.import_module("transformers.models.llama4.image_processing_llama4")
    with mock.patch.object(backends, "tvF", functional, create=True):
        yield module


def their_tiles(theirs, images, **settings):
    """Tiles, and rows and columns of tiles, of each image."""

    class ByPillow(theirs.Llama4ImageProcessor):
        def __init__(self):
            pass

        def resize(self, image, size, **_):
            rows = [Image.fromarray(row.permute(1, 2, 0).numpy()) for row in image]
            rows = [row.resize((size.width, size.height), Image.Resampling.BILINEAR) for row in rows]
            return torch.stack([torch.frombuffer(bytearray(row.tobytes()), dtype=torch.uint8) for row in rows]).view(
                len(rows), size.height, size.width, 3
            ).permute(0, 3, 1, 2)  # fmt: skip

    size = importlib.import_module("transformers.image_utils").SizeDict(height=SIDE, width=SIDE)
    pixels = [
        torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
        for image in images
    ]
    options = {
        "do_resize": True, "size": size, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_patches": 16,
        "resize_to_max_canvas": False, "disable_grouping": True, "return_tensors": None, **settings,
    }  # fmt: skip
    made = ByPillow()._preprocess([image.permute(2, 0, 1).contiguous() for image in pixels], **options)
    return list(zip(made["pixel_values"], [tuple(ratio.tolist()) for ratio in made["aspect_ratios"]], strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_patches": 5, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25], "rescale_factor": 1 / 127},
        {"max_patches": 4, "resize_to_max_canvas": True},
    ],
    ids=str,
)
def test_pixels_are_transformers_bit_for_bit(theirs, settings):
    """Images of many shapes, larger and smaller than all arrangements of tiles, hardly wide, of a tile's very size."""
    sides = (1, 9, 28, 29, 41, 56, 84, 113, 200)
    sizes = [(width, height) for width in sides for height in sides if (width + height) % 3 != 2]
    images = [picture(width, height, seed=width) for width, height in [*sizes, (500, 2), (3, 450), (460, 470)]]
    ours = Llama4Images({"size": {"height": SIDE, "width": SIDE}, **settings}, SIDE)
    seen = set()
    for image, (want, arrangement) in zip(images, their_tiles(theirs, images, **settings), strict=True):
        got, tiles = ours(image)
        assert tiles == arrangement
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, want.view_as(got))
        seen.add(tiles)
    assert len(seen) >= 7


@pytest.mark.parametrize("most", [1, 5, 16])
def test_arrangements_are_transformers(theirs, most):
    size = importlib.import_module("transformers.image_utils").SizeDict(height=336, width=336)
    theirs.find_supported_resolutions.cache_clear()
    resolutions = theirs.find_supported_resolutions(most, size)
    assert [(rows * 336, columns * 336) for rows, columns in canvases(most)] == resolutions
    images = Llama4Images({"size": {"height": 336, "width": 336}, "max_patches": most}, 336)
    for height, width in [(480, 640), (300, 2000), (200, 300), (336, 336), (4000, 3000), (1, 999), (672, 673)]:
        want = theirs.get_best_fit((height, width), torch.tensor(resolutions)) // 336
        assert images.arrange(height, width) == tuple(want.tolist())


def make(**settings):
    tokenizer = byte_tokens(*SPECIAL)
    config = Llama4Config(
        vocab_size=265, hidden_size=32, intermediate_size=40, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, attention_chunk_size=16,
        interleave_moe_layer_step=2, no_rope_layer_interval=2, image_token_index=260, boi_token_index=261,
        eoi_token_index=262, bos_token_id=256, eos_token_id=258, pad_token_id=258,
        vision_config=Llama4VisionConfig(
            hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16,
            patch_size=4, projector_input_dim=24, projector_output_dim=24, vision_output_dim=24,
        ),
    )  # fmt: skip
    model = LigerLlama4.from_config(config)
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<bos>", "chat_template": TEMPLATE}).encode(),
        "preprocessor_config.json": json.dumps({"size": {"height": 16, "width": 16}, **settings}).encode(),
    }
    return model


def texts_of(model, batch):
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [model.tokenizer.decode(row[mask == 1], skip_special_tokens=False) for row, mask in rows]


def written(rows, columns):
    return processing.Llama4Processor._prompt_split_image(None, (rows, columns), 4)


def test_a_conversation():
    model = make()
    parts = [{"type": "image", "image": encoded(picture(40, 20))}, {"type": "image", "image": picture(12, 16)}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    assert texts_of(model, batch) == [
        f"<bos><start>user\n{written(2, 3)}{written(1, 1)}What?<end>\n<start>assistant\n",
        "<bos><start>user\nHi.<end>\n<start>assistant\n",
    ]
    assert batch["pixel_values"].shape == (2 * 3 + 1 + 1, 3, 16, 16)
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2
    answered = [*messages, {"role": "assistant", "content": "Noise."}]
    batch = model.processor.apply_chat_template([answered], return_labels=True, padding_side="right")
    model(**batch).loss.backward()
    assert model.visual.pos_embed.weight.grad.any()


def test_what_is_written_for_a_size_and_pixels_of_a_row():
    """Tokens of a data set are counted without reading pixels."""
    processor = make().processor
    images = [picture(40, 20), picture(9, 90), picture(5, 5)]
    batch = processor(["<|image|> and <|image|>.", "<|image|>", "none"], images=images, bos=False)
    sizes = [processor.written(MediaSize(image.width, image.height)) for image in images]
    assert [text.count("<|patch|>") for text, _ in sizes] == [count for _, count in sizes]
    assert texts_of(make(), batch) == [f"{sizes[0][0]} and {sizes[1][0]}.", sizes[2][0], "none"]
    assert torch.equal(processor.pixels(images)["pixel_values"], batch["pixel_values"])
    assert processor.pixels([]) == {}
    assert len(batch["pixel_values"]) * 4 == sum(count for _, count in sizes)


def test_settings_are_saved_and_read(tmp_path):
    model = make(max_patches=4)
    assert model.processor.images.arrange(200, 200) == (2, 2)
    model.processor.images.max_patches = 9
    model.processor.save_pretrained(tmp_path)
    again = AutoLigerProcessor.from_pretrained(tmp_path)
    assert again.images.arrange(200, 200) == (3, 3)
    assert repr(again.images) == "Llama4Images(side=16, max_patches=9)"


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match=r"one <\|image\|> for each of the 0 images, got 1"):
        model.processor(["<|image|>"])
    for settings, message in (
        ({"do_normalize": False}, "do_normalize must be True, got False"),
        ({"size": {"height": 20, "width": 20}}, "size must be .*16.*, got .*20"),
        ({"max_patches": 0.5}, "max_patches must be a positive integer, got 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            _ = make(**settings).processor
    model = make()
    object.__setattr__(model.config, "image_token_index", 9999)
    with pytest.raises(ValueError, match="must have the image token ids 9999, got 265 tokens"):
        _ = model.processor
    model = make()
    model.assets["tokenizer.json"] = byte_tokens(*SPECIAL[:-1]).to_str().encode()
    with pytest.raises(ValueError, match=r"must have the tokens .*, but lacks <\|tile_y_separator\|>\."):
        _ = model.processor
    model = make()
    del model.assets["preprocessor_config.json"]
    with pytest.raises(ValueError, match=r"preprocessor_config.json: must be among the checkpoint's files, got none"):
        _ = model.processor
