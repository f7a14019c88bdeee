#!/usr/bin/env bash
# Times everything on this machine: ./benchmark.sh [0.6B|1.7B|both] [--random-weights] [--quick] [--check]
# Writes bench_results_<GPU>.json and sample_<size>.wav. The rest is in bench.py --help.
set -euo pipefail
cd "$(dirname "$0")"

models="0.6B 1.7B"
case ${1:-} in
  0.6B|1.7B) models=$1; shift ;;
  both) shift ;;
  --*|"") ;;
  *) echo "usage: ./benchmark.sh [0.6B|1.7B|both] [--random-weights] [--quick] [--check]" >&2; exit 2 ;;
esac
[ -x .venv/bin/python ] || ./setup.sh none
exec .venv/bin/python bench.py $models "$@"
