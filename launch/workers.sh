# Shared by tpu_vm.sh and ssh.sh: one process of a job on every worker, followed, stopped, restarted.
# The caller defines `on_worker INDEX COMMAND` (runs a command line there), `recover` (makes the workers usable again
# after FAILED_WORKER ended with FAILED_CODE; fails where a restart cannot help), and sets the variables below.
# shellcheck shell=bash

DRY_RUN=0
COUNT=0            # workers
DIR=jaxrl_llm      # folder of the code on every worker, relative to the home folder or absolute
OUT=""             # run folder, relative to DIR or absolute; on storage that all workers share
MAX_RESTARTS=10
DELAY=20           # seconds before a retry
GRACE=30           # seconds that the other workers have to end after one failed
SAVE_TIME=60       # seconds that a job has to save once it is asked to end
COMMAND=()         # its first words, as in `run dr_grpo` or `dpo`; none: the main job
JOB=()             # its arguments
FAILED_WORKER=""
FAILED_CODE=0
RUN_THERE=0        # whether the run folder holds a run, see find_run
RESTARTS=0         # so far
STOPPED=78         # code of a worker whose job the user stopped
RUNS_ALREADY=79    # code of a worker that was to start a job and has one

# One line and exit code 2: the mistake is in the command line.
fail() {
    echo "error: $*" >&2
    exit 2
}

# What went wrong out there, with the exit code that a caller can act on.
give_up() {
    local code="$1"
    shift
    echo "error: $*" >&2
    exit "$code"
}

say() {
    echo "launch: $*"
}

# The comment at the head of a script is its manual.
usage() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$1"
}

# Fails unless the value is a whole number of at least the bound: `number --delay "$value" 0`.
number() {
    case "$2" in
    '') fail "$1 needs a value; see --help" ;;
    *[!0-9]*) fail "$1 $2 is not a whole number" ;;
    esac
    if [ "$2" -lt "$3" ]; then fail "$1 $2 must be at least $3"; fi
}

# read_options ARGUMENTS...: shared options here, the others by `option NAME VALUE`, which fails for an unknown one.
read_options() {
    local name
    while [ "$#" -gt 0 ]; do
        name="$1"
        case "$name" in
        --help | -h) usage "$0" && exit 0 ;;
        --dry-run) DRY_RUN=1 && shift && continue ;;
        --) shift && split_job "$@" && check_job "${JOB[@]}" && return ;;
        esac
        if flag "$name"; then shift && continue; fi
        if ! option "$name" "${2:-}" && ! shared_option "$name" "${2:-}"; then
            fail "unknown option $name; see --help (arguments of the job come after --)"
        fi
        if [ -z "${2:-}" ] || [ "${2#--}" != "$2" ]; then fail "$name needs a value; see --help"; fi
        shift 2
    done
}

# The words of a job before its first flag name a command, which they have to follow at once.
split_job() {
    COMMAND=()
    while [ "$#" -gt 0 ] && [ "${1#-}" = "$1" ]; do COMMAND+=("$1") && shift; done
    JOB=("$@")
}

shared_option() {
    case "$1" in
    --dir) DIR="$2" ;;
    --out) OUT="$2" ;;
    --max-restarts) MAX_RESTARTS="$2" && number "$1" "$2" 0 ;;
    --delay) DELAY="$2" && number "$1" "$2" 0 ;;
    --grace) GRACE="$2" && number "$1" "$2" 0 ;;
    --save-time) SAVE_TIME="$2" && number "$1" "$2" 1 ;;
    *) return 1 ;;
    esac
}

# Flags that the launcher itself sets must not come from the user.
check_job() {
    local argument
    for argument in "$@"; do
        case "${argument%%=*}" in
        --hosts | --resume | --out) fail "$argument belongs to the launcher: use its --out; it resumes by itself" ;;
        esac
    done
}

