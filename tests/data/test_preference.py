"""Pairs of answers as TRL's trainers take them, before and after their collators."""

import copy
from functools import partial

import pytest
import torch
from tokenizers import models

from liger_models import Tokenizer, preference_batch
from liger_models.data import AnswerDataset, PromptDataset
from liger_models.data.preference import encode_pair

from .examples import BOS, CHAT, EOS, write

SIDES = ("chosen", "rejected")


def test_preference_batch_of_texts_and_of_token_ids(tokenizer):
    pairs = [
        {"prompt": "Hi", "chosen": " you", "rejected": ""},
        {"prompt": "Hello there", "chosen": "!", "rejected": " friend"},
    ]
    batch = preference_batch(pairs, tokenizer)
    answers = [(pair, name) for name in ("chosen", "rejected") for pair in pairs]
    for row, (pair, name) in enumerate(answers):
        prompt = tokenizer.encode(pair["prompt"])
        answer = [*tokenizer.encode(pair[name], add_special_tokens=False), EOS]
        assert prompt[0] == BOS
        rest = batch["input_ids"].shape[1] - len(prompt + answer)
        assert batch["input_ids"][row].tolist() == prompt + answer + [EOS] * rest
        assert batch["labels"][row].tolist() == [-100] * len(prompt) + answer + [-100] * rest
        assert batch["attention_mask"][row].tolist() == [1] * len(prompt + answer) + [0] * rest

    columns = {name: [pair[name] for pair in pairs] for name in ("prompt", "chosen", "rejected")}
    ids = [  # as TRL's DPOTrainer has them before its collator, and behind it: prompts padded on the left
        {
            "prompt_input_ids": tokenizer.encode(pair["prompt"]),
            **{
                f"{name}_input_ids": [*tokenizer.encode(pair[name], add_special_tokens=False), EOS]
                for name in ("chosen", "rejected")
            },
        }
        for pair in pairs
    ]
    collated = {}
    for name in ids[0]:
        size = max(len(each[name]) for each in ids)
        for suffix, fill in (("input_ids", lambda row: row), ("attention_mask", lambda row: [1] * len(row))):
            padded = [[0] * (size - len(each[name])) + fill(each[name]) for each in ids]
            if "prompt" not in name:
                padded = [fill(each[name]) + [0] * (size - len(each[name])) for each in ids]
            collated[name.replace("input_ids", suffix)] = torch.tensor(padded)
    others = [preference_batch(columns, tokenizer), preference_batch(ids, tokenizer)]
    for other in (*others, preference_batch({**collated, "ref_chosen_logps": torch.zeros(2)}, tokenizer)):
        assert other.keys() == batch.keys()
        for name, tensor in batch.items():
            assert torch.equal(other[name], tensor)
    short = [{name.replace("input_ids", "ids"): tokens for name, tokens in pair.items()} for pair in ids]
    whole = [
        {
            key: value
            for side in ("chosen", "rejected")
            for key, value in (
                (f"{side}_input_ids", pair["prompt_ids"] + pair[f"{side}_ids"]),
                (f"{side}_labels", [-100] * len(pair["prompt_ids"]) + pair[f"{side}_ids"]),
            )
        }
        for pair in short
    ]
    mask = (batch["labels"] != -100).long()
    made = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "completion_mask": mask}
    for other in (preference_batch(short, tokenizer), preference_batch(whole, tokenizer), preference_batch(made)):
        assert other.keys() == batch.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in batch.items())
    alone = preference_batch([{**pair, "prompt_ids": []} for pair in short])["input_ids"]
    assert alone[0].tolist() == short[0]["chosen_ids"] + [0] * (alone.shape[1] - len(short[0]["chosen_ids"]))
    assert preference_batch(ids)["input_ids"][-1, -1] != 0
    assert preference_batch(ids)["input_ids"][0, -1] == 0


