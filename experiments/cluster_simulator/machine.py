"""A cluster as it really is, drawn from a seed.

Datasheets say the fields under "stated"; a search is told these and no others. Everything below
is the truth behind them. The ranges are wider than those of the public sheets and measurements
that they surround (V100 to GB200 and Ascend 910B; 30 to 80 % of the peak for large products; links
that give 50 to 95 % of their rate), so that a search that does well does not do so by knowing
one machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from mindtune.search.facts import Cluster

__all__ = ["Machine", "draw_machine", "fixed_luck"]

_GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One cluster. Times in seconds, sizes in bytes, rates per second and device."""

    seed: int
    num_devices: int
    node_size: int

    # Stated.
    peak_flops: float
    """Dense peak in half precision."""
    memory_bytes: float
    near_bandwidth: float
    """Between devices of a node."""
    far_bandwidth: float
    """Between nodes."""

    # Device.
    float32_share: float
    """Peak of float32 over that of half precision."""
    matmul_share: float
    """Share of the peak that a product of large matrices reaches."""
    tile: tuple[int, int]
    """Rows and columns that one core computes at a time."""
    cores: int
    half_depth: float
    """Inner dimension at which a product reaches half of `matmul_share`."""
    attention_share: float
    """The same share for fused attention with long sequences."""
    memory_bandwidth: float
    kernel_gap_s: float
    """Idle time of the device between kernels."""
    launch_s: float
    """Time of the host for one kernel."""

    shape_luck: float
    """Standard deviation of the logarithm of a product's speed from shape to shape: libraries
    choose among kernels, well or badly."""
    throttle: float
    """Share of the clock that is lost where the device is busy all the time."""
    pressure: float
    """Slow-down where the allocator has no memory to spare."""

    # Network.
    near_share: float
    """Share of the stated rate that long messages see."""
    far_share: float
    near_latency_s: float
    far_latency_s: float
    ramp_bytes: float
    """Message at which a link reaches half of its rate."""
    pod_nodes: int
    """Nodes below one switch."""
    oversubscription: float
    """How many times slower links are between pods, where all nodes send at once."""
    collision: float
    """Slow-down for every doubling of the nodes that send at once."""
    group_luck: float
    """Standard deviation of the logarithm of an exchange's speed from group to group."""
    stall_share: float
    """Layouts of pipelines whose messages wait for each other, always or never."""
    stall_s: float
    """What that takes in every micro-batch."""
    slow_nodes: tuple[tuple[int, float], ...]
    """Node -> how many times longer it computes."""
    slow_link: float
    """Share of its rate that the worst node's link has."""
    overlap_share: float
    """Share of a computation behind which an exchange can hide."""
    overlap_drag: float
    """Share by which hidden exchanges slow the computation down."""

    # Host.
    host_cores: int
    """Of a node, for all its devices."""
    load_s: float
    """Core seconds to prepare 1,000 tokens."""
    host_bandwidth: float
    """Between device and host memory."""
    step_s: float
    """What is done once per step."""
    compile_s: float
    """Start of a training, per layer of a stage."""

    # Memory.
    fixed_bytes: float
    """Context and libraries, which leave that much less for tensors."""
    buffer_bytes: float
    """Of each communication group."""
    block_bytes: float
    """Sizes are rounded up to multiples of it."""
    fragmentation: float
    """Mean share of the tensors' peak that lies idle between them."""

    # Luck.
    imbalance: float
    """Load of the fullest expert over the mean, less 1."""
    run_noise: float
    """Standard deviation of the logarithm of a run's speed."""
    step_noise: float
    """The same from step to step, in a config that waits for no other node."""
    outlier_share: float
    """Steps that take several times as long."""
    crash_share: float
    """Runs that break off for no reason of their config, on 1,000 devices."""

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return math.ceil(self.num_devices / self.node_size)

    def stated(self) -> Cluster:
        """Return what a search is told."""
        return Cluster(
            num_devices=self.num_devices,
            devices_per_node=min(self.node_size, self.num_devices),
            device=f"simulated-{self.seed}",
            device_memory=self.memory_bytes,
            peak_flops=self.peak_flops,
            intra_node_bandwidth=self.near_bandwidth,
            inter_node_bandwidth=self.far_bandwidth,
        )


