"""Positions of patches in images and of image tokens in a text, computed without a loop over images.

The patches of all images and videos of a batch are concatenated. For each image or video, ``grid_thw`` has three
numbers, as in Hugging Face's processors: the number of frames, and the numbers of patch rows and patch columns in a
frame. The patches that are merged into one token form a block. The patches of a block are consecutive, and are ordered
by row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.common.device import on_device
from liger_models.layers.batch import number_documents


class Patches(NamedTuple):
    """The locations of all patches of a batch, in tensors [N] int64.

    Attributes:
        item: index of the patch's image or video.
        frame: index of the patch's frame among all frames of the batch.
        row, column: position of the patch in its frame.
        height, width: numbers of rows and columns of the frame.
    """

    item: Tensor
    frame: Tensor
    row: Tensor
    column: Tensor
    height: Tensor
    width: Tensor

    @property
    def position_ids(self) -> Tensor:
        """Row and column of each patch, [2, 1, N] int64."""
        return torch.stack([self.row, self.column])[:, None]

    def take(self, order: Tensor, unit: int) -> "Patches":
        """Reorder groups of ``unit`` patches.

        ``order`` [N / unit] int64 lists the old index of each group, in the new order.
        """
        return Patches(*(column.unflatten(0, (-1, unit))[order].flatten() for column in self))


def locate_patches(grid_thw: Tensor, count: int, merge: int) -> Patches:
    """Locate each patch of a batch.

    Args:
        grid_thw: [n, 3] int64, the numbers of frames, rows and columns of each image or video.
        count: N, the total number of patches.
        merge: number of patches along the side of a block, the square of patches that becomes one token.

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
    """Sort the image tokens by attention window. Each token is merged from a block of patches.

    Args:
        patches: the patches of a batch.
        merge: number of patches along the side of a block, the square of patches that becomes one token.
        side: side of a square window, in tokens. Windows at the bottom and right borders may be smaller.

    Returns:
        ``(order, window)``, both [N / merge²] int64: the indices of the tokens sorted by window, and the window number
        of each sorted token, in ascending order.
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
    parents: Tensor | None = None,
    frames_apart: bool = False,
    interval: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the positions of tokens in time, height and width (M-RoPE).

    A text token advances all three positions by one. An image or a video starts at the next position. The positions of
    each of its tokens are this start position plus the token's frame, row and column. The first token after the image
    or video has the start position plus the number of token rows or token columns, whichever is larger.

    Args:
        kinds: [B, T] int64, 0 for tokens of text, 1 for tokens of images, 2 for tokens of videos.
        grids: ``grid_thw`` [n, 3] of all images, and ``grid_thw`` of all videos, both in the order of the text. None
            stands for no images or no videos.
        merge: number of patches along the side of a block, the square of patches that becomes one token.
        mask: [B, T], 0 for padding, which is not counted and has position 0.
        cu_seqlens: [n + 1], boundaries of packed documents; see `BatchLayout.build`. Positions start from 0 in each
            document.
        parents: [n], the documents that the documents continue; see `BatchLayout.build`. The positions of a document
            follow the positions of the document that it continues.
        frames_apart: whether each frame of a video is positioned like a separate image, as in models whose text has
            timestamps between the frames.
        interval: [videos] fp32, for each video, the distance in time positions between consecutive frames; None for 1.

    Returns:
        ``(positions, following)``: the positions, [3, B, T] int64, and the position that a text token after the end of
        each row would have, [B, 1] int64.
    """
    B, T = kinds.shape
    step = torch.ones_like(kinds)
    offset = kinds.new_zeros(3, B, T)

    # For each token, compute the step by which it advances the positions, and its position within its image.
    for medium, grid in enumerate(grids, start=1):
        if grid is None or len(grid) == 0:
            continue
        grid = grid.to(kinds.device)
        here = kinds == medium
        tokens = (grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge)
        size = tokens[0] * tokens[1] * tokens[2]
        # Find the image or video of each token, and the token's frame, row and column in the image or video.
        item, index = _share_out(here, size)
        height, width = tokens[1][item], tokens[2][item]
        frame, cell = _divide(index, height * width)
        row, column = _divide(cell, width)
        # Only the last token of an image or a video advances the positions.
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

    # The start position of a token is the sum of all earlier steps in its document.
    if cu_seqlens is None:
        start = step.cumsum(1) - step
    else:
        number, index = number_documents(cu_seqlens, B, T, kinds.device)
        count = step.flatten().cumsum(0) - step.flatten()
        first = torch.arange(B * T, device=kinds.device) - index.flatten()
        start = (count - count[first]).view(B, T)
        if parents is not None:
            # Add up the steps of each document, and start after those of the continued document.
            steps = step.new_zeros(len(cu_seqlens)).index_add(0, number.flatten(), step.flatten())
            followed = torch.nn.functional.pad(on_device(parents.long(), kinds.device), (0, 1), value=-1)
            start = start + steps[followed].masked_fill(followed < 0, 0)[number]
    positions = start + offset
    return positions if mask is None else positions * (mask != 0), (start + step)[:, -1:]


