"""The model of a worker, with its engine and voices: handles the server's calls."""

import base64
import contextlib
import functools
import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from qwen3_tts_cuda_graphs.common import model_config
from qwen3_tts_cuda_graphs.common.loading import choose_device, load_upstream
from qwen3_tts_cuda_graphs.common.samples import to_int16
from qwen3_tts_cuda_graphs.common.voices import clone_prompt, load_speaker, mix_embeddings, speaker_prompt
from qwen3_tts_cuda_graphs.prompts.cut import (
    MIN_FRAME_LIMIT,
    USUAL_FRAMES_PER_TOKEN,
    cut,
    cut_by_estimate,
    tokens_that_fit,
)
from qwen3_tts_cuda_graphs.prompts.lexicon import Lexicon
from qwen3_tts_cuda_graphs.prompts.templates import tokenize
from qwen3_tts_cuda_graphs.serving import memory
from qwen3_tts_cuda_graphs.serving.errors import ApiError, as_api_error, engine_failed, log, with_remedy_for_clients
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.engine import Engine
from qwen3_tts_cuda_graphs.speech.listener import Listener, StreamTimeout
from qwen3_tts_cuda_graphs.speech.long_text import frame_limit
from qwen3_tts_cuda_graphs.speech.runner import KernelStopped
from qwen3_tts_cuda_graphs.speech.utterance import CutOff
from qwen3_tts_cuda_graphs.speech.warm_up import some_voice

RECORDING_THREADS = 2
MAX_VOICE_BYTES = 256 << 20  # limit for all stored voices; 256 voices from recordings of a minute take 25 MB
SECONDS_WITHOUT_A_PASS = 60.0  # more than a frame or a prompt takes with many rows on a slow CPU


