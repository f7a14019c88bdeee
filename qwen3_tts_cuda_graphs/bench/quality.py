"""`bench.py --listen`: does each path speak as well as upstream? For whoever has the published weights.

The sentences of sentences.tsv are spoken by upstream and by each path, with the same seeds, and transcribed by a speech
recognizer that transformers loads. Counted are the recognizer's word errors (characters in Chinese), how similar the
voice is to the one asked for (the cosine of speaker embeddings, by upstream's own encoder), how long the speech is, and
how often it does not end. Sampling differs between paths after one near-tie of bfloat16, so single sentences differ;
the intervals are 95% bootstrap intervals over sentences, paired for the change from upstream.
"""

import random
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.single import MEGAKERNEL, SEPARATE
from qwen3_tts_cuda_graphs.bench.timing import ON_GPU, Effort, NamedRows, Row, load_alone
from qwen3_tts_cuda_graphs.common.audio_files import join, resample
from qwen3_tts_cuda_graphs.common.checkpoints import FRAME_RATE
from qwen3_tts_cuda_graphs.common.voices import speaker_prompt
from qwen3_tts_cuda_graphs.fast.megakernel import SOURCE, stacks_of
from qwen3_tts_cuda_graphs.prompts.templates import tokenize
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.engine import Engine
from qwen3_tts_cuda_graphs.speech.long_text import frame_limit
from qwen3_tts_cuda_graphs.speech.streaming import stream

ROWS = 16  # sentences that are spoken together
RESAMPLES = 2000

Audio = tuple[np.ndarray, int]
Speak = Callable[[list[dict]], Iterator[Audio]]


class Sentence(NamedTuple):
    language: str
    text: str


class Judged(NamedTuple):
    """One sentence as one path has spoken it."""

    text: str
    transcript: str
    words: int
    errors: int
    similarity: float
    seconds: float
    is_runaway: bool


def read_sentences(per_language: int | None) -> list[Sentence]:
    lines = Path(__file__).with_name("sentences.tsv").read_text(encoding="utf-8").splitlines()
    sentences = [Sentence(*line.split("\t")) for line in lines]
    languages = dict.fromkeys(sentence.language for sentence in sentences)
    return [sentence for name in languages for sentence in [s for s in sentences if s.language == name][:per_language]]


def measure_quality(checkpoint: Checkpoint, effort: Effort, recognizer: str) -> NamedRows:
    transcribe = Recognizer(recognizer)
    sentences = read_sentences(effort.sentences)
    upstream = None
    for name, tts, speak in ways(checkpoint.model):
        limits = [frame_limit(len(tokenize(tts, sentence.text))) for sentence in sentences]
        requests = [
            dict(
                text=sentence.text,
                language=sentence.language,
                max_new_tokens=limit + 1,
                voice_clone_prompt=speaker_prompt(checkpoint.speaker),
            )
            for sentence, limit in zip(sentences, limits)
        ]
        judged = [
            judge(tts, transcribe, checkpoint.speaker, *spoken) for spoken in zip(sentences, limits, speak(requests))
        ]
        upstream = upstream or judged
        yield name, summary(judged, upstream)


def ways(model: str) -> Iterator[tuple[str, object, Speak]]:
    """Each path: its name, its model and what speaks a list of requests."""
    tts = load_alone(model)
    yield "upstream", tts, partial(one_by_one, tts)
    paths = [SEPARATE] if SOURCE.why_not(*stacks_of(tts.model.talker)) else [SEPARATE, MEGAKERNEL]
    del tts
    for path in paths:
        tts = accelerate(load_alone(model), fused=path == MEGAKERNEL, rows=ROWS)
        yield path, tts, partial(one_by_one, tts)
        if path == paths[-1]:
            yield f"{path}, streamed", tts, partial(streamed, tts)
            yield f"{ROWS} at once", tts, partial(together, tts)


def one_by_one(tts, requests: list[dict]) -> Iterator[Audio]:
    for seed, request in enumerate(requests):
        torch.manual_seed(seed)
        (audio,), rate = tts.generate_voice_clone(**request)
        yield audio, rate


def streamed(tts, requests: list[dict]) -> Iterator[Audio]:
    for seed, request in enumerate(requests):
        torch.manual_seed(seed)
        yield join(stream(tts.generate_voice_clone, **request))


