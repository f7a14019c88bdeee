#!/usr/bin/env bash
# Make .venv with everything the 12 Hz models need, and download weights, try it, or run the tests: ./setup.sh --help
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"  # readlink: the script may be called through a link

show_help() {
  cat << 'END'
usage: ./setup.sh [WHAT ...] [OPTION ...]

Makes .venv (Python 3.11 or newer) with what is missing in it, and then:

  0.6B-CustomVoice  downloads a model with preset voices; the default, and the shortest way to speech
  0.6B, 1.7B        download models that clone a voice from a recording; both: the two of them
  1.7B-CustomVoice  downloads the larger model with preset voices, which takes instructions
  1.7B-VoiceDesign  downloads a model that makes a voice from a description
  none              downloads nothing
  demo              downloads no weights: speaks noise to hello.wav with a tiny random model, also without a GPU
  test              downloads no weights: runs the tests

options:
  --server          also install what the server needs (qwen3-tts serve)
  --ray             also install Ray Serve, for many GPUs or machines (serve run qwen3_tts_cuda_graphs.serving.ray_app:app)
  --test            also install what the tests need, the server included
  --system-torch    use the torch of the active python3 (Jetson, custom builds) instead of installing one
  --transformers5   make .venv5 instead, with transformers 5 and qwen-tts-hf, the fork of qwen-tts for it
  --help            show this
END
}

# Print what is done next, with the minutes and seconds since the start.
step() {
  printf '[%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"
}

models=""
download=yes
then=""
options=""
sections=base  # of requirements.txt
system_torch=""
venv=.venv
qwen_tts="qwen-tts==0.1.1"
for word in "$@"; do
  if [[ $word == --* ]]; then
    options="$options $word"
  fi
  case $word in
    0.6[Bb]|1.7[Bb]|0.6[Bb]-[Cc]ustom[Vv]oice|1.7[Bb]-[Cc]ustom[Vv]oice|1.7[Bb]-[Vv]oice[Dd]esign)
      models="$models $word"
      ;;
    both) models="$models 0.6B 1.7B" ;;
    none) download="" ;;
    demo) download="" then=demo ;;
    test) download="" then=test sections="$sections server test" ;;
    --server) sections="$sections server" ;;
    --ray|--test) sections="$sections server ${word#--}" ;;
    --system-torch) system_torch=yes ;;
    --transformers5) venv=.venv5 ;;
    -h|--help) show_help; exit 0 ;;
    *) echo "error: setup.sh does not know $word: see ./setup.sh --help" >&2; exit 2 ;;
  esac
done
if [ -n "$download" ]; then
  models=${models:-0.6B-CustomVoice}
fi

# The packages of a section of requirements.txt, which ends at the title of the next one.
packages_of() {
  sed -n "/^# $1\$/,/^# /p" requirements.txt | grep ==
}
packages=$(packages_of base)

# 5.16.1 is the newest transformers that this release of qwen-tts-hf works with.
if [ $venv = .venv5 ]; then
  packages=$(sed 's/^transformers==.*/transformers==5.16.1/' <<< "$packages")
  qwen_tts="qwen-tts-hf==0.1.1.post1"
fi

# Remove an environment that was made with the other choice of --system-torch.
linked=$(compgen -G "$venv/lib/python*/site-packages/torch.pth" > /dev/null && echo yes || true)
if [ -d $venv ] && [ "$linked" != "$system_torch" ]; then
  echo "making $venv anew: it was made for the other kind of torch" >&2
  rm -rf $venv
fi

# Make the environment. torch.pth makes the packages of the active environment visible, after those installed here.
[ -d $venv ] || step "making $venv"
if [ -n "$system_torch" ]; then
  torch_folder=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))') || {
    echo "error: --system-torch: the active python3 has no torch that can be imported" >&2
    exit 2
  }
  packages=$(grep -v '^torch==' <<< "$packages")
  python3 -m venv $venv
  site_packages=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$torch_folder" > "$site_packages/torch.pth"
elif command -v uv > /dev/null; then
  uv venv --quiet --allow-existing $venv
elif python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  python3 -m venv $venv
else
  echo "error: python3 is missing or older than 3.11: install a newer one, or uv" >&2
  exit 2
