"""The model that fits on a napkin, to compare with: its constants are nobody's."""

from __future__ import annotations

from mindtune.experiments.model_accuracy.mapping import Row
from mindtune.search import layout

__all__ = ["naive_memory", "naive_time"]


def naive_memory(row: Row) -> float:
    """Return 16 bytes per parameter over the model's shards, and 34 s b h per layer."""
    config, model = row.config, row.model
    shards = layout.model_parallel(config) * layout.pipeline_stage(config)
    spread = layout.data_parallel(config)
    bytes_each = {
        "none": 16.0, "optimizer": 4.0 + 12.0 / spread, "gradient": 2.0 + 14.0 / spread,
        "parameter": 16.0 / spread,
    }[str(config["optimizer_sharding"])]  # fmt: skip
    tokens = layout.micro_batch_size(config) * model.seq_length / layout.context_parallel(config)
    per_layer = 2.0 if config["recompute"] == "full" else 34.0
    activations = per_layer * tokens * model.hidden_size * model.num_layers
    return model.num_parameters * bytes_each / shards + activations / layout.model_parallel(config)


def naive_time(row: Row) -> float | None:
    """Return FLOPs at half the peak, the pipeline's bubble, and bytes over links; None: no peak.

    Tensor parallelism exchanges four activations per layer, data parallelism float32 gradients.
    """
    config, model, cluster = row.config, row.model, row.facts.cluster
    near, far = cluster.intra_node_bandwidth, cluster.inter_node_bandwidth
    if cluster.peak_flops is None or near is None:
        return None
    tokens = row.facts.training.global_batch_size * model.seq_length
    flops = model.step_flops(tokens) * (4 / 3 if config["recompute"] == "full" else 1.0)
    tensor, stages = layout.model_parallel(config), layout.pipeline_stage(config)
    ranks = cluster.num_devices
    gradients = 8.0 * model.num_parameters / (tensor * stages)
    if layout.data_parallel(config) == 1:
        gradients = 0.0
    exchanged = 16.0 * model.num_layers * model.hidden_size * tokens * tensor / ranks
    if tensor == 1:
        exchanged = 0.0
    within = near if tensor <= cluster.node_size else far or near
    across = near if ranks <= cluster.node_size else far or near
    seconds = flops / (0.5 * cluster.peak_flops * ranks) + exchanged / within
    return seconds / (1.0 - layout.pipeline_bubble(config, row.facts)) + gradients / across
