"""The same model, faster. `generate.accelerate` calls `plug_in`; the reference runs without this folder.

layers.py       upstream's layers from fewer kernels
megakernel.py   all layers, heads and the sampling of one step in a single launch, where the GPU can
                (megakernel.cu; megakernel_reference.py is the same step in torch)
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
paths.py        whether torch is new enough, whether the megakernel can run here, and if not, why
turns.py        one request at a time, also when a stream is paused
"""

import logging
from functools import partial

import torch

from fast import codec_kernels
from fast.codec import CodecGraph
from fast.layers import bypass_config_getattr, fuse_layers
from fast.megakernel import predictor_step, talker_step
from fast.paths import check_torch, choose_path
from fast.prompt_templates import PromptTemplates
from fast.text_table import use_text_table
from fast.turns import Turns

log = logging.getLogger("qwen3_tts_cudagraphs")

# On an H200 a frame of the batched graphs takes as long as 5 to 6 of the megakernel: fewer texts go one by one.
MIN_BATCH = 6


def plug_in(tts, decoder, fused: bool | None) -> None:
    """Change what `decoder` captures and how `tts` decodes audio. `fused` is the argument of `accelerate`."""
    talker = tts.model.talker
    check_torch(talker.device)
    codec_kernels.compile_ahead(tts.model.speech_tokenizer.model.decoder)  # while the megakernel is compiled
    bypass_config_getattr(tts.model.config, talker.config)
    for name in ("spk_id", "spk_is_dialect"):  # upstream looks them up in lower case; a user's own may have capitals
        speakers = getattr(talker.config, name) or {}
        setattr(talker.config, name, {speaker.lower(): value for speaker, value in speakers.items()})
    decoder.lock = Turns()

    decoder.host_talker = use_text_table(talker) if decoder.on_gpu else None
    decoder.prompt_templates = PromptTemplates()
    use_megakernel, decoder.path = choose_path(talker, fused)
    decoder.keepalive = fuse_layers(talker, decoder.max_seq_len)  # read by the graphs
    decoder.replace_steps = partial(replace_steps, talker, use_megakernel)
    if use_megakernel:
        decoder.batch_sizes = partial(batch_sizes, max_batch=decoder.max_batch)

    log.info("capturing the codec")
    tts.model.speech_tokenizer.decode = CodecGraph(tts.model.speech_tokenizer, decoder.lock).decode


def replace_steps(talker, use_megakernel: bool, talker_graph, predictor_graph) -> None:
    rows = len(talker_graph.token)
    log.info("capturing frames of %d %s", rows, "row" if rows == 1 else "rows")
    for graph in (talker_graph, predictor_graph):
        tensors = [tensor for layer in graph.cache.layers for tensor in (layer.keys, layer.values)]
        graph.cache.reset = partial(torch._foreach_zero_, tensors)  # one launch instead of one per tensor
    if use_megakernel and rows == 1:
        talker_graph.step = talker_step(talker, talker_graph)
        predictor_graph.step = predictor_step(predictor_graph)


def batch_sizes(rows: int, max_batch: int) -> list[int]:
    """Split a list of texts: batches while they pay, the rest one text after another on the megakernel."""
    sizes = []
    while rows > 0:
        size = min(rows, max_batch)
        sizes.append(size if size >= MIN_BATCH else 1)
        rows -= sizes[-1]
    return sizes
