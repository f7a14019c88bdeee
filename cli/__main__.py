"""`python generate.py` is `python -m cli`: check the options, import torch and the rest, speak."""

from cli.options import parse_arguments
from common.scripts import cli_errors, heavy_imports


def main() -> None:
    with cli_errors():
        args = parse_arguments()
        with heavy_imports(args.device):
            from cli.speaking import run

        run(args)


if __name__ == "__main__":
    main()
