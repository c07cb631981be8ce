"""What a training loop says while it runs: a bar on a terminal, sparse plain lines anywhere else."""

import datetime
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
FRACTION_BETWEEN_LINES = 0.1


class Progress:
    """Reports steps, loss, tokens per second and the time left of one training run.

    The clock starts at the first `update`, which comes after compilation: throughput and time left leave it out, and
    the steps of a resumed run that were done before. `tokens_per_step` counts all that one step trains on.
    """

    def __init__(
        self,
        total_steps: int,
        label: str,
        tokens_per_step: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps = total_steps
        self.label = label
        self.tokens_per_step = tokens_per_step
        self._stream = stream or sys.stderr
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] = (0, float("nan"))
        self._said: tuple[int, float] | None = None
        self._bar: tqdm | None = None

    def update(self, step: int, loss: float) -> None:
        """`step` steps are done in all, the last with this loss (nats per token)."""
        now = self._clock()
        self._first = self._first or (step, now)
        self._last = (step, float(loss))
        if self._stream.isatty():
            self._draw(now)
        elif self._is_due(step, now):
            self._say(now)

    def close(self) -> None:
        """Say the last state, if it wasn't said, and leave the terminal as it was found."""
        if self._bar is not None:
            self._bar.close()
        elif self._first and self._said and self._said[0] != self._last[0]:
            self._say(self._clock())

    def _is_due(self, step: int, now: float) -> bool:
        if self._said is None or step >= self.total_steps:
            return True
        steps, seconds = step - self._said[0], now - self._said[1]
        return steps >= FRACTION_BETWEEN_LINES * self.total_steps or seconds >= SECONDS_BETWEEN_LINES

    def _steps_per_second(self, now: float) -> float | None:
        """None until two updates have been seen: one alone has no duration."""
        assert self._first is not None
        steps, seconds = self._last[0] - self._first[0], now - self._first[1]
        return steps / seconds if steps > 0 and seconds > 0 else None

    def _speed(self, now: float) -> tuple[str, str]:
        """(tokens per second, time left) as text."""
        rate = self._steps_per_second(now)
        if rate is None:
            return "- tokens/s", "ETA -"
        left = datetime.timedelta(seconds=round(max(0, self.total_steps - self._last[0]) / rate))
        return f"{rate * self.tokens_per_step:,.0f} tokens/s", f"ETA {left}"

    def _say(self, now: float) -> None:
        step, loss = self._last
        text = [self.label, f"step {step}/{self.total_steps}", f"loss {loss:.4f}", *self._speed(now)]
        print("  ".join(text), file=self._stream, flush=True)
        self._said = (step, now)

    def _draw(self, now: float) -> None:
        step, loss = self._last
        if self._bar is None:
            form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {postfix}"
            sizes = {"total": self.total_steps, "initial": step, "dynamic_ncols": True}
            self._bar = tqdm(desc=self.label, file=self._stream, bar_format=form, **sizes)
        self._bar.set_postfix_str("  ".join([f"loss {loss:.4f}", *self._speed(now)]), refresh=False)
        self._bar.update(step - self._bar.n)
