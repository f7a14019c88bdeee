"""Around the model: random checkpoints, and how the benchmark checks and draws.

random_checkpoint.py   a checkpoint folder with random weights
check.py               `bench.py --check`: is the accelerated model still the same model?
parity.py              logits with forced tokens, compared with float32; for check.py and the tests
plot.py                `bench.py --plot`: the figure in the README
bounds.py              bytes of a frame over the memory bandwidth of GPUs: the table in the README
listeners.py           `bench.py --streams`: many listeners at once
machine.py             GPU, versions and commit, for the files of results
calibrate.py           how the figures of the check are distributed for a correct kernel
"""
