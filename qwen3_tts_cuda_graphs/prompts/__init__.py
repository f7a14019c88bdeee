"""Text and voice in, a request for the runner out.

script.py                 a text as a script: its parts, each with voice, style and the silence before it
notation.py               finds the tags of a script, and the names of a play, in a text
lexicon.py                replaces words by how to say them
cut.py                    cuts a part that is too long for the cache into several
checks.py                 checks of numbers and texts
clone_prompts.py          upstream's voice_clone_prompt, and checks of it
build.py                  builds a Request; upstream's code builds the first prompt of a voice
templates.py              builds the later prompts of a voice from its first one
request.py                the Request
text_table.py             the embeddings of all text tokens, on the host, where prompts are built
host.py                   runs torch in a single thread there, and copies tensors to the GPU asynchronously
arriving_text.py          a request whose text is still being written
incremental_tokenizer.py  the tokens of such a text that can no longer change
pieces.py                 reads such a text from an iterator, and hands it to the thread that speaks it
"""
