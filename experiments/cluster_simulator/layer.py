"""How long one transformer layer takes for one micro-batch, kernel by kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindtune.experiments.cluster_simulator.kernels import Kernels
from mindtune.experiments.cluster_simulator.machine import Machine
from mindtune.experiments.cluster_simulator.network import Group, Network
from mindtune.experiments.cluster_simulator.plan import Plan

__all__ = ["Layer", "Pass", "ends"]

_FUSED_BACKWARD = 2.5
"""Fused attention computes its scores again in the backward pass: five products instead of two."""


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    far_s: float = 0.0
    """Part of the exchanges that spans nodes."""
    kernels: float = 0.0
    """Launches by the host."""

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.compute_s + other.compute_s,
            self.exchange_s + other.exchange_s,
            self.far_s + other.far_s,
            self.kernels + other.kernels,
        )

    def __mul__(self, times: float) -> Pass:
        return Pass(
            self.compute_s * times,
            self.exchange_s * times,
            self.far_s * times,
            self.kernels * times,
        )

    def seconds(self, machine: Machine) -> float:
        """Return how long it takes: the host launches while the device works."""
        device_s, host_s = self.compute_s + self.exchange_s, self.kernels * machine.launch_s
        # A device that never waits grows hot and lowers its clock.
        busy = self.compute_s / max(device_s, host_s)
        device_s += machine.throttle * busy**2 * self.compute_s
        return max(device_s, host_s) + 0.1 * min(device_s, host_s)


@dataclass(frozen=True)
class Layer:
    """The passes of one layer."""

    forward: Pass
    backward: Pass
    attention: Pass
    """Forward pass of the attention's core alone."""

    @classmethod
    def of(cls, plan: Plan, kernels: Kernels, network: Network) -> Layer:
        """Return the layer of a plan on a machine."""
        work = _Work(plan, kernels, network)
        forward, backward = work.products()
        core, core_back = work.attention()
        forward, backward = forward + core, backward + core_back
        forward += work.traffic(1.0) + work.tensor_exchange(is_backward=False)
        backward += work.traffic(2.0) + work.tensor_exchange(is_backward=True)
        if plan.model.num_experts:
            forward, backward = forward + work.shuffles(), backward + work.shuffles()
        forward, backward = work.sharded(forward, backward)
        return cls(forward, backward, core)


def ends(plan: Plan, kernels: Kernels, network: Network, *, is_last: bool) -> tuple[Pass, Pass]:
    """Return forward and backward pass of the embedding, or of output layer and loss."""
    model, tokens = plan.model, plan.tokens
    group, hidden = Group(plan.tensor), model.hidden_size
    reduced = network.reduce_s(float(plan.element * tokens * hidden), group)
    if not is_last:
        moved = 2.0 * plan.element * tokens * hidden
        return (
            Pass(kernels.traffic_s(moved), reduced, 0.0, 3),
            Pass(kernels.traffic_s(3 * moved), 0.0, 0.0, 3),
        )
    width = math.ceil(model.vocab_size / plan.tensor)
    # Softmax and loss in float32.
    logits = kernels.traffic_s(16.0 * tokens * width, 4)
    forward = kernels.product_s(tokens, width, hidden)
    backward = kernels.product_s(tokens, hidden, width) + kernels.product_s(hidden, width, tokens)
    return (
        Pass(forward + logits, network.reduce_s(8.0 * tokens, group), 0.0, 8),
        Pass(backward + logits, reduced, 0.0, 8),
    )


