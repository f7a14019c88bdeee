"""A spare worker. Its own module name distinguishes it in `ps`, until `show_as_worker` renames it."""

from qwen3_tts_cuda_graphs.serving.worker import main

if __name__ == "__main__":
    main()
