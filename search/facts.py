"""What holds for a whole study: machine, training and limits.

These are the pure twins of the study file's sections; whoever reads the file builds them. `None`
means unknown, and nothing that is unknown is ever guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mindtune.search.errors import SearchError
from mindtune.search.model_shape import ModelShape
from mindtune.search.program import Program

__all__ = ["Cluster", "Limits", "StudyFacts", "Training", "size_text"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machine."""

    num_devices: int
    devices_per_node: int | None = None
    """None: all devices are in one node."""
    device: str = "cpu"
    device_memory: float | None = None
    """Bytes of one device."""
    peak_flops: float | None = None
    """Dense peak of one device in FLOP/s at the study's precision."""
    intra_node_bandwidth: float | None = None
    """Bytes per second and device between devices of a node."""
    inter_node_bandwidth: float | None = None
    """Bytes per second and device between nodes."""
    allow_idle: bool = False
    """Configs may use fewer devices than there are."""
    whole_nodes: bool = False
    """Whoever starts the ranks starts as many on each node."""

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise SearchError(
                f"num_devices must be a whole number of at least 1, but got {self.num_devices}."
            )

    @property
    def is_host(self) -> bool:
        """Whether the devices are a host's own cores."""
        return self.device.lower() == "cpu"

    @property
    def node_size(self) -> int:
        """Devices of one node."""
        return self.devices_per_node or self.num_devices

    @property
    def is_timed(self) -> bool:
        """Whether peak and every bandwidth that can matter are known."""
        spans_nodes = self.num_devices > self.node_size
        return (
            self.peak_flops is not None
            and (self.intra_node_bandwidth is not None or self.num_devices == 1)
            and (self.inter_node_bandwidth is not None or not spans_nodes)
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every config has in common."""

    global_batch_size: int
    """Samples per optimizer step over all ranks."""
    precision: str = "float32"
    """Names the peak; also what a config computes in if it does not name a precision."""
    optimizer: str = "adamw"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that reject a config; None: not set, then it is advice at most."""

    memory_utilization: float | None = None
    """Largest share of the device memory; None: all of it."""
    max_memory: float | None = None
    """Bytes that a config may use at most, however much the device has."""
    min_memory_utilization: float | None = None
    """Least share of the device memory: configs that leave more of it idle are not wanted."""
    max_pipeline_bubble: float | None = None
    """Largest share of a step that pipeline stages may wait."""
    max_recompute_share: float | None = None
    """Largest share of a step's compute that recomputation may take."""
    min_micro_batches_per_stage: int | None = None
    max_micro_batches_per_stage: int | None = None
    min_compression: float | None = None
    """Least factor by which a gradient compression shrinks float32 gradients."""
    min_overlap_headroom: float | None = None
    """Least share of the device memory that is free where communication overlaps."""
    tensor_parallel_inside_node: bool = False
    vocab_divisible: bool = False
    """The vocabulary must divide over the tensor parallel ranks without padding."""
    framework: str = "mindspore"
    """Whose own rules hold besides: `mindspore`, `mindformers` (both), or `other` (neither)."""


@dataclass(frozen=True, kw_only=True)
class StudyFacts:
    """Everything that the rules and the cost model know besides the config."""

    cluster: Cluster
    training: Training
    model: ModelShape | None = None
    """None: no cost model and no MFU; rules about the model's sizes do not fire."""
    limits: Limits = Limits()
    program: Program = field(default_factory=Program)

    @property
    def memory_limit(self) -> tuple[float, str] | None:
        """Bytes that a config may use, and where the number is from; None: unknown."""
        share, device = self.limits.memory_utilization, self.cluster.device_memory
        found = []
        if device is not None:
            factor = 1.0 if share is None else share
            words = f"memory_utilization x device_memory = {factor:g} x {size_text(device)}"
            found.append((factor * device, words))
        if self.limits.max_memory is not None:
            most = self.limits.max_memory
            found.append((most, f"constraints.max_memory = {size_text(most)}"))
        return min(found, default=None)

    @property
    def has_chosen_memory_limit(self) -> bool:
        """Whether the memory limit is the user's own; else it is all that a device has."""
        most, device = self.limits.max_memory, self.cluster.device_memory
        if device is None or self.limits.memory_utilization is not None:
            return self.memory_limit is not None
        return most is not None and most <= device

    @property
    def memory_capacity(self) -> float | None:
        """Bytes that a trial which ran out of memory must have wanted more than; None: unknown.

        A program may be held to `max_memory`; `memory_utilization` holds nobody back.
        """
        sizes = (self.limits.max_memory, self.cluster.device_memory)
        return min((size for size in sizes if size is not None), default=None)


def size_text(size_bytes: float) -> str:
    """Return a size for a reason, binary, such as `58.5GB`."""
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.1f}GB"
    return f"{size_bytes / 2**20:.0f}MB" if size_bytes >= 2**20 else f"{size_bytes:.0f} bytes"