def test_preference_batch_of_chats(tokenizer):
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt = [*earlier, {"role": "user", "content": "c"}]
    pair = {"prompt": prompt, "chosen": [{"role": "assistant", "content": "yes"}]}
    batch = preference_batch([{**pair, "rejected": [{"role": "assistant", "content": "n"}]}], tokenizer)
    for ids, labels, answer in zip(batch["input_ids"], batch["labels"], ("yes", "n"), strict=True):
        learned = [*tokenizer.encode(answer, add_special_tokens=False), EOS]
        assert labels[labels != -100].tolist() == learned
        before = "<user>a</s>\n<assistant>b</s>\n<user>c</s>\n<assistant>"
        whole = [*tokenizer.encode(before, add_special_tokens=False), *learned]
        assert ids[: len(whole)].tolist() == whole
    together = {side: [*prompt, {"role": "assistant", "content": side}] for side in SIDES}
    apart = {side: each[3:] for side, each in together.items()} | {"prompt": prompt}
    for name, tensor in preference_batch([together], tokenizer).items():
        assert torch.equal(tensor, preference_batch([apart], tokenizer)[name])


def test_preference_batch_of_chats_with_tools(tokenizer):
    template = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{{ mood }}" + CHAT
    own = Tokenizer(tokenizer.backend, {"eos_token": "</s>", "chat_template": template})
    pair = {side: [{"role": "assistant", "content": side}] for side in SIDES}
    pair |= {"prompt": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mood": "calm"}}
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        for pairs in ([{**pair, "tools": tools}], {name: [value] for name, value in (pair | {"tools": tools}).items()}):
            batch = preference_batch(pairs, own)
            text = own.decode(batch["input_ids"][0][batch["attention_mask"][0] == 1], skip_special_tokens=False)
            assert text == "[f]calm<user>a</s>\n<assistant>chosen</s>"


def test_preference_batch_of_texts_that_share_a_token_with_their_prompt(tokenizer):
    backend = copy.deepcopy(tokenizer.backend)
    vocab = backend.get_vocab()
    backend.model = models.BPE(vocab | {"ab": len(vocab)}, [("a", "b")])
    batch = preference_batch(
        [{"prompt": "xa", "chosen": "b", "rejected": "c"}], Tokenizer(backend, {"eos_token": "</s>"})
    )
    a, b, c, x = (vocab[letter] for letter in "abcx")
    assert batch["input_ids"].tolist() == [[BOS, x, len(vocab), EOS, EOS], [BOS, x, a, c, EOS]]
    assert batch["labels"].tolist() == [[-100, -100, len(vocab), EOS, -100], [-100, -100, a, c, EOS]]
    assert b not in batch["input_ids"]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "must hold at least one"),
        ({"text": ["a"]}, r"got \['text'\]"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "A single pair goes into a list"),
        ({"prompt": ["a"], "chosen": ["b", "c"], "rejected": ["c"]}, "'chosen': 2"),
        (
            [{"prompt": "a", "chosen": "b"}],
            r"pair 1: must have prompt, chosen and rejected.*got \['chosen', 'prompt'\]",
        ),
        (
            [{"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}],
            "got chosen as a text, rejected as messages, prompt as a text",
        ),
        ([{f"{name}_input_ids": [1] * (name != "chosen") for name in ("prompt", "chosen", "rejected")}], "chosen must"),
        ({"input_ids": torch.ones(2, 2), "completion_mask": torch.ones(2, 2)}, "attention_mask"),
        ({f"{name}_input_ids": torch.ones(1, 2) for name in ("prompt", "chosen", "rejected")}, "prompt_attention_mask"),
        ([{name: [{"role": "user", "content": "c"}] for name in ("prompt", "chosen", "rejected")}], "of the assistant"),
        (
            [{name: [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] for name in SIDES}],
            "pair 1: chosen and rejected must differ in their last messages, got: they are equal",
        ),
        *(
            (
                [{long: [{"role": "user", "content": "a"}] * 2, short: [{"role": "user", "content": "a"}]}],
                f"pair 1: chosen and rejected must differ .*, got: {short} is the beginning of {long}",
            )
            for long, short in (SIDES, SIDES[::-1])
        ),
    ],
)
def test_preference_batch_says_what_is_wrong(pairs, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        preference_batch(pairs, tokenizer)


def test_preference_batch_of_texts_needs_a_tokenizer():
    with pytest.raises(ValueError, match="need a tokenizer"):
        preference_batch([{"prompt": "a", "chosen": "b", "rejected": "c"}])


def test_messages_are_those_of_training_data(tokenizer):
    user, bad = {"role": "user", "content": "a"}, {"role": "assistant", "content": None}
    answer = {"role": "assistant", "content": "b"}
    with pytest.raises(ValueError, match="pair 1, rejected: message 1 must have content, got null"):
        preference_batch([{"prompt": [user], "chosen": [answer], "rejected": [bad]}], tokenizer)
    image = {"role": "user", "content": [{"type": "image"}]}
    with pytest.raises(ValueError, match="pair 1, prompt: message 1 must be text, got a part image"):
        preference_batch([{"prompt": [image], "chosen": [answer], "rejected": [answer]}], tokenizer)


@pytest.mark.parametrize("name", ["chosen", "rejected", "completion"])
def test_weights_of_messages(name, tokenizer):
    """In a prompt nothing is learned anyway. An answer is compared as a whole, so that none of it can be left out."""
    chat = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    answer = [{"role": "assistant", "content": "b", "weight": 1}, {"role": "user", "content": "c", "weight": None}]
    names = ("completion",) if name == "completion" else SIDES
    pair = {side: [*answer, answer[0]] for side in names} | {"prompt": chat}
    want = encode_pair("here", pair, tokenizer, names)
    assert encode_pair("here", pair | {"prompt": [{**each, "weight": 0} for each in chat]}, tokenizer, names) == want
    for number in range(3):
        marked = [{**each, "weight": 0} if i == number else each for i, each in enumerate(pair[name])]
        with pytest.raises(ValueError, match=f"here: {name} must have no message with weight 0: answers are compared"):
            encode_pair("here", pair | {name: marked}, tokenizer, names)


ANSWER = [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("kind", "example", "message"),
    [
        (
            "preference",
            {"prompt": True, "chosen": ANSWER, "rejected": ANSWER},
            "prompt must be a text or messages, got",
        ),
        ("preference", {"chosen": ANSWER, "rejected": {}}, r"rejected must be a text or messages, got '\{\}'"),
        ("preference", {"chosen": [[5]], "rejected": ANSWER}, r"chosen must be a text or messages, got '\[\[5\]\]'"),
        (
            "preference",
            {"prompt": "a", "chosen": "\ud83d", "rejected": "b"},
            r"must be whole characters, got '\\ud83d'",
        ),
        (
            "preference",
            {"prompt": ANSWER, "chosen": ANSWER, "rejected": ANSWER, "chat_template_kwargs": {"mood": "calm"}},
            "apply_chat_template: variables must be names that the chat template reads",
        ),
        ("kto", {"prompt": [None], "completion": ANSWER, "label": True}, "prompt must be a text or messages, got"),
        ("prompt", {"prompt": 5}, "prompt must be a text or messages, got '5'"),
        ("prompt", {"prompt": ["a"]}, "prompt must be a text or messages, got"),
        ("prompt", {"prompt": "\udc00"}, r"must be whole characters, got '\\udc00'"),
        ("prompt", {"prompt": [{"role": "user", "content": "\udc00"}]}, "must be whole characters"),
    ],
)
def test_malformed_answers_and_prompts_are_named_by_file_and_line(kind, example, message, tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [example])
    options = {"length": 32, "cache_dir": tmp_path / "cache", "progress": False}
    make = PromptDataset if kind == "prompt" else partial(AnswerDataset, formats=[kind])
    with pytest.raises(ValueError, match=message) as error:
        make(path, tokenizer, **options)
    assert str(error.value).startswith(f"{path}, line 1")


def test_pairs_as_data_sets_have_them(tokenizer, tmp_path):
    """Prompts in other columns, of other kinds than the answers, or repeated in them: the pair is the same one."""
    user, system = {"role": "user", "content": "q"}, {"role": "system", "content": "s"}
    yes, no = ({"role": "assistant", "content": text} for text in ("yes", "no"))

    def documents(pair):
        path = write(tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl", [pair])
        data = AnswerDataset(path, tokenizer, length=64, formats=["preference"], cache_dir=tmp_path, progress=False)
        return [data.rows[0][name].tolist() for name in ("first", "second")]

    want = documents({"prompt": [user], "chosen": [yes], "rejected": [no]})
    turns = [{"from": "human", "value": "q"}]
    for pair in [
        {"prompt": "q", "chosen": [user, yes], "rejected": [user, no]},
        {"prompt": "q", "chosen": [yes], "rejected": [no]},
        {"prompt": [user], "chosen": [user, yes], "rejected": [user, no]},
        {"prompt": [user], "chosen": "yes", "rejected": "no"},
        {"prompt": [user], "chosen": yes, "rejected": no},
        {"question": "q", "chosen": "yes", "rejected": "no"},
        {"instruction": "q", "input": "", "chosen": "yes", "rejected": "no"},
        {"conversations": turns, "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}},
        {name: [*turns, {"from": "gpt", "value": text}] for name, text in (("chosen", "yes"), ("rejected", "no"))},
    ]:
        assert documents(pair) == want, pair
    with_system = documents({"prompt": [system, user], "chosen": [yes], "rejected": [no]})
    assert documents({"system": "s", "question": "q", "chosen": "yes", "rejected": "no"}) == with_system
    assert documents({"prompt": "q", "chosen": [system, user, yes], "rejected": [system, user, no]}) == with_system
    for pair in [
        {"prompt": [user], "chosen": [yes], "rejected": [no]},
        {"prompt": [user], "chosen": "yes", "rejected": "no"},
        {"prompt": [user], "chosen": [user, yes], "rejected": [user, no]},
        {"prompt": [system, user], "chosen": [yes], "rejected": [no]},
        {"prompt": "q", "chosen": [yes], "rejected": [no]},
        {"prompt": "q", "chosen": [user, yes], "rejected": [user, no]},
        {"chosen": [user, yes], "rejected": [user, no]},
        {"conversations": turns, "chosen": [yes], "rejected": [no]},
    ]:
        assert documents({**pair, "system": "s"}) == with_system, pair
        assert documents({**pair, "system": "", "input": None}) == documents(pair)
    text = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    assert documents({**text, "prompt": "s q", "system": "s", "input": "q"}) == documents({**text, "prompt": "s q"})
    for name in ("system", "input", "context"):
        with pytest.raises(ValueError, match=f"line 1: {name} must be .* into the prompt, or remove the column"):
            documents({**text, name: "s"})
    with pytest.raises(ValueError, match="line 1: must be all texts or all messages, got chosen as messages"):
        documents({"prompt": "another", "chosen": [user, yes], "rejected": [user, no]})
    with pytest.raises(ValueError, match=r"got \['chosen', 'rejected'\]\. Split texts into prompt and answer"):
        documents({"chosen": "q yes", "rejected": "q no"})

    pairs = [{"prompt": "q", "chosen": "yes", "rejected": answer} for answer in ("no", "yes", "yes")]
    data = AnswerDataset(pairs, tokenizer, length=64, formats=["preference"], cache_dir=tmp_path, progress=False)
    assert data.describe().endswith("\n2 pairs have equal answers, from which nothing is learned.")
    labeled = [{"prompt": "q", "completion": "yes", "label": label} for label in ("true", "False", True)]
    data = AnswerDataset(
        labeled, tokenizer, length=64, formats=["kto"], cache_dir=tmp_path, progress=False, shuffle=False
    )
    labeled = [{"prompt": prompt, "completion": [yes], "label": True} for prompt in ([system, user], [user])]
    labeled[1]["system"] = "s"
    data_with_system = AnswerDataset(
        labeled, tokenizer, length=64, formats=["kto"], cache_dir=tmp_path, progress=False, shuffle=False
    )
    first, second = (data_with_system.rows[number]["first"].tolist() for number in range(2))
    assert first == second
    assert [int(row["second"]) for row in (data.rows[number] for number in range(3))] == [1, 0, 1]


def test_pairs_whose_prompt_leaves_no_answer_are_left_out(tokenizer, tmp_path):
    pairs = [{"prompt": "p" * size, "chosen": "yes", "rejected": "no"} for size in (4, 40, 5)]
    options = {"length": 16, "formats": ["preference"], "cache_dir": tmp_path, "progress": False, "batch_size": 2}
    with pytest.warns(UserWarning, match="AnswerDataset: 1 examples are left out, because their prompts"):
        data = AnswerDataset(pairs, tokenizer, **options)
    (batch,) = data
    assert len(data.rows) == 2
    assert (batch["labels"] != -100).any(1).all()
    assert "\n1 examples are left out: their prompts have 16 tokens" in data.describe()
    assert "are cut" not in data.describe()
    with pytest.raises(ValueError, match="must have a token to predict"), pytest.warns(UserWarning, match="1 examples"):
        AnswerDataset(pairs[1:2], tokenizer, **options)
