"""qwen3-tts serve --model 0.6B-CustomVoice --port 8000"""

import os
import sys

from qwen3_tts_cuda_graphs.common.command import cli_errors


def main() -> None:
    with cli_errors():  # also for the imports, as packages may be missing
        from qwen3_tts_cuda_graphs.serving.server_options import run

        run()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread may still be waiting for a disk
