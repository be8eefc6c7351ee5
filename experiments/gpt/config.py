"""The workload's own YAML config: typed, strict, and every default documented.

`base.yaml` in this folder spells the defaults out; a test keeps the two equal. An unknown key is
an error that lists the allowed ones, so that a misspelt knob can never be ignored in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, ValidationInfo, field_validator

from mindtune.controller.contract.base import ContractModel, parse
from mindtune.controller.errors import ConfigError
from mindtune.search.errors import SearchError
from mindtune.search.knobs import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "DataConfig",
    "FaultsConfig",
    "GptConfig",
    "ModelConfig",
    "OutputConfig",
    "ParallelConfig",
    "PoisonConfig",
    "SlowDataConfig",
    "TrainingConfig",
    "load_config",
    "parse_config",
    "recomputed_blocks",
]

_SUPPORTED = {
    "recompute": {"none": "none", "full": "full", "interval": "interval:K"},
    "gradient_compression": {"none": "none", "float16": "float16", "topk": "topk:R"},
}


class ModelConfig(ContractModel):
    """Shape of the decoder. The vocabulary is fixed: the 256 byte values."""

    num_layers: int = Field(4, ge=1, strict=True)
    """Transformer blocks."""
    hidden_size: int = Field(128, ge=1, strict=True)
    """Width of the residual stream."""
    num_heads: int = Field(4, ge=1, strict=True)
    """Attention heads; must divide `hidden_size`."""
    intermediate_size: int | None = Field(None, ge=1, strict=True)
    """Width of the MLP; null: 4 x `hidden_size`."""
    seq_length: int = Field(128, ge=2, strict=True)
    """Bytes per sample that are predicted."""

    @property
    def mlp_size(self) -> int:
        """The MLP's width, the default resolved."""
        return self.intermediate_size or 4 * self.hidden_size


class ParallelConfig(ContractModel):
    """Degrees; their product is the number of ranks."""

    data_parallel: int = Field(1, ge=1, strict=True)
    """Replicas that read different samples."""
    model_parallel: int = Field(1, ge=1, strict=True)
    """Tensor parallel ranks that share the heads and the MLP of one replica."""


class TrainingConfig(ContractModel):
    """What a step is and how long the run lasts."""

    mode: Literal["graph", "pynative"] = "graph"
    """Execution mode of MindSpore."""
    precision: Literal["float32", "float16"] = "float32"
    """Compute type of matrix products and activations. Weights, normalisation, softmax and loss
    stay float32."""
    global_batch_size: int = Field(16, ge=1, strict=True)
    """Samples per optimizer step, over all ranks."""
    micro_batch_size: int = Field(2, ge=1, strict=True)
    """Samples per rank and forward pass."""
    micro_batch_num: int | None = Field(None, ge=1, strict=True)
    """Forward passes per optimizer step; null: derived from the other sizes, else checked against
    them."""
    recompute: str = "full"
    """Activation recomputation: none, full, or interval:K, which recomputes every K-th block."""
    gradient_compression: str = "none"
    """Data-parallel gradient reduction: none, float16, or topk:R with 0 < R <= 1 and error
    feedback."""
    optimizer: Literal["AdamWeightDecay"] = "AdamWeightDecay"
    """MindSpore's optimizer."""
    weight_decay: float = Field(0.01, ge=0)
    """Decay of the weight matrices; biases and norms are never decayed."""
    learning_rate: float = Field(1.0e-3, gt=0)
    """Peak rate, reached at the end of the warm-up."""
    lr_schedule: Literal["float", "cosine", "table"] = "cosine"
    """float: constant, no warm-up; cosine: a schedule cell with linear warm-up, then cosine decay
    to a tenth over `steps`; table: the same values as a list."""
    warmup: int = Field(20, ge=0, strict=True)
    """Steps of linear warm-up (must be 0 with `lr_schedule: float`)."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down; null: never."""
    loss_scale: float | Literal["none", "dynamic"] = "none"
    """none: 1. A number: the scale to start with, moved by nobody but a policy. dynamic: starts at
    2^16, halved on overflow, doubled after 1000 finite steps (the defaults of MindSpore's
    DynamicLossScaleManager, but for its start of 2^24)."""
    steps: int = Field(200, ge=1, strict=True)
    """Optimizer steps of the run, and the length of the schedule. A trial runs its own number of
    steps of that schedule."""
    seed: int = Field(0, ge=0, strict=True)
    """Seed of weights and sample order; a trial brings its own."""
    eval_every: int = Field(0, ge=0, strict=True)
    """Steps between evaluations; 0: none but the last."""
    eval_at_end: bool = Field(True, strict=True)
    """Whether the validation loss is taken when training ends."""
    eval_samples: int = Field(64, ge=1, strict=True)
    """Validation samples per evaluation, the same for every config and rank."""

    @field_validator("recompute", "gradient_compression", mode="before")
    @classmethod
    def _canonical(cls, value: object, info: ValidationInfo) -> object:
        """Bring a knob into its canonical spelling and refuse what this program does not have."""
        name = str(info.field_name)
        try:
            spelled = canonical(name, value)
        except SearchError as error:
            raise ValueError(str(error).removeprefix(f"{name} ")) from None
        kinds = _SUPPORTED[name]
        if str(spelled).partition(":")[0] not in kinds:
            raise ValueError(
                f"must be one of {', '.join(kinds.values())} in this program, but got {value!r}"
            )
        return spelled


