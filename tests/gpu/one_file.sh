#!/usr/bin/env bash
# Run one test file in its own process, for run.sh: an illegal address then ends no other.
name=$(basename "$1" .py)
limit=${LIMIT:-300}
# SIGINT, so that pytest still tells what failed
timeout -s INT -k 10 "$limit" "$PYTHON" -m pytest -p no:cacheprovider -rf --tb=short \
    --junitxml "$OUT/$name.xml" "$1" > "$OUT/$name.log" 2>&1
code=$?
last=$(grep -E 'passed|failed|error|skipped' "$OUT/$name.log" | tail -n 1 | cut -c -150)
# 5: nothing collected, as for a skipped file
[ "$code" = 5 ] && code=0
printf '%-26s %-12s %s\n' "$name" "$(verdict "$code" $SECONDS "$limit")" \
    "${last:-$(tail -n 1 "$OUT/$name.log" | cut -c -150)}"
