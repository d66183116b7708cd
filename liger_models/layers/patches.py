"""Where patches stand in their images, and where image tokens stand in a text: tensors without a loop over images.

A batch's images (and videos) lie end to end, each with a grid of frames, rows and columns of patches (``grid_thw``, as
Hugging Face's processors give it). Patches that are merged into one token lie next to each other: a grid is walked
block by block, and within a block row by row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .sequence import number_documents


class Patches(NamedTuple):
    """Of each patch of a batch, [N] int64.

    Attributes:
        item: number of its image or video.
        frame: number of its frame, counted over the batch.
        row, column: place in its frame.
        height, width: number of rows and columns of its frame.
    """

    item: Tensor
    frame: Tensor
    row: Tensor
    column: Tensor
    height: Tensor
    width: Tensor

    @property
    def position_ids(self) -> Tensor:
        """Rows and columns, [2, 1, N]."""
        return torch.stack([self.row, self.column])[:, None]

    def take(self, order: Tensor, unit: int) -> "Patches":
        """The patches in another order of groups of ``unit``; ``order`` [N / unit] int64."""
        return Patches(*(place.unflatten(0, (-1, unit))[order].flatten() for place in self))


def locate_patches(grid_thw: Tensor, count: int, merge: int) -> Patches:
    """Where each patch stands.

    Args:
        grid_thw: [n, 3] int64, frames, rows and columns of each image or video.
        count: N, number of patches of all of them.
        merge: side of the blocks of patches that become one token.

    Returns:
        `Patches`, in the order of the patches, on the device of ``grid_thw``.
    """
    frames, height, width = grid_thw.unbind(1)
    item, index = _split_by(grid_thw.prod(1), torch.arange(count, device=grid_thw.device))
    height, width = height[item], width[item]
    frame, index = _divide(index, height * width)
    block, inner = _divide(index, torch.full_like(index, merge * merge))
    block_row, block_column = _divide(block, width // merge)
    row, column = block_row * merge + inner // merge, block_column * merge + inner % merge
    before = frames.cumsum(0) - frames
    return Patches(item, before[item] + frame, row, column, height, width)


def order_by_window(patches: Patches, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The order in which merged tokens of one window lie next to each other, and the window of each.

    Args:
        patches: of a batch.
        merge: side of the blocks of patches that become one token.
        side: of a window, in tokens; windows at the lower and right border may be smaller.

    Returns:
        ``(order, window)``, each [N / merge²] int64: the token that comes next, and the ascending number of its window.
    """
    first = slice(None, None, merge * merge)
    row, column = patches.row[first] // merge // side, patches.column[first] // merge // side
    most = torch.maximum(patches.height, patches.width).max() // merge // side + 1
    window = (patches.frame[first] * most + row) * most + column
    order = window.argsort(stable=True)
    return order, window[order]


