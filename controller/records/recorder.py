"""The records of a run that is going on, as one thing to write to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mindtune.controller.contract import (
    DecisionRecord,
    Document,
    ModelSignalRecord,
    write_json,
)
from mindtune.controller.errors import ConfigError
from mindtune.controller.records.decision_log import DecisionWriter
from mindtune.controller.records.model_signal_log import ModelSignalWriter
from mindtune.controller.records.run_folder import RunFolder
from mindtune.controller.records.signal_writer import SignalWriter
from mindtune.policies.signals import Observation

__all__ = ["Recorder"]

_LOGGER = logging.getLogger(__name__)


class Recorder:
    """Writes the signals, decisions and result of one run; made on rank 0 only.

    A result that an earlier segment left is removed, so that a killed one shows none. Once open, a
    disk that fails is said in the log and costs records, never the training.

    Raises:
        ConfigError: The folder cannot be written.
    """

    def __init__(self, folder: RunFolder) -> None:
        folder.create()
        folder.result.unlink(missing_ok=True)
        self.folder = folder
        self._signals = SignalWriter(folder.signals)
        self._decisions = DecisionWriter(folder.decisions)
        self._model_signals: ModelSignalWriter | None = None
        self._said: set[str] = set()

    @property
    def run(self) -> int:
        """Segment of the run: 0 at first, one more after each resume."""
        return self._signals.run

    def observation(
        self,
        observation: Observation,
        *,
        extra: Mapping[str, str] | None = None,
        alarm: bool = False,
    ) -> None:
        """Append a row of signals; with an alarm it reaches the file at once."""
        with self.surviving("signals"):
            self._signals.write(observation, extra=extra, alarm=alarm)

    def decision(self, record: DecisionRecord) -> None:
        """Append a decision, at once."""
        with self.surviving("decisions"):
            self._decisions.write(record)

    def model_signals(self, record: ModelSignalRecord) -> None:
        """Append a sample from inside the model, at once; the file is made with the first."""
        with self.surviving("model signals"):
            if self._model_signals is None:
                self._model_signals = ModelSignalWriter(self.folder.model_signals)
            self._model_signals.write(record)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        with self.surviving("signals"):
            self._signals.flush()

    def result(self, document: Document) -> None:
        """Write how the run ended, atomically."""
        with self.surviving("the result"):
            write_json(self.folder.result, document)

    def close(self) -> None:
        """Write what waits and close the files; harmless when called twice."""
        with self.surviving("signals"):
            self._signals.close()
        with self.surviving("decisions"):
            self._decisions.close()
        if self._model_signals is not None:
            with self.surviving("model signals"):
                self._model_signals.close()

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """Turn a failing disk into one line in the log."""
        try:
            yield
        except (OSError, ConfigError) as error:
            if what not in self._said:
                self._said.add(what)
                _LOGGER.error(  # noqa: TRY400 - the cause is in the message, no traceback needed
                    "%s cannot be written to %s, training goes on without: %s",
                    what,
                    self.folder.path,
                    error,
                )
