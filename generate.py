#!/usr/bin/env python3
"""Qwen3-TTS with every frame captured: the loop, the public functions, the command line.

    from generate import load, accelerate, stream

Upstream builds every kind of prompt, calls `talker.generate` once, and then `speech_tokenizer.decode`. `accelerate`
replaces those two, so all of upstream's methods stay as they are. `Decoder.frames` is the only loop: a whole call
drains it, `stream` takes its frames in chunks.
"""
import itertools
import sys
import threading
import time
import types
import warnings

import torch
import torch.nn.functional as F
from transformers.generation import GenerateDecoderOnlyOutput

# The 12 Hz models never use the 25 Hz tokenizer, whose import needs torchaudio, sox and onnxruntime.
unused = types.ModuleType("qwen_tts.core.tokenizer_25hz.modeling_qwen3_tts_tokenizer_v1")
unused.Qwen3TTSTokenizerV1Model = type("Qwen3TTSTokenizerV1Model", (), {})
sys.modules.setdefault(unused.__name__, unused)
from qwen_tts import Qwen3TTSModel

from cudagraph_codec import CodecGraph
from cudagraph_predictor import PredictorGraph
from cudagraph_talker import TalkerGraph, aligned, part_of, static_cache
from fewer_kernels import answer_directly, use_fewer_kernels
from paths import choose_path
from turns import Turns
from voices import (address, answered_mistakes, choose_device, parse_arguments, progress, read_config, voice_request,
                    with_progress)
from wav import write_wav


def load_upstream(model, device=None, dtype=None):
    """Upstream's Qwen3TTSModel as it is. `model`: a name like "0.6B" (see voices.MODELS), a hub id or a folder."""
    read_config(model)                                            # says what is wrong with it, if anything is
    device = choose_device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return Qwen3TTSModel.from_pretrained(address(model), device_map=device, dtype=dtype)


def load(model, device=None, dtype=None, max_seq_len=2048, max_batch=16, fused=None):
    """Upstream's Qwen3TTSModel, accelerated. Defaults to CUDA and bfloat16, without CUDA to CPU and float32."""
    return accelerate(load_upstream(model, device, dtype), max_seq_len, max_batch, fused)


def accelerate(tts, max_seq_len=2048, max_batch=16, fused=None):
    """Makes the methods of a Qwen3TTSModel fast, in place: if it fails, load it anew. Prompt and speech together may
    take `max_seq_len` positions, one a frame; lists of more than `max_batch` texts run in groups of that many. One text
    runs on the fused layers where they can: `fused=False` never, `fused=True` always, or a ValueError says why not."""
    answer_directly(tts.model.config, tts.model.talker.config)
    decoder = Decoder(tts.model.talker, max_seq_len, max_batch, fused)
    codec = CodecGraph(tts.model.speech_tokenizer, decoder.turns)
    tts.model.talker.generate, tts.model.speech_tokenizer.decode = decoder.generate, codec.decode
    progress("")
    return tts


def stream(method, *, chunk_frames=None, **kwargs):
    """Speaks one text; yields (audio, rate) as it is made, in chunks of `chunk_frames` frames, or None for 1, 1, 2, 4,
    8, 8, ...: the first sound soonest, then fewer chunks. `method` is tts.generate_voice_clone, generate_custom_voice
    or generate_voice_design of an accelerated model, and `kwargs` are its arguments. The chunks joined are the audio of
    the whole call."""
    if chunk_frames is not None and chunk_frames < 1:
        raise ValueError(f"chunk_frames is {chunk_frames}, it must be at least 1")
    sizes = itertools.chain([] if chunk_frames else [1, 1, 2, 4], itertools.repeat(chunk_frames or 8))
    tts = method.__self__
    if kwargs.get("voice_clone_prompt") is None and kwargs.get("ref_audio") is not None:
        kwargs["voice_clone_prompt"] = tts.create_voice_clone_prompt(
            kwargs.pop("ref_audio"), kwargs.pop("ref_text", None), kwargs.pop("x_vector_only_mode", False))
    decoder, request = handed_over(method, kwargs)
    if len(request["inputs_embeds"]) != 1:
        raise ValueError(f"stream speaks one text at a time, not {len(request['inputs_embeds'])}")
    if request["eos_token_id"] != decoder.talker.config.codec_eos_token_id:
        raise ValueError("stream goes on to the model's own end token: eos_token_id is for whole calls")
    codec, rate = tts.model.speech_tokenizer.decode.__self__, tts.model.speech_tokenizer.get_output_sample_rate()
    with decoder.turns.take() as turn:
        codec.reset()
        if (reference := reference_codes(kwargs.get("voice_clone_prompt"))) is not None:
            codec.feed(reference)                                 # the voice to go on with; its sound is not ours
        size, frames, audio, silent = next(sizes), [], None, True
        for codes, _ in decoder.frames(**request):
            if audio is not None:                                 # decoded while this frame was on its way
                with turn.paused():
                    yield audio(), rate
                audio = None
            frames.append(codes[0])
            if len(frames) == size:
                audio, frames, size = codec.feed(torch.stack(frames)), [], next(sizes)
                if silent:                                        # the first sound has the GPU to itself
                    with turn.paused():
                        yield audio(), rate
                    audio, silent = None, False
        rest = [audio, frames and codec.feed(torch.stack(frames))]
    for audio in filter(None, rest):
        yield audio(), rate


