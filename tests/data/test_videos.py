"""Videos in data: frames are chosen as transformers chooses them, from headers, and decoded where a row is made."""

import itertools
import json
import os
import sys
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from liger_models import PackedDataset, PackedLoader
from liger_models.arch._glm4v.processor import Glm4vVideos
from liger_models.arch._qwen_vl.processor import QwenVLImages
from liger_models.base.processor import MediaSize

from ..base.conftest import picture
from .examples import write
from .vision import chat, make_model, save_pictures

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "muse_glimmer")
ANSWER = {"role": "assistant", "content": "Noise."}
CASES = tuple(itertools.product((2, 3, 5, 8, 25, 100, 719, 4001), (1.0, 9.99, 24000 / 1001, 30.0), (0.5, 2.0, 7.5)))
"""Frames of a file, their rate, and the rate to sample."""
LIMITS = {"min_frames": 4, "max_frames": 60}
FROM_THE_FIRST = {
    (2, 30.0, 2.0): [0, 1],
    (3, 30.0, 2.0): [0, 1],
    (25, 10.0, 2.0): [0, 6, 12, 18],
    (25, 10.0, 7.5): [0, 1, 2, 4, 5, 6, 8, 9, 11, 12, 13, 15, 16, 18, 19, 20, 22, 23],
    (100, 24000 / 1001, 2.0): [0, 12, 25, 37, 50, 62, 75, 87],
    (719, 24000 / 1001, 0.5): [0, 51, 102, 154, 205, 256, 308, 359, 410, 462, 513, 564, 616, 667],
}
"""Some cases -> the frames that transformers' video processor of Qwen2-VL chooses, which needs torchvision."""


def test_frames_are_those_of_transformers():
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    theirs = SimpleNamespace(**LIMITS, num_frames=None, fps=None)

    def sample(frames, rate, **how):
        metadata = SimpleNamespace(total_num_frames=frames, fps=rate)
        return Qwen3VLVideoProcessor.sample_frames(theirs, metadata, **how).tolist()

    processor = make_model("qwen3_vl").processor
    for frames, fps, wanted in CASES:
        want = sample(frames, fps, fps=wanted)
        assert QwenVLImages(LIMITS, of="video").sampled(frames, fps, wanted) == want
        assert QwenVLImages({**LIMITS, "fps": wanted}, of="video").sampled(frames, fps) == want
        times = Qwen3VLProcessor._calculate_timestamps(None, list(want), fps, 2)
        text = "".join(f"<{time:.1f} seconds><|vision_start|>f<|vision_end|>" for time in times)
        assert processor._timed("f", want, fps) == text
    assert QwenVLImages({"num_frames": 6}, of="video").sampled(25, 10.0) == sample(25, 10.0, num_frames=6)
    for (frames, fps, wanted), want in FROM_THE_FIRST.items():
        assert QwenVLImages(LIMITS, of="frame").sampled(frames, fps, wanted) == want
        assert QwenVLImages({**LIMITS, "fps": wanted}, of="frame").sampled(frames, fps) == want
    assert len(QwenVLImages(LIMITS, of="frame").sampled(4001, 30.0, 0.5)) == 60
    fixed = QwenVLImages({"num_frames": 6}, of="frame")
    assert fixed.sampled(25, 10.0) == [0, 4, 8, 12, 16, 20]
    for wrong in (0, -1.0, "2", float("inf")):
        with pytest.raises(ValueError, match="fps must be a positive number"):
            fixed.sampled(25, 10.0, wrong)
    with pytest.raises(ValueError, match=r"at least 2 frames, got 0 of 1\. Pass an image as an image"):
        fixed.sampled(1, 10.0)


