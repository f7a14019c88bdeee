"""The engine's decisions: which requests are admitted, which streams are held back or evicted. Pure functions of their
arguments, without threads, clock or GPU.

A listener plays its audio from the first chunk on. `lead` is how many seconds of audio it has ahead of its playback: at
0 it runs dry. A prefill delays the next frame of all streams. A frame takes about as long for one row as for several.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

MAX_POSITIONS = 4096  # of all prompts that are prefilled between two frames, unless there is only one
LEAD_TO_KEEP = 0.1  # seconds; if all streams have a larger lead, they are held back for those without first audio
LEAD_AFTER_START = 0.5  # seconds; the first chunks are never delayed and have 0.64 s of audio
FRAMES_BETWEEN_CHUNKS = 16  # at most: a full chunk has 8, may be delayed by 7, and the host is one frame behind
LONGEST_HOLD = 5.0  # seconds that a request waits at most so that no stream runs dry


class RowStatus(NamedTuple):
    """A stream that has a row."""

    lead: float = 0.0
    may_advance: bool = True
    has_delivered: bool = False  # its first audio has been delivered
    has_decoded: bool = False  # its first audio has at least been handed to the codec
    paused_for: float | None = None  # seconds since too much of its audio is unread; None: it is not paused
    lacks_text: bool = False  # it cannot advance before more of its text has come

    @property
    def advances(self) -> bool:
        return self.may_advance and self.paused_for is None

    @property
    def idle_for(self) -> float:
        """Seconds for which its row has been unused: nobody reads its audio, or its text comes too slowly."""
        return max(self.paused_for or 0.0, -self.lead if self.lacks_text else 0.0)


class Situation(NamedTuple):
    listeners: list[RowStatus]
    rows: int  # taken by these listeners or free
    preparing: int = 0  # requests whose prompts are being built
    waiting: Sequence[int] = ()  # requests that wait for a row: the length of each prompt
    longest_wait: float = 0.0  # seconds that the first of them has waited
    pass_seconds: float = 0.0  # duration of the longest of the engine's recent passes

    @property
    def has_newcomers(self) -> bool:
        """Whether there is a listener without first audio, admitted or soon to be."""
        can_admit = len(self.waiting) > 0 and len(self.listeners) < self.rows
        return bool(self.preparing or can_admit or not all(listener.has_delivered for listener in self.listeners))

    @property
    def lead_to_admit(self) -> float:
        """Lead with which a listener does not run dry during a pass that admits others and the pass after it."""
        return 2 * self.pass_seconds


def admissions(situation: Situation) -> int:
    """How many requests to admit: none if a listener would run dry meanwhile, unless a request has waited too long."""
    would_run_dry = any(
        0 < listener.lead < situation.lead_to_admit
        for listener in situation.listeners
        if listener.has_delivered and listener.advances
    )
    if would_run_dry and situation.longest_wait <= LONGEST_HOLD:
        return 0
    fitting = sum(total <= MAX_POSITIONS for total in itertools.accumulate(situation.waiting))
    free = situation.rows - len(situation.listeners)
    return max(0, min(len(situation.waiting), max(fitting, 1), free))


def holds_back(situation: Situation) -> bool:
    """Whether to skip this frame so that newcomers get their first audio sooner: only if all have enough lead."""
    advancing = [listener for listener in situation.listeners if listener.advances]
    if not advancing or not situation.has_newcomers:
        return False
    lead_to_keep = LEAD_TO_KEEP + situation.lead_to_admit
    return all(listener.has_decoded and listener.lead > lead_to_keep for listener in advancing)


def can_decode_together(situation: Situation) -> bool:
    """Whether full chunks can wait for those of other streams without a listener running dry."""
    return FRAMES_BETWEEN_CHUNKS * situation.pass_seconds < LEAD_AFTER_START


def evictions(situation: Situation, patience: float) -> list[int]:
    """Indices of the listeners that lose their row to waiting requests, as they were idle for more than `patience`."""
    if len(situation.listeners) < situation.rows:
        return []
    idle = sorted(((listener.idle_for, i) for i, listener in enumerate(situation.listeners)), reverse=True)
    return [i for idle_for, i in idle if idle_for > patience][: len(situation.waiting)]
