"""Each token once, on one rank, in the order that seed and epoch give, whatever stops and goes on in between."""

import copy
import json
import multiprocessing
import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from torch.utils.data import DataLoader, Dataset, IterableDataset

from liger_models import LigerLlama, LlamaConfig, PackedDataset, PackedLoader, Tokenizer, preference_batch
from liger_models.data import WINDOW, TokenFile, collate, cut, pack
from liger_models.parallel import load_state, save_state, targets_per_rank

from .torchrun import torchrun

BOS, EOS = 0, 1
SIDES = ("chosen", "rejected")
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Bytes are tokens: the bos and eos tokens, then one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT})


@pytest.fixture
def make(tokenizer, tmp_path):
    """A data set in a cache of its own."""

    def made(source: Any, **options: Any) -> PackedDataset:
        return PackedDataset(
            source, tokenizer, **{"length": 32, "cache_dir": tmp_path / "cache", "progress": False, **options}
        )

    return made


def texts(number: int, longest: int = 60) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(number)
    sizes = torch.randint(longest, (number,), generator=generator).tolist()
    return [{"text": f"{index}:" + "x" * size} for index, size in enumerate(sizes)]


def write(path: Path, examples: list[Any]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return path


def documents(batch: dict[str, torch.Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and labels of each document, without padding."""
    ids, labels, bounds = batch["input_ids"].flatten(), batch["labels"].flatten(), batch["cu_seqlens"].tolist()
    assert bounds[0] == 0 and bounds[-1] == len(ids) and bounds == sorted(set(bounds))  # noqa: PT018
    length = batch["input_ids"].shape[1]
    assert set(range(0, len(ids) + 1, length)) <= set(bounds), "a document reaches over a row's end"
    for start, end in pairwise(bounds):
        if ids[start] != EOS or (ids[start:end] != EOS).any():
            yield ids[start:end].tolist(), labels[start:end].tolist()
        else:
            assert (labels[start:end] == -100).all()


def counted(batches: Any) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids) for batch in batches for ids, _ in documents(batch))


def signature(batches: Any) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() + batch["cu_seqlens"].tolist() for batch in batches]


def test_every_token_is_predicted_once_however_documents_are_cut(make, tokenizer):
    examples = [*texts(100, 150), {"text": ""}]
    whole = [[*tokenizer.encode(example["text"]), EOS] for example in examples]

    split = list(make(examples, length=32, batch_size=3))
    pairs = Counter(pair for document in whole for pair in pairwise(document))
    found: Counter[tuple[int, int]] = Counter()
    for batch in split:
        assert batch["input_ids"].shape == batch["labels"].shape == (3, 32)
        for ids, labels in documents(batch):
            assert labels == [-100, *ids[1:]]
            found.update(zip(ids, labels[1:], strict=False))
    assert found == pairs
    assert sum(int(targets_per_rank(batch)) for batch in split) == pairs.total()
    assert sum(int((batch["labels"] != -100).sum()) for batch in split) == pairs.total()

    truncated = counted(make(examples, length=32, overflow="truncate"))
    assert truncated == Counter(tuple(document[:32]) for document in whole)


def test_cut_and_pack():
    assert [each.tolist() for each in cut(torch.tensor([1, 5, 6, 4]), 4, "split")] == [
        [0, 1, 4, 6, 9, 12],
        [1, 4, 2, 4, 3, 4],
    ]
    assert [each.tolist() for each in cut(torch.tensor([1, 5, 4]), 4, "truncate")] == [[0, 1, 6], [1, 4, 4]]
    assert pack([3, 8, 5, 2, 2, 7], 8) == [[1], [0, 2], [3, 4], [5]]
    sizes = torch.randint(1, 1000, (WINDOW,)).tolist()
    rows = pack(sizes, 1000)
    assert sorted(chain(*rows)) == list(range(WINDOW))
    assert max(sum(sizes[i] for i in row) for row in rows) <= 1000
    assert sum(sizes) / len(rows) > 985


def test_the_loss_of_packed_rows_is_that_of_the_documents(make, tokenizer):
    config = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LigerLlama.from_config(LlamaConfig(**config, num_attention_heads=2))
    examples = texts(20, 25)
    (batch,) = make(examples, batch_size=100)
    alone = torch.zeros(())
    for example in examples:
        ids = torch.tensor([[*tokenizer.encode(example["text"]), EOS]])
        alone += model(ids, labels=ids, num_items_in_batch=1).loss
    torch.testing.assert_close(model(**batch, num_items_in_batch=1).loss, alone)


def test_order_is_that_of_seed_and_epoch(make):
    examples = texts(200)
    first = make(examples)
    epochs = [signature(first) for _ in range(2)]
    assert first.epoch == 2
    assert epochs[0] != epochs[1]
    again = make(examples)
    assert signature(again) == epochs[0]
    again.set_epoch(0)
    assert signature(again) == epochs[0]
    again.set_epoch(1)
    list(islice(again, 3))  # broken off: the epoch begins anew
    assert signature(again) == epochs[1]
    assert signature(make(examples, seed=1)) != epochs[0]
    plain = make(examples, shuffle=False)
    in_order = signature(plain)
    assert in_order == signature(plain)


@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_ranks_share_the_rows_and_another_number_of_them_goes_on(make, stream):
    examples = texts(150)
    source = Stream(examples) if stream else examples
    whole = counted(make(source))
    assert whole.total() > 150

    ranks = [make(source, rank=rank, ranks=3, batch_size=2) for rank in range(3)]
    batches = [list(data) for data in ranks]
    assert len({len(each) for each in batches}) == 1
    assert counted(chain(*batches)) == whole
    if not stream:
        assert len(ranks[0]) == len(batches[0])
    assert batches[0][0]["input_ids"].shape == (2, 32)

    ranks = [make(source, rank=rank, ranks=3, batch_size=2) for rank in range(3)]
    seen = [batch for data in ranks for batch in islice(data, 4)]
    states = [data.state_dict() for data in ranks]
    assert states[0] == states[1] == states[2]
    for number in (1, 2, 3, 5):
        others = [make(source, rank=rank, ranks=number) for rank in range(number)]
        for data in others:
            data.load_state_dict(json.loads(json.dumps(states[0])))
            data.set_epoch(0)
        rest = [list(data) for data in others]
        assert len({len(each) for each in rest}) == 1
        assert counted(chain(seen, *rest)) == whole
    assert others[0].epoch == 1


class Stream(IterableDataset):
    """An iterable without a length."""

    def __init__(self, examples: list[Any]) -> None:
        self.examples, self.epochs = examples, []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.examples)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_a_stream_goes_on_in_the_middle_of_its_windows(make, monkeypatch):
    monkeypatch.setattr("liger_models.data.WINDOW", 20)
    examples = texts(90, 30)
    whole = signature(make(Stream(examples)))
    stops = range(len(whole) + 1)
    for stop in stops:
        data = make(Stream(examples))
        before = signature(islice(data, stop))
        resumed = make(Stream(examples))
        resumed.load_state_dict(data.state_dict())
        assert before + signature(resumed) == whole
    assert data.state_dict()["read"] >= 80  # not from the beginning
    data = make(stream := Stream(examples))
    assert signature(data) == whole != signature(data)
    assert stream.epochs == [0, 1]
    with pytest.raises(TypeError, match="a stream has no length"):
        len(data)
    with pytest.raises(ValueError, match="got a stream"):
        data.rows  # noqa: B018


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_position_is_that_of_the_batches_taken_not_of_the_workers(make, workers, stream):
    examples = texts(120)
    source = Stream(examples) if stream else examples
    options = {"batch_size": 2, "rank": 1, "ranks": 2}
    data = make(source, **options)
    expected = [signature(data), signature(data)]

    loader = PackedLoader(make(source, **options), num_workers=workers)
    taken = signature(islice(loader, 5))
    assert taken == expected[0][:5]
    state = loader.state_dict()
    plain = make(source, **options)
    list(islice(plain, 5))
    assert {**state, "start": 0} == plain.state_dict()
    resumed = PackedLoader(make(source, **options), num_workers=workers)
    resumed.load_state_dict(state)
    random_state = torch.get_rng_state()
    assert taken + signature(resumed) == expected[0]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert signature(resumed) == expected[1]
    assert resumed.state_dict()["epoch"] == 2
    resumed.set_epoch(0)
    assert signature(resumed) == expected[0]
    if not stream:
        assert len(resumed) == len(expected[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_whose_batches_were_all_taken_is_over(make, workers):
    """Engines that know their number, as Lightning, do not ask for another."""
    data = make(texts(100))
    expected = [signature(data), signature(data)]
    loader = PackedLoader(make(texts(100)), num_workers=workers)
    assert [signature(islice(loader, len(loader))) for _ in range(2)] == expected
    assert loader.state_dict()["epoch"] == 1
    loader.set_epoch(1)  # once more
    assert signature(islice(loader, len(loader))) == expected[1]


def test_a_plain_dataloader_with_workers_has_the_same_batches_once(make):
    data = make(texts(120))
    expected = signature(data)
    data.set_epoch(0)
    for workers in (0, 1, 2):
        data.set_epoch(0)
        assert signature(DataLoader(data, batch_size=None, num_workers=workers)) == expected


def test_processes_that_are_spawned_map_the_files_again(make):
    data = make(texts(60))
    expected = signature(data)
    data.set_epoch(0)
    context = multiprocessing.get_context("spawn")
    assert signature(PackedLoader(data, num_workers=1, multiprocessing_context=context)) == expected


def test_workers_take_epoch_and_position_along(make):
    with pytest.raises(ValueError, match="persistent_workers must be False"):
        PackedLoader(make(texts(3)), num_workers=1, persistent_workers=True)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata(make, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    examples = texts(120)
    expected = signature(make(examples))
    loader = stateful(make(examples), batch_size=None, num_workers=workers)
    batches = iter(loader)
    taken = signature(islice(batches, 7))
    state = loader.state_dict()
    resumed = stateful(make(examples), batch_size=None, num_workers=workers)
    resumed.load_state_dict(state)
    assert taken + signature(resumed) == expected


@pytest.mark.gpu
def test_pinned_memory(make):
    data = make(texts(60))
    expected = signature(data)
    data.set_epoch(0)
    batches = list(PackedLoader(data, num_workers=2, pin_memory=True))
    assert all(tensor.is_pinned() for batch in batches for tensor in batch.values())
    assert signature(batches) == expected


def test_it_is_saved_with_the_state_of_a_run(make, tmp_path):
    model = torch.nn.Linear(2, 2)
    data = make(texts(50))
    taken = signature(islice(data, 6))
    save_state(tmp_path / "run", 6, model, data=data)
    resumed = make(texts(50))
    assert load_state(tmp_path / "run", model, data=resumed) == 6
    assert taken + signature(resumed) == signature(make(texts(50)))
    for other in (texts(51), [*texts(50)[1:], texts(50)[0]]):  # the second has as many documents and tokens
        with pytest.raises(ValueError, match="the data must be that of the saved state"):
            load_state(tmp_path / "run", model, data=make(other))


def test_files_of_all_kinds(make, tmp_path):
    examples = [{"text": "Grüße — 你好 🙂"}, {"text": "two\nlines"}, {"text": "three"}]
    expected = counted(make(examples))
    assert counted(make(write(tmp_path / "a.jsonl", examples))) == expected
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes().replace(b"\n", b"\r\n\n"))
    assert counted(make(str(tmp_path / "b.jsonl"))) == expected
    (tmp_path / "c.txt").write_text("one\n\n two \r\nthree", encoding="utf-8")
    assert counted(make([tmp_path / "c.txt"])) == counted(make([{"text": t} for t in ("one", " two ", "three")]))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "2.jsonl", examples[2:])
    write(tmp_path / "folder" / "1.json", examples[:2])
    assert counted(make(tmp_path / "folder")) == expected
    assert counted(make([tmp_path / "folder", tmp_path / "c.txt"])).total() == 6


def test_parquet(make, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    examples = texts(50)
    parquet.write_table(pyarrow.Table.from_pylist(examples), tmp_path / "a.parquet", row_group_size=7)
    assert counted(make(tmp_path / "a.parquet")) == counted(make(examples))
    chats = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(i)}]} for i in range(9)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "b.parquet")
    assert counted(make(tmp_path / "b.parquet")) == counted(make(chats))
    parquet.write_table(pyarrow.Table.from_pylist([{"body": "x"}]), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"c\.parquet, row 1: an example must have .* got \['body'\]"):
        make(tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"d\.parquet: must be a Parquet file"):
        make(tmp_path / "d.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "e.parquet").write_bytes(whole[:10] + bytes(40) + whole[50:])
    with pytest.raises(ValueError, match=r"e\.parquet: must be a Parquet file"):
        make(tmp_path / "e.parquet")


def test_keys_that_another_row_of_a_table_has(make, tokenizer, tmp_path):
    """A column of messages has the keys of all of them, a table the columns of all its parts."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    template = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}{{ m.role }}"
    template += (
        "{% if 'calls' in m %}{% for c in m.calls %}({{ c }}){% endfor %}{% else %}{{ m.content }}{% endif %}</s>"
    )
    own = Tokenizer(tokenizer.backend, {"eos_token": "</s>", "chat_template": template + "{% endfor %}"})
    user, call = {"role": "user", "content": "a"}, {"role": "assistant", "calls": [{"x": "1"}, {"y": "2"}]}
    rows = [
        {"messages": [user, call], "tools": '[{"name": "f"}]'},
        {"messages": [user, {"role": "assistant", "content": "b"}]},
        {"text": "c"},
        {"input_ids": [5, 6]},
    ]
    expected = {"[f]usera</s>assistant({'x': '1'})({'y': '2'})</s>", "usera</s>assistantb</s>", "<s>c</s>"}
    expected.add(tokenizer.decode([5, 6]))
    columns = {name: [row.get(name) for row in rows] for name in ("messages", "tools", "text", "input_ids")}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    files = write(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet"
    for source in (*files, datasets.Dataset.from_dict(columns)):
        data = PackedDataset(source, own, length=256, cache_dir=tmp_path / "cache", progress=False)
        found = {own.decode(list(ids), skip_special_tokens=False) for ids in counted(data)}
        assert found == expected


def test_parquet_without_pyarrow(make, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"liger_models\[data\]"):
        make(tmp_path / "a.parquet")


def test_objects_of_datasets(make):
    datasets = pytest.importorskip("datasets")
    examples = texts(40)
    expected = counted(make(examples))
    sized = datasets.Dataset.from_list(examples)
    assert counted(make(sized)) == expected
    assert counted(make(sized.with_format("torch"))) == expected
    stream = sized.to_iterable_dataset(num_shards=2)
    assert counted(make(stream)) == expected
    whole = signature(make(stream.shuffle(seed=1)))
    data = make(stream.shuffle(seed=1))
    before = signature(islice(data, 5))
    resumed = make(stream.shuffle(seed=1))
    resumed.load_state_dict(data.state_dict())
    assert before + signature(resumed) == whole


class Sized(Dataset):
    """Without an iterator, and without IndexError."""

    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index % len(self)]


def test_objects_of_pytorch(make):
    examples = texts(40)
    expected = counted(make(examples))
    assert counted(make(Sized(examples))) == expected
    assert counted(make(Sized([example["text"] for example in examples]))) == expected
    for batch_size in (None, 7):
        assert counted(make(DataLoader(Sized(examples), batch_size=batch_size))) == expected
    assert counted(make(DataLoader(Sized([example["text"] for example in examples]), batch_size=3))) == expected


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


def test_tokens_are_made_once(make, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts(30))
    expected = signature(make(path))
    with monkeypatch.context() as patch:
        patch.setattr("liger_models.data.TokenFile.write", None)
        assert signature(make(path)) == expected
        make(path, length=64)
    write(path, texts(31))
    make(path)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    make(path, cache_dir=None)
    assert len(list((tmp_path / "home" / "liger_models").iterdir())) == 1


def test_what_a_run_that_died_has_left_is_in_nobodys_way(make, tmp_path):
    """In containers every run has the same process id."""
    make(texts(3))
    (made,) = (tmp_path / "cache").iterdir()
    made.rename(made.with_name(f".{made.name}.{os.getpid()}.tmp"))
    make(texts(3))
    assert made.is_dir()


def test_two_runs_tokenise_at_the_same_time(make, tmp_path, monkeypatch):
    write_tokens = TokenFile.write

    def slow(*arguments: Any) -> None:
        monkeypatch.setattr(TokenFile, "write", write_tokens)
        write_tokens(*arguments)
        make(texts(3))  # the other one, which is done first

    monkeypatch.setattr(TokenFile, "write", slow)
    expected = signature(make(texts(3)))
    assert signature(make(texts(3))) == expected
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "", '{"text": '], "line 3: must be a JSON object, got: Expecting value"),
        (['{"text": "a"}', "[1]"], r"line 2: must be a JSON object, got: \[1\]. Write an example per line"),
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


def test_more_bad_input(make, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(ValueError, match=r"a\.txt, line 2: must be UTF-8 text"):
        make(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make(tmp_path / "nowhere.jsonl")
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a\.csv must end in one of \.jsonl"):
        make(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="Stream, example 2: an example must have"):
        list(make(Stream([{"text": "a"}, {}])))
    for options, message in (
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"overflow": "drop"}, "overflow must be one of .* got 'drop'"),
        ({"rank": 2, "ranks": 2}, r"rank must be 0 to 1 \(ranks\), got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make(texts(3), **options)
    with pytest.raises(ValueError, match="source must be files, a data set or other examples, got dict of train, test"):
        make({"train": texts(3), "test": texts(3)})
    with pytest.raises(ValueError, match="source must be files, a data set or other examples, got None"):
        make(None)
    once = make(iter(texts(3)))
    assert counted(once) == counted(make(texts(3)))
    with pytest.raises(ValueError, match="must hold documents, got none in epoch 1"):
        list(once)
    with pytest.raises(IndexError, match="index must be 0 to"):
        make(texts(3)).rows[1000]


def test_memory_does_not_grow_with_the_file(make, tmp_path, monkeypatch):
    monkeypatch.setattr("liger_models.data.GROUP_CHARACTERS", 1 << 16)
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(1000):
            file.write(json.dumps({"text": f"{number} " + "x" * 5000}) + "\n")
    size = path.stat().st_size
    tracemalloc.start()
    try:
        data = make(path, length=8192)
        for _ in islice(data, 20):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4


def test_rows_for_samplers_of_others(make):
    data = make(texts(100))
    batches = DataLoader(data.rows, batch_size=4, shuffle=True, collate_fn=collate)
    assert counted(batches) == counted(data)


def test_ranks_of_a_process_group_tokenise_once(tmp_path, tokenizer):
    script = """
import sys
from pathlib import Path
import torch.distributed as dist
from liger_models import PackedDataset, Tokenizer
from liger_models.data import TokenFile
dist.init_process_group("gloo")
if dist.get_rank():
    TokenFile.write = None
tokenizer = Tokenizer.from_pretrained(sys.argv[1])
options = {"length": 32, "cache_dir": sys.argv[1] + "/cache", "progress": False}
data = PackedDataset(sys.argv[1] + "/train.jsonl", tokenizer, **options)
said = f"batches {len(list(data))} {len(data)}\\n"
try:
    PackedDataset(sys.argv[1] + "/bad.jsonl", tokenizer, **options)
except ValueError as error:
    said += "error " + str(error)[-60:]
Path(sys.argv[1], f"said-{dist.get_rank()}").write_text(said)
dist.destroy_process_group()
"""
    write(tmp_path / "train.jsonl", texts(50))
    (tmp_path / "bad.jsonl").write_text("x")
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "run.py").write_text(script)
    torchrun(2, "run.py", str(tmp_path), cwd=tmp_path)
    batches, error = (tmp_path / "said-0").read_text().splitlines()
    assert (tmp_path / "said-1").read_text().splitlines() == [batches, error]
    assert batches.startswith("batches")
    assert error.startswith("error")


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
        learnt = [*tokenizer.encode(answer, add_special_tokens=False), EOS]
        assert labels[labels != -100].tolist() == learnt
        before = "<user>a</s>\n<assistant>b</s>\n<user>c</s>\n<assistant>"
        whole = [*tokenizer.encode(before, add_special_tokens=False), *learnt]
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
        ([{"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}], "got both"),
        ([{f"{name}_input_ids": [1] * (name != "chosen") for name in ("prompt", "chosen", "rejected")}], "chosen must"),
        ({"input_ids": torch.ones(2, 2), "completion_mask": torch.ones(2, 2)}, "attention_mask"),
        ({f"{name}_input_ids": torch.ones(1, 2) for name in ("prompt", "chosen", "rejected")}, "prompt_attention_mask"),
        ([{name: [{"role": "user", "content": "c"}] for name in ("prompt", "chosen", "rejected")}], "of the assistant"),
    ],
)
def test_preference_batch_says_what_is_wrong(pairs, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        preference_batch(pairs, tokenizer)


def test_preference_batch_of_texts_needs_a_tokenizer():
    with pytest.raises(ValueError, match="need a tokenizer"):
        preference_batch([{"prompt": "a", "chosen": "b", "rejected": "c"}])
