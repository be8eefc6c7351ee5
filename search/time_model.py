"""Time of an optimizer step, part by part.

Each part is what it would take at the machine's stated speed; `TimeRates` says how many times
longer it really takes, and is what trials calibrate. Micro-batches pass the pipeline in
m + (p - 1) / v rounds (Narayanan et al., arXiv 2104.04473, section 2.2). Within a round the host
launches kernels while the device computes, so the slower of the two decides; gradients' exchange
and the optimizer come after.

A host is no device: its ranks share its cores, its memory is far faster for what it computes, and
half precision is slower there, not faster.

Sources: ring exchanges send 2 (n - 1) / n of the data per rank (Patarasuk and Yuan, 2009), over
as many links between nodes as the group has ranks in a node (NCCL builds a ring per link); tensor
parallel layers exchange their output twice forward and twice backward, and twice more where they
are recomputed (Shoeybi et al., arXiv 1909.08053); parameter sharding gathers weights forward and
backward in every round (ZeRO, arXiv 1910.02054, section 7; PyTorch FSDP, arXiv 2304.11277).
Waiting for data and moving an offloaded optimizer's state have no part of their own: they are
left to calibration.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter, mul
from typing import Any, NamedTuple

from mindtune.search import layout
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config
from mindtune.search.model_shape import ModelShape

__all__ = ["DEVICE", "HOST", "OVERLAP_POWER", "TimeParts", "TimeRates", "time_parts"]

_FLOPS_PER_BYTE = 200.0
"""FLOPs that a device computes while its memory moves a byte: 140 (V100) to 300 (H100) by the
vendors' sheets, 196 for Ascend 910B."""
_HOST_FLOPS_PER_BYTE = 7.0
"""The same of a host's cores: two of an AMD EPYC compute 150 GFLOP/s and copy 21 GB/s
(`mindtune doctor --measure`)."""
_HOST_HALF = 1.6
"""Times longer that a host trains in half precision, which its cores do not compute in: 65 pairs
of configs that differ in nothing else (experiments/exhaustive_table)."""
_OPTIMIZER_TRAFFIC = 32.0
"""Bytes that an Adam step reads and writes per parameter: four float32 tensors, both ways."""
_COMPRESSION_TRAFFIC = {"float16": 12.0, "int8": 14.0, "topk": 48.0}
"""Bytes per parameter that a reducer reads and writes: a cast there and back, of int8 the search
for the largest value besides; selecting passes several times over values and indices."""
_OVERLAPPED = 0.7
"""Share of a gradient exchange that hides behind the backward pass where overlap is on."""
OVERLAP_POWER = 4.0
"""Power of the smooth maximum of host and device: 2 ** (1 / 4) = 1.19 where both take equally
long. Between 1 (their sum) and 4, published tables fit best with 4 (model_accuracy)."""


@dataclass(frozen=True)
class TimeRates:
    """How many times longer than at the stated speed each part takes.

    The defaults are means over the tables of experiments/model_accuracy; trials replace them.
    """

    compute: float = 1.6
    """Matrix products: the inverse of their share of the peak."""
    attention: float = 5.1
    traffic: float = 4.1
    near_exchange: float = 1.6
    far_exchange: float = 2.7
    context: float = 1.5
    pipeline: float = 1.7
    expert: float = 3.8
    launch: float = 2.1
    synchronization: float = 0.98
    pipelined_synchronization: float = 3.0
    message: float = 1.7
    stall: float = 0.02
    sharded_stall: float = 0.02
    near_gradients: float = 2.2
    far_gradients: float = 8.0
    optimizer: float = 2.5
    step: float = 2.2


