"""Write the study file of a MindFormers YAML, checked as a search would check it."""

from __future__ import annotations

from pathlib import Path

from mindtune.controller.contract import write_atomic
from mindtune.controller.errors import ConfigError
from mindtune.controller.mindformers.base_yaml import MindFormersYaml
from mindtune.controller.mindformers.study_text import study_text
from mindtune.controller.trials.study_setup import load_study
from mindtune.search.constraints import explain

__all__ = ["write_study"]


def write_study(base: Path, out: Path, *, num_devices: int | None = None) -> list[str]:
    """Write a study file.

    Args:
        base: MindFormers YAML; stays as it is.
        out: file to write.
        num_devices: devices of the job; None: as many as the degrees of the YAML fill.

    Returns:
        What was not understood, or is unusual; one sentence each.

    Raises:
        ConfigError: the YAML is none of MindFormers', or not valid; then nothing is written.
        SearchError: a value of it is none that a knob can have; nothing is written either.
    """
    text, notes = study_text(MindFormersYaml.read(base), base, out, num_devices=num_devices)
    out.parent.mkdir(parents=True, exist_ok=True)
    unchecked = out.with_name(f".{out.name}.unchecked{out.suffix}")
    try:
        write_atomic(unchecked, text)
        setup = load_study(unchecked)
        unchecked.replace(out)
    except ConfigError as error:
        told = str(error).replace(str(unchecked), f"the study of {base}")
        raise ConfigError(told) from None
    finally:
        unchecked.unlink(missing_ok=True)
    rejected = explain(setup.space, setup.base).rejected
    if rejected:
        notes.append(
            f"The YAML itself is rejected, so that trial 0 is the nearest config that is not: "
            f"{rejected[0].reason}."
        )
    return notes
