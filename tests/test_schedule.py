"""Who is admitted, held back or evicted: the rules of speech/schedule.py, without models, threads or a clock."""

from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from qwen3_tts_cuda_graphs.speech import schedule

PASS = 0.04  # seconds per pass: a listener with less than twice as much audio ahead must not wait for a prefill


def listener(rules, lead=9.0, **details):
    """Somebody who has been hearing audio."""
    return rules.RowStatus(lead=lead, **dict(has_heard=True, has_sound=True) | details)


def situation(rules, *listeners, **details):
    """Numbers are listeners with so many seconds of audio ahead, None is one who has heard nothing yet."""
    kinds = {float: lambda lead: listener(rules, lead), type(None): lambda _: rules.RowStatus()}
    listeners = [kinds[type(one)](one) if type(one) in kinds else one for one in listeners]
    return rules.Situation(listeners, **dict(rows=8, pass_seconds=PASS) | details)


def check_nobody_runs_dry(rules):
    """A prefill must not let a listener run dry: 400 who asked at once had 536 underruns."""
    waits_for_text = listener(rules, 0.06, may_advance=False)
    is_paused = listener(rules, 0.06, paused_for=1.0)
    for listeners, waits, expected in [
        ((), 0.0, 3),
        ((9.0, None), 0.0, 3),
        ((9.0, 0.06), 0.0, 0),
        ((9.0, 0.06), rules.LONGEST_HOLD, 0),
        ((9.0, 0.06), rules.LONGEST_HOLD + 0.1, 3),
        ((9.0, 0.08), 0.0, 3),
        ((9.0, -5.0), 0.0, 3),  # it already has: the machine is too slow for all
        ((9.0, waits_for_text), 0.0, 3),
        ((9.0, is_paused), 0.0, 3),
        ((9.0, rules.RowStatus(lead=0.06)), 0.0, 3),  # it does not play yet
    ]:
        now = situation(rules, *listeners, waiting=3, longest_wait=waits)
        assert rules.admissions(now) == expected, (listeners, waits)


def check_limits_of_admissions(rules):
    """As many as wait, as there are rows, and as may be prefilled between two frames."""
    for listeners, rows, waiting, expected in [
        (2, 8, 3, 3),
        (2, 8, 7, 6),
        (8, 8, 7, 0),
        (9, 8, 7, 0),
        (0, 8, 0, 0),
        (0, 100, 100, rules.MAX_ADMISSIONS),
    ]:
        now = situation(rules, *[9.0] * listeners, rows=rows, waiting=waiting)
        assert rules.admissions(now) == expected, (listeners, rows, waiting)


def check_those_far_ahead_wait(rules):
    """All or none: a frame takes as long for one row as for several."""
    waits_for_text = rules.RowStatus(may_advance=False)
    for listeners, expected in [
        ((9.0, 5.0), True),
        ((9.0, 0.15), False),
        ((9.0, rules.LEAD_TO_KEEP + 2 * PASS), False),
        ((9.0, None), False),  # the one it would be for
        ((9.0, listener(rules, has_sound=False)), False),
        ((9.0, listener(rules, 0.05, paused_for=1.0)), True),
        ((9.0, waits_for_text), True),
        ((listener(rules, paused_for=1.0),), False),
        ((waits_for_text,), False),
        ((), False),
    ]:
        assert rules.holds_back(situation(rules, *listeners, waiting=1)) == expected, listeners


def check_for_whom_they_wait(rules):
    unheard = listener(rules, may_advance=False, has_heard=False)  # it has no audio yet, and no text for it
    for listeners, details, expected in [
        ((9.0,), dict(), False),
        ((9.0,), dict(waiting=1), True),
        ((9.0,), dict(waiting=1, rows=1), False),
        ((9.0,), dict(preparing=1, rows=1), True),
        ((9.0, unheard), dict(), True),
    ]:
        assert rules.holds_back(situation(rules, *listeners, **details)) == expected, (listeners, details)


def check_evictions(rules):
    """Nobody loses a row that no request needs, or within `patience`. A text that comes slowly is idle, too."""
    paused = [
        listener(rules, paused_for=20.0),
        listener(rules, -30.0, lacks_text=True),
        listener(rules, -10.0, paused_for=10.0),
    ]
    for details, patience, expected in [
        (dict(waiting=1), 10.0, [1]),
        (dict(waiting=5), 10.0, [1, 0]),
        (dict(waiting=5), 25.0, [1]),
        (dict(waiting=5), 40.0, []),
        (dict(waiting=0), 10.0, []),
        (dict(waiting=5, rows=6), 10.0, []),
    ]:
        now = situation(rules, *paused, 9.0, -50.0, **dict(rows=5) | details)
        assert rules.evictions(now, patience) == expected, (details, patience)


