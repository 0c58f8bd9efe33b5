"""Operators of PyTorch's graphs as ONNX has them; imported where onnxscript is installed."""

# mypy: ignore-errors
# No postponed annotations: onnxscript reads them to count the outputs.
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op

# 2 atanh(z) / z as a polynomial of z^2, for z from 0 to 1/3: a relative error of 4e-9; the highest power first.
ATANH = (0.2817465726, 0.2796141883, 0.4002485372, 0.6666631594, 2.0000000079)


@script()
def scan_linear(decay: FLOAT[...], x: FLOAT[...]) -> FLOAT[...]:
    """h_t = decay_t h_{t-1} + x_t along the second axis from the end, of (.., l, c)."""

    @graph()
    def step(before, decay_t, x_t):
        after = op.Add(op.Mul(decay_t, before), x_t)
        state = op.Identity(after)
        return after, state

    first = op.Gather(x, op.Constant(value_int=0), axis=-2)
    start = op.Sub(first, first)
    last, states = op.Scan(
        start, decay, x, body=step, num_scan_inputs=2, scan_input_axes=[-2, -2], scan_output_axes=[-2]
    )
    return states


def softplus(x, beta: float = 1.0, threshold: float = 20.0):
    """log(1 + exp(x)) = max(x, 0) + 2 atanh(y / (2 + y)) with y = exp(-|x|), exact also where it is small.

    onnxruntime computes Softplus and Log number by number, a hundred times slower than these.
    """
    y = op.Exp(op.Neg(op.Abs(x)))
    z = op.Div(y, op.Add(y, 2.0))
    square = op.Mul(z, z)
    sum_of_powers = op.Add(op.Mul(square, ATANH[0]), ATANH[1])
    for factor in ATANH[2:]:
        sum_of_powers = op.Add(op.Mul(square, sum_of_powers), factor)
    return op.Add(op.Relu(x), op.Mul(z, sum_of_powers))
