"""Peak arithmetic of devices, from a table of cited figures or measured here.

An unknown device has no peak: a guessed one makes every MFU taken of it wrong and looks right.
"""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any, NamedTuple

import yaml

from mindtune.controller.errors import ConfigError

__all__ = [
    "PRECISIONS",
    "Peak",
    "PeakLookup",
    "known_devices",
    "look_up_peak",
    "peak_flops",
    "shared_peak",
]

PRECISIONS = ("float32", "float16", "bfloat16")

# Words that name a maker or a family and tell no device from another.
_NOISE = frozenset(
    {"nvidia", "tesla", "geforce", "huawei", "ascend", "gpu", "npu", "rtx", "atlas", "graphics"}
)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak arithmetic of one device in one precision."""

    flops: float
    """FLOP/s, dense; a multiplication and an addition are two."""
    precision: str
    """One of `PRECISIONS`."""
    device: str
    source: str
    """Where the figure comes from; starts with `measured:` where it was taken on this machine."""
    certainty: str
    """`vendor`, `published`, `derived` or `unverified` (see peaks.yaml), or `measured`."""
    memory_bytes: int | None = None
    """Memory of the device; None: unknown, or not the same for all that bear the name."""
    spread: float | None = None
    """Measured only: interquartile range of the repeats over their median."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Peak:
        """Reads what `to_dict` wrote.

        Raises:
            ConfigError: A value is missing, unknown or not possible.
        """
        try:
            peak = cls(**values)
            valid = peak.flops > 0 and peak.precision in PRECISIONS
        except TypeError as error:
            raise ConfigError(f"a stored peak holds the fields of Peak, but {error}.") from error
        if not valid:
            raise ConfigError(
                f"a stored peak has flops above 0 and a precision of {', '.join(PRECISIONS)}, but "
                f"got {values}; measure it again with `mindtune doctor --measure`."
            )
        return peak


class PeakLookup(NamedTuple):
    """The peak found, or why there is none."""

    peak: Peak | None
    reason: str


class _Entry(NamedTuple):
    device: str
    model: str
    word_sets: tuple[frozenset[str], ...]
    memory_bytes: int | None
    peak_tflops: dict[str, float]
    certainty: str
    source: str


def peak_flops(device_name: str, precision: str) -> Peak | None:
    """Dense peak of a device from the table; None where unknown or where the name is ambiguous.

    Args:
        device_name: As NVML, npu-smi or MindSpore gives it, or as in peaks.yaml.
        precision: One of `PRECISIONS`.

    Raises:
        ConfigError: There is no such precision.
    """
    return look_up_peak(device_name, precision).peak


def look_up_peak(device_name: str, precision: str) -> PeakLookup:
    """As `peak_flops`, with the reason.

    A name fits an entry with the same words. A name with fewer words (`A100`) counts where all
    entries that it may mean have one peak. A name with more words fits nothing: a slice of a
    device (`A100 MIG 1g.10gb`) or a sibling (`RTX 4090 D`) is another device.

    Raises:
        ConfigError: There is no such precision.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision must be one of {', '.join(PRECISIONS)}, but got {precision!r}."
        )
    words = _words(device_name)
    entries = _table()
    fitting = [e for e in entries if words in e.word_sets] or [
        e for e in entries if e.model in words and any(words < names for names in e.word_sets)
    ]
    if not fitting:
        return PeakLookup(
            None,
            f"no peak is known for {device_name!r}; set cluster.peak_flops or measure it with "
            "`mindtune doctor --measure`.",
        )
    figures = {entry.peak_tflops.get(precision) for entry in fitting}
    names = ", ".join(entry.device for entry in fitting)
    if len(figures) > 1:
        return PeakLookup(
            None,
            f"{device_name!r} may be {names}, whose {precision} peaks differ; give the full name.",
        )
    tflops = figures.pop()
    if tflops is None:
        return PeakLookup(None, f"no {precision} peak is known for {names}.")
    memories = {entry.memory_bytes for entry in fitting}
    peak = Peak(
        flops=tflops * 1e12,
        precision=precision,
        device=names,
        source=fitting[0].source,
        certainty=fitting[0].certainty,
        memory_bytes=memories.pop() if len(memories) == 1 else None,
    )
    return PeakLookup(peak, f"{fitting[0].certainty}: {fitting[0].source}")


def shared_peak(peak: Peak, num_devices: int) -> Peak:
    """Peak of each of several "devices" that share one host processor.

    Ranks on the CPU target divide the cores between them, so that all together have the peak that
    was measured with every core: per device it is that peak / `num_devices`. Without the division
    MFU would fall with every rank added, whatever the split is worth.

    Args:
        peak: Peak of the whole host.
        num_devices: Ranks that share it.

    Raises:
        ConfigError: `num_devices` is below 1.
    """
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, but got {num_devices}.")
    if num_devices == 1:
        return peak
    return replace(
        peak,
        flops=peak.flops / num_devices,
        source=f"{peak.source}; shared by {num_devices} ranks",
        memory_bytes=None if peak.memory_bytes is None else peak.memory_bytes // num_devices,
    )


def known_devices() -> tuple[str, ...]:
    """Names of all devices in the table."""
    return tuple(entry.device for entry in _table())


def _words(name: str) -> frozenset[str]:
    """Words of a device name that tell it from others; `Ascend910B3` counts as `910b3`."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    plain = (re.sub(r"^(?:ascend|rtx|tesla)(?=\d)", "", word) for word in words)
    return frozenset(plain) - _NOISE


@functools.cache
def _table() -> tuple[_Entry, ...]:
    text = resources.files("mindtune.controller.metrics").joinpath("peaks.yaml").read_text("utf-8")
    return tuple(
        _Entry(
            device=row["device"],
            model=row["model"],
            word_sets=tuple(_words(name) for name in [row["device"], *row["names"]]),
            memory_bytes=None if row["memory_gb"] is None else int(row["memory_gb"] * 2**30),
            peak_tflops=row["peak_tflops"],
            certainty=row["certainty"],
            source=row["source"],
        )
        for row in yaml.safe_load(text)["devices"]
    )
