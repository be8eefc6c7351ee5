"""Open the Optuna storage of a study, or say what is wrong with it before anything is written.

The default is an SQLite file in the study's folder. A URL may carry a password: it is given as
`env:NAME` or redacted wherever it is shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from mindtune.controller.contract import refuse_pipe
from mindtune.controller.errors import ConfigError
from mindtune.controller.trials.outage import be_patient, libpq_limits

if TYPE_CHECKING:
    import optuna
    from sqlalchemy.engine import Connection, Engine

__all__ = ["DATABASE", "StorageAddress", "named_variable", "open_storage", "storage_address",
           "storage_errors"]  # fmt: skip

DATABASE = "study.db"
"""Name of the SQLite file in a study's folder."""

_ENV = "env:"
_LOCK_WAIT_S = 5.0
_BUSY_TIMEOUT_S = 60.0
"""SQLite waits so long for another writer, such as a dashboard or a second reader."""
_TABLES_WAIT_S = 10.0
"""Workers that start together make the tables together; all but one fail at first."""
_NEW_TABLES = ("already exists", "no such table", "does not exist", "UNIQUE constraint failed",
               "duplicate key")  # fmt: skip
"""What SQLite and PostgreSQL then say."""
_SECRET = re.compile("pass|pwd|secret|token|key", re.IGNORECASE)
"""In the name of a URL's query: its value is shown nowhere."""
_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True)
class StorageAddress:
    """Where a study is stored."""

    url: str = field(repr=False)
    """What the storage is opened with; may hold a password."""
    shown: str
    """The same for messages and records, without secrets."""
    file: Path | None = None
    """The SQLite file, where it is one."""
    variable: str | None = None
    """Environment variable that holds the URL, if one does."""


def storage_address(
    setting: str | None, folder: Path, *, base: Path | None = None
) -> StorageAddress:
    """Return the address that a study's `storage` setting stands for.

    Args:
        setting: null (SQLite in the folder), a URL, or `env:NAME`.
        folder: folder of the study.
        base: what the path of an SQLite file is relative to; None: this process's folder, as of
            an option or an environment variable. Workers run elsewhere, so it is made absolute.

    Raises:
        ConfigError: if the environment variable is not set or the URL is none.
    """
    if setting is None:
        file = folder / DATABASE
        return StorageAddress(_file_url(file), str(file), file)
    url = setting
    name = named_variable(setting)
    if name is not None:
        url = os.environ.get(name, "")
        if not url:
            raise ConfigError(
                f"study.storage names the environment variable {name}, which must hold a "
                f"database URL, but it is not set; export {name}=postgresql+psycopg://..."
            )
    from sqlalchemy.engine import make_url  # noqa: PLC0415 - the light commands do without it
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415 - as above

    try:
        # No path and no host has a NUL in it, which make_url lets pass.
        parsed = make_url("" if "\0" in url else url)
    except (ArgumentError, ValueError):  # the second for a port that is no number
        shown = setting if name is not None else "a text without a scheme"
        raise ConfigError(
            "study.storage must be null, a database URL such as "
            f"postgresql+psycopg://user@host/name, or env:NAME, but got {shown}."
        ) from None
    if "@" in (parsed.host or ""):
        # The rest of a password would be taken for the host, and shown.
        raise ConfigError(
            "a user or password in study.storage must have its @ written as %40, but got a URL "
            "with more than one @."
        )
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database not in (None, ":memory:")
    if is_file and not str(parsed.database).startswith(("/", "file:")):
        file = (Path() if base is None or name is not None else base) / str(parsed.database)
        _, mark, query = url.partition("?")
        path = _file_url(file).removeprefix("sqlite:")
        url = f"{parsed.drivername}:{path}{mark}{query}"
        parsed = make_url(url)
    shown = setting
    if name is None:
        hidden = parsed.set(query=dict.fromkeys(parsed.query, "***"))
        shown = hidden.render_as_string(hide_password=True)
    return StorageAddress(url, shown, Path(str(parsed.database)) if is_file else None, name)


def named_variable(setting: str | None) -> str | None:
    """Return the environment variable that a `storage` setting names; None: it names none."""
    if setting is None or not setting.startswith(_ENV):
        return None
    return setting.removeprefix(_ENV)


def _file_url(file: Path) -> str:
    from sqlalchemy.engine import make_url  # noqa: PLC0415 - the light commands do without it

    path = str(file.resolve())
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the folder of the database must have a name in UTF-8, but got {path!r}; give "
            "another one with --out."
        ) from None
    # Whether an escaped character is read back depends on SQLAlchemy's version; Optuna takes
    # braces for placeholders of its own.
    for url in (f"sqlite:///{quote(path)}", f"sqlite:///{path}"):
        if make_url(url).database == path and not set(url) & set("{}"):
            return url
    raise ConfigError(
        f"the folder of the database must have a name without ?, %, {{ and }}, but got {path!r}; "
        "give another one with --out."
    )


