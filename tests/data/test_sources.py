"""Files and data sets of all kinds give the same examples."""

import gzip
import json
import sys
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from liger_models import PackedDataset, Tokenizer
from liger_models.data.sources import read_records

from .examples import Stream, counted, signature, texts, write


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
    (tmp_path / "array.json").write_text(json.dumps(examples, indent=2), encoding="utf-8")
    assert counted(make(tmp_path / "array.json")) == expected


def test_tables_of_text_and_compressed_files(make, tmp_path):
    """CSV as spreadsheets and pandas export it, and every kind of text compressed."""
    examples = [{"prompt": 'a, "b"\n', "completion": "Grüße; 🙂"}, {"prompt": "c", "completion": "4"}]
    expected = counted(make(examples))
    comma = '\ufeffprompt,completion,label\r\n"a, ""b""\n",Grüße; 🙂,True\r\nc,4,0\r\n'
    semicolon = 'prompt;completion\n"a, ""b""\n";"Grüße; 🙂"\nc;4\n'
    tab = 'prompt\tcompletion\n"a, ""b""\n"\tGrüße; 🙂\nc\t4\n'
    for name, text in {"a.csv": comma, "b.csv": semicolon, "c.tsv": tab}.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    for name in ("b.csv", "c.tsv"):
        assert counted(make(tmp_path / name)) == expected
    labels = [record["label"] for _, record in read_records((tmp_path / "a.csv",), ["label"])]
    assert labels == [True, 0]
    assert counted(make(tmp_path / "a.csv", format="prompt-completion")) == expected

    write(tmp_path / "d.JSONL", examples)
    for name in ("b.csv", "d.JSONL"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        assert counted(make(tmp_path / f"{name}.gz")) == expected
    (tmp_path / "e.json.gz").write_bytes(gzip.compress(json.dumps(examples).encode()))
    assert counted(make(tmp_path / "e.json.gz")) == expected

    for name, content, message in [
        ("f.csv", b"prompt,completion\na,b\nc,d,e\n", "row 2: must be a row of a CSV file, got: 3 cells under 2 names"),
        ("g.csv", "text\né".encode("latin-1"), "must be UTF-8 text"),
        ("h.jsonl.gz", gzip.compress(bytes(999))[:-9], "must be a whole gzip file, got: Compressed file ended"),
        ("i.jsonl.gz", b"{}", "must be a whole gzip file, got: Not a gzipped file"),
        ("j.jsonl.zst", b"", r"must end in one of .*\.csv.* or be compressed as one of \.jsonl\.gz"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            make(tmp_path / name)


def test_folders_of_datasets(make, tmp_path):
    """A folder that `save_to_disk` wrote is read. A folder of splits is refused, and the error names the splits."""
    datasets = pytest.importorskip("datasets")
    examples = texts(9)
    datasets.DatasetDict(train=datasets.Dataset.from_list(examples)).save_to_disk(
        tmp_path / "all", num_shards={"train": 2}
    )
    (tmp_path / "all" / "train" / "cache-1.arrow").touch()  # of a later `map`
    assert counted(make(tmp_path / "all" / "train")) == counted(make(examples))
    with pytest.raises(FileNotFoundError, match=r"got only the folders train\. Name one"):
        make(tmp_path / "all")
    (tmp_path / "a.arrow").write_bytes(b"no Arrow file")
    with pytest.raises(ValueError, match=r"a\.arrow: must be an Arrow file"):
        make(tmp_path / "a.arrow")


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
    template += "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}({{ c }}){% endfor %}"
    template += "{% else %}{{ m.content }}{% endif %}</s>"
    own = Tokenizer(tokenizer.backend, {"eos_token": "</s>", "chat_template": template + "{% endfor %}"})
    user, call = {"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"x": "1"}, {"y": "2"}]}
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
    with pytest.raises(ValueError, match=r"a\.parquet, row 3: all examples of a file must have one format, got text"):
        PackedDataset(tmp_path / "a.parquet", own, length=256, cache_dir=tmp_path / "cache", progress=False)
    files = []
    for kind, part in {"b": slice(2), "c": slice(2, 3), "d": slice(3, 4)}.items():
        parquet.write_table(
            pyarrow.table({name: column[part] for name, column in columns.items()}), tmp_path / f"{kind}.parquet"
        )
        files.append([write(tmp_path / f"{kind}.jsonl", rows[part]), tmp_path / f"{kind}.parquet"])
    for source in (*map(list, zip(*files, strict=True)), datasets.Dataset.from_dict(columns)):
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


def test_bad_sources(make, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(ValueError, match=r"a\.txt, line 2: must be UTF-8 text"):
        make(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make(tmp_path / "nowhere.jsonl")
    for name, content, message in (
        ("cut", '[{"text": "a"},', r"cut\.json: must be a JSON array of objects, got: "),
        ("texts", '[{"text": "a"}, "b"]', r"texts\.json, row 2: must be a JSON object, got: b"),
    ):
        (tmp_path / f"{name}.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            make(tmp_path / f"{name}.json")
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(ValueError, match=r"a\.xlsx must end in one of \.jsonl"):
        make(tmp_path / "a.xlsx")
    with pytest.raises(ValueError, match="Stream, example 2: an example must have"):
        list(make(Stream([{"text": "a"}, {}])))
    with pytest.raises(ValueError, match="source must be files, a data set or other examples, got dict of train, test"):
        make({"train": texts(3), "test": texts(3)})
    with pytest.raises(ValueError, match="source must be files, a data set or other examples, got None"):
        make(None)
