"""What a call was said to take: it is corrected where it does not hold, and else left alone."""

import logging

import pytest

from torchgw._tensors import deadline


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass as a test says."""
    now = [100.0]
    monkeypatch.setattr(deadline, "perf_counter", lambda: now[0])
    return now


def _said(caplog):
    said = [one.getMessage() for one in caplog.records]
    caplog.clear()
    return said


def test_what_holds_is_not_said_again(clock, caplog):
    caplog.set_level(logging.INFO, logger="torchgw")
    with deadline.telling():
        deadline.promise(10.0, 40.0)
        for passed in range(0, 14, 2):
            clock[0] = 100.0 + passed
            deadline.notice()
            deadline.correct(10.0 - passed, "nothing has changed")
    assert _said(caplog) == []


@pytest.mark.parametrize(("left", "why"), [(30.0, "more is found"), (1.0, "it ends early")])
def test_what_does_not_hold_is_corrected_once_with_its_reason(left, why, clock, caplog):
    caplog.set_level(logging.INFO, logger="torchgw")
    with deadline.telling():
        deadline.promise(10.0, 40.0)
        clock[0] += 2.0
        for _ in range(2):
            deadline.correct(left, why)
    assert _said(caplog) == [f"forecast: about {left:.2g} s more, as {why}"]


def test_every_phase_that_may_end_early_notices_that_it_is_late(clock, caplog):
    """However long it takes, what was said last is within a factor of two of it."""
    caplog.set_level(logging.INFO, logger="torchgw")
    with deadline.telling():
        deadline.promise(1.0, 1.0)
        total = 1.0
        for _ in range(400):
            clock[0] += 0.25
            assert not deadline.is_over()
            said, passed = _said(caplog), clock[0] - 100.0
            if said:
                total = passed + float(said[0].split()[2])
            assert total / 2 <= max(passed, 1.0) <= 2 * total
    assert total > 50


def test_nothing_is_corrected_of_which_nothing_was_said(clock, caplog):
    """As on a GPU, and outside of calls."""
    caplog.set_level(logging.INFO, logger="torchgw")
    with deadline.telling():
        clock[0] += 1000.0
        deadline.notice()
        deadline.correct(1000.0, "nothing was said")
    deadline.promise(1.0, 1.0)
    deadline.correct(1000.0, "there is no call")
    assert _said(caplog) == []


def test_a_share_is_of_the_longer_time(clock, caplog):
    """So that what is said next is compared with it."""
    caplog.set_level(logging.INFO, logger="torchgw")
    with deadline.telling():
        deadline.promise(1.0, 40.0)
        deadline.say_share(0.5, "few points say little")
        deadline.correct(20.0, "the same was said")
        clock[0] += 25.0
        deadline.notice()
    assert len(_said(caplog)) == 1


def test_a_moment_does_not_tell_how_loaded_a_processor_is(monkeypatch):
    """A process that waited for 60 ms at its start was told that no limit can be held."""
    passed, used = [0.0], [0.0]
    monkeypatch.setattr(deadline, "monotonic", lambda: passed[0])
    monkeypatch.setattr(deadline, "process_time", lambda: used[0])
    with deadline.within(60):
        passed[0] = 0.06
        assert deadline.leaves(4.0)
        # a whole second tells it
        passed[0], used[0] = 10.0, 1.0
        assert not deadline.leaves(8.0)
