"""What the command lines, the server, the benchmarks and compat.py share.

Models:

published.py    what is known about the published ones without a download
model_names.py  their names, as users write them
hub.py          finds the folder of a model, and downloads what is missing
checkpoint_files.py
                which files it must have, and whether they are complete
model_config.py what its config.json says
loading.py      loads it, chooses the device, and explains what went wrong

Voices:

voice_files.py  speaker files and mixes of them, checked without torch
voices.py       speaker embeddings and recordings as arguments of upstream's methods

Commands:

parser.py       parses options, and suggests the right one for a mistyped one
command.py      mistakes and warnings as one line, progress
choices.py      the names that an error message suggests
quick_start.py  imports torch and the rest while CUDA starts (skipped_imports.py: what is not imported)

Audio:

recording_files.py
                reads recordings
speech_files.py writes speech
formats.py      the names and sample rates of formats, and which one a file has
output_files.py files that are written completely or not at all
samples.py      chunks of samples: resampling, 16 bits
tempo.py        speech faster or slower
subtitles.py    when each part of a script is heard
"""
