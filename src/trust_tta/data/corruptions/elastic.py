"""Elastic transform: a random affine map, then small smooth displacements."""

from __future__ import annotations

import numpy as np

from trust_tta.data.corruptions.blur import smooth
from trust_tta.data.corruptions.loops import sample
from trust_tta.data.corruptions.pixels import Floats, Generators, Images, draw_uniform, to_bytes, to_unit
from trust_tta.data.corruptions.table import Level


def elastic_transform(images: Images, generators: Generators, level: Level) -> Images:
    """Move three points at random, warp accordingly, then displace every pixel by smoothed noise."""
    height, width = images.shape[1:3]
    displacement, sigma, jitter = (share * min(height, width) for share in level)
    moves = draw_uniform(generators, (3, 2), -jitter, jitter)
    rows, columns = affine_places(moves, height=height, width=width)
    clean = to_unit(images)
    warped, moved = np.empty_like(clean), np.empty_like(clean)
    sample(clean, rows, columns, 0, warped)
    noise = draw_uniform(generators, (2, height, width), -1, 1)
    dx, dy = (displacement * smooth(noise[:, k], sigma, mode="reflect", truncate=3) for k in range(2))
    y, x = np.mgrid[:height, :width]
    sample(warped, y + dy, x + dx, 1, moved)
    return to_bytes(moved)


def affine_places(moves: Floats, *, height: int, width: int) -> tuple[Floats, Floats]:
    """Where each pixel (n, h, w) of the warped images is read, as rows and columns of the source.

    moves: (n, 3, 2), how far (x, y) the corners bottom right, top right and top left of the middle square go.
    """
    centre_x, centre_y, reach = width // 2, height // 2, max(min(height, width) // 3, 1)
    signs = np.array([(1, 1), (1, -1), (-1, -1)])
    corners = np.array([centre_x, centre_y]) + reach * signs
    goals = corners + moves
    along_x, along_y = (goals[:, 1] - goals[:, 2]) / (2 * reach), (goals[:, 0] - goals[:, 1]) / (2 * reach)
    start = goals[:, 1] - along_x * corners[1, 0] - along_y * corners[1, 1]
    area = along_x[:, 0] * along_y[:, 1] - along_x[:, 1] * along_y[:, 0]
    inverse = np.where(area == 0, 0.0, 1 / np.where(area == 0, 1.0, area))[:, None, None]
    y, x = np.mgrid[:height, :width]
    from_x, from_y = (axis - start[:, k, None, None] for k, axis in enumerate((x, y)))
    columns = (along_y[:, 1, None, None] * from_x - along_y[:, 0, None, None] * from_y) * inverse
    rows = (along_x[:, 0, None, None] * from_y - along_x[:, 1, None, None] * from_x) * inverse
    return rows, columns
