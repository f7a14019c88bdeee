"""Do a Job: load the model, speak, write the files. The checks that need torch or the tokenizer come first."""

import contextlib
import functools
import hashlib
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from qwen3_tts_cuda_graphs.cli.finished_parts import FinishedParts
from qwen3_tts_cuda_graphs.cli.job import PLAYED_ONLY, Job, goes_to_file, with_lines
from qwen3_tts_cuda_graphs.cli.long_lines import cut_lines
from qwen3_tts_cuda_graphs.cli.player import Player
from qwen3_tts_cuda_graphs.cli.progress import Progress
from qwen3_tts_cuda_graphs.cli.text_files import Pipe, read_text_lines
from qwen3_tts_cuda_graphs.cli.voice_options import VoiceOption
from qwen3_tts_cuda_graphs.common.command import show_note, show_progress, show_warning
from qwen3_tts_cuda_graphs.common.formats import format_of
from qwen3_tts_cuda_graphs.common.loading import choose_device, load, model_errors
from qwen3_tts_cuda_graphs.common.output_files import check_writable, is_stdout, write_bytes
from qwen3_tts_cuda_graphs.common.samples import Chunk, at_rate
from qwen3_tts_cuda_graphs.common.speech_files import write_audio
from qwen3_tts_cuda_graphs.common.subtitles import format_subtitles
from qwen3_tts_cuda_graphs.common.voices import clone_prompt, load_speakers
from qwen3_tts_cuda_graphs.prompts.arriving_text import tokens_in_prompt
from qwen3_tts_cuda_graphs.prompts.script import Cue, Part, nth_seed, silence_before
from qwen3_tts_cuda_graphs.speech.long_text import part_arguments, speak, style_warning, takes_style, with_cues
from qwen3_tts_cuda_graphs.speech.streaming import stream

PIPE_TIMEOUT = 600.0  # seconds that a part of stdin may stay unfinished


@dataclass(frozen=True)
class Output:
    """A file, and the parts that are spoken in it."""

    path: Path
    subtitles: Path | None
    script: Iterable[Part]


def run(job: Job) -> None:
    with model_errors():
        job = prepared(job)
        finished = finished_parts(job)
        outputs = plan_outputs(job)
        progress = Progress([part.text for part in all_parts(job) if part.text])
        try:
            with Player() if job.play else contextlib.nullcontext() as player:
                narrator = Narrator(job, finished, progress, player)
                for output in outputs:
                    summary = narrator.write(output)
                    if output is outputs[0]:  # the path is the same for all files
                        summary += f"; {narrator.tts.speech.path}"
                    print(summary, file=sys.stderr if is_stdout(output.path) else sys.stdout, flush=True)
                if job.pipe and job.pipe.error:  # everything before the error is spoken and kept
                    raise job.pipe.error
        except KeyboardInterrupt as stop:
            stop.args = (what_is_kept(job, finished, progress.seconds),)
            raise
        if finished:
            finished.remove()


