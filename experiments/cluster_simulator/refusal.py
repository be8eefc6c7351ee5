"""What the program of a simulated cluster cannot do, by its own arithmetic.

A program has its own idea of what it starts. Were the search's rules asked instead, each of their
mistakes would be right by definition. What has no effect (exchanges that overlap with nothing) is
no reason to refuse: it runs and does nothing.
"""

from __future__ import annotations

from mindtune.experiments.cluster_simulator.plan import Plan, read_plan
from mindtune.search.facts import StudyFacts
from mindtune.search.knobs import Config

__all__ = ["refusal"]


def refusal(config: Config, facts: StudyFacts) -> str | None:
    """Return why the program does not start a complete config; None: it does."""
    plan = read_plan(config, facts)
    if plan is None:
        return "batch or layers do not divide"
    if plan.ranks != facts.cluster.num_devices:
        return f"{plan.ranks} ranks on {facts.cluster.num_devices} devices"
    return _shares(plan) or _schedule(plan) or _reducer(plan, config)


def _shares(plan: Plan) -> str | None:
    """Return what cannot be cut into equal shares."""
    model, tensor = plan.model, plan.tensor
    widths = (model.num_heads, model.kv_heads, model.hidden_size, model.mlp_width)
    if any(width % tensor for width in widths):
        return f"heads or widths {widths} over {tensor} ranks"
    part, rest = divmod(model.seq_length, plan.context)
    if rest or (plan.is_split and (tensor == 1 or part % tensor)):
        return f"a sequence of {model.seq_length} over {plan.context} x {tensor} ranks"
    held = model.num_experts or 1
    if held % plan.experts or plan.data % plan.experts:
        return f"{held} experts over {plan.experts} of {plan.data} replicas"
    return None


def _schedule(plan: Plan) -> str | None:
    """Return why the stages cannot be kept busy in the order that the program knows."""
    if plan.micro_batches < plan.stages:
        return f"{plan.micro_batches} micro-batches for {plan.stages} stages"
    if plan.chunks > 1 and (plan.stages == 1 or plan.micro_batches % plan.stages):
        return (
            f"{plan.chunks} chunks with {plan.micro_batches} micro-batches, {plan.stages} stages"
        )
    return None


def _reducer(plan: Plan, config: Config) -> str | None:
    """Return why gradients cannot be compressed: only whole ones of plain replicas can."""
    if config["gradient_compression"] == "none":
        return None
    if plan.data > 1 and plan.sharding == "none" and plan.ranks == plan.data * plan.tensor:
        return None if plan.experts == 1 else "compressed gradients of experts"
    return "compressed gradients of others than plain replicas"
