"""What generate.py does when its options are checked: load the model, speak, write the files.

Here are also the checks that need torch or the tokenizer. They come before the weights are loaded.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import transformers

from qwen3_tts_cuda_graphs.cli.finished_parts import Parts
from qwen3_tts_cuda_graphs.cli.options import PLAYED_ONLY, check_number_of_files, goes_to_file, has_parts, read_texts
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
from qwen3_tts_cuda_graphs.speech.long_text import speak, split_text, tokens_that_fit, with_pauses
from qwen3_tts_cuda_graphs.speech.streaming import stream

SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
PIPE_TIMEOUT = 600.0  # seconds that a line on stdin may stay unfinished


def run(args: argparse.Namespace) -> None:
    """Speak as the options of generate.py say."""
    with model_errors():
        finish_checks(args)
        progress = Progress(args)
        try:
            with Player() if args.play else contextlib.nullcontext() as player:
                speak_all(args, progress, player)
        except KeyboardInterrupt as stop:
            stop.args = (what_is_kept(args, progress.seconds),)
            raise
        if args.parts:
            args.parts.remove()


def speak_all(args: argparse.Namespace, progress: "Progress", player: Player | None) -> None:
    tts = load(args.model, args.device, args.dtype, max_seq_len=args.max_seq_len, fused=args.fused)
    show_progress("")
    method, request = voice_request(args, tts)
    utterance = partial(speak if args.limit_speech else stream, method, **request)
    if args.retry:
        utterance = partial(utterance, retries=args.retry)
    if args.speed != 1:
        utterance = in_tempo(utterance, args.speed)
    path = f"; {tts.speech.path}"

    progress.begin()
    warnings.showwarning = progress.show_warning
    if args.parts:
        args.parts.open(args.resume)
    for output, texts in args.outputs:
        is_spoken = args.parts and not args.join and args.parts.mark(texts[0][0]).is_file()
        if is_spoken and output.is_file():  # it may have been moved away since
            progress.skip(texts[0][1])
            continue
        start, spoken_before = time.perf_counter(), progress.seconds
        if args.parts and args.join:
            speak_parts(args, texts, utterance, progress)
            spoken = (args.parts.read(number) for number, _ in texts)
        else:
            spoken = (progress.follow(utterance(text=text, seed=nth_seed(args.seed, n)), text) for n, text in texts)
        chunks = with_pauses(spoken, args.pause)
        if player:
            chunks = player.follow(chunks)
        first = next(chunks, None)
        if first is None:
            raise ValueError("the text is empty: give something to say")
        first_ms = (time.perf_counter() - start) * 1e3
        samples = args.parts.samples(args.pause) if args.parts and args.join else 0
        seconds = write_audio(output, itertools.chain([first], chunks), args.stream, samples)
        show_progress("")
        wall = time.perf_counter() - start
        now = progress.seconds - spoken_before  # without pauses and without what --resume has kept
        summary = f"{'played' if player and output == PLAYED_ONLY else output}: {seconds:.2f} s of audio"
        if args.join and progress.skipped:
            summary += f", {now:.2f} s of it now"
        summary += f" in {wall:.2f} s, {now / wall:.2f} x real time"
        if args.stream and not isinstance(args.texts, Pipe):
            summary += f", first audio after {first_ms:.0f} ms"
        print(f"{summary}{path}", file=sys.stderr if str(output) == "-" else sys.stdout, flush=True)
        path = ""  # it is the same for all files
        if args.parts and not args.join:
            args.parts.mark(texts[0][0]).touch()


def in_tempo(utterance: Callable, speed: float) -> Callable:
    """Each utterance by itself: pauses between them stay as long as --pause says."""
    from qwen3_tts_cuda_graphs.common.tempo import at_speed  # which imports PyAV

    return lambda **request: at_speed(utterance(**request), speed)


def what_is_kept(args: argparse.Namespace, seconds: float) -> str:
    """For somebody who has interrupted the command."""
    kept = args.parts.finished() if args.parts else 0
    if kept:
        option = f"--output {args.output} --resume"
        return f"stopped: {kept} of {len(args.texts)} utterances are kept; the same command with {option} continues"
    if args.parts and args.parts.are_own():
        args.parts.remove()
    if not goes_to_file(args.output):
        return "stopped"
    if args.stream and seconds and is_wav(args.output):
        return f"stopped: the first {seconds:.2f} s of audio are kept"
    return "stopped: nothing was written"


def finish_checks(args: argparse.Namespace) -> None:
    """What options.py leaves open. Adds `outputs` and `parts`."""
    args.dtype = args.dtype and getattr(torch, args.dtype)
    args.device = choose_device(args.device)
    if args.config["tts_model_type"] == "base" and args.speaker:
        args.voice = load_speaker(args.speaker, args.config["talker_config"]["hidden_size"])
    if args.texts is None:
        args.texts = read_texts(args)
    check_lengths(args)
    args.outputs = plan_outputs(args)


def voice_request(args: argparse.Namespace, tts) -> tuple[Callable, dict]:
    """Upstream's method for this voice, and its arguments except the text."""
    kind = args.config["tts_model_type"]
    request = {name: getattr(args, name) for name in ("language", *SAMPLING)}
    if args.non_streaming_mode is not None:
        request["non_streaming_mode"] = args.non_streaming_mode
    if isinstance(args.texts, Pipe):
        request["text_timeout"] = PIPE_TIMEOUT
    if kind == "custom_voice":
        return tts.generate_custom_voice, request | {"speaker": args.speaker, "instruct": args.instruct}
    if kind == "voice_design":
        return tts.generate_voice_design, request | {"instruct": args.instruct}

    prompt = args.voice
    if args.ref_audio:
        prompt = clone_prompt(
            tts, *args.voice, args.ref_text, silence=0 if args.no_append_silence else REFERENCE_SILENCE
        )
    tokens = tokens_to_begin(tts, prompt)
    if isinstance(args.texts, Pipe) and tokens > 2:  # in-context
        show_note(
            f"with a transcript a line is spoken once it has {tokens} tokens or has ended; without one from its second "
            "token on"
        )
    return tts.generate_voice_clone, request | {"voice_clone_prompt": prompt}


