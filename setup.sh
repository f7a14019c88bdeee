#!/usr/bin/env bash
# Make .venv with everything the 12 Hz models need, and download weights.
#
#   ./setup.sh [0.6B|1.7B|both|none] [--system-torch] [--transformers5] [--server] [--ray] [--test]
#
# --system-torch   use the torch of the active python3 (Jetson, custom builds) instead of installing one
# --transformers5  make .venv5 instead, with transformers 5 and qwen-tts-hf, the fork of qwen-tts for it
# --server         also install what the server needs (python -m serving)
# --ray            also install Ray Serve, for many GPUs or machines (serve run serving.ray_app:app)
# --test           also install what the tests need, the server included
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  echo "usage: ./setup.sh [0.6B|1.7B|both|none] [--system-torch] [--transformers5] [--server] [--ray] [--test]" >&2
  exit 2
}

sizes="0.6B"
system_torch=""
transformers5=""
with_server=""
with_ray=""
with_tests=""
venv=.venv
packages=$(cat requirements.txt)
qwen_tts="qwen-tts==0.1.1"
for word in "$@"; do
  case $word in
    0.6B|1.7B) sizes=$word ;;
    both) sizes="0.6B 1.7B" ;;
    none) sizes="" ;;
    --system-torch) system_torch=yes ;;
    --transformers5) transformers5=yes ;;
    --server) with_server=yes ;;
    --ray) with_ray=yes ;;
    --test) with_tests=yes ;;
    *) usage ;;
  esac
done

# 5.16.1 is the newest transformers that this release of qwen-tts-hf works with.
if [ -n "$transformers5" ]; then
  venv=.venv5
  packages=$(sed 's/^transformers==.*/transformers==5.16.1/' requirements.txt)
  qwen_tts="qwen-tts-hf==0.1.1.post1"
fi

# An environment that was made for the other kind of torch is made anew.
linked=$(compgen -G "$venv/lib/python*/site-packages/torch.pth" > /dev/null && echo yes || true)
if [ -d $venv ] && [ "$linked" != "$system_torch" ]; then
  echo "making $venv anew: it was made for the other kind of torch" >&2
  rm -rf $venv
fi

# The environment. torch.pth makes the packages of the active environment visible, behind those installed here.
if [ -n "$system_torch" ]; then
  torch_folder=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))') || {
    echo "--system-torch: the active python3 has no torch that can be imported" >&2
    exit 2
  }
  packages=$(grep -v '^torch==' <<< "$packages")
  python3 -m venv $venv
  site_packages=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$torch_folder" > "$site_packages/torch.pth"
elif command -v uv > /dev/null; then
  uv venv --quiet --allow-existing $venv
else
  python3 -m venv $venv
fi
if [ -z "$system_torch" ] && command -v uv > /dev/null; then
  install="uv pip install --quiet --python $venv/bin/python"
  uninstall="uv pip uninstall --quiet --python $venv/bin/python"
else
  install="$venv/bin/python -m pip install --quiet"
  uninstall="$venv/bin/python -m pip uninstall --quiet --yes"
fi

# The packages. qwen-tts comes without its dependencies: torchaudio, sox, onnxruntime and gradio are for the 25 Hz
# models and the demo.
$install $packages
$install --no-deps "$qwen_tts"
# librosa brings scikit-learn, for functions that nobody calls here. transformers imports it where it is installed, which
# takes a sixth of the time to start.
$uninstall scikit-learn
if [ -n "$with_server" ]; then
  $install -r requirements-server.txt
fi
if [ -n "$with_ray" ]; then
  $install -r requirements-ray.txt
fi
# What the tests compare with, in a folder that only they look into: the interface of faster-qwen3-tts, and the handler
# of speech-to-speech, which wants transformers 5.
if [ -n "$with_tests" ]; then
  $install -r requirements-test.txt
  $install --no-deps --target $venv/peers faster-qwen3-tts==0.5.4
  if [ -n "$transformers5" ]; then
    $install --no-deps --target $venv/peers speech-to-speech==1.1.0 openai==2.28.0 jiter distro sniffio
  fi
fi
$venv/bin/python -c 'import generate'
echo "environment ready: $venv"

# The weights.
for size in $sizes; do
  if ! $venv/bin/python -m common.checkpoints "$size"; then
    echo "The environment is complete. For the weights, try again later with" >&2
    options="${system_torch:+ --system-torch}${transformers5:+ --transformers5}${with_server:+ --server}"
    echo "    ./setup.sh $size$options${with_ray:+ --ray}${with_tests:+ --test}" >&2
    echo "or try it without them, on random ones: $venv/bin/python tools/random_checkpoint.py tiny tiny" >&2
    exit 3
  fi
  echo "weights ready: $size"
done
