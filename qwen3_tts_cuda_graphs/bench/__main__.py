"""Time Qwen3-TTS on this machine: upstream, the three files alone, both paths of fast/, and faster-qwen3-tts.

    qwen3-tts bench 0.6B 1.7B                    # the published weights
    qwen3-tts bench 0.6B 1.7B --random-weights   # random weights of the same shapes: same speed, no download, noise
    qwen3-tts bench 0.6B --streams               # many listeners and lists of texts
    qwen3-tts bench 0.6B --ready                 # how long until a new process speaks
    qwen3-tts bench 0.6B --check                 # is it the same model? compares with upstream or float32
    qwen3-tts bench 0.6B --listen --speaker speaker.pt   # does each path speak as well as upstream?
    qwen3-tts bench --plot                       # draws results/*.svg from results/*.json; needs matplotlib
    qwen3-tts bench --tables                     # writes the figures in README.md and docs/ from results/*.json

All rows speak the same text with the same voice and settings. "x real time" is seconds of audio per second. A whole
call includes tokenizer and codec; it is timed at two lengths, and "ms per frame" is the slope between them. Figures are
medians; the JSON has minimum, maximum and number of runs. faster-qwen3-tts is timed in a process of its own, with
.venv5 of `./setup.sh none --transformers5 --test`. With the published weights, the CustomVoice model of the size is
downloaded, too. Without a GPU a tiny model runs on the CPU, which shows that everything works, but no speed.
"""

import argparse
import json
import os
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from qwen3_tts_cuda_graphs.bench.plot import plot
from qwen3_tts_cuda_graphs.common.checkpoints import check_speaker_file
from qwen3_tts_cuda_graphs.common.output_files import check_writable
from qwen3_tts_cuda_graphs.common.published import model_name
from qwen3_tts_cuda_graphs.common.scripts import Parser, cli_errors

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["0.6B", "1.7B"]
WIDTH = 100  # of what is printed
ONE_LISTENER = {  # columns of the table: key of a row -> title, digits
    "ms_per_frame": ("ms/frame", 2),
    "x_real_time": ("x real time", 2),
    "first_audio_ms": ("first ms", 1),
    "late_chunks": ("late", 0),
    "underruns": ("underruns", 0),
    "peak_gib": ("peak GiB", 2),
    "seconds_to_capture": ("capture s", 1),
}
MANY_LISTENERS = {
    "audio_seconds_per_second": ("audio s/s", 1),
    "first_audio_ms": ("first ms", 1),
    "first_audio_p95_ms": ("p95 ms", 1),
    "first_audio_p99_ms": ("p99 ms", 1),
    "underruns": ("underruns", 0),
    "seconds_to_capture": ("capture s", 1),
}
QUALITY = {
    "word_errors_percent": ("word errors %", 1),
    "word_errors_low": ("from", 1),
    "word_errors_high": ("to", 1),
    "change_low": ("change from", 1),
    "change_high": ("to", 1),
    "similarity": ("similarity", 3),
    "seconds": ("seconds", 1),
    "runaways": ("runaways", 0),
}
COLUMNS = ONE_LISTENER | MANY_LISTENERS | QUALITY


def main() -> None:
    with cli_errors():
        args = parse_arguments()
        if args.plot:
            print(*plot(ROOT / "results"), sep="\n")
            return

        if args.tables:
            if not (ROOT / "README.md").is_file():
                raise ValueError("--tables writes into README.md and docs/: run it in a checkout")
            from qwen3_tts_cuda_graphs.bench.tables import write_tables

            print(*write_tables(ROOT) or ["every figure is as in results/"], sep="\n")
            return

        # imports torch, which takes seconds: after the options are checked
        from qwen3_tts_cuda_graphs.common.loading import model_errors

        warnings.filterwarnings("ignore", message="the speech was cut off")
        with model_errors(), tempfile.TemporaryDirectory() as folder:
            run(args, Path(folder))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(prog="qwen3-tts bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        type=model_name,
        help="0.6B, 1.7B or a folder; default: both sizes, with --quick 0.6B",
    )
    parser.add_argument("--random-weights", action="store_true", help="of the published shapes, made here")
    parser.add_argument("--speaker", type=Path, help="a speaker.pt for the voice; default: a random one")
    parser.add_argument("--quick", action="store_true", help="fewer rows and runs: within a minute on an H200 (0.6B)")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--streams", action="store_true", help="time many listeners at once, and nothing else")
    modes.add_argument("--ready", action="store_true", help="time how long a new process takes to speak, nothing else")
    modes.add_argument("--check", action="store_true", help="compare, do not time; exit code 1 if anything is wrong")
    modes.add_argument(
        "--listen", action="store_true", help="word errors, speaker similarity and runaways of each path, do not time"
    )
    parser.add_argument(
        "--recognizer", default="openai/whisper-large-v3", help="for --listen: a hub id or a folder (%(default)s)"
    )
    modes.add_argument("--plot", action="store_true", help="draw results/*.svg, do not time")
    modes.add_argument("--tables", action="store_true", help="write README.md and docs/ from results/, do not time")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        help="the JSON file; default: bench_results_<GPU>.json, or ..._streams, ..._ready, ..._listen.json",
    )
    args = parser.parse_args()

    args.models = args.models or (SIZES[:1] if args.quick else SIZES)
    if args.speaker and len(args.models) > 1:
        parser.error("a speaker belongs to one size: give one model with --speaker")
    for name in args.models:
        if name not in [*SIZES, "tiny"] and not os.path.isdir(name):  # "" is none
            parser.error(f"{name!r} is neither 0.6B, 1.7B nor a folder")
    if not args.recognizer:
        raise ValueError("--recognizer is empty: give a hub id or a folder")
    if args.speaker:
        check_speaker_file(args.speaker)
    if args.output:
        check_writable(args.output)
    return args


