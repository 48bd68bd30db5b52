#!/usr/bin/env bash
# One test file in a process of its own, for run.sh: an illegal address ends no other.
name=$(basename "$1" .py)
timeout -k 10 "${LIMIT:-300}" "$PYTHON" -m pytest -p no:cacheprovider -rf --tb=short \
    --junitxml "$OUT/$name.xml" "$1" > "$OUT/$name.log" 2>&1
code=$?
last=$(grep -E 'passed|failed|error|skipped' "$OUT/$name.log" | tail -n 1 | cut -c -150)
# 5: nothing collected
case $code in 0 | 5) code=ok ;; 124 | 137) code="ended after ${LIMIT:-300} s" ;; *) code="FAILED ($code)" ;; esac
printf '%-26s %-12s %s\n' "$name" "$code" "${last:-$(tail -n 1 "$OUT/$name.log" | cut -c -150)}"
