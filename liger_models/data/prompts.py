"""Prompts for which answers are sampled. A prompt keeps the other columns of its record for a reward function."""

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
from liger_models.data.encoding import (
    check_characters,
    check_rendered,
    drop_second_bos,
    open_reader,
    read_messages,
    read_variables,
)
from liger_models.data.formats import is_messages, mark_learned
from liger_models.data.media import BrokenMediaError, Medium
from liger_models.data.packing import PackedRows
from liger_models.data.pixels import make_pixels
from liger_models.data.sources import read_records, to_plain
from liger_models.text.tokenizer import Tokenizer


class PromptRows(AnswerRows):
    """The prompts of an epoch, in order.

    All prompts are kept in memory. A row is a dict: ``example`` is the record of the prompt, ``ids`` are its token ids,
    and ``pixels`` are the inputs for its images.
    """

    records: list[Any]
    media: list[list[Medium]]

    def _with_answers(self) -> list[int]:
        """Return the indices of all prompts. No prompt is left out, because answers are sampled later."""
        return [*range(len(self.tokens.ends))]

    def has_targets(self) -> bool:
        """Return True: every prompt has targets, which are sampled later."""
        return True

    def _read(self, number: int) -> Any:
        start = int(self.tokens.ends[number - 1]) if number else 0
        ids = [~token for token in self.tokens.ids[start : int(self.tokens.ends[number])].tolist()]
        pixels = make_pixels(self.media[number], self.make_row.processor)
        return {"example": self.records[number], "ids": ids, "pixels": pixels}


class PromptDataset(PackedDataset):
    """Batches of prompts for sampling: this rank's share of the prompts, epoch after epoch.

    A batch is a list of rows from `PromptRows`. Order, ranks and position work as in `PackedDataset`, with prompts
    instead of rows. The last step of an epoch is filled up with the first prompts of the epoch.

    Args:
        source: files or another source with a length; see `PackedDataset`. An example has ``prompt`` (a text or
            messages) and any other columns. Messages may have images, in the forms that `PackedDataset` accepts.
        tokenizer: the tokenizer of the model, or its processor, which also takes images.
        length: the maximum number of tokens in a prompt, including the tokens of its images.
        options: see `PackedDataset`.

    Raises:
        ValueError: the source is a stream, or a prompt is longer than ``length``; see also `PackedDataset`.
    """

    def __init__(self, source: Any, tokenizer: Tokenizer | Processor, *, length: int, **options: Any) -> None:
        super().__init__(source, tokenizer, length=length, **{**options, "formats": ("prompt",)})
        if self._rows is None:
            raise ValueError("PromptDataset: the source must have a length, got a stream. Save it as a file.")

    def _load_rows(self, source: Any, cache_dir: str | PathLike[str] | None, progress: bool) -> PackedRows:
        # There are few prompts, and their records are kept in memory anyway. The prompts are therefore tokenized in
        # memory.
        records, media = [], []
        tokens, ends, bounds = array("i"), array("q"), array("q")
        for where, record in itertools.islice(read_records(source, ()), self.encoder.max_samples):
            try:
                ids, images = self._encode(where, record)
            except BrokenMediaError as error:
                if self.encoder.broken_media == "error":
                    raise
                self.encoder.skipped.add(error)
                continue
            records.append(record)
            media.append(images)
            # Bounds of images are indices into the tokens of all prompts.
            bounds.extend(len(tokens) + bound for image in images for bound in (image.first, image.end))
            tokens.extend(~token for token in ids)
            ends.append(len(tokens))

        # Present the tokens like a `TokenFile`. Prompts have no labels.
        skipped = self.encoder.skipped
        if len(records) == 0:
            raise ValueError(f"PromptDataset: the source must hold prompts, got none. {skipped.why}".rstrip())
        self._warn(skipped.count, skipped.why, 0)
        stored: Any = SimpleNamespace(
            documents=len(ends),
            ids=torch.tensor(tokens, dtype=torch.int32, device="cpu"),
            ends=torch.tensor(ends, dtype=torch.int64, device="cpu"),
            media=torch.tensor(bounds, dtype=torch.int64, device="cpu").view(-1, 2),
            media_checksum=zlib.crc32(
                json.dumps([(image.size, image.checksum) for images in media for image in images]).encode()
            ),
            checksum=zlib.crc32(json.dumps(records, default=to_plain).encode()),
        )
        rows = PromptRows(stored, self._make_row, self.shuffle, self.seed)
        rows.records, rows.media = records, media
        return rows

    def _encode(self, where: str, record: Any) -> tuple[list[int], list[Medium]]:
        self.encoder.formats.name(where, record)
        prompt, tokenizer = record["prompt"], self.encoder.tokenizer
        media: list[Medium] = []
        if isinstance(prompt, str):
            kinds = [kind for kind, column in self.encoder.media.columns(record).items() if column]
            if kinds:
                raise ValueError(
                    f"{where}: images stand in messages, got {', '.join(kinds)} beside a text. Convert it."
                )
            check_characters(where, prompt)
            ids = tokenizer.encode(prompt)
            # The answer continues the prompt, so remove an end token after the prompt.
            ids = drop_second_bos(tokenizer, ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids)
        else:
            if not is_messages(prompt):
                raise ValueError(f"{where}: prompt must be a text or messages, got {str(prompt)[:60]!r}. Correct it.")
            ids, media = encode_prompt(where, record, self.encoder.processor or tokenizer, self.encoder.on_unrendered)
        if not 0 < len(ids) <= self.length:
            raise ValueError(
                f"{where}: a prompt must have 1 to {self.length} tokens, got {len(ids)}. Shorten it, or raise length, "
                "which holds the prompt and the answer."
            )
        return ids, media

    def _notes(self) -> list[str]:
        return []  # no example has labels

    def _show(self, documents: list[list[int]]) -> str:
        return mark_learned(self.encoder.tokenizer, documents[0])

    def _batch(self, rows: list[Any]) -> Any:
        return self._completed(rows)


def encode_prompt(
    where: str, example: Mapping[str, Any], reader: Tokenizer | Processor, on_unrendered: str = "error"
) -> tuple[list[int], list[Medium]]:
    """Return the token ids of messages up to the beginning of the answer, and the images and videos in the messages.

    Args:
        where: location of the example, for error messages.
        example: an example with ``prompt``, a list of messages. It may have ``tools``, ``chat_template_kwargs`` and
            image columns.
        reader: the tokenizer of the model, or its processor, which also takes images.
        on_unrendered: what happens if the chat template leaves out a field; see `Encoder`.

    Raises:
        ValueError: the messages are malformed, or the chat template does not accept them.
        BrokenMediaError: an image is missing, or its header cannot be read.
    """
    # The messages keep placeholders for their images. After rendering, tokens replace the placeholders.
    tokenizer, media = open_reader(reader)
    messages, sources = media.place(where, example["prompt"], media.columns(example))
    messages = read_messages(where, messages, media.kinds)
    try:
        rendering = tokenizer.render_prompt(messages, **read_variables(example))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    text = rendering.text
    check_rendered(where, rendering.unrendered, on_unrendered)
    check_characters(where, text)

    images = media.open(where, sources)
    text, _, counts = media.write(where, text, None, images)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids, media.locate(where, ids, images, counts)
