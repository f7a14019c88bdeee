"""A worker under another name, so that `ps` shows which one waits. It is renamed when a model is loaded in it."""

from qwen3_tts_cuda_graphs.serving.worker import main

if __name__ == "__main__":
    main()
