"""Examples, and what a batch holds of them."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

BOS, EOS = 0, 1

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501


class Stream(IterableDataset):
    """An iterable without a length."""

    def __init__(self, examples: list[Any]) -> None:
        self.examples, self.epochs = examples, []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.examples)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def texts(number: int, longest: int = 60) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(number)
    sizes = torch.randint(longest, (number,), generator=generator).tolist()
    return [{"text": f"{index}:" + "x" * size} for index, size in enumerate(sizes)]


def write(path: Path, examples: list[Any]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return path


def documents(batch: dict[str, torch.Tensor], filler: int = EOS) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and labels of each document, without padding."""
    ids, labels, bounds = batch["input_ids"].flatten(), batch["labels"].flatten(), batch["cu_seqlens"].tolist()
    assert bounds[0] == 0 and bounds[-1] == len(ids) and bounds == sorted(set(bounds))  # noqa: PT018
    length = batch["input_ids"].shape[1]
    assert set(range(0, len(ids) + 1, length)) <= set(bounds), "a document reaches over a row's end"
    for start, end in pairwise(bounds):
        if (ids[start:end] != filler).any():
            yield ids[start:end].tolist(), labels[start:end].tolist()
        else:
            assert (labels[start:end] == -100).all()


def counted(batches: Any) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids) for batch in batches for ids, _ in documents(batch))


def signature(batches: Any) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() + batch["cu_seqlens"].tolist() for batch in batches]
