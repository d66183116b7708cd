"""Images in data: packed with texts, each row is what its documents are alone, and every spelling is the same image."""

import base64
import json
import os
import shutil
from io import BytesIO
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image

from liger_models import PackedDataset, PackedLoader
from liger_models.base.images import BLOCKS, read_image
from liger_models.data import PromptDataset, preference_batch, tokens
from liger_models.data.media import Medium

from ..base.conftest import picture
from .examples import Stream, write
from .vision import FAMILIES, alone, chat, make_model, save_pictures


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
        given = {"length": 96, "cache_dir": tmp_path / "cache", "progress": False, **options}
        return PackedDataset(source, model.processor, **given)

    return made


def summed(model, batch):
    return model(**batch, num_items_in_batch=1).loss


def total_alone(model, chats):
    return sum(summed(model, alone(model, messages)) for messages in chats)


@pytest.mark.cases(5)
def test_packed_rows_have_the_loss_of_their_documents_alone(model, make, tmp_path):
    paths = save_pictures(tmp_path)
    chats = [
        chat(paths[0], answer="A."),
        chat(question="Nothing to see?", answer="No."),
        chat(paths[1], paths[2], answer="Two."),
        chat(paths[3]),
        [*chat(paths[4]), {"role": "user", "content": "And?"}, {"role": "assistant", "content": "That."}],
    ]
    source = write(
        tmp_path / "train.jsonl",
        [{"messages": json.loads(json.dumps(messages, default=lambda path: path.name))} for messages in chats],
    )
    data = make(source, model, length=256, batch_size=2)
    batches = list(data)
    assert sum(len(batch["cu_seqlens"]) - 1 for batch in batches) > len(chats)
    assert any("pixel_values" in batch for batch in batches)
    tokens = {model.tokenizer.backend.token_to_id(token) for token in model.processor.media_tokens}
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    assert not tokens & set(labels.tolist())
    want = total_alone(model, chats[:4])
    whole = alone(model, chats[4])
    first = len(model.processor.apply_chat_template([chats[4][:1]], add_generation_prompt=True)["input_ids"][0])
    answered = len(model.processor.apply_chat_template([chats[4][:2]])["input_ids"][0])
    whole["labels"][:, first : answered - 1] = whole["input_ids"][:, first : answered - 1]
    want = want + summed(model, whole)
    got = sum(summed(model, batch) for batch in batches)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


def test_parts_of_a_tokenization_are_joined_with_their_images(qwen, make, tmp_path, monkeypatch):
    """Files and contents, of images that are alike and not, and an example that is skipped."""
    paths = save_pictures(tmp_path)
    content = "data:image/png;base64," + base64.b64encode(paths[0].read_bytes()).decode()
    chats = [chat(paths[0]), chat(paths[1], paths[2]), chat(content), chat(tmp_path / "none.png"), chat(paths[0])]
    source = [{"messages": json.loads(json.dumps(messages, default=str))} for messages in chats]
    options = {"broken_media": "skip", "shuffle": False}
    datas = []
    for seconds in (60.0, 0.0):
        monkeypatch.setattr(tokens, "PART_SECONDS", seconds)
        with pytest.warns(UserWarning, match="1 examples have broken images or videos and are left out"):
            datas.append(make(source, qwen, cache_dir=tmp_path / f"cache-{seconds}", **options))
    whole, joined = datas
    assert joined.state_dict() == whole.state_dict()
    for want, got in zip(whole, joined, strict=True):
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want)


