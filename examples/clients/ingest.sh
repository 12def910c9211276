#!/bin/sh
# A log goes into a session, however long it is, and is asked about:  examples/clients/ingest.sh service.log "What broke?"
#     locret-stream serve
set -eu
url="${LOCRET_URL:-http://127.0.0.1:8000/v1}"
curl --fail-with-body --silent -T "$1" "$url/sessions/log/ingest?label=$(basename "$1")"
echo
curl --fail-with-body --silent -H content-type:application/json "$url/sessions/log/ask" \
    -d "{\"question\": \"$2\", \"max_tokens\": 32}"
echo