# The words as one line of shell, quoted only where needed.
words() {
    local word line=""
    for word in "$@"; do
        if [[ "$word" =~ ^[A-Za-z0-9_./:,=@%+-]+$ ]]; then line+=" $word"; else line+=" ${word@Q}"; fi
    done
    printf '%s' "${line# }"
}

# Runs a command, or prints it in a dry run.
execute() {
    if [ "$DRY_RUN" = 1 ]; then
        words "$@"
        echo
    else
        "$@"
    fi
}

# retry TRIES COMMAND...: the code of the last try.
retry() {
    local tries="$1" try code=0
    shift
    for ((try = 1; try <= tries; try++)); do
        code=0
        "$@" || code=$?
        if [ "$code" = 0 ]; then return 0; fi
        if [ "$try" -lt "$tries" ]; then
            say "try $try of $tries ended with code $code; again in $DELAY s"
            sleep "$DELAY"
        fi
    done
    return "$code"
}

# The beginning of a remote command line: in the folder of the code.
enter_line() {
    printf 'cd %q || { echo "no %q here: run setup first"; exit 2; }; ' "$DIR" "$DIR"
}

# shellcheck disable=SC2016
FOLLOW='if ! [ -e .job/pid ]; then echo "no job was started here"; exit 255; fi; '
# shellcheck disable=SC2016
FOLLOW+='tail -s 0.2 -n +1 -f --pid="$(cat .job/pid)" .job/log; code="$(cat .job/exit 2>/dev/null || echo 255)"; '
FOLLOW+="if [ -e .job/stopped ]; then case \"\$code\" in 130 | 137 | 143 | 255) code=$STOPPED ;; esac; fi; "
FOLLOW+='exit "$code"'

# The remote command line that follows a started job to its end and ends with its exit code; 255 where there is none,
# STOPPED where the user ended it.
follow_line() {
    enter_line
    printf '%s' "$FOLLOW"
}

# The remote command line that starts worker $1 of the job, independent of this connection, and follows it. What the
# user stopped between two starts is not started again.
start_line() {
    local index="$1" job
    shift
    job="$(words .venv/bin/python -m jaxrl_llm "${COMMAND[@]}" --hosts "$(hosts_of "$index")" "$@")"
    enter_line
    printf 'mkdir -p .job; '
    if [ "$RESTARTS" != 0 ]; then printf 'if [ -e .job/stopped ]; then exit %s; fi; ' "$STOPPED"; fi
    # shellcheck disable=SC2016
    printf '%s' 'if [ -e .job/pid ] && kill -0 "$(cat .job/pid)" 2>/dev/null; then ' \
        "echo \"a job runs here already\"; exit $RUNS_ALREADY; fi; rm -f .job/exit .job/stopped; : > .job/log; "
    job="trap : TERM INT; $job; echo \$? > .job/exit.new; mv .job/exit.new .job/exit"
    printf 'setsid nohup bash -c %s > .job/log 2>&1 < /dev/null & echo $! > .job/pid; ' "${job@Q}"
    printf '%s' "$FOLLOW"
}

# stop_line INDEX [for_good]: the remote command line that asks the job to save and end, and kills it (code 137) where
# it has not ended SAVE_TIME later. `for_good` is the user's wish: what follows the job ends, and nothing restarts it.
stop_line() {
    enter_line
    if [ "${2:-}" = for_good ]; then printf 'mkdir -p .job; touch .job/stopped; '; fi
    # shellcheck disable=SC2016
    printf '%s' '[ -e .job/pid ] || exit 0; pid="$(cat .job/pid)"; '
    # a job that is asked again does not wait until it has saved: the user's own stop has to see to its end
    if [ "${2:-}" != for_good ]; then printf 'if [ -e .job/stopped ]; then exit 0; fi; '; fi
    # shellcheck disable=SC2016
    printf '%s' 'kill -TERM -- "-$pid" 2>/dev/null || exit 0; ' "for _ in \$(seq $((5 * SAVE_TIME))); " \
        'do kill -0 "$pid" 2>/dev/null || exit 0; sleep 0.2; done; kill -KILL -- "-$pid"; exit 137'
}

