"""`mindtune doctor`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from mindtune.controller.cli.console import err, out, print_json

__all__ = ["doctor"]


def doctor(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure this machine's peak (about a minute).")
    ] = False,
) -> int:
    """Say what works on this machine, and why the rest does not."""
    from mindtune.controller.contract import DoctorOutput, parse
    from mindtune.controller.doctor import collect_doctor

    if measure:
        err().print("measuring the peak of the matrix product ...")
    document = parse(DoctorOutput, collect_doctor(measure=measure), source="doctor")
    if json:
        print_json(document)
        return 0
    console = out()
    versions = Table("package", "version", box=None, title="Versions", title_justify="left")
    for name, version in document.versions.items():
        versions.add_row(name, version or "-")
    features = Table("", "feature", "why", box=None, title="Features", title_justify="left")
    for entry in document.usable:
        features.add_row("yes" if entry.ok else "no", entry.feature, entry.why)
    console.print(versions)
    for device in document.devices:
        facts = ", ".join(f"{key} {value}" for key, value in device.items())
        console.print(f"device: {facts}")
    console.print(features)
    for peak in document.peaks:
        facts = ", ".join(f"{key} {value}" for key, value in peak.items())
        console.print(f"peak: {facts}")
    return 0
