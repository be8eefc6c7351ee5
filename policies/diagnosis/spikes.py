"""Why the loss leaps: single spikes, and a loss that goes up for good.

What moves first tells most: a rate that jumped, a batch that changed, a norm that rose before the
loss, an overflow in the same steps. What returns after a fixed number of steps has a cause that
counts steps.
"""

from __future__ import annotations

from itertools import pairwise

from mindtune.policies.detectors.rate_jump import RATE_JUMP
from mindtune.policies.diagnosis.case import Case
from mindtune.policies.diagnosis.cause import Cause
from mindtune.policies.diagnosis.learning import spelled_vocabulary
from mindtune.policies.diagnosis.model import DECISIVE, STRONG, WEAK, Clues, Symptom
from mindtune.policies.findings import FindingKind

__all__ = ["DIVERGENCE", "SPIKES"]

_JUMP = 1.5
"""Rate over that of the step before from which it counts as a jump; schedules move by less."""
_SLOW = ("drift", "creep", "ascent")
"""Patterns of a divergence that no single step shows."""
_SUDDEN = ("jump", "leap", RATE_JUMP)
_AFTER_RESUME = 100
_HIGH_RATE = 0.5
"""Rates beyond it are for SGD on small nets, if at all."""
_STAYS = 1.15
"""Loss over the usual one at which it has not come back; losses of batches differ by less."""
_OVERFLOWS = (
    FindingKind.OVERFLOW_STORM,
    FindingKind.OVERFLOW_WITHOUT_EFFECT,
    FindingKind.LOSS_SCALE_FLOOR,
)


def _rate_jump(case: Case, clues: Clues) -> None:
    jumped = next((f for f in case.incidents if f.evidence.get("pattern") == RATE_JUMP), None)
    if jumped is not None:
        clues.speaks(jumped.message, DECISIVE)
        return
    rates = [
        (o.step, o.learning_rate)
        for o in (*case.before[-8:], *case.onset[:2])
        if o.learning_rate is not None and o.learning_rate > 0
    ]
    if len(rates) < 2:
        if not case.history.measured("learning_rate"):
            clues.lacks("learning_rate: a jump just before would explain it")
        return
    for (before, earlier), (step, later) in pairwise(rates):
        # A linear warm-up multiplies its rate as the steps are multiplied.
        if later >= _JUMP * earlier * max(1.0, step / max(1, before)):
            clues.speaks(f"the rate went from {earlier:.4g} to {later:.4g} in step {step}", STRONG)
            return
    clues.denies(f"the rate did not jump: it was {rates[-1][1]:.4g} in step {rates[-1][0]}")


def _rate_too_high(case: Case, clues: Clues) -> None:
    rate = case.course("learning_rate")
    cold = case.found(FindingKind.DIVERGENCE)
    if cold is not None and cold.number("cold_start"):
        clues.speaks(f"it happens in the first steps of the run, in step {cold.step}", STRONG)
    if rate is None:
        clues.lacks("learning_rate: near the top of its schedule it would be suspect")
    elif rate.high > rate.low:
        now = case.usual("learning_rate") or case.peak("learning_rate")
        if now is not None and now >= 0.8 * rate.high:
            clues.speaks(f"the rate {now:.4g} is near the highest of the run, {rate.high:.4g}")
        elif now is not None and now <= 0.3 * rate.high and rate.high_step < case.first:
            clues.denies(f"the rate {now:.4g} is far below the highest so far, {rate.high:.4g}")
        elif now is not None and rate.high_step >= case.first and now < rate.high:
            clues.speaks(f"the rate {now:.4g} still rises, as a warm-up does")
    elif rate.high > _HIGH_RATE:
        clues.speaks(f"the rate is {rate.high:g} throughout, too high for most models", STRONG)
    if any(f.evidence.get("pattern") in _SLOW for f in case.incidents):
        clues.speaks("the loss rises steadily and without a leap: no batch does that")
    stays = case.stays("loss")
    if stays is not None and stays >= _STAYS and case.found(FindingKind.DIVERGENCE) is not None:
        clues.speaks(f"the loss stays at {stays:.2g} times what it was, as after too large a step")
        last = case.onset[-1].loss
        guess = None if last is None else spelled_vocabulary(last, case.context.vocab_size)
        if guess is not None:
            clues.speaks(f"in step {case.onset[-1].step} it stands at {guess}")
    spikes = [f for f in case.others if f.kind in (FindingKind.LOSS_SPIKE, FindingKind.DIVERGENCE)]
    if len(spikes) >= 4:
        clues.speaks(f"it is one of {len(spikes)} spikes and climbs of the loss in this segment")