stop_worker() {
    local code=0
    on_worker "$1" "$(stop_line "$@")" </dev/null >/dev/null 2>&1 || code=$?
    if [ "$code" = 137 ]; then
        say "worker $1 had not ended $SAVE_TIME s after it was asked to and was killed; --save-time gives it longer"
    fi
}

# stop_all HOW FOLDER: stops the job on every worker (HOW: see stop_line) but those with a file FOLDER/busy.INDEX. Of a
# worker that cannot be reached nothing is known.
stop_all() {
    local index
    for ((index = 0; index < COUNT; index++)); do
        if [ -n "${2:-}" ] && [ -e "$2/busy.$index" ]; then continue; fi
        stop_worker "$index" "${1:-}" &
    done
    wait
}

# Waits for workers that were out of reach; FAILED_WORKER names the first that does not answer.
answering() {
    local index
    for ((index = 0; index < COUNT; index++)); do
        if ! retry 5 on_worker "$index" true </dev/null; then FAILED_WORKER="$index" && return 1; fi
    done
}

# Sets RUN_THERE, whether the run folder holds a run: decided once, on worker 0, so that all workers do the same. A
# connection that breaks says neither: taken for "no run" it would begin one where there is one, which the job refuses
# for good. It is a failure of worker 0, then.
find_run() {
    RUN_THERE=0
    case "${COMMAND[*]}" in '' | train) ;; *) return 0 ;; esac # an experiment goes on by the same command
    if retry 5 asked_for_run; then return 0; fi
    say "worker 0 does not say whether $OUT holds a run"
    FAILED_WORKER=0 FAILED_CODE=255
    return 1
}

# Sets RUN_THERE; fails with the code of a connection that did not answer.
asked_for_run() {
    local code=0
    on_worker 0 "$(printf 'cd %q || exit 10; test -e %q || exit 10' "$DIR" "$OUT/settings.json")" </dev/null || code="$?"
    case "$code" in
    0) RUN_THERE=1 ;;
    10) RUN_THERE=0 ;;
    *) return "$code" ;;
    esac
}

# worker INDEX LINE PIPE: one worker with its output marked; "INDEX CODE" goes into the pipe when it ends.
worker() {
    local index="$1" line="$2" pipe="$3"
    set +e
    on_worker "$index" "$line" </dev/null 2>&1 | sed -u "s/^/[worker $index] /"
    echo "$index ${PIPESTATUS[0]}" >"$pipe"
}

# Every worker from start to end; FAILED_WORKER and FAILED_CODE name the first failure.
# `run_workers start ARGUMENTS...` starts the job, `run_workers follow` only follows it.
run_workers() {
    local how="$1" folder index code line ended stopper="" pipe
    shift
    FAILED_WORKER="" FAILED_CODE=0
    folder="$(mktemp -d)"
    mkfifo "$folder/ended"
    exec {pipe}<>"$folder/ended"
    for ((index = 0; index < COUNT; index++)); do
        if [ "$how" = start ]; then line="$(start_line "$index" "$@")"; else line="$(follow_line)"; fi
        worker "$index" "$line" "$folder/ended" &
    done
    for ((ended = 0; ended < COUNT; ended++)); do
        read -r -u "$pipe" index code
        if [ "$code" = "$RUNS_ALREADY" ]; then touch "$folder/busy.$index"; fi # not by us, perhaps
        if [ "$code" = 0 ] || [ -n "$FAILED_WORKER" ]; then continue; fi
        FAILED_WORKER="$index" FAILED_CODE="$code"
        if [ "$COUNT" -gt 1 ]; then
            say "worker $index ended with code $code; the others have $GRACE s"
            (sleep "$GRACE" && stop_all "" "$folder") &
            stopper="$!"
        fi
    done
    if [ -n "$stopper" ]; then kill "$stopper" 2>/dev/null || true; fi
    exec {pipe}>&-
    rm -rf "$folder"
    [ -z "$FAILED_WORKER" ]
}

