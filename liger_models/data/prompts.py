"""Prompts to answer by sampling, each with the columns beside it, which a reward reads."""

import itertools
import json
import zlib
from os import PathLike
from types import SimpleNamespace
from typing import Any

import torch

from liger_models.data.answers import AnswerRows
from liger_models.data.dataset import PackedDataset
from liger_models.data.encoding import read_messages, read_tools
from liger_models.data.formats import mark_learnt
from liger_models.data.packing import PackedRows
from liger_models.data.sources import Located, read_examples, to_plain
from liger_models.kernels.checks import check
from liger_models.text.tokenizer import Tokenizer


class PromptRows(AnswerRows):
    """The examples of an epoch by their number: the example, and the token ids of its prompt. In memory."""

    examples: list[Any]

    def has_targets(self) -> bool:
        """True: the targets are sampled."""
        return True

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        number = self.number(index)
        start = int(self.tokens.ends[number - 1]) if number else 0
        ids = [~token for token in self.tokens.ids[start : int(self.tokens.ends[number])].tolist()]
        return {"example": self.examples[number], "ids": ids}


class PromptDataset(PackedDataset):
    """Prompts for sampling: this rank's share of them, epoch after epoch. A batch is a list of rows of `PromptRows`.

    Order, ranks and position are as in `PackedDataset`, with prompts for rows. The last step of an epoch is completed
    with its first prompts.

    Args:
        source: files or another source with a length, as for `PackedDataset`. An example has ``prompt``, a text or
            messages, and any other columns.
        tokenizer: the tokenizer of the model.
        length: largest number of tokens of a prompt.
        options: as for `PackedDataset`.

    Raises:
        ValueError: as for `PackedDataset`, the source is a stream, or a prompt is longer.
    """

    def __init__(self, source: Any, tokenizer: Tokenizer, *, length: int, **options: Any) -> None:
        super().__init__(source, tokenizer, length=length, **{**options, "formats": ("prompt",)})
        check(self._rows is not None, "PromptDataset: the source must have a length, got a stream. Save it as a file.")

    def _load_rows(self, source: Any, cache_dir: str | PathLike[str] | None, progress: bool) -> PackedRows:
        examples = list(itertools.islice(read_examples(source, ()), self.encoder.max_samples))
        check(len(examples) > 0, "PromptDataset: the source must hold prompts, got none.")
        prompts = [self._encode(each) for each in examples]
        tokens: Any = SimpleNamespace(
            documents=len(prompts),
            ids=torch.tensor([~token for ids in prompts for token in ids], dtype=torch.int32),
            ends=torch.tensor(list(itertools.accumulate(map(len, prompts)))),
            media=torch.empty(0, 2, dtype=torch.int64),
            checksum=zlib.crc32(json.dumps([each for _, each in examples], default=to_plain).encode()),
        )
        rows = PromptRows(tokens, self.length, self._filler, self.shuffle, self.seed)
        rows.examples = [example for _, example in examples]
        return rows

    def _encode(self, located: Located) -> list[int]:
        where, example = located
        self.encoder.formats.name(where, example)
        prompt, tokenizer = example["prompt"], self.encoder.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
            ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
        else:
            messages = read_messages(where, prompt)
            try:
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=read_tools(example))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        check(
            0 < len(ids) <= self.length,
            f"{where}: a prompt must have 1 to {self.length} tokens, got {len(ids)}. Shorten it, or raise length, "
            "which holds the prompt and the answer.",
        )
        return ids

    def _show(self, documents: list[list[int]]) -> str:
        return mark_learnt(self.encoder.tokenizer, documents[0])

    def _batch(self, rows: list[Any]) -> Any:
        return self._completed(rows)
