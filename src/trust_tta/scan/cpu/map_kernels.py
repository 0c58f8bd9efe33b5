"""SS2D's scan of channel-last maps as loops that numba compiles: vectors run over the channels.

Rows, columns and both ways are orders in which the pixels of one map are visited, so that no sequence is ever written.
Step sizes are expanded from their low rank on the way. Each inner loop writes few arrays: of more, the compiler would
have to compare too many addresses, and would leave it scalar. Arrays are contiguous and share one dtype:

u, y, dy, du (b, l, c); projected (b, l, 4, r+2n): low-rank step sizes, B and C of the four directions; and, with p = 1
or b, weight (p, 4, r, c), A (p, 4, n, c), D (p, c), bias (p, 4, c).
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np

from trust_tta.scan.cpu.kernels import _fast_exp, _fast_log1p, _jit, _jit_sum


@_jit
def _pixel(i, k, height, width):
    """The pixel that direction k (rows, rows back, columns, columns back) visits as its i-th."""
    if k % 2 == 1:
        i = height * width - 1 - i
    return i if k < 2 else i % height * width + i // height


@_jit
def _start(f0, f1, f2, f3, x0, x1, x2, x3, x, out):
    for c in range(out.size):
        out[c] = x[c] + f0 * x0[c] + f1 * x1[c] + f2 * x2[c] + f3 * x3[c]


@_jit
def _add_four(f0, f1, f2, f3, x0, x1, x2, x3, out):
    for c in range(out.size):
        out[c] += f0 * x0[c] + f1 * x1[c] + f2 * x2[c] + f3 * x3[c]


@_jit
def _copy(x, out):
    for c in range(out.size):
        out[c] = x[c]


@_jit
def _add_one(f, x, out):
    for c in range(out.size):
        out[c] += f * x[c]


@_jit
def _multiply(x, z, out):
    for c in range(out.size):
        out[c] = x[c] * z[c]


@_jit
def _add_product(x, z, out):
    for c in range(out.size):
        out[c] += x[c] * z[c]


@_jit
def _expand(projected, weight, bias, o, k, low, high, d):
    """d (l, high - low) = the step sizes of direction k before softplus."""
    rank = weight.shape[2]
    fours = rank // 4 * 4
    for p in range(d.shape[0]):
        f = projected[p, k]
        if fours > 0:
            _start(
                f[0], f[1], f[2], f[3], weight[o, k, 0, low:high], weight[o, k, 1, low:high],
                weight[o, k, 2, low:high], weight[o, k, 3, low:high], bias[o, k, low:high], d[p],
            )  # fmt: skip
        else:
            _copy(bias[o, k, low:high], d[p])
        for r in range(4, fours, 4):
            _add_four(
                f[r], f[r + 1], f[r + 2], f[r + 3], weight[o, k, r, low:high], weight[o, k, r + 1, low:high],
                weight[o, k, r + 2, low:high], weight[o, k, r + 3, low:high], d[p],
            )  # fmt: skip
        for r in range(fours, rank):
            _add_one(f[r], weight[o, k, r, low:high], d[p])


@_jit
def _softplus(d):
    if d.itemsize == 8:
        for i in range(d.size):
            d[i] = max(d[i], 0.0) + math.log1p(math.exp(-abs(d[i])))
    else:
        for i in range(d.size):
            d[i] = max(d[i], np.float32(0)) + _fast_log1p(_fast_exp(-abs(d[i])))


@_jit
def _softplus_and_slope(d, slope):
    """d = softplus(d); slope = its derivative."""
    if d.itemsize == 8:
        for i in range(d.size):
            x, e = d[i], math.exp(-abs(d[i]))
            d[i] = max(x, 0.0) + math.log1p(e)
            slope[i] = (1.0 if x >= 0 else e) / (1.0 + e)
    else:
        for i in range(d.size):
            x, e = d[i], _fast_exp(-abs(d[i]))
            d[i] = max(x, np.float32(0)) + _fast_log1p(e)
            slope[i] = (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


@_jit
def _advance(d, A, u, B, C, h, y):
    """One step of a row of states; y += C h."""
    if h.itemsize == 8:
        for c in range(h.size):
            h[c] = math.exp(d[c] * A[c]) * h[c] + d[c] * (B * u[c])
            y[c] += C * h[c]
    else:
        for c in range(h.size):
            state = _fast_exp(d[c] * A[c]) * h[c] + d[c] * (B * u[c])
            h[c] = state
            y[c] += C * state


@_jit
def scan_forward(scratch, u, projected, weight, A, D, bias, y, height, width, block, first, last):
    """Fill y, the sum of the four directions, for tasks first..last-1: an image and a block of channels each."""
    _, length, channels = u.shape
    rank, states = weight.shape[2], A.shape[2]
    blocks = -(-channels // block)
    for task in range(first, last):
        b, low = task // blocks, task % blocks * block
        high = min(low + block, channels)
        o = b if A.shape[0] > 1 else 0
        size = length * (high - low)
        d, h = scratch[:size].reshape((length, high - low)), scratch[size : size + high - low]
        for p in range(length):
            _multiply(D[o, low:high], u[b, p, low:high], y[b, p, low:high])
        for k in range(4):
            _expand(projected[b], weight, bias, o, k, low, high, d)
            _softplus(scratch[:size])
            for n in range(states):
                h[:] = 0
                for i in range(length):
                    q = _pixel(i, k, height, width)
                    _advance(
                        d[q], A[o, k, n, low:high], u[b, q, low:high], projected[b, q, k, rank + n],
                        projected[b, q, k, rank + states + n], h, y[b, q, low:high],
                    )  # fmt: skip


@_jit
def scan_backward(
    scratch, dy, u, projected, weight, A, D, bias, du, dprojected, sums, height, width, block, train_weight, train_scan,
    first, last,
):  # fmt: skip
    """Fill du without what comes through `projected`, and partial sums of the other gradients, as `scan_forward`.

    dprojected (blocks, b, l, 4, r+2n), sums (b, 1 + 4 + 4n + 4r, c): of D, bias, A and weight.
    """
    _, length, channels = u.shape
    rank, states = weight.shape[2], A.shape[2]
    blocks = -(-channels // block)
    for task in range(first, last):
        b, part = task // blocks, task % blocks
        low, high = part * block, min(part * block + block, channels)
        o = b if A.shape[0] > 1 else 0
        wide = high - low
        size = length * wide
        d, ds = scratch[0, :size].reshape((length, wide)), scratch[1, :size].reshape((length, wide))
        sums[b, 0, low:high] = 0
        for p in range(length):
            _multiply(D[o, low:high], dy[b, p, low:high], du[b, p, low:high])
            _add_product(dy[b, p, low:high], u[b, p, low:high], sums[b, 0, low:high])
        for k in range(4):
            _expand(projected[b], weight, bias, o, k, low, high, d)
            _softplus_and_slope(scratch[0, :size], scratch[2, :size])
            for n in range(states):
                _differentiate_states(
                    scratch, dy[b], u[b], projected[b], A[o, k, n, low:high], du[b], dprojected[part, b],
                    sums[b, 5 + k * states + n, low:high], height, width, k, rank + n, rank + states + n, low, high,
                    n == 0, train_scan,
                )  # fmt: skip
            _reduce(ds, weight, dprojected[part, b], o, k, low, high)
            if train_weight or train_scan:
                rows = rank if train_weight else 0
                _collect(
                    ds, projected[b], sums[b], sums[b, 1 + k, low:high], 5 + 4 * states + k * rank, rows, k, low, high
                )


@_jit
def _differentiate_states(
    scratch, dy, u, projected, A, du, dprojected, dA, height, width, k, at_B, at_C, low, high, alone, train_scan
):  # fmt: skip
    """Add one state's share to du and to the gradient of the steps, which is begun where it is `alone`, so far; fill
    those of A, B and C."""
    length, wide = u.shape[0], high - low
    size = length * wide
    shape = (length, wide)
    d, ds, slope = scratch[0, :size].reshape(shape), scratch[1, :size].reshape(shape), scratch[2, :size].reshape(shape)
    a, h = scratch[3, :size].reshape(shape), scratch[4, :size].reshape(shape)
    zero, g, carry = scratch[5, :wide], scratch[5, wide : 2 * wide], scratch[5, 2 * wide : 3 * wide]
    zero[:] = 0
    carry[:] = 0
    dA[:] = 0
    before = zero
    for i in range(length):
        q = _pixel(i, k, height, width)
        _decay(d[q], A, a[q])
        _follow(a[q], d[q], u[q, low:high], projected[q, k, at_B], before, h[q])
        before = h[q]
    for i in range(length - 1, -1, -1):
        q = _pixel(i, k, height, width)
        before = h[_pixel(i - 1, k, height, width)] if i > 0 else zero
        B = projected[q, k, at_B]
        dprojected[q, k, at_C] = _return(a[q], dy[q, low:high], h[q], projected[q, k, at_C], carry, g)
        dprojected[q, k, at_B] = _add_inputs(g, d[q], u[q, low:high], B, du[q, low:high])
        if alone:
            _set_steps(g, u[q, low:high], B, carry, before, A, slope[q], ds[q])
        else:
            _add_steps(g, u[q, low:high], B, carry, before, A, slope[q], ds[q])
        if train_scan:
            _add_decays(carry, before, d[q], dA)


@_jit
def _decay(d, A, a):
    if a.itemsize == 8:
        for c in range(a.size):
            a[c] = math.exp(d[c] * A[c])
    else:
        for c in range(a.size):
            a[c] = _fast_exp(d[c] * A[c])


@_jit
def _follow(a, d, u, B, before, h):
    for c in range(h.size):
        h[c] = a[c] * before[c] + d[c] * (B * u[c])


@_jit_sum
def _return(a, dy, h, C, carry, g):
    """g = the gradient of the states of a pixel, carry = that of those before it, but for their own C dy; return dC."""
    dC = C * 0
    for c in range(g.size):
        gradient = carry[c] + C * dy[c]
        g[c] = gradient
        carry[c] = gradient * a[c]
        dC += dy[c] * h[c]
    return dC


@_jit_sum
def _add_inputs(g, d, u, B, du):
    """Add to du what comes through the states of a pixel; return dB."""
    dB = B * 0
    for c in range(g.size):
        gradient = g[c] * d[c]
        du[c] += gradient * B
        dB += gradient * u[c]
    return dB


@_jit
def _set_steps(g, u, B, carry, before, A, slope, ds):
    for c in range(ds.size):
        ds[c] = slope[c] * (g[c] * (B * u[c]) + carry[c] * before[c] * A[c])


@_jit
def _add_steps(g, u, B, carry, before, A, slope, ds):
    for c in range(ds.size):
        ds[c] += slope[c] * (g[c] * (B * u[c]) + carry[c] * before[c] * A[c])


@_jit
def _add_decays(carry, before, d, dA):
    for c in range(dA.size):
        dA[c] += carry[c] * before[c] * d[c]


@_jit
def _reduce(ds, weight, dprojected, o, k, low, high):
    """The adjoint of `_expand`: the gradient of the low-rank step sizes of direction k."""
    rank = weight.shape[2]
    fours = rank // 4 * 4
    for p in range(ds.shape[0]):
        out = dprojected[p, k]
        for r in range(0, fours, 4):
            out[r], out[r + 1], out[r + 2], out[r + 3] = _four_sums(
                ds[p], weight[o, k, r, low:high], weight[o, k, r + 1, low:high], weight[o, k, r + 2, low:high],
                weight[o, k, r + 3, low:high],
            )  # fmt: skip
        for r in range(fours, rank):
            out[r] = _sum_of_products(ds[p], weight[o, k, r, low:high])


@_jit_sum
def _four_sums(x, z0, z1, z2, z3):
    s0 = s1 = s2 = s3 = x[0] * 0
    for c in range(x.size):
        s0 += x[c] * z0[c]
        s1 += x[c] * z1[c]
        s2 += x[c] * z2[c]
        s3 += x[c] * z3[c]
    return s0, s1, s2, s3


@_jit_sum
def _sum_of_products(x, z):
    total = x[0] * 0
    for c in range(x.size):
        total += x[c] * z[c]
    return total


@_jit
def _collect(ds, projected, sums, dbias, start, rows, k, low, high):
    """One image's gradients in direction k: of `bias` and, from row `start` of its sums, of `rows` of `weight`."""
    length = ds.shape[0]
    fours, one = length // 4 * 4, ds[0, 0] * 0 + 1
    dbias[:] = 0
    sums[start : start + rows, low:high] = 0
    for p in range(0, fours, 4):
        _add_four(one, one, one, one, ds[p], ds[p + 1], ds[p + 2], ds[p + 3], dbias)
        for r in range(rows):
            _add_four(
                projected[p, k, r], projected[p + 1, k, r], projected[p + 2, k, r], projected[p + 3, k, r],
                ds[p], ds[p + 1], ds[p + 2], ds[p + 3], sums[start + r, low:high],
            )  # fmt: skip
    for p in range(fours, length):
        _add_one(one, ds[p], dbias)
        for r in range(rows):
            _add_one(projected[p, k, r], ds[p], sums[start + r, low:high])
