"""LiveKit agents: the openai plugin, pointed at this server.

    qwen3-tts serve --model 0.6B-CustomVoice --port 8000
    pip install livekit-agents livekit-plugins-openai
    python examples/livekit_openai.py http://127.0.0.1:8000/v1

With response_format="pcm" nothing is encoded and decoded again: the plugin asks for MP3 otherwise. Writes livekit.wav;
in an agent it is AgentSession(tts=speech, ...). Run with livekit-agents and livekit-plugins-openai 1.8.9.
"""

import asyncio
import os
import sys
from pathlib import Path

from livekit.agents.utils import combine_frames
from livekit.plugins import openai


async def main(url: str) -> None:
    key = os.environ.get("QWEN3_TTS_API_KEY", "none")
    speech = openai.TTS(base_url=url, api_key=key, model="qwen3-tts", voice="alloy", response_format="pcm")
    frames = [audio.frame async for audio in speech.synthesize("Hello from LiveKit.")]
    await speech.aclose()
    audio = combine_frames(frames)
    Path("livekit.wav").write_bytes(audio.to_wav_bytes())
    print(f"{audio.duration:.2f} s of audio in {len(frames)} frames")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"))