class Narrator:
    """Loads the model of a job, speaks its parts and writes its files."""

    def __init__(self, job: Job, finished: FinishedParts | None, progress: Progress, player: Player | None):
        self.job = job
        self.finished = finished
        self.progress = progress
        self.player = player
        self.tts = load(job.model, job.device, job.dtype, max_seq_len=job.max_seq_len, fused=job.fused)
        show_progress("")
        self.method, arguments, voices = method_and_arguments(job, self.tts)
        self.arguments = functools.cache(partial(part_arguments, self.method, arguments, voices))
        self.utterance = utterance_function(job, self.method)
        self.has_warned = False  # that styles are ignored
        self.numbers = itertools.count()  # of the utterances in all files; they decide the seeds
        progress.begin()
        warnings.showwarning = progress.show_warning
        if finished:
            finished.open(job.resume)

    def speak(self, number: int, part: Part) -> Iterator[Chunk]:
        if part.style and not takes_style(self.method) and not self.has_warned:
            show_warning(style_warning(part.style))
            self.has_warned = True
        lexicon = self.job.lexicon
        text = lexicon.replace(part.text) if isinstance(part.text, str) else lexicon.follow(part.text)
        own = self.arguments(part.voice, part.style) | dict(text=text, seed=nth_seed(self.job.seed, number))
        return self.progress.follow(self.utterance(**own), part.text)

    def speak_or_keep(self, numbered: list[tuple[int, Part]]) -> Iterator[Iterator[Chunk]]:
        """Speak each part into a file of its own, unless an interrupted run has finished it. Then read all of them."""
        for number, part in numbered:
            if self.finished.has(number):
                self.progress.skip(part.text)
            else:
                write_audio(self.finished.path(number), self.speak(number, part))
        return (self.finished.read(number) for number, _ in numbered)

    def chunks_of(self, output: Output, cues: list[Cue]) -> tuple[Iterator[Chunk], int]:
        """The audio of a file, and an upper bound of its samples if that is known, otherwise 0. The cues of its parts
        are appended to `cues` as they are spoken."""
        job = self.job
        script, parts = itertools.tee(output.script)  # of a pipe, with_cues reads a part before its utterance does
        numbered = ((next(self.numbers), part) for part in parts if part.text)
        samples = 0
        if self.finished:
            numbered = [*numbered]
            utterances = self.speak_or_keep(numbered)
            silence = silence_in(output.script, job.pause)
            samples = self.finished.samples([number for number, _ in numbered], silence, job.sample_rate)
        else:
            utterances = itertools.starmap(self.speak, numbered)
        chunks = without_cues(with_cues(script, utterances, self.tts.speech.rate, job.pause), cues)
        if self.player:
            chunks = self.player.follow(chunks)
        if job.sample_rate:
            chunks = at_rate(chunks, job.sample_rate)
        return chunks, samples

    def write(self, output: Output) -> str:
        """Write a file and its subtitles. Returns a line that says so."""
        job, progress = self.job, self.progress
        start, spoken_before, kept_before = time.perf_counter(), progress.seconds, progress.skipped
        cues = []
        chunks, samples = self.chunks_of(output, cues)
        first = next(chunks, None)
        if first is None:
            raise (job.pipe and job.pipe.error) or ValueError("the text is empty: give something to say")
        first_ms = (time.perf_counter() - start) * 1e3
        seconds = write_audio(output.path, itertools.chain([first], chunks), job.stream, samples, job.format)
        if output.subtitles:
            suffix = output.subtitles.suffix.lower()
            subtitles = format_subtitles(suffix, cues, self.tts.speech.rate, job.language, job.sample_rate)
            write_bytes(output.subtitles, subtitles.encode(), "--subtitles")
        show_progress("")

        wall = time.perf_counter() - start
        now = progress.seconds - spoken_before  # without pauses, and without what --resume has kept
        summary = f"{'played' if self.player and output.path == PLAYED_ONLY else output.path}: {seconds:.2f} s of audio"
        if progress.skipped > kept_before:
            summary += f", {now:.2f} s of it now"
        summary += f" in {wall:.2f} s, {now / wall:.2f} x real time"
        if job.stream and not job.pipe:
            summary += f", first audio after {first_ms:.0f} ms"
        return summary


def utterance_function(job: Job, method: Callable) -> Callable[..., Iterator[Chunk]]:
    """A function that speaks one text with these options. Pauses between texts keep their length with --speed."""
    utterance = partial(speak if job.limit_speech else stream, method)
    if job.retry:
        utterance = partial(utterance, retries=job.retry)
    if job.speed == 1:
        return utterance
    from qwen3_tts_cuda_graphs.common.tempo import at_speed  # imports PyAV

    return lambda **request: at_speed(utterance(**request), job.speed)


def without_cues(items: Iterable[Chunk | Cue], cues: list[Cue]) -> Iterator[Chunk]:
    """Yield the chunks, and append the cues to the list."""
    for item in items:
        if isinstance(item, Cue):
            cues.append(item)
        else:
            yield item


def silence_in(script: list[Part], pause: float) -> float:
    """Seconds of silence between the parts."""
    return sum(silence_before(part, previous, pause) for previous, part in zip([None, *script], script))


def what_is_kept(job: Job, finished: FinishedParts | None, seconds: float) -> str:
    """The message after Ctrl-C."""
    kept = finished.count() if finished else 0
    if kept:
        number = sum(bool(part.text) for part in all_parts(job))
        option = f"--output {job.output} --resume"
        return f"stopped: {kept} of {number} utterances are kept; the same command with {option} continues"
    if finished and finished.belong_to_this_run():
        finished.remove()
    if not goes_to_file(job.output):
        return "stopped"
    if job.stream and seconds and format_of(job.output, job.format)[0] in ("WAV", "RAW"):
        return f"stopped: the first {seconds:.2f} s of audio are kept"
    return "stopped: nothing was written"


