"""OpenAI's client: a whole file, audio while it is made, and the same as server-sent events.

    python -m serving --model 0.6B-CustomVoice --port 8000
    pip install openai
    python examples/openai_client.py http://127.0.0.1:8000/v1

Writes whole.mp3, streamed.wav and events.wav. Run with openai 3.49.0.
"""

import base64
import json
import os
import sys
import wave

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key=os.environ.get("QWEN3_TTS_API_KEY", "none"))
request = {"model": "qwen3-tts", "voice": "alloy", "input": "Hello! This is speech from a CUDA graph."}

# A complete file. Without response_format the answer is a WAV.
client.audio.speech.create(**request, response_format="mp3").write_to_file("whole.mp3")

# 16-bit samples, mono, 24 kHz: the first bytes arrive when the first 80 ms exist.
with wave.open("streamed.wav", "wb") as file:
    file.setparams((1, 2, 24000, 0, "NONE", None))
    with client.audio.speech.with_streaming_response.create(**request, response_format="pcm") as response:
        for samples in response.iter_bytes():
            file.writeframes(samples)  # or play them

# The same as server-sent events, with the number of tokens at the end.
with wave.open("events.wav", "wb") as file:
    file.setparams((1, 2, 24000, 0, "NONE", None))
    request |= {"response_format": "pcm", "stream_format": "sse"}
    with client.audio.speech.with_streaming_response.create(**request) as response:
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
        for event in events:
            if event["type"] == "speech.audio.delta":
                file.writeframes(base64.b64decode(event["audio"]))
            else:
                print(event)  # speech.audio.done, or an error
