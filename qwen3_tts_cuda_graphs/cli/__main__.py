"""`python generate.py` is `qwen3-tts speak`: check the options, import torch and the rest, speak."""

from qwen3_tts_cuda_graphs.common.command import cli_errors, show_progress
from qwen3_tts_cuda_graphs.common.quick_start import heavy_imports


def main() -> None:
    with cli_errors():  # also of imports: this may be a Python without the packages
        from qwen3_tts_cuda_graphs.cli.job import read_job

        job = read_job()
        show_progress(f"loading {job.model}")
        with heavy_imports(job.device):
            from qwen3_tts_cuda_graphs.cli.speaking import run

        run(job)


if __name__ == "__main__":
    main()
