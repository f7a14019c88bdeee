#!/usr/bin/env bash
# A chapter of a book, with wrapped lines, pauses, names that need help, and the time of each part: writes chapter.mp3
# and chapter.srt. Further options may follow. After Ctrl-C, the same with --resume continues.
#
#     bash examples/audiobook.sh
#     bash examples/audiobook.sh --voice serena --speed 0.95
set -euo pipefail
here=$(dirname "$0")

qwen3-tts speak --text-file "$here/chapter.txt" --paragraphs --lexicon "$here/chapter_lexicon.txt" --language en --join \
  --pause 0.6 --output chapter.mp3 --subtitles chapter.srt "$@"
