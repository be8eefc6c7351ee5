"""Device signals: utilization, memory, temperature and power of the device of this process."""

from __future__ import annotations

from mindtune.controller.device.choose import DeferredProbe, ProbeChoice, choose_probe
from mindtune.controller.device.reading import EMPTY_READING, DeviceReading, Probe, ProbeError
from mindtune.controller.device.sampler import DeviceSample, SamplingThread

__all__ = [
    "EMPTY_READING",
    "DeferredProbe",
    "DeviceReading",
    "DeviceSample",
    "Probe",
    "ProbeChoice",
    "ProbeError",
    "SamplingThread",
    "choose_probe",
]
