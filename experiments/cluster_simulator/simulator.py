"""What a config really costs on a cluster: step time, memory, steadiness.

Nothing here is taken from the cost model of `mindtune.search`: kernels, exchanges, schedule and
allocator are described on their own, so that the cost model is wrong where a real one would be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import nlargest

from mindtune.experiments.cluster_simulator.exchange import Update, update_of
from mindtune.experiments.cluster_simulator.footprint import footprint
from mindtune.experiments.cluster_simulator.kernels import HALF, WHOLE, Kernels
from mindtune.experiments.cluster_simulator.layer import Layer, Pass, ends
from mindtune.experiments.cluster_simulator.machine import Machine, fixed_luck
from mindtune.experiments.cluster_simulator.network import Network
from mindtune.experiments.cluster_simulator.pipeline import Played, play
from mindtune.experiments.cluster_simulator.plan import LAYOUT_KNOBS, Plan, read_plan
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config, KnobValue

__all__ = ["Simulator", "Truth"]

_SLOW_KINDS = 2
"""Kinds of slow replicas that are played."""
_SPARE = 0.8
"""Share of the memory above which an allocator returns and asks again."""
_HALF_OVERFLOWS = 0.004
"""Share of steps that float16 loses to overflows."""
_SPARSE_SPIKES = 0.002
"""Share of steps whose loss spikes under top-k compression, over the ratio that is kept."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A config without noise and mishaps."""

    step_time_s: float
    memory_bytes: float
    """Tensors, fragments and buffers of the worst rank."""
    usable_bytes: float
    """What a device has for them; a run with bad luck may need some more than `memory_bytes`."""
    jitter: float
    """Standard deviation of the logarithm of a step's time."""
    bad_share: float
    """Steps that are skipped or whose loss spikes."""
    loss_drag: float
    """By how much compressed gradients keep the loss up."""
    start_s: float
    """From the start of the program to its first step."""

    @property
    def fits(self) -> bool:
        """Whether it runs."""
        return self.memory_bytes <= self.usable_bytes


@dataclass(frozen=True)
class _Rounds:
    """What the knobs of `LAYOUT_KNOBS` decide."""

    plan: Plan
    network: Network
    played: Played
    far_s: float
    """Exchanges between nodes on the slowest stage, of all micro-batches."""