def run(args: argparse.Namespace, folder: Path) -> None:
    """Measure or check every model. Checkpoints that have to be made are written into `folder`."""
    from qwen3_tts_cuda_graphs.bench.machine import machine_card
    from qwen3_tts_cuda_graphs.bench.measured import find_checkpoints
    from qwen3_tts_cuda_graphs.bench.timing import ON_GPU

    if not ON_GPU and set(args.models) <= {*SIZES, "tiny"}:
        print(
            "No GPU here: a tiny model with random weights runs on the CPU. It shows that everything works, and\n"
            "--check that the audio is upstream's. Its times say nothing about the real models on a GPU.\n"
        )
        args.models = ["tiny"]
    are_random = args.random_weights or args.models == ["tiny"]
    if args.listen and not args.speaker and not are_random:
        raise ValueError("--listen needs a voice: make one with qwen3-tts clone, and give it as --speaker")
    kind = next((f"_{name}" for name in ("streams", "ready", "listen", "check") if getattr(args, name)), "")
    with_custom_voice = not (args.quick or kind)
    ends = args.listen  # the speech of a random model: for a figure of speed it must not
    checkpoints = find_checkpoints(args.models, are_random, with_custom_voice, args.speaker, folder, ends)
    card = machine_card("random" if are_random else "published, or of the folder given")
    print_wrapped("  ".join(f"{name}: {value}" for name, value in card.items()))
    if args.check:
        wrong = sum(not good for checkpoint in checkpoints for good in check_one(checkpoint, ON_GPU))
        sys.exit(f"{wrong} wrong" if wrong else 0)

    device = card["gpu"] if ON_GPU else "CPU"
    output = args.output or Path(f"bench_results_{device.replace(' ', '_')}{kind}.json")
    check_writable(output)
    time_all(checkpoints, args, card, output)
    print(f"\n{output}")


def check_one(checkpoint, on_gpu: bool) -> Iterator[bool]:
    """Whether each check of a model is passed."""
    from qwen3_tts_cuda_graphs.bench.check import check

    print(f"\n{checkpoint.name}")
    frames = 200 if on_gpu else 60  # with fewer, `verdict` of parity.py might call a correct kernel wrong
    for name, good, figures in check(checkpoint.model, checkpoint.speaker, frames):
        print_wrapped(f"{'ok' if good else 'WRONG':6}{name}: {figures}")
        yield good


def time_all(checkpoints: Iterable, args: argparse.Namespace, card: dict, output: Path) -> None:
    """Print every row when it is measured, and write all of them to `output`."""
    from qwen3_tts_cuda_graphs.bench.ready import time_ready
    from qwen3_tts_cuda_graphs.bench.single import time_one_listener
    from qwen3_tts_cuda_graphs.bench.streams import time_streams
    from qwen3_tts_cuda_graphs.bench.timing import choose_effort

    measure, columns = time_one_listener, ONE_LISTENER
    if args.streams:
        measure, columns = time_streams, MANY_LISTENERS
    elif args.ready:
        measure, columns = time_ready, {}
    elif args.listen:
        from qwen3_tts_cuda_graphs.bench.quality import measure_quality

        measure, columns = partial(measure_quality, recognizer=args.recognizer), QUALITY
    results = dict(card=card, models={})
    for checkpoint in checkpoints:
        rows = results["models"][checkpoint.name] = {}
        print()
        print_table_line(checkpoint.name, columns, [title for title, _ in columns.values()])
        for name, row in measure(checkpoint, choose_effort(args.quick)):
            rows[name] = row
            print_row(name, row, columns)
            output.write_text(json.dumps(results, indent=1) + "\n")


def print_row(name: str, row: dict, columns: dict) -> None:
    if not row.keys() & columns.keys():
        print_wrapped(f"{name}: {in_words(row)}")
        return
    figures = [(row.get(key), digits) for key, (_, digits) in columns.items()]
    print_table_line(name, columns, ["" if value is None else f"{value:.{digits}f}" for value, digits in figures])


def print_table_line(name: str, columns: dict, cells: list[str]) -> None:
    """Cells at the right, each as wide as its title. A long name may take the place of empty cells."""
    line = "".join(f"{cell:>{len(title) + 2}}" for cell, (title, _) in zip(cells, columns.values())).rjust(WIDTH)
    print((name + line[len(name) :]).rstrip(), flush=True)


def in_words(row: dict) -> str:
    words = []
    for key, value in row.items():
        if isinstance(value, dict):
            words.append(f"{key} ({in_words(value)})")
        else:
            words.append(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(words)


def print_wrapped(text: str) -> None:
    print(textwrap.fill(text, WIDTH, subsequent_indent="    "), flush=True)


if __name__ == "__main__":
    main()
