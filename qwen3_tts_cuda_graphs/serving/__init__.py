"""The server that programs and listeners connect to: qwen3-tts serve.

In the server's own process, without torch:

__main__.py       the command; server_options.py has its options; process.py starts, runs and stops the server
server.py         HTTP: the routes; speech_response.py sends what one of them speaks
websocket.py      the WebSocket: what it receives; context.py is what it sends, arriving_script.py the text between them
guard.py          who may ask: keys, origins, sizes; signed_addresses.py: speech by a signed URL, without a key
connections.py    uvicorn's connections, with limits
requests.py       the fields of a request
service.py        the models: finds one for a request, and refuses what none can do; model.py is one of them
cloned_voices.py  voices made from recordings, also registered ones, whose recordings are in a folder: voice_folder.py
answer.py         the audio of a script: its parts, the silence between them, and where each part is heard
engine_process.py keeps a model's worker running: another one when it has ended; worker_connection.py: calls to it
child_process.py  starts and ends processes: helpers, workers, and a spare worker, which waits as spare_worker.py
helper.py         processes for native code: encoders.py encodes speech, recordings.py decodes clients' recordings
audio_formats.py, errors.py, metrics.py, settings.py
                  as their names say
page/             the page for a browser
ray_app.py        the same server as replicas of Ray Serve

In the process of a model:

worker.py         the process: its socket, its start and its end
engine_host.py    the model with its engine: answers the server's calls
memory.py         how many rows fit into the GPU's memory

messages.py       the messages between the two
"""
