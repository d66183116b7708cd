import dataclasses
import json

import pytest
import torch

from liger_models import LigerGemma4, LigerGemma4Unified
from liger_models.arch.gemma4.model import Gemma4Config
from liger_models.arch.gemma4.processor import Gemma4Images
from liger_models.arch.gemma4.tower import Gemma4VisionConfig
from liger_models.arch.gemma4.unified import Gemma4UnifiedConfig, Gemma4UnifiedVisionConfig
from liger_models.base.processor import MediaSize

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

theirs = Late("transformers.models.gemma4.image_processing_pil_gemma4", "a transformers with a Pillow backend")

TEMPLATE = (
    "<bos>{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|image|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "more", [{}, {"do_normalize": True, "image_mean": [0.1, 0.2, 0.3]}, {"do_rescale": False}], ids=str
)
def test_pixels_are_transformers_bit_for_bit(more):
    settings = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70, **more}
    sizes = [(40, 40), (100, 30), (30, 101), (45, 40), (600, 4), (3, 700), (60, 42)]
    images = [picture(width, height, seed=width) for width, height in sizes]
    want = theirs.Gemma4ImageProcessorPil(**settings)(images, return_tensors="pt")
    ours = Gemma4Images(settings, 2, 3)
    pixels, positions = (torch.stack(column) for column in zip(*map(ours, images), strict=True))
    assert torch.equal(pixels, want["pixel_values"])
    assert torch.equal(positions, want["image_position_ids"])
    counts = [rows * columns for rows, columns in map(ours.tokens, sizes)]
    assert counts == list(want["num_soft_tokens_per_image"])
    assert ours.tokens((600, 4)) == (1, 70)


def test_large_patches_are_squares_of_small_ones():
    """What Gemma 4 Unified takes: the same pixels by rows of a square of patches, whose place is the square's."""
    settings = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    small, large = Gemma4Images(settings, 2, 3), Gemma4Images(settings, 2, 3, merge=True)
    for width, height in [(40, 40), (100, 30), (30, 101), (600, 4)]:
        image = picture(width, height, seed=width)
        patches, places = small(image)
        pixels = torch.zeros(2 * int(places[:, 1].max() + 1), 2 * int(places[:, 0].max() + 1), 3)
        for patch, (column, row) in zip(patches, places.tolist(), strict=True):
            if row >= 0:
                pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = patch.view(2, 2, 3)
        got, squares = large(image)
        assert (got.shape, squares.shape) == ((70, 6 * 6 * 3), (70, 2))
        rows, columns = large.tokens(image.size)
        assert squares.tolist() == [[c, r] for r in range(rows) for c in range(columns)] + [[-1, -1]] * (
            70 - rows * columns
        )
        for square, (column, row) in zip(got, squares.tolist(), strict=True):
            want = pixels[6 * row : 6 * row + 6, 6 * column : 6 * column + 6] if row >= 0 else torch.zeros(6, 6, 3)
            assert torch.equal(square.view(6, 6, 3), want)


def make(**settings):
    tokenizer = byte_tokens("<|image|>", "<|image>", "<image|>", "<bos>", "<start>", "<end>", "<|audio|>", "<|video|>")
    config = Gemma4Config(
        vocab_size=264, vocab_size_per_layer_input=264, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16, sliding_window=16,
        hidden_size_per_layer_input=4, layer_types=["sliding_attention", "full_attention"], image_token_id=256,
        boi_token_id=257, eoi_token_id=258, audio_token_id=262, video_token_id=263, eos_token_id=261, bos_token_id=259,
        vision_config=Gemma4VisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=8, patch_size=4, pooling_kernel_size=2, position_embedding_size=64,
        ),
    )  # fmt: skip
    model = LigerGemma4.from_config(config)
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<bos>", "chat_template": TEMPLATE}).encode(),
        "processor_config.json": json.dumps(
            {"image_processor": {"max_soft_tokens": 6, "patch_size": 4, "pooling_kernel_size": 2, **settings}}
        ).encode(),
    }
    return model


