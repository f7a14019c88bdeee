"""Do a Job: load the model, speak, write the files. The checks that need torch or the tokenizer come first."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers

from qwen3_tts_cuda_graphs.cli.finished_parts import Parts
from qwen3_tts_cuda_graphs.cli.options import PLAYED_ONLY, Job, check_number_of_files, goes_to_file, read_texts
from qwen3_tts_cuda_graphs.cli.player import Player
from qwen3_tts_cuda_graphs.cli.text_files import Line, Pipe
from qwen3_tts_cuda_graphs.common.audio_files import Chunk, write_audio
from qwen3_tts_cuda_graphs.common.checkpoints import FRAME_RATE, REFERENCE_SILENCE, file_errors, local_folder
from qwen3_tts_cuda_graphs.common.loading import choose_device, load, model_errors
from qwen3_tts_cuda_graphs.common.output_files import check_writable, is_wav
from qwen3_tts_cuda_graphs.common.scripts import show_note, show_progress, show_warning
from qwen3_tts_cuda_graphs.common.voices import clone_prompt, load_speaker
from qwen3_tts_cuda_graphs.prompts.arriving_text import tokens_to_begin
from qwen3_tts_cuda_graphs.prompts.checks import nth_seed
from qwen3_tts_cuda_graphs.prompts.cut import cut, tokens_that_fit
from qwen3_tts_cuda_graphs.speech.long_text import speak, with_pauses
from qwen3_tts_cuda_graphs.speech.streaming import stream

PIPE_TIMEOUT = 600.0  # seconds that a line on stdin may stay unfinished


def run(job: Job) -> None:
    with model_errors():
        job = prepared(job)
        parts = parts_of(job)
        outputs = plan_outputs(job)
        progress = Progress(job.texts)
        try:
            with Player() if job.play else contextlib.nullcontext() as player:
                speak_all(job, outputs, parts, progress, player)
        except KeyboardInterrupt as stop:
            stop.args = (what_is_kept(job, parts, progress.seconds),)
            raise
        if parts:
            parts.remove()


def speak_all(job: Job, outputs: list, parts: Parts | None, progress: "Progress", player: Player | None) -> None:
    tts = load(job.model, job.device, job.dtype, max_seq_len=job.max_seq_len, fused=job.fused)
    show_progress("")
    method, request = voice_request(job, tts)
    utterance = partial(speak if job.limit_speech else stream, method, **request)
    if job.retry:
        utterance = partial(utterance, retries=job.retry)
    if job.speed != 1:
        utterance = in_tempo(utterance, job.speed)
    path = f"; {tts.speech.path}"

    def numbered_utterance(number: int, text: str | Line) -> Iterator[Chunk]:
        return progress.follow(utterance(text=text, seed=nth_seed(job.seed, number)), text)

    progress.begin()
    warnings.showwarning = progress.show_warning
    if parts:
        parts.open(job.resume)
    for output, texts in outputs:
        is_spoken = parts and not job.join and parts.mark(texts[0][0]).is_file()
        if is_spoken and output.is_file():  # it may have been moved away since
            progress.skip(texts[0][1])
            continue
        start, spoken_before = time.perf_counter(), progress.seconds
        if parts and job.join:
            speak_parts(parts, texts, numbered_utterance, progress)
            spoken = (parts.read(number) for number, _ in texts)
        else:
            spoken = itertools.starmap(numbered_utterance, texts)
        chunks = with_pauses(spoken, job.pause)
        if player:
            chunks = player.follow(chunks)
        first = next(chunks, None)
        if first is None:
            raise ValueError("the text is empty: give something to say")
        first_ms = (time.perf_counter() - start) * 1e3
        samples = parts.samples(job.pause) if parts and job.join else 0
        seconds = write_audio(output, itertools.chain([first], chunks), job.stream, samples)
        show_progress("")
        wall = time.perf_counter() - start
        now = progress.seconds - spoken_before  # without pauses and without what --resume has kept
        summary = f"{'played' if player and output == PLAYED_ONLY else output}: {seconds:.2f} s of audio"
        if job.join and progress.skipped:
            summary += f", {now:.2f} s of it now"
        summary += f" in {wall:.2f} s, {now / wall:.2f} x real time"
        if job.stream and not isinstance(job.texts, Pipe):
            summary += f", first audio after {first_ms:.0f} ms"
        print(f"{summary}{path}", file=sys.stderr if str(output) == "-" else sys.stdout, flush=True)
        path = ""  # it is the same for all files
        if parts and not job.join:
            parts.mark(texts[0][0]).touch()


def in_tempo(utterance: Callable, speed: float) -> Callable:
    """Each utterance by itself: pauses between them stay as long as --pause says."""
    from qwen3_tts_cuda_graphs.common.tempo import at_speed  # imports PyAV

    return lambda **request: at_speed(utterance(**request), speed)


def what_is_kept(job: Job, parts: Parts | None, seconds: float) -> str:
    """What to tell somebody who has interrupted the command."""
    kept = parts.finished() if parts else 0
    if kept:
        option = f"--output {job.output} --resume"
        return f"stopped: {kept} of {len(job.texts)} utterances are kept; the same command with {option} continues"
    if parts and parts.are_own():
        parts.remove()
    if not goes_to_file(job.output):
        return "stopped"
    if job.stream and seconds and is_wav(job.output):
        return f"stopped: the first {seconds:.2f} s of audio are kept"
    return "stopped: nothing was written"


def prepared(job: Job) -> Job:
    """The job with what options.py leaves open: the device, the voice in a file, and texts that fit into the cache. A
    line that is cut stays one file."""
    job = replace(job, dtype=job.dtype and getattr(torch, job.dtype), device=choose_device(job.device))
    if job.kind == "base" and job.speaker:
        job = replace(job, voice=load_speaker(job.speaker, job.config["talker_config"]["hidden_size"]))
    if job.texts is None and job.stream:
        return replace(job, texts=Pipe(sys.stdin.buffer))
    texts = job.texts or read_texts("-", None, job.paragraphs)
    return replace(job, texts=split_texts(job, texts), join=job.join or len(texts) == 1)


def voice_request(job: Job, tts) -> tuple[Callable, dict]:
    """Upstream's method for this voice, and its arguments except the text."""
    request = {"language": job.language, **job.sampling}
    if job.non_streaming_mode is not None:
        request["non_streaming_mode"] = job.non_streaming_mode
    if isinstance(job.texts, Pipe):
        request["text_timeout"] = PIPE_TIMEOUT
    if job.kind == "custom_voice":
        return tts.generate_custom_voice, request | {"speaker": job.speaker, "instruct": job.instruct}
    if job.kind == "voice_design":
        return tts.generate_voice_design, request | {"instruct": job.instruct}

    prompt = job.voice
    if job.ref_audio:
        prompt = clone_prompt(tts, *job.voice, job.ref_text, job.silence)
    tokens = tokens_to_begin(tts, prompt)
    if isinstance(job.texts, Pipe) and tokens > 2:  # in-context
        show_note(
            f"with a transcript a line is spoken once it has {tokens} tokens or has ended; without one from its second "
            "token on"
        )
    return tts.generate_voice_clone, request | {"voice_clone_prompt": prompt}


