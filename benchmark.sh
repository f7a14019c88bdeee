#!/usr/bin/env bash
# Times everything on this machine: ./benchmark.sh [0.6B|1.7B|both] [--random-weights] [--quick] [--check]
# Default: both, but 0.6B with --quick. Writes bench_results_<GPU>.json and sample_<size>.wav. More: bench.py --help
set -euo pipefail
cd "$(dirname "$0")"

for word in "$@"; do
  shift
  case $word in
    both) set -- "$@" 0.6B 1.7B ;;
    *) set -- "$@" "$word" ;;
  esac
done
[ -x .venv/bin/python ] || ./setup.sh none
exec .venv/bin/python bench.py "$@"
