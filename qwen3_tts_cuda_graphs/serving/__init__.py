"""The server that programs and listeners connect to: qwen3-tts serve.

In the server's own process, without torch:

__main__.py       its start: server_options.py has its options; process.py starts, serves and stops
server.py         HTTP; websocket.py is the WebSocket
guard.py          who may ask: keys, origins, sizes
connections.py    uvicorn's limits
requests.py       the fields of a request
service.py        the models and their voices, as the server uses them; model.py is one of them
engine_process.py a model's worker, seen from the server: calls, and a new process when it has ended
recordings.py     clients' recordings, decoded in processes of their own; encoders.py: speech, encoded in others
audio_formats.py, voice_folder.py, errors.py, metrics.py, settings.py
                  as their names say
page/             the page for a browser
ray_app.py        the same server as replicas of Ray Serve

In the process of a model:

worker.py         the process: its socket, its start and its end
engine_host.py    the model with its engine: what the server asks for becomes streams
memory.py         how many rows fit into the GPU's memory

messages.py       what both say to each other
"""
