"""How long a device takes for one kernel.

A product is cut into tiles, which the cores take in waves: a wave that is not full takes as long
as a full one, and a tile at the edge as long as a whole one. That makes cliffs where a width
passes a multiple of the tile or a batch fills one wave more, and makes narrow shares of tensor
parallelism and small experts slow. Too few tiles for the cores are split along the inner
dimension, as libraries of kernels do. Nothing is faster than its tensors pass the memory. Besides,
libraries choose a kernel for each shape, sometimes a bad one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mindtune.experiments.cluster_simulator.machine import Machine, fixed_luck

__all__ = ["HALF", "WHOLE", "Kernels"]

HALF, WHOLE = 2, 4
"""Bytes of a half-precision and of a float32 number."""
_SPLITS = (1, 2, 4, 8)
_ATTENTION_ROWS = 128
"""Queries that one core of a fused attention handles at a time."""
_CACHED = 200_000


@dataclass(frozen=True)
class Kernels:
    """Kernels of one machine in one number format."""

    machine: Machine
    element: int
    """Bytes of a number."""
    _known: dict[tuple[int, int, int, int], float] = field(default_factory=dict, repr=False)

    @property
    def peak(self) -> float:
        """FLOP/s in this format."""
        share = 1.0 if self.element == HALF else self.machine.float32_share
        return share * self.machine.peak_flops

    def product_s(self, rows: int, columns: int, depth: int, batch: int = 1) -> float:
        """Return the time of `batch` products of a (rows, depth) and a (depth, columns) matrix."""
        key = (rows, columns, depth, batch)
        known = self._known.get(key)
        if known is None:
            if len(self._known) > _CACHED:
                self._known.clear()
            known = self._known[key] = self._product_s(*key)
        return known

    def _product_s(self, rows: int, columns: int, depth: int, batch: int) -> float:
        machine = self.machine
        high, wide = machine.tile
        tiles = math.ceil(rows / high) * math.ceil(columns / wide) * batch
        speed = self.peak * machine.matmul_share
        times = []
        for split in _SPLITS:
            inner = depth / split
            waves = math.ceil(tiles * split / machine.cores)
            flops = 2.0 * waves * machine.cores * high * wide * inner
            partial = 0.0 if split == 1 else 2.0 * split * rows * columns * batch * WHOLE
            seconds = flops / speed * (1.0 + machine.half_depth / inner)
            times.append(seconds + partial / machine.memory_bandwidth)
        moved = self.element * batch * (rows * depth + depth * columns + rows * columns)
        luck = fixed_luck(machine.seed, self.element, rows, columns, depth, batch)
        best = min(times) * math.exp(machine.shape_luck * abs(luck.gauss(0.0, 1.0)))
        return max(best, moved / machine.memory_bandwidth) + machine.kernel_gap_s

    def traffic_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Return the time of kernels that do little but read and write."""
        return moved_bytes / self.machine.memory_bandwidth + kernels * self.machine.kernel_gap_s

    def fused_attention_s(self, queries: int, keys: int, width: int, heads: int) -> float:
        """Return the forward time of a fused causal attention.

        Args:
            queries: Positions whose queries are here.
            keys: Positions whose keys are looked at, of which the mask hides half.
            width: Of one head.
            heads: Heads here, times samples.
        """
        machine = self.machine
        blocks = math.ceil(queries / _ATTENTION_ROWS) * heads
        filled = blocks / (math.ceil(blocks / machine.cores) * machine.cores)
        # Narrow heads leave the product units idle; short rows pay the prologue of each block.
        share = machine.attention_share * min(1.0, width / 128) ** 0.5 * keys / (keys + 512)
        flops = 2.0 * queries * keys * width * heads
        return flops / (self.peak * share * filled) + machine.kernel_gap_s

    def stored_attention_s(self, queries: int, keys: int, width: int, heads: int) -> float:
        """Return the forward time of an attention that stores its scores: nothing is skipped."""
        scores = self.product_s(queries, keys, width, heads)
        values = self.product_s(queries, width, keys, heads)
        passes = 6.0 * queries * keys * heads * self.element
        return scores + values + self.traffic_s(passes, 3)