def count_torn(here: Tensor, sizes: Tensor, parts: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Count the image tokens, other than the first token of a part, that do not directly follow another image token.

    Args:
        here: [B, T] bool, whether each token belongs to one of the images (or videos).
        sizes: [n] int64, the number of tokens of each image, in the order of the text.
        parts: [n] int64, the number of tokens in each part of an image. The tokens of a part must be contiguous.
        cu_seqlens: [documents + 1], boundaries of packed documents. A part must not cross a boundary.
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
    """Map each True entry of ``inside`` [B, T] to the last index of its run of True entries, and each False entry to
    its own index."""
    T = inside.shape[1]
    index = torch.arange(T, device=inside.device).expand_as(inside)
    last = inside & ~torch.nn.functional.pad(inside, (0, 1))[:, 1:]
    ends = torch.where(last, index, T).flip(1).cummin(1).values.flip(1)  # the next end at or after each token
    return torch.where(inside, ends, index)


def interpolate_positions(weight: Tensor, patches: Patches, *, aligned: bool = True, bicubic: bool = False) -> Tensor:
    """Interpolate the learned positions of a square grid to the grid of each image, bilinearly or bicubically.

    Args:
        weight: [side², C].
        patches: the N patches of a batch.
        aligned: whether the centers of an image's corner patches coincide with the corner points of the learned grid.
            If False, the borders of both grids coincide, and positions outside of the learned grid are 0, as in
            PyTorch's ``grid_sample`` with its default settings.
        bicubic: whether to interpolate bicubically. If True, ``aligned`` is ignored: the borders of both grids
            coincide, and outside of the learned grid the positions at its border are repeated, as in ``grid_sample``.

    Returns:
        [N, C] fp32.
    """
    side = int(weight.shape[0] ** 0.5)
    neighbors = _cubic_neighbors if bicubic else _aligned_neighbors if aligned else _unaligned_neighbors
    rows, columns = (neighbors(index, length, side) for index, length in zip(patches[2:4], patches[4:6], strict=True))
    # Each patch lies between points of the learned grid. The weight of a point depends on its distance from the patch.
    total: Tensor = sum(
        torch.nn.functional.embedding(row * side + column, weight) * (down * across)[:, None]
        for row, down in rows
        for column, across in columns
    )  # type: ignore[assignment]
    return total


def resample_positions(weight: Tensor, patches: Patches) -> Tensor:
    """Resample the learned positions of a square grid to the grid of each image, as PyTorch's ``interpolate`` does.

    The interpolation is bilinear, and the borders of both grids coincide. If the grid of the image is smaller than the
    learned grid, a result may be a weighted mean of more than four learned positions (``antialias``).

    Args:
        weight: [side², C].
        patches: the N patches of a batch.

    Returns:
        [N, C] fp32, or fp64 if ``weight`` is fp64.
    """
    side, dtype = int(weight.shape[0] ** 0.5), torch.promote_types(weight.dtype, torch.float32)
    rows, columns = (
        _averaging_weights(index, length, side, dtype) for index, length in zip(patches[2:4], patches[4:6], strict=True)
    )
    # The weights of all learned positions are [N, side, 1] · [N, 1, side].
    shares = (rows[:, :, None] * columns[:, None, :]).flatten(1)
    with torch.autocast(weight.device.type, enabled=False):
        return shares @ weight.to(dtype)


def _averaging_weights(index: Tensor, length: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """Resample a line of ``side`` points to ``length`` points. For each of N new points, return the weights of the
    original points, [N, side].

    ``index`` and ``length`` [N] are the index of each new point, and the number of points of its new line.
    """
    scale = side / length.clamp_min(1).to(dtype)
    center = (index.to(dtype) + 0.5) * scale
    points = torch.arange(side, device=index.device, dtype=dtype) + 0.5
    # The weights form a triangle around the center. Each half of the triangle is as wide as a cell of the coarser grid.
    weights = (1 - (points - center[:, None]).abs() / scale.clamp_min(1.0)[:, None]).clamp_min(0.0)
    return weights / weights.sum(1, keepdim=True)


def _aligned_neighbors(index: Tensor, length: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """Interpolate a line of ``side`` points at ``length`` points. The first points of both lines coincide, and so do
    the last points. For each interpolated point, return its two neighbors and their weights."""
    position = index.float() * (side - 1) / (length - 1).clamp_min(1)
    first = position.floor()
    distance = position - first
    return [(first.long(), 1 - distance), ((first.long() + 1).clamp_max(side - 1), distance)]


def _unaligned_neighbors(index: Tensor, length: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """Like `_aligned_neighbors`, but the outer borders of the grids coincide instead of the first and last points.

    A neighbor beyond the end of the line has the weight 0.
    """
    position = (index.float() + 0.5) * side / length - 0.5
    first = position.floor()
    distance, first = position - first, first.long()
    second = first + 1
    return [
        (first.clamp_min(0), (1 - distance) * (first >= 0)),
        (second.clamp_max(side - 1), distance * (second < side)),
    ]


def _cubic_neighbors(index: Tensor, length: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """Like `_unaligned_neighbors`, but return the four neighbors of each interpolated point, and their weights.

    The weight of a neighbor is a cubic function of its distance, with PyTorch's parameter −0.75. A weight may be
    negative.

    Source: Keys, Cubic convolution interpolation for digital image processing, 1981.
    """
    position = (index.float() + 0.5) / length * side - 0.5
    first = position.floor()
    distance, first = position - first, first.long()
    neighbors = []
    for step in (-1, 0, 1, 2):
        d = (distance - step).abs()
        weight = (1.25 * d - 2.25) * d * d + 1 if step in (0, 1) else ((-0.75 * d + 3.75) * d - 6) * d + 3
        neighbors.append(((first + step).clamp(0, side - 1), weight))
    return neighbors


def _divide(index: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    quotient = index // by
    return quotient, index - quotient * by


def _share_out(here: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Assign the marked tokens (True in ``here`` [B, T]) to items of the given sizes, in order. For each token, return
    ``(item, index within the item)``, as `_split_by` does."""
    rank = (here.flatten().cumsum(0) - 1).view(here.shape).clamp_min(0)  # index among all marked tokens
    return _split_by(sizes, rank)


def _split_by(sizes: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """For each index into a concatenation of items of the given sizes, return ``(item, index within the item)``."""
    ends = sizes.cumsum(0)
    item = torch.searchsorted(ends, index, right=True).clamp_max(len(sizes) - 1)
    return item, index - (ends - sizes)[item]
