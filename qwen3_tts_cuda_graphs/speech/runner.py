"""Rows of one model: requests are admitted into rows, advance together, hand over their sound, and are released.

    runner.admit(utterances)              prefill their prompts
    runner.step(utterances, hand_over)    a frame of each; full chunks go to the codec, and their audio to `hand_over`
    runner.release(utterance)             also before its end

No threads and no locks: one caller at a time (turns.py). Whole calls, streams and the engine differ in which utterances
they let advance, and in what they do with the audio.

On a GPU the host runs one frame behind, so that the GPU never waits for it: that an utterance has ended is known when
the frame after its last one is running, which is then dropped.
"""

import collections
import functools
import heapq
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from cudagraph_talker import round_up
from qwen3_tts_cuda_graphs.fast import batched
from qwen3_tts_cuda_graphs.fast.codec import BATCH_CHUNK_SIZES, MAX_BATCH, Codec, PendingAudio
from qwen3_tts_cuda_graphs.fast.graph_set import GraphSet
from qwen3_tts_cuda_graphs.fast.rows import SharedRows, copy_row, draw_seeded
from qwen3_tts_cuda_graphs.prompts.host import to_device
from qwen3_tts_cuda_graphs.speech.prefill import Prefills, copy_to_device
from qwen3_tts_cuda_graphs.speech.utterance import Utterance

log = logging.getLogger("qwen3_tts_cuda_graphs")

FULL_CHUNK = max(BATCH_CHUNK_SIZES)
MAX_MOVES = 8  # utterances that change their row between two frames; each takes the host 0.4 ms


class Batch(NamedTuple):
    """Chunks that the codec decodes together."""

    utterances: list[Utterance]  # whose they are
    audio: PendingAudio


HandOver = Callable[[Batch], None]


class FrameInFlight(NamedTuple):
    """A frame whose `ended` flags the host has not read yet."""

    done: torch.cuda.Event | None
    ended: torch.Tensor  # (B), on the host once `done` has come
    rows: dict[Utterance, int]  # the row that each had then: `close_gaps` moves them


class KernelStopped(RuntimeError):
    """A kernel whose thread blocks wait for each other has waited too long. What it computed since is worthless."""

    def __init__(self, reason: str, utterances: Iterable[Utterance] = ()):
        """utterances: those whose speech is lost"""
        super().__init__(f"{reason}: the speech is lost, the next request runs on separate kernels")
        self.reason = reason
        self.utterances = utterances


