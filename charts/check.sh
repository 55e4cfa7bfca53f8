#!/usr/bin/env bash
# Lints, renders and packages every chart.
set -euo pipefail
cd "$(dirname "$0")"
charts="sequence solaris vertical router loopfm trainer"
for chart in $charts gem; do helm dependency update "$chart" >/dev/null; done
for chart in $charts; do helm lint --strict -f environment.yaml "$chart" >/dev/null; done
helm lint --strict -f environment.yaml gem >/dev/null
helm template gem gem -f environment.yaml >/dev/null
for values in gem/ci/*.yaml; do helm template gem gem -f environment.yaml -f "$values" >/dev/null; done
mkdir -p ../build && helm package gem -d ../build
