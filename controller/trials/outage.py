"""Let a database server be away for a while, as for a restart, without ending those who use it.

Theory of operation. A connection that was dropped is noticed before its next use (SQLAlchemy's
`pool_pre_ping`) and opened again, which is tried for two minutes. A transaction that is cut in
its middle is run once more. Should the first run have come through after all, the second one
meets what it left: an attribute is set to the same again; of a trial that was made twice, or taken
from the queue by a call that failed, nobody is known, so that it is closed like that of a worker
that died; a second end of a trial is refused, as a late report is.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna
    from sqlalchemy.engine import URL

__all__ = ["be_patient", "libpq_limits"]

_LOGGER = logging.getLogger(__name__)
_OUTAGE_S = 120.0
"""A database may be away so long before anybody gives up."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_LIBPQ_DRIVERS = ("psycopg", "psycopg2")
_LIBPQ_LIMITS = {
    "connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10,
    "keepalives_count": 3, "tcp_user_timeout": 60_000,
}  # fmt: skip
"""libpq's own parameters, in s and ms: by default a server that vanished is waited for for two
hours (Linux's keepalives)."""
_CALLS = (
    "_create_new_trial", "_get_trials", "_set_trial_param", "get_all_studies",
    "get_study_directions", "get_study_id_from_name", "get_study_name_from_id",
    "get_study_system_attrs", "get_study_user_attrs", "get_trial",
    "get_trial_id_from_study_id_trial_number", "set_study_system_attr", "set_study_user_attr",
    "set_trial_intermediate_value", "set_trial_state_values", "set_trial_system_attr",
    "set_trial_user_attr",
)  # fmt: skip
"""What Optuna's cache asks of an `RDBStorage` during a search (Optuna 5.0.0): each call is one
transaction."""


def libpq_limits(url: URL) -> dict[str, Any]:
    """Return how soon a PostgreSQL server that does not answer is noticed, for its driver.

    Args:
        url: of the database; what it says itself is left out.
    """
    if url.get_backend_name() != "postgresql" or url.get_driver_name() not in _LIBPQ_DRIVERS:
        return {}
    return {name: value for name, value in _LIBPQ_LIMITS.items() if name not in url.query}


def be_patient(
    storage: optuna.storages.RDBStorage, *, shown: str, hide: Callable[[str], str]
) -> None:
    """Let a storage that was opened wait for its server from now on.

    Nothing is wrong with the address, or it could not have been opened.

    Args:
        storage: of a server; opened with `pool_pre_ping`.
        shown: its address without secrets.
        hide: takes the secrets out of a driver's words.
    """
    from sqlalchemy import event  # noqa: PLC0415 - the light commands do without it

    def connect(dialect: Any, _record: object, args: list[Any], options: dict[str, Any]) -> Any:
        give_up_at = time.monotonic() + _OUTAGE_S
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return dialect.connect(*args, **options)
            except dialect.loaded_dbapi.OperationalError as error:
                if time.monotonic() + pause_s >= give_up_at:
                    raise
                text = hide(" ".join(str(error).split()))
                _LOGGER.warning(
                    "the storage %s is away and tried again in %g s: %s", shown, pause_s, text
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    event.listen(storage.engine, "do_connect", connect)
    for name in _CALLS:
        call = getattr(storage, name, None)
        if call is not None:  # some are Optuna's own business, and may change
            setattr(storage, name, _repeated(call))


def _repeated(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that runs once more where its connection was cut."""
    import optuna  # noqa: PLC0415 - the light commands do without it
    from sqlalchemy.exc import DBAPIError  # noqa: PLC0415 - as above

    @functools.wraps(call)
    def repeated(*args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except (DBAPIError, optuna.exceptions.StorageInternalError) as error:
            cause = error if isinstance(error, DBAPIError) else error.__cause__
            if not isinstance(cause, DBAPIError) or not cause.connection_invalidated:
                raise
        return call(*args, **options)

    return repeated