@dataclass(frozen=True)
class Simulator:
    """One machine that trains one model."""

    machine: Machine
    facts: StudyFacts
    """Model and batch; the cluster is `machine.stated()` with the study's limits."""
    _rounds: dict[tuple[KnobValue | None, ...], _Rounds | None] = field(
        default_factory=dict, repr=False
    )
    _truths: dict[tuple[KnobValue | None, ...], Truth | None] = field(
        default_factory=dict, repr=False
    )
    _kernels: dict[int, Kernels] = field(default_factory=dict, repr=False)
    _lucks: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False)

    def truth(self, config: Config) -> Truth | None:
        """Return what a complete config comes to; None: it cannot be laid out at all."""
        key = tuple(map(config.get, _KNOBS))
        if key not in self._truths:
            self._truths[key] = self._truth(config)
        return self._truths[key]

    def _truth(self, config: Config) -> Truth | None:
        key = tuple(map(config.get, LAYOUT_KNOBS))
        if key not in self._rounds:
            self._rounds[key] = self._play(config)
        rounds = self._rounds[key]
        if rounds is None:
            return None
        plan, machine = rounds.plan, self.machine
        finish, last = rounds.played.finish_s, rounds.played.last_backward_s
        kernels = self._format(WHOLE)
        updates = [
            update_of(plan, config, stage, last[stage], kernels, rounds.network)
            for stage in range(plan.stages)
        ]
        memory = footprint(plan, config, self.facts.training.optimizer, machine)
        usable = machine.memory_bytes - machine.fixed_bytes
        slow = 1.0 + machine.pressure * max(0.0, memory.total / usable - _SPARE) / (1.0 - _SPARE)
        busy_s = slow * max(map(_end, finish, updates)) + machine.step_s
        read_s = self._reading(plan, config)
        step_s = max(busy_s, read_s)
        far = (rounds.far_s + max(update.far_s for update in updates)) / step_s
        return Truth(
            step_time_s=step_s,
            memory_bytes=memory.total,
            usable_bytes=usable,
            jitter=self._jitter(config, far, read_s / step_s),
            bad_share=_bad_share(config),
            loss_drag=_loss_drag(config),
            start_s=20.0 + machine.compile_s * sum(max(row) for row in plan.layers),
        )

    def _play(self, config: Config) -> _Rounds | None:
        plan = read_plan(config, self.facts)
        if plan is None or plan.ranks > self.machine.num_devices:
            return None
        machine = self.machine
        nodes = -(-plan.ranks // machine.node_size)
        kernels, network = self._format(plan.element), Network(machine, nodes, self._lucks)
        layer = Layer.of(plan, kernels, network)
        forward, backward, far = _passes(plan, layer, kernels, network)
        outside = plan.tokens / (plan.tensor if plan.is_split else 1)
        message = plan.element * outside * plan.model.hidden_size
        message_s = 0.0
        if plan.stages > 1:
            distance = plan.tensor * plan.context * plan.data
            message_s = network.pass_s(message, distance) + _stall(plan, machine)
        played = [
            play(_slowed(forward, slow), _slowed(backward, slow), message_s, plan.micro_batches)
            for slow in _slow_stages(plan, machine)
        ]
        # Replicas meet in the exchange of gradients: the last one decides.
        finish = tuple(map(max, *(one.finish_s for one in played))) if len(played) > 1 else None
        first = Played(finish or played[0].finish_s, played[0].last_backward_s)
        return _Rounds(plan, network, first, far * plan.micro_batches)

    def _format(self, element: int) -> Kernels:
        if not self._kernels:
            self._kernels.update({size: Kernels(self.machine, size) for size in (HALF, WHOLE)})
        return self._kernels[element]

    def _reading(self, plan: Plan, config: Config) -> float:
        """Return the time that the data pipeline of a rank needs for a step."""
        machine, workers = self.machine, int(config["data_workers"])
        tokens = plan.micro_batches * plan.samples * plan.model.seq_length
        devices = min(machine.node_size, plan.ranks)
        crowd = max(1.0, devices * workers / machine.host_cores)
        return tokens / 1000 * machine.load_s * crowd / workers

    def _jitter(self, config: Config, far: float, reading: float) -> float:
        machine = self.machine
        waiting = 1.0 + 4.0 * min(far, 1.0)
        # A pipeline of data near its limit is late now and then, less so with batches ahead.
        late = 0.3 * reading**4 / int(config["prefetch"])
        return machine.step_noise * waiting + late


_KNOBS = (
    *LAYOUT_KNOBS, "optimizer_offload", "gradient_compression", "comm_overlap", "comm_fusion",
    "data_workers", "prefetch",
)  # fmt: skip


def _end(finish_s: float, update: Update) -> float:
    return finish_s + update.drag_s + update.total_s


def _bad_share(config: Config) -> float:
    share: float = _HALF_OVERFLOWS if config.get("precision") == "float16" else 0.0
    method, _, ratio = str(config["gradient_compression"]).partition(":")
    if method == "topk":
        share += min(_SPARSE_SPIKES / float(ratio), 0.2)
    elif method in ("int8", "powersgd"):
        share += 0.01
    return share


def _loss_drag(config: Config) -> float:
    method, _, ratio = str(config["gradient_compression"]).partition(":")
    # What top-k leaves out comes later, with its residual.
    return -0.03 * math.log10(float(ratio)) if method == "topk" else 0.0


def _passes(
    plan: Plan, layer: Layer, kernels: Kernels, network: Network
) -> tuple[list[list[float]], list[list[float]], float]:
    """Return seconds of every chunk and stage, both ways, and what is far of the slowest."""
    first = ends(plan, kernels, network, is_last=False)
    last = ends(plan, kernels, network, is_last=True)
    counts = [sum(chunk[stage] for chunk in plan.layers) for stage in range(plan.stages)]
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    far = [0.0] * plan.stages
    for chunk, layers in enumerate(plan.layers):
        rows: tuple[list[float], list[float]] = ([], [])
        for stage, count in enumerate(layers):
            share = count / counts[stage] if counts[stage] else 0.0
            whole, cores = plan.repeated[stage]
            ahead: Pass = layer.forward * count
            back = layer.backward * count + layer.forward * (whole * share)
            back += layer.attention * (cores * share)
            is_first = stage == 0 and chunk == 0
            is_last = stage == plan.stages - 1 and chunk == plan.chunks - 1
            for applies, (own, own_back) in ((is_first, first), (is_last, last)):
                if applies:
                    ahead, back = ahead + own, back + own_back
            rows[0].append(_seconds(ahead, kernels))
            rows[1].append(_seconds(back, kernels))
            far[stage] += ahead.far_s + back.far_s
        forward.append(rows[0])
        backward.append(rows[1])
    return forward, backward, max(far)


def _seconds(work: Pass, kernels: Kernels) -> float:
    return work.seconds(kernels.machine) if work.kernels else 0.0


def _stall(plan: Plan, machine: Machine) -> float:
    """Return what a message between stages waits for those of other replicas."""
    if plan.data == 1:
        return 0.0
    draw = fixed_luck(machine.seed, plan.stages, plan.data, plan.tensor, plan.sharding)
    return machine.stall_s * (draw.random() < machine.stall_share)


def _slow_stages(plan: Plan, machine: Machine) -> list[dict[int, float]]:
    """Return, for each kind of replica, the stages that have slow devices, and how slow."""
    inner = plan.tensor * plan.context
    replicas: dict[int, dict[int, float]] = {}
    for node, factor in machine.slow_nodes:
        start = node * machine.node_size
        for rank in range(start, min(start + machine.node_size, plan.ranks)):
            stage, replica = rank // (inner * plan.data), rank // inner % plan.data
            own = replicas.setdefault(replica, {})
            own[stage] = max(own.get(stage, 1.0), factor)
    kinds = {tuple(sorted(one.items())): one for one in replicas.values()}
    # The slowest device sets the pace of its pipeline; kinds that are quicker end earlier.
    return nlargest(_SLOW_KINDS, kinds.values(), key=lambda one: max(one.values())) or [{}]


def _slowed(times: list[list[float]], slow: dict[int, float]) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(seconds * slow.get(stage, 1.0) for stage, seconds in enumerate(row)) for row in times
    )