def test_a_conversation_with_gemma_4_unified():
    model = make()
    sizes = {each.name: getattr(model.config, each.name) for each in dataclasses.fields(Gemma4UnifiedConfig)}
    vision = Gemma4UnifiedVisionConfig(
        patch_size=4, pooling_kernel_size=2, mm_embed_dim=16, output_proj_dims=16, mm_posemb_size=8
    )
    other = LigerGemma4Unified.from_config(
        Gemma4UnifiedConfig(**sizes | {"hidden_size_per_layer_input": 0, "vision_config": vision})
    )
    other.assets = model.assets
    content = [{"type": "image", "image": encoded(picture(30, 20))}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Noise."}]
    batch = other.processor.apply_chat_template([messages], return_labels=True, padding_side="right")
    assert torch.equal(batch["input_ids"], model.processor.apply_chat_template([messages])["input_ids"])
    assert (batch["pixel_values"].shape, batch["image_position_ids"].shape) == ((1, 6, 192), (1, 6, 2))
    other(**batch).loss.backward()
    assert other.visual.pos_embed.weight.grad.any()


def written(tokens):
    return "<|image>" + tokens * "<|image|>" + "<image|>"


def test_a_conversation():
    model = make()
    content = [{"type": "image", "image": encoded(picture(30, 20))}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    batch = model.processor.apply_chat_template(
        [messages, [{"role": "user", "content": "Hi."}]], add_generation_prompt=True
    )
    texts = [
        model.tokenizer.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts == [
        f"<bos><start>user\n{written(6)}What?<end>\n<start>assistant\n",
        "<bos><start>user\nHi.<end>\n<start>assistant\n",
    ]
    assert (batch["pixel_values"].shape, batch["image_position_ids"].shape) == ((1, 24, 48), (1, 24, 2))
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2
    answered = [*messages, {"role": "assistant", "content": "Noise."}]
    batch = model.processor.apply_chat_template([answered], return_labels=True, padding_side="right")
    model(**batch).loss.backward()
    assert model.visual.pos_embed.weight.grad.any()


def test_images_of_several_sizes_and_what_is_written_for_them():
    processor = make().processor
    images = [picture(20, 20), picture(60, 10), picture(9, 40)]
    batch = processor(["<|image|> and <|image|>.", "<|image|>", "none"], images=images, bos=False)
    counts = [4, 6, 5]
    assert [processor.written(MediaSize(*image.size))[1] for image in images] == counts
    want = [f"{written(4)} and {written(6)}.", written(5), "none"]
    found = [
        processor.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert found == want
    assert [processor.written(MediaSize(*image.size))[0] for image in images] == [*map(written, counts)]
    assert torch.equal(processor.pixels(images)["pixel_values"], batch["pixel_values"])
    assert "pixel_values" not in processor(["none"])


def test_the_number_of_tokens_is_saved(tmp_path):
    model = make()
    model.processor.images.max_soft_tokens = 12
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())["image_processor"]
    assert (settings["max_soft_tokens"], settings["patch_size"]) == (12, 4)
    again = LigerGemma4.from_pretrained(tmp_path, progress=False)
    assert again.processor(["<|image|>"], images=picture(40, 30))["pixel_values"].shape == (1, 48, 48)


def test_what_does_not_fit_is_named():
    model = make()
    with pytest.raises(ValueError, match=r"one <\|image\|> for each of the 0 images, got 1"):
        model.processor(["<|image|>"])
    with pytest.raises(ValueError, match="audio and videos must be left out, got some"):
        model.processor(["a"], audio=[[0.0] * 9])
    with pytest.raises(ValueError, match="of type text or image, got 'audio'"):
        model.processor.apply_chat_template([{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}])
    with pytest.raises(ValueError, match="no placeholders of audio or videos, got 1"):
        model(**model.processor(["<|audio|>"]))
    with pytest.raises(ValueError, match="patch_size must be 4, got 16"):
        _ = make(patch_size=16).processor
    with pytest.raises(ValueError, match="max_soft_tokens must be a positive integer, got 'many'"):
        _ = make(max_soft_tokens="many").processor
    model = make()
    object.__setattr__(model.config, "boi_token_id", 9999)
    with pytest.raises(ValueError, match="must have the image token ids 9999, 256, 258, got 264 tokens"):
        _ = model.processor
    model = make()
    del model.assets["processor_config.json"]
    with pytest.raises(ValueError, match=r"preprocessor_config.json: must be among the checkpoint's files, got none"):
        _ = model.processor
