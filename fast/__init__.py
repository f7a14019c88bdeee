"""The same model, faster. `generate.accelerate` calls `plug_in`; the reference runs without this folder.

layers.py       upstream's layers from fewer kernels
megakernel.py   all layers, heads and the sampling of one step in a single launch, where the GPU can
                (megakernel.cu; megakernel_reference.py is the same step in torch)
self_test.py    is the megakernel right, on this GPU and with these weights
batched.py      the small kernels around the matrix products of many rows (batched.cu), for serving/
nvrtc.py        compiles and launches CUDA source, without a toolkit
kernel_cache.py keeps what it has compiled in a folder, and compiles in threads
codec.py        the codec's decoder as CUDA graphs that keep their state between chunks
codec_decoder.py, codec_kernels.py
                the layers of that decoder with few kernels (codec_kernels.cu), where the GPU can
text_table.py, prompt_templates.py
                prompts are built on the host, and like earlier ones
prompts.py      requests: upstream's prompts, checked
arriving_text.py, incremental_tokenizer.py
                a request whose text is still being written, and its tokens that can no longer change
streaming.py    audio while it is generated; stands on the codec
warm_up.py      one request, made when the model is loaded, so that a user's first is as fast as the others
paths.py        whether torch is new enough, whether the megakernel can run here, and if not, why; has it stopped
turns.py        one request at a time, also when a stream is paused
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from fast import codec_kernels
from fast.codec import CodecGraph
from fast.layers import bypass_config_getattr, replace_layers
from fast.megakernel import predictor_step, talker_step
from fast.paths import MegakernelStopped, check_torch, choose_path, compile_ahead, describe, why_stopped
from fast.prompt_templates import PromptTemplates
from fast.self_test import why_wrong
from fast.text_table import use_text_table
from fast.turns import Turns
from fast.warm_up import warm_up

log = logging.getLogger("qwen3_tts_cudagraphs")

# On an H200 a frame of the batched graphs takes as long as 5 to 6 of the megakernel: fewer texts go one by one.
MIN_BATCH = 6


def plug_in(tts, decoder, fused: bool | None) -> None:
    """Change what `decoder` captures and how `tts` decodes audio; on a GPU, make a first request.

    `fused` is the argument of `accelerate`.
    """
    talker = tts.model.talker
    codec = tts.model.speech_tokenizer
    check_torch(talker.device)
    codec_kernels.compile_ahead(codec.model.decoder)
    if fused is not False:
        compile_ahead(talker)
    bypass_config_getattr(tts.model.config, talker.config)
    complete_speakers(talker.config)
    decoder.lock = Turns()
    decoder.prompt_templates = PromptTemplates()

    log.info("capturing the codec")
    with ThreadPoolExecutor(1) as thread:  # the table is copied to the host meanwhile
        table = thread.submit(use_text_table, talker) if decoder.on_gpu else None
        codec.decode = CodecGraph(codec, decoder.lock).decode
    decoder.host_talker = table.result() if table else None

    use_megakernel, decoder.path = choose_path(talker, fused)
    decoder.keepalive = replace_layers(talker, decoder.max_seq_len)  # read by the graphs
    if use_megakernel:
        decoder.replace_steps = partial(use_megakernel_steps, decoder, fused)
        decoder.batch_sizes = partial(batch_sizes, max_batch=decoder.max_batch)
    else:
        decoder.replace_steps = use_separate_steps
    if decoder.on_gpu:
        decoder.graphs_for(1)
        talker.generate = decoder.generate
        warm_up(tts, decoder)


def complete_speakers(config) -> None:
    """Upstream looks speakers up in lower case, and each in both tables. Those of a finetuned model may have capitals
    and no dialect."""
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


def use_separate_steps(talker_graph, predictor_graph) -> None:
    rows = len(talker_graph.token)
    log.info("capturing frames of %d %s", rows, "row" if rows == 1 else "rows")
    for graph in (talker_graph, predictor_graph):
        tensors = [tensor for layer in graph.cache.layers for tensor in (layer.keys, layer.values)]
        graph.cache.reset = partial(torch._foreach_zero_, tensors)  # one launch instead of one per tensor


def use_megakernel_steps(decoder, fused: bool | None, talker_graph, predictor_graph) -> None:
    """One row runs on the megakernel, if that proves to be right here. `fused` is the argument of `accelerate`."""
    use_separate_steps(talker_graph, predictor_graph)
    if len(talker_graph.token) > 1:
        return
    talker_graph.step = talker_step(decoder.talker, talker_graph)
    predictor_graph.step = predictor_step(predictor_graph)
    log.info("testing the megakernel")
    if reason := why_wrong(talker_graph, predictor_graph):
        if fused:
            raise ValueError(f"fused=True: the megakernel failed its test on this machine: {reason}")
        log.warning("the megakernel failed its test on this machine and is not used: %s", reason)
        del talker_graph.step, predictor_graph.step  # the graphs' own
        leave_megakernel(decoder, f"it failed its test on this machine: {reason}")
        return
    talker_graph.all_ended = partial(check_and_end, decoder, talker_graph.all_ended, talker_graph, predictor_graph)


def leave_megakernel(decoder, reason: str) -> None:
    """What is captured from now on are separate kernels."""
    decoder.path = describe(reason)
    decoder.replace_steps = use_separate_steps
    decoder.batch_sizes = lambda rows: decoder.max_batch
    decoder.graphs.pop(1, None)


def megakernel_stopped(decoder, reason: str) -> MegakernelStopped:
    """The error of the request that was running. The next one runs on separate kernels."""
    log.warning("%s", reason)
    leave_megakernel(decoder, reason)
    return MegakernelStopped(f"{reason}: the speech is lost, the next request runs on separate kernels")


def check_and_end(decoder, all_ended: Callable, talker_graph, predictor_graph, rows: int, token_chosen) -> bool:
    """TalkerGraph.all_ended, which waits for the last step anyway, and whether the megakernel has stopped."""
    ended = all_ended(rows, token_chosen)
    if reason := why_stopped(talker_graph.step, predictor_graph.step):
        raise megakernel_stopped(decoder, reason)
    return ended


def batch_sizes(rows: int, max_batch: int) -> list[int]:
    """Split a list of texts: batches while they pay, the rest one text after another on the megakernel."""
    sizes = []
    while rows > 0:
        size = min(rows, max_batch)
        sizes.append(size if size >= MIN_BATCH else 1)
        rows -= sizes[-1]
    return sizes
