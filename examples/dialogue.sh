#!/usr/bin/env bash
# A dialogue of two voices: writes dialogue.wav and dialogue.srt. Further options may follow.
#
#     bash examples/dialogue.sh                     two speakers of 0.6B-CustomVoice
#     bash examples/dialogue.sh --model 1.7B-CustomVoice        which follows the styles, too
#
# With voices of your own, for a Base model: --voice Mia=mia.pt --voice Ben=ben.wav in their place.
set -euo pipefail
here=$(dirname "$0")

qwen3-tts speak --text-file "$here/dialogue.txt" --script --voice Mia=vivian --voice Ben=ryan --language en --join \
  --output dialogue.wav --subtitles dialogue.srt "$@"
