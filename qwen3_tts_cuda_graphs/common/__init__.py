"""What the command lines, the server, the benchmarks and compat.py share.

published.py    the published models, as far as they are known without a download
checkpoints.py  what a config.json says, downloads, checks of numbers and speaker files
voices.py       speaker embeddings and recordings as arguments of upstream's methods
mixes.py        mixed voices and their weights, as a user writes them
loading.py      the device, and what can go wrong while a model is loaded
command.py      one-line errors, progress, a quick start; skipped_imports.py: what it leaves out
audio_files.py, output_files.py
                recordings in, speech out
formats.py      the names of audio formats, and the rates that they take
tempo.py        speech faster or slower
subtitles.py    when each part of a script is heard
"""