def prepared(job: Job) -> Job:
    """The job with what job.py leaves open: the device, the voices of files, and lines cut into parts that fit into
    the cache. If there is one line, its parts stay in one file."""
    size = job.config["talker_config"]["hidden_size"]
    voices = {name: with_content(voice, size) for name, voice in job.voices.items()}
    dtype = job.dtype and getattr(torch, job.dtype)
    job = replace(job, dtype=dtype, device=choose_device(job.device), voices=voices)
    if job.lines is None and job.stream:
        return replace(job, lines=Pipe(sys.stdin.buffer, job.script, not job.plain, job.check_voice))
    if job.lines is None:
        job = with_lines(job, read_text_lines("-", None, job.paragraphs))
    return replace(job, lines=cut_lines(job), join=job.join or len(job.lines) == 1)


def with_content(voice: VoiceOption, hidden_size: int) -> VoiceOption:
    if not voice.files:
        return voice
    return replace(voice, content=load_speakers(voice.files, voice.weights, hidden_size))


def method_and_arguments(job: Job, tts) -> tuple[Callable, dict, dict[str, dict]]:
    """Upstream's method, its arguments except the text, and the arguments that each voice of the script replaces."""
    arguments = {"language": job.language, **job.sampling}
    if job.non_streaming_mode is not None:
        arguments["non_streaming_mode"] = job.non_streaming_mode
    if job.pipe:
        arguments["text_timeout"] = PIPE_TIMEOUT
    if job.kind != "base":
        arguments["instruct"] = job.instruct
    voices = {name: voice_arguments(voice, tts) for name, voice in job.voices.items()}
    arguments |= voices.pop(None)
    if job.kind == "custom_voice":
        return tts.generate_custom_voice, arguments, voices
    if job.kind == "voice_design":
        return tts.generate_voice_design, arguments, voices
    tokens = tokens_in_prompt(tts, arguments["voice_clone_prompt"]) + 1  # with the one of the first frame
    if job.pipe and tokens > 2:  # an in-context voice
        show_note(
            f"with a transcript a line is spoken once it has {tokens} tokens or has ended; without one from its second "
            "token on"
        )
    return tts.generate_voice_clone, arguments, voices


def voice_arguments(voice: VoiceOption, tts) -> dict:
    if voice.speaker is not None:
        return {"speaker": voice.speaker}
    if voice.ref_audio:
        return {"voice_clone_prompt": clone_prompt(tts, *voice.content, voice.ref_text, voice.silence)}
    return {"voice_clone_prompt": voice.content} if voice.files else {}


def all_parts(job: Job) -> list[Part]:
    """The parts of a complete text. Empty for a pipe, whose parts are not known yet."""
    return [] if job.pipe else [*itertools.chain(*job.lines)]


def finished_parts(job: Job) -> FinishedParts | None:
    """The folder that keeps finished parts for --resume, if this job has one."""
    if sum(bool(part.text) for part in all_parts(job)) == 1 or job.stream or not goes_to_file(job.output):
        return None
    finished = FinishedParts(job.output, fingerprint(job))
    finished.check(job.resume)
    return finished


def plan_outputs(job: Job) -> list[Output]:
    """One file for the whole text or for a pipe, otherwise one for each line."""
    if job.pipe or job.join:
        return [Output(job.output, job.subtitles, job.pipe.parts() if job.pipe else all_parts(job))]
    outputs = []
    for index, line in enumerate(job.lines, 1):
        paths = [path and path.with_stem(f"{path.stem}-{index:03}") for path in (job.output, job.subtitles)]
        outputs.append(Output(*paths, line))
        for path, option in zip(paths, ("--output", "--subtitles")):
            if path:
                check_writable(path, *job.inputs, option=option)
    return outputs


def fingerprint(job: Job) -> str:
    """A hash of everything that the speech depends on."""
    changes = dict(config={}, inputs=[], lexicon=job.lexicon.entries, resume=False, subtitles=None)
    changes["lines"] = [[replace(part, line=0) for part in line] for line in job.lines]
    digest = hashlib.sha256(repr(replace(job, **changes)).encode())
    for voice in job.voices.values():
        for path in voice.paths:
            digest.update(path.read_bytes())
    return digest.hexdigest()
