#!/usr/bin/env bash
# Everything that only a GPU can tell about the kernels, in one run of under six minutes: docs/gpu.md says what and why.
# Needs bash, coreutils, Python with torch and Triton, and a GPU; no network, no installation, nothing written outside
# the results folder but Triton's cache.
set -uo pipefail

usage() {
  cat <<'USAGE'
usage: bench/gpu_check.sh [--out FOLDER] [--budget SECONDS] [--step STEP ...] [--quick] [--dry-run]

  --out FOLDER      where gpu_check.json, .txt and .log go; default: $OUT, or build/gpu_check
  --budget SECONDS  for all steps together; default: 350
  --step STEP       only this one, with ceilings where its targets are shares of them; may be given several times
  --quick           two cases of each table
  --dry-run         tiny cases in Triton's interpreter, on a machine without a GPU: finds mistakes, measures nothing

A step that fails or runs out of its time does not keep the others from running.
Exit codes: 0; 1 if a step failed or a target was missed; 2 if there is no GPU, which is asked once, before the steps,
or if the command line is wrong.
Environment: PYTHON (python3), PACKAGES (build/gpu_packages): a folder of further packages, where it exists.
USAGE
}

# Each step's limit in seconds, starting Python and torch included; together the budget. A step may also use what those
# before it left. What it has not begun 10 s before its end is left out.
steps=(versions:15 ceilings:20 correct:55 identity:35 repeat:25 ops:20 bits:25 decode:40 prefill:30 shared:30 pointwise:15 model:40)
# Those that targets rest on keep their time, whatever the others take and however small the budget is.
judged=" decode prefill shared model "

fail() {
  echo "gpu_check.sh: $1" >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
packages=${PACKAGES:-$root/build/gpu_packages}
out=${OUT:-$root/build/gpu_check}
budget=350
dry_run=false
chosen=()
options=()
device_options=()
while (($#)); do
  case $1 in
    --out | --budget | --step)
      (($# >= 2)) || fail "$1 needs a value"
      case $1 in
        --out) out=$2 ;;
        --budget) budget=$2 ;;
        --step) chosen+=("$2") ;;
      esac
      shift
      ;;
    --quick) options+=(--quick) ;;
    --dry-run)
      dry_run=true
      options+=(--dry-run --quick)
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      fail "unknown argument '$1'"
      ;;
  esac
  shift
done
[[ $budget =~ ^[1-9][0-9]*$ ]] || fail "--budget is '$budget'; accepted: a whole number of seconds"
names=("${steps[@]%%:*}")
for step in ${chosen[@]+"${chosen[@]}"}; do
  [[ " ${names[*]} " == *" $step "* ]] || fail "--step is '$step'; accepted: ${names[*]}"
done
command -v "$python" >/dev/null || fail "there is no '$python' (set PYTHON)"
mkdir -p "$out" || fail "the results folder '$out' can't be made"
work=$(mktemp -d) || fail "no temporary folder can be made"
trap 'rm -rf "$work"' EXIT

export PYTHONPATH="$root/kernels:$root/server:$root/bench"
[[ -d $packages ]] && PYTHONPATH="$PYTHONPATH:$packages"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if $dry_run; then
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
  device_options=(--dry-run)
else
  unset TRITON_INTERPRET
  options+=(--workers 8)
fi

report() {
  "$python" -m sapwood_bench.kernels.report --out "$work" "${wanted[@]}" \
    --write-json "$out/gpu_check.json" --write-table "$out/gpu_check.txt"
}

is_chosen() {
  ((${#chosen[@]} == 0)) || [[ " ${chosen[*]} " == *" $1 "* ]]
}

if [[ " ${chosen[*]-} " =~ \ (decode|prefill|model)\  ]]; then
  chosen+=(ceilings)
fi
later=0 judged_later=0 # seconds of the chosen steps still to come
for entry in "${steps[@]}"; do
  step=${entry%%:*}
  is_chosen "$step" || continue
  ((later += ${entry##*:}))
  [[ $judged == *" $step "* ]] && ((judged_later += ${entry##*:}))
done

# Seconds that step $1 of limit $2 may take: its own and what others left, or less if those of a target need it.
granted() {
  local left=$((budget - SECONDS)) limit=$2
  ((later -= limit))
  [[ $judged == *" $1 "* ]] && ((judged_later -= limit))
  ((left - later > limit)) && limit=$((left - later))
  ((left - judged_later < limit)) && limit=$((left - judged_later))
  limit_s=$limit
}

log=$out/gpu_check.log
: >"$log"
timeout -k 5 60 "$python" -m sapwood_bench.kernels.device ${device_options[@]+"${device_options[@]}"} 2>&1 | tee -a "$log" >&2
code=${PIPESTATUS[0]}
((code == 2)) && exit 2 # its one line says why nothing can be measured here
((code == 0)) || echo "the search for a GPU ended with exit code $code" | tee -a "$log" >&2

wanted=()
for entry in "${steps[@]}"; do
  step=${entry%%:*}
  is_chosen "$step" || continue
  wanted+=(--step "$step")
  granted "$step" "${entry##*:}"
  limit=$limit_s
  $dry_run && limit=$((${entry##*:} * 10))
  if ((limit < 15)); then
    echo "$step: not run, the budget of $budget s is used up" | tee -a "$log" >&2
    continue
  fi
  echo "== $step, up to $limit s" >>"$log"
  environment=()
  [[ $step == bits ]] && environment=(CUBLAS_WORKSPACE_CONFIG=:16:8 CUBLASLT_WORKSPACE_SIZE=1) # as --deterministic
  timeout -k 5 "$limit" env ${environment[@]+"${environment[@]}"} "$python" -m sapwood_bench.kernels --out "$work" --step "$step" \
    --seconds $((limit - 10)) ${options[@]+"${options[@]}"} 2>&1 | tee -a "$log" >&2
  code=${PIPESTATUS[0]}
  if ((code == 124 || code == 137)); then
    echo "$step: stopped after $limit s" | tee -a "$log" >&2
  elif ((code > 1)); then
    echo "$step: ended with exit code $code" | tee -a "$log" >&2
  fi
  report >/dev/null # so that something is left if somebody ends this script
done

report
code=$?
echo "results: $out/gpu_check.json, gpu_check.txt, gpu_check.log; $SECONDS s"
exit $code
