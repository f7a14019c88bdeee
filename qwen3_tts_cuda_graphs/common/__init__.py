"""What the command lines, the server, the benchmarks and compat.py share.

published.py    the published models, as far as they are known without a download
model_names.py  names of models, as users write them
hub.py          the folder of a model, which may have to be downloaded
checkpoint_files.py
                which files it must have, and whether they are whole
model_config.py what its config.json says
loading.py      the device, and what can go wrong while a model is loaded
voice_files.py  speaker files and mixes of them, checked without torch
voices.py       speaker embeddings and recordings as arguments of upstream's methods
choices.py      the names that a message offers to choose from
command.py      one-line errors, progress
parser.py       options of a command, and what a mistyped one may stand for
quick_start.py  imports of torch and the rest, while CUDA starts; skipped_imports.py: what they leave out
recording_files.py, speech_files.py
                recordings in, speech out
samples.py      speech as chunks of samples: at another rate, as 16 bits
output_files.py files that are written whole or not at all
formats.py      audio formats: their names, their rates, and which one a file has
tempo.py        speech faster or slower
subtitles.py    when each part of a script is heard
"""
