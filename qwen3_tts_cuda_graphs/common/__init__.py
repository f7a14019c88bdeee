"""What the command lines, the server, the benchmarks and compat.py share.

Models:

published.py    the published ones, as far as they are known without a download
model_names.py  their names, as users write them
hub.py          the folder of one, which may have to be downloaded
checkpoint_files.py
                which files it must have, and whether they are whole
model_config.py what its config.json says
loading.py      loads it: the device, and what can go wrong

Voices:

voice_files.py  speaker files and mixes of them, checked without torch
voices.py       speaker embeddings and recordings as arguments of upstream's methods

Commands:

parser.py       their options, and what a mistyped one may stand for
command.py      mistakes and warnings as one line, progress
choices.py      the names that a message offers to choose from
quick_start.py  imports of torch and the rest, while CUDA starts, compiled once; skipped_imports.py: what they leave out

Audio:

recording_files.py, speech_files.py
                recordings in, speech out
formats.py      formats: their names, their rates, and which one a file has
output_files.py files that are written whole or not at all
samples.py      speech as chunks of samples: at another rate, as 16 bits
tempo.py        faster or slower
subtitles.py    when each part of a script is heard
"""
