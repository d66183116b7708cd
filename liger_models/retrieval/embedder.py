"""Embedding models: decoders whose hidden states are pooled to one vector per text."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_models.arch.auto import load_by_name
from liger_models.base.causal_lm import CausalLM
from liger_models.data.batch import Batch
from liger_models.distributed.ranks import run_on_rank_zero
from liger_models.generation.eval_mode import evaluating
from liger_models.retrieval.settings import EmbedderSettings
from liger_models.retrieval.texts import encode_texts, pack_texts, pool, regroup, split_by_tokens
from liger_models.text.tokenizer import Tokenizer

HUB_OPTIONS = ("revision", "cache_dir", "token", "local_files_only")
"""Options for loading that also apply to sentence-transformers' files."""


class LigerEmbedder:
    """An embedding model.

    Args:
        model: the decoder, causal or bidirectional (`Decoder.set_bidirectional`).
        settings: pooling, normalization and prompts.
    """

    def __init__(self, model: CausalLM, settings: EmbedderSettings | None = None) -> None:
        self.model, self.settings = model, settings or EmbedderSettings()

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> "LigerEmbedder":
        """Load an embedding model from a folder or from the hub.

        If the folder was written by sentence-transformers, its settings apply. With any other checkpoint of a supported
        family, the embedding of a text is the normalized hidden state of its last token.

        Args:
            name: folder, or name of a repository on the hub.
            options: arguments of `CausalLM.from_pretrained`, such as ``dtype`` and ``device``. By default, the model
                has no head (``head=False``).

        Raises:
            ValueError: the folder has modules that are not supported; otherwise as for `CausalLM.from_pretrained`.
        """
        settings = EmbedderSettings.read(name, **{key: options[key] for key in HUB_OPTIONS if key in options})
        return cls(load_by_name(str(name), **{"head": False, **options}), settings)

    def __call__(self, batch: Batch) -> Tensor:
        """Return the embeddings for a batch from `pack_texts`, [texts, C] fp32, with gradients."""
        return embed(self.model, batch, self.settings)

    @torch.no_grad()
    def encode(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        batch_tokens: int = 16384,
    ) -> Tensor:
        """Return the embeddings of texts, without gradients.

        Args:
            texts: one text or several.
            prompt_name: name of a prompt in the settings, such as "query"; by default ``settings.default_prompt``.
            prompt: a text to put before each text, instead of a prompt from the settings.
            dimensions: number of leading dimensions to keep before the normalization (Matryoshka embeddings); None for
                all.
            batch_tokens: maximum number of tokens in a forward. Each longer text gets a separate forward.

        Returns:
            [texts, C] fp32, on the device of the model; [C] for one text.

        Raises:
            ValueError: there is no such prompt, both a prompt and a prompt name are given, or ``dimensions`` or
                ``batch_tokens`` is out of range.
        """
        settings, many = self.settings, not isinstance(texts, str)
        if prompt is not None and prompt_name is not None:
            raise ValueError(f"encode: prompt or prompt_name must be given, got both ({prompt_name!r}).")
        if prompt is None:
            chosen = settings.default_prompt if prompt_name is None else prompt_name
            if chosen is not None and chosen not in settings.prompts:
                raise ValueError(
                    f"encode: prompt_name must be one of {', '.join(settings.prompts) or 'none'}, got {chosen!r}. Pass "
                    "a text as prompt instead."
                )
            prompt = settings.prompts[chosen] if chosen else ""

        listed: Sequence[str] = [texts] if isinstance(texts, str) else texts
        limit = settings.max_length or getattr(self.model.config, "max_position_embeddings", None)
        encoded = encode_texts(self.model.tokenizer, [prompt + text for text in listed], limit)
        width, device = dimensions or self.model.config.hidden_size, self.model.device
        vectors = torch.empty(len(encoded), width, dtype=torch.float32, device=device)
        with evaluating([*self.model.modules()]):
            for members in split_by_tokens(encoded, batch_tokens):
                batch = pack_texts([encoded[member] for member in members], self.model.tokenizer.padding_id)
                batch = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
                vectors[members] = embed(self.model, batch, settings, dimensions)
        return vectors if many else vectors[0]

    def save_pretrained(self, folder: str | os.PathLike[str], *, dtype: torch.dtype | str | None = None) -> None:
        """Write a folder that both sentence-transformers and `from_pretrained` load.

        Args:
            folder: the folder.
            dtype: dtype of the tensors; None for the dtype of each parameter.

        Raises:
            ValueError: the model has adapters. Merge them first.
        """
        self.model.save_pretrained(folder, dtype=dtype)
        write_settings(self.model, self.settings, folder)


def write_settings(model: CausalLM, settings: EmbedderSettings, folder: str | os.PathLike[str]) -> None:
    """Add sentence-transformers' files to the folder of a saved model or adapter.

    Every rank must call this function.
    """
    size, bidirectional = model.config.hidden_size, model.bidirectional
    run_on_rank_zero(f"settings {folder}", lambda: settings.write(folder, size, bidirectional=bidirectional))


@dataclass(frozen=True)
class EmbedderTexts:
    """Creates the texts of training examples: a query and its documents, each with its prompt.

    Args:
        query_prompt, document_prompt: texts before the query and before each document.
        max_length: maximum number of tokens; longer texts are cut.
    """

    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None
    by_document: ClassVar[bool] = False

    def __call__(self, tokenizer: Tokenizer, pairs: Sequence[Any]) -> list[list[Tensor]]:
        """Return the token ids of the texts of each example; see `PairDataset`."""
        written = [[self.query_prompt + pair.query] for pair in pairs]
        for texts, pair in zip(written, pairs, strict=True):
            texts += [self.document_prompt + document for document in pair.documents]
        return regroup(encode_texts(tokenizer, [*itertools.chain(*written)], self.max_length), map(len, written))


def embed(model: CausalLM, batch: Batch, settings: EmbedderSettings, dimensions: int | None = None) -> Tensor:
    """Return the embeddings for a batch from `pack_texts`, [texts, C] fp32.

    Args:
        model: the model, which may be sharded by `apply_fsdp`.
        batch: the batch, on the model's device. Only its tensors ``input_ids``, ``cu_seqlens`` and ``texts`` are read.
        settings: pooling and normalization.
        dimensions: number of leading dimensions to keep before the normalization; None for all.

    Raises:
        ValueError: ``dimensions`` is out of range.
    """
    C = model.config.hidden_size
    if dimensions is not None and not 1 <= dimensions <= C:
        raise ValueError(f"embed: dimensions must be 1 to the model's hidden_size ({C}), got {dimensions}.")
    ids, bounds = batch["input_ids"], batch["cu_seqlens"]
    # The pooling is passed as a loss function, so that it runs inside the forward of the head, with which a forward
    # under FSDP ends. The head's product is not computed.
    pooled: Tensor = model(
        ids,
        cu_seqlens=bounds,
        labels=ids,
        loss_function=lambda x, weight, target: pool(x[..., :C], bounds, batch["texts"], settings.pooling),
    ).loss
    vectors = pooled[:, :dimensions]
    return F.normalize(vectors, dim=-1) if settings.normalize else vectors
