#!/usr/bin/env bash
# Runs bench.py: ./benchmark.sh [0.6B|1.7B|both] [--random-weights] [--quick]
#     [--streams | --ready | --check | --listen | --plot | --tables]
# Default: both sizes, with --quick 0.6B. Writes bench_results_<GPU>.json and sample_<size>.wav. More: bench.py --help
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"  # also through a link

# The environment, if setup.sh has not made it yet.
[ -x .venv/bin/python ] || ./setup.sh none

exec .venv/bin/python bench.py "$@"