class DataConfig(ContractModel):
    """The input pipeline."""

    workers: int = Field(1, ge=1, strict=True)
    """Threads that read samples (MindSpore allows no more than there are cores)."""
    prefetch: int = Field(2, ge=1, strict=True)
    """Batches read ahead."""
    cache: bool = Field(True, strict=True)
    """Whether the text is held in memory (about 10 MB) instead of read from the files sample by
    sample."""


class OutputConfig(ContractModel):
    """Where records go, unless the launcher names a folder."""

    dir: str | None = None
    """Folder for the records, relative to the working directory; null: a new one under
    mindtune_runs."""
    model_signals_every: int = Field(0, ge=0, strict=True)
    """Steps from one sample of model signals to the next, in a run of its own; 0: none."""


class PoisonConfig(ContractModel):
    """A batch that arrives spoilt."""

    steps: tuple[int, ...] = ()
    """Optimizer steps (from 1) whose samples are spoilt."""
    kind: Literal["scale", "noise"] = "scale"
    """scale: the loss of each sample is multiplied by `factor`, so that in float16 the gradients
    really overflow; noise: the text is replaced by random bytes."""
    factor: float = Field(1.0e6, gt=0)
    """Factor of kind `scale`."""


class SlowDataConfig(ContractModel):
    """Sleep in the input pipeline."""

    seconds: float = Field(0.0, ge=0)
    """Sleep per micro-batch; 0: none."""
    first_step: int = Field(1, ge=1, strict=True)
    """First slow step."""
    last_step: int | None = Field(None, ge=1, strict=True)
    """Last slow step; null: to the end."""


class FaultsConfig(ContractModel):
    """Faults of the data and of the start, all off; any other stands in a plan for the run."""

    loss_scale_start: float | None = Field(None, gt=0)
    """Scale that `loss_scale: dynamic` starts with; null: 2^16."""
    poison: PoisonConfig = PoisonConfig()
    slow_data: SlowDataConfig = SlowDataConfig()


class GptConfig(ContractModel):
    """The whole config."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    output: OutputConfig = OutputConfig()
    faults: FaultsConfig = FaultsConfig()

    @field_validator("model", "parallel", "training", "data", "output", "faults", mode="before")
    @classmethod
    def _empty_section(cls, value: object) -> object:
        """Read `faults:` with nothing after it as the section's defaults."""
        return {} if value is None else value

    @property
    def micro_batch_num(self) -> int:
        """Forward passes per optimizer step."""
        samples = self.parallel.data_parallel * self.training.micro_batch_size
        return self.training.global_batch_size // samples


