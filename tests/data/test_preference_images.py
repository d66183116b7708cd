"""Preference pairs with images, beside TRL's collator."""

import copy

import pytest
import torch

from liger_models import LigerFusedLinearDPOLoss, PackedDataset, preference_batch
from liger_models.data import AnswerDataset

from ..base.conftest import encoded, picture
from ..base.test_processor_transformers import FAMILIES, make, theirs
from ..late import Late
from .examples import write
from .test_videos import save_clip
from .vision import make_model

pytestmark = pytest.mark.slow

trl = Late("trl.trainer.dpo_trainer", "trl")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    """Its chat template writes nothing behind an answer's end, which TRL would learn and this package would not."""
    model = make(request.param)
    template = model.tokenizer.chat_template
    model.processor.tokenizer.chat_template = template.replace("\n{% endfor %}", "{% endfor %}")
    return model


def user(*content):
    return {"role": "user", "content": list(content)}


def said(text):
    return [{"role": "assistant", "content": text}]


IMAGE = {"type": "image"}
SMALL, WIDE = picture(20, 12), picture(9, 40)
PAIRS = [
    {
        "images": [SMALL, WIDE], "prompt": [user(IMAGE, {"type": "text", "text": "and"}, IMAGE)],
        "chosen": said("Both are red."), "rejected": said("No."),
    },
    {"images": [WIDE], "prompt": [{"role": "user", "content": "What?"}], "chosen": said("A"), "rejected": said("BB")},
]  # fmt: skip


@pytest.mark.cases(5)
def test_pairs_are_trls(model, tmp_path):
    model.processor.save_pretrained(tmp_path)
    hf = theirs(tmp_path, model.processor.hf_config["model_type"])
    want = trl.DataCollatorForVisionPreference(hf)(copy.deepcopy(PAIRS))
    got = preference_batch(PAIRS, processor=model.processor)
    collated = preference_batch(want)
    assert got.keys() <= collated.keys()
    assert "pixel_values" in got
    if model.processor.hf_config["model_type"] == "mllama":
        # Its processor begins each text with a token, so that TRL's rows have one more before the answer.
        bos = model.tokenizer.bos_token_id
        for row, kept, labels, trls, seen in zip(
            *(got[name] for name in ("input_ids", "attention_mask", "labels")),
            *(collated[name] for name in ("input_ids", "attention_mask")), strict=True,
        ):  # fmt: skip
            before = int((labels == -100).cumprod(0).sum())
            trls = trls[seen == 1].tolist()
            assert trls == [*row[:before].tolist(), bos, *row[kept == 1].tolist()[before:]]
        got = {name: tensor for name, tensor in got.items() if name not in ("input_ids", "attention_mask", "labels")}
    if model.processor.hf_config["model_type"] == "idefics3":
        # Theirs are padded to the text with the most tiles.
        real = want["pixel_values"].flatten(2).any(2)
        collated = {**collated, "pixel_values": collated["pixel_values"][real]}
    for name, tensor in got.items():
        assert torch.equal(tensor, collated[name]), name


def test_every_form_of_a_pair(model, tmp_path):
    want = preference_batch(PAIRS, processor=model.processor)
    SMALL.save(tmp_path / "a.png")
    first, word, last = PAIRS[0]["prompt"][0]["content"]
    inline = [
        {**PAIRS[0], "images": None, "prompt": [user({**first, "image": SMALL}, word, {**last, "image": WIDE})]},
        {**PAIRS[1], "images": []},
    ]
    inline[1]["prompt"] = [user({"type": "image_url", "image_url": {"url": WIDE}}, {"type": "text", "text": "What?"})]
    spelled = [{**PAIRS[0], "images": [str(tmp_path / "a.png"), encoded(WIDE)]}, {**PAIRS[1], "image": WIDE}]
    del spelled[1]["images"]
    whole = [
        {"images": pair["images"], **{side: pair["prompt"] + pair[side] for side in ("chosen", "rejected")}}
        for pair in PAIRS
    ]
    columns = {name: [pair[name] for pair in PAIRS] for name in PAIRS[0]}
    for pairs in (inline, spelled, whole, columns):
        got = preference_batch(pairs, processor=model.processor)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name
    rows = want["labels"]
    end = model.tokenizer.eos_token
    said = [model.tokenizer.decode(row[row != -100], skip_special_tokens=False) for row in rows]
    assert said == [f"Both are red.{end}", f"A{end}", f"No.{end}", f"BB{end}"]


