#!/usr/bin/env python3
"""Time Qwen3-TTS on this machine: python bench.py --help"""

from qwen3_tts_cuda_graphs.bench.__main__ import main

if __name__ == "__main__":
    main()