class EngineHost:
    def __init__(self, spec: dict, connection, stop: Callable[[str], None]):
        """Load the weights.

        spec: model, device, dtype, max_seq_len, and speakers: name of a voice -> content of a speaker.pt in base64
        stop: ends the worker; its argument is the reason
        """
        self.spec = spec
        self.connection = connection
        self.stop = stop
        self.device = choose_device(spec["device"])
        self.config = model_config.read_config(spec["model"])
        self.clones = self.config["tts_model_type"] == "base"
        width = self.config["talker_config"]["hidden_size"]
        self.file_voices = {}  # name -> content of its speaker.pt
        for name, content in spec["speakers"].items():
            self.file_voices[name] = load_speaker(io.BytesIO(base64.b64decode(content)), width, f"{name}.pt")
        self.prompts = {}  # key of a voice -> the prompt made from its recording
        self.pending = set()  # ids of calls that wait for a thread of `recordings` or `long_texts`, or run in one
        dtype = spec["dtype"] and getattr(torch, spec["dtype"])
        self.tts = load_upstream(spec["model"], self.device, dtype)
        self.engine = None
        self.listeners = {}  # id of a call -> its Listener
        self.has_failed = False
        self.recordings = ThreadPoolExecutor(RECORDING_THREADS, "recordings")
        self.long_texts = ThreadPoolExecutor(1, "long texts")

    def begin(self, rows: int | None, models: int) -> dict:
        """Capture all graphs and speak once, so that the first request is fast. Returns the fields of `ready`.

        rows: None for as many as fit
        models: how many models share the free memory, including this one
        """
        rows = rows or self.rows_that_fit(models)
        accelerate(self.tts, max_seq_len=self.spec["max_seq_len"], rows=rows)
        self.engine = Engine(
            self.tts,
            max_waiting=math.inf,  # the server limits the number of requests
            cut_off_is_error=True,
            after_delivery=self.connection.flush,
        )
        self.method, voice = some_voice(self.tts)
        if self.clones:  # with a recording, to warm up its encoder, too
            noise = np.random.default_rng(0).normal(0, 0.1, 24000).astype(np.float32)
            voice = {"voice_clone_prompt": clone_prompt(self.tts, noise, 24000, "warm up")}
        with contextlib.suppress(CutOff):
            for _ in self.engine.stream(self.method, text="Warm up.", max_new_tokens=5, **voice):
                pass
        return {"device": str(self.device), "rows": rows, "rate": self.engine.rate}

    def rows_that_fit(self, models: int) -> int:
        if self.device.type != "cuda":
            return memory.ROWS_ON_A_CPU
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        element_size = self.tts.model.talker.dtype.itemsize
        per_row = memory.bytes_per_row(self.config["talker_config"], self.spec["max_seq_len"], element_size)
        return memory.rows_that_fit(free, per_row, models)

    def close(self) -> None:
        if self.engine:
            self.engine.close()
        for threads in (self.recordings, self.long_texts):
            threads.shutdown(wait=False, cancel_futures=True)

    # ---- The server's messages, as in messages.py, in the thread that reads them. Each call is answered, whatever is
    # raised: a panic in a Rust library is a BaseException.

    def handle(self, header: dict, payload: bytes) -> None:
        try:
            getattr(self, f"on_{header['op']}")(header, payload)
        except BaseException as error:
            self.fail(header.get("id"), error)

    def answer_in(self, threads: ThreadPoolExecutor, call_id: int, work: Callable[[], dict]) -> None:
        """Answer a call in one of these threads. work: returns the fields of the answer"""
        self.pending.add(call_id)
        threads.submit(self.answer, call_id, work)

    def answer(self, call_id: int, work: Callable[[], dict]) -> None:
        if call_id not in self.pending:  # it was cancelled meanwhile
            return
        try:
            self.connection.send(type="end", id=call_id, **work())
        except BaseException as error:
            self.fail(call_id, error)
        self.pending.discard(call_id)

    def on_speak(self, header: dict, payload: bytes) -> None:
        call_id, options = header["id"], header["options"]
        arguments = self.voice_arguments(header["voice"], payload)
        must_fit = header["text"] is None and options["max_new_tokens"] is None
        max_tokens = self.tokens_that_fit(arguments, header["limit_speech"]) if must_fit else math.inf
        put = functools.partial(self.put, header)
        listener = self.listeners[call_id] = Listener(self.engine, put, max_text_tokens=max_tokens)
        listener.ask(self.method, header["text"], header["seed"], options | arguments)

    def voice_arguments(self, voice: dict, payload: bytes) -> dict:
        """The arguments of upstream's method for this voice."""
        if not self.clones:
            return voice
        if "mix" in voice:
            voices, shares = zip(*voice["mix"])
            return {"voice_clone_prompt": mix_embeddings([*map(self.stored_voice, voices)], shares)}
        if voice:
            return {"voice_clone_prompt": self.stored_voice(voice)}
        embedding = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        self.check_embedding("speaker_embedding", embedding)
        return {"voice_clone_prompt": speaker_prompt(embedding)}

    def stored_voice(self, voice: dict) -> dict | list:
        if "file" in voice:
            return self.file_voices[voice["file"]]
        if voice["key"] not in self.prompts:
            raise ApiError("this voice was removed meanwhile: choose another one", 404, "voice", "unknown_voice")
        return self.prompts[voice["key"]]

    def check_embedding(self, name: str, embedding: torch.Tensor) -> None:
        if not embedding.to(self.tts.model.talker.dtype).isfinite().all():
            raise ApiError(f"{name} gives NaN or infinite values: give another one", param=name)

    def on_text(self, header: dict, payload: bytes) -> None:
        if listener := self.listeners.get(header["id"]):
            listener.push(header["text"])  # None: END

    def on_read(self, header: dict, payload: bytes) -> None:
        if listener := self.listeners.get(header["id"]):
            listener.read(header["chunks"])

    def on_cancel(self, header: dict, payload: bytes) -> None:
        self.pending.discard(header["id"])
        self.cancel(header["id"])

    def on_voice(self, header: dict, payload: bytes) -> None:
        samples = np.frombuffer(bytearray(payload), np.float32)  # bytearray: a writable array
        self.answer_in(self.recordings, header["id"], lambda: self.make_voice(header, samples))

    def make_voice(self, header: dict, samples: np.ndarray) -> dict:
        prompt = clone_prompt(self.tts, samples, header["rate"], header["ref_text"])
        self.check_embedding(header["name"], prompt[0].ref_spk_embedding)
        self.prompts[header["key"]] = prompt
        size = sum(map(voice_bytes, [*self.prompts.values()]))
        if header["id"] not in self.pending or size > MAX_VOICE_BYTES:  # the call was cancelled, or memory is full
            self.prompts.pop(header["key"], None)
        if size > MAX_VOICE_BYTES:
            problem = f"the voices in use take {size >> 20} MB, too much: remove some, or use shorter recordings"
            raise ApiError(problem, 503, header["name"], "out_of_memory")
        return {}

    def on_forget(self, header: dict, payload: bytes) -> None:
        for key in header["keys"]:
            self.prompts.pop(key, None)

    def on_count(self, header: dict, payload: bytes) -> None:
        self.connection.send(type="end", id=header["id"], tokens=self.count_tokens(header["text"]))

    def count_tokens(self, text: str) -> int:
        return len(tokenize(self.tts, text))

    def on_split(self, header: dict, payload: bytes) -> None:
        """Cut texts that are too long for one utterance into parts."""
        self.answer_in(self.long_texts, header["id"], lambda: self.split(header, payload))

    def split(self, header: dict, payload: bytes) -> dict:
        texts, language, say = header["texts"], header["language"], Lexicon(header["lexicon"]).replace
        max_tokens = self.tokens_that_fit(self.voice_arguments(header["voice"], payload), header["leaves_room"])
        if header["leaves_room"]:  # as stream_script does
            return {"texts": [cut(text.splitlines(), max_tokens, self.count_tokens, language, say) for text in texts]}

        def count_said(text: str) -> int:
            return self.count_tokens(say(text))

        return {"texts": [cut_by_estimate(text, max_tokens, count_said, language) for text in texts]}

    def tokens_that_fit(self, voice: dict, leaves_room: bool) -> int:
        """leaves_room: whether speech up to the limit of limit_speech must fit, not only speech of usual length"""
        if leaves_room:
            return tokens_that_fit(self.spec["max_seq_len"], voice)
        return tokens_that_fit(self.spec["max_seq_len"], voice, USUAL_FRAMES_PER_TOKEN, self.count_tokens)

    # ---- Messages to the server, from any thread

    def put(self, header: dict, item) -> None:
        """Send audio, the end or an error of a stream. header: that of the call `speak`"""
        call_id = header["id"]
        listener = self.listeners.get(call_id)
        if listener is None:
            return
        if isinstance(item, BaseException):
            self.fail(call_id, item)
            return
        if isinstance(item, np.ndarray):
            surplus = self.frames_beyond_limit(header, listener)
            if surplus:
                item = item[: len(item) - surplus * self.tts.model.speech_tokenizer.get_decode_upsample_rate()]
            if len(item):
                self.connection.add(to_int16(item).tobytes(), type="audio", id=call_id)
            if surplus:
                self.end(header, listener, was_stopped=True)
        else:
            self.end(header, listener)

    def frames_beyond_limit(self, header: dict, listener: Listener) -> int:
        """How many frames beyond limit_speech have been delivered. The limit grows while text arrives."""
        if not header["limit_speech"] or listener.delivered <= MIN_FRAME_LIMIT:
            return 0
        text = listener.arriving.text if header["text"] is None else header["text"]
        return max(0, listener.delivered - frame_limit(self.count_tokens(text)))

    def end(self, header: dict, listener: Listener, was_stopped: bool = False) -> None:
        """was_stopped: by limit_speech, with which speech that fills the cache counts as stopped, not as failed"""
        call_id = header["id"]
        hit_max_new_tokens = listener.max_frames + 1 == header["options"]["max_new_tokens"]
        is_cut_off = listener.was_cut_off and not hit_max_new_tokens
        if is_cut_off and not header["limit_speech"]:
            try:
                listener.warn_if_cut_off(is_error=True)
            except CutOff as error:
                self.fail(call_id, error)
                return
        read = listener.characters_read()
        if read == 0:
            problem = "the speech has ended before its text began: ref_text says more than the recording, correct it"
            self.fail(call_id, ApiError(problem, param="ref_text", code="cut_off"))
            return
        stopped = {"stopped": True} if was_stopped or is_cut_off else {}
        self.connection.add(type="end", id=call_id, characters_read=read, **stopped)
        self.cancel(call_id)

    def fail(self, call_id: int, error: BaseException) -> None:
        if not self.engine.is_running or is_fatal(error):
            if not self.has_failed:  # log it once, not for each listener
                log.error("the engine cannot go on", exc_info=error)
            self.has_failed = True
            self.stop(f"{type(error).__name__}: {error}")
            error = engine_failed()
        self.connection.send(type="error", id=call_id, error=vars(for_client(error)))
        self.cancel(call_id)

    def cancel(self, call_id: int) -> None:
        if listener := self.listeners.pop(call_id, None):
            listener.cancel()

    def look_after_engine(self) -> None:
        if not self.engine.is_running:
            self.stop(self.engine.why_closed)
        if what := self.engine.stands_still(SECONDS_WITHOUT_A_PASS):
            self.stop(f"the engine has made no {what} for {SECONDS_WITHOUT_A_PASS:g} s")


def voice_bytes(prompt: list) -> int:
    (item,) = prompt
    return item.ref_spk_embedding.nbytes + (0 if item.ref_code is None else item.ref_code.nbytes)


def is_fatal(error: BaseException) -> bool:
    """Whether no later request can succeed in this process. After an out-of-memory error, smaller ones may succeed."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, KernelStopped) or "CUDA error" in str(error)


def for_client(error: BaseException) -> ApiError:
    """What a client is told about the engine's errors."""
    if isinstance(error, CutOff):
        return ApiError(with_remedy_for_clients(str(error)), code="cut_off")
    if isinstance(error, StreamTimeout):
        return ApiError(str(error), 503, code="timeout")
    if isinstance(error, torch.OutOfMemoryError):
        return ApiError("the GPU's memory is full: try again later", 503, code="out_of_memory")
    return as_api_error(error)
