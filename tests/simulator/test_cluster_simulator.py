"""The simulated clusters obey physics, differ from the cost model, and repeat exactly."""

import ast
import math
import random
import statistics
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindtune.experiments.cluster_simulator.kernels import HALF, Kernels
from mindtune.experiments.cluster_simulator.machine import draw_machine
from mindtune.experiments.cluster_simulator.network import Group, Network
from mindtune.experiments.cluster_simulator.pipeline import in_flight, play, play_all
from mindtune.experiments.cluster_simulator.problems import KINDS, problem
from mindtune.experiments.cluster_simulator.refusal import refusal
from mindtune.experiments.cluster_simulator.simulator import Simulator
from mindtune.search.constraints import first_failure
from mindtune.search.cost_model import CostModel
from mindtune.search.facts import Limits, StudyFacts, Training
from mindtune.search.rules import RULES
from mindtune.search.space import Space

FOLDER = Path(__file__).parents[2] / "experiments" / "cluster_simulator"
CALM = {
    "shape_luck": 0.0, "group_luck": 0.0, "stall_share": 0.0, "pressure": 0.0, "throttle": 0.0,
    "fragmentation": 0.0, "slow_nodes": (), "slow_link": 1.0, "memory_bytes": 2.0**50,
}  # fmt: skip
"""What is left without luck: a machine on which every comparison has one right answer."""
SEEDS = st.integers(0, 10_000)


def calm(seed, devices=64, **changes):
    return replace(draw_machine(seed, devices), **CALM, **changes)


def truth(machine, batch=256, kind="dense_64_2000", **knobs):
    facts = StudyFacts(
        cluster=machine.stated(),
        training=Training(global_batch_size=batch, precision="bfloat16"),
        model=KINDS[kind].model,
    )
    space = Space.from_spec({"data_parallel": "auto"}, facts)
    found = Simulator(machine, facts).truth(space.complete(knobs))
    assert found is not None
    return found


def test_truth_is_not_taken_from_the_cost_model():
    allowed = {"facts", "knobs", "layout", "model_shape"}
    outside = {"problem", "problems", "survey", "trial", "study", "__main__"}
    modules = {path.stem: path for path in FOLDER.glob("*.py") if path.stem not in outside}
    assert {"simulator", "kernels", "network", "pipeline", "footprint"} <= set(modules)
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                assert not (isinstance(node, ast.Import) and "mindtune" in ast.unparse(node)), name
            elif node.module == "mindtune.search":
                assert {one.name for one in node.names} <= allowed, name
            elif node.module.startswith("mindtune."):
                is_own = node.module.startswith("mindtune.experiments.cluster_simulator.")
                assert is_own or node.module.removeprefix("mindtune.search.") in allowed, name
                assert not is_own or node.module.split(".")[-1] in modules, name


@given(SEEDS, st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)))
@settings(max_examples=25, deadline=None)
def test_recomputation_takes_time_and_gives_memory(seed, tensor, micro_batch):
    machine = calm(seed)
    base = {"data_parallel": 64 // tensor, "model_parallel": tensor,
            "micro_batch_size": micro_batch}  # fmt: skip
    none, half, full = (
        truth(machine, recompute=one, **base) for one in ("none", "interval:2", "full")
    )
    assert none.step_time_s <= half.step_time_s <= full.step_time_s
    assert none.memory_bytes > half.memory_bytes > full.memory_bytes


