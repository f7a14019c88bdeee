"""`python generate.py` is `python -m cli`: check the options, import torch and the rest, speak."""

from common.scripts import cli_errors, heavy_imports, show_progress


def main() -> None:
    with cli_errors():  # also of imports: this may be a Python without the packages
        from cli.options import parse_arguments

        args = parse_arguments()
        show_progress(f"loading {args.model}")
        with heavy_imports(args.device):
            from cli.speaking import run

        run(args)


if __name__ == "__main__":
    main()
