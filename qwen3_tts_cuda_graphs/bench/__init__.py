"""The command `qwen3-tts bench`, which is also `python bench.py`: measure the speed, check the results.

__main__.py has the options. Each of these modules has a `measure` that yields rows of the results, and COLUMNS, the
keys that are printed as a table:

single.py       one listener: upstream, the three files alone, each path, each kind of voice, arriving text
                (frame_times.py: the parts of a frame; bounds.py: the memory bandwidth's bound; peer.py:
                faster-qwen3-tts)
streams.py      many listeners, and lists of texts, through the engine
ready.py        how long a new process takes to speak
quality.py      word errors, voice and runaways compared with upstream's, on sentences.tsv

They share:

measured.py     the models that are measured, the voice, and the machine
timing.py       how much is measured, and how a call is timed
listeners.py    simulated listeners of a stream
processes.py    measurements in a process of their own
report.py       prints and writes rows

The other modes:

check.py        is the accelerated model the same model? (parity.py: logits with teacher forcing)
plot.py         draws the figures in README.md and docs/
tables.py       writes the measured numbers in README.md and docs/

Separate programs, as in `python -m qwen3_tts_cuda_graphs.bench.load_test --help`:

load_test.py    sends requests to a server (over_http.py), or compares it with the engine (engine_alone.py)
calibrate.py    the distribution of the checked figures for a correct megakernel
random_checkpoint.py
                writes a model with random weights
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of a checkout
SIZES = ("0.6B", "1.7B")
# Names of rows in the results
UPSTREAM, PEER, THREE_FILES = "upstream", "faster-qwen3-tts", "the three files alone"
SEPARATE, MEGAKERNEL = "separate kernels", "megakernel"
