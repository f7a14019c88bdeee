"""The commands `qwen3-tts speak`, which is also `python generate.py`, and `qwen3-tts clone`.

__main__.py     `speak`: checks the options, then imports what takes time, then speaks
options.py      its options, and --help
job.py          checks the options as far as possible without slow imports, and makes a Job of them
voice_options.py
                checks the options that say whose voice it is
speaking.py     does the Job: the checks that need torch or the tokenizer, then load, speak and write
text_files.py   the lines of a text, or a pipe that is still being written to
long_lines.py   cuts lines that may not fit into the cache
progress.py     shows how much is spoken, and the time that is left
player.py       --play
finished_parts.py
                keeps finished parts of a long text, for --resume
clone.py        `clone`: recording -> speaker.pt
"""
