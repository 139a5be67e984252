"""Why a run ended: the value that a failing rank reports, and which of several reports is the cause.

One death makes many errors: every survivor loses a connection, times out or is killed. Reports carry how
close their author stood to the cause, so that a run of a thousand ranks ends with one line.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum

ERROR_FD = "RATRAIN_ERROR_FD"
"""Environment variable: descriptor of the pipe on which workers report to the process that started them."""

FAILED = 1
"""Exit status of a worker that reported a failure."""

_LONGEST_CAUSE = 2000  # A report must stay below PIPE_BUF (4096 bytes), so that writers do not interleave.


class Evidence(IntEnum):
    """How the reporter knows, best first."""

    ERROR = 0  # the rank itself says what went wrong
    SILENT = 1  # its heartbeat stopped while its connection stood
    EXITED = 2  # its parent saw how it ended
    GONE = 3  # its heartbeat's connection closed without a goodbye
    LOST = 4  # a communication with some peer failed, or the process ended because of another


@dataclass(frozen=True)
class Failure:
    """Rank ``rank`` failed, because of ``cause`` (one line). ``where`` says which process, or is empty."""

    rank: int
    cause: str
    evidence: Evidence
    where: str = ""

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"rank {self.rank}{where}: {self.cause}"

    def encode(self) -> bytes:
        """One line of JSON, newline included, at most 4096 bytes."""
        fields = asdict(self) | {"cause": self.cause[:_LONGEST_CAUSE], "evidence": int(self.evidence)}
        line = json.dumps(fields, ensure_ascii=False).encode()
        if len(line) > 4000:  # wide characters
            return Failure(self.rank, self.cause[: _LONGEST_CAUSE // 4], self.evidence, self.where).encode()
        return line + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "Failure":
        """Inverse of ``encode``."""
        fields = json.loads(line)
        return cls(fields["rank"], fields["cause"], Evidence(fields["evidence"]), fields["where"])


def one_line(error: BaseException) -> str:
    """The message of ``error`` without line breaks; with the type's name unless the message is for users."""
    from ratrain.errors import UserError

    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def most_causal(failures: Iterable[Failure]) -> Failure | None:
    """The report with the best evidence; among equals the earliest. None without reports."""
    return min(failures, key=lambda failure: failure.evidence, default=None)


def report(failure: Failure, env: Mapping[str, str], *, speaks: bool = True) -> None:
    """Tell whoever started this worker. Without a launcher that listens, print a line if ``speaks``.

    Writes with bare system calls: it must work while other threads hold the locks of Python's streams.
    """
    try:
        if ERROR_FD in env:
            os.write(int(env[ERROR_FD]), failure.encode())
        elif speaks:
            os.write(2, f"ratrain: {failure}\n".encode())
    except OSError:
        pass  # The listener is gone; the exit status still tells.
