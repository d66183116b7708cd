import __future__

import ast
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_models import LigerMuseGlimmer
from liger_models.arch.muse_glimmer.model import MuseGlimmerConfig
from liger_models.arch.muse_glimmer.processor import MuseGlimmerImages, token_grid
from liger_models.arch.muse_glimmer.tower import MuseGlimmerVisionConfig
from liger_models.base.processor import MediaSize

from ..late import Late
from ..text.folders import byte_tokens
from .conftest import encoded, picture

pil = Late("transformers.image_processing_backends", "a transformers with a Pillow backend")

TOKENS = (
    "<|patch|>", "<|video|>", "<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_frame_separator|>",
    "<|vid_end|>", "<start>", "<end>",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|patch|>"
    "{% elif part.type == 'video' %}<|video|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def make(**settings):
    """A model with random weights whose tokenizer has bytes as tokens; an image has up to 16 tokens."""
    tokenizer = byte_tokens(*TOKENS)
    vision = MuseGlimmerVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
        pos_emb_height=4, pos_emb_width=4,
    )  # fmt: skip
    config = MuseGlimmerConfig(
        vocab_size=265, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=16, qk_scale_factor=1.5, image_token_id=256,
        video_token_id=257, bos_token_id=None, eos_token_id=264, out_hidden_size=64, projector_hidden_size=24,
        vision_config=vision,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LigerMuseGlimmer.from_config(config)
    images = {"max_image_tokens": 16, "patch_size": 4, **settings}
    videos = {"max_video_frame_tokens": 6, "patch_size": 4, "fps": 2.0, "num_frames": 8}
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"pad_token": "<end>", "chat_template": TEMPLATE}).encode(),
        "processor_config.json": json.dumps({"image_processor": images, "video_processor": videos}).encode(),
    }
    return model


@pytest.fixture(scope="module")
def theirs():
    """Functions of transformers' image and video processors, whose modules can't be imported without torchvision."""
    parts, root = {}, Path(pytest.importorskip("transformers").__file__).parent
    for part in ("image", "video"):
        source = root / f"models/muse_glimmer/{part}_processing_muse_glimmer.py"
        if not source.exists():
            pytest.skip("needs a transformers with Muse Glimmer")
        functions = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)]
        wanted = [node for node in functions if node.name in ("smart_resize", "patchify", "sample_frames")]
        scope = {"torch": torch, "math": math, "itertools": itertools}
        code = compile(
            ast.Module(wanted, []), str(source), "exec", __future__.annotations.compiler_flag, dont_inherit=True
        )
        exec(code, scope)
        parts[part] = SimpleNamespace(**scope)
    return SimpleNamespace(**parts)


def resized(theirs, image, most, patch=4):
    """transformers' size, Pillow backend and normalization, [3, height, width]."""
    height, width = theirs.image.smart_resize(image.height, image.width, 2 * patch, most)
    backend = pil.PilBackend()
    pixels = torch.from_numpy(backend.process_image(image, do_convert_rgb=True)).numpy()
    pixels = backend.resize(pixels, pil.SizeDict(height=height, width=width), resample=1)
    pixels = backend.normalize(backend.rescale(pixels, 1 / 255), [0.5] * 3, [0.5] * 3)
    return torch.from_numpy(pixels)


def test_pixels_are_transformers_bit_for_bit(theirs):
    ours = MuseGlimmerImages({"patch_size": 4, "max_image_tokens": 24})
    for width, height in [(40, 40), (100, 30), (30, 101), (45, 40), (600, 4), (3, 700), (5, 7)]:
        image = picture(width, height, seed=width)
        want = resized(theirs, image, 24)
        patches, grid = ours([image])
        flat, rows, columns = theirs.image.patchify(None, want[None], 4, 2)
        assert grid.tolist() == [1, rows, columns]
        assert torch.equal(patches, flat[0])


def test_frames_are_transformers(theirs):
    """The frames of a patch follow each other within it, and the last one is repeated."""
    ours = MuseGlimmerImages({"patch_size": 4, "max_video_frame_tokens": 6}, "video")
    for count in (1, 2, 5):
        frames = [picture(50, 30, seed=seed) for seed in range(count)]
        want = torch.stack([resized(theirs, frame, 6) for frame in frames])
        flat, *grid = theirs.video.patchify(None, want[None], 4, 2)
        patches, got = ours(frames)
        assert got.tolist() == grid
        assert torch.equal(patches, flat[0])
    with pytest.raises(ValueError, match=r"all frames one size, got \[\(3, 4\), \(4, 4\)\]"):
        ours([picture(4, 4), picture(3, 4)])
    with pytest.raises(ValueError, match="at least one frame"):
        ours([])