class TimeParts(NamedTuple):
    """Seconds of one step at the stated speed; None: unknown because a bandwidth or peak is.

    The fields up to `work` are those of `TimeRates`, in their order.
    """

    compute: float | None
    """Matrix products of all rounds on the busiest stage, recomputation and bubble included."""
    attention: float | None
    """Scores and values of a fused kernel, the causal half; stored scores are matrix products."""
    traffic: float | None
    """Activations written and read: what makes narrow matrices slow."""
    near_exchange: float | None
    """Tensor parallelism inside a node."""
    far_exchange: float | None
    """Tensor parallelism between nodes."""
    context: float | None
    pipeline: float | None
    """Activations between stages."""
    expert: float | None
    launch: float
    """1 ms per layer and round, whatever the size."""
    synchronization: float
    """0.5 ms per layer, round and rank of a tensor parallel group: they wait for each other."""
    pipelined_synchronization: float
    """The same where there is a pipeline besides, whose messages come in between."""
    message: float
    """1 ms per message between stages."""
    stall: float
    """100 ms per round where pipelines of several replicas share the network and exchange whole
    gradients: erratic, often 0."""
    sharded_stall: float
    """The same with a sharded optimizer."""
    near_gradients: float | None
    far_gradients: float | None
    optimizer: float | None
    """Its state's traffic, and that of a gradient compression."""
    step: float
    """20 ms for everything that happens once."""
    work: float
    """FLOPs on the critical path of one rank, bubble included: known without any peak. On a host
    those in the time of which a device's share of its cores would compute as many in float32."""

    @property
    def amounts(self) -> tuple[float, ...] | None:
        """The parts in the order of `TimeRates`; None if any is unknown."""
        values: tuple[Any, ...] = self[:-1]
        return None if None in values else values

    def total(self, rates: TimeRates) -> float | None:
        """Return the seconds of a step at these rates; None if any part is unknown."""
        amounts = self.amounts
        if amounts is None:
            return None
        seconds = list(map(mul, _RATES(rates), amounts))
        device, host = sum(seconds[DEVICE]), sum(seconds[HOST])
        # Scaled by the longer one, since powers of tiny numbers vanish.
        longer, shorter = max(device, host), min(device, host)
        share = (shorter / longer) ** OVERLAP_POWER if longer else 0.0
        total: float = longer * (1.0 + share) ** (1.0 / OVERLAP_POWER) + sum(seconds[HOST.stop :])
        return total


_NAMES = tuple(field.name for field in fields(TimeRates))
_RATES = attrgetter(*_NAMES)
DEVICE = slice(0, 8)
"""Parts that keep the device busy within a round."""
HOST = slice(8, 12)
"""Parts that keep the host busy within a round; those behind come after all rounds."""


def time_parts(config: Config, facts: StudyFacts) -> TimeParts | None:
    """Return the parts of a step; None where they cannot be known.

    That is without a model, with a batch that does not divide, or with a list per stage that is
    not as long as there are stages.
    """
    rounds, model = layout.micro_batch_num(config, facts), facts.model
    if model is None or rounds is None:
        return None
    layers = layout.stage_layers(config, model.num_layers)
    repeated = layout.repeated_among(str(config["recompute"]), layers)
    if {len(layers), len(repeated)} != {layout.pipeline_stage(config)}:
        return None
    return _Step(config, facts, model, rounds, layers, repeated).parts()


