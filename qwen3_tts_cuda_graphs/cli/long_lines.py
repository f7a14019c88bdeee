"""Cut lines that may not fit into the cache into parts, before the model's weights are downloaded or loaded."""

import functools
from functools import partial

import transformers

from qwen3_tts_cuda_graphs.cli.job import Job
from qwen3_tts_cuda_graphs.cli.voice_options import VoiceOption
from qwen3_tts_cuda_graphs.common.checkpoint_files import file_errors
from qwen3_tts_cuda_graphs.common.hub import local_folder
from qwen3_tts_cuda_graphs.common.published import FRAME_RATE
from qwen3_tts_cuda_graphs.common.voice_files import REFERENCE_SILENCE
from qwen3_tts_cuda_graphs.prompts.cut import cut, tokens_that_fit
from qwen3_tts_cuda_graphs.prompts.script import Part, cut_parts


def cut_lines(job: Job) -> list[list[Part]]:
    """Cut parts that may not fit into the cache. A line of one part becomes several lines, others stay one line."""

    @functools.cache
    def most_tokens(name: str | None, style: str | None) -> int:
        voice = job.voices.get(name and name.lower(), VoiceOption())
        reference = 0
        if voice.ref_text:
            audio, rate = voice.content
            reference = int((len(audio) / rate + REFERENCE_SILENCE) * FRAME_RATE) + len(voice.ref_text.encode())
        arguments = {"instruct": style or job.instruct, "voice_clone_prompt": voice.content if voice.files else None}
        return tokens_that_fit(job.max_seq_len, arguments, reference=reference)

    def cut_part(part: Part) -> list[str]:
        try:
            most = most_tokens(part.voice, part.style)
        except ValueError:  # there is no room for a long text, but a short one may fit; otherwise a warning follows
            if count_tokens(job.model, job.lexicon.replace(part.text)) < job.max_seq_len:
                return [part.text]
            raise
        return cut([part.text], most, partial(count_tokens, job.model), job.language, job.lexicon.replace)

    lines = []
    for line in job.lines:
        parts = cut_parts(line, cut_part)
        lines += [parts] if len(line) > 1 else [[part] for part in parts]
    return lines


def count_tokens(model: str, text: str) -> int:
    return len(text_tokenizer(model)(text).input_ids)


@functools.cache
def text_tokenizer(model: str):
    """The model's own tokenizer, which needs no weights."""
    folder = local_folder(model)
    with file_errors(folder):
        return transformers.Qwen2TokenizerFast.from_pretrained(folder, fix_mistral_regex=False)
