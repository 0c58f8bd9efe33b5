"""SS2D's scan of channel-last feature maps, compiled by numba and vectorized over the channels.

Rows, columns and both ways are orders in which the pixels of one map are visited, so that no sequence is ever written.
An image is taken in tiles of at most `TILE` channels. What the backward reads and writes of a pixel, its fields, it has
in one array at distances that the compiler knows: of separate arrays it would have to compare too many addresses, and
would leave the loops scalar. Arrays are contiguous and share one dtype:

u, y, dy, du (b, l, c); projected (b, l, 4, r+2n): low-rank step sizes, B and C of the four directions; and rows
(p, tiles, (1 + 4 + 4n + 4r) * TILE), with p = 1 or b: D, and for each direction bias, A and the step sizes' weight.
Of each tile `wide` channels are used. Step sizes and their gradients are (l * TILE), with l rounded up to fours.
Matrices of TILE columns are flat, because a reshaped array needs numba's runtime: `_row` and `_rows` read them.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np

from trust_tta.ops.cpu.tiling import BEFORE, CARRY, DA, DECAY, DU, DY, PIXEL, ROWS, SLOPE, STATE, TILE, A, U
from trust_tta.ops.cpu.vector_math import fast_exp, fast_log1p, inline, jit, jit_sum


@jit
def scan_forward(scratch, u, projected, rows, y, width, rank, images, block, wide, first, last):
    """Fill y, the sum of the four directions, for tasks first..last-1, each of some images and a block of tiles."""
    batch, tiles = u.shape[0], rows.shape[1]
    blocks = -(-tiles // block)
    for task in range(first, last):
        start, part = task // blocks * images, task % blocks * block
        for b in range(start, min(start + images, batch)):
            for t in range(part, min(part + block, tiles)):
                row = rows[b if rows.shape[0] > 1 else 0, t]
                if min(wide, u.shape[2] - t * wide) == TILE:  # loops of a known length are faster
                    _scan_tile(scratch, u[b], projected[b], row, y[b], width, rank, t * wide, np.int64(TILE))
                else:
                    given = min(wide, u.shape[2] - t * wide)
                    _scan_tile(scratch, u[b], projected[b], row, y[b], width, rank, t * wide, given)


@jit
def _scan_tile(scratch, u, projected, row, y, width, rank, low, wide):
    """Channels low..low+wide-1 of one image: u, y (l, c), row ((1 + 4 + 4n + 4r) * TILE)."""
    length, states = u.shape[0], row.size // (4 * TILE) - 1 - rank
    state, steps = _row(scratch, 0), _rows(scratch, 1, _in_fours(length))
    for p in range(length):
        _multiply(_row(row, 0), u[p, low : low + wide], y[p, low : low + wide], wide)
    for k in range(4):
        _expand(steps, projected, k, _rows(row, 5 + 4 * states + k * rank, rank), _row(row, 1 + k), wide)
        for p in range(length):
            _softplus(_row(steps, p), wide)
        for n in range(states):
            state[:] = 0
            q = _first_pixel(k, length)
            for _ in range(length):
                f = projected[q, k]
                _advance(
                    _row(steps, q), _row(row, 5 + k * states + n), u[q, low : low + wide], f[rank + n],
                    f[rank + states + n], state, y[q, low : low + wide], wide,
                )  # fmt: skip
                q = _next_pixel(q, k, width, length)


@jit
def scan_backward(
    scratch, dy, u, projected, rows, du, dprojected, sums, width, rank, images, block, wide, train_weight, train_scan,
    first, last,
):  # fmt: skip
    """Fill du except for the part through `projected`, and partial sums of the other gradients; tasks as in forward.

    dprojected (blocks, b, l, 4, r+2n); sums (b / images, ...), the rest as `rows`.
    """
    batch, tiles = u.shape[0], rows.shape[1]
    blocks = -(-tiles // block)
    rank_trained = rank if train_weight else 0
    for task in range(first, last):
        group, part = task // blocks, task % blocks
        sums[group, part * block : part * block + block] = 0
        for b in range(group * images, min(group * images + images, batch)):
            down = dprojected[part, b]
            down[:] = 0
            for t in range(part * block, min(part * block + block, tiles)):
                row, total = rows[b if rows.shape[0] > 1 else 0, t], sums[group, t]
                if wide == TILE:  # as in the forward
                    _differentiate_tile(
                        scratch, dy[b], u[b], projected[b], row, du[b], down, total, width, rank, rank_trained,
                        train_weight or train_scan, t * wide, np.int64(TILE),
                    )  # fmt: skip
                else:
                    _differentiate_tile(
                        scratch, dy[b], u[b], projected[b], row, du[b], down, total, width, rank, rank_trained,
                        train_weight or train_scan, t * wide, wide,
                    )  # fmt: skip


@jit
def _differentiate_tile(
    scratch, dy, u, projected, row, du, down, total, width, rank, rank_trained, train, low, wide
):  # fmt: skip
    """The adjoint of `_scan_tile`: fill du, add to `down` (l, 4, r+2n) and to `total`, which is as `row`."""
    length, states, fours = u.shape[0], row.size // (4 * TILE) - 1 - rank, _in_fours(u.shape[0])
    state, tile = scratch[:ROWS], scratch[ROWS : ROWS + length * PIXEL]
    after = scratch[ROWS + length * PIXEL :]
    steps, dsteps = _rows(after, 0, fours), _rows(after, fours, fours)
    _load_field(u, low, tile, U, wide)
    _load_field(dy, low, tile, DY, wide)
    for p in range(length):
        _skip_gradients(_pixel(tile, p), _row(row, 0), _row(total, 0), wide)
    for k in range(4):
        at_weight = 5 + 4 * states + k * rank
        weight = _rows(row, at_weight, rank)
        _expand(steps, projected, k, weight, _row(row, 1 + k), wide)
        dsteps[:] = 0
        for p in range(length):
            _softplus_and_slope(_row(steps, p), _pixel(tile, p), wide)
        for n in range(states):
            _copy(_row(row, 5 + k * states + n), state[A : A + TILE], wide)
            _differentiate_state(
                tile, steps, dsteps, state, projected, down, k, rank + n, rank + states + n, width, wide
            )  # fmt: skip
            _add(state[DA : DA + TILE], _row(total, 5 + k * states + n), wide)
        _expand_input_gradient(dsteps, weight, down, k, wide)
        if train:
            _expand_weight_gradient(
                dsteps, projected, k, _rows(total, at_weight, rank_trained), _row(total, 1 + k), wide
            )
    _store_field(tile, DU, du, low, wide)


@inline
def _row(x, i):
    return x[i * TILE : (i + 1) * TILE]


@inline
def _rows(x, first, count):
    return x[first * TILE : (first + count) * TILE]


@inline
def _pixel(tile, p):
    return tile[p * PIXEL : (p + 1) * PIXEL]


@jit
def _in_fours(length):
    return -(-length // 4) * 4


@jit
def _first_pixel(k, length):
    """The first pixel of direction k: rows, rows back, columns, columns back."""
    return k % 2 * (length - 1)


@jit
def _next_pixel(q, k, width, length):
    """Pixel after q in direction k; the value after the last pixel is not used."""
    stride = 1 if k < 2 else width
    if k % 2 == 0:
        q += stride
        return q if q < length else q - length + 1
    q -= stride
    return q if q >= 0 else q + length - 1


@jit
def _load_field(x, low, tile, field, wide):
    """Channels low.. of x (l, c) into a field of all pixels; zeros where there are no more."""
    given = min(wide, x.shape[1] - low)
    for p in range(x.shape[0]):
        row = tile[p * PIXEL + field : p * PIXEL + field + TILE]
        row[given:] = 0
        _copy(x[p, low : low + given], row, given)


@jit
def _store_field(tile, field, x, low, wide):
    """The adjoint of `_load_field`."""
    given = min(wide, x.shape[1] - low)
    for p in range(x.shape[0]):
        row = tile[p * PIXEL + field : p * PIXEL + field + TILE]
        _copy(row, x[p, low : low + given], given)


@jit
def _copy(x, out, wide):
    for c in range(wide):
        out[c] = x[c]


@jit
def _add(x, out, wide):
    for c in range(wide):
        out[c] += x[c]


@jit
def _exp(x, row):
    """exp in the precision of `row`."""
    return math.exp(x) if row.itemsize == 8 else fast_exp(x)


@jit
def _log1p(x, row):
    return math.log1p(x) if row.itemsize == 8 else fast_log1p(x)


@jit
def _multiply(x, z, out, wide):
    for c in range(wide):
        out[c] = x[c] * z[c]


@jit
def _skip_gradients(pixel, D, dD, wide):
    for c in range(wide):
        dy = pixel[DY + c]
        pixel[DU + c] = D[c] * dy
        dD[c] += dy * pixel[U + c]


@jit
def _softplus(step, wide):
    for c in range(wide):
        x = step[c]
        step[c] = max(x, np.float32(0)) + _log1p(_exp(-abs(x), step), step)


@jit
def _softplus_and_slope(step, pixel, wide):
    for c in range(wide):
        x = step[c]
        e = _exp(-abs(x), step)
        step[c] = max(x, np.float32(0)) + _log1p(e, step)
        pixel[SLOPE + c] = (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


@jit
def _advance(step, A, u, B, C, state, y, wide):
    """One step of a state; y += C h."""
    for c in range(wide):
        h = _exp(step[c] * A[c], step) * state[c] + step[c] * (B * u[c])
        state[c] = h
        y[c] += C * h


@jit
def _differentiate_state(tile, steps, dsteps, state, projected, down, k, at_B, at_C, width, wide):
    """Add one state's share to du, the gradients of the steps, of B and of C; fill that of A."""
    length = projected.shape[0]
    state[STATE : STATE + TILE] = 0
    state[DA : DA + TILE] = 0
    state[CARRY : CARRY + TILE] = 0
    q = _first_pixel(k, length)
    for _ in range(length):
        _advance_and_keep(_pixel(tile, q), _row(steps, q), state, projected[q, k, at_B], wide)
        q = _next_pixel(q, k, width, length)
    back = k + 1 - k % 2 * 2  # the same path from its other end
    q = _first_pixel(back, length)
    for _ in range(length):
        B, C = projected[q, k, at_B], projected[q, k, at_C]
        dB, dC = _advance_adjoint(_pixel(tile, q), _row(steps, q), _row(dsteps, q), state, B, C, wide)
        down[q, k, at_B] += dB
        down[q, k, at_C] += dC
        q = _next_pixel(q, back, width, length)


