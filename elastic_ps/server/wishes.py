"""What a person wants of the running job, as whoever started this process has last written it to a file."""

from __future__ import annotations

from pathlib import Path

from elastic_ps.api.tuning import Tuning, read_tuning
from elastic_ps.errors import InvalidJob

LIMIT = 1 << 20
"""Most bytes of the file."""


class Wishes:
    """Reads the file when it has been replaced. Not thread-safe.

    Args:
        path: of the file; see `env.ProcessEnvironment.tuning`.
        run: of this run of the job.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        self._text = ""

    def newest(self) -> Tuning | None:
        """What is wanted; None if that is what the last call has said, or there is no file.

        Raises:
            InvalidJob: the file cannot be read, or says nothing that can be understood. It is said once.
        """
        try:
            with self._path.open(encoding="utf-8") as file:
                text = file.read(LIMIT)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidJob(f"what is wanted of the job cannot be read: {error}") from error
        if text == self._text or not text.strip():
            return None
        self._text = text
        return read_tuning(text, source=str(self._path)).model_copy(update={"run": self._run})
