#!/usr/bin/env bash
# Runs the main job, or any experiment, on several machines by ssh: one process a machine, output of all marked by worker.
#
# bash launch/ssh.sh COMMAND --machines A,B,... [OPTIONS] [-- [run EXPERIMENT | sft | dpo | ...] ARGUMENTS]
#
# commands
#   setup   send the tracked files of this checkout and install them on every machine
#   run     start (or resume) the job, stream its output, restart it when a machine was lost
#   logs    follow the job that runs
#   stop    ask the job to save and end; whoever follows it ends with code 130, and nothing restarts it
#
# options
#   --machines A,B,...       names for ssh (user@host, or of ~/.ssh/config); the first one coordinates
#   --coordinator ADDRESS    address of the first machine for the others (default: its name without user@)
#   --port PORT              port of the coordinator (default 8476)
#   --dir DIR                folder of the code on every machine (default jaxrl_llm, in the home folder)
#   --out DIR                run folder, on storage that all machines share (default runs/ssh, in --dir)
#   --extra REQUIREMENT      further requirement of the installation, for example 'jax[cuda13]'; may be repeated
#   --max-restarts N         restarts after a lost machine (default 10)
#   --delay SECONDS          before a restart (default 20)
#   --grace SECONDS          for the other workers after one failed (default 30)
#   --save-time SECONDS      for a job that was asked to end, before it is killed (default 60)
#   --dry-run                print the commands, run nothing
#
# A worker that ends with its own error stops the job: its number and exit code are reported, nothing is restarted.
# The same `run` again resumes the run in --out; more --steps, say, count then, and what a run cannot change is named.
# Where a job runs already, `run` ends with code 79.
#
#   bash launch/ssh.sh run --machines gpu0,gpu1 --out /shared/run1 -- --model /shared/Qwen3-0.6B --data /shared/d.jsonl
set -euo pipefail
. "$(dirname "$0")/workers.sh"

MACHINES=()
GIVEN="" # them as they were given
COORDINATOR=""
PORT=8476
EXTRA=()
SSH=(ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=4)

on_worker() {
    execute "${SSH[@]}" "${MACHINES[$1]}" "$2"
}

hosts_of() {
    printf '%s:%s,%s,%s' "$COORDINATOR" "$PORT" "$COUNT" "$1"
}

# A connection that broke (255) or a process killed from outside (128 + 9, 128 + 15) says nothing against the job.
recover() {
    case "$FAILED_CODE" in
    255 | 137 | 143 | "$RUNS_ALREADY") ;;
    *) return 1 ;;
    esac
    stop_all
    sleep "$DELAY"
    if ! answering; then give_up 255 "machine ${MACHINES[$FAILED_WORKER]} (worker $FAILED_WORKER) does not answer"; fi
    stop_all # the job of a machine that was out of reach went on
}

setup() {
    local archive index
    archive="$(mktemp)"
    pack_code "$archive"
    for ((index = 0; index < COUNT; index++)); do
        say "setting up ${MACHINES[$index]}"
        on_worker "$index" "$(printf 'mkdir -p %q && tar -xzf - -C %q' "$DIR" "$DIR")" <"$archive" ||
            give_up "$?" "worker $index (${MACHINES[$index]}): the code could not be sent"
        on_worker "$index" "$(install_line "$(words "${EXTRA[@]}")")" </dev/null ||
            give_up "$?" "worker $index (${MACHINES[$index]}): the installation failed"
    done
    rm -f "$archive"
}

flag() {
    return 1 # all options have a value
}

option() {
    case "$1" in
    --machines) GIVEN="$2" && IFS=, read -r -a MACHINES <<<"$2" ;;
    --coordinator) COORDINATOR="$2" ;;
    --port) PORT="$2" && number "$1" "$2" 1 ;;
    --extra) EXTRA+=("$2") ;;
    *) return 1 ;;
    esac
}

main() {
    local command="${1:-}" name seen=""
    case "$command" in
    setup | run | logs | stop) shift ;;
    --help | -h) usage "$0" && exit 0 ;;
    '') fail "a command is missing: setup, run, logs or stop; see --help" ;;
    *) fail "unknown command $command: setup, run, logs or stop; see --help" ;;
    esac
    read_options "$@"
    if [ "${#MACHINES[@]}" = 0 ]; then fail "--machines is missing: --machines A,B,..."; fi
    case ",${GIVEN// /}," in *,,*) fail "--machines $GIVEN names an empty machine; write it as A,B,..." ;; esac
    for name in "${MACHINES[@]}"; do # of two processes on one the second would take the first for a job of its own
        case "$seen," in *,"$name",*) fail "--machines $GIVEN names $name twice; one process runs on each" ;; esac
        seen="$seen,$name"
    done
    COUNT="${#MACHINES[@]}"
    COORDINATOR="${COORDINATOR:-${MACHINES[0]##*@}}"
    OUT="${OUT:-runs/ssh}"
    case "$command" in
    setup) setup ;;
    run) run_job ;;
    logs) follow_job ;;
    stop) stop_job ;;
    esac
}

main "$@"
