"""RealtimeTTS: an engine that speaks through this server.

    qwen3-tts serve --model 0.6B-CustomVoice --port 8000
    pip install "RealtimeTTS[playback]" openai
    python examples/realtimetts_engine.py http://127.0.0.1:8000/v1

RealtimeTTS' own OpenAI engine has no base_url. PyAudio needs PortAudio (apt install portaudio19-dev). Add "muted" to
write realtimetts.wav instead of playing. Run with RealtimeTTS 0.8.10, PyAudio 0.2.14 and openai 3.49.0.
"""

import os
import sys

import pyaudio
from openai import OpenAI
from RealtimeTTS import BaseEngine, TextToAudioStream


class Qwen3Engine(BaseEngine):
    def __init__(self, url: str, voice: str = "alloy"):
        self.client = OpenAI(base_url=url, api_key=os.environ.get("QWEN3_TTS_API_KEY", "none"))
        self.voice = voice

    def get_stream_info(self):
        return pyaudio.paInt16, 1, 24000

    def synthesize(self, text: str, sentence_count: int = 0) -> bool:
        super().synthesize(text, sentence_count)
        request = {"model": "qwen3-tts", "voice": self.voice, "input": text, "response_format": "pcm"}
        with self.client.audio.speech.with_streaming_response.create(**request) as response:
            for samples in response.iter_bytes(3840):  # 80 ms
                if self.stop_synthesis_event.is_set():
                    return False  # leaving the `with` closes the connection, and the server stops
                self.queue.put(samples)
        return True


if __name__ == "__main__":
    engine = Qwen3Engine(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
    muted = sys.argv[-1] == "muted"
    stream = TextToAudioStream(engine, tokenizer="rule-based", muted=muted)  # nltk, the default, downloads data
    stream.feed("Hello from RealtimeTTS. This is the second sentence.")
    stream.play(muted=muted, output_wavfile="realtimetts.wav" if muted else None)
