"""The command lines of generate.py and extract_speaker.py. The reference does not need this folder.

options.py       all options of generate.py, checked as far as nothing slow must be imported
speaking.py      the checks that need torch or the tokenizer; then load, speak and write
checkpoints.py   names of models, what a config.json says, downloads
voices.py        speaker embeddings and recordings as arguments of upstream's methods
loading.py       the device, and what can go wrong while a model is loaded
scripts.py       what all scripts share: one-line errors, progress, a quick start
text_files.py, audio_files.py, output_files.py, parts.py
                 texts and audio files, in and out
"""
