"""One request at a time on one model."""
import threading


class Turns:
    """Requests of other threads wait for their turn. One of the same thread cannot wait for a stream that only this
    thread would go on with: it takes the turn over, and the stream says so if it is gone on with after all."""

    def __init__(self):
        self.free = threading.Condition()
        self.current = None

    def take(self):
        with self.free:
            self.free.wait_for(lambda: self.current is None or self.current.thread == threading.get_ident())
            self.current = Turn(self, threading.get_ident())
        return self.current


class Turn:
    """Ends with its `with` block."""

    def __init__(self, turns, thread):
        self.turns, self.thread = turns, thread

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.turns.free:
            if self.turns.current is self:
                self.turns.current = None
                self.turns.free.notify()

    def check(self):
        if self.turns.current is not self:
            raise RuntimeError("another request has taken this model over: finish a stream before the next call")
