"""Preference pairs as batches: texts, chats, token ids, or what TRL's collators return."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from liger_models.base.processor import Processor
from liger_models.data.batch import Batch
from liger_models.data.encoding import read_messages, read_tools
from liger_models.data.media import place_media
from liger_models.generation.options import PromptInputs
from liger_models.kernels.checks import check
from liger_models.text.chat import answer_mask
from liger_models.text.tokenizer import Tokenizer

ANSWERS = ("chosen", "rejected")
IMAGE_FIELDS = ("images", "image")
"""Fields of a pair that hold images; TRL's names."""
IMAGE_INPUTS = frozenset(PromptInputs.__annotations__)
"""Arguments of a model's forward besides text."""

Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of an answer to it."""


def preference_batch(
    pairs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer | None = None,
    *,
    processor: Processor | None = None,
) -> Batch:
    """Pairs of a chosen and a rejected answer as one batch: all chosen sequences, then all rejected ones.

    It takes what TRL's trainers take for pairs, before and after their collators. A row is the prompt and its answer,
    without padding before or between them. Only the answer has labels.

    Args:
        pairs: a list of examples, or columns by name, in one of these forms:

            - ``prompt``, ``chosen`` and ``rejected`` as texts. Prompt and answer are tokenised as one text, with the
              tokenizer's special tokens and the end token; a token that spans both belongs to the answer.
            - The same as lists of messages for the chat template, optionally with ``tools`` and
              ``chat_template_kwargs``. Without ``prompt`` it is the messages that both answers begin with.
            - Token ids ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.
            - Token ids ``chosen_input_ids`` and ``rejected_input_ids``, with ``prompt_input_ids``, or with
              ``chosen_labels`` and ``rejected_labels`` if they include the prompt; if they are padded, on either side,
              also with ``chosen_attention_mask`` and so on.

            Or a collated batch: tensors ``input_ids``, ``attention_mask`` and ``completion_mask`` (also of TRL's
            unpaired data). Pixels and other inputs of a vision-language model are passed on.
        tokenizer: not needed for token ids.
        processor: of a vision-language model, instead of the tokenizer. The pairs are then lists of messages, with
            images in the parts of the prompt's messages, or in a field ``images`` (or ``image``), whose images stand
            where the prompt has parts ``{"type": "image"}``, or else before the text of the user's first message. An
            image is whatever `locate_image` takes.

    Returns:
        ``input_ids``, ``labels`` (−100 for prompt and padding) and ``attention_mask``, each [2 · pairs, T] int64, for a
        model's forward with ``return_log_probs``. Rows are padded on the right, with the tokenizer's padding id or 0.
        With images also what the processor makes of them, for all 2 · pairs rows, since both answers need them.

    Raises:
        ValueError: no pairs, a missing key, a tensor of token ids without its mask, an answer without tokens, images
            without a processor, or more or fewer images than places for them.
    """
    check(
        tokenizer is None or processor is None,
        "preference_batch: tokenizer or processor must be given, got both. The processor has a tokenizer.",
    )
    if isinstance(pairs, Mapping) and "completion_mask" in pairs:
        return _from_collated(pairs)
    if isinstance(pairs, Mapping):
        pairs = _from_columns(pairs, () if processor is None else IMAGE_FIELDS)
    check(len(pairs) > 0, "preference_batch: pairs must hold at least one, got none.")
    images: Batch = {}
    if processor is None:
        encoded = [
            encode_pair(f"preference_batch, pair {number}", pair, tokenizer) for number, pair in enumerate(pairs, 1)
        ]
        rows = [chosen for chosen, _ in encoded] + [rejected for _, rejected in encoded]
    else:
        rows, images = _encode_with_images(pairs, processor)
        tokenizer = processor.tokenizer
    filler = 0 if tokenizer is None else tokenizer.padding_id

    def padded(value: int, of_row: Callable[[list[int], list[int]], list[int]]) -> Tensor:
        return pad_sequence([torch.tensor(of_row(*row)) for row in rows], batch_first=True, padding_value=value)

    return {
        "input_ids": padded(filler, lambda prompt, answer: prompt + answer),
        "labels": padded(-100, lambda prompt, answer: [-100] * len(prompt) + answer),
        "attention_mask": padded(0, lambda prompt, answer: [1] * len(prompt + answer)),
        **images,
    }


def _from_collated(batch: Mapping[str, Any]) -> Batch:
    required = ("input_ids", "attention_mask", "completion_mask")
    check(
        all(isinstance(batch.get(name), Tensor) for name in required),
        f"preference_batch: a collated batch must have tensors {', '.join(required)}, got {sorted(batch)}.",
    )
    ids, mask, answers = (batch[name] for name in required)
    images = {name: value for name, value in batch.items() if name in IMAGE_INPUTS}
    return {"input_ids": ids, "labels": ids.masked_fill(answers == 0, -100), "attention_mask": mask, **images}


def _from_columns(pairs: Mapping[str, Any], fields: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One dict per pair out of columns by name, ``fields`` among them."""
    known = (*ANSWERS, "prompt", "tools", "chat_template_kwargs", *fields)
    columns = {name: column for name, column in pairs.items() if name.startswith(known)}
    sizes = {name: len(column) for name, column in columns.items()}
    check(
        len(set(sizes.values())) == 1 and not any(isinstance(column, str) for column in columns.values()),
        "preference_batch: columns must have equal lengths, with an entry for each pair, got "
        f"{sizes or sorted(pairs)}. A single pair goes into a list.",
    )
    for name, column in columns.items():
        mask = name.replace("input_ids", "attention_mask")
        check(
            mask in columns or not isinstance(column, Tensor),
            f"preference_batch: {name} is a tensor, which may be padded, and must come with {mask}. Add it.",
        )
    columns = {name: column.tolist() if isinstance(column, Tensor) else column for name, column in columns.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(next(iter(sizes.values())))]


