"""Rows that include the pixels of their images. The loader's workers decode the images when they create a row."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from liger_models.base.processor import Processor
from liger_models.data.batch import Batch, make_row
from liger_models.data.media import BrokenMediaError, Medium

if TYPE_CHECKING:
    from PIL.Image import Image

BROKEN_MEDIA = ("error", "skip")
WORKERS = 256
"""The number of counters for broken images and videos. Up to this number, each worker has its own counter."""

Piece = tuple[Tensor, Sequence[Medium]]
"""The token ids of a piece of a document, [n] int32, and the images of the piece.

The token ids have the form of a `TokenFile`: ``~id`` stands for a token without a label.
"""


class RowMaker:
    """Creates a row from pieces of documents.

    Args:
        length: the number of tokens in a row.
        filler: the token id of padding.
        processor: the processor, which converts images to pixels; None if there are only texts.
        broken_media: what happens to an image that cannot be decoded: "error", or "skip", which makes the image black
            and removes all labels of the document.

    Attributes:
        broken: [WORKERS] int64. For each worker of this process, the number of documents that lost their labels or, in
            an `AnswerDataset`, the number of examples that were replaced.
    """

    def __init__(
        self, length: int, filler: int, processor: Processor | None = None, broken_media: str = "error"
    ) -> None:
        if broken_media not in BROKEN_MEDIA:
            raise ValueError(f"PackedDataset: broken_media must be one of {BROKEN_MEDIA}, got {broken_media!r}.")
        self.length, self.filler, self.processor, self.broken_media = length, filler, processor, broken_media
        self.broken = torch.zeros(WORKERS, dtype=torch.int64, device="cpu").share_memory_()

    def __call__(self, pieces: Sequence[Piece]) -> Batch:
        """Return a batch with one row.

        Raises:
            ValueError: an image cannot be decoded, and ``broken_media`` is "error".
        """
        documents, decoded = [], []
        for ids, media in pieces:
            try:
                decoded += [medium.decode() for medium in media]
            except BrokenMediaError as error:
                self.count(error, "The labels of documents with broken images or videos are removed.")
                # Black images keep the number of tokens. The smaller of id and ~id is a token without a label.
                decoded += [medium.blank() for medium in media]
                ids = torch.minimum(ids, ~ids)
            documents.append(ids)
        row = make_row(documents, self.length, self.filler)
        return row | make_pixels([medium for _, media in pieces for medium in media], self.processor, decoded)

    def count(self, error: BrokenMediaError, done: str) -> None:
        """Count a document with a broken image or video.

        The first such document causes a warning that ends with the text ``done``.

        Raises:
            BrokenMediaError: ``broken_media`` is "error".
        """
        if self.broken_media == "error":
            raise error
        if not self.broken.any():
            warnings.warn(f"{error} {done}", stacklevel=2)
        worker = get_worker_info()
        self.broken[0 if worker is None else worker.id % WORKERS] += 1


def make_pixels(
    media: Sequence[Medium], processor: Processor | None, decoded: "Sequence[Sequence[Image]] | None" = None
) -> dict[str, Tensor]:
    """Return the forward's inputs for the images and videos of a row. The result is empty if there is no processor.

    Args:
        media: the images and videos.
        processor: the processor of the model.
        decoded: the decoded image or frames of each medium. Default: this function decodes the media.

    Raises:
        BrokenMediaError: an image or a video cannot be decoded.
    """
    if processor is None:
        return {}
    decoded = [medium.decode() for medium in media] if decoded is None else decoded
    # The processor takes images and videos separately, each with its own settings.
    pairs = [(frames, medium.size) for frames, medium in zip(decoded, media, strict=True)]
    images = [(image, size) for (image, *_), size in pairs if size.kind == "image"]
    videos = [(frames, size) for frames, size in pairs if size.kind == "video"]
    return processor.pixels(
        [image for image, _ in images],
        [frames for frames, _ in videos],
        [float(size.fps or 0) for _, size in videos],
        ([size.min_pixels for _, size in images], [size.max_pixels for _, size in images]),
    )
