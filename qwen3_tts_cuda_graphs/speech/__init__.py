"""Requests in, sound out.

A runner owns the rows of a model and has no thread of its own. Three loops drive it, one at a time. Each calls `admit`
for its requests, `step` for each frame, and `release` for what is complete:

    one stream          streaming.py, audio_chunks       one or more steps for each chunk that the caller reads
    a list of texts     whole_calls.py, decode_all       until all are complete; a text joins when a row is free
    many listeners      engine.py, run_until_idle        in the engine's thread, while any of them can advance

State, by owner:

    Runner        tensors, graphs, codec; which utterance is in which row; frames that the GPU has not finished
    Speech        the runner of a model, and whose turn it is to use it
    Utterance     progress of a request, and new text that has not been written into its row
    Listener      an utterance of an engine; also how much of its audio was delivered and read
    Intake        the thread that builds prompts, and the listeners that wait for a row
    Engine        two more threads, the listeners that have a row, and `changed`, the lock for shared state

utterance.py    one request in the runner: what to decode, and its progress
runner.py       the rows of one model: admit, step, release; prefill.py reads prompts into rows
turns.py        gives the runner to one caller at a time; a paused stream can lose its turn
speech.py       what `accelerate` stores as tts.speech: the runner, and whose turn it is
whole_calls.py  upstream's methods, which return complete audio, on the runner's rows
streaming.py    audio of one text while it is generated
long_text.py    scripts and texts of any length; stops speech that does not end
engine.py       many listeners: drives the runner in a thread of its own, as schedule.py decides
listener.py     one request to the engine: its text and a callback for its audio
intake.py       a thread that builds the prompts of listeners and tokenizes arriving text
warm_up.py      two short requests when a model is loaded onto a GPU, so that a user's first one is not slow
"""

from qwen3_tts_cuda_graphs.fast import batched, codec_kernels, megakernel, overlapped_stack
from qwen3_tts_cuda_graphs.fast.layers import bypass_config_getattr, replace_layers
from qwen3_tts_cuda_graphs.fast.paths import check_torch
from qwen3_tts_cuda_graphs.fast.rows import batch_sizes
from qwen3_tts_cuda_graphs.prompts.build import Prompts
from qwen3_tts_cuda_graphs.prompts.checks import check_counts
from qwen3_tts_cuda_graphs.prompts.cut import MAX_SEQ_LEN
from qwen3_tts_cuda_graphs.prompts.incremental_tokenizer import use_qwens_pre_tokens
from qwen3_tts_cuda_graphs.prompts.text_table import use_text_table
from qwen3_tts_cuda_graphs.speech.runner import Runner
from qwen3_tts_cuda_graphs.speech.speech import Speech
from qwen3_tts_cuda_graphs.speech.warm_up import warm_up
from qwen3_tts_cuda_graphs.speech.whole_calls import replace_methods


def accelerate(tts, max_seq_len: int = MAX_SEQ_LEN, rows: int = 1, fused: bool | None = None):
    """Make a model's methods fast, in place. No other thread may use the GPU meanwhile. After an error, load the model
    again.

    max_seq_len: positions for prompt and speech together, one per frame (12.5 per second)
    rows: texts of a list, or streams of an engine, that are spoken together. Each takes memory on a GPU.
    fused: the megakernel of fast/. True requires it, False avoids it, None uses it where it runs.
    """
    check_counts(rows=rows, max_seq_len=max_seq_len)
    talker = tts.model.talker
    on_gpu = talker.device.type == "cuda"
    check_torch()
    codec_kernels.SOURCE.compile_ahead(tts.model.speech_tokenizer.model.decoder)
    if fused is not False:
        megakernel.SOURCE.compile_ahead(*megakernel.stacks_of(talker))
    bypass_config_getattr(tts.model.config, talker.config)
    complete_speakers(talker.config)
    use_qwens_pre_tokens(tts.processor.tokenizer)  # `load` has done so; upstream's own loading has not
    tts._tokenize_texts([""])  # sets the tokenizer's padding, which must not change while another thread tokenizes
    host_talker = use_text_table(talker) if on_gpu else None  # before the rest, as it frees GPU memory
    keepalive = replace_layers(talker, max_seq_len)
    batched.SOURCE.compile_ahead(talker.model)  # prefills need it even if the megakernel computes all frames
    overlapped_stack.compile_ahead(talker, batch_sizes(rows))
    runner = Runner(talker, tts.model.speech_tokenizer, rows, max_seq_len, fused, keepalive)
    tts.prompts = Prompts(tts, max_seq_len, host_talker)
    tts.speech = Speech(tts, runner)
    replace_methods(tts)
    if on_gpu:
        warm_up(tts)
    return tts


def complete_speakers(config) -> None:
    """Make the speakers of a finetuned model as upstream expects them: it looks up each name in lower case in two
    tables, but a finetuned model may have capitals in a name and no entry in the table of dialects."""
    ids, dialects = (
        {speaker.lower(): value for speaker, value in (table or {}).items()}
        for table in (config.spk_id, getattr(config, "spk_is_dialect", None))
    )
    for speaker, number in ids.items():
        dialect = dialects.setdefault(speaker, False)
        if not 0 <= number < config.vocab_size:
            raise ValueError(
                f"speaker {speaker!r} has the id {number}, beyond the {config.vocab_size} of the embedding"
            )
        if dialect and dialect not in config.codec_language_id:
            known = ", ".join(config.codec_language_id)
            raise ValueError(f"speaker {speaker!r} has the dialect {dialect!r}, which is none of {known}")
    config.spk_id = ids
    config.spk_is_dialect = dialects
