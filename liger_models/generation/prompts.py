"""Conversion of prompts into a padded batch of token ids."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.common.device import as_tensor
from liger_models.generation.options import Settings
from liger_models.layers.decoder import Decoder

Prompts = Tensor | Sequence[int] | Sequence[Tensor] | Sequence[Sequence[int]]
"""A tensor of integers [B, T], a single prompt, or a list of prompts. A prompt is a 1-D tensor or a list of ids."""


def batch_prompts(
    model: Decoder, prompts: Prompts, attention_mask: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor | None]:
    """Check prompts and return ``(ids, mask)``, both [B, T] int64 on the model's device.

    The mask is None if there is no padding.
    """
    device = model.device
    prompts = as_tensor(prompts) if hasattr(prompts, "__array__") else prompts  # from NumPy
    if isinstance(prompts, Tensor):
        ids = prompts[None] if prompts.dim() == 1 else prompts
        mask = None if attention_mask is None else as_tensor(attention_mask)
    else:
        if attention_mask is not None:
            raise ValueError("generate: attention_mask needs a tensor of prompts; a list is padded here.")
        ids, mask = _pad(prompts, settings.pad_token_id or 0)

    ids = check_ids(model, ids)

    # Check options that depend on the size of the batch.
    rows = len(ids) * settings.num_return_sequences
    if isinstance(settings.seed, list) and len(settings.seed) != rows:
        raise ValueError(
            f"generate: seed must be one integer, or one for each of the {rows} rows of the result, got "
            f"{settings.seed}."
        )
    if settings.cache is not None and not settings.cache.capacity >= ids.shape[1] + settings.max_new_tokens - 1:
        raise ValueError(
            f"generate: cache must have room for {ids.shape[1] + settings.max_new_tokens - 1} tokens, got "
            f"{None if settings.cache is None else settings.cache.capacity}. Make it larger."
        )

    # Take the caller's mask, or recognize padding by the padding token.
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"generate: attention_mask must be {list(ids.shape)} like input_ids, got "
            f"{None if mask is None else list(mask.shape)}."
        )
    if mask is None and settings.pad_token_id is not None and settings.pad_token_id not in settings.eos_token_id:
        mask = ids != settings.pad_token_id
    if mask is None:
        return ids, None
    mask = (mask != 0).to(device, torch.int64)
    ends_with_tokens, is_full = torch.stack([mask[:, -1].all(), mask.all()]).tolist()
    if not ends_with_tokens:
        wrong = (mask[:, -1] == 0).nonzero().flatten().tolist()
        raise ValueError(
            f"generate: each row must end with a token, got padding at the end of rows {wrong}. Pad on the left, pass "
            "a list of prompts, or pass an attention_mask if the padding tokens are meant."
        )
    return ids, None if is_full else mask


def check_ids(model: Decoder, ids: Tensor) -> Tensor:
    """Check ids, and return them on the model's device, [B, T] int64.

    The check synchronizes with the device of the ids.

    Raises:
        ValueError: ``ids`` does not have the shape [B, T], has no tokens, or has an id that the model does not have.
    """
    vocab = count_embeddings(model)
    if ids.dim() != 2:
        raise ValueError(f"generate: input_ids must be [B, T], got {list(ids.shape)}.")
    if ids.numel() == 0:
        raise ValueError(f"generate: input_ids must hold at least one token per row, got {list(ids.shape)}.")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"generate: input_ids must be integers, got {ids.dtype}.")
    ids = ids.to(torch.int64)
    placeholder = getattr(model, "placeholder_id", None)
    tokens = ids if placeholder is None else ids.masked_fill(ids == placeholder, 0)
    low, high = torch.stack(tokens.aminmax()).tolist()
    if not (low >= 0 and high < vocab):
        raise ValueError(
            f"generate: input_ids must be in [0, {vocab}), got {low} to {high}. Does the tokenizer belong to the model?"
        )
    return ids.to(model.device)


def count_embeddings(model: Decoder) -> int:
    """Return the number of rows of the embedding, which PEFT may have wrapped.

    An id is valid if the embedding has a row for it. The head need not have a row for it, because ids of image
    placeholders may exceed the head's vocabulary.
    """
    modules: Any = model.embed_tokens.modules()
    rows: int = next(module.num_embeddings for module in modules if hasattr(module, "num_embeddings"))
    return rows


def _pad(prompts: Any, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad a list of prompts, or a single prompt, on the left. Returns ``(ids, mask)``, both [B, T]."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | Mapping):
        raise ValueError(f"generate: input_ids must be prompts or a tensor of them, got {type(prompts).__name__}.")
    items: list[Any] = list(prompts)
    rows = [as_tensor(prompt) for prompt in ([items] if items and isinstance(items[0], Integral) else items)]
    shapes = [list(row.shape) for row in rows]
    if not rows or not all(row.dim() == 1 and len(row) for row in rows):
        raise ValueError(
            f"generate: input_ids must be a list of prompts with at least one token each, got shapes {shapes}."
        )
    T = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (T - len(row), 0), value=pad_token_id) for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return ids, torch.arange(T, device=ids.device) >= T - lengths[:, None]
