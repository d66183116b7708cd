"""Positions of patches in images, and of image tokens in a text, computed without a loop over images.

The images and videos of a batch are concatenated, each with a grid of frames, rows and columns of patches
(``grid_thw``, as in Hugging Face's processors). Patches that are merged into one token are adjacent, since patches are
ordered by block, and within a block by row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.layers.batch import number_documents


class Patches(NamedTuple):
    """The locations of all patches of a batch, in tensors [N] int64.

    Attributes:
        item: index of the patch's image or video.
        frame: index of the patch's frame, counted over the batch.
        row, column: position of the patch in the frame.
        height, width: number of rows and columns of the frame.
    """

    item: Tensor
    frame: Tensor
    row: Tensor
    column: Tensor
    height: Tensor
    width: Tensor

    @property
    def position_ids(self) -> Tensor:
        """Rows and columns, [2, 1, N] int64."""
        return torch.stack([self.row, self.column])[:, None]

    def take(self, order: Tensor, unit: int) -> "Patches":
        """Reorder the patches in groups of ``unit``; ``order`` [N / unit] int64 indexes the groups."""
        return Patches(*(column.unflatten(0, (-1, unit))[order].flatten() for column in self))


def locate_patches(grid_thw: Tensor, count: int, merge: int) -> Patches:
    """Locate each patch of a batch.

    Args:
        grid_thw: [n, 3] int64, frames, rows and columns of each image or video.
        count: N, the total number of patches.
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
    """Sort merged tokens by window.

    Args:
        patches: the patches of a batch.
        merge: side of the blocks of patches that become one token.
        side: side of a window in tokens. Windows at the lower and right border may be smaller.

    Returns:
        ``(order, window)``, each [N / merge²] int64: the indices of the tokens sorted by window, and the window number
        of each sorted token, ascending.
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
    """Positions of tokens in time, height and width (M-RoPE).

    A text token advances all three positions by one. A token of an image or a video has the position of the image's
    start plus its frame, row and column. The token after the image advances from the start by the larger one of the
    numbers of token rows and columns.

    Args:
        kinds: [B, T] int64: 0 text, 1 image, 2 video.
        grids: ``grid_thw`` [n, 3] of all images, and of all videos, in the order of the text; None without any.
        merge: side of the blocks of patches that become one token.
        mask: [B, T], 0 for padding, which is not counted and has position 0.
        cu_seqlens: [n + 1], boundaries of packed documents, see `BatchLayout.build`. Positions start from 0 in each
            document.
        frames_apart: whether each frame of a video is positioned like an image, because a timestamp precedes it in the
            text.
        interval: [videos] fp32, distance in time between frames of a video; None for 1.

    Returns:
        ``(positions, following)``: [3, B, T] int64, and [B, 1] int64, the position of a text token after each row.
    """
    B, T = kinds.shape
    step = torch.ones_like(kinds)
    offset = kinds.new_zeros(3, B, T)

    # How far each token moves the positions on, and where it is within its image.
    for medium, grid in enumerate(grids, start=1):
        if grid is None or len(grid) == 0:
            continue
        grid = grid.to(kinds.device)
        here = kinds == medium
        tokens = (grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge)
        size = tokens[0] * tokens[1] * tokens[2]
        # The image of each token, and its frame, row and column there.
        item, index = _share_out(here, size)
        height, width = tokens[1][item], tokens[2][item]
        frame, cell = _divide(index, height * width)
        row, column = _divide(cell, width)
        # Only the last token of an image, or of a video, moves the positions on.
        last = cell == height * width - 1
        if medium == 2 and frames_apart:
            frame = torch.zeros_like(frame)
        else:
            last = last & (index == size[item] - 1)
            if medium == 2 and interval is not None:
                frame = (frame.float() * interval.to(kinds.device)[item]).long()
        step = torch.where(here, torch.where(last, torch.maximum(height, width), 0), step)
        offset = torch.where(here, torch.stack([frame, row, column]), offset)
    if mask is not None:
        step, offset = step * (mask != 0), offset * (mask != 0)

    # Positions start from the sum of the steps before, in each document anew.
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
    """Count image tokens that should directly follow the previous token of their part, but do not.

    Args:
        here: [B, T] bool, whether tokens belong to images (or videos).
        sizes: [n] int64, number of tokens of each image, in the order of the text.
        parts: [n] int64, number of tokens of each image that must be contiguous.
        cu_seqlens: [documents + 1], boundaries of packed documents, which parts must not cross.
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


def ends_of_runs(inside: Tensor) -> Tensor:
    """For each True of ``inside`` [B, T], the index of the last True of its run; otherwise its own index (int64)."""
    T = inside.shape[1]
    index = torch.arange(T, device=inside.device).expand_as(inside)
    last = inside & ~torch.nn.functional.pad(inside, (0, 1))[:, 1:]
    ends = torch.where(last, index, T).flip(1).cummin(1).values.flip(1)  # the next end, seen from each token
    return torch.where(inside, ends, index)


def interpolate_positions(weight: Tensor, patches: Patches) -> Tensor:
    """Interpolate learned positions of a square grid to each image's grid, bilinearly and with aligned corners.

    Args:
        weight: [side², C].
        patches: the N patches of a batch.

    Returns:
        [N, C] fp32.
    """
    side = int(weight.shape[0] ** 0.5)
    (top, bottom, down), (left, right, across) = (
        _between(index, length, side) for index, length in zip(patches[2:4], patches[4:6], strict=True)
    )
    # Each position is between four of the grid, which share it by the distances to them.
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
    """The two neighbors of each position on a line of ``side`` points, and the distance from the first neighbor."""
    position = index.float() * (side - 1) / (length - 1).clamp_min(1)
    first = position.floor()
    return first.long(), (first.long() + 1).clamp_max(side - 1), position - first


def _divide(index: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    quotient = index // by
    return quotient, index - quotient * by


def _share_out(here: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Assign the tokens marked in ``here`` [B, T] to consecutive items of ``sizes``; results as in `_split_by`."""
    rank = (here.flatten().cumsum(0) - 1).view(here.shape).clamp_min(0)  # among all tokens of its kind
    return _split_by(sizes, rank)


def _split_by(sizes: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """For each index into concatenated items of ``sizes``, the number of its item and the index within the item."""
    ends = sizes.cumsum(0)
    item = torch.searchsorted(ends, index, right=True).clamp_max(len(sizes) - 1)
    return item, index - (ends - sizes)[item]
