"""`python generate.py` is `qwen3-tts speak`: check the options, import torch and the rest, speak."""

from qwen3_tts_cuda_graphs.common.scripts import cli_errors, heavy_imports, show_progress


def main() -> None:
    with cli_errors():  # also of imports: this may be a Python without the packages
        from qwen3_tts_cuda_graphs.cli.options import parse_arguments

        args = parse_arguments()
        show_progress(f"loading {args.model}")
        with heavy_imports(args.device):
            from qwen3_tts_cuda_graphs.cli.speaking import run

        run(args)


if __name__ == "__main__":
    main()