def encode_pair(
    where: str, pair: Mapping[str, Any], tokenizer: Tokenizer | None, answers: Sequence[str] = ANSWERS
) -> list[Row]:
    """The rows of the chosen and of the rejected answer, or of other ``answers`` to one prompt."""
    images = [name for name in ("image", "images", *sorted(IMAGE_INPUTS)) if len(pair.get(name) or ()) > 0]
    check(
        not images,
        f"{where}: must be text, got {', '.join(images)}. Pass the model's processor: processor=model.processor.",
    )
    rows = _read_ids(pair) or _encode_texts(where, pair, tokenizer, answers)
    for name, (_, answer) in zip(answers, rows, strict=True):
        check(bool(answer), f"{where}: {name} must have tokens, got none. Leave it out.")
    return rows


def _encode_with_images(pairs: Sequence[Mapping[str, Any]], processor: Processor) -> tuple[list[Row], Batch]:
    """The rows of all chosen, then of all rejected answers, and the inputs that their images become."""
    tokenizer, texts, answers = processor.tokenizer, [], []
    found: list[tuple[str, Any, Mapping[str, Any]]] = []
    for side in ANSWERS:
        for number, pair in enumerate(pairs, 1):
            where = f"preference_batch, pair {number}"
            parts = [part for part in (*ANSWERS, "prompt") if pair.get(part) is not None]
            check(
                {*ANSWERS} <= {*parts} and not any(isinstance(pair[part], str) for part in parts),
                f"{where}: must have prompt, chosen and rejected as lists of messages, got {sorted(pair)}. With a "
                "processor pairs are chats.",
            )
            shared = 0 if "prompt" in parts else _shared_prefix(*(pair[name] for name in ANSWERS))
            prompt = pair["prompt"] if "prompt" in parts else pair[side][:shared]
            columns = {"image": [image for name in IMAGE_FIELDS for image in _listed(pair.get(name))]}
            messages, images = place_media(where, prompt, columns, processor.takes_bounds)
            messages = read_messages(where, [*messages, *pair[side][shared:]], ["image"])
            _, pictured = place_media(where, messages[len(prompt) :], {"image": []})
            check(not pictured, f"{where}: {side} must be text, got an image. Only prompts may have images.")
            variables = {"tools": read_tools(pair), **(pair.get("chat_template_kwargs") or {})}
            text, spans = tokenizer.render_answers(messages, **variables)
            earlier = sum(message.get("role") == "assistant" for message in messages[: len(prompt)])
            texts.append(text)
            answers.append(spans[earlier:])
            found += images
    out = processor(texts, answers=answers, return_tensors=None, padding=False, **processor.media(found))
    rows = []
    for number, (ids, mask) in enumerate(zip(out.pop("input_ids"), out.pop("assistant_masks"), strict=True)):
        where = f"preference_batch, pair {number % len(pairs) + 1}"
        check(any(mask), f"{where}: an answer must be a message of the assistant that is not empty, got none.")
        first, last = mask.index(1), len(mask) - mask[::-1].index(1)
        rows.append((ids[:first], ids[first:last]))
    del out["attention_mask"]
    return rows, out


