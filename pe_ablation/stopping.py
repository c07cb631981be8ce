"""Being asked to stop: SIGTERM and SIGUSR1, which schedulers send some time before they take a machine away.

Long work asks `requested` or calls `check` at the moments at which it loses nothing. Outside `noted` and `heard`
signals do what they always do.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: the exit code of a process that stopped, and may be started again

_asked: signal.Signals | None = None


class Stopped(BaseException):
    """The process was asked to stop and did; like KeyboardInterrupt no error. The message says how far it got."""


def requested() -> bool:
    """Whether a signal came since `noted` began."""
    return _asked is not None


def check(reached: str) -> None:
    """Raise Stopped, where a signal came: '`reached`, then SIGTERM'."""
    if _asked is not None:
        raise Stopped(f"{reached}, then {_asked.name}")


@contextlib.contextmanager
def heard(by: Callable[[signal.Signals], None], signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[None]:
    """Signals call `by`, in the main thread between two of its instructions; other threads hear none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, lambda number, _: by(signal.Signals(number))) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def interrupting() -> contextlib.AbstractContextManager[None]:
    """Signals raise Stopped where they meet the program: for work of which nothing is worth keeping."""

    def interrupt(number: signal.Signals) -> None:
        raise Stopped(f"{number.name} before anything was started")

    return heard(interrupt)


@contextlib.contextmanager
def noted(*, again: bool) -> Iterator[None]:
    """Signals are noted for `requested` and `check`. With `again`, a second one has its usual effect, which kills."""
    global _asked

    def note(number: signal.Signals) -> None:
        global _asked
        _asked = number
        if again:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)

    with heard(note):
        try:
            yield
        finally:
            _asked = None