def test_packed_rows_have_the_loss_of_transformers(make, tmp_path):
    """Its processor and its model, each document by itself."""
    from transformers import AutoModelForImageTextToText, Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    ours = make_model("gemma3").double()
    ours.save_pretrained(tmp_path / "model")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float64)
    names = {"boi_token": "<boi>", "image_token": "<img>", "eoi_token": "<eoi>"}
    file = str(tmp_path / "model" / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, extra_special_tokens=names)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, resample=2)
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4)
    paths = save_pictures(tmp_path, 4)
    chats = [chat(paths[0]), chat(paths[1], paths[2], answer="Two."), chat(question="None?"), chat(paths[3])]
    want = 0.0
    for messages in chats:
        text = ours.tokenizer.apply_chat_template(messages, tokenize=False)
        pictures = [Image.open(part["image"]).convert("RGB") for part in messages[0]["content"] if "image" in part]
        batch = processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt")
        labels = alone(ours, messages)["labels"]
        want += theirs(**batch, labels=labels).loss * (labels != -100).sum()
    got = sum(summed(ours, batch) for batch in make([{"messages": messages} for messages in chats], ours, length=160))
    torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=0)


@pytest.mark.cases(8)
def test_tokens_and_pixels_are_those_of_the_processor(model, make, tmp_path):
    """Without a second image in the row: the very inputs of a call."""
    for index, path in enumerate(save_pictures(tmp_path)):
        messages = chat(path, question="Which?" * index)
        want = alone(model, messages)
        size = want["input_ids"].shape[1]
        got = next(iter(make([{"messages": messages}], model, length=size)))
        assert torch.equal(got["input_ids"], want["input_ids"])
        for name in ("pixel_values", "image_grid_thw", "aspect_ratio_ids"):
            assert (name in got) == (name in want)
            if name in got:  # a row has tiles in one tensor, and a call of Idefics3's processor those of each text
                assert torch.equal(got[name], want[name].flatten(0, want[name].dim() - got[name].dim()))


def spellings(path: Path):
    """One image in every spelling, as a whole example about it."""
    content = path.read_bytes()
    data = "data:image/png;base64," + base64.b64encode(content).decode()
    part = lambda **keys: {"messages": [{"role": "user", "content": [keys, TEXT]}, ANSWER]}
    column = lambda **columns: {"messages": [{"role": "user", "content": [{"type": "image"}, TEXT]}, ANSWER], **columns}
    marked = lambda text, **columns: {"messages": [{"role": "user", "content": text}, ANSWER], **columns}
    return [
        part(type="image", image=str(path)),
        part(type="image", image=path.name),
        part(type="image", path=path.name, text=None),
        part(type="image", url=path.as_uri()),
        part(type="image_url", image_url={"url": data}),
        part(type="image", base64=data),
        part(type="image", base64=data.partition(",")[2]),
        part(type="image_url", image_url={"url": path.name, "detail": "low"}),
        part(image_url=path.name),
        part(image={"bytes": None, "path": path.name}),
        column(images=[path.name]),
        column(image=data),
        column(images=[{"path": path.name}], image=None),
        marked("<image>What?", images=[path.name]),
        marked("What?", images=[path.name]),
    ], [
        part(type="image", image=content),
        part(type="image", image=path),
        part(type="image", image={"bytes": content, "path": "elsewhere.png"}),
        part(type="image", bytes=content),
        part(type="image", image=Image.open(path)),
        column(images=[read_image(path)]),
    ]


TEXT = {"type": "text", "text": "What?"}
ANSWER = {"role": "assistant", "content": "Noise."}


def test_every_spelling_is_the_same_image(qwen, make, tmp_path, monkeypatch):
    path = tmp_path / "a b.png"
    picture(40, 28).save(path)
    in_files, in_memory = spellings(path)
    want = next(iter(make([{"messages": chat(path)}], qwen)))
    batches = list(make(write(tmp_path / "train.jsonl", in_files), qwen, shuffle=False, length=48))
    (tmp_path / "train.json").write_text(json.dumps(in_files))
    batches += list(make(tmp_path / "train.json", qwen, shuffle=False, length=48))
    monkeypatch.chdir(tmp_path)
    batches += list(make(in_memory, qwen, shuffle=False, length=48))
    assert len(batches) == 2 * len(in_files) + len(in_memory)
    for batch in batches:
        assert torch.equal(batch["pixel_values"], want["pixel_values"])
        assert torch.equal(batch["input_ids"], want["input_ids"][:, :48])