@given(SEEDS, st.sampled_from(("none", "full")), st.sampled_from((1, 4)))
@settings(max_examples=25, deadline=None)
def test_memory_rises_with_the_micro_batch_but_for_fragments(seed, recompute, stages):
    machine = calm(seed)
    broken = replace(machine, fragmentation=draw_machine(seed, 64).fragmentation)
    base = {"data_parallel": 64 // stages, "pipeline_stage": stages, "recompute": recompute}
    sizes = [truth(machine, micro_batch_size=one, **base).memory_bytes for one in (1, 2, 4)]
    if stages == 1:
        # Fewer micro-batches in flight can outweigh larger ones where pipelines are not full.
        assert sizes == sorted(sizes)
    for size, one in zip(sizes, (1, 2, 4), strict=True):
        assert size <= truth(broken, micro_batch_size=one, **base).memory_bytes


@given(SEEDS, st.sampled_from((1, 2, 4)))
@settings(max_examples=20, deadline=None)
def test_more_replicas_with_their_own_samples_cost_their_exchange_alone(seed, micro_batch):
    alone = calm(seed, load_s=0.0)
    base = {"micro_batch_size": micro_batch, "recompute": "full"}
    one = truth(alone, batch=8, data_parallel=1, **base).step_time_s
    many = truth(alone, batch=512, data_parallel=64, **base).step_time_s
    endless = replace(alone, near_bandwidth=1e30, far_bandwidth=1e30, near_latency_s=0.0,
                      far_latency_s=0.0)  # fmt: skip
    assert one <= many
    assert truth(endless, batch=512, data_parallel=64, **base).step_time_s == pytest.approx(one)


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_slow_node_slows_whoever_uses_it(seed):
    machine = calm(seed, load_s=0.0)
    slow = replace(machine, slow_nodes=((3, 1.5),))
    base = {"data_parallel": 16, "pipeline_stage": 4, "recompute": "full"}
    assert truth(slow, **base).step_time_s > truth(machine, **base).step_time_s
    idle = {"data_parallel": 8, "recompute": "full"}
    assert truth(slow, **idle).step_time_s == truth(machine, **idle).step_time_s


def test_stages_alike_have_the_bubble_of_the_textbook():
    forward, backward = ((1.0,) * 4,), ((2.0,) * 4,)
    assert max(play(forward, backward, 0.0, 8).finish_s) == 3.0 * (8 + 3)
    halves = ((0.5,) * 4,) * 2, ((1.0,) * 4,) * 2
    assert max(play(*halves, 0.0, 8).finish_s) == 3.0 * (8 + 3 / 2)
    bubbles = []
    for stages in (1, 2, 4, 8):
        own = ((1.0 / stages,) * stages,), ((2.0 / stages,) * stages,)
        bubbles.append(1 - 8 * 3.0 / stages / max(play(*own, 0.0, 8).finish_s))
    assert bubbles == sorted(bubbles)
    assert bubbles[0] == 0.0


def test_the_first_rounds_of_a_pipeline_tell_the_rest():
    draw, errors = random.Random(0), []
    for _ in range(100):
        stages, chunks, more = draw.randint(2, 6), draw.randint(1, 3), draw.randint(0, 20)
        forward, backward = (
            tuple(tuple(draw.uniform(0.5, 1.5) for _ in range(stages)) for _ in range(chunks))
            for _ in range(2)
        )
        count = stages * (more + 1) if chunks > 1 else stages + 4 * more
        message = draw.uniform(0.0, 0.3)
        played = max(play_all(forward, backward, message, count))
        errors.append(abs(max(play(forward, backward, message, count).finish_s) / played - 1.0))
        busiest = max(
            sum(forward[c][s] + backward[c][s] for c in range(chunks)) for s in range(stages)
        )
        assert played >= count * busiest * (1 - 1e-9)
    assert max(errors) < 0.03
    assert sum(error < 1e-9 for error in errors) > 80


def test_a_stage_holds_the_micro_batches_of_its_schedule():
    assert [sum(in_flight(4, 1, 8, stage)) for stage in range(4)] == [4, 3, 2, 1]
    assert [sum(in_flight(4, 1, 2, stage)) for stage in range(4)] == [2, 2, 2, 1]
    # 2 (p - i - 1) + (v - 1) p + 1 chunks.
    assert [sum(in_flight(4, 2, 8, stage)) for stage in range(4)] == [11, 9, 7, 5]


@given(SEEDS, *[st.integers(1, 9000)] * 3)
@settings(max_examples=60, deadline=None)
def test_no_product_beats_the_peak(seed, rows, columns, depth):
    machine = draw_machine(seed, 8)
    seconds = Kernels(machine, HALF).product_s(rows, columns, depth)
    assert seconds > 2.0 * rows * columns * depth / machine.peak_flops
    assert seconds > HALF * (rows * depth + depth * columns) / machine.memory_bandwidth


def test_a_width_that_passes_a_tile_falls_off_a_cliff():
    machine = replace(calm(1), tile=(128, 128), cores=64, memory_bandwidth=1e15)
    product = Kernels(machine, HALF).product_s
    full = product(64 * 128, 128, 8192)
    assert product(64 * 128, 127, 8192) == pytest.approx(full, rel=0.01)
    assert product(64 * 128, 129, 8192) > 1.8 * full


@given(SEEDS, st.floats(1e3, 1e9), st.sampled_from((2, 4, 8, 16, 64)))
@settings(max_examples=60, deadline=None)
def test_exchanges_take_longer_the_more_and_the_farther(seed, moved, ranks):
    machine = calm(seed)
    network = Network(machine, machine.num_nodes)
    group, far = Group(ranks), Group(ranks, 8)
    assert network.gather_s(moved, group) < network.gather_s(2 * moved, group)
    assert network.reduce_s(moved, group) == 2.0 * network.gather_s(moved, group)
    assert network.shuffle_s(moved, group) < network.shuffle_s(2 * moved, group)
    assert network.gather_s(moved, Group(1)) == 0.0
    crowded = Network(replace(machine, oversubscription=4.0, pod_nodes=1), machine.num_nodes)
    free = Network(replace(machine, oversubscription=1.0), machine.num_nodes)
    if network.is_far(far):
        assert crowded.gather_s(moved, far) > free.gather_s(moved, far)


def test_compression_helps_where_links_are_slow_and_costs_where_they_are_fast():
    slow = calm(3, far_bandwidth=1e9, load_s=0.0)
    fast = calm(3, far_bandwidth=1e12, near_bandwidth=1e12, load_s=0.0)
    base = {"data_parallel": 64, "kind": "dense_8_200", "batch": 64}
    plain, half, sparse = (
        [truth(one, gradient_compression=name, **base) for one in (slow, fast)]
        for name in ("none", "float16", "topk:0.001")
    )
    assert sparse[0].step_time_s < half[0].step_time_s < plain[0].step_time_s
    assert sparse[1].step_time_s > plain[1].step_time_s
    assert sparse[0].bad_share > plain[0].bad_share == 0.0
    assert sparse[0].memory_bytes > plain[0].memory_bytes


def test_equal_seeds_give_equal_clusters_trials_and_values():
    first, second = problem("dense_8_200", 5), problem("dense_8_200", 5)
    configs = [entry.config for entry in first.report.configs]
    forth = [first.run(config, seed=1) for config in configs]
    back = [second.run(config, seed=1) for config in reversed(configs)]
    assert forth == back[::-1]
    assert forth != [first.run(config, seed=2) for config in configs]
    assert first.machine != problem("dense_8_200", 6).machine
    hidden = {one.name for one in fields(first.machine)} - {"seed", "num_devices", "node_size"}
    assert all(
        len({getattr(draw_machine(seed, 64), name) for seed in range(40)}) > 1 for name in hidden
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_trials_scatter_as_the_machine_says(seed):
    known = problem("dense_64_2000", seed)
    machine = known.machine
    config = known.report.configs[0].config
    runs = [known.run(config, seed=number) for number in range(1500)]
    fine = [run for run in runs if run.outcome == "ok"]
    crashes = machine.crash_share * (64 / 1000) ** 0.25
    assert 1 - len(fine) / len(runs) == pytest.approx(crashes, abs=0.012)
    assert statistics.median(run.value for run in fine) == pytest.approx(
        known.true_value(config), rel=0.04
    )
    quartiles = statistics.quantiles([math.log(run.step_time_s) for run in fine], n=4)
    spread = (quartiles[2] - quartiles[0]) / 1.349
    assert machine.run_noise * 0.85 < spread < machine.run_noise * 1.3 + 0.02
    # Neighbours on the network: a tail that a normal distribution has not.
    middle = statistics.median(run.step_time_s for run in fine)
    slow = [run for run in fine if run.step_time_s > middle * (1.05 + 3 * machine.run_noise)]
    assert 0.003 < len(slow) / len(fine) < 0.05


def test_luck_decides_between_memory_that_just_fits_and_that_does_not():
    known = problem("dense_64_2000", 0)
    config = known.report.configs[0].config
    needed = known.truth(config).memory_bytes
    tight = replace(known.machine, memory_bytes=needed + known.machine.fixed_bytes)
    outcomes = {
        replace(known, machine=tight).run(config, seed=number).outcome for number in range(30)
    }
    assert {"ok", "oom"} <= outcomes
    small = replace(known.machine, memory_bytes=0.9 * needed + known.machine.fixed_bytes)
    assert replace(known, machine=small).true_value(config) is None
    assert replace(known, machine=small).run(config, seed=0).outcome == "oom"


def test_problems_have_the_sizes_of_their_names():
    for kind, what in KINDS.items():
        known = problem(kind, 0)
        _, devices, configs = kind.split("_")
        assert known.machine.num_devices == what.devices == int(devices)
        assert 0.9 < known.space.total / int(configs) < 1.3


LARGE = "00000"
SMALL = [kind for kind in KINDS if not kind.endswith(LARGE)]


@pytest.mark.parametrize("kind", SMALL)
def test_the_programs_own_arithmetic_refuses_what_the_rules_reject(kind):
    known = problem(kind, 0)
    draw = random.Random(kind)
    structure = [rule for rule in RULES if not rule.name.startswith("memory")]
    listed = list(known.space.configs())
    for config in draw.sample(listed, min(len(listed), 700)):
        complete = known.space.complete(config)
        failed = {rule.name for rule in structure if rule.check(complete, known.report.cost)}
        # What has no effect is rejected, but runs.
        refused = bool(failed - {"sharding_needs_data_parallel", "exchange_needs_data_parallel"})
        assert known.can_start(config) is not refused, (config, failed)
        assert known.can_start(config) or known.run(config, seed=0).outcome == "bad_config"


def test_the_program_refuses_for_reasons_of_its_own():
    known = problem("dense_1024_100000", 0)
    fine = {"data_parallel": 64, "model_parallel": 4, "pipeline_stage": 4,
            "pp_interleave_num": 1, "micro_batch_size": 1, "recompute": "none",
            "optimizer_sharding": "none", "use_seq_parallel": True, "comm_overlap": True}  # fmt: skip
    facts = known.space.facts
    assert refusal(known.space.complete(fine), facts) is None
    for change, reason in (
        ({"data_parallel": 32}, "512 ranks on 1024 devices"),
        ({"data_parallel": 128, "model_parallel": 1, "pipeline_stage": 8}, "a sequence of 8192"),
        ({"data_parallel": 16, "model_parallel": 3}, "192 ranks"),
        ({"pipeline_stage": 16, "data_parallel": 16, "pp_interleave_num": 2}, "batch or layers"),
        ({"pipeline_stage": 16, "data_parallel": 16, "micro_batch_size": 16}, "8 micro-batches"),
        ({"pp_interleave_num": 2, "pipeline_stage": 1, "data_parallel": 256}, "2 chunks"),
        ({"expert_parallel": 2}, "1 experts over 2"),
        ({"gradient_compression": "topk:0.1"}, "compressed gradients"),
    ):
        found = refusal(known.space.complete({**fine, **change}), facts)
        assert found is not None
        assert found.startswith(reason)


@pytest.mark.parametrize("kind", SMALL)
def test_small_problems_can_be_solved_and_are_not_given_away(kind):
    known = problem(kind, 1)
    values = [known.true_value(entry.config) for entry in known.report.configs]
    found = [value for value in values if value is not None]
    assert len(found) > 0.9 * len(values)
    assert 0.02 < max(found) < 0.8
    assert max(found) > 1.2 * statistics.median(found)


def test_the_largest_cluster_is_played_within_milliseconds_a_config():
    known = problem("dense_16384_100000", 0)
    values = [known.true_value(entry.config) for entry in known.report.configs[:40]]
    assert max(value for value in values if value is not None) > 0.1
    assert known.machine.num_devices == 16384


@pytest.mark.parametrize("kind", ["dense_64_2000", "experts_64_2000"])
@pytest.mark.parametrize("fused", [False, True])
def test_whatever_the_rules_let_pass_can_be_played(kind, fused):
    draw = random.Random(kind)
    machine = draw_machine(draw.randrange(10_000), 16)
    model = replace(KINDS[kind].model, num_layers=10, flash_attention=fused)
    facts = StudyFacts(
        cluster=replace(machine.stated(), device_memory=None, allow_idle=True),
        training=Training(global_batch_size=64, precision="bfloat16"),
        model=model,
        limits=Limits(framework="other"),
    )
    spec = {
        "data_parallel": "auto", "model_parallel": [1, 2, 4], "pipeline_stage": [1, 2, 4, 5],
        "pp_interleave_num": [1, 2], "offset": "auto", "context_parallel": [1, 2],
        "expert_parallel": [1, 2, 4], "use_seq_parallel": "auto", "micro_batch_size": [1, 2],
        "optimizer_sharding": ["none", "optimizer", "gradient", "parameter"],
        "precision": ["bfloat16", "float16", "float32"], "optimizer_offload": "auto",
        "recompute": ["none", "selective", "interval:3", "full", "layers:1/2"],
        "gradient_compression": ["none", "float16", "int8", "topk:0.1", "powersgd:4"],
        "comm_overlap": "auto", "comm_fusion": "auto", "data_workers": "auto", "prefetch": "auto",
    }  # fmt: skip
    space = Space.from_spec(spec, facts)
    simulator, cost, played = Simulator(machine, facts), CostModel(facts), 0
    floor = model.step_flops(64 * model.seq_length) / machine.peak_flops / machine.num_devices
    while played < 60:
        chosen = {name: draw.choice(values) for name, values in space.choices.items()}
        if first_failure(space.complete(chosen), cost) is not None:
            continue
        played += 1
        found = simulator.truth(space.complete(chosen))
        assert floor < found.step_time_s < math.inf
        assert 0.0 < found.memory_bytes < math.inf
        assert found.jitter > 0.0
        assert 0.0 <= found.bad_share < 0.5
