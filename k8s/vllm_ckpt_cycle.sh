#!/usr/bin/env bash
# Suspends a running server in place and resumes it, again and again, and asks it the same thing before and after.
#
# usage: vllm_ckpt_cycle.sh [options] PID [-- OPTIONS OF suspend]
#   --cycles N      how often (1)
#   --hold SECONDS  how long it stays suspended (5)
#   --url URL       an OpenAI-compatible server, as http://localhost:8000: the answers must be the same
#   --model NAME    the model to ask (the first one that the server lists)
#   --wait SECONDS  how long to wait for an answer before the first suspend and after each resume (60)
#   --command PATH  nvsnap-gpu-suspend, where it is not on the path
#
# PID and all processes below it are suspended together. However this script ends, short of kill -9, it leaves the
# server running: what it suspended it resumes on its way out. Its exit status is that of what failed first.
set -euo pipefail

CYCLES=1 HOLD_S=5 URL='' MODEL='' WAIT_S=60 COMMAND=nvsnap-gpu-suspend PID='' EXTRA=()
PROMPT='The capital of France is'

usage() { sed -n '4,10s/^# //p' "$0" >&2; exit 2; }
matching() { [[ $1 =~ $2 ]] || { echo "$1 is not $3" >&2; usage; }; printf '%s' "$1"; }
# Nine digits fit wherever they go; to the shell's arithmetic a leading zero means octal.
whole() { matching "$1" '^(0|[1-9][0-9]{0,8})$' "a whole number"; }
seconds() { matching "$1" '^(0|[1-9][0-9]{0,8})([.][0-9]+)?$' "a number of seconds"; }

while [ $# -gt 0 ]; do
    case $1 in
        --cycles | --hold | --url | --model | --wait | --command) [ $# -ge 2 ] || usage ;;&
        --cycles) CYCLES=$(whole "$2"); shift 2 ;;
        --hold) HOLD_S=$(seconds "$2"); shift 2 ;;
        --url) URL=${2%/}; shift 2 ;;
        --model) MODEL=$2; shift 2 ;;
        --wait) WAIT_S=$(seconds "$2"); shift 2 ;;
        --command) COMMAND=$2; shift 2 ;;
        --) shift; EXTRA=("$@"); break ;;
        -*) usage ;;
        *) [ -z "$PID" ] || usage; PID=$(whole "$1"); shift ;;
    esac
done
[ -n "$PID" ] || usage
for word in "${EXTRA[@]}"; do
    case $word in
        --state-dir* | --driver*) # the way back needs them too
            echo "$word: set NVSNAP_GPU_SUSPEND_STATE_DIR or NVSNAP_GPU_SUSPEND_DRIVER instead" >&2; exit 2 ;;
        --ckpt-dir*)
            [ "$CYCLES" -le 1 ] || { echo "$word holds one checkpoint: that is one cycle, not $CYCLES" >&2; exit 2; } ;;
    esac
done
type -P -- "$COMMAND" >/dev/null || { echo "$COMMAND: no such command" >&2; exit 127; }
# Whoever started it may not have collected it: then it is there, and has ended.
lives() { grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$PID"/task/*/status; }
lives || { echo "pid $PID: no such process" >&2; exit 3; }

# Nobody may read it any more (a terminal or a pipe that has gone): that ends nothing, and least of all the way back.
say() { printf '%(%H:%M:%S)T %s\n' -1 "$*" >&2 || true; }
trap '' PIPE

# What the server is in, by its groups; nothing where that is not known.
state() {
    "$COMMAND" status --json --tree "$PID" 2>/dev/null |
        python3 -c 'import json, sys; print(*sorted({group["state"] for group in json.load(sys.stdin)["groups"]}))' 2>/dev/null
}

tell_state() {
    lives || { say "pid $PID has ended"; return; }
    local found
    found=$(state) || found=''
    case $found in
        running) say "pid $PID is running" ;;
        '') say "whether pid $PID runs is not known: $COMMAND status does not say" ;;
        *) say "pid $PID is NOT running ($found): see $COMMAND status --tree $PID" ;;
    esac
}

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
            tell_state
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
    python3 - "$URL" "$MODEL" "$PROMPT" "$WAIT_S" <<'PYTHON'
import json, signal, sys, time, urllib.request

url, model, prompt, wait = sys.argv[1:]
last = "it says nothing"


def over(*_):
    sys.exit(f"{asked} does not answer within {wait} s: {last}")


def one_line(text):
    return " ".join(str(text).split())[:300]


def call(path, data=None):
    global asked, last
    asked = url + path
    while True:
        try:
            request = urllib.request.Request(asked, data and json.dumps(data).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except Exception as error:  # whatever a server that is still on its way up, or another one, may say
            last = one_line(error) or type(error).__name__
        time.sleep(0.2)


def pick(answer, look):
    try:
        return look(answer)
    except (AttributeError, IndexError, KeyError, TypeError):
        sys.exit(f"{asked}: not the answer of an OpenAI-compatible server: {one_line(json.dumps(answer))}")


def content(answer):
    choice = answer["choices"][0]
    return [choice.get("token_ids"), choice["text"], (choice.get("logprobs") or {}).get("token_logprobs")]


signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGALRM, over)
signal.setitimer(signal.ITIMER_REAL, max(float(wait), 0.1))
model = model or pick(call("/v1/models"), lambda answer: answer["data"][0]["id"])
question = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "logprobs": 1, "return_token_ids": True}
print(json.dumps(pick(call("/v1/completions", question), content)))
PYTHON
}

# Ends the script after a suspend that failed; one that was refused has changed nothing, and nothing is brought back.
not_suspended() {
    case $1 in 2 | 3) MAY_BE_DOWN='' && say "the suspend was refused (exit status $1): nothing was changed" ;; esac
    exit "$1"
}

FIRST=''
[ -z "$URL" ] || FIRST=$(ask)
for ((cycle = 1; cycle <= CYCLES; cycle++)); do
    say "cycle $cycle of $CYCLES: suspend"
    MAY_BE_DOWN=yes
    "$COMMAND" suspend --in-place --tree "$PID" "${EXTRA[@]}" || not_suspended $?
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
