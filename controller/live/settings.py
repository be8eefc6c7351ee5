"""What a callback or loop was told: by its argument, by the environment, by default.

The argument is a path of a best_config.yaml, a dict of its content or of the keys of
`LiveConfig`, or None. None means the file that MINDTUNE_CONFIG names, else defaults. MINDTUNE_MODE
wins over every file, MINDTUNE_RUN_DIR over `out_dir`, MINDTUNE_FAULTS over `faults`. In a trial
(MINDTUNE_TRIAL_DIR) policies observe, whatever is asked for, the trial's folder takes the records,
and faults are refused: they would be measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mindtune.controller.contract import (
    ENV_CONFIG,
    ENV_FAULTS,
    ENV_MODE,
    ENV_RUN_DIR,
    ENV_TRIAL_DIR,
    MINDFORMERS_KEY,
    AlertsSection,
    AnyFault,
    BestConfig,
    ContractModel,
    FaultPlan,
    GradNormPrior,
    Learned,
    ProfilerSection,
    WatchdogSection,
    parse,
    read_document,
    read_yaml,
)
from mindtune.controller.contract.study_file import PolicySection
from mindtune.controller.errors import ConfigError
from mindtune.controller.live.snapshots import MIN_KEPT, PROVED_AFTER
from mindtune.controller.units import Size

__all__ = ["DEFAULT_PARENT", "LiveConfig", "LiveSettings", "Mode", "RewindSection",
           "load_settings", "split_best_config"]  # fmt: skip

Mode = Literal["observe", "act"]

_LOSS_SCALE, _KNOWN_SCALE = "loss_scale", "known_scale"
DEFAULT_PARENT = Path("mindtune_runs")
"""Where a run without `out_dir` gets a folder named by the time of its start."""


class RewindSection(ContractModel):
    """Earlier states to return to. They are kept only where a policy may act on them."""

    enabled: bool = True
    every: int = Field(default=20, ge=PROVED_AFTER)
    """Healthy steps between two copies. One costs about as much as reading weights and moments
    once (`experiments/overhead`), and a return loses at most this many steps and the
    `PROVED_AFTER` after which a copy counts as healthy."""
    keep: int = Field(default=MIN_KEPT, ge=MIN_KEPT, le=16)
    """Copies held per rank, each of the size of weights and moments: 12 bytes per float32 weight
    with Adam."""
    storage: Literal["memory", "disk"] = "memory"
    """memory: of the host, gone with the process; disk: MindSpore checkpoints in the run's state
    folder, one per rank, found again by a resumed run."""
    max_memory: Size = 4 * 2**30
    """Most host memory per rank for all copies; where they need more, none is kept."""


class ModelSignalsSection(ContractModel):
    """Looks inside the model; see `model_signals`."""

    every: int = Field(default=0, ge=0, strict=True)
    """Optimizer steps from sample to sample; 0: off, and nothing is compiled for it."""


class LiveConfig(ContractModel):
    """Keys that a dict or file may hold where it is no whole best config."""

    mode: Mode = "observe"
    """observe: record what the policies would do; act: do it."""
    out_dir: str | None = None
    """The run's folder, relative to the working directory; an explicit null: no records."""
    policies: dict[str, PolicySection] = Field(default_factory=dict)
    learned: Learned = Learned()
    watchdog: WatchdogSection | None = None
    """Longest silences; null: the default limits."""
    rewind: RewindSection = RewindSection()
    alerts: AlertsSection | None = None
    """Who is told what; null: nobody."""
    model_signals: ModelSignalsSection = ModelSignalsSection()
    profiler: ProfilerSection = ProfilerSection()
    """When a few steps are profiled."""
    max_num_microbatches: int | None = Field(default=None, ge=1)
    """Most micro-batches per optimizer step that the batch policy may ask for."""
    faults: tuple[AnyFault, ...] = ()
    """Faults to plant on purpose; see `contract.fault_plan`."""


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """Everything that holds for the whole run."""

    mode: Mode = "observe"
    policies: Mapping[str, PolicySection] = field(default_factory=dict)
    learned: Learned = field(default_factory=Learned)
    watchdog: WatchdogSection = field(default_factory=WatchdogSection)
    rewind: RewindSection = field(default_factory=RewindSection)
    alerts: AlertsSection | None = None
    """Who is told what; None: nobody, as in a trial."""
    sample_every: int = 0
    """Optimizer steps from one sample of model signals to the next; 0: none, and in a trial, whose
    steps are timed."""
    profiler: ProfilerSection = field(default_factory=ProfilerSection)
    max_num_microbatches: int | None = None
    faults: tuple[AnyFault, ...] = ()
    out_dir: Path | None = None
    """The run's folder; None: see `keeps_records`."""
    keeps_records: bool = True
    """False: nothing is written. With True and no `out_dir` a new folder is made."""
    in_trial: bool = False
    observes_only: bool = False
    """Policies observe even where their own mode says act: in a trial, and where the environment
    says observe."""

    @property
    def wants_to_act(self) -> bool:
        """Whether the run or one of its policies was told to act."""
        return self.mode == "act" or any(
            section.mode == "act" for section in self.policies.values()
        )

    @property
    def policies_with_known_scale(self) -> Mapping[str, PolicySection]:
        """Settings of the policies, with the loss scale that the trials found to run clean.

        What the user has set himself stays.
        """
        known = self.learned.loss_scale_max
        own = self.policies.get(_LOSS_SCALE, PolicySection())
        if known is None or _KNOWN_SCALE in own.thresholds or not 1.0 <= known <= 2.0**60:
            return self.policies
        thresholds = {**own.thresholds, _KNOWN_SCALE: known}
        return {**self.policies, _LOSS_SCALE: own.model_copy(update={"thresholds": thresholds})}

    @property
    def prior(self) -> GradNormPrior | None:
        """Gradient-norm statistics of the trials."""
        return self.learned.grad_norm


