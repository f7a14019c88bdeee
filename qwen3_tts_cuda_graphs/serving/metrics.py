"""The metrics that Prometheus reads at /metrics."""

import asyncio
import threading
import time
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from qwen3_tts_cuda_graphs.common.published import FRAME_RATE

FIRST_AUDIO_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
FRAME_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.12, 0.25, 1)


class Metrics:
    """In a registry of their own, so that one process can have several servers."""

    def __init__(self, models: list):
        """models: serving.model.Model"""
        self.registry = CollectorRegistry()

        def add(kind, name, text, *labels, **options):
            return kind(f"qwen3_tts_{name}", text, labels, registry=self.registry, **options)

        self.requests = add(Counter, "requests", "Texts to speak, by how they ended", "outcome")
        self.first_audio = add(
            Histogram, "first_audio_seconds", "From the request to its first audio", buckets=FIRST_AUDIO_BUCKETS
        )
        self.frame = add(
            Histogram, "frame_seconds", "Time per frame of a stream after the first", buckets=FRAME_BUCKETS
        )
        self.underruns = add(Counter, "underruns", "Chunks later than a player that began with the first one needed")
        self.stopped = add(Counter, "stopped", "Utterances that limit_speech has stopped")
        self.audio = add(Counter, "audio_seconds", "Audio made")

        def total(name, text, value) -> None:
            add(Gauge, name, text).set_function(lambda: sum(map(value, models)))

        total("streams_active", "Streams that share the GPU", attrgetter("engine.active"))
        total("streams_waiting", "Requests that wait for a place", attrgetter("engine.waiting"))
        total("worker_restarts", "Workers started in place of one that had ended", attrgetter("engine.restarts"))
        total("worker_memory_bytes", "Resident memory of the workers", attrgetter("engine.memory"))
        add(Gauge, "tasks", "Tasks of the event loop").set_function(lambda: len(asyncio.all_tasks()))
        add(Gauge, "threads", "Threads of the process").set_function(threading.active_count)
        ProcessCollector(registry=self.registry)  # memory, CPU time, open files
        for outcome in ("complete", "cancelled", "invalid", "refused", "failed"):
            self.requests.labels(outcome)


class ChunkTimes:
    """Measures when the chunks of an answer arrive, and whether a player that began with the first one had to wait."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics
        self.asked_at = time.perf_counter()
        self.blocked = 0.0  # seconds that the client did not read

    def made(self, seconds: float, before: float, is_speech: bool = True) -> None:
        """A chunk of this many seconds has arrived. before: seconds of all earlier chunks"""
        now = time.perf_counter()
        made_at = now - self.blocked  # on a clock that stops while the client does not read
        if before == 0:
            self.metrics.first_audio.observe(now - self.asked_at)
            self.playback_began = made_at
        elif is_speech:
            self.metrics.frame.observe((made_at - self.last_made) / (seconds * FRAME_RATE))
            if made_at > self.playback_began + before:
                self.metrics.underruns.inc()
        self.last_chunk, self.last_made = now, made_at
        self.metrics.audio.inc(seconds)

    def read(self) -> None:
        """The client has read the chunk."""
        self.blocked += time.perf_counter() - self.last_chunk
