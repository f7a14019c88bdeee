#!/usr/bin/env bash
# Times everything on this machine: ./benchmark.sh [0.6B|1.7B|both] [--random-weights] [--quick] [--check]
# Default: both, but 0.6B with --quick. Writes bench_results_<GPU>.json and sample_<size>.wav. More: bench.py --help
set -euo pipefail
cd "$(dirname "$0")"

models=
case ${1:-} in
  0.6B|1.7B) models=$1; shift ;;
  both) models="0.6B 1.7B"; shift ;;
  --*|"") ;;
  *) echo "usage: ./benchmark.sh [0.6B|1.7B|both] [--random-weights] [--quick] [--check]" >&2; exit 2 ;;
esac
[ -x .venv/bin/python ] || ./setup.sh none
exec .venv/bin/python bench.py $models "$@"
