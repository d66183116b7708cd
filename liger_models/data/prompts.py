"""Prompts to answer by sampling, each with the columns beside it, which a reward reads."""

import itertools
import json
import zlib
from array import array
from collections.abc import Mapping
from os import PathLike
from types import SimpleNamespace
from typing import Any

import torch

from liger_models.base.processor import Processor
from liger_models.data.answers import AnswerRows
from liger_models.data.dataset import PackedDataset
from liger_models.data.encoding import check_characters, is_messages, read_messages, read_variables
from liger_models.data.formats import mark_learnt
from liger_models.data.media import (
    BrokenMediaError,
    Medium,
    columns_of,
    find_tokens,
    open_media,
    place_media,
    write_media,
)
from liger_models.data.packing import PackedRows
from liger_models.data.pixels import make_pixels
from liger_models.data.sources import read_examples, to_plain
from liger_models.text.tokenizer import Tokenizer


class PromptRows(AnswerRows):
    """The examples of an epoch by their number: the example, the token ids of its prompt, and its pixels. In memory."""

    examples: list[Any]
    media: list[list[Medium]]

    def has_targets(self) -> bool:
        """True: the targets are sampled."""
        return True

    def __len__(self) -> int:
        return len(self.examples)

    def _read(self, number: int) -> Any:
        start = int(self.tokens.ends[number - 1]) if number else 0
        ids = [~token for token in self.tokens.ids[start : int(self.tokens.ends[number])].tolist()]
        pixels = make_pixels(self.media[number], self.make_row.processor)
        return {"example": self.examples[number], "ids": ids, "pixels": pixels}


class PromptDataset(PackedDataset):
    """Prompts for sampling: this rank's share of them, epoch after epoch. A batch is a list of rows of `PromptRows`.

    Order, ranks and position are as in `PackedDataset`, with prompts for rows. The last step of an epoch is completed
    with its first prompts.

    Args:
        source: files or another source with a length, as for `PackedDataset`. An example has ``prompt``, a text or
            messages, and any other columns. Messages may have images, spelled as for `PackedDataset`.
        tokenizer: the tokenizer of the model, or its processor, which also takes images.
        length: largest number of tokens of a prompt, with those of its images.
        options: as for `PackedDataset`.

    Raises:
        ValueError: as for `PackedDataset`, the source is a stream, or a prompt is longer.
    """

    def __init__(self, source: Any, tokenizer: Tokenizer | Processor, *, length: int, **options: Any) -> None:
        super().__init__(source, tokenizer, length=length, **{**options, "formats": ("prompt",)})
        if self._rows is None:
            raise ValueError("PromptDataset: the source must have a length, got a stream. Save it as a file.")

    def _load_rows(self, source: Any, cache_dir: str | PathLike[str] | None, progress: bool) -> PackedRows:
        examples, media = [], []
        tokens, ends, places = array("i"), array("q"), array("q")
        for where, example in itertools.islice(read_examples(source, ()), self.encoder.max_samples):
            try:
                ids, own = self._encode(where, example)
            except BrokenMediaError as error:
                if self.encoder.broken_media == "error":
                    raise
                self.encoder.skipped.add(error)
                continue
            examples.append(example)
            media.append(own)
            places.extend(len(tokens) + place for each in own for place in (each.first, each.end))
            tokens.extend(~token for token in ids)
            ends.append(len(tokens))
        skipped = self.encoder.skipped
        if len(examples) == 0:
            raise ValueError(f"PromptDataset: the source must hold prompts, got none. {skipped.why}".rstrip())
        self._warn(skipped.count, skipped.why, 0)
        stored: Any = SimpleNamespace(
            documents=len(ends),
            ids=torch.tensor(tokens, dtype=torch.int32),
            ends=torch.tensor(ends, dtype=torch.int64),
            media=torch.tensor(places, dtype=torch.int64).view(-1, 2),
            media_checksum=zlib.crc32(json.dumps([each.size for own in media for each in own]).encode()),
            checksum=zlib.crc32(json.dumps(examples, default=to_plain).encode()),
        )
        rows = PromptRows(stored, self._make_row, self.shuffle, self.seed)
        rows.examples, rows.media = examples, media
        return rows

    def _encode(self, where: str, example: Any) -> tuple[list[int], list[Medium]]:
        self.encoder.formats.name(where, example)
        prompt, tokenizer = example["prompt"], self.encoder.tokenizer
        media: list[Medium] = []
        if isinstance(prompt, str):
            given = [kind for kind, column in columns_of(example, self.encoder.kinds).items() if column]
            if given:
                raise ValueError(
                    f"{where}: images stand in messages, got {', '.join(given)} beside a text. Convert it."
                )
            check_characters(where, prompt)
            ids = tokenizer.encode(prompt)
            ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
        else:
            if not is_messages(prompt):
                raise ValueError(f"{where}: prompt must be a text or messages, got {str(prompt)[:60]!r}. Correct it.")
            ids, media = encode_prompt(where, example, self.encoder.processor or tokenizer)
        if not 0 < len(ids) <= self.length:
            raise ValueError(
                f"{where}: a prompt must have 1 to {self.length} tokens, got {len(ids)}. Shorten it, or raise length, "
                "which holds the prompt and the answer."
            )
        return ids, media

    def _show(self, documents: list[list[int]]) -> str:
        return mark_learnt(self.encoder.tokenizer, documents[0])

    def _batch(self, rows: list[Any]) -> Any:
        return self._completed(rows)


def encode_prompt(
    where: str, example: Mapping[str, Any], reader: Tokenizer | Processor
) -> tuple[list[int], list[Medium]]:
    """The token ids of messages to answer, up to where the answer begins, and the images and videos in them.

    Args:
        where: where the example is, for errors.
        example: has ``prompt``, a list of messages, and perhaps ``tools``, ``chat_template_kwargs``, and images in
            columns.
        reader: the tokenizer of the model, or its processor, which also takes images.

    Raises:
        ValueError: the messages are malformed, or are not what the chat template takes.
        BrokenMediaError: an image is missing, or its header cannot be read.
    """
    processor = reader if isinstance(reader, Processor) else None
    tokenizer = reader.tokenizer if isinstance(reader, Processor) else reader
    kinds = () if processor is None else processor.kinds
    bounds = processor is not None and processor.takes_bounds
    messages, found = place_media(where, example["prompt"], columns_of(example, kinds), bounds)
    messages = read_messages(where, messages, kinds)
    try:
        options = {**read_variables(example), "add_generation_prompt": True, "tokenize": False}
        text = str(tokenizer.apply_chat_template(messages, **options))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    check_characters(where, text)
    media = open_media(where, found, processor)
    if processor is None:
        return tokenizer.encode(text, add_special_tokens=False), []
    text, _, counts = write_media(where, text, None, media, processor)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids, find_tokens(where, ids, media, counts, processor.media_ids)