@jit
def _advance_and_keep(pixel, step, state, B, wide):
    """One step of a state; keeps the decay and the state before it for the backward."""
    for c in range(wide):
        d, before = step[c], state[STATE + c]
        a = _exp(d * state[A + c], pixel)
        pixel[DECAY + c] = a
        pixel[BEFORE + c] = before
        state[STATE + c] = a * before + d * (B * pixel[U + c])


@jit_sum
def _advance_adjoint(pixel, step, dstep, state, B, C, wide):
    """The adjoint of `_advance_and_keep` and of y += C h; CARRY is the gradient of the state but for its own C dy."""
    dB = dC = pixel.dtype.type(0)  # a plain 0 would make the sums float64
    for c in range(wide):
        d, dy, input_ = step[c], pixel[DY + c], B * pixel[U + c]
        kept = pixel[DECAY + c] * pixel[BEFORE + c]
        dC += dy * (kept + d * input_)
        g = state[CARRY + c] + C * dy
        dB += g * d * pixel[U + c]
        pixel[DU + c] += g * d * B
        state[CARRY + c] = g * pixel[DECAY + c]
        state[DA + c] += g * kept * d
        dstep[c] += pixel[SLOPE + c] * (g * input_ + g * kept * state[A + c])
    return dB, dC


@jit
def _four(x, i):
    return x[i], x[i + 1], x[i + 2], x[i + 3]