def speak_parts(parts: Parts, texts: list, speak_numbered: Callable, progress: "Progress") -> None:
    """Speak what is not there yet, each utterance into a file of its own."""
    for number, text in texts:
        part = parts.path(number)
        if part.is_file():
            progress.skip(text)
        else:
            write_audio(part, speak_numbered(number, text))


def split_texts(job: Job, texts: list[str]) -> list[str]:
    """Cut lines that may not fit into the cache."""
    reference = 0
    if job.ref_text:
        audio, rate = job.voice
        reference = int((len(audio) / rate + REFERENCE_SILENCE) * FRAME_RATE) + len(job.ref_text.encode())
    voice = {"instruct": job.instruct, "voice_clone_prompt": None if job.ref_audio else job.voice}
    try:
        most = tokens_that_fit(job.max_seq_len, voice, reference=reference)
    except ValueError:  # short texts have room even so, and speech that is cut off is reported
        if all(count_tokens(job.model, text) < job.max_seq_len for text in texts):
            return texts
        raise
    return cut(texts, most, partial(count_tokens, job.model), job.language)


def count_tokens(model: str, text: str) -> int:
    return len(text_tokenizer(model)(text).input_ids)


@functools.cache
def text_tokenizer(model: str):
    """The model's own tokenizer, before its weights are there."""
    folder = local_folder(model)
    with file_errors(folder):
        return transformers.Qwen2TokenizerFast.from_pretrained(folder, fix_mistral_regex=False)


