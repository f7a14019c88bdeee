"""The server as a Ray Serve application: the same routes, one replica per GPU, on as many machines as the cluster has.

    serve run qwen3_tts_cuda_graphs.serving.ray_app:app model=0.6B max_replicas=8
    serve run qwen3_tts_cuda_graphs.serving.ray_app:app model=tiny device=cpu replicas=2

Ray's proxies forward each request and WebSocket to the less busy of two replicas. A replica whose engine fails restarts
it as `qwen3-tts serve` does; a replica that dies, or does not recover in time, is replaced, and its clients see their
connections break. The arguments are the fields of Placement and the limits of `qwen3-tts serve`, with underscores; the
key is $QWEN3_TTS_API_KEY. Ray's metrics include those of all replicas; /metrics has those of the replica that answers.

Anyone who can reach Ray's own ports (dashboard, cluster) can run code: keep them in a private network, with its token
authentication enabled.
"""

import asyncio
import gc
import os
from pathlib import Path
from typing import Literal

import click
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict, Field, create_model
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from ray.serve.metrics import Gauge
from starlette.applications import Starlette

from qwen3_tts_cuda_graphs.common.published import PRESET_MODEL
from qwen3_tts_cuda_graphs.serving.errors import ApiError
from qwen3_tts_cuda_graphs.serving.memory import MAX_ROWS
from qwen3_tts_cuda_graphs.serving.model import named_models
from qwen3_tts_cuda_graphs.serving.requests import parse
from qwen3_tts_cuda_graphs.serving.routes import create_app
from qwen3_tts_cuda_graphs.serving.service import Service, read_speakers
from qwen3_tts_cuda_graphs.serving.settings import API_KEY_VARIABLE, LIMITS, Settings, check_origin

SECONDS_BETWEEN_METRICS = 5.0


class Placement(BaseModel):
    """The arguments that are not limits. They come from a command line: lists are separated by commas."""

    model_config = ConfigDict(extra="forbid")

    model: str = PRESET_MODEL  # or several
    device: Literal["cuda", "cpu"] = "cuda"  # Ray decides which GPU
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    voices: Path = Settings.voices  # with several machines, a folder that they share
    speaker: str = ""  # speaker.pt files
    cors_origin: str = ""
    open_lists: bool = False

    replicas: int = Field(1, ge=1)  # minimum
    max_replicas: int = Field(0, ge=0)  # up to this many are started under load; 0: the number is fixed
    target_streams: int = Field(0, ge=0)  # per replica, above which more are started; 0: a quarter of max_streams
    cpus_per_replica: float = Field(2.0, gt=0)


Arguments = create_model("Arguments", __base__=Placement, **{item.name: (item.type, item.default) for item in LIMITS})


def app(arguments: dict) -> Application:
    """Called by `serve run` and `serve deploy`. Finds mistakes before anything is started."""
    try:
        wanted = parse(Arguments, arguments)
        limits = {item.name: getattr(wanted, item.name) for item in LIMITS}
        key = os.environ.get(API_KEY_VARIABLE) or None
        origins = tuple(map(check_origin, split(wanted.cors_origin)))
        settings = Settings(key, origins, open_lists=wanted.open_lists, voices=wanted.voices.absolute(), **limits)
        speakers = read_speakers([Path(path) for path in split(wanted.speaker)])
        models = split(wanted.model)
        Service(models, wanted.device, wanted.dtype, settings, speakers)  # raises what it would raise in a replica
        if 0 < wanted.max_replicas < wanted.replicas:
            raise ValueError(f"max_replicas is {wanted.max_replicas}, it must be at least replicas, {wanted.replicas}")
    except (ApiError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    named = named_models(models).items()
    models = [f"{id}={Path(model).absolute() if Path(model).is_dir() else model}" for id, model in named]
    deployment = serve.deployment(
        Replica,
        **scaling(wanted),
        ray_actor_options={"num_cpus": wanted.cpus_per_replica, "num_gpus": int(wanted.device == "cuda")},
        # The server itself limits its streams and answers 429. Ray's queue is for times when no replica can be reached.
        max_ongoing_requests=settings.max_connections,
        max_queued_requests=settings.max_waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    return deployment.bind(models, wanted.device, wanted.dtype, settings, speakers)


def split(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def scaling(wanted: Placement) -> dict:
    """A fixed number of replicas, or more of them while they are busy."""
    if not wanted.max_replicas:
        return {"num_replicas": wanted.replicas}
    config = AutoscalingConfig(
        min_replicas=wanted.replicas,
        max_replicas=wanted.max_replicas,
        target_ongoing_requests=wanted.target_streams or max(1, (wanted.max_streams or MAX_ROWS) // 4),
        upscale_delay_s=5,  # a replica takes half a minute to load
        downscale_delay_s=300,
    )
    return {"autoscaling_config": config}


@serve.ingress()
class Replica:
    """A server on one GPU. Ray sends requests once the constructor has returned."""

    async def __init__(self, models: list[str], device: str, dtype: str | None, settings: Settings, speakers: dict):
        self.service = Service(models, device, dtype, settings, speakers)
        await self.service.start()
        gc.freeze()  # as in server.py
        self.publishing = asyncio.create_task(publish(self.service.metrics.registry))

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_app(self.service)

    def check_health(self) -> None:
        """Raises while an engine is not ready. After three failed checks Ray replaces the replica."""
        self.service.check_all_ready()


async def publish(registry: CollectorRegistry) -> None:
    """Copy the metrics to Ray, which labels them with the replica and serves those of a machine together.

    All are copied as gauges: Ray's counters accept only increments, and Prometheus' rate() does not depend on the type.
    """
    gauges = {}
    while True:
        for family in registry.collect():
            for sample in family.samples:
                if sample.name not in gauges:
                    gauges[sample.name] = Gauge(sample.name, family.documentation, tuple(sample.labels))
                gauges[sample.name].set(sample.value, sample.labels)
        await asyncio.sleep(SECONDS_BETWEEN_METRICS)
