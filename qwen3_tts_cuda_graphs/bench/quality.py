"""`bench.py --listen`: does each path speak as well as upstream? Meaningful with the published weights only.

Upstream and each path speak the sentences of sentences.tsv with the same seeds, and a speech recognizer that
transformers loads transcribes them. Reported are the recognizer's word errors (characters in Chinese), the similarity
to the requested voice (the cosine of speaker embeddings, by upstream's own encoder), the seconds of speech, and how
many utterances do not end. Sampling differs between paths after one near-tie of bfloat16, so single sentences differ;
the intervals are 95% bootstrap intervals over sentences, paired for the change from upstream.
"""

import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from qwen3_tts_cuda_graphs.bench import MEGAKERNEL, UPSTREAM
from qwen3_tts_cuda_graphs.bench.measured import Checkpoint
from qwen3_tts_cuda_graphs.bench.timing import ON_GPU, Effort, NamedRows, Row, available_paths, load_measured
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE
from qwen3_tts_cuda_graphs.common.samples import Chunk, join, resample
from qwen3_tts_cuda_graphs.prompts.templates import tokenize
from qwen3_tts_cuda_graphs.speech import accelerate
from qwen3_tts_cuda_graphs.speech.engine import Engine
from qwen3_tts_cuda_graphs.speech.long_text import frame_limit
from qwen3_tts_cuda_graphs.speech.streaming import stream

ROWS = 16  # sentences that are spoken together
RESAMPLES = 2000  # of the bootstrap
COLUMNS = ["word_errors_percent", "word_errors_low", "word_errors_high", "change_low", "change_high"]
COLUMNS += ["similarity", "seconds", "runaways"]

Scores = dict[str, Any]  # the transcript and the figures of one sentence that one path has spoken
SpeakAll = Callable[[list[dict]], Iterator[Chunk]]  # the arguments of each request -> its audio


class Sentence(NamedTuple):
    language: str
    text: str


def read_sentences(per_language: int | None) -> list[Sentence]:
    lines = Path(__file__).with_name("sentences.tsv").read_text(encoding="utf-8").splitlines()
    sentences = [Sentence(*line.split("\t")) for line in lines]
    by_language = {}
    for sentence in sentences:
        by_language.setdefault(sentence.language, []).append(sentence)
    return [sentence for group in by_language.values() for sentence in group[:per_language]]


def measure(checkpoint: Checkpoint, effort: Effort) -> NamedRows:
    transcribe = Recognizer(effort.recognizer)
    sentences = read_sentences(effort.sentences)
    voice = checkpoint.voice()
    upstream = None
    for name, tts, speak_all in measured_paths(checkpoint.model):
        limits = [frame_limit(len(tokenize(tts, sentence.text))) for sentence in sentences]
        requests = [
            sentence._asdict() | voice | dict(max_new_tokens=limit + 1) for sentence, limit in zip(sentences, limits)
        ]
        scores = [
            score(tts, transcribe, checkpoint.speaker, sentence, limit, *audio)
            for sentence, limit, audio in zip(sentences, limits, speak_all(requests))
        ]
        upstream = upstream or scores
        yield name, summarize(scores, upstream)


def measured_paths(model: str) -> Iterator[tuple[str, object, SpeakAll]]:
    """Upstream and each path: the name, the model, and a function that speaks a list of requests."""
    tts = load_measured(model)
    yield UPSTREAM, tts, partial(one_by_one, partial(speak_whole, tts))
    paths = available_paths(tts)
    del tts
    for path in paths:
        tts = accelerate(load_measured(model), fused=path == MEGAKERNEL, rows=ROWS)
        yield path, tts, partial(one_by_one, partial(speak_whole, tts))
    yield f"{path}, streamed", tts, partial(one_by_one, partial(speak_streamed, tts))
    yield f"{ROWS} at once", tts, partial(speak_together, tts)


def one_by_one(speak: Callable[..., Chunk], requests: list[dict]) -> Iterator[Chunk]:
    for seed, request in enumerate(requests):
        torch.manual_seed(seed)
        yield speak(**request)


