"""Who is admitted, held back or evicted: values in, a decision out. No threads, no clock, no GPU.

A listener plays from the first chunk on. `lead` is how many seconds of audio it has ahead of its playback; at 0 it runs
dry. A prefill delays the next frame of everybody, and a frame takes as long for one row as for several.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

MAX_POSITIONS = 4096  # of all prompts that are read between two frames, unless one alone has more
LEAD_TO_KEEP = 0.1  # seconds of audio ahead of playback; if all have more, they wait for those without first audio
LEAD_AFTER_START = 0.5  # seconds; the first chunks, which never wait, are 0.64 s of audio
FRAMES_BETWEEN_CHUNKS = 16  # a full chunk has 8, may wait for 7, and the host is one behind
LONGEST_HOLD = 5.0  # seconds that a request waits at most for streams that would run dry


class RowStatus(NamedTuple):
    """What decisions about a stream that has a row depend on."""

    lead: float = 0.0
    may_advance: bool = True
    has_heard: bool = False  # its first audio has been delivered
    has_sound: bool = False  # its first audio is at least being decoded
    paused_for: float | None = None  # seconds for which nobody has read its audio, with all its room full
    lacks_text: bool = False  # it can only advance when more of its text has come

    @property
    def idle_for(self) -> float:
        """Seconds for which it has kept its row unused: nobody reads, or its text comes more slowly than its speech."""
        return max(self.paused_for or 0.0, -self.lead if self.lacks_text else 0.0)


class Situation(NamedTuple):
    listeners: list[RowStatus]
    rows: int
    preparing: int = 0  # requests whose prompts are being built
    waiting: Sequence[int] = ()  # requests that could be admitted: the length of each prompt
    longest_wait: float = 0.0  # seconds that the first of them has waited
    pass_seconds: float = 0.0  # a maximum that decays by a tenth with each pass

    @property
    def can_admit(self) -> bool:
        return len(self.waiting) > 0 and len(self.listeners) < self.rows

    @property
    def has_newcomers(self) -> bool:
        """Whether a listener who has heard nothing yet is on the way or has been admitted."""
        return bool(self.preparing or self.can_admit or not all(listener.has_heard for listener in self.listeners))

    @property
    def lead_to_admit(self) -> float:
        """Seconds of audio with which a listener can wait for a pass that admits others, and for the one after it."""
        return 2 * self.pass_seconds


def admissions(situation: Situation) -> int:
    """How many requests to admit: none if a listener would run dry meanwhile, unless the first has waited long."""
    would_run_dry = any(
        0 < listener.lead < situation.lead_to_admit
        for listener in situation.listeners
        if listener.has_heard and listener.may_advance and listener.paused_for is None
    )
    if would_run_dry and situation.longest_wait <= LONGEST_HOLD:
        return 0
    fitting = sum(total <= MAX_POSITIONS for total in itertools.accumulate(situation.waiting))
    free = situation.rows - len(situation.listeners)
    return max(0, min(len(situation.waiting), max(fitting, 1), free))


def holds_back(situation: Situation) -> bool:
    """Whether to skip this frame, so that newcomers hear something sooner: only if everyone has enough audio ahead."""
    advancing = [listener for listener in situation.listeners if listener.may_advance and listener.paused_for is None]
    if not advancing or not situation.has_newcomers:
        return False
    lead_to_keep = LEAD_TO_KEEP + situation.lead_to_admit
    return all(listener.has_sound and listener.lead > lead_to_keep for listener in advancing)


def can_decode_together(situation: Situation) -> bool:
    """Whether full chunks can wait for those of others without a listener running dry."""
    return FRAMES_BETWEEN_CHUNKS * situation.pass_seconds < LEAD_AFTER_START


def evictions(situation: Situation, patience: float) -> list[int]:
    """Which listeners lose their row to waiting requests: those idle for longer than `patience`, longest first."""
    if len(situation.listeners) < situation.rows:
        return []
    idle = sorted(((listener.idle_for, i) for i, listener in enumerate(situation.listeners)), reverse=True)
    return [i for idle_for, i in idle if idle_for > patience][: len(situation.waiting)]
