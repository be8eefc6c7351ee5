"""Why steps are slow or stand still.

First whether the device waits for data, then for other ranks or the network, then for itself
(compilation, heat), then whether a step has become another one.
"""

from __future__ import annotations

from mindtune.policies.diagnosis.case import Case
from mindtune.policies.diagnosis.cause import Cause
from mindtune.policies.diagnosis.model import DECISIVE, STRONG, Clues
from mindtune.policies.findings import FindingKind

__all__ = ["COMMUNICATION", "DATA_STARVED", "HANG", "SLOW_STEPS", "STRAGGLER"]

_STARVED = 0.2
"""Share of the step spent waiting for data from which the pipeline is a cause."""
_EXCHANGE = 0.2
"""Share of a step with nothing but exchange from which the network is one."""
_HOT_C = 85.0
"""A limit of ours, below the slowdown temperatures that drivers report (nvidia-smi -q)."""
_COOLER_POWER = 0.85
_BUSY = 0.9


def _data_share(case: Case) -> float | None:
    """Return the share of its time that the run waits for data; None: unknown."""
    wait, step = case.course("data_time_s"), case.course("step_time_s")
    if wait is None or step is None or step.median <= 0:
        return None
    return min(1.0, wait.median / step.median)


def _starved(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.DATA_STALL) or case.near(FindingKind.DATA_STALL)
    if found is not None:
        clues.speaks(f"step {found.step}: {found.message}", DECISIVE)
        return
    share = _data_share(case)
    if share is None:
        clues.lacks("data_time_s: the part of the step that waits for data; above 20 % it counts")
    elif share > _STARVED:
        clues.speaks(f"{share:.0%} of the usual step is spent waiting for data", STRONG)
    else:
        clues.denies(f"{share:.0%} of the usual step is spent waiting for data", STRONG)


def _straggler(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.STRAGGLER) or case.near(FindingKind.STRAGGLER)
    ratio = case.course("straggler_ratio")
    if found is not None:
        clues.speaks(f"step {found.step}: {found.message}", DECISIVE)
    elif ratio is not None:
        text = f"the slowest rank takes {ratio.median:.2f} times the median rank's time"
        if ratio.median >= 1.2:
            clues.speaks(text)
        else:
            clues.denies(text, STRONG)
    else:
        clues.lacks("step times of each rank (the logs of all ranks, or straggler_ratio)")


def _communication(case: Case, clues: Clues) -> None:
    busy, share = case.course("device_utilization"), _data_share(case)
    exchanged = case.context.communication_share
    if exchanged is not None:
        text = f"{exchanged:.0%} of the time of {case.context.profiled} went into exchange"
        overlap = case.context.communication_overlap
        if overlap is not None:
            text = f"{text}, {overlap:.0%} of it beside other work"
        open_share = exchanged * (1.0 - (overlap or 0.0))
        if open_share >= _EXCHANGE:
            clues.speaks(text, STRONG)
        else:
            clues.denies(text, STRONG)
        return
    if (
        busy is not None
        and busy.median >= _BUSY
        and case.found(FindingKind.LOW_UTILIZATION) is None
    ):
        mfu = case.course("mfu")
        if mfu is not None and mfu.median < 0.3:
            clues.speaks(
                f"the device is busy {busy.median:.0%} of the time, yet the MFU is "
                f"{mfu.median:.0%}: kernels of collectives count as busy"
            )
    if share is not None and share <= _STARVED and clues.evidence_for:
        clues.speaks(f"it is not the data ({share:.0%} of the step)")
    clues.lacks("the share of communication: open a profiler window of a few steps")


def _compiling(case: Case, clues: Clues) -> None:
    compiled = case.history.phases.get("compile", 0)
    during = [o.step for o in case.onset if o.phase == "compile"]
    if during:
        clues.speaks(f"steps {during[0]} to {during[-1]} held a compilation", STRONG)
    elif compiled > 3:
        clues.speaks(f"{compiled} steps of the segment held a compilation: shapes change", STRONG)
    elif compiled:
        clues.denies(f"only {compiled} steps held a compilation")
    elif case.since_start <= 2 * case.history.interval:
        clues.speaks("it is in the first records, where graphs are compiled")
    shapes = {o.tokens for o in (*case.before, *case.onset) if o.tokens}
    if len(shapes) > 4:
        clues.speaks(f"the steps hold {len(shapes)} different numbers of tokens")


def _throttled(case: Case, clues: Clues) -> None:
    heat, power = case.course("device_temperature_c"), case.course("device_power_w")
    if heat is None:
        clues.lacks("device_temperature_c and device_power_w: heat above 85 C with falling power")
        return
    if heat.high >= _HOT_C:
        clues.speaks(f"the device was at {heat.high:.0f} C in step {heat.high_step}", STRONG)
    else:
        clues.denies(f"the device is never above {heat.high:.0f} C", STRONG)
    before, now = case.usual("device_power_w"), [o.device_power_w for o in case.onset]
    least = min((watts for watts in now if watts is not None), default=None)
    if power is not None and before and least is not None and least < _COOLER_POWER * before:
        clues.speaks(f"its power fell from {before:.0f} W to {least:.0f} W")


def _saving(case: Case, clues: Clues) -> None:
    during = [o for o in case.onset if o.phase in ("eval", "save")]
    if during:
        clues.speaks(f"step {during[0].step} held an interval of phase {during[0].phase}", STRONG)
    if case.first == case.last and case.found(FindingKind.STEP_TIME_SPIKE) is not None:
        clues.speaks("it is one step alone")


