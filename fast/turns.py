"""One request at a time on one model."""
import contextlib
import threading
import time
import warnings


class Turns:
    """A request waits until the one before has ended. That may be a stream which nobody will ever go on with, and
    nothing tells: when it has paused for `patience` seconds, the next request takes its turn over, with a warning, and
    the stream says so if it is gone on with after all. Threads are all one: a server's pool goes on with a stream now
    in this one, now in that."""

    def __init__(self, patience=10.0):
        self.patience, self.ended, self.current = patience, threading.Condition(), None

    @contextlib.contextmanager
    def take(self):
        with self.ended:
            while self.current and not self.current.is_given_up():
                self.ended.wait(self.patience / 10)
            if self.current:
                warnings.warn("a stream was neither finished nor closed: the next request did not wait any longer")
            turn = self.current = Turn(self)
        try:
            yield turn
        finally:
            with self.ended:
                if self.current is turn:
                    self.current = None
                    self.ended.notify()


class Turn:
    def __init__(self, turns):
        self.turns, self.paused_at = turns, None

    def is_given_up(self):
        return self.paused_at is not None and time.monotonic() - self.paused_at >= self.turns.patience

    @contextlib.contextmanager
    def paused(self):
        """Around a yield: the caller decides when to go on, and whether at all."""
        self.paused_at = time.monotonic()
        yield
        with self.turns.ended:
            if self.turns.current is not self:
                raise RuntimeError("another request has taken this model over: finish a stream before the next call")
            self.paused_at = None
