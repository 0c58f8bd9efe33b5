"""The grouped scan, compiled by numba; contiguous arrays of one dtype, shapes as in `tensors.ScanInputs`."""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np

from trust_tta.ops.cpu.tiling import LANES
from trust_tta.ops.cpu.vector_math import fast_exp, fast_log1p, jit, jit_sum


@jit
def _steps(delta, bias, softplus, d):
    """d = softplus(delta + bias) over one row."""
    if not softplus:
        for t in range(d.size):
            d[t] = delta[t] + bias
    elif d.itemsize == 8:
        for t in range(d.size):
            x = delta[t] + bias
            d[t] = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
    else:
        for t in range(d.size):
            x = delta[t] + bias
            d[t] = max(x, np.float32(0)) + fast_log1p(fast_exp(-abs(x)))


@jit
def _step_derivatives(delta, bias, softplus, s):
    """s = the derivative of `_steps` in delta over one row."""
    if not softplus:
        s[:] = 1
    elif s.itemsize == 8:
        for t in range(s.size):
            s[t] = 1.0 / (1.0 + math.exp(-(delta[t] + bias)))
    else:
        for t in range(s.size):
            s[t] = np.float32(1) / (np.float32(1) + fast_exp(-(delta[t] + bias)))


@jit
def _decays(d, A, a):
    """a = exp(d A) over one row."""
    if a.itemsize == 8:
        for t in range(a.size):
            a[t] = math.exp(d[t] * A)
    else:
        for t in range(a.size):
            a[t] = fast_exp(d[t] * A)


@jit
def _scale(factor, x, out):
    for t in range(out.size):
        out[t] = factor * x[t]


@jit
def _product(x, z, out):
    for t in range(out.size):
        out[t] = x[t] * z[t]


@jit
def _add_product(x, z, out):
    for t in range(out.size):
        out[t] += x[t] * z[t]


@jit
def _inputs(d, B, u, x):
    """x = d B u over one row: the input of the state at each step."""
    for t in range(x.size):
        x[t] = d[t] * B[t] * u[t]


@jit
def _recur(a, x, reverse, lanes):
    """h_t = a_t h_{t-1} + x_t for `lanes` rows at once; x becomes h."""
    length = x.shape[1]
    if lanes == 4:
        h0 = h1 = h2 = h3 = x[0, 0] * 0
        for i in range(length):
            t = length - 1 - i if reverse else i
            h0 = a[0, t] * h0 + x[0, t]
            h1 = a[1, t] * h1 + x[1, t]
            h2 = a[2, t] * h2 + x[2, t]
            h3 = a[3, t] * h3 + x[3, t]
            x[0, t], x[1, t], x[2, t], x[3, t] = h0, h1, h2, h3
    else:
        for lane in range(lanes):
            h = x[0, 0] * 0
            for i in range(length):
                t = length - 1 - i if reverse else i
                h = a[lane, t] * h + x[lane, t]
                x[lane, t] = h


@jit
def _task_range(task, groups, chunks, channels):
    """The image, group, chunk and channel range of a task."""
    b, rest = task // (groups * chunks), task % (groups * chunks)
    chunk = rest % chunks
    return b, rest // chunks, chunk, channels * chunk // chunks, channels * (chunk + 1) // chunks


@jit
def scan_forward(scratch, u, delta, A, B, C, D, bias, y, softplus, chunks, first, last):
    """Fill y for tasks first..last-1."""
    _, groups, channels, _ = u.shape
    d, a, h = scratch[0], scratch[1], scratch[2]
    for task in range(first, last):
        b, g, _, low, high = _task_range(task, groups, chunks, channels)
        for c0 in range(low, high, LANES):
            lanes = min(LANES, high - c0)
            for lane in range(lanes):
                _scale(D[g, :, c0 + lane].sum(), u[b, g, c0 + lane], y[b, g, c0 + lane])
            for m in range(delta.shape[2]):
                for lane in range(lanes):
                    _steps(delta[b, g, m, c0 + lane], bias[g, m, c0 + lane], softplus, d[lane])
                for n in range(A.shape[3]):
                    for lane in range(lanes):
                        _decays(d[lane], A[g, m, c0 + lane, n], a[lane])
                        _inputs(d[lane], B[b, g, m, n], u[b, g, c0 + lane], h[lane])
                    _recur(a, h, m == 1, lanes)
                    for lane in range(lanes):
                        _add_product(C[b, g, m, n], h[lane], y[b, g, c0 + lane])


