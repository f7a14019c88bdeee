"""The rules of speech/schedule.py: which streams are admitted, held back or evicted. No models, threads or clock."""

from unittest import mock

import pytest

from qwen3_tts_cuda_graphs.speech import schedule
from qwen3_tts_cuda_graphs.speech.schedule import RowStatus, Situation

PROMPT = 10  # positions
PASS = 0.04  # seconds per pass: a listener with less than twice as much audio ahead must not wait for a prefill


def listener(lead=9.0, **details):
    """A listener that plays its audio."""
    return RowStatus(lead=lead, **dict(has_delivered=True, has_decoded=True) | details)


NEW = RowStatus()  # has no audio yet
WAITS_FOR_TEXT = listener(0.06, may_advance=False)
PAUSED = listener(0.06, paused_for=1.0)


def situation(listeners, **details):
    """listeners: a number is the lead of a listener in seconds; waiting: a number counts requests with short prompts"""
    listeners = [listener(one) if isinstance(one, float) else one for one in listeners]
    if isinstance(waiting := details.get("waiting"), int):
        details["waiting"] = [PROMPT] * waiting
    return Situation(listeners, **dict(rows=8, pass_seconds=PASS) | details)


@pytest.mark.parametrize(
    "listeners, longest_wait, expected",
    [
        ((), 0.0, 3),
        ((9.0, NEW), 0.0, 3),
        ((9.0, 0.06), 0.0, 0),
        ((9.0, 0.06), schedule.LONGEST_HOLD, 0),
        ((9.0, 0.06), schedule.LONGEST_HOLD + 0.1, 3),
        ((9.0, 2 * PASS), 0.0, 3),
        ((9.0, -5.0), 0.0, 3),  # has run dry already: the machine is too slow for all
        ((9.0, WAITS_FOR_TEXT), 0.0, 3),
        ((9.0, PAUSED), 0.0, 3),
        ((9.0, RowStatus(lead=0.06)), 0.0, 3),  # it does not play yet
    ],
)
def test_nobody_runs_dry(listeners, longest_wait, expected):
    """A prefill must not let a listener run dry: 400 requests at once had 536 underruns."""
    assert schedule.admissions(situation(listeners, waiting=3, longest_wait=longest_wait)) == expected


@pytest.mark.parametrize(
    "listeners, rows, waiting, expected",
    [
        (2, 8, 3, 3),
        (2, 8, 7, 6),
        (8, 8, 7, 0),
        (9, 8, 7, 0),
        (0, 8, 0, 0),
        (0, 1000, 1000, schedule.MAX_POSITIONS // PROMPT),
        (0, 8, [2000, 2000, 97], 2),
        (0, 8, [2000, 2000, 96], 3),
        (0, 8, [5000, 1], 1),
    ],
)
def test_limits_of_admissions(listeners, rows, waiting, expected):
    """As many as wait, as there are rows, and as may be prefilled between two frames."""
    assert schedule.admissions(situation([9.0] * listeners, rows=rows, waiting=waiting)) == expected


@pytest.mark.parametrize(
    "listeners, details, expected",
    [
        ((9.0, 5.0), dict(waiting=1), True),
        ((9.0, 0.15), dict(waiting=1), False),
        ((9.0, schedule.LEAD_TO_KEEP + 2 * PASS), dict(waiting=1), False),
        ((9.0, NEW), dict(waiting=1), False),  # needs this frame itself
        ((9.0, listener(has_decoded=False)), dict(waiting=1), False),
        ((9.0, listener(0.05, paused_for=1.0)), dict(waiting=1), True),
        ((9.0, RowStatus(may_advance=False)), dict(waiting=1), True),
        ((PAUSED,), dict(waiting=1), False),
        ((RowStatus(may_advance=False),), dict(waiting=1), False),
        ((), dict(waiting=1), False),
        # Only if it helps a newcomer.
        ((9.0,), dict(), False),
        ((9.0,), dict(waiting=1, rows=1), False),
        ((9.0,), dict(preparing=1, rows=1), True),
        ((9.0, listener(may_advance=False, has_delivered=False)), dict(), True),  # no audio yet, and no text for it
    ],
)
def test_those_far_ahead_wait(listeners, details, expected):
    """Either all streams are held back or none, as a frame takes as long for one row as for several."""
    assert schedule.holds_back(situation(listeners, **details)) == expected


@pytest.mark.parametrize(
    "details, patience, expected",
    [
        (dict(waiting=1), 10.0, [1]),
        (dict(waiting=5), 10.0, [1, 0]),
        (dict(waiting=5), 25.0, [1]),
        (dict(waiting=5), 40.0, []),
        (dict(waiting=0), 10.0, []),
        (dict(waiting=5, rows=6), 10.0, []),
    ],
)
def test_evictions(details, patience, expected):
    """No stream loses its row within `patience`, or if no request waits for one. A stream whose text comes slowly is
    idle, too."""
    idle = listener(paused_for=20.0), listener(-30.0, lacks_text=True), listener(-10.0, paused_for=10.0)
    assert schedule.evictions(situation([*idle, 9.0, -50.0], **dict(rows=5) | details), patience) == expected


@pytest.mark.parametrize("pass_seconds, expected", [(0.005, True), (0.031, True), (0.0315, False), (0.08, False)])
def test_chunks_wait_for_others_where_frames_are_fast(pass_seconds, expected):
    """The first chunks have 0.64 s of audio. Up to 16 frames are computed before the next one is decoded."""
    assert schedule.can_decode_together(situation([9.0], pass_seconds=pass_seconds)) == expected


def underruns_of_a_burst(listeners=400, frame=0.03, prefill=0.07, prompt=128):
    """Simulate requests that all come at once. A frame of 80 ms takes 30 ms, and a prefill of 32 prompts 70 ms more.
    Returns the number of underruns, and when the last listener got its first audio."""
    waiting, active, now, pass_seconds, dry = listeners, [], 0.0, 0.0, 0
    while waiting or None in active:  # times at which their audio runs out
        streams = [NEW if end is None else listener(end - now) for end in active]
        state = Situation(streams, listeners, 0, [prompt] * waiting, now, pass_seconds)
        new = schedule.admissions(state)
        is_held_back = not new and schedule.holds_back(state)
        took = 0.002 if is_held_back else frame + prefill * (new > 0)
        now += took
        pass_seconds = max(took, 0.9 * pass_seconds)
        waiting -= new
        active += [None] * new
        if not is_held_back:
            dry += sum(end is not None and end < now for end in active)
            active = [max(end or now, now) + 0.08 for end in active]
    return dry, now


def test_a_burst_runs_nobody_dry():
    """The rules work together over time, and each is needed."""
    dry, time_of_last = underruns_of_a_burst()
    assert dry == 0 and time_of_last < schedule.LONGEST_HOLD
    with mock.patch.object(schedule, "LONGEST_HOLD", -1.0):
        assert underruns_of_a_burst()[0] > 100
