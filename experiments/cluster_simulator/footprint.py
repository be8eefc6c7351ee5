"""Memory of a rank as an allocator sees it: tensor by tensor, with what lies idle between them.

Every saved tensor is rounded up to the allocator's blocks; what is held at once comes from the
played order of forward and backward passes; the largest temporary stands on top. Then some of
the pool lies idle: how much depends on the layout, by luck that nobody can compute and that is
drawn once per layout; more where recomputation, several chunks or pipelines mix lifetimes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindtune.experiments.cluster_simulator.machine import Machine, fixed_luck
from mindtune.experiments.cluster_simulator.pipeline import in_flight
from mindtune.experiments.cluster_simulator.plan import Plan
from mindtune.search.knobs import Config

__all__ = ["Footprint", "footprint"]

_MOMENTS = (("adam", 8.0), ("lamb", 8.0), ("momentum", 4.0), ("adagrad", 4.0), ("sgd", 0.0))
_GRADIENT = 4.0
_MESSAGE_PARAMETERS = 40e6
"""Parameters whose gradients are collected before they are exchanged."""


@dataclass(frozen=True)
class Footprint:
    """Peak of the worst rank without a run's own luck, in bytes."""

    tensors: float
    idle: float
    """Fragments of the pool."""
    buffers: float
    """Of communication groups."""

    @property
    def total(self) -> float:
        """What the device must have room for, beside its fixed part."""
        return self.tensors + self.idle + self.buffers


def footprint(plan: Plan, config: Config, optimizer: str, machine: Machine) -> Footprint:
    """Return the memory of the stage that needs most."""
    stages = range(plan.stages)
    tensors = max(_Stage(plan, config, optimizer, machine, stage).peak() for stage in stages)
    share = machine.fragmentation * _luck(plan, machine) * _mixture(plan)
    groups = sum(
        degree > 1
        for degree in (plan.data, plan.tensor, plan.stages, plan.context, plan.experts)
    )  # fmt: skip
    return Footprint(tensors, share * tensors, groups * machine.buffer_bytes)


def _luck(plan: Plan, machine: Machine) -> float:
    """Return an exponentially distributed number that is always the same for a layout."""
    words = [machine.seed, plan.samples, plan.tensor, plan.stages, plan.context, plan.experts,
             plan.chunks, plan.layers, plan.repeated, plan.is_split, plan.data > 1]  # fmt: skip
    return fixed_luck(*words).expovariate(1.0)


def _mixture(plan: Plan) -> float:
    layers = sum(map(sum, plan.layers))
    whole = sum(one for one, _ in plan.repeated) / layers
    # Full recomputation leaves tensors of one size, none of it of one order.
    mixed = 4.0 * whole * (1.0 - whole)
    return 0.6 + 0.6 * mixed + 0.4 * (plan.chunks > 1) + 0.2 * (plan.stages > 1)


class _Stage:
    def __init__(
        self, plan: Plan, config: Config, optimizer: str, machine: Machine, stage: int
    ) -> None:
        self._plan, self._config, self._machine, self._stage = plan, config, machine, stage
        self._optimizer = optimizer
        self._dense, self._experts = plan.parameters(stage)
        self._is_last = stage == plan.stages - 1

    def peak(self) -> float:
        """Return the bytes of all tensors at the worst moment."""
        return self._states() + self._activations() + self._temporary()

    def _states(self) -> float:
        plan, config = self._plan, self._config
        held = self._dense + self._experts
        own = self._dense / plan.replicas
        own += self._experts / max(plan.replicas // plan.experts, 1)
        is_half = plan.element == 2
        name = self._optimizer.lower()
        moments = next((size for part, size in _MOMENTS if part in name), 8.0)
        states = moments + (4.0 if is_half else 0.0)
        level = ("none", "optimizer", "gradient", "parameter").index(plan.sharding)
        total = plan.element * (own if level >= 3 else held)
        total += _GRADIENT * (own if level >= 2 else held)
        if not config["optimizer_offload"]:
            total += states * (own if level >= 1 else held)
        if str(config["gradient_compression"]).startswith("topk"):
            total += _GRADIENT * held
        if plan.replicas > 1:
            messages = 2.0 if config["comm_overlap"] else 1.0
            total += messages * _GRADIENT * min(_MESSAGE_PARAMETERS, held)
        return self._rounded(total)

    def _activations(self) -> float:
        plan = self._plan
        kept, core, inputs = self._layer()
        whole, cores = plan.repeated[self._stage]
        count = sum(chunk[self._stage] for chunk in plan.layers)
        held = in_flight(plan.stages, plan.chunks, plan.micro_batches, self._stage)
        total = 0.0
        for chunk, flying in enumerate(held):
            layers = plan.layers[chunk][self._stage]
            share = layers / count if count else 0.0
            stored = (layers - whole * share) * kept
            stored += max(layers - (whole + cores) * share, 0.0) * core
            total += flying * (stored + whole * share * inputs)
        if whole:
            total += kept + core
        elif cores:
            total += core
        return total

    def _layer(self) -> tuple[float, float, float]:
        """Return bytes that a layer saves: without its scores, the scores, and its input alone."""
        plan, model, rounded = self._plan, self._plan.model, self._rounded
        tensor, element, tokens = plan.tensor, plan.element, plan.tokens
        outside = tokens / (tensor if plan.is_split else 1)
        hidden, kv = model.hidden_size, model.kv_size / tensor
        width = tokens * model.active_experts * model.mlp_width / tensor
        sizes = [outside * hidden] * 4  # two norms' inputs, and their outputs
        sizes += [tokens * hidden / tensor, tokens * kv, tokens * kv, tokens * hidden / tensor]
        sizes += [width] * (4 if model.gated_mlp else 2)
        if model.num_experts:
            # The fullest expert's tokens, sorted; and the router's scores.
            load = 1.0 + self._machine.imbalance / 2
            sizes = [*sizes[:8], *(load * size for size in sizes[8:])]
            sizes += [load * tokens * model.active_experts * hidden / tensor] * 2
            sizes += [2.0 * outside * model.num_experts]
        kept = sum(rounded(element * size) for size in sizes)
        # Softmax statistics of the norms and of fused attention, in float32.
        kept += rounded(4.0 * tokens * (2.0 + model.num_heads / tensor))
        core = 0.0
        if not model.flash_attention:
            scores = tokens * model.seq_length * model.num_heads / tensor
            core = rounded(element * scores) + rounded(element * scores) + rounded(scores)
        return kept, core, rounded(element * outside * hidden)

    def _temporary(self) -> float:
        plan, model = self._plan, self._plan.model
        widest = max(model.mlp_width * model.active_experts / plan.tensor, model.hidden_size)
        largest = 3.0 * plan.element * plan.tokens * widest
        if self._is_last:
            logits = plan.tokens * model.vocab_size / plan.tensor
            # Half precision, its float32 copy, and the gradient of that.
            largest = max(largest, (plan.element + 8.0) * logits)
        if plan.sharding == "parameter":
            experts = model.expert_layer_parameters / plan.experts
            layer = (model.dense_layer_parameters + experts) / plan.tensor
            largest += 2.0 * plan.element * layer + _GRADIENT * layer
        return self._rounded(largest)

    def _rounded(self, size: float) -> float:
        block = self._machine.block_bytes
        return math.ceil(size / block) * block