def check_chunks_wait_for_others_where_frames_are_fast(rules):
    """The first chunks are 0.64 s; until the next one is decoded there are up to 15 frames, and this one."""
    for pass_seconds, expected in [(0.005, True), (0.031, True), (0.0315, False), (0.08, False)]:
        assert rules.can_decode_together(situation(rules, 9.0, pass_seconds=pass_seconds)) == expected, pass_seconds


CHECKS = [check for name, check in globals().copy().items() if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_rules(check):
    check(schedule)


MUTATIONS = [
    ("0 < listener.lead < now", "listener.lead < now"),
    ("0 < listener.lead < now", "0 < listener.lead <= now"),
    ("if listener.has_heard and listener.may_advance", "if listener.may_advance"),
    ("if listener.has_heard and listener.may_advance", "if listener.has_heard"),
    ("has_heard and listener.may_advance and listener.paused_for is None", "has_heard and listener.may_advance"),
    ("2 * self.pass_seconds", "self.pass_seconds"),
    ("if would_run_dry and now.longest_wait <= LONGEST_HOLD", "if would_run_dry"),
    ("now.longest_wait <= LONGEST_HOLD", "now.longest_wait < LONGEST_HOLD"),
    ("if would_run_dry", "if False"),
    ("max(0, min(now.waiting, now.rows - len(now.listeners), MAX_ADMISSIONS))", "min(now.waiting, MAX_ADMISSIONS)"),
    ("max(0, min(", "(min("),
    (", MAX_ADMISSIONS))", "))"),
    ("min(now.waiting, ", "min("),
    (
        "[listener for listener in now.listeners if listener.may_advance and",
        "[listener for listener in now.listeners if",
    ),
    (
        "now.listeners if listener.may_advance and listener.paused_for is None]",
        "now.listeners if listener.may_advance]",
    ),
    ("if not advancing or not now.has_newcomers", "if not now.has_newcomers"),
    ("if not advancing or not now.has_newcomers", "if not advancing"),
    ("return all(listener.has_sound", "return any(listener.has_sound"),
    ("listener.has_sound and listener.lead >", "listener.lead >"),
    ("listener.lead > lead_to_keep", "listener.lead >= lead_to_keep"),
    ("LEAD_TO_KEEP + now.lead_to_admit", "LEAD_TO_KEEP"),
    ("self.preparing or self.can_admit", "self.can_admit"),
    ("self.preparing or self.can_admit or", "self.preparing or"),
    ("self.can_admit or not all(listener.has_heard for listener in self.listeners)", "self.can_admit"),
    ("self.waiting > 0 and len(self.listeners) < self.rows", "self.waiting > 0"),
    ("FRAMES_BETWEEN_CHUNKS * now.pass_seconds", "8 * now.pass_seconds"),
    ("if len(now.listeners) < now.rows", "if False"),
    ("enumerate(now.listeners)), reverse=True)", "enumerate(now.listeners)))"),
    ("if idle_for > patience", "if idle_for >= patience"),
    ("patience][: now.waiting]", "patience]"),
    ("-self.lead if self.lacks_text else 0.0", "0.0"),
    ("-self.lead if self.lacks_text else 0.0", "-self.lead"),
]


@pytest.mark.parametrize("original, mutated", MUTATIONS, ids=count())
def test_a_changed_rule_is_found(original, mutated):
    source = Path(schedule.__file__).read_text()
    assert source.count(original) == 1
    rules = ModuleType("schedule")
    exec(source.replace(original, mutated), vars(rules))

    def is_found(check):
        try:
            check(rules)
        except AssertionError:
            return True

    assert any(map(is_found, CHECKS))


def underruns_of_a_burst(rules, listeners=400, frame=0.03, prefill=0.07):
    """Everybody asks at once. A frame of 80 ms takes 30, and a prefill 70 more. Returns who ran dry, and the time at
    which the last one heard something."""
    waiting, active, now, pass_seconds, dry = listeners, [], 0.0, 0.0, 0
    while waiting or None in active:  # times at which their audio runs out
        streams = [rules.RowStatus() if end is None else listener(rules, end - now) for end in active]
        state = rules.Situation(streams, listeners, 0, waiting, now, pass_seconds)
        new = rules.admissions(state)
        is_held_back = not new and rules.holds_back(state)
        took = 0.002 if is_held_back else frame + prefill * (new > 0)
        now += took
        pass_seconds = max(took, 0.9 * pass_seconds)
        waiting -= new
        active += [None] * new
        if not is_held_back:
            dry += sum(end is not None and end < now for end in active)
            active = [max(end or now, now) + 0.08 for end in active]
    return dry, now


def test_a_burst_runs_nobody_dry(monkeypatch):
    """The rules together, over time; and that they are needed."""
    dry, time_of_last = underruns_of_a_burst(schedule)
    assert dry == 0 and time_of_last < schedule.LONGEST_HOLD
    monkeypatch.setattr(schedule, "LONGEST_HOLD", -1.0)
    assert underruns_of_a_burst(schedule)[0] > 100
