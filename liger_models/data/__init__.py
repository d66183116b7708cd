"""Training data: texts, chats and token ids into packed batches, tokenized once, resumable after every batch.

An example has one name at each stage::

    record      a line of a file, or a row of a table: a dict by column, or a text      sources
    example     a record with messages, a text or token ids                             formats
    text        an example as the chat template renders it, and the spans to learn      encoding
    document    its token ids, ``~id`` for a token without a label, and its images      encoding, tokens
    piece       a document, or a part of one, that fits into a row                      packing
    row         pieces and padding: a batch of one row                                  packing, pixels, batch
    batch       the rows of a rank in one step                                          dataset, batch
"""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.data.answers import AnswerDataset as AnswerDataset
    from liger_models.data.batch import Batch as Batch
    from liger_models.data.batch import collate as collate
    from liger_models.data.dataset import PackedDataset as PackedDataset
    from liger_models.data.loader import PackedLoader as PackedLoader
    from liger_models.data.packing import PackedRows as PackedRows
    from liger_models.data.preference import preference_batch as preference_batch
    from liger_models.data.prompts import PromptDataset as PromptDataset
    from liger_models.data.tokens import TokenFile as TokenFile
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "answers": ["AnswerDataset"],
            "batch": ["Batch", "collate"],
            "dataset": ["PackedDataset"],
            "loader": ["PackedLoader"],
            "packing": ["PackedRows"],
            "preference": ["preference_batch"],
            "prompts": ["PromptDataset"],
            "tokens": ["TokenFile"],
        },
    )
