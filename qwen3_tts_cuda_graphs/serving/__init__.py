"""The server for programs and browsers: qwen3-tts serve.

Modules of the server's own process, which does not import torch:

__main__.py       the command; server_options.py has its options and their checks
server.py         uvicorn's server: starts and ends the workers, drains on SIGTERM
connections.py    uvicorn's connections, with limits
guard.py          middleware of all routes: API key, origin, size limits
routes.py         the HTTP routes; speech_response.py sends the speech of a request
websocket.py      what a WebSocket receives; context.py sends its speech, arriving_script.py holds its unfinished text
requests.py       the fields of a request; signed_addresses.py reads them from a URL, which may be signed
service.py        the models: chooses one for each request, refuses what none supports; model.py is one of them
answer.py         the audio of a request: speaks its parts, with the silences between them, and encodes it
audio_formats.py  the encoders of all formats; encoders.py runs them in helper processes
cloned_voices.py  voices made from recordings; voice_folder.py keeps those that were registered
recordings.py     decodes recordings of clients in helper processes
helper.py         the connection to such a helper process, and its main loop
engine_process.py keeps the worker of a model running; worker_connection.py sends it calls
child_process.py  starts and ends these processes; spare_worker.py keeps a worker ready to replace another
errors.py, metrics.py, settings.py
                  API errors and logging, Prometheus metrics, limits and their defaults
page/             the web page
ray_app.py        the same server as replicas of Ray Serve

Modules of a worker, the process that runs one model:

worker.py         the process: its connection to the server, start and end
engine_host.py    the model with its engine: handles the server's calls
memory.py         how many rows fit into the GPU's memory

messages.py       the messages between the server and its processes
"""
