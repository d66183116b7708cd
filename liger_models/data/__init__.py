"""Training data: texts, chats and token ids are tokenized once and packed into batches. Runs can resume at any batch.

In the modules of this package, an example has a different name at each stage of processing. The last column names the
modules::

    record      a line of a file, or a row of a table: a dict by column, or a text      sources
    example     a record with messages, a text or token ids                             formats
    text        an example as the chat template renders it, and the spans to learn      encoding
    document    its token ids, ``~id`` for a token without a label, and its images      encoding, tokens
    piece       a document, or a part of one, that fits into a row                      packing
    row         pieces and padding: a batch of one row                                  packing, pixels, batch
    batch       the rows of a rank in one step                                          dataset, batch
"""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
