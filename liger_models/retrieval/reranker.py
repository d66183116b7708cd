"""Rerankers (cross-encoders): causal models that say with one of two tokens whether a document fits a query."""

import itertools
import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_models.arch.auto import load_by_name
from liger_models.base.causal_lm import CausalLM
from liger_models.data.batch import Batch
from liger_models.distributed.ranks import run_on_rank_zero
from liger_models.generation.eval_mode import evaluating
from liger_models.retrieval.embedder import HUB_OPTIONS
from liger_models.retrieval.settings import RerankerSettings
from liger_models.retrieval.texts import encode_texts, pack_texts, pool, regroup, split_by_tokens
from liger_models.text.tokenizer import Tokenizer


class LigerReranker:
    """A causal model that scores how well documents fit queries.

    Args:
        model: the causal model, with its head.
        settings: the prompt and the two answer tokens, by default as in Qwen3-Reranker.

    Raises:
        ValueError: ``yes`` or ``no`` in the settings is not a single token.
    """

    def __init__(self, model: CausalLM, settings: RerankerSettings | None = None) -> None:
        self.model, self.settings = model, settings or RerankerSettings()
        self.answers = answer_ids(model.tokenizer, self.settings)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> "LigerReranker":
        """Load any causal model from a folder or the hub as a reranker.

        If reranker settings are stored with the model, they are used.

        Args:
            name: folder, or name of a repository on the hub.
            options: arguments of `CausalLM.from_pretrained`, such as ``dtype`` and ``device``.
        """
        settings = RerankerSettings.read(name, **{key: options[key] for key in HUB_OPTIONS if key in options})
        return cls(load_by_name(str(name), **options), settings)

    def __call__(self, batch: Batch) -> Tensor:
        """Return the scores, [texts] fp32, of a batch of prompts from `pack_texts`. The scores are differentiable."""
        return score(self.model, batch, self.answers)

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[str, str]], *, batch_tokens: int = 16384) -> Tensor:
        """Return the scores of (query, document) pairs, without gradients.

        Args:
            pairs: the pairs. As in sentence-transformers' ``CrossEncoder``, a query or a document may be empty. Its
                place in the prompt is then empty.
            batch_tokens: maximum number of tokens in a forward. Each longer prompt gets a separate forward.

        Returns:
            [pairs] fp32, on the device of the model: the log-odds of ``yes``. Their sigmoid is the probability of
            ``yes``.

        Raises:
            TypeError: a query or a document is not a text.
            ValueError: the maximum length leaves no room for a query and a document, or ``batch_tokens`` is below 1.
        """
        tokenizer = self.model.tokenizer
        limit = self.settings.max_length or getattr(self.model.config, "max_position_embeddings", None)
        encoded = encode_prompts(tokenizer, self.settings, pairs, limit)
        scores = torch.empty(len(encoded), dtype=torch.float32, device=self.model.device)
        with evaluating([*self.model.modules()]):
            for members in split_by_tokens(encoded, batch_tokens):
                batch = pack_texts([encoded[member] for member in members], tokenizer.padding_id)
                scores[members] = self({name: tensor.to(self.model.device) for name, tensor in batch.items()})
        return scores

    def save_pretrained(self, folder: str | os.PathLike[str], *, dtype: torch.dtype | str | None = None) -> None:
        """Write a folder that `from_pretrained` and the ``CrossEncoder`` of sentence-transformers load.

        Args:
            folder: the folder.
            dtype: dtype of the tensors; None for the dtype of each parameter.
        """
        self.model.save_pretrained(folder, dtype=dtype)
        run_on_rank_zero(f"save_pretrained {folder}", lambda: self.settings.write(folder, *self.answers))


@dataclass(frozen=True)
class RerankerTexts:
    """Creates the texts of training examples: a prompt for each document of a query.

    Args:
        settings: the prompt.
        max_length: maximum number of tokens; longer prompts are cut.
    """

    settings: RerankerSettings
    max_length: int | None = None
    by_document: ClassVar[bool] = True

    def __call__(self, tokenizer: Tokenizer, pairs: Sequence[Any]) -> list[list[Tensor]]:
        """Return the token ids of the texts of each example; see `PairDataset`."""
        written = [(pair.query, document) for pair in pairs for document in pair.documents]
        encoded = encode_prompts(tokenizer, self.settings, written, self.max_length)
        return regroup(encoded, (len(pair.documents) for pair in pairs))


