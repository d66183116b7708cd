"""Which tokens an example becomes, which of them are learnt, and what a malformed example is called."""

import pytest
import torch

from liger_models import PackedDataset, Tokenizer

from .examples import counted, documents, write


def test_ids(make):
    ids = torch.tensor([5, 6, 7])
    ((found,),) = (list(documents(batch)) for batch in make([{"input_ids": ids, "labels": [-100, 6, -100]}]))
    assert found == ([5, 6, 7], [-100, 6, -100])
    ((found,),) = (list(documents(batch)) for batch in make([{"input_ids": [5, 6]}]))
    assert found == ([5, 6], [-100, 6])


def test_a_field_by_name(make):
    examples = [{"body": f"text {i}", "text": "not this"} for i in range(3)]
    assert counted(make(examples, field="body")) == counted(make([{"text": example["body"]} for example in examples]))


def test_answers_are_learnt_and_nothing_else(make, tokenizer):
    chat = [
        {"role": "user", "content": "Grüße?"},
        {"role": "assistant", "content": "你好"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
    ]
    ((found,),) = (list(documents(batch)) for batch in make([{"messages": chat}], length=128))
    ids, labels = found
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    learnt = [token for token in labels if token != -100]
    assert tokenizer.decode(learnt, skip_special_tokens=False) == "你好</s>Ciao</s>"
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "", '{"text": '], "line 3: must be a JSON object, got: Expecting value"),
        (['{"text": "a"}', "[1]"], r"line 2: must be a JSON object, got: \[1\]. Write one example per line"),
        (['{"tekst": "a"}'], r"line 1: an example must have messages or text or input_ids, got \['tekst'\]"),
        (['{"text": 3}'], "line 1: text must be a text, messages, or token ids, got '3'"),
        (['{"input_ids": [1, -2]}'], "line 1: input_ids must be a text, messages, or token ids"),
        (['{"input_ids": [1, 2147483648]}'], "line 1: input_ids must be a text, messages, or token ids"),
        (['{"text": "é"}', '{"text": "\\ud83d"}'], r"line 2: must be whole characters, got '\\ud83d'"),
        (["[", '{"text": "a"}'], "line 1: must be a JSON object, got: .* Write each example as one line"),
        (['{"input_ids": [1, 2], "labels": [1]}'], "line 1: labels must be those of input_ids"),
        (['{"input_ids": [1, 2], "labels": [2, -100]}'], "line 1: labels must be those of input_ids"),
        (['{"messages": [{"role": "user", "content": "x"}]}'], "line 1: a chat must have a message of the assistant"),
        (['{"text": "a"}', '{"messages": [{"role": "assistant"}, {"role": "x", "content": {}}]}', ""], None),
        ([], "the source must hold documents, got none"),
    ],
)
def test_bad_input_is_named_by_file_and_line(make, tmp_path, lines, message):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines))
    if message is None:
        make(path)
        return
    with pytest.raises(ValueError, match=message) as error:
        make(path)
    assert not lines or str(error.value).startswith(f"{path}, line ")
    assert not list((tmp_path / "cache").iterdir()), "nothing half done is left"


def test_a_template_that_joins_texts_meets_null(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": None}, {"role": "assistant"}]}])
    template = "{% for m in messages %}{{ '<' + m.content }}{% endfor %}"
    joining = Tokenizer(tokenizer.backend, {"chat_template": template})
    with pytest.raises(ValueError, match=r"line 1: .* must accept the messages, got: can only concatenate str"):
        PackedDataset(path, joining, length=32, cache_dir=tmp_path / "cache", progress=False)
