"""What the command lines, the server and the benchmarks share.

published.py    the published models, as far as they are known without a download
checkpoints.py  what a config.json says, downloads, checks of numbers and speaker files
voices.py       speaker embeddings and recordings as arguments of upstream's methods
loading.py      the device, and what can go wrong while a model is loaded
scripts.py      one-line errors, progress, a quick start
audio_files.py, output_files.py
                recordings in, speech out
tempo.py        speech faster or slower
"""
