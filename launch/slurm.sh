#!/usr/bin/env bash
# Runs the main job, or any experiment, on a SLURM cluster: one process a node, requeued and resumed after a preemption or the time limit.
#
# bash launch/slurm.sh COMMAND [OPTIONS] [-- [run EXPERIMENT | sft | dpo | ...] ARGUMENTS]
#
# commands
#   submit          hand the job to sbatch; prints its number
#   logs JOB        follow the output of a job
#   cancel JOB      end a job; it saves first
#
# options of submit
#   --nodes N           machines, one process each (default 1)
#   --name NAME         name of the job (default jaxrl_llm)
#   --out DIR           run folder, shared by the nodes (default runs/slurm-NAME)
#   --time LIMIT        time limit in SLURM's spelling (default: the partition's)
#   --partition P, --account A, --gpus-per-node N
#   --sbatch OPTION     any further option of sbatch, as in --sbatch --constraint=h100 or with a = between; may be repeated
#   --max-restarts N    requeues after a preemption, a lost node or the time limit (default 10)
#   --notice SECONDS    warning before the time limit, to save a checkpoint (default 120)
#   --wait              wait for the end and exit with the code of the job
#   --dry-run           print the commands, run nothing
#
# Submit from the checkout, where .venv must exist on the shared file system (bash launch/quickstart.sh --help makes
# it). A worker that ends with its own error ends the job: its number and exit code are in the log. The same `submit`
# again resumes the run in --out; more --steps, say, count then, and what a run cannot change is named.
#
#   bash launch/slurm.sh submit --nodes 4 --time 12:00:00 -- --model /shared/Qwen3-1.7B --data gsm8k.jsonl
#   bash launch/slurm.sh submit --nodes 4 -- run dr_grpo --model /shared/Qwen3-1.7B --data gsm8k.jsonl --lora 16
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

usage() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"
}

number() {
    case "$2" in
    '' | *[!0-9]*) fail "$1 $2 is not a whole number" ;;
    esac
    if [ "$2" -lt "$3" ]; then fail "$1 $2 must be at least $3"; fi
}

execute() {
    if [ "$DRY_RUN" = 1 ]; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}

# What every task runs; it names itself when it fails. Single quotes: expanded there. SLURM signals the whole task:
# this shell waits (a signal that it traps reaches the job all the same), or the job is killed while it saves.
# shellcheck disable=SC2016
TASK='trap : TERM; "$@" || { code=$?; '
# shellcheck disable=SC2016
TASK+='echo "error: worker ${SLURM_PROCID:-0} on $(hostname) failed with exit code $code" >&2; exit "$code"; }'

# Asks the tasks to save and end. Not by way of srun: SIGTERM makes it kill them, it hands on other signals alone.
signal_step() {
    scancel --signal=TERM "$SLURM_JOB_ID" || echo "error: the job was not asked to save: scancel ended with code $?" >&2
}

# Inside the allocation: one task a node; the code of the first that failed. Sets STOPPING at a signal.
allocation() {
    local out="$1" restarts="$2" code=0 words steps command=()
    shift 2
    # the words before the first flag name a command: an experiment goes on by the same one
    while [ "$#" -gt 0 ] && [ "${1#-}" = "$1" ]; do command+=("$1") && shift; done
    if [ "${SLURM_RESTART_COUNT:-0}" -gt "$restarts" ]; then
        echo "error: restarted $restarts times already; giving up" >&2
        exit 75
    fi
    words=(--out "$out" "$@")
    case "${command[*]}" in '' | train) if [ -e "$out/settings.json" ]; then words=(--resume "$out" "$@"); fi ;; esac
    words=("${command[@]}" --hosts auto "${words[@]}")
    echo "launch: start ${SLURM_RESTART_COUNT:-0}: python -m jaxrl_llm $(printf '%q ' "${words[@]}")"
    srun --label --kill-on-bad-exit=1 bash -c "$TASK" worker .venv/bin/python -m jaxrl_llm "${words[@]}" &
    steps="$!"
    # the job saves and ends at the signal; requeued, it goes on from there
    STOPPING=""
    trap 'STOPPING=limit; signal_step' USR1
    trap 'STOPPING=asked; signal_step' TERM
    while true; do
        code=0
        wait "$steps" || code=$?
        if [ "$code" -le 128 ] || ! kill -0 "$steps" 2>/dev/null; then break; fi # else a signal ended the wait
    done
    if [ "$STOPPING" = limit ] && [ "$code" != 0 ]; then
        echo "launch: out of time; requeued"
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    if [ "$code" != 0 ]; then echo "error: the job ended with exit code $code" >&2; fi
    exit "$code"
}