def open_storage(address: StorageAddress) -> optuna.storages.BaseStorage:
    """Open a storage; an SQLite file is checked before it is touched.

    Raises:
        ConfigError: if it is corrupt, of something else, locked, not writable or not reachable.
    """
    if address.file is not None:
        _check_file(address.file)
    from sqlalchemy.engine import make_url  # noqa: PLC0415 - the light commands do without it

    # A server may have dropped a connection that was idle while a trial ran.
    limits = libpq_limits(make_url(address.url))
    arguments: dict[str, Any] = {"pool_pre_ping": True, "connect_args": limits}
    if address.file is not None:
        arguments = {"connect_args": {"timeout": _BUSY_TIMEOUT_S}}
    last_try = time.monotonic() + _TABLES_WAIT_S
    try:
        while True:
            with contextlib.suppress(_TablesInTheMakingError), storage_errors(address):
                storage = _make_tables(address, arguments, is_last=time.monotonic() >= last_try)
                if address.file is not None:
                    _lock_before_reading(storage.engine)
                else:
                    be_patient(
                        storage,
                        shown=address.shown,
                        hide=lambda text: _without_secrets(text, address),
                    )
                return storage
            time.sleep(0.2)
    except ImportError as error:
        raise ConfigError(
            f"the storage {address.shown} needs a database driver that is not installed "
            f"({_without_secrets(str(error.__cause__ or error), address)}); install it."
        ) from None


class _TablesInTheMakingError(Exception):
    """Another process makes the tables right now."""


def _make_tables(
    address: StorageAddress, arguments: dict[str, Any], *, is_last: bool
) -> optuna.storages.RDBStorage:
    """Open a storage whose tables are all there, made by this process or another one."""
    import optuna  # noqa: PLC0415 - the light commands do without it
    import sqlalchemy.exc  # noqa: PLC0415 - as above

    try:
        storage = optuna.storages.RDBStorage(address.url, engine_kwargs=arguments)
        storage.get_all_studies()
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        text = f"{error} {error.__cause__}"
        if is_last or not any(sign in text for sign in _NEW_TABLES):
            raise
        raise _TablesInTheMakingError from error
    return storage


def _lock_before_reading(engine: Engine) -> None:
    """Let every transaction on an SQLite file begin with the lock that a writer needs.

    SQLite knows no `SELECT ... FOR UPDATE`, which Optuna takes a queued trial with, so two
    workers would get the same one (seen with Optuna 5.0.0). How to do it is from SQLAlchemy's
    page on SQLite, "Serializable isolation / Savepoints / Transactional DDL".
    """
    from sqlalchemy import event  # noqa: PLC0415 - the light commands do without it

    def leave_begin_to_us(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections that were opened without this
    event.listen(engine, "connect", leave_begin_to_us)
    event.listen(engine, "begin", begin)


@contextlib.contextmanager
def storage_errors(address: StorageAddress) -> Iterator[None]:
    """Turn failures of the storage into a `ConfigError` that names the address without secrets."""
    import optuna  # noqa: PLC0415 - the light commands do without it
    import sqlalchemy.exc  # noqa: PLC0415 - as above

    try:
        yield
    except (
        sqlalchemy.exc.SQLAlchemyError,
        optuna.exceptions.StorageInternalError,
        RuntimeError,
    ) as error:
        if isinstance(error, RuntimeError) and not _is_about_tables(error):
            raise
        cause = error.__cause__ or error
        original = getattr(cause, "orig", None) or cause
        text = " ".join(str(original).split())
        raise ConfigError(
            f"the storage {address.shown} must be readable and writable, but: "
            f"{_without_secrets(text, address)}; repair it, or give another one with --storage."
        ) from None


def _is_about_tables(error: RuntimeError) -> bool:
    """Tell Optuna's complaint about the tables' version from any other `RuntimeError`."""
    return "optuna" in str(error).lower() and "version" in str(error).lower()


def _without_secrets(text: str, address: StorageAddress) -> str:
    from sqlalchemy.engine import make_url  # noqa: PLC0415 - the light commands do without it

    text = text.replace(address.url, address.shown)
    url = make_url(address.url)
    hidden = [url.password]
    for name, value in url.query.items():
        if _SECRET.search(name):
            hidden += [value] if isinstance(value, str) else value
    for secret in filter(None, hidden):
        # A driver repeats it as it was given, or decoded.
        for spelling in (str(secret), quote(secret, safe=""), quote(secret), quote_plus(secret)):
            text = text.replace(spelling, "***")
    # Spelled in a way of the user's own, such as lower-case escapes.
    given = re.search(r"://[^/@]*:([^@]+)@", address.url)
    return text.replace(given[1], "***") if given else text


def _check_file(file: Path) -> None:
    """Look into an SQLite file without changing it."""
    if not file.exists():
        if not file.parent.is_dir():
            raise ConfigError(
                f"the folder of the database {file} must exist, but it does not; create it."
            )
        return
    refuse_pipe(file)
    if file.stat().st_size == 0:
        return
    remedy = f"restore it, or move it away to start afresh: mv {file} {file}.broken"
    try:
        with file.open("rb") as stream:
            head = stream.read(len(_MAGIC))
    except OSError as error:
        raise ConfigError(
            f"the database {file} must be readable, but: {error.strerror}."
        ) from None
    if head != _MAGIC:
        raise ConfigError(
            f"the database {file} must be SQLite, but it is something else; {remedy}"
        )
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=_LOCK_WAIT_S)) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            tables = {
                row[0]
                for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            }
            # An empty transaction: tells whether it is locked or read-only, and changes nothing.
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.OperationalError as error:
        raise ConfigError(
            f"the database {file} must be writable, but: {error}; end the process that holds it "
            "locked, or check the rights of the file and its folder."
        ) from None
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"the database {file} must be intact, but: {error}; {remedy}") from None
    if verdict != "ok":
        raise ConfigError(f"the database {file} must be intact, but: {verdict}; {remedy}")
    if tables and "studies" not in tables:
        raise ConfigError(
            f"the database {file} must hold studies, but it holds {', '.join(sorted(tables))}; "
            "give another one with --storage."
        )