def _listed(images: Any) -> Sequence[Any]:
    """The images of a field, which may be a list, one image, or None."""
    return images if isinstance(images, list | tuple) else [] if images is None else [images]


def _read_ids(pair: Mapping[str, Any]) -> list[Row]:
    """The rows of a pair of token ids; [] if it holds texts or messages."""

    def unpadded(part: str, *names: str) -> list[int] | None:
        given = next((pair[f"{part}_{name}"] for name in names if f"{part}_{name}" in pair), None)
        if given is None:
            return None
        mask = pair.get(f"{part}_attention_mask", [1] * len(given))
        return [int(token) for token, seen in zip(given, mask, strict=True) if seen]

    prompt, rows = unpadded("prompt", "ids", "input_ids"), []
    for part in ANSWERS:
        ids, labels = unpadded(part, "ids", "input_ids"), unpadded(part, "labels")
        if ids is not None and labels is not None:  # the ids include the prompt
            first = next((i for i, label in enumerate(labels) if label != -100), len(labels))
            rows.append((ids[:first], ids[first:]))
        elif ids is not None and prompt is not None:
            rows.append((prompt, ids))
    return rows if len(rows) == len(ANSWERS) else []


def _encode_texts(
    where: str, pair: Mapping[str, Any], tokenizer: Tokenizer | None, answers: Sequence[str]
) -> list[Row]:
    """The rows of a pair of texts or of lists of messages."""
    parts = (*answers, "prompt")
    check(
        all(part in pair for part in answers) and ("prompt" in pair or not isinstance(pair[answers[0]], str)),
        f"{where}: must have prompt, {' and '.join(answers)}, or the same with _ids, got {sorted(pair)}.",
    )
    check(tokenizer is not None, f"{where}: texts and messages need a tokenizer. Pass it.")
    assert tokenizer is not None
    texts = [isinstance(pair[part], str) for part in parts if part in pair]
    check(all(texts) or not any(texts), f"{where}: must be all texts or all messages, got both. Convert them.")
    if not any(texts):
        pair = {**pair, **{part: read_messages(f"{where}, {part}", pair[part]) for part in parts if part in pair}}
        shared = 0 if "prompt" in pair else _shared_prefix(*(pair[answer] for answer in answers))
        prompt = pair["prompt"] if "prompt" in pair else pair["chosen"][:shared]
        variables = {"tools": read_tools(pair), **(pair.get("chat_template_kwargs") or {})}
        return [_encode_chat(prompt, pair[answer][shared:], tokenizer, variables) for answer in answers]
    eos = tokenizer.eos_token_id
    end = [] if eos is None else [eos]
    sequences = [tokenizer.encode(pair["prompt"] + pair[answer]) for answer in answers]
    sequences = [ids if ids[-1:] == end else ids + end for ids in sequences]
    prompt = tokenizer.encode(pair["prompt"])
    prompt = prompt[:-1] if prompt[-1:] == end else prompt
    first = min(_shared_prefix(prompt, ids) for ids in sequences)
    return [(ids[:first], ids[first:]) for ids in sequences]


def _shared_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of items that two sequences have in common at the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _encode_chat(prompt: Any, answer: Any, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> Row:
    """Token ids before an answer, and those from the first to the last token in it that the assistant writes."""
    text, spans = tokenizer.render_answers([*prompt, *answer], **variables)
    earlier = sum(message.get("role") == "assistant" for message in prompt)
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    mask = answer_mask(encoding.offsets, spans[earlier:])
    check(any(mask), f"preference_batch: an answer must be a message of the assistant, got {answer}.")
    first, last = mask.index(True), len(mask) - mask[::-1].index(True)
    return encoding.ids[:first], encoding.ids[first:last]
