"""Lets the kernel end a process that can no longer end itself."""

import ctypes
import signal


class DeadMansSwitch:
    """A kernel timer that kills this process by SIGKILL unless it is re-armed within ``seconds``.

    Unlike a signal from the process itself this reaches one that is stopped (SIGSTOP) or whose threads all
    hang, on any host and under any launcher. POSIX ``timer_create`` with ``SIGEV_SIGNAL``; the timer belongs
    to this process only, forks do not inherit it. Where the C library has no such timer it does nothing.
    """

    _CLOCK_MONOTONIC = 1

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _SigEvent(signo=signal.SIGKILL, notify=0)  # 0: SIGEV_SIGNAL
        self._armed = (
            hasattr(self._libc, "timer_create")
            and self._libc.timer_create(self._CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))
            == 0
        )
        self.rearm()

    def rearm(self) -> None:
        """Begin the count anew."""
        self._set(self._seconds)

    def disarm(self) -> None:
        """Stop the count; the process may outlive it."""
        self._set(0.0)

    def _set(self, seconds: float) -> None:
        if self._armed:
            whole = int(seconds)
            value = _TimerSpec(0, 0, whole, int((seconds - whole) * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(value), None)


class _SigEvent(ctypes.Structure):
    """``struct sigevent`` of Linux, 64 bytes."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    ]


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: interval and value, each in s and ns."""

    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]
