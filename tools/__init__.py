"""Programs beside the project's own.

random_checkpoint.py  a checkpoint with random weights
load.py               listeners of a running server; compare.py starts one, and measures what it adds to the engine
calibrate.py          how far a correct kernel is from float32, many times
"""
