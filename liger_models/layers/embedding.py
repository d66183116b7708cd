"""The token embedding."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.common.errors import is_traced
from liger_models.distributed.collectives import Group, reduce_from_region
from liger_models.kernels.embedding import embedding
from liger_models.kernels.loss.linear_cross_entropy import VocabShard
from liger_models.layers.layer import Layer
from liger_models.layers.linear import is_sharded, local


class LigerEmbedding(nn.Embedding, Layer):
    """An `nn.Embedding` whose error messages contain the invalid token id if the ids are on the CPU.

    Args:
        num_embeddings, embedding_dim: V and C.
        padding_idx: token id whose row of the weight is 0 in a new model, and gets no gradient from the lookup. (With a
            tied head, the row still gets a gradient from the head.) A negative value counts from the end of the
            vocabulary. None, or a value outside of the vocabulary, stands for no such token.
        scale: multiplier of the embeddings (Gemma). The multiplier is first rounded to the dtype of the weight. None
            for 1.

    Raises:
        ValueError: an id on the CPU is outside the vocabulary. On an accelerator, the lookup itself fails.
        TypeError: the ids are not integers.
    """

    is_lookup: ClassVar[bool] = True
    """Whether the result for a token is simply the token's row of the weight, multiplied by ``scale``."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, padding_idx: int | None = None, scale: float | None = None
    ) -> None:
        outside = padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings
        super().__init__(num_embeddings, embedding_dim, None if outside else padding_idx)
        self.scale = scale
        self.vocab_shard: VocabShard | None = None
        """This rank's shard of the vocabulary; None if it is not sharded."""

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution. A weight on the meta device is not drawn, because drawing would
        import PyTorch's compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the vocabulary on each of R ranks; see `liger_models.parallel.apply_tp`."""
        self.vocab_shard = VocabShard(group, self.num_embeddings).check()
        return {"weight": 0}

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map input_ids [...] int64 or int32 to embeddings [..., C]."""
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"LigerEmbedding: input_ids must be int64 or int32, got {input_ids.dtype}.")
        if input_ids.device.type == "cpu" and not is_traced() and input_ids.numel():
            low, high = (int(bound) for bound in input_ids.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"LigerEmbedding: input_ids must lie in [0, {self.num_embeddings}), "
                    f"got {low if low < 0 else high}. Check the tokenizer and vocab_size."
                )
        if self.vocab_shard is not None:
            x = self._of_all_words(input_ids, self.vocab_shard)
        elif self.max_norm is None and not self.scale_grad_by_freq and not self.sparse and not is_sharded(self.weight):
            x = embedding(self.weight, input_ids, self.padding_idx)
        else:
            x = super().forward(input_ids)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=self.weight.dtype, device="cpu")

    def _of_all_words(self, input_ids: Tensor, vocab_shard: VocabShard) -> Tensor:
        rows = input_ids - vocab_shard.start
        here = (rows >= 0) & (rows < vocab_shard.count)
        padding = None if self.padding_idx is None else self.padding_idx - vocab_shard.start
        if padding is not None and not 0 <= padding < vocab_shard.count:  # the row belongs to another rank
            padding = None
        x = embedding(local(self.weight), rows.where(here, 0), padding)
        return reduce_from_region(x * here.unsqueeze(-1), vocab_shard.ranks)


@torch.no_grad()
def resize_rows(embedding: nn.Embedding | nn.Linear, count: int) -> None:
    """Give an embedding or a head new parameters with ``count`` rows. Every added row is the mean of the old rows."""
    for name, old in [*embedding.named_parameters(recurse=False)]:  # the weight [V, C], and a head's bias [V]
        mean = old.mean(0, dtype=torch.promote_types(old.dtype, torch.float32)).to(old.dtype)
        kept = old[:count]
        rows = torch.cat([kept, mean.expand(max(count - len(old), 0), *old.shape[1:])])
        setattr(embedding, name, nn.Parameter(rows, requires_grad=old.requires_grad))
    if isinstance(embedding, nn.Linear):
        embedding.out_features = count
        return
    embedding.num_embeddings = count
    if embedding.padding_idx is not None and embedding.padding_idx >= count:
        embedding.padding_idx = None


@torch.no_grad()
def zero_padding_row(embedding: nn.Embedding) -> None:
    """Set the row of ``padding_idx`` to 0 unless ``padding_idx`` is None. The weight may be sharded."""
    if embedding.padding_idx is None:
        return
    weight: Any = embedding.weight
    kept = torch.ones(len(weight), 1, dtype=weight.dtype, device=weight.device)
    kept[embedding.padding_idx] = 0
    if is_sharded(weight):  # indexing a DTensor returns a copy
        from torch.distributed.tensor import DTensor, Replicate  # slow to import

        mesh = weight.device_mesh
        kept = DTensor.from_local(kept, mesh, [Replicate()] * mesh.ndim)
    weight.mul_(kept)
