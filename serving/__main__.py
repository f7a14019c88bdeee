"""python -m serving --model 0.6B-CustomVoice --port 8000"""

import os
import sys

from common.scripts import cli_errors


def main() -> None:
    with cli_errors():  # also of imports: this may be a Python without the packages
        from serving.options import run

        run()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread may still wait for a disk