submit() {
    local name=jaxrl_llm nodes=1 out="" restarts=10 notice=120 options=() job=() argument
    while [ "$#" -gt 0 ]; do
        case "$1" in
        --) shift && job=("$@") && break ;;
        --dry-run) DRY_RUN=1 && shift && continue ;;
        --wait) options+=(--wait) && shift && continue ;;
        --sbatch=*) options+=("${1#--sbatch=}") && shift && continue ;;
        --sbatch)
            if [ -z "${2:-}" ] || [ "$2" = -- ]; then fail "--sbatch needs an option of sbatch; see --help"; fi
            options+=("$2") && shift 2 && continue
            ;;
        --nodes | --name | --out | --time | --partition | --account | --gpus-per-node | --max-restarts | --notice) ;;
        *) fail "unknown option $1; see --help (arguments of the job come after --)" ;;
        esac
        if [ -z "${2:-}" ] || [ "${2#--}" != "$2" ]; then fail "$1 needs a value; see --help"; fi
        case "$1" in
        --nodes) nodes="$2" && number "$1" "$2" 1 ;;
        --name) name="$2" ;;
        --out) out="$2" ;;
        --max-restarts) restarts="$2" && number "$1" "$2" 0 ;;
        --notice) notice="$2" && number "$1" "$2" 1 ;;
        *) options+=("$1=$2") ;;
        esac
        shift 2
    done
    for argument in "${job[@]}"; do
        case "${argument%%=*}" in
        --hosts | --resume | --out) fail "$argument belongs to the launcher: use its --out; it resumes by itself" ;;
        esac
    done
    if [ "$DRY_RUN" = 0 ]; then
        if ! command -v sbatch >/dev/null; then fail "sbatch is not on PATH; submit on a login node, or use --dry-run"; fi
        if [ ! -x .venv/bin/python ]; then fail "no .venv here; install first: bash launch/quickstart.sh --help"; fi
        mkdir -p runs
    fi
    execute sbatch --parsable "--job-name=$name" "--nodes=$nodes" --ntasks-per-node=1 --requeue --open-mode=append \
        "--signal=B:USR1@$notice" "--output=runs/slurm-%j.log" "${options[@]}" launch/slurm.sh allocation \
        "${out:-runs/slurm-$name}" "$restarts" "${job[@]}"
}

main() {
    local command="${1:-}" root
    DRY_RUN=0
    case "$command" in
    --help | -h) usage && exit 0 ;;
    allocation) shift && allocation "$@" ;; # SLURM runs a copy of this file in the folder of the submission
    submit | logs | cancel) shift ;;
    '') fail "a command is missing: submit, logs or cancel; see --help" ;;
    *) fail "unknown command $command: submit, logs or cancel; see --help" ;;
    esac
    for root in "$@"; do if [ "$root" = --help ]; then usage && exit 0; elif [ "$root" = -- ]; then break; fi; done
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    cd "$root"
    case "$command" in
    submit) submit "$@" ;;
    logs | cancel)
        if [ "${1:-}" = --dry-run ]; then DRY_RUN=1 && shift; fi
        if [ "$#" != 1 ]; then fail "$command needs the number of one job"; fi
        number "$command" "$1" 1
        if [ "$command" = logs ]; then execute tail -n +1 -F "runs/slurm-$1.log"; else
            execute scancel --signal=TERM --batch "$1"
        fi
        ;;
    esac
}

main "$@"
