"""Whole calls: upstream's methods, which return complete audio, on the runner's rows.

    tts.generate_...(texts)   on a GPU: on_rows -> audios_of -> decode_all -> the runner, frame after frame
                              on a CPU: upstream's method -> StandIns.generate -> decode_all; then StandIns.decode

On a GPU upstream's three methods are replaced: of a list of texts as many are spoken at a time as there are rows, and
the next text joins when a row is free. On a CPU upstream's methods remain and only what they call is replaced. All
texts of a list are decoded together there, so that a seed gives upstream's tokens.
"""

import collections
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from qwen3_tts_cuda_graphs.fast.codec import BATCH_CHUNK_SIZES, CHUNK_SIZES
from qwen3_tts_cuda_graphs.prompts.clone_prompts import with_voice_clone_prompt
from qwen3_tts_cuda_graphs.prompts.request import check_finite, request_of
from qwen3_tts_cuda_graphs.speech.runner import HandOver, Runner
from qwen3_tts_cuda_graphs.speech.speech import Speech
from qwen3_tts_cuda_graphs.speech.utterance import Utterance

METHODS = ("generate_voice_clone", "generate_custom_voice", "generate_voice_design")
MAX_PROMPTS_PER_FRAME = 16  # texts of a list that are admitted between two frames
MAX_PENDING = 8  # batches of a list that are being decoded or copied to the host


def replace_methods(tts) -> None:
    """Replace what upstream's methods call, and on a GPU the methods."""
    stand_ins = StandIns(tts.speech)
    tts.model.talker.generate = stand_ins.generate
    tts.model.speech_tokenizer.decode = stand_ins.decode
    if tts.speech.on_gpu:
        for name in METHODS:
            setattr(tts, name, types.MethodType(on_rows(name, type(tts)), tts))


