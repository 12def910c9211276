#!/usr/bin/env bash
# SmolLM2 on every chat task within its window: the full cache, and the memory at a half, a quarter and an eighth of the
# 1,024 tokens around the facts:
#
#     JOBS=8 research/chat_tasks.sh TEXT OUT
#
# TEXT is a book that no heads were trained on. Every cell is a file in OUT and a process of its own: the same command
# goes on where it stopped. JOBS says how many run at once: one for every two cores, or eight on a large GPU. TASKS and
# POLICIES choose others, HEADS="kvzap=FOLDER" gives a policy its heads. The report is OUT/report.md.
set -euo pipefail
export TEXT=$1 OUT=$2 QUESTIONS=${QUESTIONS:-256} HEADS=${HEADS:-} PYTHON=${PYTHON:-python}
cell() {  # task policy units
  "$PYTHON" -m locret_stream eval --model smollm2 --text "$TEXT" --out "$OUT" --length 1024 --chunk-size 128 \
    --questions "$QUESTIONS" --task "$1" --policy "$2" --budget "$3" ${HEADS:+--heads "$HEADS"} >/dev/null
}
export -f cell
for task in ${TASKS:-chat_numbers chat_words chat_tools chat_needles chat_updates}; do
  for policy in ${POLICIES:-full locret}; do
    case "$policy" in full) budgets=512 ;; *) budgets="512 256 128" ;; esac  # full evicts nothing at any
    for budget in $budgets; do echo "$task" "$policy" "$budget"; done
  done
done | xargs -P "${JOBS:-1}" -n 3 bash -c 'cell "$@"' cell
"$PYTHON" -m locret_stream eval --out "$OUT" --report-only >/dev/null