def mrope_positions(
    kinds: Tensor,
    grids: list[Tensor | None],
    *,
    merge: int,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    frames_apart: bool = False,
    interval: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Positions of tokens in time, height and width, and of the next one.

    A text token counts one on in all three. The tokens of an image or a video have the position of the image plus their
    frame, row and column; what follows continues after the larger of its numbers of rows and columns of tokens.

    Args:
        kinds: [B, T] int64: 0 text, 1 image, 2 video.
        grids: grid_thw [n, 3] of all images and of all videos, in the order of the text; None for none.
        merge: side of the blocks of patches that are one token.
        mask: [B, T], 0 for padding, which is not counted and has position 0.
        cu_seqlens: [n + 1], boundaries of packed documents, each of which counts from 0; see `Sequence.build`.
        frames_apart: each frame of a video counts like an image of its own (text with its time stands before it).
        interval: [videos] fp32, how far the frames of a video are apart; None for 1.

    Returns:
        ``(positions, following)``: [3, B, T] int64, and [B, 1], what a text token behind each row would have.
    """
    B, T = kinds.shape
    step = torch.ones_like(kinds)
    offset = kinds.new_zeros(3, B, T)
    for kind, grid in enumerate(grids, start=1):
        if grid is None or len(grid) == 0:
            continue
        grid = grid.to(kinds.device)
        here = kinds == kind
        tokens = (grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge)
        size = tokens[0] * tokens[1] * tokens[2]
        item, index = _share_out(here, size)
        height, width = tokens[1][item], tokens[2][item]
        frame, cell = _divide(index, height * width)
        row, column = _divide(cell, width)
        last = cell == height * width - 1
        if kind == 2 and frames_apart:
            frame = torch.zeros_like(frame)
        else:
            last = last & (index == size[item] - 1)
            if kind == 2 and interval is not None:
                frame = (frame.float() * interval.to(kinds.device)[item]).long()
        step = torch.where(here, torch.where(last, torch.maximum(height, width), 0), step)
        offset = torch.where(here, torch.stack([frame, row, column]), offset)
    if mask is not None:
        step, offset = step * (mask != 0), offset * (mask != 0)
    if cu_seqlens is None:
        start = step.cumsum(1) - step
    else:
        _, index = number_documents(cu_seqlens, B, T, kinds.device)
        count = step.flatten().cumsum(0) - step.flatten()
        first = torch.arange(B * T, device=kinds.device) - index.flatten()
        start = (count - count[first]).view(B, T)
    positions = start + offset
    return positions if mask is None else positions * (mask != 0), (start + step)[:, -1:]


def count_torn(here: Tensor, sizes: Tensor, parts: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """How many tokens do not stand behind the one before in the same part of an image or a video.

    Args:
        here: [B, T] bool, which tokens are of images.
        sizes: [n] int64, number of tokens of each image, in the order of the text.
        parts: [n] int64, of each how many tokens stand together.
        cu_seqlens: [documents + 1], boundaries of packed documents, which part what they are between.
    """
    if len(sizes) == 0:
        return here.sum() * 0
    item, index = _share_out(here, sizes)
    begins = index % parts.clamp_min(1)[item] == 0
    behind = torch.nn.functional.pad(here[:, :-1], (1, 0))
    if cu_seqlens is not None:
        B, T = here.shape
        behind = behind & (number_documents(cu_seqlens, B, T, here.device)[1] > 0)
    return (here & ~begins & ~behind).sum()


def interpolate_positions(weight: Tensor, patches: Patches) -> Tensor:
    """Learned positions of a square grid, stretched over each image's: bilinear, corners on corners.

    Args:
        weight: [side², C].
        patches: of a batch, N of them.

    Returns:
        [N, C] fp32.
    """
    side = int(weight.shape[0] ** 0.5)
    (top, bottom, down), (left, right, across) = (
        _between(index, length, side) for index, length in zip(patches[2:4], patches[4:6], strict=True)
    )
    corners = [
        (top, left, (1 - down) * (1 - across)),
        (top, right, (1 - down) * across),
        (bottom, left, down * (1 - across)),
        (bottom, right, down * across),
    ]
    total: Tensor = sum(
        torch.nn.functional.embedding(row * side + column, weight) * share[:, None] for row, column, share in corners
    )  # type: ignore[assignment]
    return total


def _between(index: Tensor, length: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two neighbours of a place on a line of ``side`` points, and how far it is from the first of them."""
    place = index.float() * (side - 1) / (length - 1).clamp_min(1)
    first = place.floor()
    return first.long(), (first.long() + 1).clamp_max(side - 1), place - first


def _divide(index: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    quotient = index // by
    return quotient, index - quotient * by


def _share_out(here: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], where they are ``here``, to things of these sizes: as `_split_by`."""
    rank = (here.flatten().cumsum(0) - 1).view(here.shape).clamp_min(0)  # among all tokens of its kind
    return _split_by(sizes, rank)


def _split_by(sizes: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Of places in a row of things of these sizes: the number of the thing, and the place within it."""
    ends = sizes.cumsum(0)
    item = torch.searchsorted(ends, index, right=True).clamp_max(len(sizes) - 1)
    return item, index - (ends - sizes)[item]
