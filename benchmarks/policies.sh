#!/usr/bin/env bash
# Every policy on every task at a quarter, an eighth and a sixteenth of the window of the recall model:
#
#     benchmarks/policies.sh MODEL OUT
#
# MODEL is the folder that examples/train_recall_model.py wrote. Every cell is a file in OUT: the same command goes on
# where it stopped, and two of them share the work if one has PART=short and the other PART=long. The report is
# OUT/report.md; PART=endless reads streams of a million tokens.
set -euo pipefail
model=$1 out=$2
locret-stream() { "${PYTHON:-python}" -m locret_stream "$@"; }
common=(--model "$model" --out "$out" --budget 320 --budget 160 --budget 80 --chunk-size 128 --sinks 4 --stabilizers 4
        --questions 256 --heads "$model/heads")
others=(--heads "kvzap=$model/heads-hidden" --heads "trimkv=$model/heads-retention")
frame=(--policy full --policy oracle --policy oracle_per_head --policy random --policy streaming_llm)
policies=(--policy locret --policy kvzap --policy trimkv --policy nacl --policy snapkv --policy h2o --policy tova
          --policy scissorhands --policy infllm --policy keydiff --policy sirllm)
many=(--task recall --task last_write --task several_keys --task several_values --task decoys --task variables
      --task every_so_often --task text)
once=(--task passkey --task preference)  # one question a stream

case "${PART:-all}" in
  short|all)  # what the full cache can hold, and tasks that ask once
    locret-stream eval "${common[@]}" "${frame[@]}" "${many[@]}" "${once[@]}" --length 1024 --allocation uniform
    locret-stream eval "${common[@]}" "${others[@]}" "${policies[@]}" "${once[@]}" --length 1024 \
      --allocation uniform --allocation adaptive ;;&
  long|all)
    locret-stream eval "${common[@]}" "${others[@]}" "${policies[@]}" "${many[@]}" --length 4096 \
      --allocation uniform --allocation adaptive
    locret-stream eval "${common[@]}" --policy oracle --policy oracle_per_head --policy random --policy streaming_llm \
      "${many[@]}" --length 4096 --allocation uniform --allocation adaptive
    locret-stream eval "${common[@]}" --policy locret --policy streaming_llm --policy random "${many[@]}" \
      --length 16384 --allocation adaptive ;;&
  endless|all)
    locret-stream eval "${common[@]}" --policy locret --policy streaming_llm --policy random --task recall \
      --length 1000000 --questions 16 --allocation adaptive ;;
esac
locret-stream eval --out "$out" --report-only --plots >/dev/null
