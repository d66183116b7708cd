"""Token embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.kernels.collectives import Ranks, leave
from liger_models.kernels.linear_cross_entropy import Words

from .tensor_parallel import own


class LigerEmbedding(nn.Embedding):
    """`nn.Embedding` that says which token id is wrong, where that can be known without waiting for a device.

    Args:
        num_embeddings, embedding_dim: V and C.
        scale: factor of the embeddings, rounded to the dtype of the weight before it is applied (Gemma); None for 1.

    Raises:
        ValueError: on the CPU, an id outside the vocabulary. (On an accelerator the lookup itself fails.)
        TypeError: ids that are not integers.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, scale: float | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.scale = scale
        self.words: Words | None = None
        """Those that this rank has, where the weight's rows are cut over ranks."""

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """Keep 1 / R of the words: see `layers.tensor_parallel`."""
        self.words = Words(ranks, self.num_embeddings).check()
        return {"weight": 0}

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [...] int64 or int32 -> [..., C]."""
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"LigerEmbedding: input_ids must be int64 or int32, got {input_ids.dtype}.")
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling() and input_ids.numel():
            low, high = (int(bound) for bound in input_ids.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"LigerEmbedding: input_ids must lie in [0, {self.num_embeddings}), "
                    f"got {low if low < 0 else high}. Check the tokenizer and vocab_size."
                )
        x = super().forward(input_ids) if self.words is None else self._of_all_words(input_ids, self.words)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=self.weight.dtype, device="cpu")

    def _of_all_words(self, input_ids: Tensor, words: Words) -> Tensor:
        rows = input_ids - words.start
        here = (rows >= 0) & (rows < words.count)
        x = F.embedding(rows.where(here, 0), own(self.weight))
        return leave(x * here.unsqueeze(-1), words.ranks)