def test_frames_of_glm4v_are_those_of_transformers():
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor

    ours = make_model("glm4v").processor
    written = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2), image_token="<|image_pad|>",
        replace_frame_token_id=lambda *time, **tokens: Glm4vProcessor.replace_frame_token_id(written, *time, **tokens),
    )  # fmt: skip
    for longest, (frames, fps, wanted) in itertools.product((10, 300), CASES):
        theirs = SimpleNamespace(fps=1.5, max_duration=longest)
        metadata = SimpleNamespace(total_num_frames=frames, fps=fps, duration=frames / fps)
        videos = Glm4vVideos({"fps": 1.5, "max_duration": longest})
        want = Glm4vVideoProcessor.sample_frames(theirs, metadata, fps=wanted).tolist()
        assert videos.sampled(frames, fps, wanted) == want
        assert videos.sampled(frames, fps) == Glm4vVideoProcessor.sample_frames(theirs, metadata).tolist()
        metadata.timestamps = [number / fps for number in want]
        grid = {"video_grid_thw": torch.tensor([[len(want) // 2, 2, 2]]), "video_metadata": [metadata]}
        text = Glm4vProcessor.replace_video_token(written, grid, 0)
        assert ours._timed("<|image_pad|>", want, fps) == text
        assert ours.written(MediaSize(8, 8, len(want), numbers=want, file_fps=fps)) == (text, len(want) // 2)
    with pytest.raises(ValueError, match="Glm4vVideos: fps must be a positive number"):
        videos.sampled(25, 10.0, 0)


def save_clip(file, frames=25, size=(48, 32), kind=None):
    """A clip of 10 frames per second, which get brighter."""
    av = pytest.importorskip("av")
    with av.open(file, "w", format=kind) as out:
        stream = out.add_stream("mpeg4", rate=10)
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        for number in range(frames):
            image = picture(*size, seed=number).point(lambda value, number=number: value // 8 + number * 8)
            out.mux(stream.encode(av.VideoFrame.from_image(image)))
        out.mux(stream.encode())
    return file


def emptied(content):
    """The content of an MP4 file with zeros in place of the later half of its packets; the header is whole."""
    first = content.index(b"mdat") + 4
    half = (int.from_bytes(content[first - 8 : first - 4], "big") - 8) // 2
    return content[: first + half] + bytes(half) + content[first + 2 * half :]


def decoded(file):
    """All frames, by a reader of its own."""
    with pytest.importorskip("av").open(file) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make_model(request.param).double()


@pytest.fixture(scope="module")
def qwen():
    return make_model("qwen2_5_vl").double()


@pytest.fixture
def make(tmp_path):
    """A data set in a cache of its own."""

    def made(source, model, **options):
        given = {"length": 160, "cache_dir": tmp_path / "cache", "progress": False, "shuffle": False, **options}
        return PackedDataset(source, model.processor, **given)

    return made


def about(*parts, **columns):
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}, ANSWER], **columns}


def alone(model, file, numbers, rate):
    """The inputs that the processor makes of frames that are chosen already."""
    frames = decoded(file)
    part = {"type": "video", "video": [frames[number] for number in numbers], "fps": rate}
    batch = model.processor.apply_chat_template([about(part)["messages"]], padding_side="right", return_labels=True)
    batch["labels"][:, -1] = -100  # the line break behind the end of the turn
    return batch


@pytest.mark.cases(3)
def test_packed_videos_have_the_loss_of_their_documents_alone(model, make, tmp_path):
    """Beside an image and a text in one row; frames are counted in a header (mp4) or by packets (Matroska)."""
    clips = [save_clip(tmp_path / "a.mp4", 25), save_clip(tmp_path / "b.mkv", 16, (32, 64))]
    (image,) = save_pictures(tmp_path, 1)
    rows = [about({"type": "video", "video": clips[0]}), about({"type": "video", "video": clips[1]})]
    rows += [{"messages": chat(image)}, {"messages": chat(question="None?")}]
    (batch,) = make(rows, model, length=600)
    assert len(batch["video_grid_thw"]) == 2
    assert len(batch["image_grid_thw"]) == 1
    assert not {model.config.video_token_id, model.config.image_token_id} & set(batch["labels"].flatten().tolist())
    singles = [next(iter(make([row], model, length=600))) for row in rows]
    loss = lambda batch: model(**batch, num_items_in_batch=1).loss
    torch.testing.assert_close(loss(batch), sum(map(loss, singles)), rtol=1e-9, atol=0)
    for clip, count, single in zip(clips, (25, 16), singles, strict=False):
        numbers = model.processor.sampled(count, 10.0)
        assert 2 <= len(numbers) < count
        whole = alone(model, clip, numbers, len(numbers) / count * 10)
        for name in ("pixel_values_videos", "video_grid_thw"):
            assert torch.equal(single[name], whole[name])
        if not model.frames_apart:  # a list of frames does not say when they were in the file
            tokens = whole["input_ids"].shape[1]
            assert torch.equal(single["input_ids"][:, :tokens], whole["input_ids"])
            torch.testing.assert_close(loss(single), loss(whole), rtol=1e-9, atol=0)


def test_every_spelling_is_the_same_video(qwen, make, tmp_path):
    clip = save_clip(tmp_path / "a b.mp4")
    part = {"type": "video"}
    marked = {"messages": [{"role": "user", "content": "<video>What?"}, ANSWER], "videos": [clip.name]}
    in_files = [
        about({**part, "video": str(clip)}), about({**part, "video": clip.name}), about({**part, "path": clip.name}),
        about({**part, "url": clip.as_uri()}), about({"type": "video_url", "video_url": {"url": clip.name}}),
        about(part, videos=[clip.name]), about(part, video=clip.name), about(videos=[clip.name]), marked,
        about({**part, "video": clip.name, "fps": 2}),
    ]  # fmt: skip
    in_memory = [about({**part, "video": clip.read_bytes()}), about(part, videos=[{"bytes": clip.read_bytes()}])]
    batches = list(make(write(tmp_path / "train.jsonl", in_files), qwen, length=64))
    batches += list(make(in_memory, qwen, length=64))
    assert len(batches) == len(in_files) + len(in_memory)
    for batch in batches:
        assert batch.keys() == batches[0].keys()
        assert all(torch.equal(batch[name], batches[0][name]) for name in batch)
    denser = next(iter(make([about({**part, "video": clip, "fps": 8})], qwen, length=200)))
    assert denser["video_grid_thw"][0, 0] > batches[0]["video_grid_thw"][0, 0]


def test_lengths_are_known_before_frames_are_decoded_in_workers(qwen, make, tmp_path):
    clip = save_clip(tmp_path / "a.mp4")
    good = clip.read_bytes()
    clip.write_bytes(emptied(good))  # a header and no frames
    source = write(tmp_path / "train.jsonl", [about({"type": "video", "video": clip.name})] * 3)
    data = make(source, qwen, length=64)
    written = clip.stat()
    clip.write_bytes(good)
    os.utime(clip, ns=(written.st_atime_ns, written.st_mtime_ns))  # or another file would be noticed
    batches = list(PackedLoader(data, num_workers=1))
    assert [len(batch["video_grid_thw"]) for batch in batches] == [1, 1, 1]
    (resumed,) = iter_from(make(source, qwen, length=64), data, 2)
    assert torch.equal(resumed["pixel_values_videos"], batches[2]["pixel_values_videos"])


def iter_from(fresh, data, taken):
    """What a data set gives that resumes another's state after some batches."""
    loader = PackedLoader(data, num_workers=0)
    list(islice(loader, taken))
    fresh.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return list(fresh)


def test_what_is_broken_is_named_or_skipped(qwen, make, tmp_path):
    clips = [save_clip(tmp_path / f"{number}.mp4") for number in range(3)]
    rows = [about({"type": "video", "video": clip.name}) for clip in clips]
    source = write(tmp_path / "train.jsonl", rows)
    good = clips[1].read_bytes()
    for damage, found in ((None, "No such file"), (b"no video", "must be a whole video file")):
        clips[1].unlink() if damage is None else clips[1].write_bytes(damage)
        with pytest.raises(ValueError, match=rf"train.jsonl, line 2: a video must be a file.*{found}") as error:
            make(source, qwen, length=64)
        assert str(clips[1]) in str(error.value)
        with pytest.warns(UserWarning, match=r"1 examples have broken images or videos.*line 2"):
            assert len(list(make(source, qwen, length=64, broken_media="skip"))) == 2
    # The header says 25 frames, and the packets hold nothing.
    clips[1].write_bytes(emptied(good))
    data = make(source, qwen, length=64, cache_dir=tmp_path / "other")
    with pytest.raises(ValueError, match=r"train.jsonl, line 2: a video must be .*1\.mp4"):
        list(data)
    data = make(source, qwen, length=64, cache_dir=tmp_path / "another", broken_media="skip")
    with pytest.warns(
        UserWarning, match=r"line 2: .* The labels of documents with broken images or videos are removed"
    ):
        batches = list(data)
    assert [(batch["labels"] != -100).any().item() for batch in batches] == [True, False, True]
    assert torch.equal(batches[1]["video_grid_thw"], batches[0]["video_grid_thw"])


def test_what_cannot_be_read_is_refused(qwen, make, tmp_path):
    clip, still = str(save_clip(tmp_path / "a.mp4")), save_clip(tmp_path / "b.mp4", 1)
    (image,) = save_pictures(tmp_path, 1)
    video = lambda **keys: about({"type": "video", **keys})
    for row, message in (
        (video(video="https://example.com/a.mp4"), "got the URL https://example.com/a.mp4. Download it"),
        (video(video=[image]), "got list"),
        (video(video=picture(8, 8)), "a video must be a file that can be read, got: an image. Pass images"),
        (video(video=clip, fps=0), "fps must be a positive number of frames per second, got 0"),
        (video(video=clip, max_pixels=9), "a part of type video must not have a size of its own, got max_pixels"),
        (video(video=still), "must have at least 2 frames, got 0 of 1"),
        (about({"type": "video"}, {"type": "video"}, videos=[clip]), "a place for each of its 1 videos.*got 2"),
        ({"text": "<|video_pad|>"}, "a place for each of its 0 videos, .*got 1"),
        (
            about({"type": "video", "video": clip}, {"type": "text", "text": "<|video_pad|>"}),
            "images and videos, got 2",
        ),
    ):
        with pytest.raises(ValueError, match=rf"example 1: .*{message}"):
            make([row], qwen)


def test_without_pyav(qwen, make, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"")
    with pytest.raises(ImportError, match=r"needs PyAV.*pip install 'liger_models\[video\]'"):
        make([about({"type": "video", "video": tmp_path / "a.mp4"})], qwen)
