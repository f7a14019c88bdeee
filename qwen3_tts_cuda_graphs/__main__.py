"""The command qwen3-tts, which is also `python -m qwen3_tts_cuda_graphs`."""

import argparse
import sys
from importlib import import_module
from importlib.metadata import version

from qwen3_tts_cuda_graphs.common.command import cli_errors
from qwen3_tts_cuda_graphs.common.parser import Parser

COMMAND = "qwen3-tts"
SUBCOMMANDS = {  # name -> the module whose `main` is called, and a description
    "speak": ("cli.__main__", "speak a text into an audio file"),
    "clone": ("cli.clone", "turn a recording into a speaker.pt"),
    "serve": ("serving.__main__", "serve speech over HTTP and WebSocket"),
    "bench": ("bench.__main__", "measure the speed of this machine"),
}


def main() -> None:
    with cli_errors():
        parser = Parser(
            prog=COMMAND,
            usage=f"{COMMAND} {{{','.join(SUBCOMMANDS)}}} [options]",
            description="\n".join(f"{name}   {what}" for name, (_, what) in SUBCOMMANDS.items()),
            epilog=f"{COMMAND} speak --help shows the options of speak.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("command", choices=SUBCOMMANDS, nargs="?", help=argparse.SUPPRESS)
        parser.add_argument("--version", action="store_true", help="print the version")
        args = parser.parse_args(sys.argv[1:2])
        if args.version:
            print(COMMAND, version("qwen3-tts-cuda-graphs"))
        elif args.command is None:
            parser.print_help()
        else:
            module, _ = SUBCOMMANDS[args.command]
            sys.argv[:2] = [f"{COMMAND} {args.command}"]
            import_module(f"{__package__}.{module}").main()


if __name__ == "__main__":
    main()