def speak_parts(args: argparse.Namespace, texts: list, utterance: Callable, progress: "Progress") -> None:
    """Speak what is not there yet, each utterance into a file of its own."""
    for number, text in texts:
        part = args.parts.path(number)
        if part.is_file():
            progress.skip(text)
        else:
            write_audio(part, progress.follow(utterance(text=text, seed=nth_seed(args.seed, number)), text))


def check_lengths(args: argparse.Namespace) -> None:
    """A text takes one position of the cache per token. Lines that are too long are cut; one line stays one file."""
    if not isinstance(args.texts, Pipe):
        args.join = args.join or len(args.texts) == 1
        args.texts = split_texts(args)


def split_texts(args: argparse.Namespace) -> list[str]:
    """Cut lines that may not fit into the cache."""
    reference_positions = 0
    if args.ref_text:
        audio, rate = args.voice
        reference_positions = int((len(audio) / rate + REFERENCE_SILENCE) * FRAME_RATE) + len(args.ref_text.encode())
    voice = {"instruct": args.instruct, "voice_clone_prompt": None if args.ref_audio else args.voice}
    try:
        most = tokens_that_fit(args.max_seq_len, voice, reference_positions)
    except ValueError:  # short texts have room even so, and speech that is cut off is reported
        if all(count_tokens(args.model, text) < args.max_seq_len for text in args.texts):
            return args.texts
        raise

    def fits(text: str) -> bool:
        return len(text.encode()) <= most or count_tokens(args.model, text) <= most

    return split_text(args.texts, fits, args.language)


def count_tokens(model: str, text: str) -> int:
    return len(text_tokenizer(model)(text).input_ids)


@functools.cache
def text_tokenizer(model: str):
    """The model's own tokenizer, before its weights are there."""
    folder = local_folder(model)
    with file_errors(folder):
        return transformers.Qwen2TokenizerFast.from_pretrained(folder, fix_mistral_regex=False)


def plan_outputs(args: argparse.Namespace) -> list[tuple[Path, Iterable[tuple[int, str | Line]]]]:
    """(file, its numbered utterances): one file, or one for each line. All lines of a pipe go to one file."""
    output, texts = args.output, args.texts
    args.parts = None
    if isinstance(texts, Pipe):
        return [(output, enumerate(texts.lines()))]
    check_number_of_files(args)
    if has_parts(args):
        args.parts = Parts(output, fingerprint(args))
        args.parts.check(args.resume)
    numbered = [*enumerate(texts)]
    if len(texts) == 1 or args.join:
        return [(output, numbered)]
    outputs = [(output.with_stem(f"{output.stem}-{number + 1:03}"), [(number, text)]) for number, text in numbered]
    for path, _ in outputs:
        check_writable(path, args.ref_audio, args.speaker, args.text_file)
    return outputs


def fingerprint(args: argparse.Namespace) -> str:
    """Of everything that decides what is spoken."""
    options = vars(args) | {"config": None, "voice": None, "resume": None, "device": str(args.device)}
    digest = hashlib.sha256(repr(sorted(options.items())).encode())
    for path in (args.ref_audio, args.speaker):
        if path and Path(path).is_file():
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()


class Progress:
    """How far the speech is, and how long the rest will take, on a terminal."""

    def __init__(self, args: argparse.Namespace):
        self.texts = [] if isinstance(args.texts, Pipe) else args.texts
        self.seconds = 0.0  # of audio
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