def _gradient_first(case: Case, clues: Clues) -> None:
    if not case.history.measured("grad_norm"):
        clues.lacks("grad_norm: one that rises before the loss tells instability from bad data")
        return
    burst = case.found(FindingKind.GRAD_NORM_SPIKE)
    leap = case.found(FindingKind.LOSS_SPIKE, FindingKind.DIVERGENCE)
    if burst is not None and burst.number("burst") and (leap is None or burst.step < leap.step):
        clues.speaks(burst.message, STRONG)
    norm_step, loss_step = case.rises_from("grad_norm", 3.0), case.rises_from("loss", 1.2)
    usual, peak = case.usual("grad_norm"), case.peak("grad_norm")
    moved = case.earlier(FindingKind.GRAD_NORM_SPIKE, FindingKind.LEVEL_SHIFT, within=256)
    if moved is not None and moved.evidence.get("signal") != "loss":
        clues.speaks(f"before it, in step {moved.step}: {moved.message}", STRONG)
    if norm_step is None or usual is None or peak is None:
        slow = any(f.evidence.get("pattern") in _SLOW for f in case.incidents)
        if case.before and moved is None and burst is None and not slow:
            clues.denies("the gradient norm did not rise before the loss did", STRONG)
        return
    text = f"the gradient norm rose from {usual:.4g} to {peak:.4g}, from step {norm_step} on"
    if loss_step is None or norm_step < loss_step:
        later = "the loss had not risen" if loss_step is None else f"the loss in step {loss_step}"
        clues.speaks(f"{text}; {later}", STRONG)
    else:
        clues.speaks(text)


def _bad_batch(case: Case, clues: Clues) -> None:
    interval = case.history.interval
    records = (case.last - case.first) // interval + 1
    slow = [f for f in case.incidents if f.evidence.get("pattern") not in (None, *_SUDDEN)]
    if slow:
        clues.denies(f"it is a {slow[0].evidence['pattern']} over many batches", STRONG)
    if case.found(FindingKind.PERIODIC_SPIKES) is not None:
        clues.denies("it comes again and again after the same number of steps", STRONG)
    stays = case.stays("loss")
    if stays is not None and stays >= _STAYS:
        clues.denies(f"the loss does not come back: it stays at {stays:.2g} times the usual",
                     STRONG)  # fmt: skip
    elif records > 16:
        clues.denies(f"it lasts for {case.last - case.first} steps, longer than a batch", STRONG)
    elif case.symptom is Symptom.DIVERGENCE and stays is None:
        pass  # whether it has passed is not known
    elif records <= 4 and interval == 1:
        steps = f"step {case.first}" if records == 1 else f"steps {case.first} to {case.last}"
        clues.speaks(f"only the batches of {steps} are concerned")
        if stays is not None:
            clues.speaks(f"the loss comes back, to {stays:.2g} times the usual")
    norm_step, loss_step = case.rises_from("grad_norm", 3.0), case.rises_from("loss", 1.2)
    if norm_step is not None and norm_step == loss_step:
        clues.speaks(f"loss and gradient norm leap in the same step {loss_step}")
    elif norm_step is not None and loss_step is not None and norm_step < loss_step:
        clues.denies(f"the gradient norm had risen before, in step {norm_step}")
    if clues.evidence_for:
        clues.lacks("the sample ids of these steps: does the same batch do it again elsewhere?")


def _precision(case: Case, clues: Clues) -> None:
    found = case.near(*_OVERFLOWS) or case.near(FindingKind.OVERFLOW, reach=3)
    scale_before, scales = case.usual("loss_scale"), [o.loss_scale for o in case.onset]
    falls = [s for s in scales if s is not None and scale_before and s <= 0.5 * scale_before]
    if found is not None:
        weight = STRONG if found.kind is not FindingKind.OVERFLOW else WEAK
        if found.kind is FindingKind.OVERFLOW_WITHOUT_EFFECT:
            weight = DECISIVE
        clues.speaks(f"step {found.step}: {found.message}", weight)
    if falls and scale_before is not None:
        clues.speaks(f"the loss scale falls from {scale_before:g} to {min(falls):g}")
    if not clues.evidence_for:
        if case.history.measured("overflow") or case.history.measured("loss_scale"):
            clues.denies("no overflow is told in these steps", STRONG)
        else:
            clues.lacks("overflow and loss_scale: an overflow in the same step points there")


def _parallel_split(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.PERIODIC_SPIKES)
    if found is None:
        return
    micro = found.number("num_microbatches")
    period = found.number("period")
    if found.number("multiple_of_microbatches"):
        clues.speaks(
            f"the period, {period:g} steps, is a multiple of the {micro:g} micro-batches of a "
            "step",
            STRONG,
        )
    elif micro > 1:
        clues.denies(f"the period {period:g} is no multiple of the {micro:g} micro-batches")
    else:
        clues.lacks("num_microbatches: a period that is a multiple of it points there")


def _counts_steps(case: Case, clues: Clues) -> None:
    found = case.found(FindingKind.PERIODIC_SPIKES)
    if found is None:
        return
    period = found.number("period")
    clues.speaks(f"{found.number('count'):g} spikes came every {period:g} steps", STRONG)
    for phase, count in case.history.phases.items():
        if phase != "compile" and count >= 3:
            clues.speaks(f"{count} steps held an interval of phase {phase}")