def kept_memory(*_):
    """In place of a processor's pixels, the number of blocks of memory that Pillow keeps in this process."""
    return {"blocks": torch.tensor([Image.core.get_blocks_max()])}


@pytest.mark.parametrize("chosen", [0, 3])
def test_workers_keep_the_memory_of_images(qwen, make, tmp_path, monkeypatch, chosen):
    """Unless the number of blocks was chosen before; the main process is left alone."""
    picture(40, 28).save(tmp_path / "a.png")
    data = make([{"messages": chat(tmp_path / "a.png")}], qwen)
    monkeypatch.setattr(data.encoder.processor, "pixels", kept_memory)
    before = Image.core.get_blocks_max()
    Image.core.set_blocks_max(chosen)
    try:
        kept = [next(iter(PackedLoader(data, num_workers=number)))["blocks"].item() for number in (0, 1)]
    finally:
        Image.core.set_blocks_max(before)
    assert kept == [chosen, chosen or BLOCKS]


def test_an_image_in_memory_may_change_before_its_row_is_made():
    image = picture(40, 28)
    medium = Medium.open("here", image)
    image.paste(0, (0, 0, 40, 28))
    assert medium.decode()[0].tobytes() == picture(40, 28).tobytes()


def test_images_with_bounds_of_their_own(qwen, make, tmp_path):
    """A row of images with and without bounds has the pixels and the loss of the chats alone."""
    paths = save_pictures(tmp_path, 3)
    bounds = ({"max_pixels": 128}, {}, {"min_pixels": 600, "max_pixels": 700})
    chats = [chat(path) for path in paths]
    for messages, own in zip(chats, bounds, strict=True):
        messages[0]["content"][0] |= own
    lines = json.loads(json.dumps([{"messages": messages} for messages in chats], default=lambda path: path.name))
    (batch,) = make(write(tmp_path / "train.jsonl", lines), qwen, length=256, shuffle=False)
    wanted = [alone(qwen, messages) for messages in chats]
    grids = {tuple(grid) for want in wanted for grid in want["image_grid_thw"].tolist()}
    assert {tuple(grid) for grid in batch["image_grid_thw"].tolist()} == grids
    assert (1, 2, 2) in grids
    pair = {"prompt": chats[0][:1], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}
    assert preference_batch([pair], processor=qwen.processor)["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
    torch.testing.assert_close(summed(qwen, batch), total_alone(qwen, chats), rtol=1e-9, atol=0)


def test_columns_of_datasets_and_parquet(qwen, make, tmp_path):
    """Their images are read undecoded."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    paths = save_pictures(tmp_path, 3)
    rows = [{"text": f"<|image_pad|> {number}", "images": [str(path)]} for number, path in enumerate(paths)]
    want = list(make(write(tmp_path / "a.jsonl", rows), qwen, length=32, shuffle=False))
    features = Features({"text": Value("string"), "images": List(ImageFeature())})
    table = Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    decode = ImageFeature.decode_example
    ImageFeature.decode_example = None
    try:
        for source in (table, tmp_path / "a.parquet", table.to_iterable_dataset()):
            got = list(make(source, qwen, length=32, shuffle=False))
            assert all(map(torch.equal, (b["pixel_values"] for b in got), (b["pixel_values"] for b in want)))
            assert [b["input_ids"].tolist() for b in got] == [b["input_ids"].tolist() for b in want]
    finally:
        ImageFeature.decode_example = decode


def test_resuming_at_every_batch_on_other_ranks_and_in_workers(qwen, make, tmp_path):
    paths = save_pictures(tmp_path)
    rows = [{"messages": chat(*paths[: n % 3], question="?" * (n % 7))} for n in range(12)]
    rows = json.loads(json.dumps(rows, default=lambda path: path.name))
    source = write(tmp_path / "train.jsonl", rows)

    def same(one, other):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)

    whole = list(make(source, qwen))
    assert len(whole) > 4
    for stop in range(len(whole)):
        data = make(source, qwen)
        loader = PackedLoader(data, num_workers=2 if stop == 2 else 0)
        taken = list(islice(loader, stop))
        resumed = make(source, qwen)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        for one, other in zip(whole, taken + list(resumed), strict=True):
            same(one, other)
    shares = [list(make(source, qwen, rank=rank, ranks=2)) for rank in range(2)]
    for index, batch in enumerate(whole):
        same(batch, shares[index % 2][index // 2])
    state = make(source, qwen).state_dict()
    picture(40, 28, seed=9).resize((40, 30)).save(paths[0])
    os.utime(source, (1, 1))
    with pytest.raises(ValueError, match="got other documents, tokens and checksum"):
        make(source, qwen).load_state_dict(state)
    texts = make([{"text": "a" * 50}], qwen)
    with pytest.raises(ValueError, match="must be that of the saved state"):
        texts.load_state_dict(state)


@pytest.mark.cases(8)
@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_an_image_is_never_split(model, make, tmp_path, stream):
    path = save_pictures(tmp_path, 1)[0]
    messages = [*chat(path, question="?", answer="a" * 20), *chat(path, path)]
    first = alone(model, messages[:2])["input_ids"].shape[1]
    whole = alone(model, messages)["input_ids"]
    token = model.tokenizer.backend.token_to_id(model.processor.media_tokens[0])
    places = (whole[0] == token).nonzero().flatten().tolist()
    per_image = len(places) // 3
    # A row that ends in the middle of the second image, one in the first image, and one that has all.
    for length in (places[per_image] + 1, places[0] + 1, whole.shape[1] - 1):
        source = [{"messages": messages}, {"messages": chat(question="short", answer="b")}]
        source = Stream(source) if stream else source
        if (length < first and per_image > 1) or length == places[0] + 1:
            with pytest.warns(UserWarning, match="1 documents with images or videos are longer than a row"):
                batches = list(make(source, model, length=length, overflow="split"))
            assert not any("pixel_values" in batch for batch in batches)
            continue
        with pytest.warns(UserWarning, match=rf"longer than a row \(length={length}\)"):
            batches = list(make(source, model, length=length))
        kept = torch.cat([batch["input_ids"] for batch in batches if "pixel_values" in batch])
        assert torch.isfinite(sum(summed(model, batch) for batch in batches))
        assert (kept == token).sum() % per_image == 0
        assert (kept == token).any()


def test_what_is_broken_is_named_or_skipped(qwen, make, tmp_path):
    paths = save_pictures(tmp_path, 3)
    rows = [{"messages": chat(path.name)} for path in paths]
    source = write(tmp_path / "train.jsonl", rows)

    def renew(**options):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        return make(source, qwen, length=64, **options)

    good = paths[1].read_bytes()
    for damage, found in ((None, "No such file"), (b"no image", "must be a whole image file")):
        paths[1].unlink() if damage is None else paths[1].write_bytes(damage)
        with pytest.raises(ValueError, match=rf"train.jsonl, line 2: an image must be a file.*{found}.*") as error:
            renew()
        assert str(paths[1]) in str(error.value)
        for _ in range(2):  # also from the cache
            with pytest.warns(UserWarning, match=r"1 examples have broken images or videos and are left out.*line 2"):
                data = make(source, qwen, length=64, broken_media="skip")
            assert sum("pixel_values" in batch for batch in data) == 2
        with pytest.warns(
            UserWarning, match=r"1 examples have broken images or videos and are left out.*Stream, example 2"
        ):
            list(make(Stream([{"messages": chat(path)} for path in paths]), qwen, length=64, broken_media="skip"))
        shutil.rmtree(tmp_path / "cache")
    paths[1].write_bytes(good[: len(good) // 2])  # the header is whole
    with pytest.raises(ValueError, match=r"train.jsonl, line 2: an image must be a file that can be read.*1\.jpg"):
        list(renew())
    with pytest.raises(ValueError, match=r"^\S*train.jsonl, line 2: an image must be .*1\.jpg.*\.$") as raised:
        list(PackedLoader(renew(), num_workers=1))
    assert "Traceback" not in str(raised.value)
    data = make(source, qwen, length=64, broken_media="skip", shuffle=False)
    with pytest.warns(
        UserWarning, match=r"line 2: .* The labels of documents with broken images or videos are removed"
    ):
        batches = list(data)
    assert data.broken == 1
    assert [(batch["labels"] != -100).any().item() for batch in batches] == [True, False, True]
    assert torch.isfinite(summed(qwen, batches[1]))
    make(source, qwen, length=64, shuffle=False)  # without a look at the pixels
    paths[1].write_bytes(good)
    with pytest.raises(
        ValueError, match=r"line 2: .*1\.jpg must be the file whose header was read, got another of \d+"
    ):
        make(source, qwen, length=64)
    paths[1].write_bytes(good)
    data = renew()
    picture(10, 10).save(paths[1])
    with pytest.raises(ValueError, match=r"line 2: .*must have the size \(90, 30\) of its header, got \(10, 10\) in "):
        list(data)


def test_a_replaced_image_of_the_same_size_and_bytes_is_another(qwen, make, tmp_path):
    paths = [tmp_path / f"{number}.bmp" for number in range(2)]
    for number, path in enumerate(paths):
        picture(30, 20, seed=number).save(path)
    chats = [chat(path.name) for path in paths]
    source = write(tmp_path / "train.jsonl", [{"messages": messages} for messages in chats])
    asked = write(tmp_path / "asked.jsonl", [{"prompt": messages[:1]} for messages in chats])

    def prompts():
        return PromptDataset(asked, qwen.processor, length=96)

    states = make(source, qwen).state_dict(), prompts().state_dict()
    os.utime(paths[0], (1, 1))  # a copy of the data has other times
    make(source, qwen).load_state_dict(states[0])
    prompts().load_state_dict(states[1])

    paths[0].write_bytes(paths[1].read_bytes())
    with pytest.raises(ValueError, match=r"line 1: .*0\.bmp must be the file whose header was read, got another"):
        make(source, qwen)
    shutil.rmtree(tmp_path / "cache")
    for data, state in zip((make(source, qwen), prompts()), states, strict=True):
        with pytest.raises(ValueError, match="got other documents, tokens and checksum"):
            data.load_state_dict(state)


def test_a_repaired_image_is_no_longer_left_out(qwen, make, tmp_path):
    paths = save_pictures(tmp_path, 3)
    source = write(tmp_path / "train.jsonl", [{"messages": chat(path.name)} for path in paths])
    good = paths[1].read_bytes()
    for damage in (None, b"no image"):
        paths[1].unlink() if damage is None else paths[1].write_bytes(damage)
        with pytest.warns(UserWarning, match="1 examples have broken images or videos and are left out"):
            broken = make(source, qwen, broken_media="skip")
        paths[1].write_bytes(good)
        again = make(source, qwen, broken_media="skip")  # no warning
        assert len(again.rows.tokens.media) == len(broken.rows.tokens.media) + 1 == 3
        assert sum(len(batch["image_grid_thw"]) for batch in broken) == 2  # a run reads what it began with
        folders = len(list((tmp_path / "cache").iterdir()))
        assert len(make(source, qwen, broken_media="skip").rows.tokens.media) == 3
        assert len(list((tmp_path / "cache").iterdir())) == folders


def test_a_text_that_seems_to_need_an_image_is_named_once(qwen, make):
    rows = [{"messages": chat(question=f"<image> {i}")} for i in range(2)]
    with pytest.warns(UserWarning, match="learned as text") as warned:
        make(rows, qwen)
    assert ["example 1: <image> is learned as text" in str(warning.message) for warning in warned] == [True]


def test_what_cannot_be_read_is_refused(qwen, make, tmp_path):
    paths = save_pictures(tmp_path, 2)
    web = {"messages": chat("https://example.com/a.png")}
    two_places = {"messages": chat(None, None), "images": [str(paths[0])]}
    part = {"type": "image", "image": str(paths[0])}
    sized = lambda key, value: {"messages": [{"role": "user", "content": [{**part, key: value}]}, ANSWER]}
    for row, message in (
        (web, "got the URL https://example.com/a.png. Download it"),
        (two_places, r"a place for each of its 1 images.*got 2"),
        ({"messages": chat(paths[0].name), "images": [str(paths[0])]}, r"a place for each of its 1 images.*got 0"),
        ({"messages": chat(3)}, "got int"),
        (sized("max_pixels", 0), "min_pixels and max_pixels must be positive numbers of pixels, .*got None and 0"),
        (sized("resized_height", 28), "a part of type image must not have a size of its own, got resized_height"),
        ({"text": "<|image_pad|>"}, "a place for each of its 0 images.*got 1"),
        ({"text": "none", "images": [str(paths[0])]}, "a place for each of its 1 images.*got 0"),
        ({"text": "none", "audio": "a.wav"}, "must be text and image and video, got a field audio"),
        ({"text": "<|video_pad|>"}, "a place for each of its 0 videos, .*got 1"),
        ({"messages": chat(str(paths[0]), question="<|image_pad|>")}, "a placeholder for each of its 1 images, got 2"),
        ({"messages": chat(question="<|image_pad|>")}, r"must be without images, got <\|image_pad\|>"),
        ({"input_ids": [1, 2], "images": [str(paths[0])]}, "token ids must be of text, got image"),
        ({"messages": chat(), "images": ["a", "b"]}, "No such file"),
    ):
        with pytest.raises(ValueError, match=rf"example 1: .*{message}"):
            make([row], qwen)
    with pytest.raises(ValueError, match=r"example 1: a text must be without images, got \[IMG\]"):
        make([{"messages": chat(question="[IMG]")}], make_model("mistral3"))
    with pytest.raises(ValueError, match="a part of type image must not have a size of its own, got max_pixels"):
        make([sized("max_pixels", 64)], make_model("gemma3"))
    clip = {"messages": [{"role": "user", "content": [{"type": "video", "video": "a"}]}, ANSWER]}
    for row, message in ((clip, "got a part video"), ({"text": "a", "video": "a.mp4"}, "got a field video")):
        with pytest.raises(ValueError, match=message):
            make([row], make_model("gemma3"))
    with pytest.raises(ValueError, match=r"broken_media must be one of .*got 'ignore'"):
        make([{"text": "a"}], qwen, broken_media="ignore")
    tall = BytesIO()
    Image.new("RGB", (1, 300)).save(tall, "PNG")
    with pytest.raises(ValueError, match=r"example 1: smart_resize: .*300 x 1"):
        make([{"messages": chat(tall.getvalue())}], qwen)


def test_pan_and_scan(make, tmp_path):
    """The number of crops follows from the size."""
    settings = {
        "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }  # fmt: skip
    model = make_model("gemma3", **settings).double()
    chats = [chat(picture(60, 20)), chat(picture(20, 20), picture(13, 40)), chat(question="None?")]
    data = make([{"messages": messages} for messages in chats], model, length=1000)
    (batch,) = data
    assert len(batch["pixel_values"]) == 4 + 1 + 4
    torch.testing.assert_close(summed(model, batch), total_alone(model, chats), rtol=1e-9, atol=0)
