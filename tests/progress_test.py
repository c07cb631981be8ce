import io

import pytest

from pe_ablation.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def reported(total_steps, updates, *, stream=None, tokens_per_step=100):
    """What a run with these (seconds, step, loss) updates prints."""
    clock, stream = Clock(), stream or io.StringIO()
    progress = Progress(total_steps, "rope-L64", tokens_per_step, stream, clock)
    for seconds, step, loss in updates:
        clock.now = 1000.0 + seconds
        progress.update(step, loss)
    progress.close()
    return stream.getvalue()


def test_lines_say_speed_loss_and_time_left():
    first, last = reported(100, [(60, 1, 5.0), (70, 51, 3.25)]).splitlines()
    assert first == "rope-L64  step 1/100  loss 5.0000  - tokens/s  ETA -"
    # 50 steps in 10 s since the first update: the minute before it, spent compiling, is not in the rate.
    assert last == "rope-L64  step 51/100  loss 3.2500  500 tokens/s  ETA 0:00:10"


def test_steps_before_a_resume_are_not_in_the_rate():
    assert "ETA 0:00:20" in reported(1000, [(5, 901, 1.0), (45, 967, 1.0)])


def test_fast_runs_print_a_line_every_tenth():
    lines = reported(100, [(step / 100, step, 1.0) for step in range(1, 101)]).splitlines()
    assert [line.split()[2] for line in lines] == [f"{step}/100" for step in (1, *range(11, 100, 10), 100)]


def test_slow_runs_print_a_line_every_ten_seconds():
    lines = reported(10**6, [(step, step, 1.0) for step in range(1, 26)]).splitlines()
    assert [line.split()[2] for line in lines] == [f"{step}/1000000" for step in (1, 11, 21, 25)]


def test_the_last_line_is_said_once():
    assert reported(2, [(0, 1, 1.0), (1, 2, 0.5)]).count("step 2/2") == 1


def test_a_run_that_ends_early_says_where():
    assert "step 3/1000  loss nan" in reported(1000, [(0, 1, 1.0), (1, 3, float("nan"))])


def test_a_run_without_updates_prints_nothing():
    assert reported(10, []) == ""


@pytest.mark.parametrize("first", [1, 50])
def test_a_terminal_gets_a_bar(first):
    text = reported(100, [(30, first, 5.0), (40, 100, 3.25)], stream=Terminal(), tokens_per_step=10)
    assert text.count("\n") == 1 and "\r" in text
    last = text.rsplit("\r", 1)[-1]
    assert "rope-L64" in last and "100%" in last and "100/100" in last
    assert "loss 3.2500" in last and f"{100 - first} tokens/s" in last and "ETA 0:00:00" in last