def load_settings(
    config: str | Path | Mapping[str, Any] | None, environ: Mapping[str, str]
) -> LiveSettings:
    """Return the settings of a run.

    Args:
        config: see the module.
        environ: the environment.

    Raises:
        ConfigError: a file is missing or not valid, a key is unknown, a mode is none, or faults
            are to be planted in a trial.
    """
    if config is None:
        config = environ.get(ENV_CONFIG) or {}
    live, best = _read(config)
    shared = live if best is None else best
    told = _mode(environ.get(ENV_MODE))
    mode = told or live.mode
    out_dir = environ.get(ENV_RUN_DIR) or live.out_dir
    trial_dir = environ.get(ENV_TRIAL_DIR)
    if trial_dir:
        mode, out_dir = "observe", trial_dir
    faults = live.faults
    if plan := environ.get(ENV_FAULTS):
        faults = read_document(FaultPlan, Path(plan)).faults
    if faults and trial_dir:
        raise ConfigError(
            "faults must be empty in a trial, which measures what they would spoil, but got "
            f"{', '.join(fault.kind for fault in faults)}; plant them in a run."
        )
    switched_off = "out_dir" in live.model_fields_set and out_dir is None
    return LiveSettings(
        mode=mode,
        policies=shared.policies,
        learned=shared.learned,
        watchdog=shared.watchdog or WatchdogSection(),
        rewind=live.rewind,
        alerts=None if trial_dir else shared.alerts,
        sample_every=0 if trial_dir else live.model_signals.every,
        profiler=live.profiler,
        max_num_microbatches=live.max_num_microbatches,
        faults=faults,
        out_dir=Path(out_dir) if out_dir else None,
        keeps_records=not switched_off,
        in_trial=bool(trial_dir),
        observes_only=bool(trial_dir) or told == "observe",
    )


def split_best_config(content: object, *, source: str) -> tuple[BestConfig, LiveConfig]:
    """Return a best config, and the keys beside it that only a running training reads.

    Args:
        content: What was read.
        source: Its file, for messages.

    Raises:
        ConfigError: A key is unknown or a value not valid.
    """
    rest, live = content, {}
    if isinstance(content, dict):
        own = set(LiveConfig.model_fields) - set(BestConfig.model_fields)
        rest = {key: value for key, value in content.items() if key not in own}
        live = {key: value for key, value in content.items() if key in own}
    beside = [name for name in LiveConfig.model_fields if name not in BestConfig.model_fields]
    best = parse(BestConfig, rest, source=source, beside=beside)
    return best, parse(LiveConfig, live, source=source)


def _read(config: str | Path | Mapping[str, Any]) -> tuple[LiveConfig, BestConfig | None]:
    """Split a config into the live keys and the best config, if it is one."""
    if isinstance(config, Mapping):
        content: Any = dict(config)
        source = "the config of TuneCallback or tune_loop"
    else:
        content = read_yaml(Path(config))
        source = str(config)
    if isinstance(content, dict) and isinstance(content.get(MINDFORMERS_KEY), dict):
        content = content[MINDFORMERS_KEY]
        source = f"{source}, key {MINDFORMERS_KEY!r}"
    if isinstance(content, dict) and "command" in content:
        best, live = split_best_config(content, source=source)
        return live, best
    return parse(LiveConfig, content, source=source), None


def _mode(text: str | None) -> Mode | None:
    if not text:
        return None
    if text == "observe":
        return "observe"
    if text == "act":
        return "act"
    raise ConfigError(f"{ENV_MODE} must be observe or act, but got {text!r}.")
