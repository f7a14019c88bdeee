#!/usr/bin/env python3
"""Speak through OpenAI's own client, whole and streamed.

pip install openai
python examples/openai_client.py "Hello!" hello.wav
python examples/openai_client.py "Hello!" - | ffplay -nodisp -f s16le -ar 24000 -ch_layout mono -i -
"""

import argparse
import os
import sys

import openai

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text")
parser.add_argument("output", help="an audio file: .wav, .flac, .mp3 or .opus; - streams PCM to stdout")
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--voice", default="alloy", help="GET /v1/audio/voices lists those of the server")
args = parser.parse_args()

client = openai.OpenAI(base_url=args.url, api_key=os.environ.get("QWEN3_TTS_API_KEY", "none"))

if args.output == "-":
    request = dict(model="qwen3-tts", voice=args.voice, input=args.text, response_format="pcm")
    with client.audio.speech.with_streaming_response.create(**request) as response:
        for audio in response.iter_bytes():  # as it is made: 16-bit mono at 24 kHz
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
