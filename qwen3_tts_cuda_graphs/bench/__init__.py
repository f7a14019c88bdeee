"""What `qwen3-tts bench` measures and checks, which is also `python bench.py`; __main__.py has its options.

single.py       one listener: upstream, the three files alone, each path, each kind of voice
arriving.py     text that is still being written
frame_times.py  where the time of a frame and of the first audio goes
bounds.py       what the memory's bandwidth allows
peer.py         faster-qwen3-tts, in a process of its own
streams.py      many listeners, and lists of texts, through the engine
ready.py        how long a new process takes to speak
tables.py       the figures in README.md and docs/, from results/
quality.py      word errors, voice and runaways beside upstream's, on sentences.tsv
check.py        is the accelerated model the same model (parity.py: logits with forced tokens)
measured.py     the models that are measured, and the voice
timing.py       how much is measured, and how a call is timed
listeners.py    who listens to a stream, and what is heard
machine.py      the machine and the versions
plot.py         the figures

Programs of their own, `python -m qwen3_tts_cuda_graphs.bench.load_test --help`:

load_test.py    drives a server (compare.py: beside the engine alone)
calibrate.py    how the figures of a correct megakernel vary
random_checkpoint.py
                writes a model with random weights
"""
