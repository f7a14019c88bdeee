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
import os
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path

from qwen3_tts_cuda_graphs.bench import ROOT, SIZES
from qwen3_tts_cuda_graphs.bench.plot import plot
from qwen3_tts_cuda_graphs.bench.report import print_wrapped, report
from qwen3_tts_cuda_graphs.common.command import cli_errors
from qwen3_tts_cuda_graphs.common.model_names import model_name
from qwen3_tts_cuda_graphs.common.output_files import check_writable
from qwen3_tts_cuda_graphs.common.parser import Parser
from qwen3_tts_cuda_graphs.common.voice_files import check_speaker_file

MODES = {  # option -> its help
    "streams": "time many listeners at once, and nothing else",
    "ready": "time how long a new process takes to speak, nothing else",
    "listen": "word errors, speaker similarity and runaways of each path, do not time",
    "check": "compare, do not time; exit code 1 if anything is wrong",
    "plot": "draw results/*.svg, do not time",
    "tables": "write README.md and docs/ from results/, do not time",
}
MODULES = {"": "single", "streams": "streams", "ready": "ready", "listen": "quality"}  # with `measure` and `COLUMNS`


def main(words: list[str] | None = None) -> None:
    """Run the command line `words`; default: sys.argv."""
    with cli_errors():
        args = parse_arguments(words)
        if args.mode == "plot":
            print(*plot(ROOT / "results"), sep="\n")
            return

        if args.mode == "tables":
            if not (ROOT / "README.md").is_file():
                raise ValueError("--tables writes into README.md and docs/: run it in a checkout")
            from qwen3_tts_cuda_graphs.bench.tables import write_tables

            print(*write_tables(ROOT) or ["every figure is as in results/"], sep="\n")
            return

        # Imports torch, which takes seconds, so the options are checked first.
        from qwen3_tts_cuda_graphs.common.loading import model_errors

        warnings.filterwarnings("ignore", message="the speech was cut off")
        with model_errors(), tempfile.TemporaryDirectory() as folder:
            run(args, Path(folder))


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="qwen3-tts bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "0.6B, 1.7B, both or a folder; default: both, with --quick 0.6B"
    parser.add_argument("models", nargs="*", metavar="MODEL", type=model_name, help=default)
    parser.add_argument("--random-weights", action="store_true", help="of the published shapes, made here")
    parser.add_argument("--speaker", type=Path, help="a speaker.pt for the voice; default: a random one")
    parser.add_argument("--quick", action="store_true", help="fewer rows and runs: within a minute on an H200 (0.6B)")
    modes = parser.add_mutually_exclusive_group()
    for mode, description in MODES.items():
        modes.add_argument(f"--{mode}", action="store_const", dest="mode", const=mode, default="", help=description)
    parser.add_argument(
        "--recognizer", default="openai/whisper-large-v3", help="for --listen: a hub id or a folder (%(default)s)"
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        help="the JSON file; default: bench_results_<GPU>.json, or ..._streams, ..._ready, ..._listen.json",
    )
    args = parser.parse_args(words)

    names = args.models or ["0.6B" if args.quick else "both"]
    args.models = [model for name in names for model in (SIZES if name == "both" else [name])]
    if args.speaker and len(args.models) > 1:
        parser.error("a speaker belongs to one size: give one model with --speaker")
    for name in args.models:
        if name not in [*SIZES, "tiny"] and not os.path.isdir(name):
            parser.error(f"{name!r} is neither 0.6B, 1.7B nor a folder")
    if not args.recognizer:
        raise ValueError("--recognizer is empty: give a hub id or a folder")
    if args.speaker:
        check_speaker_file(args.speaker)
    if args.output:
        check_writable(args.output)
    return args


def run(args: argparse.Namespace, folder: Path) -> None:
    """Measure or check every model. Random checkpoints and voices are written into `folder`."""
    from qwen3_tts_cuda_graphs.bench.measured import find_checkpoints, machine_card
    from qwen3_tts_cuda_graphs.bench.timing import ON_GPU, choose_effort

    if not ON_GPU and set(args.models) <= {*SIZES, "tiny"}:
        print(
            "No GPU here: a tiny model with random weights runs on the CPU. It shows that everything works, and\n"
            "--check that the audio is upstream's. Its times say nothing about the real models on a GPU.\n"
        )
        args.models = ["tiny"]
    are_random = args.random_weights or args.models == ["tiny"]
    is_heard = args.mode == "listen"
    if is_heard and not args.speaker and not are_random:
        raise ValueError("--listen needs a voice: make one with qwen3-tts clone, and give it as --speaker")
    with_custom_voice = not (args.quick or args.mode)
    # A random model must end its speech by itself for --listen, and must not where the speed is measured.
    checkpoints = find_checkpoints(args.models, are_random, with_custom_voice, args.speaker, folder, ends=is_heard)
    card = machine_card("random" if are_random else "published, or of the folder given")
    print_wrapped("  ".join(f"{name}: {value}" for name, value in card.items()))
    if args.mode == "check":
        wrong = sum(count_wrong(checkpoint, ON_GPU) for checkpoint in checkpoints)
        sys.exit(f"{wrong} wrong" if wrong else 0)

    device = card["gpu"] if ON_GPU else "CPU"
    kind = f"_{args.mode}" if args.mode else ""
    output = args.output or Path(f"bench_results_{device.replace(' ', '_')}{kind}.json")
    check_writable(output)
    module = import_module(f"{__package__}.{MODULES[args.mode]}")
    effort = choose_effort(args.quick, args.recognizer)
    rows = ((checkpoint.name, *row) for checkpoint in checkpoints for row in module.measure(checkpoint, effort))
    report(rows, module.COLUMNS, dict(card=card, models={}), output)
    print(f"\n{output}")


def count_wrong(checkpoint, on_gpu: bool) -> int:
    """Print the checks of a model, and return how many of them failed."""
    from qwen3_tts_cuda_graphs.bench.check import check

    print(f"\n{checkpoint.name}")
    wrong = 0
    frames = 200 if on_gpu else 60  # with fewer, `verdict` of parity.py might call a correct kernel wrong
    for name, good, figures in check(checkpoint, frames):
        print_wrapped(f"{'ok' if good else 'WRONG':6}{name}: {figures}")
        wrong += not good
    return wrong


if __name__ == "__main__":
    main()
