"""How long an exchange between devices takes.

Three levels: inside a node, between nodes of a pod, between pods. Ranks are numbered so that
tensor parallel ones are neighbours, then context and data parallel ones, pipeline stages last; a
group is `ranks` devices, `stride` apart. A long exchange goes around a ring, a short one through
a tree, whichever is faster; messages below the ramp see a fraction of the rate, many nodes at
once get into each other's way, one bad link slows every group that spans nodes, and some groups
have no luck with what the library chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mindtune.experiments.cluster_simulator.machine import Machine, fixed_luck

__all__ = ["Group", "Network"]


@dataclass(frozen=True)
class Group:
    """Devices that exchange something."""

    ranks: int
    stride: int = 1
    """Distance of neighbouring ranks in the numbering of devices."""


@dataclass(frozen=True)
class Network:
    """Links of one machine."""

    machine: Machine
    busy_nodes: int
    """Nodes that send at the same time: those that the config uses."""
    _lucks: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False)
    """By group and size of message; networks of one machine share them."""

    def gather_s(self, received_bytes: float, group: Group) -> float:
        """Return the time until each rank has received that much in all, or has reduced it away.

        That is an all-gather or a reduce-scatter; an all-reduce is one of each.
        """
        ranks = group.ranks
        if ranks == 1 or received_bytes <= 0.0:
            return 0.0
        share = (ranks - 1) / ranks * received_bytes
        luck = self._luck(received_bytes, group)
        inside, nodes = self._spans(group)
        if nodes == 1:
            steps = min(ranks - 1, 2 * math.ceil(math.log2(ranks)))
            seconds = (
                share / self._near(received_bytes / ranks) + steps * self.machine.near_latency_s
            )
            return luck * seconds
        far = self._far(group, received_bytes / ranks)
        # A ring through all nodes enters each over one link per rank inside; two levels gather
        # between nodes first, each rank its own part, and then inside.
        ring = share / (inside * far) + (ranks - 1) * self.machine.far_latency_s / max(inside, 2)
        between = (nodes - 1) / nodes * received_bytes / inside / far
        within = (inside - 1) / inside * received_bytes / self._near(received_bytes / inside)
        hops = math.ceil(math.log2(nodes)) + 1
        levels = (
            between + within + 2 * hops * self.machine.far_latency_s + self.machine.near_latency_s
        )
        return luck * min(ring, levels)

    def reduce_s(self, reduced_bytes: float, group: Group) -> float:
        """Return the time of an all-reduce."""
        return 2.0 * self.gather_s(reduced_bytes, group)

    def shuffle_s(self, sent_bytes: float, group: Group) -> float:
        """Return the time of an all-to-all in which each rank sends that much in all."""
        ranks = group.ranks
        if ranks == 1:
            return 0.0
        inside, nodes = self._spans(group)
        message = sent_bytes / ranks
        near = sent_bytes * (inside - 1) / ranks / self._near(message)
        if nodes == 1:
            return near + math.sqrt(ranks) * self.machine.near_latency_s
        far = sent_bytes * (ranks - inside) / ranks / self._far(group, message)
        # Every pair meets on the links between nodes: collisions count twice.
        crowd = 1.0 + self.machine.collision * math.log2(nodes)
        return max(near, far * crowd) + math.sqrt(ranks) * self.machine.far_latency_s

    def pass_s(self, message_bytes: float, distance: int) -> float:
        """Return the time of one message between two devices that are `distance` apart."""
        if distance < self.machine.node_size:
            return message_bytes / self._near(message_bytes) + self.machine.near_latency_s
        pair = Group(2, distance)
        return message_bytes / self._far(pair, message_bytes) + self.machine.far_latency_s

    def is_far(self, group: Group) -> bool:
        """Return whether a group spans nodes."""
        return self._spans(group)[1] > 1

    def _spans(self, group: Group) -> tuple[int, int]:
        """Return the ranks of a group inside one node, and the nodes of the group."""
        inside = min(max(self.machine.node_size // group.stride, 1), group.ranks)
        return inside, math.ceil(group.ranks / inside)

    def _luck(self, moved_bytes: float, group: Group) -> float:
        """Return how well the library's choice of algorithm suits a group and its messages."""
        size = math.ceil(math.log2(max(moved_bytes, 1.0)) / 2)
        key = (group.ranks, group.stride, size)
        found = self._lucks.get(key)
        if found is None:
            draw = fixed_luck(self.machine.seed, key).gauss(0.0, 1.0)
            found = self._lucks[key] = math.exp(self.machine.group_luck * abs(draw))
        return found

    def _near(self, message_bytes: float) -> float:
        machine = self.machine
        ramp = message_bytes / (message_bytes + machine.ramp_bytes / 4)
        return machine.near_bandwidth * machine.near_share * ramp

    def _far(self, group: Group, message_bytes: float) -> float:
        machine = self.machine
        rate = machine.far_bandwidth * machine.far_share
        rate *= message_bytes / (message_bytes + machine.ramp_bytes)
        rate /= 1.0 + machine.collision * math.log2(max(self.busy_nodes, 2))
        if group.ranks * group.stride > machine.pod_nodes * machine.node_size:
            rate /= machine.oversubscription
        return rate * machine.slow_link
