"""The server that programs and listeners connect to: python -m serving.

__main__.py       its options; process.py loads, serves and stops
speech.py         a model with its voices and its engine, as the server uses them
server.py         HTTP; websocket.py is the WebSocket
guard.py          who may ask: keys, origins, sizes
connections.py    uvicorn's limits
requests.py       the fields of a request
audio_formats.py, voices.py, errors.py, metrics.py, settings.py
                  what they say
page/             the page for a browser
ray_app.py        the same server as replicas of Ray Serve
"""