@jit
def scan_backward(
    scratch, dy, u, delta, A, B, C, D, bias, du, ddelta, dA, dB, dC, dD, dbias, softplus, chunks, first, last
):
    """Fill du, ddelta and the partial sums of the other gradients for tasks first..last-1."""
    _, groups, channels, _ = u.shape
    d, a, h, g_h, s = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4, 0]
    for task in range(first, last):
        b, g, chunk, low, high = _task_range(task, groups, chunks, channels)
        for c0 in range(low, high, LANES):
            lanes = min(LANES, high - c0)
            for lane in range(lanes):
                c = c0 + lane
                skip = D[g, :, c].sum()
                _start_gradients(dy[b, g, c], u[b, g, c], skip, du[b, g, c], dD[b, g, :, c])
            for m in range(delta.shape[2]):
                for lane in range(lanes):
                    _steps(delta[b, g, m, c0 + lane], bias[g, m, c0 + lane], softplus, d[lane])
                    ddelta[b, g, m, c0 + lane, :] = 0
                for n in range(A.shape[3]):
                    for lane in range(lanes):
                        c = c0 + lane
                        _decays(d[lane], A[g, m, c, n], a[lane])
                        _inputs(d[lane], B[b, g, m, n], u[b, g, c], h[lane])
                        _product(dy[b, g, c], C[b, g, m, n], g_h[lane])
                    _recur(a, h, m == 1, lanes)
                    _recur_adjoint(a, g_h, m == 1, lanes)
                    for lane in range(lanes):
                        c = c0 + lane
                        dA[b, g, m, c, n] = _row_gradients(
                            dy[b, g, c], u[b, g, c], B[b, g, m, n], A[g, m, c, n], d[lane], a[lane], h[lane], g_h[lane],
                            m == 1, du[b, g, c], ddelta[b, g, m, c], dB[chunk, b, g, m, n], dC[chunk, b, g, m, n],
                        )  # fmt: skip
                for lane in range(lanes):
                    c = c0 + lane
                    _step_derivatives(delta[b, g, m, c], bias[g, m, c], softplus, s)
                    dbias[b, g, m, c] = _multiply_and_sum(s, ddelta[b, g, m, c])


@jit
def _recur_adjoint(a, g_h, reverse, lanes):
    """g_t = a_{t+1} g_{t+1} + g_t, against the direction of the scan."""
    length = g_h.shape[1]
    one = 1 if reverse else -1
    start = 0 if reverse else length - 1
    if lanes == 4:
        g0, g1, g2, g3 = g_h[0, start], g_h[1, start], g_h[2, start], g_h[3, start]
        for i in range(1, length):
            t = start + one * i
            before = t - one
            g0 = a[0, before] * g0 + g_h[0, t]
            g1 = a[1, before] * g1 + g_h[1, t]
            g2 = a[2, before] * g2 + g_h[2, t]
            g3 = a[3, before] * g3 + g_h[3, t]
            g_h[0, t], g_h[1, t], g_h[2, t], g_h[3, t] = g0, g1, g2, g3
    else:
        for lane in range(lanes):
            g = g_h[lane, start]
            for i in range(1, length):
                t = start + one * i
                g = a[lane, t - one] * g + g_h[lane, t]
                g_h[lane, t] = g


@jit_sum
def _start_gradients(dy, u, skip, du, dD):
    """The part of du and dD that comes through the skip connection D u."""
    total = skip * 0
    for t in range(u.size):
        du[t] = skip * dy[t]
    for t in range(u.size):
        total += dy[t] * u[t]
    dD[:] = total


@jit_sum
def _multiply_and_sum(x, out):
    """out = x out over one row; return the sum of out."""
    total = x[0] * 0
    for t in range(out.size):
        out[t] *= x[t]
    for t in range(out.size):
        total += out[t]
    return total


@jit_sum
def _row_gradients(dy, u, B, A, d, a, h, g_h, reverse, du, ddelta, dB, dC):
    """Add one row's share to du, ddelta, dB and dC; return its gradient of A."""
    length = u.size
    for t in range(length):
        dC[t] += dy[t] * h[t]
        drive = g_h[t] * d[t]
        dB[t] += drive * u[t]
        du[t] += drive * B[t]
        ddelta[t] += g_h[t] * B[t] * u[t]
    # a now becomes g_t h_{t-1} a_t, the gradient of the exponent d A
    if reverse:
        for t in range(length - 1):
            a[t] *= g_h[t] * h[t + 1]
        a[length - 1] = 0
    else:
        for t in range(1, length):
            a[t] *= g_h[t] * h[t - 1]
        a[0] = 0
    total = A * 0
    for t in range(length):
        ddelta[t] += a[t] * A
    for t in range(length):
        total += a[t] * d[t]
    return total