def parts_of(job: Job) -> Parts | None:
    """Finished utterances are kept until all are spoken, for --resume."""
    if isinstance(job.texts, Pipe):
        return None
    check_number_of_files(job.texts, job.join, job.output)
    if len(job.texts) == 1 or job.stream or not goes_to_file(job.output):
        return None
    parts = Parts(job.output, fingerprint(job))
    parts.check(job.resume)
    return parts


def plan_outputs(job: Job) -> list[tuple[Path, Iterable[tuple[int, str | Line]]]]:
    """(file, its numbered utterances): one file, or one for each line. All lines of a pipe go to one file."""
    output = job.output
    if isinstance(job.texts, Pipe):
        return [(output, enumerate(job.texts.lines()))]
    numbered = [*enumerate(job.texts)]
    if len(numbered) == 1 or job.join:
        return [(output, numbered)]
    outputs = [(output.with_stem(f"{output.stem}-{number + 1:03}"), [(number, text)]) for number, text in numbered]
    for path, _ in outputs:
        check_writable(path, job.ref_audio, job.speaker, job.text_file)
    return outputs


def fingerprint(job: Job) -> str:
    """A hash of everything that decides what is spoken."""
    digest = hashlib.sha256(repr(replace(job, config={}, voice=None, resume=False)).encode())
    for path in (job.ref_audio, job.speaker):
        if path and Path(path).is_file():
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()


class Progress:
    """How far the speech is, and how long the rest will take, on a terminal."""

    def __init__(self, texts: list[str] | Pipe):
        self.texts = [] if isinstance(texts, Pipe) else texts
        self.seconds = 0.0  # audio so far
        self.spoken = 0  # characters of finished utterances
        self.skipped = 0
        self.finished = 0  # utterances

    def begin(self) -> None:
        """The model is loaded."""
        self.start = time.perf_counter()

    def skip(self, text: str) -> None:
        self.skipped += len(text)
        self.finished += 1

    def follow(self, chunks: Iterable[Chunk], text: str | Line) -> Iterator[Chunk]:
        for audio, rate in chunks:
            self.seconds += len(audio) / rate
            show_progress(self.line())
            yield audio, rate
        if self.texts:
            self.spoken += len(text)
        self.finished += 1

    def show_warning(self, message: Warning, *_) -> None:
        """It is about the utterance that is being spoken."""
        show_warning(message if len(self.texts) == 1 else f"utterance {self.finished + 1}: {message}")

    def line(self) -> str:
        elapsed = time.perf_counter() - self.start
        line = f"{self.seconds:.1f} s of audio, {self.seconds / elapsed:.2f} x real time"
        if len(self.texts) > 1:
            line = f"utterance {self.finished + 1} of {len(self.texts)}, {line}"
        if self.spoken:
            rest = sum(map(len, self.texts)) - self.skipped - self.spoken
            line += f", {datetime.timedelta(seconds=round(elapsed * rest / self.spoken))} left"
        return line
