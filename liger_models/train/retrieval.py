"""Training objectives for retrieval models: embedding models for queries and documents, and rerankers.

The loss of a step compares all texts in all batches on all ranks, although a forward embeds only one batch of one rank.
If a step has several batches, the gradients of the embeddings are cached (GradCache): all texts are first embedded
without an autograd graph, and the gradient of the loss with respect to the embeddings is computed. Then each batch is
embedded again, now with an autograd graph, and the backward of the batch starts from the batch's part of this gradient.
The resulting gradients equal the gradients of one large batch.

Source: https://arxiv.org/abs/2101.06983 (GradCache).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from liger_models.base.causal_lm import CausalLM
from liger_models.common.random_state import random_state, restore_random_state
from liger_models.data.batch import Batch
from liger_models.data.dataset import PackedDataset
from liger_models.data.pairs import PairDataset
from liger_models.distributed.collectives import gather_channels, group_of
from liger_models.distributed.ranks import is_distributed, rank, run_on_rank_zero, world_size
from liger_models.losses.contrastive import LigerContrastiveLoss, LigerCoSENTLoss
from liger_models.parallel.gathered import reshard
from liger_models.parallel.step import mean_over_ranks
from liger_models.retrieval.embedder import EmbedderTexts, embed, write_settings
from liger_models.retrieval.metrics import ndcg, ranks_of_targets, recall
from liger_models.retrieval.reranker import RerankerTexts, answer_ids, score
from liger_models.retrieval.settings import EmbedderSettings, RerankerSettings
from liger_models.train.objectives import Load, Metrics, Objective, pair

BEST = (1, 10)
"""The values of k for recall@k."""
NDCG = 10
"""Number of top-ranked documents that count in nDCG."""


class RetrievalObjective(Objective):
    """The base class of the objectives for retrieval models."""

    formats = ("scored-pair", "contrastive")
    shares_rows, compares, generates = False, True, False

    def __init__(self, options: Any, **settings: Any) -> None:
        super().__init__(options)
        self.name, self.options, self.evaluated = options.objective, options, list[Any]()
        if options.sample_prompt is not None:
            raise ValueError(
                f"TrainOptions: sample_prompt must be left out with objective {options.objective}, whose model does "
                f"not write texts, got {options.sample_prompt!r}."
            )

    def prepare(self, model: CausalLM, load: Load) -> None:
        """See `Objective.prepare`."""
        if model.visual is not None:
            raise ValueError(f"train: objective {self.name} takes text models, got {type(model).__name__}.")

    def texts(self) -> Any:
        """Return the function that creates the texts of an example; see `PairDataset`."""
        raise NotImplementedError

    def dataset(self, source: Any, model: CausalLM, *, overflow: str | None, **options: Any) -> PackedDataset:
        """See `Objective.dataset`."""
        return PairDataset(source, model.tokenizer, texts=self.texts(), **options)

    def eval_dataset(self, source: Any, model: CausalLM, **options: Any) -> PackedDataset:
        """See `Objective.eval_dataset`."""
        return super().eval_dataset(source, model, complete=False, **options)


class EmbedObjective(RetrievalObjective):
    """Trains an embedding model.

    In contrastive training, the embedding of a query moves toward the embedding of its document. In training on scored
    pairs, the similarity of the two embeddings of a pair moves toward the score of the pair.
    """

    has_head = False

    def __init__(self, options: Any, **settings: Any) -> None:
        super().__init__(options)
        if options.batch_size < 2:
            raise ValueError(
                "TrainOptions: batch_size must be at least 2 with objective embed, which compares the texts of a "
                f"batch, got {options.batch_size}."
            )
        self.dimensions = tuple(settings.pop("matryoshka_dims", ()))
        shared = {"temperature": settings.pop("temperature", 0.05), "dimensions": self.dimensions}
        self.contrastive = LigerContrastiveLoss(symmetric=settings.pop("symmetric", False), **shared)
        self.cosent = LigerCoSENTLoss(**shared)
        self.bidirectional = settings.pop("bidirectional", None)
        if "pooling" in settings:
            EmbedderSettings(pooling=settings["pooling"])  # raises an error before a model is loaded
        self.given = settings
        self.settings = EmbedderSettings()

    def prepare(self, model: CausalLM, load: Load) -> None:
        """See `Objective.prepare`."""
        super().prepare(model, load)
        size = model.config.hidden_size
        if any(dimension > size for dimension in self.dimensions):
            raise ValueError(
                f"TrainOptions: matryoshka_dims must be at most the model's hidden_size ({size}), got "
                f"{[*self.dimensions]}."
            )
        if self.bidirectional is not None:
            model.set_bidirectional(self.bidirectional)

        # The settings of the checkpoint, changed by the options.
        settings = EmbedderSettings.read(self.options.model) or EmbedderSettings()
        names = {"query_prompt": "query", "document_prompt": "document"}
        prompts = {name: self.given[option] for option, name in names.items() if option in self.given}
        self.settings = replace(
            settings,
            pooling=self.given.get("pooling", settings.pooling),
            prompts={**settings.prompts, **prompts},
            max_length=self.options.length,
        )

    def texts(self) -> EmbedderTexts:
        """See `RetrievalObjective.texts`."""
        prompts = self.settings.prompts
        return EmbedderTexts(prompts.get("query", ""), prompts.get("document", ""), self.options.length)

    def step(self, model: CausalLM, batches: list[Batch], backward: Callable[[Tensor], None]) -> tuple[Tensor, Metrics]:
        """See `Objective.step`."""
        if len(batches) == 1:
            loss, metrics = self.compare([embed(model, batches[0], self.settings)], batches)
            backward(loss)
            return loss.detach(), metrics

        # Compute all embeddings without a graph. Save the random states, because the second computation needs the
        # same dropout.
        states, embeddings = [], []
        with torch.no_grad():
            for batch in batches:
                states.append(random_state(model.device))
                embeddings.append(embed(model, batch, self.settings))
        reshard(model)
        after = random_state(model.device)

        # Compute the gradient of the loss, and continue the backward of each batch with the batch's part of the
        # gradient.
        leaves = [vectors.requires_grad_() for vectors in embeddings]
        loss, metrics = self.compare(leaves, batches)
        gradients = torch.autograd.grad(loss, leaves)
        for batch, state, gradient in zip(batches, states, gradients, strict=True):
            restore_random_state(state, model.device)
            backward((embed(model, batch, self.settings) * gradient).sum())
        restore_random_state(after, model.device)
        return loss.detach(), metrics

    def compare(
        self, embeddings: list[Tensor], batches: list[Batch], *, across_ranks: bool = True
    ) -> tuple[Tensor, Metrics]:
        """Compute the loss and metrics of this rank's examples.

        Args:
            embeddings: the embeddings of each batch, [texts, C].
            batches: this rank's batches, from a `PairDataset`.
            across_ranks: whether the examples are compared with the examples of all ranks. If so, every rank must call
                this method.
        """
        gather = _gather if across_ranks else (lambda x: x)

        # Concatenate the queries of all batches, then their documents, then the negative documents.
        sizes = [len(batch["counted"]) for batch in batches]
        queries, documents, negatives = _by_role(embeddings, sizes)
        counted = torch.cat([batch["counted"] for batch in batches])
        similarity = F.cosine_similarity(queries.detach(), documents.detach())
        metrics = {"positive_similarity": pair((similarity * counted).sum(), counted.sum())}

        if "scores" in batches[0]:
            first, second = gather(queries), gather(documents)
            scores, valid = gather(torch.cat([batch["scores"] for batch in batches])), gather(counted)
            loss = self.cosent(first[valid], second[valid], scores[valid])
            return loss, metrics  # all ranks have the same loss, and gradients are averaged

        # Equal documents are merged, so that a query's own document is never one of its negatives.
        query_keys, document_keys, negative_keys = _by_role([batch["keys"] for batch in batches], sizes)
        ours = torch.cat([document_keys, negative_keys])
        everyone = gather(torch.cat([documents, negatives]))
        column_keys, columns = _distinct(gather(ours), everyone)
        row_keys, rows = _distinct(gather(query_keys), gather(queries))
        loss = self.contrastive(
            queries[counted],
            columns,
            torch.searchsorted(column_keys, document_keys[counted]),
            all_queries=rows,
            query_target=torch.searchsorted(row_keys, query_keys[counted]),
        )
        return loss, metrics

    def evaluate(self, model: CausalLM, batch: Batch) -> Metrics:
        """See `Objective.evaluate`. The examples of a batch are compared only with each other.

        A batch holds consecutive examples of the data, however many ranks there are. The loss therefore does not depend
        on the number of ranks.
        """
        embeddings = embed(model, batch, self.settings)
        loss, metrics = self.compare([embeddings], [batch], across_ranks=False)
        number = batch["counted"].sum()
        total = torch.where(number > 0, loss * number, torch.zeros_like(loss))
        self.evaluated.append((embeddings.cpu(), {name: tensor.cpu() for name, tensor in batch.items()}))
        return {"loss": pair(total, number), **metrics}

    def finish_evaluation(self, device: torch.device) -> Metrics:
        """Compute the metrics of an evaluation.

        For contrastive data, the metrics are recall@k and nDCG over all documents of the evaluation. For scored pairs,
        the metrics are Spearman's rank correlation and nDCG.
        """
        queries, documents, keys, targets, scores, groups = (list[Tensor]() for _ in range(6))
        for embeddings, batch in self.evaluated:
            size = len(batch["counted"])
            if not batch["counted"].all():  # this example only fills the batch
                continue
            queries.append(embeddings[:size])
            documents.append(embeddings[size:])
            keys.append(batch["keys"][size:])
            targets.append(batch["keys"][size : 2 * size])
            groups.append(batch["query_keys"])
            scores.append(batch.get("scores", torch.empty(0, device="cpu")))
        self.evaluated = []
        parts = [_collect(part) for part in (queries, documents, keys, targets, scores, groups)]
        if not len(parts[0]):
            return {}
        queries_, documents_, keys_, targets_, scores_, groups_ = (part.to(device) for part in parts)

        if len(scores_):
            cosines = F.cosine_similarity(queries_, documents_)
            return {"spearman": pair(_spearman(cosines, scores_), 1), **_mean_ndcg(cosines, scores_, groups_)}
        column_keys, columns = _distinct(keys_, documents_)
        columns, rows = F.normalize(columns, dim=-1), F.normalize(queries_, dim=-1)
        ranks = ranks_of_targets(rows, columns, torch.searchsorted(column_keys, targets_))
        gains = torch.where(ranks < NDCG, 1 / (ranks + 2.0).log2(), 0.0)
        metrics = {f"recall@{k}": pair(recall(ranks, k), 1) for k in BEST}
        return {**metrics, f"ndcg@{NDCG}": pair(gains.mean(), 1)}

    def export(self, model: CausalLM, folder: Path) -> None:
        """See `Objective.export`."""
        write_settings(model, self.settings, folder)


class RerankObjective(RetrievalObjective):
    """Trains a reranker.

    The score of a document is the logit of "yes" minus the logit of "no" after a prompt with the query and the
    document.
    """

    def __init__(self, options: Any, **settings: Any) -> None:
        super().__init__(options)
        self.given, self.settings = settings, RerankerSettings()
        self.answers = (0, 0)

    def prepare(self, model: CausalLM, load: Load) -> None:
        """See `Objective.prepare`."""
        super().prepare(model, load)
        settings = RerankerSettings.read(self.options.model) or RerankerSettings()
        self.settings = replace(settings, **self.given, max_length=self.options.length)
        self.answers = answer_ids(model.tokenizer, self.settings)

    def texts(self) -> RerankerTexts:
        """See `RetrievalObjective.texts`."""
        return RerankerTexts(self.settings, self.options.length)

    def dataset(self, source: Any, model: CausalLM, *, overflow: str | None, **options: Any) -> PackedDataset:
        """See `Objective.dataset`.

        Raises:
            ValueError: a score is below 0 or above 1.
        """
        data: Any = super().dataset(source, model, overflow=overflow, **options)
        wrong = data.score_outside(0.0, 1.0)
        if wrong is not None:
            raise ValueError(
                f"train: scores must be from 0 to 1 with objective rerank, which learns probabilities, got {wrong:g}. "
                "Scale them."
            )
        return data  # type: ignore[no-any-return]

    def num_items(self, batches: list[Batch]) -> Tensor | None:
        """Return the number of documents in a step, averaged over the ranks."""
        return mean_over_ranks(torch.stack([_weights(batch).sum() for batch in batches]).sum()).clamp_min(1)

    def loss(self, model: CausalLM, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, Metrics]:
        """See `Objective.loss`."""
        assert num_items is not None
        total, metrics, _ = self._run(model, batch)
        return total / num_items, metrics

    def evaluate(self, model: CausalLM, batch: Batch) -> Metrics:
        """See `Objective.evaluate`."""
        total, metrics, scores = self._run(model, batch)
        if batch["counted"].all():
            groups = batch["query_keys"][batch["example"]]
            self.evaluated.append([tensor.cpu() for tensor in (scores, batch["scores"], groups)])
        return {"loss": pair(total, _weights(batch).sum()), **metrics}

    def _run(self, model: CausalLM, batch: Batch) -> tuple[Tensor, Metrics, Tensor]:
        """Return the sum of the losses in a batch, the metrics of the batch, and the score of each document."""
        scores, labels, weights = score(model, batch, self.answers), batch["scores"], _weights(batch)
        losses = F.binary_cross_entropy_with_logits(scores, labels, weights, reduction="sum")
        right = ((scores > 0) == (labels > 0.5)) * weights
        return losses, {"accuracy": pair(right.sum(), weights.sum())}, scores.detach()

    def finish_evaluation(self, device: torch.device) -> Metrics:
        """Compute nDCG over the documents of each query."""
        parts = [*zip(*self.evaluated, strict=True)] or [()] * 3
        scores, labels, groups = map(_collect, parts)
        self.evaluated = []
        return _mean_ndcg(scores, labels, groups)

    def export(self, model: CausalLM, folder: Path) -> None:
        """See `Objective.export`."""
        run_on_rank_zero(f"settings {folder}", lambda: self.settings.write(folder, *self.answers))


def _weights(batch: Batch) -> Tensor:
    """Return a weight for each text of a batch, [texts] fp32: 1, or 0 if the text only fills the batch."""
    return batch["counted"][batch["example"]].float()


def _by_role(tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Return three tensors, each concatenated over all batches: queries, their documents, and negative documents.

    Args:
        tensors: a tensor [texts, ...] for each batch.
        sizes: the number of examples of each batch.
    """
    parts = [x.split([size, size, len(x) - 2 * size]) for x, size in zip(tensors, sizes, strict=True)]
    return [torch.cat(role) for role in zip(*parts, strict=True)]


