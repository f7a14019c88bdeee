"""A plain WebSocket: text goes in word by word, as a language model writes it, and audio comes out meanwhile.

    pip install websockets
    python examples/websocket_client.py ws://127.0.0.1:8000/v1/audio/speech/stream alloy

Writes websocket.wav. Run with websockets 16.1.1.
"""

import asyncio
import json
import os
import sys
import wave

from websockets.asyncio.client import connect


async def write(websocket) -> None:
    for word in "Hello from a text that is still being written.".split(" "):
        await websocket.send(json.dumps({"type": "input.text", "text": word + " "}))
        await asyncio.sleep(0.05)
    await websocket.send(json.dumps({"type": "input.done"}))


async def main(url: str, voice: str) -> None:
    key = os.environ.get("QWEN3_TTS_API_KEY", "none")
    async with connect(url, additional_headers={"Authorization": f"Bearer {key}"}) as websocket:
        await websocket.send(json.dumps({"type": "session.config", "voice": voice, "response_format": "pcm"}))
        writing = asyncio.create_task(write(websocket))
        audio, rate = b"", 24000
        async for message in websocket:
            if isinstance(message, bytes):
                audio += message  # 16-bit mono: play it now
                continue
            event = json.loads(message)
            rate = event.get("sample_rate", rate)
            if event["type"] == "error":
                sys.exit(event["message"])
            if event["type"] == "session.done":  # of the utterance; another one may follow
                break
        await writing
    with wave.open("websocket.wav", "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", None))
        file.writeframes(audio)
    print(f"{len(audio) / 2 / rate:.2f} s of audio")


url = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8000/v1/audio/speech/stream"
asyncio.run(main(url, sys.argv[2] if len(sys.argv) > 2 else "alloy"))