def fixed_luck(*what: object) -> Random:
    """Return draws that are always the same for the same things: luck that no repeat averages."""
    return Random(repr(what))


def draw_machine(seed: int, num_devices: int, *, node_size: int = 8) -> Machine:
    """Return the cluster of a seed; equal arguments give the same one."""
    draw = Random(f"machine:{seed}:{num_devices}:{node_size}")

    def spread(low: float, high: float) -> float:
        """Draw so that every factor between two numbers is as likely."""
        return low * (high / low) ** draw.random()

    nodes = math.ceil(num_devices / node_size)
    peak = spread(110e12, 1000e12)
    slow = draw.sample(range(nodes), min(nodes // 2, draw.choice((0, 0, 1, 1 + nodes // 100))))
    return Machine(
        seed=seed,
        num_devices=num_devices,
        node_size=node_size,
        peak_flops=float(f"{peak:.3g}"),
        memory_bytes=draw.choice((32, 40, 64, 80, 96)) * _GIB,
        near_bandwidth=float(f"{spread(60e9, 450e9):.3g}"),
        far_bandwidth=float(f"{spread(6e9, 50e9):.3g}"),
        float32_share=draw.choice((0.06, 0.125, 0.25, 0.5)),
        matmul_share=draw.uniform(0.5, 0.85),
        tile=draw.choice(((128, 128), (128, 256), (256, 128), (256, 256))),
        cores=draw.choice((24, 64, 80, 108, 132, 144)),
        half_depth=spread(60.0, 500.0),
        attention_share=draw.uniform(0.2, 0.7),
        memory_bandwidth=peak / draw.uniform(140.0, 320.0),
        kernel_gap_s=spread(1e-6, 6e-6),
        launch_s=spread(2e-6, 14e-6),
        shape_luck=spread(0.03, 0.3),
        throttle=draw.uniform(0.0, 0.25),
        pressure=draw.uniform(0.0, 0.4),
        near_share=draw.uniform(0.55, 0.95),
        far_share=draw.uniform(0.45, 0.95),
        near_latency_s=spread(3e-6, 20e-6),
        far_latency_s=spread(8e-6, 60e-6),
        ramp_bytes=spread(0.1e6, 4e6),
        pod_nodes=draw.choice((4, 16, 32, 64)),
        oversubscription=draw.choice((1.0, 1.5, 2.0, 4.0)),
        collision=draw.uniform(0.0, 0.12),
        group_luck=spread(0.05, 0.5),
        stall_share=draw.uniform(0.0, 0.3),
        stall_s=spread(3e-3, 0.3),
        slow_nodes=tuple(sorted((node, 1.0 + spread(0.04, 0.4)) for node in slow)),
        slow_link=draw.choice((1.0, 1.0, 0.8, 0.5)),
        overlap_share=draw.uniform(0.5, 0.95),
        overlap_drag=draw.uniform(0.0, 0.15),
        host_cores=draw.choice((32, 64, 96, 192)),
        load_s=spread(0.3e-3, 8e-3),
        host_bandwidth=spread(8e9, 50e9),
        step_s=spread(2e-3, 40e-3),
        compile_s=spread(0.5, 6.0),
        fixed_bytes=spread(0.5, 3.0) * _GIB,
        buffer_bytes=draw.choice((16, 64, 200, 400)) * 2.0**20,
        block_bytes=draw.choice((512.0, 2.0**20, 2.0**21)),
        fragmentation=spread(0.01, 0.08),
        imbalance=spread(0.1, 1.2),
        run_noise=spread(0.01, 0.1),
        step_noise=spread(0.005, 0.05),
        outlier_share=spread(0.0005, 0.01),
        crash_share=spread(0.002, 0.04),
    )  # fmt: skip
