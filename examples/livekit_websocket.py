"""LiveKit agents: the baseten plugin's Qwen3-TTS, which sends the text over a WebSocket while it is written.

    qwen3-tts serve --model 0.6B --speaker speaker.pt --port 8000
    pip install livekit-agents livekit-plugins-baseten
    python examples/livekit_websocket.py ws://127.0.0.1:8000/v1/audio/speech/stream speaker

Register voices at /v1/audio/voices: the plugin's own register_voice and list_voices are Baseten's. Writes livekit.wav;
in an agent it is AgentSession(tts=speech, ...). Run with livekit-agents and livekit-plugins-baseten 1.8.9.
"""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
from livekit.agents.utils import combine_frames
from livekit.plugins import baseten


async def main(url: str, voice: str) -> None:
    key = os.environ.get("QWEN3_TTS_API_KEY", "none")
    async with aiohttp.ClientSession() as http:
        speech = baseten.TTS(model="qwen3-tts", model_endpoint=url, api_key=key, voice=voice, http_session=http)
        stream = speech.stream()
        for word in "Hello from a text that is still being written.".split(" "):  # as a language model writes
            stream.push_text(word + " ")
            await asyncio.sleep(0.05)
        stream.end_input()
        audio = combine_frames([event.frame async for event in stream])
        await stream.aclose()
        await speech.aclose()
    Path("livekit.wav").write_bytes(audio.to_wav_bytes())
    print(f"{audio.duration:.2f} s of audio")


url = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8000/v1/audio/speech/stream"
asyncio.run(main(url, sys.argv[2] if len(sys.argv) > 2 else "alloy"))