class Handover(Exception):
    """Brings back what upstream's method was about to pass to talker.generate."""


def handed_over(method, kwargs):
    """Lets upstream's method build its prompt. Returns the decoder, and what it would have been called with."""
    decoder = getattr(method.__self__.model.talker.generate, "__self__", None)
    if not isinstance(decoder, Decoder):
        raise ValueError("stream needs an accelerated model: call accelerate(tts) first")
    decoder.this_thread.hands_over = True
    try:
        method(**kwargs)
    except Handover as handover:
        return decoder, handover.args[0]
    finally:
        decoder.this_thread.hands_over = False


def reference_codes(voice_clone_prompt):
    """The codes (T, 16) that come before the speech in in-context cloning, else None."""
    prompt = voice_clone_prompt or {}
    codes = prompt.get("ref_code") if isinstance(prompt, dict) else [item.ref_code for item in prompt]
    return codes[0] if codes else None


class Decoder:
    """Stands in for `talker.generate`. Graphs for one row are captured at once, those for a batch when first asked for.
    All batches share one cache; a request takes it over from the one before, whether that had finished or not."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, talker, max_seq_len, max_batch, fused):
        self.talker, self.max_seq_len, self.max_batch = talker, max_seq_len, max_batch
        self.fused, self.path = choose_path(talker, fused)
        self.on_gpu = talker.device.type == "cuda"
        self.rng = torch.cuda.default_generators[talker.device.index] if self.on_gpu else torch.default_generator
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.caches, self.graphs, self.turns, self.this_thread = {}, {}, Turns(), threading.local()
        self.uses = use_fewer_kernels(talker, aligned(max_seq_len))
        talker_graph, _ = self.graphs_for(1)
        for bucket in talker_graph.prefills:
            progress(f"capturing prompts of up to {bucket} positions")
            talker_graph.captured_prefill(bucket)

    @torch.inference_mode(False)
    @torch.no_grad()
    def graphs_for(self, batch):
        if batch not in self.graphs:
            progress(f"compiling and capturing frames for {batch} at a time")
            rows = 1 if batch == 1 else self.max_batch
            if rows not in self.caches:
                self.caches[rows] = static_cache(self.talker.model, rows, aligned(self.max_seq_len))
            talker = TalkerGraph(self.talker, part_of(self.caches[rows], batch), self.pool, self.fused and rows == 1)
            self.graphs[batch] = talker, PredictorGraph(self.talker, talker, self.pool)
            progress("")
        return self.graphs[batch]

    @torch.no_grad()
    def frames(self, inputs_embeds, attention_mask, trailing_text_hidden, *, tts_pad_embed, max_new_tokens,
               min_new_tokens, eos_token_id, suppress_tokens, repetition_penalty, do_sample, temperature, top_k, top_p,
               subtalker_dosample, subtalker_temperature, subtalker_top_k, subtalker_top_p, **_):
        """The loop. Yields the codes (B, 16) and the hidden state (B, H) of one frame after another, until every row
        has chosen its end token. They are views of static tensors: the next request writes over them."""
        (batch, used), room = attention_mask.shape, self.max_seq_len
        if used >= room:
            raise ValueError(f"the prompt takes {used} positions, the cache has {room}: shorten it, or set max_seq_len")
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 2: the last makes no sound")
        if not inputs_embeds.isfinite().all():
            raise ValueError("the prompt holds numbers that are not finite: make the speaker or the reference again")
        limit = min(max_new_tokens - 1, room - used)
        talker, predictor = self.graphs_for(batch)
        talker.configure(repetition_penalty, suppress_tokens, eos_token_id, min_new_tokens)
        talker.sampling.set(do_sample, temperature, top_k, top_p)
        predictor.sampling.set(subtalker_dosample, subtalker_temperature, subtalker_top_k, subtalker_top_p)
        predictor.begin(trailing_text_hidden, tts_pad_embed)
        talker.begin(inputs_embeds, attention_mask)
        chosen = self.now()
        for frame in range(limit):
            # The frame starts before the host knows that there is one: the GPU never waits for Python. If its token is
            # the end, which none of the first can be, the rest of it is dropped, and its noise counts as not drawn.
            rng_state = self.rng.get_state()
            predictor.step()
            if frame >= min_new_tokens and talker.ended_by(frame, chosen):
                self.rng.set_state(rng_state)
                return
            yield predictor.codes[:, frame], predictor.hiddens[:, frame]
            talker.step()
            chosen = self.now()
        if not talker.ended_by(limit, chosen):
            remedy = (f"load with max_seq_len above {room}" if limit < max_new_tokens - 1
                      else f"call with max_new_tokens above {max_new_tokens}")
            warnings.warn(f"the speech was cut off after {limit} frames, before it ended: {remedy}", stacklevel=2)

    def now(self):
        return torch.cuda.current_stream(self.talker.device).record_event() if self.on_gpu else None

    def generate(self, **request):
        """What upstream's talker.generate returns, as far as upstream looks at it."""
        if getattr(self.this_thread, "hands_over", False):
            raise Handover(request)
        rows = [request.pop(name).split(self.max_batch) for name in (
            "inputs_embeds", "attention_mask", "trailing_text_hidden")]
        with self.turns.take():
            groups = [[torch.stack(column, dim=1) for column in zip(*self.frames(*group, **request))]
                      for group in zip(*rows)]
        longest = max(codes.shape[1] for codes, _ in groups)      # upstream cuts the others where end tokens begin
        codes, hiddens = (
            torch.cat([F.pad(group[i], (0, 0, 0, longest - group[i].shape[1]), value=filler) for group in groups])
            for i, filler in enumerate([self.talker.config.codec_eos_token_id, 0]))
        # One entry a forward: the prompt's gave no codes, and upstream drops the last one's hidden state.
        forwards = zip(hiddens.roll(-1, dims=1).split(1, dim=1), codes.unbind(1))
        return GenerateDecoderOnlyOutput(sequences=codes[..., 0], hidden_states=(
            ((hiddens[:, :1],), None), *(((hidden,), frame) for hidden, frame in forwards)))


def main():
    with answered_mistakes():
        args = parse_arguments()
        tts = load(args.model, args.device, args.dtype, args.max_seq_len, fused=args.fused)
        (method, request), path = voice_request(args, tts), tts.model.talker.generate.__self__.path
        if args.seed is not None:
            torch.manual_seed(args.seed)
        for output, texts in args.outputs:
            start = time.perf_counter()
            chunks = itertools.chain.from_iterable(stream(method, text=text, **request) for text in texts)
            first = next(chunks)
            to_first = f", first audio after {(time.perf_counter() - start) * 1e3:.0f} ms" if args.stream else ""
            chunks = with_progress(itertools.chain([first], chunks), start)
            seconds = write_wav(output, chunks if args.stream else [*chunks])
            wall = time.perf_counter() - start
            print(f"{output}: {seconds:.2f} s of audio in {wall:.2f} s, RTF {seconds / wall:.2f}{to_first}; {path}",
                  file=sys.stderr if str(output) == "-" else sys.stdout)


if __name__ == "__main__":
    main()
