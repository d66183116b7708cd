"""Functions that choose a grid of tiles by the aspect ratio of an image (InternVL, LFM2-VL)."""

import functools


@functools.cache
def grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return all grids that have at least ``least`` and at most ``most`` tiles, as (columns, rows), ordered by their
    number of tiles."""
    sides = range(1, most + 1)
    pairs = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    return sorted(pairs, key=lambda pair: pair[0] * pair[1])


def choose_grid(size: tuple[int, int], side: int, least: int, most: int) -> tuple[int, int]:
    """Choose the grid of tiles whose aspect ratio is nearest to an image's aspect ratio.

    If the aspect ratios of several grids are equally near, choose the largest of these grids whose area is less than
    twice the area of the image, or the smallest of these grids if none is small enough.

    Args:
        size: width and height of the image.
        side: side of a tile in pixels.
        least, most: minimum and maximum number of tiles.

    Returns:
        The number of columns and the number of rows.
    """
    width, height = size
    best, distance = (1, 1), float("inf")
    for grid in grids(least, most):
        difference = abs(width / height - grid[0] / grid[1])
        fills = width * height > 0.5 * side * side * grid[0] * grid[1]
        if difference < distance or (difference == distance and fills):
            best, distance = grid, difference
    return best
