"""What `qwen3-tts bench` measures and checks, which is also `python bench.py`; __main__.py has its options.

single.py       one listener: upstream, the three files alone, each path, each kind of voice, arriving text
frame_times.py  where the time of a frame and of the first audio goes
bounds.py       what the memory's bandwidth allows
peer.py         faster-qwen3-tts, in a process of its own
streams.py      many listeners, and lists of texts, through the engine
ready.py        how long a new process takes to speak
tables.py       the figures in README.md and docs/, from results/
quality.py      word errors, voice and runaways beside upstream's, on sentences.tsv
check.py        is the accelerated model the same model (parity.py: logits with forced tokens)
measured.py     the models that are measured, the voice, and the machine
timing.py       how much is measured, and how a call is timed
listeners.py    who listens to a stream, and what is heard
processes.py    programs that measure in a process of their own
report.py       rows, printed and written
plot.py         the figures

Programs of their own, `python -m qwen3_tts_cuda_graphs.bench.load_test --help`:

load_test.py    drives a server (over_http.py), or compares it with the engine (engine_alone.py)
calibrate.py    how the figures of a correct megakernel vary
random_checkpoint.py
                writes a model with random weights
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of a checkout
SIZES = ("0.6B", "1.7B")
# Rows of the results, also of those in results/
UPSTREAM, PEER, THREE_FILES = "upstream", "faster-qwen3-tts", "the three files alone"
SEPARATE, MEGAKERNEL = "separate kernels", "megakernel"