class _Step:
    """One step of a config."""

    def __init__(
        self, config: Config, facts: StudyFacts, model: ModelShape, micro_batches: int,
        layers: tuple[int, ...], repeated: tuple[tuple[float, float], ...],
    ) -> None:  # fmt: skip
        self._config, self._cluster, self._model = config, facts.cluster, model
        self._expert_tensor = layout.expert_tensor(config, facts)
        self._tensor = layout.model_parallel(config)
        self._stages = layout.pipeline_stage(config)
        self._chunks = layout.interleave(config)
        self._replicas = layout.data_parallel(config)
        self._context = layout.context_parallel(config)
        self._sharing = layout.replicas(config)
        self._micro_batches = micro_batches
        self._rounds = micro_batches + (self._stages - 1) / self._chunks
        size = layout.micro_batch_size(config) * model.seq_length
        self._tokens = size / self._context
        is_half = layout.precision(config, facts) != "float32"
        self._element = 2 if is_half else 4
        self._speed, self._memory_speed = 1.0, 1.0 / _FLOPS_PER_BYTE
        if facts.cluster.is_host:
            # Its ranks share the cores: where a config has few of them, each has more.
            ranks = self._tensor * self._context * self._stages * self._replicas
            node_size = facts.cluster.node_size
            cores = node_size / min(ranks, node_size)
            self._speed = cores / (_HOST_HALF if is_half else 1.0)
            self._memory_speed = cores / _HOST_FLOPS_PER_BYTE
        self._activation = self._tokens * model.hidden_size * self._element
        # Launches, exchanges and traffic are the mean stage's: published tables fit better with it
        # than with the fullest one (model_accuracy), whose FLOPs set the pace.
        self._layers = model.num_layers / self._stages
        self._repeated = sum(whole for whole, _ in repeated) / self._stages
        self._flops, self._attention = self._busiest_stage(layers, repeated)

    def parts(self) -> TimeParts:
        model, rounds, tensor, layers = self._model, self._rounds, self._tensor, self._layers
        stated = self._cluster.peak_flops
        peak = None if stated is None else stated * self._speed
        memory = None if stated is None else stated * self._memory_speed
        near_gradients, far_gradients = self._gradients()
        # Six exchanges with recomputation, four without.
        exchanges = (4 * layers + 2 * self._repeated) * 2 * (tensor - 1) / tensor
        near, far = self._group(exchanges * rounds * self._activation, tensor, 1)
        # Ring attention passes every rank's keys and values around once forward, and backward
        # again together with their gradients (Liu et al., arXiv 2310.01889).
        context = self._context
        passed = 3.0 * 2 * (context - 1) * self._tokens * model.kv_size / tensor * self._element
        waits = layers * rounds * (tensor if tensor > 1 else 0)
        flops, attention = rounds * self._flops, rounds * self._attention
        stall = 0.1 * rounds * (1 - 1 / self._stages) if self._replicas > 1 else 0.0
        is_sharded = self._config["optimizer_sharding"] != "none"
        return TimeParts(
            compute=_seconds(flops, peak),
            attention=_seconds(attention, peak),
            traffic=_seconds(rounds * self._traffic(), memory),
            near_exchange=near,
            far_exchange=far,
            context=_sum(self._group(passed * layers * rounds, context, tensor)),
            pipeline=self._between_stages(),
            expert=self._experts(),
            launch=1e-3 * rounds * (layers + self._repeated / 3),
            synchronization=5e-4 * waits if self._stages == 1 else 0.0,
            pipelined_synchronization=5e-4 * waits if self._stages > 1 else 0.0,
            message=1e-3 * self._chunks * rounds if self._stages > 1 else 0.0,
            stall=0.0 if is_sharded else stall,
            sharded_stall=stall if is_sharded else 0.0,
            near_gradients=near_gradients,
            far_gradients=far_gradients,
            optimizer=_seconds(self._update_traffic(), memory),
            step=0.02,
            work=(flops + attention) / self._speed,
        )

    def _busiest_stage(
        self, layers: tuple[int, ...], repeated: tuple[tuple[float, float], ...]
    ) -> tuple[float, float]:
        """Return FLOPs of a round, and those of fused attention.

        The last stage has the output layer besides.
        """
        model, config = self._model, self._config
        layer = model.layer_flops
        core = layer.attention_core
        scale = self._tokens / self._tensor
        counts: tuple[float, ...] = layers
        if config["offset"] == "even":
            counts = (model.num_layers / self._stages,) * self._stages
        last = self._stages - 1
        alike = len(set(counts)) == 1 and len(set(repeated)) == 1
        stages = []
        for number in (last,) if alike else range(self._stages):
            count, (whole, cores) = counts[number], repeated[number]
            head = 3.0 * model.head_flops if number == last else 0.0
            passes = 3.0 * count + whole
            flops, attention = passes * (layer.total - core) + head, (passes + cores) * core
            if model.flash_attention:
                attention /= 2  # the kernel skips what the causal mask hides
            else:
                flops, attention = flops + attention, 0.0
            stages.append((flops * scale, attention * scale))
        return max(stages, key=sum)

    def _traffic(self) -> float:
        """Return bytes that a round writes and reads.

        As many as a layer's activations have (Korthikanti et al., arXiv 2205.05198), for each of
        forward, the two backward products and recomputation a third of the three.
        """
        model, tensor = self._model, self._tensor
        outside = 1 / tensor if self._config["use_seq_parallel"] else 1.0
        hidden = model.hidden_size
        mlp = (3 if model.gated_mlp else 2) * model.mlp_width * model.active_experts
        bytes_per_token = 10 * hidden * outside
        bytes_per_token += (4 * hidden + 4 * model.kv_size + 2 * mlp) / tensor
        if not model.flash_attention:
            bytes_per_token += 5 * model.num_heads * model.seq_length / tensor
        passes = self._layers + self._repeated / 3
        return self._tokens * self._element * bytes_per_token * passes

    def _group(self, volume: float, ranks: int, stride: int) -> tuple[float | None, float | None]:
        """Return seconds inside and between nodes of an exchange of `volume` bytes per rank.

        Args:
            volume: Bytes that each rank sends.
            ranks: Size of the group.
            stride: Distance of its neighbouring ranks.
        """
        if volume == 0.0:
            return 0.0, 0.0
        in_node = max(min(ranks, self._cluster.node_size // stride), 1)
        if in_node >= ranks:
            return _seconds(volume, self._cluster.intra_node_bandwidth), 0.0
        return 0.0, _seconds(volume / in_node, self._cluster.inter_node_bandwidth)

    def _between_stages(self) -> float | None:
        if self._stages == 1:
            return 0.0
        # One activation forward and one gradient back per micro-batch and chunk.
        volume = 2.0 * self._chunks * self._rounds * self._activation
        if self._config["use_seq_parallel"]:
            volume /= self._tensor
        ranks = self._tensor * self._context * self._replicas * self._stages
        is_near = ranks <= self._cluster.node_size
        cluster = self._cluster
        return _seconds(
            volume, cluster.intra_node_bandwidth if is_near else cluster.inter_node_bandwidth
        )

    def _experts(self) -> float | None:
        experts = layout.expert_parallel(self._config)
        # Experts lie inside data parallelism, whose ranks are a tensor and context parallel group
        # apart; MindFormers numbers those that share experts one after the other.
        stride = self._expert_tensor * self._context
        # Dispatch and combine, forward and backward: four all-to-alls per layer.
        routed = self._model.active_experts * self._activation / self._tensor
        sent = 4.0 * self._layers * self._rounds * routed / experts
        # Every rank sends over its own link, unlike in a ring.
        cluster = self._cluster
        in_node = max(min(experts, cluster.node_size // stride), 1)
        return _sum(
            (
                _seconds(sent * (in_node - 1), cluster.intra_node_bandwidth),
                _seconds(sent * (experts - in_node), cluster.inter_node_bandwidth),
            )
        )

    def _held(self) -> float:
        model = self._model
        all_experts = model.num_layers * model.expert_layer_parameters
        own_experts = all_experts / layout.expert_parallel(self._config)
        own_experts *= self._tensor / self._expert_tensor
        return (model.num_parameters - all_experts + own_experts) / (self._tensor * self._stages)

    def _gradients(self) -> tuple[float | None, float | None]:
        ranks = self._sharing
        share, held = (ranks - 1) / ranks, self._held()
        compression = str(self._config["gradient_compression"])
        method, _, ratio = compression.partition(":")
        volume = 2 * share * 4.0 * held
        factor = layout.compression_factor(compression)
        if method == "topk":
            # Every rank gathers the others' values and 32-bit indices.
            volume = (ranks - 1) * 8.0 * float(ratio) * held
        elif factor is not None:  # not so of low ranks, which save more the larger a matrix is
            volume /= factor
        if self._config["optimizer_sharding"] == "parameter":
            # Weights are gathered twice in every micro-batch, gradients scattered once.
            volume = share * held * (2 * self._element * self._micro_batches + 4.0)
        if self._config["comm_overlap"]:
            volume *= 1 - _OVERLAPPED
        return self._group(volume, ranks, self._tensor)

    def _update_traffic(self) -> float:
        held = self._held()
        is_sharded = self._config["optimizer_sharding"] != "none"
        method = str(self._config["gradient_compression"]).partition(":")[0]
        reducer = _COMPRESSION_TRAFFIC.get(method, 0.0)
        return held * (_OPTIMIZER_TRAFFIC / (self._sharing if is_sharded else 1) + reducer)


def _seconds(amount: float, speed: float | None) -> float | None:
    if amount == 0.0:
        return 0.0
    return None if speed is None else amount / speed


def _sum(parts: tuple[float | None, float | None]) -> float | None:
    near, far = parts
    return None if near is None or far is None else near + far