def _gather(x: Tensor) -> Tensor:
    """Concatenate the tensors [n] or [n, C] of all ranks in rank order. The backward sums gradients over the ranks."""
    if not is_distributed() or world_size() == 1:
        return x
    if x.dtype == torch.bool:  # not every backend sends bool
        return _gather(x.to(torch.uint8)).bool()
    if x.dim() == 1:
        return _gather(x[:, None])[:, 0]
    sizes = torch.zeros(world_size(), dtype=torch.int64, device=x.device)
    sizes[rank()] = len(x)
    dist.all_reduce(sizes)
    counts = sizes.tolist()
    padded = F.pad(x.T, (0, max(counts) - len(x))).contiguous()  # [C, longest]
    if not x.requires_grad:
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part.T[:count] for part, count in zip(parts, counts, strict=True)])
    whole = gather_channels(padded, group_of(dist.group.WORLD)).T  # [ranks · longest, C]
    return torch.cat([part[:count] for part, count in zip(whole.split(max(counts)), counts, strict=True)])


def _distinct(keys: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct keys [m] in ascending order and, for each key, the first vector with this key, [m, C]."""
    distinct, inverse = keys.unique(return_inverse=True)
    places = torch.arange(len(keys), device=keys.device)
    first = torch.full_like(distinct, len(keys)).scatter_reduce(0, inverse, places, "amin")
    return distinct, vectors.index_select(0, first)


def _collect(parts: Any) -> Tensor:
    """Concatenate CPU tensors of all ranks. Every rank must call this function."""
    own: list[Any] = [*parts]
    everyone: list[Any] = [own]
    if is_distributed():
        everyone = [None] * world_size()
        dist.all_gather_object(everyone, own)
    tensors = [tensor for part in everyone for tensor in part]
    return torch.cat(tensors) if tensors else torch.empty(0, device="cpu")


def _mean_ndcg(scores: Tensor, relevance: Tensor, groups: Tensor) -> Metrics:
    """Return the mean nDCG over the queries that have documents of different relevance, or {} if there are no such
    queries."""
    values = []
    for group in groups.unique():
        members = groups == group
        if relevance[members].unique().numel() > 1:
            values.append(ndcg(scores[members], relevance[members], NDCG))
    return {f"ndcg@{NDCG}": pair(torch.stack(values).sum(), len(values))} if values else {}


def _spearman(first: Tensor, second: Tensor) -> Tensor:
    """Compute Spearman's rank correlation of two tensors [n].

    If several values are equal, each gets the mean of the ranks that these values occupy together.
    """

    def ranks(x: Tensor) -> Tensor:
        _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
        shared: Tensor = counts.cumsum(0) - (counts - 1) / 2
        return shared[inverse].double()

    correlation: Tensor = torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1]
    return correlation.nan_to_num()