class Runner:
    @torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
    @torch.no_grad()
    def __init__(
        self,
        talker,
        speech_tokenizer,
        row_count: int,
        max_seq_len: int,
        fused: bool | None,
        keepalive: list[torch.Tensor],
    ):
        """Capture what decodes up to `row_count` requests at once.

        fused: as in `accelerate`
        keepalive: tensors that the captured graphs read, besides the weights
        """
        self.device = talker.device
        self.on_gpu = self.device.type == "cuda"
        self.row_count = row_count
        self.max_seq_len = max_seq_len
        self.keepalive = keepalive
        self.settings_on_host = functools.lru_cache(64, typed=True)(functools.partial(settings_on_host, talker))
        has_spare = row_count > 1  # padding of a prefill is read into a row that belongs to no request
        self.rows = SharedRows(talker.config, row_count + has_spare, round_up(max_seq_len), talker.dtype, self.device)
        self.rows.advance.fill_(False)
        self.views = [self.rows[row] for row in range(row_count)]
        self.graphs = GraphSet(talker, self.rows, row_count, fused)
        log.info("capturing the codec")
        self.codec = Codec(speech_tokenizer, row_count)
        log.info("capturing prefills")
        with_kernels = not (self.graphs.reads_masked_positions() or batched.SOURCE.why_not(talker.model))
        self.prefills = Prefills(talker, self.rows, row_count, self.graphs.pool, with_kernels)
        self.new_lengths = torch.zeros(row_count + has_spare, dtype=torch.long, device=self.device)
        self.begin = self.graphs.pool.capture(lambda: self.rows.begin(self.new_lengths))
        self.row_settings = [None] * row_count  # the settings that each row has

        self.active = []  # admitted utterances, each in its row
        self.beat = 0  # frames launched since the runner was idle, to decode chunks together
        self.free = list(range(row_count))  # rows that belong to no utterance: a heap
        self.in_flight = collections.deque()  # FrameInFlight, in order
        self.advance_on_host = None  # host copy of rows.advance
        self.last_stream = None  # the CUDA stream of the last caller
        self.sleeps = False
        self.shared_generator = torch.Generator(self.device)  # of all utterances without a generator of their own
        self.shared_generator.seed()

    def record_event(self, sleeps: bool = False) -> torch.cuda.Event | None:
        """sleeps: a thread that waits for it sleeps instead of polling"""
        if not self.on_gpu:
            return None
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(blocking=sleeps))

    def enter(self, sleeps: bool = False) -> None:
        """Call this at the start of a turn: this CUDA stream then waits for that of the last caller.

        sleeps: sleep until a frame is done instead of polling. Polling notices it a little sooner, but keeps a core
            busy, and where cores are shared the scheduler preempts such a thread often.
        """
        self.sleeps = sleeps
        for utterance in [utterance for utterance in self.active if utterance.must_be_released]:
            self.release(utterance)
        if self.on_gpu:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self.last_stream or stream)
            self.last_stream = stream

    # ---- Admission and release

    def require_row(self) -> int:
        """A free row. Raises an error if there is none."""
        if not self.free:
            raise RuntimeError(
                f"all {self.row_count} rows of this model are taken by paused streams: "
                "close some, or load it with more rows"
            )
        return self.free[0]

    def admit(self, utterances: list[Utterance]) -> list[tuple[Utterance, Exception]]:
        """Read prompts, at most as many as there are free rows. Returns those that failed, with their errors."""
        if not utterances:
            return []
        if not self.active:
            self.beat = 0
        states = [utterance.generator and utterance.generator.get_state() for utterance in utterances]
        for utterance in utterances:
            utterance.row = heapq.heappop(self.free)
        try:
            for utterance in utterances:
                self.wait_for_prompt(utterance)
                if utterance.request.reference is not None:  # prime the codec with it and discard that audio
                    self.codec.reset(utterance.row)
                    self.codec.feed([utterance.row], utterance.request.reference[None])
            self.read_prompts(utterances)
            if indices := [one.row for one in utterances if one.request.reference is None]:
                self.codec.reset(*indices)  # after the prompts, which take the GPU longer
        except BaseException as error:
            for utterance, state in zip(utterances, states):
                heapq.heappush(self.free, utterance.row)
                if state is not None:
                    utterance.generator.set_state(state)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            if len(utterances) == 1:
                return [(utterances[0], error)]
            return [failed for utterance in utterances for failed in self.admit([utterance])]  # which one is it?
        for utterance in utterances:
            utterance.request = utterance.settings = None
            self.active.append(utterance)
        return []

    @torch.no_grad()
    def read_prompts(self, utterances: list[Utterance]) -> None:
        """Read all positions but the last, then the last of all prompts together: a step chooses their first tokens."""
        if self.graphs.reads_masked_positions():
            for utterance in utterances:
                self.views[utterance.row].whole_cache.zero_()
        self.prefills.read(utterances)
        lengths = [0] * len(self.new_lengths)
        self.load_rows(utterances)
        for utterance in utterances:
            lengths[utterance.row] = utterance.prompt_length
        copy_to_device(torch.tensor(lengths), self.new_lengths)
        self.draw(self.rows.noise, [utterance for utterance in utterances if utterance.samples_token])
        graphs = self.graphs.of(1 + max(utterance.row for utterance in utterances))
        self.advance_on_host = [length > 0 for length in lengths]
        self.begin()
        graphs.step()
        self.load_text(utterances)  # the step does not need it

    def load_rows(self, utterances: list[Utterance]) -> None:
        """Write the prompts' last positions and the settings. Most requests have the same, which are in the row.

        In few calls, as in `gather_codes`: after each call of torch another thread may have the interpreter for 5 ms.
        """
        targets = [self.views[utterance.row].embedding for utterance in utterances]
        values = [utterance.request.inputs[:1] for utterance in utterances]
        for utterance in utterances:
            if self.row_settings[utterance.row] is not utterance.settings:
                self.row_settings[utterance.row] = None
                targets += self.views[utterance.row].settings()
                values += utterance.settings
        torch._foreach_copy_(targets, values, non_blocking=True)
        for utterance in utterances:
            self.row_settings[utterance.row] = utterance.settings

    def load_text(self, utterances: list[Utterance]) -> None:
        """Write what the frames add to their embeddings: the text, then the padding, which is the same for all. In few
        calls, as in `load_rows`."""
        padding = utterances[0].request.inputs[-1:].to(self.device, non_blocking=True)
        if len(utterances) == 1:
            self.views[utterances[0].row].text.copy_(padding)
        else:
            indices = torch.tensor([utterance.row for utterance in utterances])
            self.rows.text[to_device(indices, self.device)] = padding
        most = self.rows.text.shape[1]
        texts = [utterance.request.inputs[1:-1][:most] for utterance in utterances]
        targets = [self.views[utterance.row].text[: len(text)] for utterance, text in zip(utterances, texts)]
        torch._foreach_copy_(targets, texts, non_blocking=True)

    def wait_for_prompt(self, utterance: Utterance) -> None:
        """Order this CUDA stream behind the one that the prompt was built on."""
        if utterance.prompt_ready:
            utterance.prompt_ready.wait()
            for tensor in (utterance.request.prefix, utterance.request.inputs):
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def release(self, utterance: Utterance) -> None:
        if utterance in self.active:
            self.active.remove(utterance)
            heapq.heappush(self.free, utterance.row)

    # ---- Frames

    @torch.no_grad()
    def step(
        self,
        utterances: list[Utterance],
        hand_over: HandOver,
        advancing: list[Utterance] | None = None,
        together: bool = False,
    ) -> None:
        """Launch a frame; learn who has ended; start to decode complete chunks.

        utterances: all of this caller's
        advancing: those of them that the frame is for. Default: all that may advance.
        together: full chunks may wait for those of others, up to 7 frames, so that the codec decodes them together
        """
        if advancing is None:
            advancing = [utterance for utterance in utterances if utterance.may_advance()]
        if advancing:
            self.launch(advancing, hand_over)
        self.read_ended(keep=1 if advancing and self.on_gpu else 0)
        self.decode_chunks(utterances, hand_over, together)

    def launch(self, utterances: list[Utterance], hand_over: HandOver) -> None:
        for utterance in utterances:
            if utterance.new_text:
                self.write_text(utterance)
        self.close_gaps()
        graphs = self.graphs.of(1 + max(utterance.row for utterance in self.active))
        indices = [utterance.row for utterance in utterances]
        mask = [False] * len(self.rows.advance)
        for row in indices:
            mask[row] = True
        if mask != self.advance_on_host:
            copy_to_device(torch.tensor(mask), self.rows.advance)
            self.advance_on_host = mask

        self.draw(self.rows.code_noise, [utterance for utterance in utterances if utterance.samples_codes])
        graphs.predict()
        self.beat += 1
        for utterance in utterances:
            utterance.launched += 1
        if without_sound := [utterance for utterance in utterances if utterance.decoded == 0]:
            self.decode_chunks(without_sound, hand_over)  # the first sound: its codes are complete
            if graphs.waiting_launches and self.on_gpu:  # such a launch would take all multiprocessors from the codec
                torch.cuda.current_stream(self.device).wait_stream(self.codec.stream)
        self.draw(self.rows.noise, [utterance for utterance in utterances if utterance.samples_token])
        graphs.step()

        ended = torch.empty(len(graphs.rows.ended), dtype=torch.bool, pin_memory=self.on_gpu)
        ended.copy_(graphs.rows.ended, non_blocking=True)
        self.in_flight.append(FrameInFlight(self.record_event(self.sleeps), ended, dict(zip(utterances, indices))))

    def draw(self, noise: torch.Tensor, utterances: list[Utterance]) -> None:
        """Noise (B, N, V) of the next choices. Utterances that share a generator share one draw."""
        indices_of = collections.defaultdict(list)
        for utterance in utterances:
            indices_of[utterance.generator].append(utterance.row)
        # The widest draw first: it begins at row 0, and must not replace what rows with a generator of their own have.
        for generator, indices in sorted(indices_of.items(), key=lambda item: len(item[1]), reverse=True):
            first = indices[0] if len(indices) == 1 else 0
            draw_seeded(noise[first : max(indices) + 1], generator or self.shared_generator)

    def write_text(self, utterance: Utterance) -> None:
        """Put text that has arrived where the frames read it. There may be more of it than they can reach."""
        text = self.rows.text[utterance.row]
        while utterance.new_text:
            new = utterance.new_text.popleft()
            utterance.frames_with_text = new.frames_with_text
            if new.ready:
                new.ready.wait()
                new.embeddings.record_stream(torch.cuda.current_stream(self.device))
            embeddings = new.embeddings[: max(0, len(text) - new.first_frame)]
            text[new.first_frame : new.first_frame + len(embeddings)] = embeddings

    def close_gaps(self) -> None:
        """Move utterances to lower rows where a smaller frame is enough for them: a few at a time, or all wait for
        dozens of moves when half of a crowd has ended."""
        enough = next(size for size in self.graphs.sizes if size >= len(self.active))
        to_move = [utterance for utterance in self.active if utterance.row >= enough]
        for utterance in to_move[:MAX_MOVES]:
            row = heapq.heappushpop(self.free, utterance.row)
            clear = self.graphs.reads_masked_positions()
            copy_row(self.views[utterance.row], self.views[row], utterance.length, clear)
            self.codec.move(utterance.row, row)
            self.row_settings[row] = self.row_settings[utterance.row]
            utterance.row = row

    def read_ended(self, keep: int = 0) -> None:
        """Learn which utterances have ended after the frames launched so far. The last `keep` may still be running."""
        while len(self.in_flight) > keep:
            frame = self.in_flight.popleft()
            if frame.done:
                frame.done.synchronize()
            if reason := self.graphs.why_stopped():  # the state of all who have taken part in a frame since is lost
                took_part = itertools.chain(frame.rows, *(later.rows for later in self.in_flight))
                lost = {utterance for utterance in took_part if utterance in self.active}
                self.in_flight.clear()
                if lost:
                    raise KernelStopped(reason, lost)
                return
            ended = frame.ended.tolist()
            for utterance, row in frame.rows.items():
                utterance.note_ended(ended[row])

    def decode_chunks(self, utterances: list[Utterance], hand_over: HandOver, together: bool = False) -> None:
        """Hand complete chunks to the codec: one of each utterance at a time, as they must be decoded in order."""
        utterances = [
            one for one in utterances if one.may_have_chunk() and not (together and self.waits_for_others(one))
        ]
        while utterances:
            by_size = collections.defaultdict(list)
            for utterance in utterances:
                if size := utterance.next_chunk():
                    by_size[size].append(utterance)
            # Small chunks first: they are those of utterances with little audio ahead of their playback.
            for size, ready in sorted(by_size.items()):
                for first in range(0, len(ready), MAX_BATCH):
                    self.decode_chunk(ready[first : first + MAX_BATCH], size, hand_over)
            utterances = [utterance for ready in by_size.values() for utterance in ready]  # they may have more

    def waits_for_others(self, utterance: Utterance) -> bool:
        """Whether a full chunk waits for others. Every 64 rows are decoded together, in every 8th frame."""
        if utterance.chunk_size < FULL_CHUNK or utterance.finished or utterance.lacks_text():
            return False
        return (self.beat + utterance.row // MAX_BATCH) % FULL_CHUNK != 0

    def decode_chunk(self, utterances: list[Utterance], size: int, hand_over: HandOver) -> None:
        codes = self.gather_codes(utterances, size)
        audio = self.codec.feed([utterance.row for utterance in utterances], codes)
        for utterance in utterances:
            utterance.note_decoded(size)
        hand_over(Batch(utterances, audio))

    def gather_codes(self, utterances: list[Utterance], size: int) -> torch.Tensor:
        """The next codes of each, (B, size, 16)."""
        if len(utterances) == 1:
            (one,) = utterances  # a copy: the codec may read it when the row belongs to another one
            return self.rows.codes[one.row, one.decoded : one.decoded + size][None].clone()
        first = np.array([utterance.row * self.rows.codes.shape[1] + utterance.decoded for utterance in utterances])
        places = torch.from_numpy(first[:, None] + np.arange(size))
        return self.rows.codes.flatten(0, 1)[to_device(places, self.device)]


def settings_on_host(talker, **settings) -> list[torch.Tensor]:
    """The tensors of `SharedRows.settings` for one row. They are cached: most requests have the same settings."""
    row = SharedRows(talker.config, 1, 1, torch.float32, torch.device("cpu"))
    row.configure(**settings)
    return [tensor[0].pin_memory() if talker.device.type == "cuda" else tensor[0] for tensor in row.settings()]
