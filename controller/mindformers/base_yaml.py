"""A MindFormers YAML as its trainer takes it: sections with their defaults, mode, degrees, batch.

Defaults and rules are those of MindFormers 1.8.0 (`tools/register/template.py`,
`trainer/base_trainer.py`); files of 2.0 for the same trainer have the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindtune.controller.contract import read_yaml
from mindtune.controller.errors import ConfigError

__all__ = ["Batch", "MindFormersYaml", "Mode", "comment_name", "is_mindformers"]

Mode = Literal["semi_auto", "data_parallel", "stand_alone"]
"""semi_auto: the degrees of parallel_config act; data_parallel: every rank holds the whole model;
stand_alone: one device. In the last two MindFormers sets all degrees to 1, with a warning."""

_SECTIONS = ("trainer", "model", "parallel_config", "runner_config", "context", "train_dataset",
             "runner_wrapper", "recompute_config")  # fmt: skip
"""Sections of which a MindFormers YAML has at least two."""
_FEWEST = 2
_CONVERSION = {"input_path", "output_path"}
"""Keys of every entry of MindFormers' tables of checkpoint conversions."""
_MODES: dict[object, Mode] = {
    0: "data_parallel", "DATA_PARALLEL": "data_parallel",
    1: "semi_auto", "SEMI_AUTO_PARALLEL": "semi_auto",
    2: "semi_auto", "AUTO_PARALLEL": "semi_auto",
    3: "data_parallel", "HYBRID_PARALLEL": "data_parallel",
    "STAND_ALONE": "data_parallel", "MANUAL_PARALLEL": "data_parallel",
}  # fmt: skip
"""`parallel.parallel_mode` -> what training makes of it on the ranks that were started."""
_GRAPH, _PYNATIVE = (0, "GRAPH_MODE"), (1, "PYNATIVE_MODE")
"""`context.mode`, as MindFormers takes it; by default a graph is compiled."""
_DEGREES = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")


@dataclass(frozen=True)
class Batch:
    """MindFormers' batch in our terms: their product with data parallelism is the global batch."""

    micro_batch_size: int
    micro_batch_num: int
    data_parallel: int

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch_size * self.micro_batch_num * self.data_parallel


