"""Text and voice in, a request for the runner out. Upstream builds the prompt.

cut.py          a long text in parts, each one utterance; the limits of its speech
build.py        requests, checked
templates.py    a voice's later prompts, made from its first one
text_table.py   the embedding of every text token, on the host, where prompts are built
arriving_text.py, incremental_tokenizer.py
                a request whose text is still being written, and its tokens that can no longer change
"""