class _Work:
    """Parts of one layer."""

    def __init__(self, plan: Plan, kernels: Kernels, network: Network) -> None:
        self._plan, self._kernels, self._network = plan, kernels, network
        self._model, self._tokens, self._tensor = plan.model, plan.tokens, plan.tensor
        self._outside = self._tokens / (plan.tensor if plan.is_split else 1)

    def products(self) -> tuple[Pass, Pass]:
        """Return the matrix products: forward; input's and weight's gradients."""
        model, tokens, tensor = self._model, self._tokens, self._tensor
        hidden, width = model.hidden_size, self._share(model.mlp_width)
        first = 2 * width if model.gated_mlp else width
        keys = max(model.kv_size // tensor, hidden // model.num_heads)
        shapes = [
            (tokens, hidden // tensor + 2 * keys, hidden, 1),
            (tokens, hidden, hidden // tensor, 1),
        ]
        if model.num_experts:
            local = max(model.num_experts // self._plan.experts, 1)
            # The fullest rank decides; several experts on it even out.
            load = 1.0 + self._kernels.machine.imbalance / math.sqrt(local)
            rows = math.ceil(load * tokens * model.active_experts / local)
            shapes += [
                (math.ceil(self._outside), model.num_experts, hidden, 1),
                (rows, first, hidden, local),
                (rows, hidden, width, local),
            ]
        else:
            shapes += [(tokens, first, hidden, 1), (tokens, hidden, width, 1)]
        product = self._kernels.product_s
        forward = sum(product(*shape) for shape in shapes)
        backward = sum(
            product(rows, depth, columns, batch) + product(depth, columns, rows, batch)
            for rows, columns, depth, batch in shapes
        )
        return Pass(forward, kernels=len(shapes)), Pass(backward, kernels=2 * len(shapes))

    def attention(self) -> tuple[Pass, Pass]:
        """Return scores and values, and the ring that context parallelism passes keys along."""
        plan, model, kernels = self._plan, self._model, self._kernels
        part = model.seq_length // plan.context
        heads = plan.samples * max(model.num_heads // plan.tensor, 1)
        width = model.hidden_size // model.num_heads
        if model.flash_attention:
            step_s = kernels.fused_attention_s(part, part, width, heads)
            back = _FUSED_BACKWARD
        else:
            step_s, back = kernels.stored_attention_s(part, part, width, heads), 2.0
        forward_s = plan.context * step_s
        kv = max(model.kv_size / plan.tensor, width)
        exposed, exposed_back = 0.0, 0.0
        if plan.context > 1:
            message = 2.0 * plan.element * plan.samples * part * kv
            hidden = kernels.machine.overlap_share
            stride = plan.tensor
            passed = self._network.pass_s(message, stride)
            exposed = (plan.context - 1) * max(passed - hidden * step_s, 0.05 * passed)
            passed = self._network.pass_s(2 * message, stride)
            exposed_back = (plan.context - 1) * max(passed - hidden * back * step_s, 0.05 * passed)
        is_far = self._network.is_far(Group(plan.context, plan.tensor))
        count = plan.context * (1 if model.flash_attention else 5)
        return (
            Pass(forward_s, exposed, exposed * is_far, count),
            Pass(back * forward_s, exposed_back, exposed_back * is_far, 2 * count),
        )

    def traffic(self, times: float) -> Pass:
        """Return norms, residuals, rotations and activation functions."""
        model, hidden = self._model, self._model.hidden_size
        moved = 10.0 * self._outside * hidden
        moved += 4.0 * self._tokens * (hidden + model.kv_size) / self._tensor
        width = self._share(model.mlp_width) * model.active_experts
        moved += (3.0 if model.gated_mlp else 2.0) * self._tokens * width
        count = 9
        if model.num_experts:
            # Tokens are sorted by expert and back.
            moved += 6.0 * self._tokens * model.active_experts * hidden
            count += 12
        moved *= times * self._plan.element
        launched = round(times * count)
        return Pass(self._kernels.traffic_s(moved, launched), kernels=launched)

    def tensor_exchange(self, *, is_backward: bool) -> Pass:
        """Return the two exchanges of tensor parallelism."""
        plan, group = self._plan, Group(self._tensor)
        if plan.tensor == 1:
            return Pass()
        moved = float(plan.element * self._tokens * self._model.hidden_size)
        seconds = 2.0 * self._network.reduce_s(moved, group)
        if plan.is_split and is_backward:
            # The split inputs are gathered once more for the weights' gradients.
            seconds += 2.0 * self._network.gather_s(moved, group) * 0.5
        far = seconds if self._network.is_far(group) else 0.0
        return Pass(0.0, seconds, far, 4 if plan.is_split else 2)

    def shuffles(self) -> Pass:
        """Return the two all-to-alls around the experts."""
        plan = self._plan
        group = Group(plan.experts, plan.tensor * plan.context)
        routed = self._tokens * self._model.active_experts / plan.tensor
        sent = plan.element * routed * self._model.hidden_size
        # The fullest expert receives more than the others.
        load = 1.0 + self._kernels.machine.imbalance * (1.0 - 1.0 / plan.experts)
        seconds = 2.0 * load * self._network.shuffle_s(sent, group)
        return Pass(0.0, seconds, seconds if self._network.is_far(group) else 0.0, 6)

    def sharded(self, forward: Pass, backward: Pass) -> tuple[Pass, Pass]:
        """Return the passes with what sharding exchanges in every micro-batch."""
        plan = self._plan
        if plan.sharding not in ("gradient", "parameter") or plan.replicas == 1:
            return forward, backward
        model, group = self._model, Group(plan.replicas, plan.tensor)
        rare = Group(max(plan.replicas // plan.experts, 1), plan.tensor * plan.experts)
        dense = model.dense_layer_parameters / plan.tensor
        experts = model.expert_layer_parameters / plan.experts / plan.tensor
        gather, network = 0.0, self._network
        if plan.sharding == "parameter":
            gather = network.gather_s(plan.element * dense, group)
            gather += network.gather_s(plan.element * experts, rare)
        scatter = network.gather_s(4.0 * dense, group) + network.gather_s(4.0 * experts, rare)
        is_far = network.is_far(group)
        return (
            forward + self._hidden(gather, forward.compute_s, is_far=is_far),
            backward + self._hidden(gather + scatter, backward.compute_s, is_far=is_far),
        )

    def _hidden(self, exchange_s: float, compute_s: float, *, is_far: bool) -> Pass:
        """Return what an exchange adds that runs while the device computes."""
        machine = self._kernels.machine
        behind = min(machine.overlap_share * compute_s, 0.95 * exchange_s)
        exposed = exchange_s - behind
        return Pass(
            machine.overlap_drag * behind,
            exposed,
            exposed if is_far else 0.0,
            2 * bool(exchange_s),
        )

    def _share(self, size: int) -> int:
        return max(size // self._tensor, 1)