def together(tts, requests: list[dict]) -> Iterator[Audio]:
    columns = {name: [request[name] for request in requests] for name in requests[0]}
    columns["voice_clone_prompt"] = requests[0]["voice_clone_prompt"]  # one for all
    with Engine(tts) as engine:
        audios, rate = engine.generate(tts.generate_voice_clone, seed=0, **columns)
    yield from ((audio, rate) for audio in audios)


# ---- One sentence


class Recognizer:
    """A speech recognizer of the hub, or in a folder."""

    def __init__(self, name: str):
        from transformers import pipeline

        try:
            self.pipeline = pipeline("automatic-speech-recognition", model=name, device=0 if ON_GPU else -1)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{name} cannot be loaded as a speech recognizer: {reason}") from None
        self.rate = self.pipeline.feature_extractor.sampling_rate
        self.takes_language = bool(getattr(self.pipeline.model.generation_config, "is_multilingual", False))

    def __call__(self, audio: np.ndarray, rate: int, language: str) -> str:
        samples = resample(audio, rate, self.rate)
        options = {"generate_kwargs": {"language": language.lower()}} if self.takes_language else {}
        return self.pipeline({"raw": samples, "sampling_rate": self.rate}, **options)["text"]


def judge(tts, transcribe: Recognizer, speaker: torch.Tensor, sentence: Sentence, limit: int, spoken: Audio) -> Judged:
    audio, rate = spoken
    transcript = transcribe(audio, rate, sentence.language)
    expected, heard = (words_of(text, sentence.language) for text in (sentence.text, transcript))
    voice = tts.model.extract_speaker_embedding(audio, rate).float().cpu()
    return Judged(
        text=sentence.text,
        transcript=transcript,
        words=len(expected),
        errors=edit_distance(expected, heard),
        similarity=torch.cosine_similarity(voice, speaker.float().cpu(), dim=0).item(),
        seconds=len(audio) / rate,
        is_runaway=round(len(audio) / rate * FRAME_RATE) >= limit,
    )


def words_of(text: str, language: str) -> list[str]:
    """Without case and punctuation. Chinese is counted in characters, as is usual."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("'", "").replace("’", "")
    text = "".join(character if character.isalnum() else " " for character in text)
    return [*text.replace(" ", "")] if language == "Chinese" else text.split()


def edit_distance(expected: list[str], heard: list[str]) -> int:
    """Words to insert, delete or replace (Levenshtein)."""
    distances = range(len(heard) + 1)  # between the first words of `expected` and each beginning of `heard`
    for row, word in enumerate(expected, 1):
        new = [row]
        for column, other in enumerate(heard, 1):
            new.append(min(distances[column] + 1, new[-1] + 1, distances[column - 1] + (word != other)))
        distances = new
    return distances[-1]


# ---- All of them


def summary(judged: list[Judged], upstream: list[Judged]) -> Row:
    """Figures of one path, and how they differ from upstream's, with 95% intervals."""
    pairs = [*zip(judged, upstream)]
    changes = interval(pairs, lambda sample: error_rate([j for j, _ in sample]) - error_rate([u for _, u in sample]))
    similarity = interval(pairs, lambda sample: float(np.mean([j.similarity - u.similarity for j, u in sample])))
    low, high = interval(judged, error_rate)
    return dict(
        word_errors_percent=error_rate(judged),
        word_errors_low=low,
        word_errors_high=high,
        change_low=changes[0],
        change_high=changes[1],
        similarity=float(np.mean([one.similarity for one in judged])),
        similarity_change_low=similarity[0],
        similarity_change_high=similarity[1],
        seconds=sum(one.seconds for one in judged),
        runaways=sum(one.is_runaway for one in judged),
        sentences=[one._asdict() for one in judged],
    )


def error_rate(judged: list[Judged]) -> float:
    """In percent of all words."""
    return 100 * sum(one.errors for one in judged) / sum(one.words for one in judged)


def interval(values: list, figure: Callable[[list], float]) -> tuple[float, float]:
    dice = random.Random(0)
    figures = sorted(figure(dice.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return figures[round(0.025 * RESAMPLES)], figures[round(0.975 * RESAMPLES) - 1]
