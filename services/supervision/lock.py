"""The lock of a run's folder: one process at a time writes into it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sparring.pipeline.errors import SettingsError

LOCK_FILE: Final = "lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a run's folder, which the system releases when the process ends in whatever way.

    Raises:
        SettingsError: another process holds it.
    """
    with (directory / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise SettingsError(
                f"got {directory}, which the process {file.read().strip() or 'of another run'} is writing; expected a "
                "run that has ended; stop that process and wait for its end, or choose another --run-id"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
