"""What `accelerate` stores as `tts.speech`, for whole calls, streams and the engine of a model."""

import threading
from collections.abc import Iterator

import torch

from qwen3_tts_cuda_graphs.prompts.request import Request
from qwen3_tts_cuda_graphs.speech.runner import Runner
from qwen3_tts_cuda_graphs.speech.turns import Turns
from qwen3_tts_cuda_graphs.speech.utterance import Utterance

PHILOX_OFFSET_OF_A_REQUEST = 1 << 33  # more random numbers than a request draws; a multiple of 4


class Speech:
    """The runner of a model, and whose turn it is to use it."""

    def __init__(self, tts, runner: Runner):
        self.tts = tts
        self.device = runner.device
        self.on_gpu = runner.on_gpu
        self.turns = Turns()
        self.generator_lock = threading.Lock()
        self.runner = runner
        self.rate = tts.model.speech_tokenizer.get_output_sample_rate()
        self.samples_per_frame = runner.codec.samples_per_frame
        self.seconds_per_frame = self.samples_per_frame / self.rate

    @property
    def path(self) -> str:
        """How frames are computed, as text for logs and tables."""
        return self.runner.graphs.path

    def utterance(
        self, request: Request, chunk_sizes: Iterator[int] | None = None, seed: int | None = None
    ) -> Utterance:
        """A request as an utterance, which the runner can admit."""
        utterance = Utterance(chunk_sizes)
        utterance.generator = self.seeded_generator(seed)
        utterance.load(request, self.runner)
        return utterance

    def seeded_generator(self, seed: int | None) -> torch.Generator:
        """A generator for one request. Without a seed it continues torch's default generator.

        On a GPU it is a copy of the default generator, as other threads may draw from that one meanwhile. The default
        generator then skips more numbers than a request draws.
        """
        if seed is not None:
            return torch.Generator(self.device).manual_seed(int(seed))
        if not self.on_gpu:
            return torch.default_generator
        default = torch.cuda.default_generators[self.device.index]
        with self.generator_lock:
            state = default.get_state()  # (16), bytes: seed and offset
            own = torch.Generator(self.device).set_state(state)
            state[8:].view(torch.int64).add_(PHILOX_OFFSET_OF_A_REQUEST)
            default.set_state(state)
        return own