def recomputed_blocks(recompute: str, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the recomputed blocks: with `interval:K` K - 1, 2 K - 1, ..."""
    if recompute == "none":
        return ()
    interval = 1 if recompute == "full" else int(recompute.removeprefix("interval:"))
    return tuple(range(interval - 1, num_layers, interval))


def parse_config(tree: Any, source: str = "config") -> GptConfig:
    """Check a parsed YAML tree.

    Args:
        tree: What `yaml.safe_load` returned; None (an empty file) means all defaults.
        source: Name used in error messages.

    Raises:
        ConfigError: A key is unknown, a value has the wrong type or range, or two values
            contradict each other.
    """
    config = parse(GptConfig, {} if tree is None else tree, source=source)
    broken = list(_broken_rules(config))
    if broken:
        raise ConfigError(f"{source}: " + " ".join(broken))
    return config


def load_config(path: Path) -> GptConfig:
    """Read and check a config file.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or breaks a rule.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config {path} is not YAML: {error}.") from error
    return parse_config(tree, str(path))


def _broken_rules(config: GptConfig) -> Iterator[str]:
    """Yield what is wrong between several values: rule, values, remedy."""
    model, parallel, training = config.model, config.parallel, config.training
    if model.hidden_size % model.num_heads:
        yield (
            "model.hidden_size must be a multiple of model.num_heads, but got "
            f"{model.hidden_size} and {model.num_heads}."
        )
    for name, value in (("num_heads", model.num_heads), ("intermediate_size", model.mlp_size)):
        if value % parallel.model_parallel:
            yield (
                f"model.{name} must be a multiple of parallel.model_parallel, but got {value} "
                f"and {parallel.model_parallel}."
            )
    samples = parallel.data_parallel * training.micro_batch_size
    if training.global_batch_size % samples:
        yield (
            "training.global_batch_size must be a multiple of parallel.data_parallel * "
            f"training.micro_batch_size = {samples}, but got {training.global_batch_size}."
        )
    elif training.micro_batch_num not in (None, config.micro_batch_num):
        yield (
            "training.micro_batch_num must be global_batch_size / (data_parallel * "
            f"micro_batch_size) = {config.micro_batch_num}, but got {training.micro_batch_num}; "
            "use null to have it derived."
        )
    if training.recompute.startswith("interval") and not recomputed_blocks(
        training.recompute, model.num_layers
    ):
        yield (
            "the K of training.recompute: interval:K must be at most model.num_layers = "
            f"{model.num_layers}, but got {training.recompute!r}; use none."
        )
    if training.gradient_compression != "none" and parallel.data_parallel == 1:
        yield (
            "training.gradient_compression must be none with parallel.data_parallel: 1, where no "
            f"gradient is exchanged, but got {training.gradient_compression}."
        )
    if isinstance(training.loss_scale, float) and training.loss_scale <= 0:
        yield f"training.loss_scale must be positive, but got {training.loss_scale}."
    if training.lr_schedule == "float" and training.warmup:
        yield (
            "training.warmup must be 0 with lr_schedule: float, which is constant, but got "
            f"{training.warmup}; use lr_schedule: cosine or table."
        )
    start = config.faults.loss_scale_start
    if start is not None and training.loss_scale != "dynamic":
        yield (
            "faults.loss_scale_start needs training.loss_scale: dynamic, whose start it is, but "
            f"got {training.loss_scale}; give a fixed scale as training.loss_scale itself."
        )
    if any(step < 1 for step in config.faults.poison.steps):
        yield (
            f"faults.poison.steps must count from 1, but got {list(config.faults.poison.steps)}."
        )
