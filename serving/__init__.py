"""Many listeners: streams that share one GPU, and the server that they connect to.

engine.py         continuous batching: streams join and leave at any frame; stands on batch.py and codec.py
speech.py         a model with its voices and its engine, as the server uses them
server.py         HTTP; websocket.py is the WebSocket
guard.py          who may ask: keys, origins, sizes
connections.py    uvicorn's limits
requests.py       the fields of a request; audio_formats.py, voices.py, errors.py, metrics.py, settings.py what they say
__main__.py       python -m serving: its options; process.py loads, serves and stops

The engine needs none of the server's packages (requirements-server.txt).
"""
