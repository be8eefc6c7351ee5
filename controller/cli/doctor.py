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
    send_test_alert: Annotated[
        str | None,
        typer.Option(metavar="env:NAME", help="Also send an alert to the URL in this variable."),
    ] = None,
) -> int:
    """Say what works on this machine, and why the rest does not."""
    from mindtune.controller.contract import AlertsSection, DoctorOutput, parse
    from mindtune.controller.doctor import collect_doctor

    if send_test_alert is not None:
        parse(AlertsSection, {"urls": send_test_alert}, source="--send-test-alert")
    if measure:
        err().print("measuring the peak of the matrix product ...")
    collected = collect_doctor(measure, test_alert=send_test_alert)
    document = parse(DoctorOutput, collected, source="doctor")
    lost = any(entry.feature == "test_alert" and not entry.ok for entry in document.usable)
    code = 1 if lost else 0
    if json:
        print_json(document)
        return code
    console = out()
    versions = Table("package", "version", box=None, title="Versions", title_justify="left")
    for name, version in document.versions.items():
        versions.add_row(name, version or "-")
    features = Table("", "feature", "why", box=None, title="Features", title_justify="left")
    for entry in document.usable:
        features.add_row("yes" if entry.ok else "no", entry.feature, entry.why)
    console.print(versions)
    for device in document.devices:
        known = device.get("peaks", {})
        facts = ", ".join(f"{key} {value}" for key, value in device.items() if key != "peaks")
        console.print(f"device: {facts}")
        for precision, peak in known.items():
            flops = "-" if peak["flops"] is None else f"{peak['flops'] / 1e12:g} TFLOP/s"
            console.print(f"  peak in {precision}: {flops} ({peak['source']})")
    console.print(features)
    for peak in document.peaks:
        facts = ", ".join(f"{key} {value}" for key, value in peak.items())
        console.print(f"peak: {facts}")
    return code
