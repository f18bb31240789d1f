#!/usr/bin/env bash
# Suspends a running server in place and resumes it, again and again, and asks it the same thing before and after.
#
# usage: vllm_ckpt_cycle.sh [options] PID [-- OPTIONS OF suspend]
#   --cycles N      how often (1)
#   --hold SECONDS  how long it stays suspended (5)
#   --url URL       an OpenAI-compatible server, as http://localhost:8000: the answers must be the same
#   --model NAME    the model to ask (the first one that the server lists)
#   --wait SECONDS  how long to wait for an answer after a resume (60)
#   --command PATH  nvsnap-gpu-suspend, where it is not on the path
#
# PID and all processes below it are suspended together. However this script ends, short of kill -9, it leaves the
# server running: what it suspended it resumes on its way out. Its exit status is that of what failed first.
set -euo pipefail

CYCLES=1 HOLD_S=5 URL='' MODEL='' WAIT_S=60 COMMAND=nvsnap-gpu-suspend PID='' EXTRA=()
PROMPT='The capital of France is'

usage() { sed -n '4,10s/^# //p' "$0" >&2; exit 2; }
number() { [[ $1 =~ ^[0-9]+([.][0-9]+)?$ ]] || { echo "$1 is not a number" >&2; usage; }; printf '%s' "$1"; }

while [ $# -gt 0 ]; do
    case $1 in
        --cycles | --hold | --url | --model | --wait | --command) [ $# -ge 2 ] || usage ;;&
        --cycles) CYCLES=$(number "$2"); shift 2 ;;
        --hold) HOLD_S=$(number "$2"); shift 2 ;;
        --url) URL=${2%/}; shift 2 ;;
        --model) MODEL=$2; shift 2 ;;
        --wait) WAIT_S=$(number "$2"); shift 2 ;;
        --command) COMMAND=$2; shift 2 ;;
        --) shift; EXTRA=("$@"); break ;;
        -*) usage ;;
        *) [ -z "$PID" ] || usage; PID=$(number "$1"); shift ;;
    esac
done
[ -n "$PID" ] || usage
# Whoever started it may not have collected it: then it is there, and has ended.
lives() { grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$PID"/task/*/status; }
lives || { echo "pid $PID: no such process" >&2; exit 3; }
for word in "${EXTRA[@]}"; do
    case $word in
        --state-dir* | --driver*) # the way back needs them too
            echo "$word: set NVSNAP_GPU_SUSPEND_STATE_DIR or NVSNAP_GPU_SUSPEND_DRIVER instead" >&2; exit 2 ;;
    esac
done

# Nobody may read it any more (a terminal or a pipe that has gone): that ends nothing, and least of all the way back.
say() { printf '%(%H:%M:%S)T %s\n' -1 "$*" >&2 || true; }
trap '' PIPE

# What it suspended it resumes; `recover` where a command was cut off half-way. The first failure stays the exit status.
bring_back() {
    local status=$? back=0
    trap - EXIT
    trap '' INT TERM HUP # a second signal must not leave the server suspended
    jobs -p | xargs -r kill 2>/dev/null || true
    if [ -n "$MAY_BE_DOWN" ]; then
        say "bringing the server back (exit status $status)"
        "$COMMAND" resume --tree "$PID" >&2 || back=$?
        if [ "$back" != 0 ] && [ "$back" != 3 ]; then # what resume refuses, recover cannot help either
            back=0
            "$COMMAND" recover --to running --tree "$PID" >&2 || back=$?
        fi
        if [ "$back" != 0 ]; then
            if lives; then say "pid $PID is NOT running: see $COMMAND status --tree $PID"
            else say "pid $PID has ended"; fi
            [ "$status" != 0 ] || status=1
        fi
    fi
    exit "$status"
}
MAY_BE_DOWN=''
trap bring_back EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# The tokens that the server answers with; the model is asked for first.
ask() {
    timeout "$WAIT_S" python3 - "$URL" "$MODEL" "$PROMPT" "$WAIT_S" <<'PYTHON'
import json, sys, time, urllib.error, urllib.request

url, model, prompt, wait = sys.argv[1:]
until = time.monotonic() + float(wait)


def call(path, data=None):
    request = urllib.request.Request(url + path, data and json.dumps(data).encode(), {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=max(1.0, until - time.monotonic())) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:
            if time.monotonic() > until:
                sys.exit(f"{url}{path} does not answer: {error}")
            time.sleep(0.2)


model = model or call("/v1/models")["data"][0]["id"]
question = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "logprobs": 1, "return_token_ids": True}
choice = call("/v1/completions", question)["choices"][0]
print(json.dumps([choice.get("token_ids"), choice["text"], (choice.get("logprobs") or {}).get("token_logprobs")]))
PYTHON
}

FIRST=''
[ -z "$URL" ] || FIRST=$(ask)
for ((cycle = 1; cycle <= CYCLES; cycle++)); do
    say "cycle $cycle of $CYCLES: suspend"
    MAY_BE_DOWN=yes
    "$COMMAND" suspend --in-place --tree "$PID" "${EXTRA[@]}"
    sleep "$HOLD_S" & wait $! # a signal ends a wait at once, and a foreground sleep only when it is over
    say "cycle $cycle of $CYCLES: resume"
    "$COMMAND" resume --tree "$PID"
    MAY_BE_DOWN=''
    if [ -n "$URL" ]; then
        NOW=$(ask)
        [ "$NOW" = "$FIRST" ] || { say "another answer after cycle $cycle: $NOW, not $FIRST"; exit 1; }
        say "cycle $cycle of $CYCLES: the same answer"
    fi
done