def test_pairs_with_and_without_images(model):
    plain = {"prompt": [{"role": "user", "content": "Hi"}], "chosen": said("A"), "rejected": said("B")}
    got = preference_batch([plain, PAIRS[1]], processor=model.processor)
    alone = preference_batch([plain], processor=model.processor)
    text = preference_batch([plain], model.tokenizer)
    assert alone.keys() == text.keys()
    assert all(torch.equal(alone[name], text[name]) for name in text)
    row = got["input_ids"][0][got["attention_mask"][0] == 1]
    assert torch.equal(row, text["input_ids"][0][text["attention_mask"][0] == 1])
    assert model(**got).loss.isfinite()


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_pairs_with_videos(family, tmp_path):
    """Each row is what the packed data make of its chat."""
    model = make_model(family).double()
    clip, other = (str(save_clip(str(tmp_path / f"{n}.mp4"), frames=n)) for n in (25, 9))
    asked = [user({"type": "video", "video": other}, {"type": "text", "text": "What?"})]
    pairs = [
        {"videos": [clip], "prompt": [{"role": "user", "content": "<video>What?"}]},
        {"prompt": asked, "images": [SMALL]},
    ]
    pairs = [{**pair, "chosen": said("Noise."), "rejected": said("No.")} for pair in pairs]
    got = preference_batch(pairs, processor=model.processor)
    losses = 0.0
    for side in ("chosen", "rejected"):
        for pair in pairs:
            rest = {name: value for name, value in pair.items() if name in ("videos", "images")}
            chat = {"messages": pair["prompt"] + pair[side], **rest}
            data = PackedDataset([chat], model.processor, length=256, cache_dir=tmp_path, progress=False)
            losses += model(**next(iter(data)), num_items_in_batch=1).loss
    torch.testing.assert_close(model(**got, num_items_in_batch=1).loss, losses, rtol=1e-9, atol=0)
    write(tmp_path / "pairs.jsonl", [{**pair, "images": []} for pair in pairs])
    given = {"length": 256, "batch_size": 2, "shuffle": False, "formats": ("preference",), "cache_dir": tmp_path}
    batch = next(iter(AnswerDataset(tmp_path / "pairs.jsonl", model.processor, progress=False, **given)))
    want = preference_batch([{**pair, "images": []} for pair in pairs], processor=model.processor)
    for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
        assert (name in batch) == (name in want)
        assert name not in want or batch[name].equal(want[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_files_are_those_of_pairs(family, tmp_path):
    model = make_model(family)
    for name, image in (("a", SMALL), ("b", WIDE)):
        image.save(tmp_path / f"{name}.png")
    pairs = [{**pair, "images": [f"{'ab'[image is WIDE]}.png" for image in pair["images"]]} for pair in PAIRS]
    file = write(tmp_path / "pairs.jsonl", [*pairs, {**PAIRS[1], "images": []}])
    given = {"length": 192, "batch_size": 3, "shuffle": False, "cache_dir": tmp_path, "progress": False}
    batch = next(iter(AnswerDataset(file, model.processor, formats=("preference",), **given)))
    want = preference_batch([*PAIRS, {**PAIRS[1], "images": []}], processor=model.processor)
    for row, seen in enumerate(want["attention_mask"].sum(1).tolist()):
        for name in ("input_ids", "labels"):
            assert batch[name][row, :seen].equal(want[name][row, :seen])
        assert (batch["labels"][row, seen:] == -100).all()
    text = {"input_ids", "labels", "attention_mask", "cu_seqlens"}
    assert want.keys() - text == batch.keys() - text
    assert all(batch[name].equal(want[name]) for name in want.keys() - text)
    # answers with a label: those of another prompt have the same pixels
    marked = [
        {**{name: pair[name] for name in ("images", "prompt")}, "completion": pair["chosen"], "label": n > 0}
        for n, pair in enumerate(pairs)
    ]
    file = write(tmp_path / "marked.jsonl", marked)
    batch = next(iter(AnswerDataset(file, model.processor, formats=("kto",), **{**given, "batch_size": 2})))
    whole = preference_batch(PAIRS, processor=model.processor)
    assert batch["preference_labels"].tolist() == [False, True]
    assert batch.keys() - whole.keys() == {
        "cu_seqlens",
        "preference_labels",
        "kl_input_ids",
        "kl_labels",
        "kl_cu_seqlens",
    }
    for name in whole.keys() - text:
        assert batch[name].equal(whole[name][: len(whole[name]) // 2])


@pytest.mark.cases(5)
def test_a_step_of_dpo(model):
    """The gradient reaches the tower, and a step makes the chosen answers likelier against the rejected ones."""
    model = copy.deepcopy(model)
    batch = preference_batch(PAIRS, processor=model.processor)
    with torch.no_grad():
        before = model(**batch, return_log_probs=True).log_probs
    dpo = LigerFusedLinearDPOLoss(beta=0.5)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(3):
        loss, _ = model(
            **batch, loss_function=lambda x, weight, target: dpo(weight, x, target, ref_log_probs=before)
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(2.0).log().item())
    assert losses[2] < losses[1] < losses[0]
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.visual.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [SMALL]}, r"pair 1: an example must have a place for each of its 1 images, .*got 2"),
        ({"images": []}, r"pair 1: an example must have a place for each of its 0 images, .*got 2"),
        ({"prompt": "What?"}, "pair 1: must be all texts or all messages, got "),
        ({"chosen": None}, "pair 1: must have prompt, chosen and rejected, or the same with _ids"),
        (dict.fromkeys(("prompt", "chosen", "rejected"), "A"), "images stand in messages, got a field image beside te"),
        ({"videos": ["a.mp4"]}, "pair 1: must be text and image, got videos, which the model does not take"),
        ({"chosen": [{"role": "assistant", "content": [{**IMAGE, "image": SMALL}]}]}, "chosen must be text, got an im"),
        ({"rejected": [{"role": "user", "content": "No."}]}, "pair 1: an answer must be a message of the assistant"),
        ({"images": ["https://example.com/a.png", SMALL]}, "got the URL https://example.com/a.png. Download it"),
    ],
)
def test_what_is_wrong_with_a_pair(change, message):
    model = make("gemma3")
    with pytest.raises(ValueError, match=message):
        preference_batch([{**PAIRS[0], **change}], processor=model.processor)


def test_images_need_a_processor():
    model = make("gemma3")
    with pytest.raises(ValueError, match=r"pair 1: must be text, got images. .*processor=model.processor"):
        preference_batch(PAIRS, model.tokenizer)
    with pytest.raises(ValueError, match="tokenizer or processor must be given, got both"):
        preference_batch(PAIRS, model.tokenizer, processor=model.processor)
    with pytest.raises(ValueError, match=r"pair 1: an image must be a file that can be read, .*nowhere\.png"):
        preference_batch([{**PAIRS[1], "images": ["nowhere.png"]}], processor=model.processor)
