#!/usr/bin/env bash
# Makes .venv with everything the 12 Hz models need, and downloads weights.
#
#   ./setup.sh [0.6B|1.7B|both|none] [--system-torch]
#
# --system-torch uses the torch of the python3 that is active now (Jetson, custom builds) instead of installing one.
set -euo pipefail
cd "$(dirname "$0")"

usage() { echo "usage: ./setup.sh [0.6B|1.7B|both|none] [--system-torch]" >&2; exit 2; }
sizes="0.6B" system_torch=""
for word in "$@"; do
  case $word in
    0.6B|1.7B) sizes=$word ;;
    both) sizes="0.6B 1.7B" ;;
    none) sizes="" ;;
    --system-torch) system_torch=yes ;;
    *) usage ;;
  esac
done

# The environment. A link to the active environment makes its torch visible, behind what is installed here.
linked=$(compgen -G '.venv/lib/python*/site-packages/torch.pth' > /dev/null && echo yes || true)
[ "$linked" = "$system_torch" ] || rm -rf .venv                   # made for the other kind of torch
if [ -n "$system_torch" ]; then
  torch_folder=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))') || {
    echo "--system-torch: the active python3 has no torch that can be imported" >&2; exit 2; }
  python3 -m venv .venv
  echo "$torch_folder" > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
  install=".venv/bin/python -m pip install --quiet"
elif command -v uv > /dev/null; then
  uv venv --quiet --allow-existing .venv
  install="uv pip install --quiet --python .venv/bin/python"
else
  python3 -m venv .venv
  install=".venv/bin/python -m pip install --quiet"
fi

# The packages. qwen-tts without its dependencies: torchaudio, sox, onnxruntime and gradio are for the 25 Hz models
# and the demo.
if [ -n "$system_torch" ]; then
  $install $(grep -v '^torch==' requirements.txt)
else
  $install -r requirements.txt
fi
$install --no-deps qwen-tts==0.1.1
.venv/bin/python -c 'import generate'
echo "environment ready: .venv"

# The weights.
for size in $sizes; do
  if ! .venv/bin/python -c 'import sys, voices; voices.download(sys.argv[1])' "$size"; then
    echo "The environment is complete. For the weights, try again later with" >&2
    echo "    ./setup.sh $size" >&2
    echo "or go on without them, on random ones: .venv/bin/python random_checkpoint.py tiny tiny" >&2
    exit 3
  fi
  echo "weights ready: $size"
done