@dataclass(frozen=True)
class MindFormersYaml:
    """The content of a MindFormers YAML."""

    tree: dict[str, Any]
    source: str
    """Its file, for messages."""

    @classmethod
    def read(cls, path: Path) -> MindFormersYaml:
        """Read a file.

        Raises:
            ConfigError: it is missing, no YAML, no MindFormers YAML, or one whose parallelism its
                `context.mode` cannot do.
        """
        base = cls.of(read_yaml(path, repeated_keys=True), source=str(path))
        base.check_mode()
        return base

    @classmethod
    def of(cls, content: Any, *, source: str) -> MindFormersYaml:
        """Check that a content is MindFormers'.

        Raises:
            ConfigError: it is something else.
        """
        tree = content if isinstance(content, dict) else {}
        if not is_mindformers(tree) and not _is_conversion_table(tree):
            found = [name for name in _SECTIONS if name in tree]
            raise ConfigError(
                f"{source} must be a MindFormers YAML with sections such as "
                f"{', '.join(_SECTIONS[:4])}, but has {', '.join(found) or 'none of them'}; for a "
                "config of another program use `mindtune init` without --mindformers."
            )
        for name in _SECTIONS:
            if not isinstance(tree.get(name, {}), (dict, type(None))):
                raise ConfigError(
                    f"{source}: {name} must be a section of keys, but got {tree[name]!r}."
                )
        return cls(tree, source)

    @property
    def trains(self) -> bool:
        """Whether it names what a training needs, whatever its run_mode."""
        return bool(self.section("trainer")) and bool(self.section("model"))

    def section(self, name: str) -> dict[str, Any]:
        """Return a section by its dotted name; empty where there is none."""
        node: Any = self.tree
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else {}

    def count(self, key: str, default: int = 1) -> int:
        """Return a whole number by its dotted key.

        Raises:
            ConfigError: MindFormers would refuse it, too.
        """
        parent, _, name = key.rpartition(".")
        value = (self.section(parent) if parent else self.tree).get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self.source}: {key} must be a whole number of at least 1, but got {value!r}."
            )
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return whether a dotted key is on."""
        parent, _, name = key.rpartition(".")
        value = (self.section(parent) if parent else self.tree).get(name)
        return default if value is None else bool(value)

    @property
    def mode(self) -> Mode:
        """Return which parallelism acts in a training.

        Raises:
            ConfigError: `parallel.parallel_mode` is none that MindFormers knows.
        """
        if not self.flag("use_parallel"):
            return "stand_alone"
        value = self.section("parallel").get("parallel_mode", 1)
        if not isinstance(value, (int, str)) or value not in _MODES:
            raise ConfigError(
                f"{self.source}: parallel.parallel_mode must be one of "
                f"{', '.join(map(str, _MODES))}, but got {value!r}."
            )
        return _MODES[value]

    @property
    def is_pynative(self) -> bool:
        """Whether operators run one by one instead of as a compiled graph."""
        return self.section("context").get("mode") in _PYNATIVE

    def check_mode(self) -> None:
        """Refuse degrees that would not act: only a compiled graph is split over devices.

        MindSpore's PyNative mode has stand-alone and data-parallel training alone (documentation
        of `set_auto_parallel_context`); it says nothing where a YAML asks for more.

        Raises:
            ConfigError: `context.mode` is PyNative and the parallelism semi-automatic, or it is
                none that MindFormers knows.
        """
        told = self.section("context").get("mode", 0)
        if told not in (*_GRAPH, *_PYNATIVE):
            raise ConfigError(
                f"{self.source}: context.mode must be one of "
                f"{', '.join(map(str, (*_GRAPH, *_PYNATIVE)))}, but got {told!r}."
            )
        if self.is_pynative and self.mode == "semi_auto":
            raise ConfigError(
                f"{self.source}: context.mode must be 0 (graph mode) for semi-automatic "
                f"parallelism (use_parallel: True, parallel_mode: 1), but got {told!r}: in "
                "PyNative mode MindSpore trains stand-alone or data parallel only, so that no "
                "degree of parallel_config would act; set context.mode: 0, or "
                "parallel.parallel_mode: 0 for plain data parallelism."
            )

    @property
    def is_legacy(self) -> bool:
        """Whether it builds a model of MindFormers' old kind."""
        return self.flag("use_legacy", default=True)

    def degree(self, name: str) -> int:
        """Return a degree of parallel_config."""
        return self.count(f"parallel_config.{name}")

    @property
    def degrees_product(self) -> int:
        """Devices that the degrees fill."""
        product = 1
        for name in _DEGREES:
            product *= self.degree(name)
        return product

    @property
    def interleave(self) -> int:
        """Parts of a micro-batch whose computation and communication overlap."""
        return self.count("micro_batch_interleave_num")

    def batch(self, num_devices: int) -> Batch:
        """Return the batch of an optimizer step, by MindFormers' own identity.

        With pipelines batch_size x data_parallel x micro_batch_num x micro_batch_interleave_num,
        accumulation ignored; without batch_size x data_parallel x interleave x accumulation; in
        other than semi-automatic parallelism batch_size x devices, everything else ignored.

        Args:
            num_devices: devices of the job, which alone counts where the degrees do not act.
        """
        size = self.count("runner_config.batch_size")
        if self.mode != "semi_auto":
            return Batch(size, 1, num_devices if self.mode == "data_parallel" else 1)
        pipelined = self.degree("pipeline_stage") > 1
        key = "parallel_config.micro_batch_num" if pipelined else (
            "runner_config.gradient_accumulation_steps"
        )  # fmt: skip
        return Batch(size * self.interleave, self.count(key), self.degree("data_parallel"))


def comment_name(path: Path) -> str:
    """Return a file's name as a comment can hold it: on one line."""
    return path.name if path.name.isprintable() else repr(path.name)


def is_mindformers(tree: dict[str, Any]) -> bool:
    """Tell whether a content is a MindFormers YAML for its trainer."""
    return len([name for name in _SECTIONS if name in tree]) >= _FEWEST


def _is_conversion_table(tree: dict[str, Any]) -> bool:
    entries = list(tree.values())
    return bool(entries) and all(isinstance(e, dict) and set(e) >= _CONVERSION for e in entries)