def test_sizes_are_transformers(theirs):
    for height in range(1, 400, 13):
        for width in range(2, 400, 17):
            for most in (1, 7, 144, 4096):
                rows, columns = theirs.image.smart_resize(height, width, 28, most)
                assert token_grid(height, width, 28, most) == (rows // 28, columns // 28)
    sizes = MuseGlimmerImages({})
    assert [sizes.tokens(size) for size in ((640, 480), (4000, 3000), (20, 20))] == [(17, 23), (55, 73), (1, 1)]


def test_sampled_frames_are_transformers(theirs):
    processor = SimpleNamespace(fps=2.0, num_frames=96)
    ours = MuseGlimmerImages({}, "video")
    for frames in (1, 2, 3, 25, 719, 4001):
        for fps in (1.0, 24000 / 1001, 30.0):
            for wanted in (None, 0.5, 7.5):
                metadata = SimpleNamespace(total_num_frames=frames, fps=fps)
                want = theirs.video.sample_frames(processor, metadata, temporal_patch_size=2, fps=wanted)
                assert ours.sampled(frames, fps, wanted) == want.tolist()
    for wrong in (0, -1.0, "2", float("inf")):
        with pytest.raises(ValueError, match="fps must be a positive number"):
            ours.sampled(9, 1.0, wrong)


def test_texts_are_transformers():
    """The tokens of an image, and of a video whose frames have times from the file or were chosen before."""
    processing = pytest.importorskip("transformers.models.muse_glimmer.processing_muse_glimmer").MuseGlimmerProcessor
    settings = SimpleNamespace(merge_size=2, temporal_patch_size=2, frame_timestamp_format="Time: {timestamp:.1f}s")
    names = {"image": "<|patch|>", "image_start": TOKENS[2], "image_end": TOKENS[3], "video": "<|video|>"}
    names |= {"video_start": TOKENS[4], "video_sep": TOKENS[5], "video_end": TOKENS[6]}
    names = {f"{name}_token": token for name, token in names.items()}
    hf = SimpleNamespace(**names, image_processor=settings, video_processor=settings)
    ours = make().processor
    for size in ((20, 20), (60, 10), (9, 40)):
        rows, columns = ours.images.tokens(size)
        want = processing.replace_image_token(hf, {"image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]])}, 0)
        assert ours.written(MediaSize(*size)) == (want, rows * columns)
    rows, columns = ours.videos.tokens((48, 32))
    for numbers, fps, size in (
        ([0, 6, 12, 18, 24], 10.0, MediaSize(48, 32, 5, 2.0, numbers=[0, 6, 12, 18, 24], file_fps=10.0)),
        (range(4), 3.0, MediaSize(48, 32, 4, 3.0)),
    ):
        deep = -(-len(numbers) // 2)
        metadata = SimpleNamespace(fps=fps, timestamps=[number / fps for number in numbers])
        inputs = {"video_grid_thw": torch.tensor([[deep, 2 * rows, 2 * columns]]), "video_metadata": [metadata]}
        want = processing.replace_video_token(hf, inputs, 0)
        assert ours.written(size) == (want, deep * rows * columns)


def test_a_conversation():
    model = make()
    content = [{"type": "image", "image": encoded(picture(30, 20))}, {"type": "text", "text": "What?"}]
    clip = {"type": "video", "video": [picture(16, 16, seed=seed) for seed in range(3)], "fps": 2.0}
    batch = model.processor.apply_chat_template(
        [[{"role": "user", "content": [*content, clip]}], [{"role": "user", "content": "Hi."}]],
        add_generation_prompt=True,
    )
    texts = [
        model.tokenizer.decode(row[mask == 1], skip_special_tokens=False)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    image, frame = "<|patch|>" * 6, "<|video|>" * 4
    assert texts == [
        f"<start>user\n<|image_start|>{image}<|image_end|>What?<|vid_start|>Time: 0.0s{frame}<|vid_frame_separator|>"
        f"Time: 1.0s{frame}<|vid_end|><end>\n<start>assistant\n",
        "<start>user\nHi.<end>\n<start>assistant\n",
    ]
    assert (batch["pixel_values"].shape, batch["image_grid_thw"].tolist()) == ((24, 96), [[1, 4, 6]])
    assert (batch["pixel_values_videos"].shape, batch["video_grid_thw"].tolist()) == ((32, 96), [[2, 4, 4]])
    assert model.generate(**batch, max_new_tokens=3, eos_token_id=[]).shape[0] == 2
    answered = [{"role": "user", "content": content}, {"role": "assistant", "content": "Noise."}]
    batch = model.processor.apply_chat_template([answered], return_labels=True, padding_side="right")
    model(**batch).loss.backward()
    assert model.visual.pos_embed.weight.grad.any()


def test_limits_of_tokens_are_saved(tmp_path):
    model = make()
    model.processor.images.max_tokens = 4
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["image_processor"] == {"max_image_tokens": 4, "patch_size": 4}
    assert settings["video_processor"]["max_video_frame_tokens"] == 6
    again = LigerMuseGlimmer.from_pretrained(tmp_path, progress=False)
    assert again.processor(["<|patch|>"], images=picture(40, 40))["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert repr(again.processor) == repr(model.processor)


def test_what_does_not_fit_is_named():
    model = make()
    processor, frames = model.processor, [picture(8, 8)]
    with pytest.raises(ValueError, match=r"one <\|patch\|> for each of the 0 images, got 1"):
        processor(["<|patch|>"])
    with pytest.raises(ValueError, match=r"one <\|video\|> for each of the 1 videos, got 0"):
        processor(["a"], videos=[frames], fps=1.0)
    for fps in (None, 0, [1.0, 2.0]):
        with pytest.raises(ValueError, match="fps must be a positive number, or one for each of the 1 videos, got"):
            processor(["<|video|>"], videos=[frames], fps=fps)
    with pytest.raises(ValueError, match="a video must be a list of images, its frames, got str"):
        processor(["<|video|>"], videos=["a.mp4"], fps=1.0)
    with pytest.raises(ValueError, match="patch_size must be 4, got 14"):
        _ = make(patch_size=14).processor
    with pytest.raises(ValueError, match="max_image_tokens must be a positive integer, got 'many'"):
        _ = make(max_image_tokens="many").processor
    model = make()
    model.assets["tokenizer.json"] = model.assets["tokenizer.json"].replace(b"<|vid_end|>", b"<|vid_fin|>")
    with pytest.raises(ValueError, match=r"must have the tokens .*, but lacks <\|vid_end\|>"):
        _ = model.processor
    model = make()
    del model.assets["processor_config.json"]
    with pytest.raises(ValueError, match=r"preprocessor_config.json: must be among the checkpoint's files, got none"):
        _ = model.processor
