"""What `accelerate` stores as `tts.speech`: what whole calls, streams and the engine of a model have in common."""

import threading
from collections.abc import Iterator

import torch

from qwen3_tts_cuda_graphs.prompts.request import Request
from qwen3_tts_cuda_graphs.speech.runner import Runner
from qwen3_tts_cuda_graphs.speech.turns import Turns
from qwen3_tts_cuda_graphs.speech.utterance import Utterance

PHILOX_OFFSET_OF_A_REQUEST = 1 << 33  # more numbers than it draws; a multiple of 4


class Speech:
    """The runner of a model, and whose turn it is to use it."""

    def __init__(self, tts, runner: Runner):
        codec = tts.model.speech_tokenizer
        self.tts = tts
        self.device = runner.device
        self.on_gpu = runner.on_gpu
        self.turns = Turns()
        self.generator_lock = threading.Lock()
        self.runner = runner
        self.rate = codec.get_output_sample_rate()
        self.seconds_per_frame = codec.get_decode_upsample_rate() / self.rate

    @property
    def path(self) -> str:
        """What makes a frame, in words."""
        return self.runner.graphs.path

    def utterance(
        self, request: Request, chunk_sizes: Iterator[int] | None = None, seed: int | None = None
    ) -> Utterance:
        """A request as an utterance, which the runner can admit."""
        utterance = Utterance(chunk_sizes)
        utterance.generator = self.seeded_generator(seed)
        utterance.load(request, self.runner)
        return utterance

    def seeded_generator(self, seed: int | None = None) -> torch.Generator:
        """A generator for one request: seeded, or in the present state of torch's own.

        On a GPU it is a copy, and torch's default one skips more numbers than a request draws: other threads may draw
        from that meanwhile.
        """
        if seed is not None:
            return torch.Generator(self.device).manual_seed(int(seed))
        if not self.on_gpu:
            return torch.default_generator
        default = torch.cuda.default_generators[self.device.index]
        with self.generator_lock:
            state = default.get_state()  # seed and offset, 8 bytes each
            own = torch.Generator(self.device).set_state(state)
            state[8:].view(torch.int64).add_(PHILOX_OFFSET_OF_A_REQUEST)
            default.set_state(state)
        return own
