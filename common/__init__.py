"""What the command lines, the server, the benchmarks and the package share.

checkpoints.py  names of models, what a config.json says, downloads
voices.py       speaker embeddings and recordings as arguments of upstream's methods
loading.py      the device, and what can go wrong while a model is loaded
scripts.py      one-line errors, progress, a quick start
installed.py    what a message says where the project is installed
audio_files.py, output_files.py
                recordings in, speech out; ffmpeg_decoder.py reads those of phones in a process of its own
"""
