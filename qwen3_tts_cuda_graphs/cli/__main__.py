"""`qwen3-tts speak`, which is also `python generate.py`: check the options, import torch and the rest, speak."""

from qwen3_tts_cuda_graphs.common.command import cli_errors, show_progress
from qwen3_tts_cuda_graphs.common.quick_start import heavy_imports


def main() -> None:
    with cli_errors():  # includes import errors: this Python may lack the packages
        from qwen3_tts_cuda_graphs.cli.job import read_job

        job = read_job()
        show_progress(f"loading {job.model}")
        with heavy_imports(job.device):
            from qwen3_tts_cuda_graphs.cli.speaking import run

        run(job)


if __name__ == "__main__":
    main()