def _more_work(case: Case, clues: Clues) -> None:
    for name in ("global_batch_size", "tokens", "num_microbatches"):
        ratio = case.ratio(name)
        if ratio is not None and ratio > 1.2:
            clues.speaks(f"{name} is {ratio:.2g} times what it was", STRONG)
            return
        if ratio is not None:
            clues.denies(f"{name} is as it was")
            return


def _machine(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.STEP_TIME_SPIKE)
    if found is None or not found.number("lasts"):
        return
    ratio = case.ratio("step_time_s")
    text = f"from step {found.step} on {found.message} The change is sudden and lasts"
    clues.speaks(text if ratio is None else f"{text}, at {ratio:.2g} times the usual time")
    if case.history.measured("device_utilization"):
        return
    clues.lacks("device_utilization, clocks and step times of each rank")


DATA_STARVED = Cause(
    "data_starved",
    "the input pipeline is too slow for the device",
    (
        "raise num_parallel_workers up to the number of cores, then the prefetch size",
        "move preprocessing out of Python, or cache and shard what is read",
        "do not raise the batch: it would wait all the longer",
    ),
    _starved,
)
STRAGGLER = Cause(
    "straggler",
    "one rank is slow, and all others wait for it",
    (
        (
            "read clock, heat and error counters of its device; compare a bare matrix product "
            "(mindtune doctor --measure)"
        ),
        "give its node back, and resume without it",
    ),
    _straggler,
)
COMMUNICATION = Cause(
    "communication",
    "the ranks wait for the network",
    (
        "measure the links (mindtune doctor --measure), and compare with their rated speed",
        (
            "overlap communication (comm_overlap), fuse small messages, move tensor "
            "parallelism into one node"
        ),
    ),
    _communication,
)

SLOW_STEPS = (
    DATA_STARVED,
    STRAGGLER,
    COMMUNICATION,
    Cause(
        "compiles_again",
        "graphs are compiled in between, since shapes change",
        ("pad to a few fixed lengths, or bucket by length", "keep the last short batch out"),
        _compiling,
    ),
    Cause(
        "throttled",
        "the device slows itself down, for heat or power",
        ("look at cooling and power limits of the node", "lower the room's or the case's heat"),
        _throttled,
    ),
    Cause(
        "saves_or_evaluates",
        "it saves, evaluates or collects garbage in between",
        ("save asynchronously and less often; leave such intervals out of the step time",),
        _saving,
    ),
    Cause(
        "more_work",
        "a step holds more work than before",
        ("compare tokens per second instead of step times",),
        _more_work,
    ),
    Cause(
        "machine_changed",
        "a machine has become slower: clock, memory errors, a neighbour's load",
        ("find the rank by elimination: run the nodes in halves", "read clocks and ECC counters"),
        _machine,
    ),
)
"""Causes of slow steps, in the order in which to look."""


def _rank_gone(case: Case, clues: Clues) -> None:
    memory = case.near(FindingKind.MEMORY_PRESSURE, reach=64)
    if memory is not None:
        clues.speaks(f"memory was short before: {memory.message}", STRONG)
    if case.near(FindingKind.NON_FINITE_LOSS, FindingKind.NON_FINITE_GRAD) is not None:
        clues.speaks("values were not finite before: a rank may have raised, the others wait")
    clues.lacks("the end of each rank's log: the one that ends first is the cause")


def _slow_link(case: Case, clues: Clues) -> None:
    slow = case.earlier(FindingKind.STEP_TIME_SPIKE, FindingKind.STRAGGLER, within=256)
    if slow is not None:
        clues.speaks(f"steps were slow before it: {slow.message}", STRONG)
    clues.lacks("the stacks of all ranks: all inside of a collective, and none failed")


def _loader(case: Case, clues: Clues) -> None:
    share = _data_share(case)
    stalled = case.earlier(FindingKind.DATA_STALL, within=256)
    if stalled is not None:
        clues.speaks(f"the data were slow before: {stalled.message}", STRONG)
    elif share is not None:
        clues.denies(f"{share:.0%} of a step waited for data before")
    clues.lacks("the stacks: a rank inside of the data iterator")


def _long_interval(case: Case, clues: Clues) -> None:
    phase = next((o.phase for o in case.onset if o.phase not in (None, "train")), None)
    if phase is not None:
        clues.speaks(f"the interval was one of phase {phase}", STRONG)


HANG = (
    Cause(
        "rank_gone",
        "one rank has failed, and the others wait in a collective for ever",
        (
            "read the last lines of every rank's log; look for a kill by the kernel (dmesg)",
            "set a timeout of the collectives, so that the others end too",
        ),
        _rank_gone,
    ),
    Cause(
        "slow_link",
        "a link is down or very slow",
        (
            (
                "measure the links (mindtune doctor --measure); look for retransmissions and "
                "flapping ports"
            ),
            "leave one node out after the other",
        ),
        _slow_link,
    ),
    Cause(
        "data_loader",
        "the data loader waits: a dead worker, a deadlock, or storage that does not answer",
        ("iterate over the data alone, without a model", "try with one worker"),
        _loader,
    ),
    Cause(
        "long_interval",
        "it is no hang: compilation, evaluation or saving takes that long",
        ("give such intervals longer limits (watchdog)",),
        _long_interval,
    ),
)
"""Causes of a hang, in the order in which to look."""
