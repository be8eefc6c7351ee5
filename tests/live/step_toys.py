"""A tiny regression net and its samples, for worker scripts that run MindSpore."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops

FEATURES = 8


class Net(nn.Cell):
    """Two layers and a squared error; equal weights in every process."""

    def __init__(self, hidden=16):
        super().__init__()
        draw = np.random.RandomState(0)
        first = Tensor(draw.randn(hidden, FEATURES).astype(np.float32) * 0.3)
        second = Tensor(draw.randn(1, hidden).astype(np.float32) * 0.3)
        self.first = nn.Dense(FEATURES, hidden, weight_init=first, bias_init="zeros")
        self.second = nn.Dense(hidden, 1, weight_init=second, bias_init="zeros")

    def construct(self, x, y):
        return ops.mean(ops.square(self.second(ops.tanh(self.first(x))) - y))


def arrays(seed, rows=8):
    draw = np.random.RandomState(seed)
    x = draw.randn(rows, FEATURES).astype(np.float32)
    return x, np.sin(x[:, :1] * 2)


def batch(seed, rows=8):
    return tuple(Tensor(array) for array in arrays(seed, rows))


def poisoned(seed, rows=8):
    x, y = arrays(seed, rows)
    x[0, 0] = np.nan
    return Tensor(x), Tensor(y)


def state(cell, *, knobs=False):
    """Bytes of every Parameter, so that equality means bit-equality (NaN included)."""
    return {
        parameter.name: parameter.asnumpy().tobytes().hex()
        for parameter in cell.get_parameters()
        if knobs or not parameter.name.startswith("mindtune.")
    }
