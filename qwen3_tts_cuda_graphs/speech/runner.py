"""The rows of one model. Requests are admitted into rows, advance together, and are released.

    runner.admit(utterances)              prefill their prompts
    runner.step(utterances, hand_over)    one frame of each; decode complete chunks, pass their audio to `hand_over`
    runner.release(utterance)             at its end or before

Has no threads and no locks: one caller at a time uses it (turns.py). Whole calls, streams and the engine differ in
which utterances they let advance, and in what they do with the audio.

On a GPU the host is one frame behind, so that the GPU never waits for it: the host learns that an utterance has ended
while the frame after its last one is running. That frame is dropped.
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
MAX_MOVES = 8  # utterances that are moved to another row between two frames; each move takes the host 0.4 ms


class Batch(NamedTuple):
    """Chunks that the codec decodes together, one of each utterance."""

    utterances: list[Utterance]
    audio: PendingAudio


HandOver = Callable[[Batch], None]


class FrameInFlight(NamedTuple):
    """A frame whose `ended` flags the host has not read yet."""

    done: torch.cuda.Event | None
    ended: torch.Tensor  # (B), on the host; valid once `done` has occurred
    rows: dict[Utterance, int]  # the row of each in that frame, as `close_gaps` may move it later


class KernelStopped(RuntimeError):
    """A kernel whose thread blocks wait for each other has waited too long. Its results are invalid."""

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
        """Capture the graphs that decode up to `row_count` requests at once.

        fused: as in `accelerate`
        keepalive: tensors that the captured graphs read, besides the weights
        """
        self.device = talker.device
        self.on_gpu = self.device.type == "cuda"
        self.row_count = row_count
        self.max_seq_len = max_seq_len
        self.keepalive = keepalive
        # Cached, as most requests have the same settings.
        self.settings_on_host = functools.lru_cache(64, typed=True)(functools.partial(settings_on_host, talker))
        has_spare = row_count > 1  # one more row, for the padding of prefills
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
        self.row_settings = [None] * row_count  # the settings that were last written into each row

        self.active = []  # admitted utterances, each with its row
        self.frames_since_idle = 0  # frames launched since the runner was idle; aligns the chunks of several utterances
        self.free = list(range(row_count))  # rows without an utterance: a heap
        self.in_flight = collections.deque()  # FrameInFlight, in order
        self.advance_on_host = None  # host copy of rows.advance
        self.last_stream = None  # the CUDA stream of the last caller
        self.sleeps = False  # see `enter`
        self.shared_generator = torch.Generator(self.device)  # for utterances without a generator of their own
        self.shared_generator.seed()

    def record_event(self, sleeps: bool = False) -> torch.cuda.Event | None:
        """An event on the current CUDA stream. sleeps: a thread that waits for it sleeps instead of polling"""
        if not self.on_gpu:
            return None
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(blocking=sleeps))

    def enter(self, sleeps: bool = False) -> None:
        """Call this at the start of a turn: the current CUDA stream then waits for that of the last caller.

        sleeps: sleep until a frame is done instead of polling. Polling reacts a little sooner, but keeps a core busy,
            and on a busy machine the operating system often preempts such a thread.
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
        """Prefill prompts, at most as many as there are free rows. Returns the utterances that failed, with errors."""
        if not utterances:
            return []
        if not self.active:
            self.frames_since_idle = 0
        states = [utterance.generator and utterance.generator.get_state() for utterance in utterances]
        for utterance in utterances:
            utterance.row = heapq.heappop(self.free)
        try:
            for utterance in utterances:
                request = utterance.request
                self.wait_for(utterance.prompt_ready, request.prefix, request.inputs)
                if request.reference is not None:  # prime the codec with it and discard that audio
                    self.codec.reset(utterance.row)
                    self.codec.feed([utterance.row], request.reference[None])
            self.read_prompts(utterances)
            if indices := [one.row for one in utterances if one.request.reference is None]:
                self.codec.reset(*indices)  # launched after the prompts, which take the GPU longer
        except BaseException as error:
            for utterance, state in zip(utterances, states):
                heapq.heappush(self.free, utterance.row)
                if state is not None:
                    utterance.generator.set_state(state)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            if len(utterances) == 1:
                return [(utterances[0], error)]
            # One at a time, to find out which of them fail.
            return [failed for utterance in utterances for failed in self.admit([utterance])]
        for utterance in utterances:
            utterance.request = utterance.settings = None
            self.active.append(utterance)
        return []

    @torch.no_grad()
    def read_prompts(self, utterances: list[Utterance]) -> None:
        """Prefill all positions but the last. One step of the talker then reads these, and samples the first tokens."""
        if self.graphs.reads_masked_positions():
            for utterance in utterances:
                self.views[utterance.row].whole_cache.zero_()
        self.prefills.read(utterances)
        self.load_rows(utterances)
        lengths = [0] * len(self.new_lengths)
        for utterance in utterances:
            lengths[utterance.row] = utterance.prompt_length
        copy_to_device(torch.tensor(lengths), self.new_lengths)
        self.draw(self.rows.noise, [utterance for utterance in utterances if utterance.samples_token])
        graphs = self.graphs.of(1 + max(utterance.row for utterance in utterances))
        self.advance_on_host = [length > 0 for length in lengths]
        self.begin()
        graphs.step()
        self.load_text(utterances)  # last, as the step does not need it

    def load_rows(self, utterances: list[Utterance]) -> None:
        """Write the prompts' last positions, and the settings if a row has other ones. Makes few calls of torch, as
        after each of them another thread may keep the GIL for 5 ms."""
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
        """Write the text that the frames add, and the padding behind it, in few calls of torch as in `load_rows`."""
        padding = utterances[0].request.inputs[-1:].to(self.device, non_blocking=True)
        if len(utterances) == 1:
            self.views[utterances[0].row].text.copy_(padding)
        else:
            indices = torch.tensor([utterance.row for utterance in utterances])
            self.rows.text[to_device(indices, self.device)] = padding
        max_frames = self.rows.text.shape[1]
        texts = [utterance.request.inputs[1:-1][:max_frames] for utterance in utterances]
        targets = [self.views[utterance.row].text[: len(text)] for utterance, text in zip(utterances, texts)]
        torch._foreach_copy_(targets, texts, non_blocking=True)

    def wait_for(self, ready: torch.cuda.Event | None, *tensors: torch.Tensor) -> None:
        """Let the current CUDA stream wait for `ready`, recorded after the kernels that compute these tensors."""
        if ready:
            ready.wait()
            for tensor in tensors:
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
        """Launch a frame, read which utterances have ended, and start to decode complete chunks.

        utterances: all utterances of this caller
        advancing: those that this frame computes. Default: all that may advance.
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
        rows = {utterance: utterance.row for utterance in utterances}
        indices = {*rows.values()}
        advance = [row in indices for row in range(len(self.rows.advance))]
        if advance != self.advance_on_host:
            copy_to_device(torch.tensor(advance), self.rows.advance)
            self.advance_on_host = advance

        self.draw(self.rows.code_noise, [utterance for utterance in utterances if utterance.samples_codes])
        graphs.predict()
        self.frames_since_idle += 1
        for utterance in utterances:
            utterance.launched += 1
        if without_sound := [utterance for utterance in utterances if utterance.decoded == 0]:
            self.decode_chunks(without_sound, hand_over)  # as early as possible: the codes of the first frame are there
            if graphs.waiting_launches and self.on_gpu:  # the next launch would take all SMs from the codec
                torch.cuda.current_stream(self.device).wait_stream(self.codec.stream)
        self.draw(self.rows.noise, [utterance for utterance in utterances if utterance.samples_token])
        graphs.step()

        ended = torch.empty(len(graphs.rows.ended), dtype=torch.bool, pin_memory=self.on_gpu)
        ended.copy_(graphs.rows.ended, non_blocking=True)
        self.in_flight.append(FrameInFlight(self.record_event(self.sleeps), ended, rows))

    def draw(self, noise: torch.Tensor, utterances: list[Utterance]) -> None:
        """Draw the noise (B, N, V) for the next samples. Utterances that share a generator share one draw."""
        indices_of = collections.defaultdict(list)
        for utterance in utterances:
            indices_of[utterance.generator].append(utterance.row)
        # A draw for several rows begins at row 0 and overwrites other rows, so it precedes the draws for single rows.
        for generator, indices in sorted(indices_of.items(), key=lambda item: len(item[1]), reverse=True):
            first = indices[0] if len(indices) == 1 else 0
            draw_seeded(noise[first : max(indices) + 1], generator or self.shared_generator)

    def write_text(self, utterance: Utterance) -> None:
        """Write new text into the utterance's row, as far as it fits: frames never read what is behind."""
        text = self.rows.text[utterance.row]
        while utterance.new_text:
            new = utterance.new_text.popleft()
            utterance.frames_with_text = new.frames_with_text
            self.wait_for(new.ready, new.embeddings)
            embeddings = new.embeddings[: max(0, len(text) - new.first_frame)]
            text[new.first_frame : new.first_frame + len(embeddings)] = embeddings

    def close_gaps(self) -> None:
        """Move utterances to lower rows if graphs for fewer rows are then enough. Moves a few per frame: when many
        utterances have ended at once, dozens of moves would delay all others."""
        enough = next(size for size in self.graphs.sizes if size >= len(self.active))
        to_move = [utterance for utterance in self.active if utterance.row >= enough]
        for utterance in to_move[:MAX_MOVES]:
            row = heapq.heappushpop(self.free, utterance.row)
            clear = self.graphs.reads_masked_positions()
            copy_row(self.views[utterance.row], self.views[row], utterance.length, clear)
            self.codec.move(utterance.row, row)
            self.row_settings[row] = self.row_settings[utterance.row]
            utterance.row = row

    def read_ended(self, keep: int) -> None:
        """Read which utterances have ended, after all launched frames but the last `keep`, which may be running."""
        while len(self.in_flight) > keep:
            frame = self.in_flight.popleft()
            if frame.done:
                frame.done.synchronize()
            if reason := self.graphs.why_stopped():  # all utterances of this frame and the later ones are lost
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
        """Hand complete chunks to the codec, one of each utterance per round, as it must decode them in order."""
        utterances = [
            one for one in utterances if one.may_have_chunk() and not (together and self.waits_for_others(one))
        ]
        while utterances:
            by_size = collections.defaultdict(list)
            for utterance in utterances:
                if size := utterance.next_chunk():
                    by_size[size].append(utterance)
            # Small chunks first, as their utterances have little audio ahead of the playback.
            for size, ready in sorted(by_size.items()):
                for first in range(0, len(ready), MAX_BATCH):
                    self.decode_chunk(ready[first : first + MAX_BATCH], size, hand_over)
            utterances = [utterance for ready in by_size.values() for utterance in ready]  # may have another chunk

    def waits_for_others(self, utterance: Utterance) -> bool:
        """Whether a full chunk waits for others. Groups of 64 rows are decoded together, each in every 8th frame."""
        if utterance.chunk_size < FULL_CHUNK or utterance.finished or utterance.lacks_text():
            return False
        return (self.frames_since_idle + utterance.row // MAX_BATCH) % FULL_CHUNK != 0

    def decode_chunk(self, utterances: list[Utterance], size: int, hand_over: HandOver) -> None:
        codes = self.gather_codes(utterances, size)
        audio = self.codec.feed([utterance.row for utterance in utterances], codes)
        for utterance in utterances:
            utterance.note_decoded(size)
        hand_over(Batch(utterances, audio))

    def gather_codes(self, utterances: list[Utterance], size: int) -> torch.Tensor:
        """The next codes of each, (B, size, 16)."""
        if len(utterances) == 1:
            (one,) = utterances
            codes = self.rows.codes[one.row, one.decoded : one.decoded + size]
            return codes[None].clone()  # the codec may read it after the row was given to another utterance
        first = np.array([utterance.row * self.rows.codes.shape[1] + utterance.decoded for utterance in utterances])
        places = torch.from_numpy(first[:, None] + np.arange(size))
        return self.rows.codes.flatten(0, 1)[to_device(places, self.device)]


def settings_on_host(talker, **settings) -> list[torch.Tensor]:
    """The tensors of `SharedRows.settings` for one row, on the host."""
    row = SharedRows(talker.config, 1, 1, torch.float32, torch.device("cpu"))
    row.configure(**settings)
    return [tensor[0].pin_memory() if talker.device.type == "cuda" else tensor[0] for tensor in row.settings()]