def on_rows(name: str, model_class: type) -> Callable:
    """A replacement for one of upstream's methods that generate speech, which uses the runner's rows."""
    upstream = getattr(model_class, name)
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def call(tts, *args, **kwargs) -> tuple[list[np.ndarray], int]:
        arguments = signature.bind(tts, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        del arguments["self"]
        text = arguments.pop("text")
        method = getattr(tts, name)
        texts = text if isinstance(text, list) else [text]
        arguments = with_voice_clone_prompt(method, arguments)
        chunk_frames = max(CHUNK_SIZES if len(texts) == 1 else BATCH_CHUNK_SIZES)

        def utterance(number: int) -> Utterance:
            own = {key: value_for(number, len(texts), key, value) for key, value in arguments.items()}
            request = tts.prompts.build(method, texts[number], own)
            return tts.speech.utterance(request, itertools.repeat(chunk_frames))

        return audios_of(tts.speech, map(utterance, range(len(texts)))), tts.speech.rate

    return call


def value_for(number: int, texts: int, name: str, value):
    """The value of an argument for one of several texts. Upstream's voice_clone_prompt may be a dict of lists, for one
    voice or several."""
    if isinstance(value, dict):
        voices = max((len(column or ()) for column in value.values()), default=0)
        if 1 < voices < texts:
            raise ValueError(f"there are {voices} voices for {texts} texts: give one, or one for each text")
        return {key: column[number : number + 1] if len(column or ()) > 1 else column for key, column in value.items()}
    if not (isinstance(value, list) and len(value) == texts):
        return value
    return value[number : number + 1] if name == "voice_clone_prompt" else value[number]


def audios_of(speech: Speech, utterances: Iterable[Utterance]) -> list[np.ndarray]:
    """The samples of each, in order. Warns of those that were cut off."""
    audio: dict[Utterance, bytearray] = {}  # float32; appending to a bytearray does not copy what is in it
    pending = collections.deque()  # Batch, in order

    def collect(max_pending: int) -> None:
        """Collect the audio that is ready, and wait until no more than `max_pending` batches are pending."""
        while len(pending) > max_pending or (pending and pending[0].audio.is_ready()):
            batch = pending.popleft()
            for utterance, samples in zip(batch.utterances, batch.audio.views()):
                audio[utterance] += samples.data

    def before_frame(active: list[Utterance]) -> None:
        for utterance in active:
            audio.setdefault(utterance, bytearray())
        collect(MAX_PENDING)

    with speech.turns.take():
        decode_all(speech.runner, utterances, pending.append, before_frame, Utterance.warn_if_cut_off)
    collect(0)
    return [np.frombuffer(samples, np.float32) for samples in audio.values()]


def decode_all(
    runner: Runner,
    utterances: Iterable[Utterance],
    hand_over: HandOver | None,
    before_frame: Callable[[list[Utterance]], None],
    when_complete: Callable[[Utterance], None],
) -> None:
    """Decode all utterances, as many at a time as there are free rows.

    before_frame: called with the utterances that have a row
    when_complete: called with each utterance before its row is released

    On a CPU finished texts keep decoding until all have ended, as upstream's random numbers depend on it.
    """
    waiting = iter(utterances)
    active = []
    runner.enter()
    runner.require_row()
    try:
        while True:
            max_new = min(len(runner.free), MAX_PROMPTS_PER_FRAME) if runner.on_gpu else len(runner.free)
            new = [*itertools.islice(waiting, max_new)]
            active += new
            if not active:
                return
            for _, error in runner.admit(new):
                raise error
            before_frame(active)
            advancing = None if runner.on_gpu else active  # None: those that may advance
            runner.step(active, hand_over, advancing, together=True)
            complete = [utterance for utterance in active if utterance.is_complete()]
            if not runner.on_gpu and len(complete) < len(active):
                continue
            for utterance in complete:
                when_complete(utterance)
                active.remove(utterance)
                runner.release(utterance)
    finally:
        for utterance in active:
            runner.release(utterance)


class StandIns:
    """Replacements for what upstream's methods call: talker.generate and the speech tokenizer's decode."""

    def __init__(self, speech: Speech):
        self.speech = speech
        self.talker = speech.tts.model.talker
        self.on_gpu = speech.on_gpu
        self.runner = speech.runner
        self.list_runner = None  # see `runner_for`

    def runner_for(self, texts: int) -> Runner:
        """The runner for a list of so many texts. On a CPU all are decoded together, in the first rows, as upstream
        draws their random numbers together. If the model has too few rows, a runner is made for the list and kept for
        the next list of the same length."""
        if self.on_gpu or (texts <= self.runner.row_count and not self.runner.active):
            return self.runner
        if self.list_runner is None or self.list_runner.row_count != texts:
            self.list_runner = None  # free its memory first
            codec, length = self.speech.tts.model.speech_tokenizer, self.runner.max_seq_len
            self.list_runner = Runner(self.talker, codec, texts, length, fused=False, keepalive=self.runner.keepalive)
        return self.list_runner

    def generate(self, **arguments):
        """Replaces talker.generate: codes and hidden states, without audio."""
        check_finite(arguments["inputs_embeds"])
        utterances = [self.speech.utterance(request_of(own, on_gpu=self.on_gpu)) for own in single_texts(arguments)]
        spoken, hiddens = {}, collections.defaultdict(list)

        def keep_hidden(active: list[Utterance]) -> None:
            for utterance in active:
                if not self.on_gpu or utterance.may_advance():
                    hiddens[utterance].append(runner.rows.hidden[utterance.row, 0].clone())

        def keep(utterance: Utterance) -> None:
            # On a CPU a finished text has as many frames as the longest, as upstream returns it.
            frames = utterance.valid_frames if self.on_gpu else len(hiddens[utterance])
            codes = runner.rows.codes[utterance.row, :frames].clone()
            spoken[utterance] = codes, torch.stack(hiddens[utterance][:frames])
            utterance.warn_if_cut_off()

        with self.speech.turns.take():
            runner = self.runner_for(len(utterances))
            decode_all(runner, utterances, None, keep_hidden, keep)
        return as_upstream(*zip(*map(spoken.get, utterances)), end=self.talker.config.codec_eos_token_id)

    @torch.no_grad()
    def decode(self, encoded) -> tuple[list[np.ndarray], int]:
        """Replaces the speech tokenizer's decode: whole utterances, one after another."""
        codes = encoded.audio_codes if hasattr(encoded, "audio_codes") else encoded
        if isinstance(codes, dict):
            codes = codes["audio_codes"]
        if torch.is_tensor(codes) and codes.dim() == 2:
            codes = [codes]
        chunks = []
        with self.speech.turns.take():
            self.runner.enter()
            row = self.runner.require_row()
            for utterance in codes:
                utterance = torch.as_tensor(utterance["audio_codes"] if isinstance(utterance, dict) else utterance)
                self.runner.codec.reset(row)
                chunks.append(self.runner.codec.feed([row], utterance[utterance[:, 0] >= 0][None]))  # padding is -1
            return [chunk.wait()[0] for chunk in chunks], self.speech.rate


def single_texts(arguments: dict) -> Iterator[dict]:
    """The arguments of talker.generate for each text of a list. Upstream pads prompts on the left."""
    for row, mask in enumerate(arguments["attention_mask"]):
        length = int(mask.sum())
        yield arguments | dict(
            inputs_embeds=arguments["inputs_embeds"][row : row + 1, -length:],
            attention_mask=mask[None, -length:],
            trailing_text_hidden=arguments["trailing_text_hidden"][row : row + 1],
        )


def as_upstream(codes: tuple, hiddens: tuple, end: int) -> transformers.generation.GenerateDecoderOnlyOutput:
    """Codes (T, 16) and hidden states (T, H) of each text, as upstream expects them: one entry per forward. The first
    is the prompt's, whose codes are None; the others are those of the frames."""
    codes = pad_sequence(codes, batch_first=True, padding_value=end)  # (B, T, 16)
    hiddens = pad_sequence(hiddens, batch_first=True).split(1, dim=1)  # T x (B, 1, H)
    steps = zip([*hiddens, hiddens[-1]], [None, *codes.unbind(1)])  # the last hidden state is not read
    hidden_states = tuple(((hidden,), frame) for hidden, frame in steps)
    return transformers.generation.GenerateDecoderOnlyOutput(sequences=codes[..., 0], hidden_states=hidden_states)
