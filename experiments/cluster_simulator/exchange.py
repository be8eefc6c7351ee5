"""What comes after the last backward pass of a stage: gradients, and the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindtune.experiments.cluster_simulator.kernels import Kernels
from mindtune.experiments.cluster_simulator.network import Group, Network
from mindtune.experiments.cluster_simulator.plan import Plan
from mindtune.search.knobs import Config

__all__ = ["Update", "update_of"]

_TENSORS_PER_LAYER = 9
_GRADIENT = 4.0
"""Bytes of a gradient."""
_STATE_TRAFFIC = 30.0
"""Bytes that an Adam step moves per parameter."""
_HOST_ADAM = 60e9
"""Bytes per second that a node's processors move in an optimizer step."""


@dataclass(frozen=True)
class Update:
    """Seconds of a stage between its last backward pass and the next step."""

    total_s: float
    far_s: float
    drag_s: float
    """By which hidden exchanges make the backward pass longer."""


def update_of(
    plan: Plan, config: Config, stage: int, last_backward_s: float, kernels: Kernels,
    network: Network,
) -> Update:  # fmt: skip
    """Return the end of a step on one stage.

    Args:
        plan: How the model lies on the machine.
        config: Complete config; compression, overlap, fusion and offloading are read from it.
        stage: Pipeline stage.
        last_backward_s: Backward pass that exchanges can hide behind.
        kernels: Of the optimizer, which works in float32 whatever the format.
        network: Links.
    """
    end = _End(plan, config, stage, kernels, network)
    exchange_s, message_s, reducer_s = end.exchange()
    machine = kernels.machine
    behind, drag_s = 0.0, 0.0
    if config["comm_overlap"]:
        # The last message has nothing left to hide behind.
        behind = min(machine.overlap_share * last_backward_s, max(exchange_s - message_s, 0.0))
        drag_s = machine.overlap_drag * behind
    exposed = exchange_s - behind
    is_far = network.is_far(Group(plan.replicas, plan.tensor))
    total = exposed + reducer_s + end.optimizer_s()
    return Update(total, exposed if is_far else 0.0, drag_s)


class _End:
    def __init__(
        self, plan: Plan, config: Config, stage: int, kernels: Kernels, network: Network
    ) -> None:
        self._plan, self._config, self._kernels, self._network = plan, config, kernels, network
        self._dense, self._experts = plan.parameters(stage)
        layers = sum(chunk[stage] for chunk in plan.layers)
        self._tensors = max(_TENSORS_PER_LAYER * layers, 1)
        self._group = Group(plan.replicas, plan.tensor)
        self._rare = Group(max(plan.replicas // plan.experts, 1), plan.tensor * plan.experts)

    def exchange(self) -> tuple[float, float, float]:
        """Return seconds of all exchanges, of the last one, and of compressing."""
        plan, ranks = self._plan, self._plan.replicas
        if ranks == 1:
            return 0.0, 0.0, 0.0
        fused = int(self._config["comm_fusion"])
        messages = math.ceil(self._tensors / fused) if fused else self._tensors
        if plan.sharding != "none":
            # Weights come back in one go per message; gradients of the stronger kinds went
            # micro-batch by micro-batch.
            element = 0.0 if plan.sharding == "parameter" else float(plan.element)
            if plan.sharding == "optimizer":
                element += _GRADIENT
            total = self._gathered(element, messages)
            return total, total / messages, 0.0
        method, _, detail = str(self._config["gradient_compression"]).partition(":")
        held, memory = self._dense + self._experts, self._kernels.machine.memory_bandwidth
        if method == "topk":
            ratio = float(detail)
            # Everyone gets everyone's values and indices and adds them up, here and there.
            total = messages * self._network.gather_s(
                8.0 * ratio * held * ranks / messages, self._group
            )
            chosen = 16 * _GRADIENT * held + 12 * 8.0 * ratio * held * ranks
            return total, total / messages, chosen / memory
        if method == "powersgd":
            factors = 2.0 * int(detail) * _GRADIENT * math.sqrt(held * self._tensors)
            total = 2.0 * messages * self._network.gather_s(2 * factors / messages, self._group)
            return total, total / messages, (24.0 + 8.0 * int(detail)) * held / memory
        element, cost = {"float16": (2.0, 12.0), "int8": (1.0, 20.0)}.get(method, (_GRADIENT, 0.0))
        total = 2.0 * self._gathered(element, messages)
        return total, total / messages, cost * held / memory

    def optimizer_s(self) -> float:
        """Return the seconds of the optimizer, on the device or on the host."""
        plan, machine = self._plan, self._kernels.machine
        own = self._dense + self._experts
        if plan.sharding != "none":
            own = self._dense / plan.replicas + self._experts / self._rare.ranks
        if not self._config["optimizer_offload"]:
            return self._kernels.traffic_s(_STATE_TRAFFIC * own, self._tensors)
        moved = (_GRADIENT + plan.element) * own / machine.host_bandwidth
        devices = min(machine.node_size, plan.ranks)
        return moved + _STATE_TRAFFIC * own * devices / _HOST_ADAM

    def _gathered(self, element: float, messages: int) -> float:
        dense = self._network.gather_s(element * self._dense / messages, self._group)
        experts = self._network.gather_s(element * self._experts / messages, self._rare)
        return messages * (dense + experts)
