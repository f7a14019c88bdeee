"""Turns: one caller at a time uses a model, even if a stream is paused between two chunks."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

log = logging.getLogger("qwen3_tts_cuda_graphs")

PATIENCE = 10.0  # seconds for which a paused stream keeps its turn, or its row in an engine, while others wait


class Turns:
    """A lock that a paused stream can lose.

    A request waits until the one before it has ended. If that is a stream whose consumer has not asked for the next
    chunk for `patience` seconds, the waiting request takes over with a warning, as the consumer may never come back. If
    it does, the stream raises an error. A stream may be resumed in another thread, as thread pools do, but always under
    the same CUDA stream.
    """

    def __init__(self):
        self.patience = PATIENCE
        self.changed = threading.Condition()
        self.current = None
        self.process = os.getpid()

    def check_process(self) -> None:
        """Refuse a fork of the process, which CUDA, graphs and torch's threads do not survive: calls would hang."""
        if os.getpid() != self.process:
            raise RuntimeError(
                f"this model was loaded by process {self.process}, and this is its fork {os.getpid()}: load the model "
                "after the fork, or start processes with 'spawn'"
            )

    @contextlib.contextmanager
    def take(
        self, give_up: Callable[[], bool] = lambda: False, on_lost: Callable[[], None] = lambda: None
    ) -> Iterator["Turn | None"]:
        """Wait for a turn. Yields None if `give_up` returned True while another caller still had it.

        on_lost: called when another request takes over
        """
        self.check_process()
        turn = None
        with self.changed:
            while self.current and not self.current.is_abandoned() and not give_up():
                self.changed.wait(min(0.1, self.patience / 10))
            if not self.current or not give_up():
                if self.current:
                    log.warning("a stream was neither finished nor closed: the next request takes over")
                    self.current.on_lost()
                turn = self.current = Turn(self, on_lost)
        try:
            yield turn
        finally:
            with self.changed:
                if turn and self.current is turn:
                    self.current = None
                    self.changed.notify_all()


class Turn:
    def __init__(self, turns: Turns, on_lost: Callable[[], None]):
        self.turns = turns
        self.on_lost = on_lost
        self.paused_at = None

    def is_current(self) -> bool:
        return self.turns.current is self

    def is_abandoned(self) -> bool:
        return self.paused_at is not None and time.monotonic() - self.paused_at >= self.turns.patience

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """To be used around a `yield`: the consumer decides when to resume, and whether at all."""
        self.paused_at = time.monotonic()
        yield
        with self.turns.changed:
            if not self.is_current():
                raise RuntimeError(
                    "another request has taken over this model: finish or close a stream before the next"
                )
            self.paused_at = None