def speak_whole(tts, **request) -> Chunk:
    (audio,), rate = tts.generate_voice_clone(**request)
    return audio, rate


def speak_streamed(tts, **request) -> Chunk:
    return join(stream(tts.generate_voice_clone, **request))


def speak_together(tts, requests: list[dict]) -> Iterator[Chunk]:
    columns = {name: [request[name] for request in requests] for name in requests[0]}
    columns["voice_clone_prompt"] = requests[0]["voice_clone_prompt"]  # the same for all
    with Engine(tts) as engine:
        audios, rate = engine.generate(tts.generate_voice_clone, seed=0, **columns)
    yield from ((audio, rate) for audio in audios)


# ---- One sentence


class Recognizer:
    """A speech recognizer from the model hub or from a folder."""

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


def score(
    tts,
    transcribe: Recognizer,
    speaker: torch.Tensor,
    sentence: Sentence,
    limit: int,
    audio: np.ndarray,
    rate: int,
) -> Scores:
    """Compare speech with its sentence and with the speaker's embedding. limit: frames of a runaway"""
    transcript = transcribe(audio, rate, sentence.language)
    expected, heard = (words_of(text, sentence.language) for text in (sentence.text, transcript))
    voice = tts.model.extract_speaker_embedding(audio, rate).float().cpu()
    return dict(
        text=sentence.text,
        transcript=transcript,
        words=len(expected),
        errors=edit_distance(expected, heard),
        similarity=torch.cosine_similarity(voice, speaker.float().cpu(), dim=0).item(),
        seconds=len(audio) / rate,
        is_runaway=round(len(audio) / rate * FRAME_RATE) >= limit,
    )


def words_of(text: str, language: str) -> list[str]:
    """The words of a text without case and punctuation. Chinese is counted in characters, as is usual."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("'", "").replace("’", "")
    text = "".join(character if character.isalnum() else " " for character in text)
    return [*text.replace(" ", "")] if language == "Chinese" else text.split()


def edit_distance(expected: list[str], heard: list[str]) -> int:
    """The number of words to insert, delete or replace (Levenshtein)."""
    distances = range(len(heard) + 1)  # from the first `row` words of `expected` to the first 0, 1, 2, ... of `heard`
    for row, word in enumerate(expected, 1):
        new = [row]
        for column, other in enumerate(heard, 1):
            new.append(min(distances[column] + 1, new[-1] + 1, distances[column - 1] + (word != other)))
        distances = new
    return distances[-1]


# ---- All sentences


def summarize(scores: list[Scores], upstream: list[Scores]) -> Row:
    """Figures of one path, and how they differ from upstream's, with 95% intervals."""
    everything = np.arange(len(scores))
    resampled = np.random.default_rng(0).integers(len(scores), size=(RESAMPLES, len(scores)))
    return dict(
        word_errors_percent=float(error_rate(scores, everything)),
        **interval("word_errors", error_rate(scores, resampled)),
        **interval("change", error_rate(scores, resampled) - error_rate(upstream, resampled)),
        similarity=float(similarity(scores, everything)),
        **interval("similarity_change", similarity(scores, resampled) - similarity(upstream, resampled)),
        seconds=sum(one["seconds"] for one in scores),
        runaways=sum(one["is_runaway"] for one in scores),
        sentences=scores,
    )


def error_rate(scores: list[Scores], chosen: np.ndarray) -> np.ndarray:
    """Word errors in percent of all words. chosen: indices of sentences (..., N)"""
    errors, words = (np.array([one[name] for one in scores])[chosen].sum(-1) for name in ("errors", "words"))
    return 100 * errors / words


def similarity(scores: list[Scores], chosen: np.ndarray) -> np.ndarray:
    return np.array([one["similarity"] for one in scores])[chosen].mean(-1)


def interval(name: str, figures: np.ndarray) -> Row:
    """The two ends of a 95% interval."""
    low, high = np.quantile(figures, (0.025, 0.975))
    return {f"{name}_low": float(low), f"{name}_high": float(high)}
