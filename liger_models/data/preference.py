"""Batches of preference pairs. Pairs are texts, chats, token ids, or the output of one of TRL's collators."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from liger_models.base.processor import Processor
from liger_models.data.batch import Batch, join_rows
from liger_models.data.encoding import (
    check_characters,
    check_media_columns,
    drop_second_bos,
    is_learned,
    open_reader,
    read_messages,
    render_examples,
)
from liger_models.data.formats import ANSWERS, is_messages
from liger_models.data.media import Columns, MediaReader, Medium
from liger_models.data.pixels import make_pixels
from liger_models.data.sources import MEDIA_COLUMNS
from liger_models.generation.options import PromptInputs
from liger_models.text.chat import answer_mask, shared_prefix
from liger_models.text.tokenizer import Tokenizer

IMAGE_INPUTS = frozenset(PromptInputs.__annotations__)
"""The arguments of a model's forward for inputs other than text."""


class Answer(NamedTuple):
    """A prompt and an answer to it, as token ids.

    Attributes:
        prompt, answer: token ids.
        media: the images and videos of the prompt.
    """

    prompt: list[int]
    answer: list[int]
    media: Sequence[Medium] = ()


def preference_batch(
    pairs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer | None = None,
    *,
    processor: Processor | None = None,
) -> Batch:
    """Return preference pairs as one batch: all chosen sequences, followed by all rejected sequences.

    The pairs may have any form that TRL's trainers take, or may already have passed through TRL's collators. A row
    consists of a prompt and its answer. There is no padding before the prompt, nor between prompt and answer. Only the
    answer has labels.

    Args:
        pairs: a list of examples, or columns by name, in one of these forms:

            - ``prompt``, ``chosen`` and ``rejected`` as texts. Prompt and answer are tokenized as one text, with the
              tokenizer's special tokens and the end token. A token with characters of both belongs to the answer.
            - The same columns as lists of messages for the chat template, optionally with ``tools`` and
              ``chat_template_kwargs``. Without ``prompt``, the messages with which both answers begin are the prompt.
              A message of an answer cannot have ``weight`` 0.
            - Token ids ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.
            - Token ids ``chosen_input_ids`` and ``rejected_input_ids``, with ``prompt_input_ids``. If the ids include
              the prompt, ``chosen_labels`` and ``rejected_labels`` are needed instead of ``prompt_input_ids``. Ids that
              are padded, on either side, also need a mask, for example ``chosen_attention_mask`` for
              ``chosen_input_ids``.

            ``pairs`` may also be a collated batch, possibly from TRL's unpaired data, with the tensors ``input_ids``,
            ``attention_mask`` and ``completion_mask``. Pixels and other inputs of vision-language models are passed on.
        tokenizer: the tokenizer of the model. It is not needed for token ids.
        processor: the processor of a vision-language model, instead of the tokenizer. The messages of a prompt may
            then have images in their parts, or the pair may have a field ``images`` (or ``image``). Images of a field
            are inserted at the prompt's parts ``{"type": "image"}`` or, if there are no such parts, before the text
            of the user's first message. An image is anything that `locate_image` takes. The fields ``video`` and
            ``videos`` hold files of videos (Qwen-VL).

    Returns:
        ``input_ids``, ``labels`` (−100 for prompt and padding) and ``attention_mask``, each [2 · pairs, T] int64, for
        a model's forward with ``return_log_probs``. Rows are padded on the right, with the tokenizer's padding id or,
        without a tokenizer, 0. With images, the batch also has the processor's outputs for all 2 · pairs rows,
        because both answers of a pair need them.

    Raises:
        ValueError: there are no pairs; a key is missing; a tensor of token ids has no mask; an answer has no tokens; an
            answer has a message with weight 0; there are images but no processor; an image cannot be read; or the
            number of images differs from the number of places for images.
    """
    # In a collated batch, only the names change.
    if tokenizer is not None and processor is not None:
        raise ValueError(
            "preference_batch: tokenizer or processor must be given, got both. The processor has a tokenizer."
        )
    if isinstance(pairs, Mapping) and "completion_mask" in pairs:
        return _from_collated(pairs)
    if isinstance(pairs, Mapping):
        pairs = _from_columns(pairs, () if processor is None else MEDIA_COLUMNS)
    if len(pairs) == 0:
        raise ValueError("preference_batch: pairs must hold at least one, got none.")

    # Other pairs are converted to tokens: first all chosen sequences, then all rejected sequences.
    reader = tokenizer if processor is None else processor
    encoded = [encode_pair(f"preference_batch, pair {number}", pair, reader) for number, pair in enumerate(pairs, 1)]
    rows = [row for side in zip(*encoded, strict=True) for row in side]
    pixels = [make_pixels(chosen.media, processor) for chosen, _ in encoded]
    tokenizer, _ = open_reader(reader)
    filler = 0 if tokenizer is None else tokenizer.padding_id

    def padded(value: int, of_row: Callable[[list[int], list[int]], list[int]]) -> Tensor:
        tensors = [torch.tensor(of_row(row.prompt, row.answer), device="cpu") for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    # [2 · pairs, T]
    return {
        "input_ids": padded(filler, lambda prompt, answer: prompt + answer),
        "labels": padded(-100, lambda prompt, answer: [-100] * len(prompt) + answer),
        "attention_mask": padded(0, lambda prompt, answer: [1] * len(prompt + answer)),
        **join_rows(pixels * 2),
    }


def _from_collated(batch: Mapping[str, Any]) -> Batch:
    required = ("input_ids", "attention_mask", "completion_mask")
    if not all(isinstance(batch.get(name), Tensor) for name in required):
        raise ValueError(
            f"preference_batch: a collated batch must have tensors {', '.join(required)}, got {sorted(batch)}."
        )
    ids, mask, answers = (batch[name] for name in required)  # [2 · pairs, T] each
    pixels = {name: value for name, value in batch.items() if name in IMAGE_INPUTS}
    return {"input_ids": ids, "labels": ids.masked_fill(answers == 0, -100), "attention_mask": mask, **pixels}


def _from_columns(pairs: Mapping[str, Any], fields: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Convert a mapping from names to columns into a list with one dict per pair. ``fields`` are additional columns."""
    prefixes = (*ANSWERS, "prompt", "tools", "chat_template_kwargs", *fields)
    columns = {name: column for name, column in pairs.items() if name.startswith(prefixes)}
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) != 1 or any(isinstance(column, str) for column in columns.values()):
        raise ValueError(
            "preference_batch: columns must have equal lengths, with an entry for each pair, got "
            f"{sizes or sorted(pairs)}. A single pair goes into a list."
        )

    # A tensor may have padding, which only its mask shows.
    for name, column in columns.items():
        mask = name.replace("input_ids", "attention_mask")
        if mask not in columns and isinstance(column, Tensor):
            raise ValueError(
                f"preference_batch: {name} is a tensor, which may be padded, and must come with {mask}. Add it."
            )

    columns = {name: column.tolist() if isinstance(column, Tensor) else column for name, column in columns.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(next(iter(sizes.values())))]


def encode_pair(
    where: str,
    pair: Mapping[str, Any],
    reader: Tokenizer | Processor | None,
    answers: Sequence[str] = ANSWERS,
    on_unrendered: str = "error",
) -> list[Answer]:
    """Return an `Answer` for each answer of a pair. By default, the answers are the chosen and the rejected answer.

    Args:
        where: location of the pair, for error messages.
        pair: an example; see `preference_batch`.
        reader: the tokenizer of the model, or its processor.
        answers: the names of the fields that hold the answers.
        on_unrendered: what happens if the chat template leaves out a field; see `Encoder`.

    Raises:
        ValueError: the pair is malformed.
        BrokenMediaError: an image is missing, or its header cannot be read.
    """
    tokenizer, media = open_reader(reader)
    columns = media.columns(pair)
    advice = (
        "{}. Pass the model's processor: processor=model.processor."
        if media.processor is None
        else "{}, which the model does not take. Leave it out."
    )
    check_media_columns(where, pair, media, "must be", advice, (*MEDIA_COLUMNS, *sorted(IMAGE_INPUTS)))

    # A pair holds token ids, texts or messages.
    encoded = _read_ids(pair)
    are_texts = [isinstance(pair[name], str) for name in (*answers, "prompt") if pair.get(name) is not None]
    if not encoded:
        _check_pair(where, pair, tokenizer, answers)
    if any(columns.values()) and (encoded or any(are_texts)):
        raise ValueError(
            f"{where}: images stand in messages, got a field {', '.join(kind for kind in columns if columns[kind])} "
            "beside texts or token ids. Convert them."
        )

    if not encoded and any(are_texts):
        encoded = _encode_texts(pair, tokenizer, answers)
    elif not encoded:
        encoded = _encode_chats(where, pair, tokenizer, media, columns, answers, on_unrendered)
    for name, row in zip(answers, encoded, strict=True):
        if not row.answer:
            raise ValueError(f"{where}: {name} must have tokens, got none. Leave it out.")
    return encoded


def _check_pair(where: str, pair: Mapping[str, Any], tokenizer: Tokenizer | None, answers: Sequence[str]) -> None:
    """Raise ValueError unless the prompt and the answers of a pair are all texts, or all messages."""
    parts = {name: pair[name] for name in (*answers, "prompt") if pair.get(name) is not None}
    are_texts = [isinstance(value, str) for value in parts.values()]
    if not ({*answers} <= parts.keys() and ("prompt" in parts or not any(are_texts))):
        raise ValueError(
            f"{where}: must have prompt, {' and '.join(answers)}, or the same with _ids, got {sorted(pair)}. Split "
            "texts into prompt and answer; messages may hold the prompt."
        )
    if tokenizer is None:
        raise ValueError(f"{where}: texts and messages need a tokenizer. Pass it.")
    if not all(are_texts) and any(are_texts):
        kinds = ", ".join(
            f"{name} as {'a text' if isinstance(value, str) else 'messages'}" for name, value in parts.items()
        )
        raise ValueError(f"{where}: must be all texts or all messages, got {kinds}. Convert them.")
    for name, value in parts.items():
        if not isinstance(value, str) and not is_messages(value):
            raise ValueError(f"{where}: {name} must be a text or messages, got {str(value)[:60]!r}. Correct it.")
        check_characters(where, value if isinstance(value, str) else "")


def _read_ids(pair: Mapping[str, Any]) -> list[Answer]:
    """Return the answers of a pair that holds token ids; [] if it holds texts or messages."""

    # Each part may have one of several names, and a mask that is 0 for padding.
    def unpadded(part: str, *names: str) -> list[int] | None:
        tokens = next((pair[f"{part}_{name}"] for name in names if f"{part}_{name}" in pair), None)
        if tokens is None:
            return None
        mask = pair.get(f"{part}_attention_mask", [1] * len(tokens))
        return [int(token) for token, seen in zip(tokens, mask, strict=True) if seen]

    prompt, encoded = unpadded("prompt", "ids", "input_ids"), []
    for part in ANSWERS:
        ids, labels = unpadded(part, "ids", "input_ids"), unpadded(part, "labels")
        # With labels, the ids include the prompt.
        if ids is not None and labels is not None:
            first = next((i for i, label in enumerate(labels) if label != -100), len(labels))
            encoded.append(Answer(ids[:first], ids[first:]))
        elif ids is not None and prompt is not None:
            encoded.append(Answer(prompt, ids))
    return encoded if len(encoded) == len(ANSWERS) else []


def _encode_texts(pair: Mapping[str, Any], tokenizer: Tokenizer, answers: Sequence[str]) -> list[Answer]:
    """Return the answers of a pair that holds texts.

    A token that contains characters of both the prompt and the answer belongs to the answer.
    """
    eos = tokenizer.eos_token_id
    end = [] if eos is None else [eos]
    sequences = [tokenizer.encode(pair["prompt"] + pair[answer]) for answer in answers]
    sequences = [drop_second_bos(tokenizer, ids if ids[-1:] == end else ids + end) for ids in sequences]
    prompt = tokenizer.encode(pair["prompt"])
    prompt = drop_second_bos(tokenizer, prompt[:-1] if prompt[-1:] == end else prompt)
    # Both answers must have the same prompt tokens. The prompt therefore ends before the first token at which one of
    # the sequences differs from the tokens of the prompt alone.
    first = min(shared_prefix(prompt, ids) for ids in sequences)
    return [Answer(ids[:first], ids[first:]) for ids in sequences]


def _encode_chats(
    where: str,
    pair: Mapping[str, Any],
    tokenizer: Tokenizer,
    media: MediaReader,
    columns: Columns,
    answers: Sequence[str],
    on_unrendered: str,
) -> list[Answer]:
    """For a pair that holds messages, return an `Answer` (prompt and answer as token ids) for each answer.

    Args:
        media: reader for the prompt's images.
        columns: maps each kind of media to the prompt's images in its column.
        where, pair, tokenizer, answers, on_unrendered: see `encode_pair`.
    """
    # Without a prompt, the messages with which both answers begin are the prompt.
    has_prompt = pair.get("prompt") is not None
    shared = 0 if has_prompt else shared_prefix(*(pair[name] for name in answers))
    shortest = min(answers, key=lambda name: len(pair[name]))
    if not has_prompt and shared == len(pair[shortest]):
        others = [name for name in answers if name != shortest and len(pair[name]) > shared]
        fault = f"{shortest} is the beginning of {others[0]}" if others else "they are equal"
        raise ValueError(
            f"{where}: {' and '.join(answers)} must differ in their last messages, got: {fault}. Leave the pair out, "
            "or write the messages before the answers into prompt."
        )
    prompt = pair["prompt"] if has_prompt else pair[answers[0]][:shared]
    prompt, sources = media.place(where, prompt, columns)
    prompt = read_messages(f"{where}, prompt", prompt, media.kinds)
    images = media.open(where, sources)

    encoded = []
    for name in answers:
        answer, sources = media.place(where, pair[name][shared:], dict.fromkeys(columns, ()))
        if sources:
            raise ValueError(f"{where}: {name} must be text, got an image or a video. Only prompts may have some.")
        answer = read_messages(f"{where}, {name}", answer)
        if not all(map(is_learned, answer)):
            raise ValueError(
                f"{where}: {name} must have no message with weight 0: answers are compared as a whole. Move messages "
                "that are not learned into the prompt, or leave the weight out."
            )

        # Render the conversation, and find the tokens of the answer in it.
        learned = [False] * len(prompt) + [True] * len(answer)
        (rendering,) = render_examples(where, tokenizer, [*prompt, *answer], learned, pair, on_unrendered=on_unrendered)
        text, spans = rendering.text, rendering.spans
        check_characters(where, text)
        text, moved, counts = media.write(where, text, spans, images)
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
        mask = answer_mask(encoding.offsets, moved or [])
        if not any(mask):
            raise ValueError(f"{where}: an answer must be a message of the assistant that is not empty, got {answer}.")
        # The answer extends from its first to its last learned token, including tool results in between.
        first, last = mask.index(True), len(mask) - mask[::-1].index(True)
        ids = encoding.ids[:last]
        encoded.append(Answer(ids[:first], ids[first:], media.locate(where, ids, images, counts)))
    return encoded