# Runs the job to its end: resumes a run that exists, restarts after what `recover` can mend, at most MAX_RESTARTS times.
supervise() {
    local arguments
    RESTARTS=0
    trap 'say "stopping the job; the same command resumes it"; stop_all for_good; exit 130' INT TERM
    while true; do
        if find_run; then
            # a run that goes on is told the same: what has changed is taken over or refused, not overheard
            arguments=(--out "$OUT" "${JOB[@]}")
            if [ "$RUN_THERE" = 1 ]; then arguments[0]=--resume; fi
            say "starting $COUNT workers: python -m jaxrl_llm $(words "${COMMAND[@]}" "${arguments[@]}")"
            if run_workers start "${arguments[@]}"; then return 0; fi
        fi
        case "$FAILED_CODE" in
        2) give_up 2 "worker $FAILED_WORKER refused its arguments (exit code 2)" ;;
        "$STOPPED") stopped ;;
        "$RUNS_ALREADY") # behind a restart it is this job, which a lost connection left there
            if [ "$RESTARTS" = 0 ]; then
                give_up "$RUNS_ALREADY" "worker $FAILED_WORKER runs a job already; end it by stop, or see it by logs"
            fi
            ;;
        esac
        if [ "$RESTARTS" -ge "$MAX_RESTARTS" ]; then
            give_up "$FAILED_CODE" "worker $FAILED_WORKER ended with code $FAILED_CODE after $RESTARTS restarts; giving up"
        fi
        if ! recover; then give_up "$FAILED_CODE" "worker $FAILED_WORKER failed with exit code $FAILED_CODE"; fi
        RESTARTS=$((RESTARTS + 1))
        say "restart $RESTARTS of $MAX_RESTARTS"
    done
}

# The end of whoever follows a job that the user stopped.
stopped() {
    give_up 130 "the job was stopped (worker $FAILED_WORKER); the same run resumes it"
}

# The commands run, logs and stop; in a dry run their command lines, one a worker.
run_job() {
    if [ "$DRY_RUN" = 1 ]; then each_worker start_line --out "$OUT" "${JOB[@]}"; else supervise; fi
}

follow_job() {
    if [ "$DRY_RUN" = 1 ]; then
        each_worker follow_line
    elif ! run_workers follow; then
        if [ "$FAILED_CODE" = "$STOPPED" ]; then stopped; fi
        give_up "$FAILED_CODE" "worker $FAILED_WORKER failed with exit code $FAILED_CODE"
    fi
}

stop_job() {
    if [ "$DRY_RUN" = 1 ]; then each_worker stop_line for_good; else stop_all for_good; fi
}

# each_worker LINE_OF ARGUMENTS...: runs what `LINE_OF INDEX ARGUMENTS...` prints on every worker in turn.
each_worker() {
    local line_of="$1" index
    shift
    for ((index = 0; index < COUNT; index++)); do
        on_worker "$index" "$("$line_of" "$index" "$@")" </dev/null
    done
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Fails where there are no tracked files that a worker could be set up with.
check_code() {
    if ! git -C "$ROOT" rev-parse HEAD >/dev/null 2>&1; then fail "$ROOT is no git checkout; setup sends tracked files"; fi
}

# The tracked files of this checkout as a compressed archive.
pack_code() {
    check_code
    git -C "$ROOT" archive --format=tar.gz -o "$1" HEAD
}

# The remote command line that installs the code in DIR; $1: further requirements of pip.
install_line() {
    enter_line
    # shellcheck disable=SC2016
    printf '%s' '{ [ -x .venv/bin/python ] || "$(command -v python3.12 || command -v python3.11 || echo python3)" ' \
        '-m venv .venv; } && '
    printf '.venv/bin/python -m pip install --quiet --disable-pip-version-check -e . %s' "$1"
}
