"""Programs beside the project's own.

random_checkpoint.py  a checkpoint with random weights
load.py               listeners of a running server
calibrate.py          how far a correct kernel is from float32, many times
"""
