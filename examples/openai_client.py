#!/usr/bin/env python3
"""Speak through OpenAI's own client: whole, streamed, and streamed as server-sent events.

    pip install openai
    python examples/openai_client.py "Hello!" hello.wav
    python examples/openai_client.py "Hello!" - | ffplay -nodisp -f s16le -ar 24000 -ch_layout mono -i -
    python examples/openai_client.py "Hello!" - --sse | ffplay -nodisp -f s16le -ar 24000 -ch_layout mono -i -

Run with openai 3.49.0.
"""

import argparse
import base64
import json
import os
import sys

import openai

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text")
parser.add_argument("output", help="an audio file: .wav, .flac, .mp3, .opus or .aac; - streams PCM to stdout")
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--voice", default="alloy", help="GET /v1/audio/voices lists those of the server")
parser.add_argument("--sse", action="store_true", help="with -: ask for server-sent events")
args = parser.parse_args()


def audio_of_events(response):
    for line in response.iter_lines():
        event = json.loads(line.removeprefix("data: ")) if line else {"type": None}
        if event["type"] == "speech.audio.delta":
            yield base64.b64decode(event["audio"])
        elif event["type"]:
            print(event, file=sys.stderr)  # speech.audio.done with the number of tokens, or an error


client = openai.OpenAI(base_url=args.url, api_key=os.environ.get("QWEN3_TTS_API_KEY", "none"))

if args.output == "-":
    request = dict(model="qwen3-tts", voice=args.voice, input=args.text, response_format="pcm")
    request["stream_format"] = "sse" if args.sse else "audio"
    with client.audio.speech.with_streaming_response.create(**request) as response:
        # As it is made: 16-bit mono at 24 kHz.
        for audio in audio_of_events(response) if args.sse else response.iter_bytes():
            sys.stdout.buffer.write(audio)
            sys.stdout.buffer.flush()
else:
    sound_format = args.output.rpartition(".")[2]
    # stream=False: a complete file, whose header knows its length
    speech = client.audio.speech.create(
        model="qwen3-tts",
        voice=args.voice,
        input=args.text,
        response_format=sound_format,
        extra_body={"stream": False},
    )
    speech.write_to_file(args.output)
    print(f"{args.output}: {len(speech.content)} bytes")