fi
quiet=--quiet
[ ! -t 1 ] || quiet=""  # a terminal shows the progress of downloads
if [ -z "$system_torch" ] && command -v uv > /dev/null; then
  install="uv pip install $quiet --python $venv/bin/python"
  uninstall="uv pip uninstall --quiet --python $venv/bin/python"
else  # no warnings about missing dependencies of qwen-tts and librosa, which are left out on purpose
  install="$venv/bin/python -m pip install $quiet --no-warn-conflicts --disable-pip-version-check"
  uninstall="$venv/bin/python -m pip uninstall --quiet --yes"
  # Python's own pip is old, and takes twice as long to find the packages.
  [ -x $venv/bin/qwen3-tts ] || $install --upgrade pip
fi

# Install the packages, and qwen-tts without its dependencies: torchaudio, sox, onnxruntime and gradio are for the 25 Hz
# models and the demo.
step "installing into $venv what is missing of" $packages "$qwen_tts (gigabytes and 2 to 10 minutes, the first time)"
$install $packages
$install --no-deps "$qwen_tts"
# Remove scikit-learn, which librosa needs for functions that are not called here: transformers would import it, which
# takes a sixth of the time to start.
$uninstall scikit-learn
# Install the package itself, in place, with the command $venv/bin/qwen3-tts. Only once, because building it needs the
# network.
[ $venv/bin/qwen3-tts -nt pyproject.toml ] || PYTHONWARNINGS=ignore $install --no-deps --editable .
# Import in the background: the first import compiles torch and transformers, which takes as long as installing the rest.
first_import="import qwen3_tts_cuda_graphs.common.loading"
$venv/bin/python -c "$first_import" &
import=$!
if [ "$sections" != base ]; then
  step "installing what the sections${sections#base} of requirements.txt name (a minute, the first time)"
  $install $(for section in ${sections#base}; do packages_of $section; done | sort -u)
fi
# Install what the tests compare with, in a folder that only they use: faster-qwen3-tts, and the handler of
# speech-to-speech, which needs transformers 5.
if [[ $sections == *test* ]]; then
  $install --no-deps --upgrade --target $venv/peers faster-qwen3-tts==0.5.4
  if [ $venv = .venv5 ]; then
    $install --no-deps --upgrade --target $venv/peers speech-to-speech==1.1.0 openai==2.28.0 jiter distro sniffio
  fi
fi
step "importing torch and transformers (a minute the first time, when Python compiles them)"
wait $import || $venv/bin/python -c "$first_import"  # it may have failed while a package was replaced
step "environment ready: $venv"

# Download the weights.
for model in $models; do
  step "downloading the weights of $model, if they are not there yet (gigabytes)"
  if ! $venv/bin/python -m qwen3_tts_cuda_graphs.common.hub "$model"; then
    echo "The environment is complete. For the weights, try again later with" >&2
    echo "    ./setup.sh $model$options" >&2
    echo "or try it without them, on random ones: ./setup.sh demo" >&2
    exit 3
  fi
  step "weights ready: $model"
done

# Run the demo or the tests, or print how to speak.
case $then in
  demo)
    step "making a tiny model with random weights (10 to 30 seconds)"
    $venv/bin/python -m qwen3_tts_cuda_graphs.bench.random_checkpoint tiny tiny
    step "speaking with it (10 to 30 seconds)"
    $venv/bin/python generate.py --model tiny --text "Hello!" --output hello.wav
    echo "Everything runs here; hello.wav is noise. For speech, where there is a GPU and the model hub can be reached:"
    echo "    $venv/bin/python generate.py --text \"Hello!\"      # downloads 0.6B-CustomVoice the first time"
    ;;
  test)
    step "running the tests (about seven minutes on two cores)"
    exec $venv/bin/python -m pytest -q -n 3 --dist worksteal tests
    ;;
  *)
    speak="$venv/bin/python generate.py"
    case ${models##* } in
      ""|0.6B-CustomVoice) ;;
      *-*) speak="$speak --model ${models##* }" ;;
      *) speak="$speak --model ${models##* } --ref-audio voice.wav" ;;  # a Base model clones the voice of a recording
    esac
    echo "To speak: $speak --text \"Hello!\""
    ;;
esac
