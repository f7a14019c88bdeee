"""The engine without the server, in a process of its own: what load_test.py compares the server with."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from functools import partial

from qwen3_tts_cuda_graphs.bench.load_test import drive_here, measure
from qwen3_tts_cuda_graphs.bench.processes import print_rows
from qwen3_tts_cuda_graphs.serving.server_options import raise_priority


def measure_engine(args: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """args: those of load_test.py, with the `request` of each listener"""
    raise_priority()  # before any thread starts: a thread inherits the priority of the one that starts it

    from qwen3_tts_cuda_graphs.common.loading import choose_device, load
    from qwen3_tts_cuda_graphs.speech.engine import Engine
    from qwen3_tts_cuda_graphs.speech.utterance import CutOff
    from qwen3_tts_cuda_graphs.speech.warm_up import some_voice

    tts = load(args.compare, choose_device(args.device), max_seq_len=2048, rows=args.max_streams)
    method, voice = some_voice(tts)
    length = dict(text=args.request["input"], max_new_tokens=args.request["max_new_tokens"])
    with Engine(tts, max_waiting=math.inf, cut_off_is_error=True) as engine:

        def start() -> Iterator:
            with contextlib.suppress(CutOff):  # the speech ends at max_new_tokens
                yield from engine.stream(method, **voice | {"language": "Auto"}, **length)

        yield from measure(args, partial(drive_here, start))


if __name__ == "__main__":
    print_rows(measure_engine(argparse.Namespace(**json.loads(sys.argv[1]))))
