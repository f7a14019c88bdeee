"""Text and voice in, a request for the runner out. Upstream builds the prompt.

cut.py            cuts a long text into parts, each spoken as one utterance, and limits how long that may be
notation.py       tags in a text, and the names of a play; script.py: the parts that they make of it
lexicon.py        how to say some words
request.py        what is asked, made once and not changed
build.py          builds it; templates.py makes a voice's later prompts from its first one
text_table.py     the embedding of every text token, on the host, where prompts are built
host.py           torch in a single thread there, and copies to the GPU that wait for nothing
checks.py         what can be wrong with numbers and texts
clone_prompts.py  upstream's voice_clone_prompt, and what can be wrong with it
arriving_text.py, incremental_tokenizer.py
                  a request whose text is still being written, and its tokens that can no longer change
pieces.py         reads such a text from an iterator, for the thread that speaks it
"""