def score(model: CausalLM, batch: Batch, answers: tuple[int, int]) -> Tensor:
    """Return the scores for a batch of prompts, [texts] fp32. A score is the logit of yes minus the logit of no.

    Only these two logits are computed, and only for the last token of each prompt.

    Args:
        model: the model, which may be sharded by `apply_fsdp`.
        batch: a batch from `pack_texts`, on the model's device.
        answers: the token ids of yes and no.
    """
    ids, bounds, head = batch["input_ids"], batch["cu_seqlens"], model.lm_head

    def difference(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        last = pool(x, bounds, batch["texts"], "lasttoken")  # [texts, C]
        logits = last @ weight[[*answers]].to(last.dtype).T * head.logit_scale  # [texts, 2]
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return logits[:, 0] - logits[:, 1]

    scores: Tensor = model(ids, cu_seqlens=bounds, labels=ids, loss_function=difference).loss
    return scores


def answer_ids(tokenizer: Tokenizer, settings: RerankerSettings) -> tuple[int, int]:
    """Return the token ids of the answers ``yes`` and ``no`` in the settings.

    Raises:
        ValueError: an answer is not a single token.
    """
    ids = []
    for name in ("yes", "no"):
        text = getattr(settings, name)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise ValueError(
                f"RerankerSettings: {name} must be one token, got {text!r} of {len(tokens)} tokens. Choose another."
            )
        ids.append(tokens[0])
    return ids[0], ids[1]


def encode_prompts(
    tokenizer: Tokenizer, settings: RerankerSettings, pairs: Sequence[tuple[str, str]], max_length: int | None
) -> list[Tensor]:
    """Return the token ids of the prompt for each pair of a query and a document, [n] int32.

    Args:
        tokenizer: the tokenizer of the model. No special tokens are added.
        settings: the prompt.
        pairs: pairs of a query and a document, each of which may be empty.
        max_length: maximum number of tokens in a prompt. Longer prompts are cut at the end of the document. None for no
            limit.

    Raises:
        TypeError: a query or a document is not a text.
        ValueError: ``max_length`` leaves no room for a query and a document.
    """
    for text in itertools.chain.from_iterable(pairs):
        if not isinstance(text, str):
            raise TypeError(
                f"rerank: a query and a document must be texts, got {str(text)[:60]!r} of type {type(text).__name__}. "
                "For a missing text, pass an empty one."
            )
    prefix, suffix = (
        torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int32, device="cpu")
        for text in (settings.prefix, settings.suffix)
    )
    if max_length is not None:
        max_length -= len(prefix) + len(suffix)
        if max_length < 1:
            raise ValueError(
                f"rerank: length must be more than the {len(prefix) + len(suffix)} tokens of prefix and suffix, got "
                f"{max_length + len(prefix) + len(suffix)}. Raise it."
            )
    bodies = [settings.body(query, document) for query, document in pairs]
    encoded = encode_texts(tokenizer, bodies, max_length, add_special_tokens=False)
    if max_length is not None:
        cut = {query for (query, _), body in zip(pairs, encoded, strict=True) if len(body) == max_length}
        _warn_of_long_queries(tokenizer, settings, cut, max_length)
    return [torch.cat([prefix, body, suffix]) for body in encoded]


def _warn_of_long_queries(
    tokenizer: Tokenizer, settings: RerankerSettings, queries: Collection[str], max_length: int
) -> None:
    """Warn if a query and the instruction fill ``max_length`` tokens, so that no token of the document is left."""
    texts = [settings.body(query, "") for query in queries]
    if any(len(text) >= max_length for text in encode_texts(tokenizer, texts, None, add_special_tokens=False)):
        warnings.warn(
            f"rerank: a query and its instruction have {max_length} tokens or more, so its documents are cut away. "
            "Raise length, or shorten the query.",
            stacklevel=4,
        )