@jit
def _expand(steps, projected, k, weight, bias, wide):
    """The step sizes of direction k before softplus, from their low rank: weight (r * TILE)."""
    rank, last = weight.size // TILE, projected.shape[0] - 1
    for p in range(0, last + 1, 4):
        four = _rows(steps, p, 4)
        f0, f1 = projected[p, k], projected[min(p + 1, last), k]
        f2, f3 = projected[min(p + 2, last), k], projected[min(p + 3, last), k]
        _fill_with_bias(four, bias, wide)
        for r in range(0, rank // 4 * 4, 4):
            w = _rows(weight, r, 4)
            _add_four_steps(four, w, _four(f0, r), _four(f1, r), _four(f2, r), _four(f3, r), wide)
        for r in range(rank // 4 * 4, rank):
            _add_steps(four, _row(weight, r), f0[r], f1[r], f2[r], f3[r], wide)


@jit
def _fill_with_bias(four, bias, wide):
    for c in range(wide):
        four[c] = bias[c]
        four[TILE + c] = bias[c]
        four[2 * TILE + c] = bias[c]
        four[3 * TILE + c] = bias[c]


@jit
def _add_four_steps(four, w, f0, f1, f2, f3, wide):
    for c in range(wide):
        w0, w1, w2, w3 = w[c], w[TILE + c], w[2 * TILE + c], w[3 * TILE + c]
        four[c] += f0[0] * w0 + f0[1] * w1 + f0[2] * w2 + f0[3] * w3
        four[TILE + c] += f1[0] * w0 + f1[1] * w1 + f1[2] * w2 + f1[3] * w3
        four[2 * TILE + c] += f2[0] * w0 + f2[1] * w1 + f2[2] * w2 + f2[3] * w3
        four[3 * TILE + c] += f3[0] * w0 + f3[1] * w1 + f3[2] * w2 + f3[3] * w3


@jit
def _add_steps(four, w, f0, f1, f2, f3, wide):
    for c in range(wide):
        four[c] += f0 * w[c]
        four[TILE + c] += f1 * w[c]
        four[2 * TILE + c] += f2 * w[c]
        four[3 * TILE + c] += f3 * w[c]


@jit
def _expand_input_gradient(dsteps, weight, down, k, wide):
    """The adjoint of `_expand` in `projected`: sums over the channels."""
    rank, length = weight.size // TILE, down.shape[0]
    for p in range(0, length, 4):
        four = _rows(dsteps, p, 4)
        for r in range(0, rank // 4 * 4, 4):
            sums = _sixteen_sums(four, _rows(weight, r, 4), wide)
            for i in range(min(4, length - p)):
                out, found = down[p + i, k], sums[i]
                out[r] += found[0]
                out[r + 1] += found[1]
                out[r + 2] += found[2]
                out[r + 3] += found[3]
        for r in range(rank // 4 * 4, rank):
            for i in range(min(4, length - p)):
                down[p + i, k, r] += _sum_of_products(_row(dsteps, p + i), _row(weight, r), wide)


@jit_sum
def _sixteen_sums(four, w, wide):
    """The products of four pixels with four rows of weights, in registers."""
    zero = w.dtype.type(0)
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = zero
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
    for c in range(wide):
        w0, w1, w2, w3 = w[c], w[TILE + c], w[2 * TILE + c], w[3 * TILE + c]
        x0, x1 = four[c], four[TILE + c]
        x2, x3 = four[2 * TILE + c], four[3 * TILE + c]
        s00 += x0 * w0
        s01 += x0 * w1
        s02 += x0 * w2
        s03 += x0 * w3
        s10 += x1 * w0
        s11 += x1 * w1
        s12 += x1 * w2
        s13 += x1 * w3
        s20 += x2 * w0
        s21 += x2 * w1
        s22 += x2 * w2
        s23 += x2 * w3
        s30 += x3 * w0
        s31 += x3 * w1
        s32 += x3 * w2
        s33 += x3 * w3
    return (s00, s01, s02, s03), (s10, s11, s12, s13), (s20, s21, s22, s23), (s30, s31, s32, s33)


@jit_sum
def _sum_of_products(dstep, w, wide):
    total = w.dtype.type(0)
    for c in range(wide):
        total += dstep[c] * w[c]
    return total


@jit
def _expand_weight_gradient(dsteps, projected, k, dweight, dbias, wide):
    """Add the adjoint of `_expand` in the weight, some rows of it, and in the bias."""
    rank, last = dweight.size // TILE, projected.shape[0] - 1
    for p in range(0, last + 1, 4):
        four = _rows(dsteps, p, 4)
        f0, f1 = projected[p, k], projected[min(p + 1, last), k]
        f2, f3 = projected[min(p + 2, last), k], projected[min(p + 3, last), k]
        _add_bias(four, dbias, wide)
        for r in range(0, rank // 4 * 4, 4):
            out = _rows(dweight, r, 4)
            _add_four_weights(four, _four(f0, r), _four(f1, r), _four(f2, r), _four(f3, r), out, wide)
        for r in range(rank // 4 * 4, rank):
            _add_weights(four, f0[r], f1[r], f2[r], f3[r], _row(dweight, r), wide)


@jit
def _add_bias(four, out, wide):
    for c in range(wide):
        x0, x1 = four[c], four[TILE + c]
        x2, x3 = four[2 * TILE + c], four[3 * TILE + c]
        out[c] += x0 + x1 + (x2 + x3)


@jit
def _add_four_weights(four, f0, f1, f2, f3, out, wide):
    for c in range(wide):
        x0, x1 = four[c], four[TILE + c]
        x2, x3 = four[2 * TILE + c], four[3 * TILE + c]
        out[c] += f0[0] * x0 + f1[0] * x1 + f2[0] * x2 + f3[0] * x3
        out[TILE + c] += f0[1] * x0 + f1[1] * x1 + f2[1] * x2 + f3[1] * x3
        out[2 * TILE + c] += f0[2] * x0 + f1[2] * x1 + f2[2] * x2 + f3[2] * x3
        out[3 * TILE + c] += f0[3] * x0 + f1[3] * x1 + f2[3] * x2 + f3[3] * x3


@jit
def _add_weights(four, f0, f1, f2, f3, out, wide):
    for c in range(wide):
        x0, x1 = four[c], four[TILE + c]
        x2, x3 = four[2 * TILE + c], four[3 * TILE + c]
        out[c] += f0 * x0 + f1 * x1 + f2 * x2 + f3 * x3