def _resume(case: Case, clues: Clues) -> None:
    earlier = case.history.resumed_from
    if earlier is None:
        return
    text = f"it begins {case.since_start} steps after a resume in step {case.history.first_step}"
    if case.since_start <= _AFTER_RESUME * case.history.interval:
        clues.speaks(text, STRONG)
        before, now = earlier.course("loss"), case.course("loss")
        if before is not None and now is not None and now.first > before.last + before.scatter:
            clues.speaks(f"the loss was {before.last:.4g} before it and {now.first:.4g} after")
    else:
        clues.denies(text)


def _other_batch(case: Case, clues: Clues) -> None:
    for name in ("global_batch_size", "micro_batch_size", "num_microbatches", "tokens"):
        before = case.usual(name)
        now = [getattr(o, name) for o in case.onset[:2]]
        if before and now and now[-1] and abs(now[-1] / before - 1) > 0.2:
            clues.speaks(f"{name} went from {before:g} to {now[-1]:g} in these steps", STRONG)


def _other_data(case: Case, clues: Clues) -> None:
    norm = case.course("grad_norm")
    if norm is not None and any(f.evidence.get("pattern") in _SLOW for f in case.incidents):
        early, late = norm.part(0.4, 0.6), norm.part(0.9, 1.0)
        if late < 1.3 * early:
            clues.speaks(
                f"the loss rises slowly while the gradient norm stays where it was ({early:.4g}, "
                f"then {late:.4g}), as data do that become harder"
            )
    shift = case.near(FindingKind.LEVEL_SHIFT)
    if shift is not None and shift.evidence.get("signal") == "loss":
        clues.speaks(f"the loss stays at its new level: {shift.message}", STRONG)
        ratio = case.ratio("grad_norm")
        if ratio is not None and ratio < 2:
            clues.speaks(f"the gradient norm has not risen ({ratio:.2g} times its usual value)")


_LOWER_RATE = "go back to a checkpoint from before it, with the learning rate divided by 2 to 10"
_JUMPED = Cause(
    "learning_rate_jump",
    "the learning rate jumped",
    (
        "compare the schedule with that before the jump: units, total steps, a second warm-up",
        _LOWER_RATE,
    ),
    _rate_jump,
)
_CHANGED_BATCH = Cause(
    "batch_changed",
    "the batch changed, and the learning rate did not follow",
    ("scale the learning rate with the root of the batch (Adam), or change the batch in steps",),
    _other_batch,
)
_RESUMED = Cause(
    "resume_lost_state",
    "the resume lost a part of the state: optimizer moments, scale, schedule or data position",
    (
        "check that the checkpoint holds the optimizer's moments, and that they are loaded",
        "compare learning rate and loss scale on both sides of the resume",
    ),
    _resume,
)
_PRECISION = Cause(
    "precision",
    "float16 ran out of range",
    ("train in bfloat16", "keep normalisation, softmax and loss in float32"),
    _precision,
)
_TOO_HIGH = Cause(
    "learning_rate_too_high",
    "the learning rate is too high for this stage of the training",
    (_LOWER_RATE, "lengthen the warm-up, or clip the gradient norm near its usual value"),
    _rate_too_high,
)
_UNSTABLE = Cause(
    "unstable_gradients",
    "the training itself is unstable: the gradients grow first, the loss follows",
    (
        "clip the gradient norm at about twice its usual value",
        (
            "lower the rate, or Adam's beta2 and epsilon; see in model_signals.jsonl which "
            "layer's gradient grew first"
        ),
    ),
    _gradient_first,
)
_BATCH = Cause(
    "bad_batch",
    "the batches of these steps are bad",
    (
        "print the samples of these steps, and pass over them when the run resumes",
        "let updates of outlying norm be skipped (policy skip_update)",
    ),
    _bad_batch,
)
_DATA = Cause(
    "other_data",
    "the data are others from here on: another source, language or length (a curriculum)",
    ("check that it was meant; compare the validation loss on both sides",),
    _other_data,
)

SPIKES = (
    _JUMPED,
    _CHANGED_BATCH,
    _RESUMED,
    Cause(
        "parallel_split",
        "one place of the parallel split is wrong: a micro-batch, a pipeline stage or a rank",
        (
            "run the same steps with one micro-batch, then without pipeline parallelism",
            "compare the losses of the micro-batches within one step",
        ),
        _parallel_split,
    ),
    Cause(
        "counts_steps",
        "something that counts steps disturbs the run: a shard of data, an evaluation, a save",
        (
            "look for what has this period: steps per epoch, per file, per evaluation, per save",
            "switch evaluation and saving off for two periods",
        ),
        _counts_steps,
    ),
    _BATCH,
    _PRECISION,
    _UNSTABLE,
    _TOO_HIGH,
    _DATA,
)
"""Causes of spikes, in the order in which to look."""

DIVERGENCE = (
    _JUMPED, _CHANGED_BATCH, _RESUMED, _TOO_HIGH, _UNSTABLE, _PRECISION, _BATCH, _DATA,
)  # fmt: skip
"""Causes of a loss that goes up for good."""
