#!/usr/bin/env bash
# Every policy on every task at a quarter, an eighth and a sixteenth of the 1,024 tokens over which the recall model was
# trained to look back (its window, 1,280, has room for a chunk beside them):
#
#     research/policies.sh MODEL OUT
#
# MODEL is the folder that `python -m research.train_recall_model` wrote. Every cell is a file in OUT: the same command goes on
# where it stopped, and several of them share the work, each with another PART: "short" (what the full cache can hold,
# and tasks that ask once), "long", "trained" (the policies with heads), "shared" (those without, at an eighth, with the
# shares that were learned for Locret), "far" (16,384 tokens), "far_others" (the same of all others; of those that go by
# attention, which keep no fact that long, at an eighth), "endless" (a million).
# Far and endless there is also Locret with even budgets, and at 16,384 tokens KeyDiff with Locret's shares, so that what
# the policy does and what the shares do stay apart. The report is OUT/report.md.
set -euo pipefail
model=$1 out=$2
locret-stream() { "${PYTHON:-python}" -m locret_stream "$@"; }
eighth=(--model "$model" --out "$out" --budget 128 --chunk-size 128 --sinks 4 --stabilizers 4 --questions 256)
common=("${eighth[@]}" --budget 256 --budget 64)
heads=(--heads "$model/heads" --heads "kvzap=$model/heads-hidden" --heads "trimkv=$model/heads-retention")
trained=(--policy locret --policy kvzap --policy trimkv "${heads[@]}" --allocation uniform --allocation adaptive)
frame=(--policy oracle --policy oracle_per_head --policy random --policy streaming_llm)
watching=(--policy nacl --policy snapkv --policy h2o --policy tova --policy scissorhands --policy infllm
          --knob infllm.block=16)  # go by attention; of the paper's blocks of 128 none fits an eighth
others=("${watching[@]}" --policy keydiff --policy sirllm)
best=(--policy locret --heads "$model/heads" --allocation adaptive)
even=(--policy locret --heads "$model/heads" --allocation uniform)
plain=(--policy streaming_llm --policy random)
many=(--task recall --task last_write --task several_keys --task several_values --task decoys --task variables
      --task every_so_often --task text)
once=(--task passkey --task preference)  # one question a stream

case "${PART:=all}" in
  short|long|trained|shared|far|far_others|endless|all) ;;
  *) echo "PART is $PART; expected short, long, trained, shared, far, far_others or endless, or none for all" >&2
     exit 2 ;;
esac
case "$PART" in
  short|all)
    locret-stream eval "${common[@]}" --policy full "${frame[@]}" "${many[@]}" "${once[@]}" --length 1024
    locret-stream eval "${common[@]}" "${others[@]}" "${once[@]}" --length 1024
    locret-stream eval "${common[@]}" "${trained[@]}" "${once[@]}" --length 1024 ;;&
  long|all)
    locret-stream eval "${common[@]}" "${others[@]}" "${frame[@]}" "${many[@]}" --length 4096 ;;&
  trained|all)
    locret-stream eval "${common[@]}" "${trained[@]}" "${many[@]}" --length 4096 --plots ;;&
  shared|all)
    locret-stream eval "${eighth[@]}" "${others[@]}" "${frame[@]}" --heads "$model/heads" "${many[@]}" --length 4096 \
      --allocation adaptive ;;&
  far|all)
    locret-stream eval "${common[@]}" "${best[@]}" "${many[@]}" --length 16384
    locret-stream eval "${common[@]}" "${plain[@]}" "${many[@]}" --length 16384
    locret-stream eval "${common[@]}" "${even[@]}" "${many[@]}" --length 16384
    locret-stream eval "${common[@]}" --policy keydiff --heads "$model/heads" --allocation adaptive "${many[@]}" \
      --length 16384 ;;&
  far_others|all)
    locret-stream eval "${common[@]}" --policy keydiff --policy sirllm "${many[@]}" --length 16384
    locret-stream eval "${eighth[@]}" "${watching[@]}" "${many[@]}" --length 16384
    locret-stream eval "${common[@]}" --policy kvzap --policy trimkv "${heads[@]}" --allocation adaptive "${many[@]}" \
      --length 16384 ;;&
  endless|all)
    locret-stream eval "${common[@]}" "${best[@]}" --task recall --length 1000000 --questions 64
    locret-stream eval "${eighth[@]}" "${even[@]}" --task recall --length 1000000 --questions 64
    locret-stream eval "${common[@]}" "${plain[@]}" --task recall --length 1000000 --questions 64 ;;
esac
locret-stream eval --out "$out" --report-only --plots >/dev/null
