"""The commands `qwen3-tts speak`, which is also `python generate.py`, and `qwen3-tts clone`.

__main__.py     checks the options, then imports what takes time, then speaks
options.py      its options, and --help
job.py          the options checked, as far as nothing slow must be imported: a Job
voice_options.py
                those that say whose voice it is
clone.py        recording -> speaker.pt
speaking.py     does the Job: the checks that need torch or the tokenizer, then load, speak and write
text_files.py   the lines of a text, or a pipe that is still being written to
long_lines.py   cuts lines that may not fit into the cache
progress.py     how far it is
player.py       --play
finished_parts.py
                finished parts of a long text, for --resume
"""
