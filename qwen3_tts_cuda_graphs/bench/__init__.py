"""What bench.py measures and checks.

single.py       one listener: upstream, the three files alone, each path, each kind of voice
arriving.py     text that is still being written
parts.py        where the time of a frame and of the first audio goes
bounds.py       what the memory's bandwidth allows
peer.py         faster-qwen3-tts, in a process of its own
streams.py      many listeners, and lists of texts, through the engine
ready.py        how long a new process takes to speak
tables.py       the figures in README.md and docs/, from results/
quality.py      word errors, voice and runaways beside upstream's, on sentences.tsv
check.py        is the accelerated model the same model (parity.py: logits with forced tokens)
checkpoints.py  the models that are measured, and the voice
timing.py       how much is measured, and how a call is timed
listeners.py    who listens to a stream, and what is heard; also for bench/load_test.py
machine.py      the machine and the versions
plot.py         the figures
"""
