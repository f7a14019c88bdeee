#!/usr/bin/env bash
# Speak a text at once: curl passes the audio to a player while it is made.
#
#   qwen3-tts serve --model 0.6B-CustomVoice --port 8000
#   examples/curl_to_player.sh "Hello!" [voice]
#
# Run with curl 7.88, ffplay 5.1 and aplay 1.2.8.
set -euo pipefail
url=${URL:-http://127.0.0.1:8000}
quote() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$1"; }
request="{\"input\": $(quote "${1:-Hello!}"), \"voice\": $(quote "${2:-alloy}"), \"response_format\": \"pcm\"}"

# --no-buffer: every chunk at once. --fail: an error is not played.
speak() {
  curl --silent --show-error --no-buffer --fail \
    -H "Authorization: Bearer ${QWEN3_TTS_API_KEY:-none}" -H "Content-Type: application/json" \
    --data "$request" "$url/v1/audio/speech"
}

if command -v aplay > /dev/null; then
  speak | aplay --quiet --file-type raw --format S16_LE --rate 24000 --channels 1
else
  speak | ffplay -nodisp -autoexit -loglevel error -f s16le -sample_rate 24000 -
fi
