#!/usr/bin/env bash
# Runs the main job, or any experiment, on a TPU VM (one host or a pod slice) by gcloud, through preemptions.
#
# bash launch/tpu_vm.sh COMMAND --name NAME --zone ZONE [OPTIONS] [-- [run EXPERIMENT | sft | dpo | ...] ARGUMENTS]
#
# commands
#   create  make the TPU VM
#   setup   send the tracked files of this checkout to all workers, install them, mount the bucket
#   run     start (or resume) the job on all workers and stream its output; a preempted VM is deleted, made and set
#           up again, and the run continues from its newest checkpoint: with --bucket, or on other storage that
#           stays; without, the checkpoints go with the VM and the run begins anew
#   up      create, setup, run, delete; the VM stays when the job fails, for a look; needs such storage
#   logs    follow the job that runs
#   stop    ask the job to save and end; whoever follows it ends with code 130, and nothing restarts it
#   status  the state of the VM
#   delete  delete the VM
#
# options
#   --name NAME, --zone ZONE
#   --project PROJECT        (default: gcloud's own)
#   --type TYPE              for create: accelerator type, for example v5litepod-16, v5p-32, v6e-8
#   --version VERSION        for create: runtime version (default by type: v2-alpha-tpuv5-lite, v2-alpha-tpuv5,
#                            v2-alpha-tpuv6e)
#   --spot                   for create: preemptible capacity
#   --bucket BUCKET          Cloud Storage bucket, mounted at DIR/bucket on all workers by setup
#   --dir DIR                folder of the code on every worker (default jaxrl_llm, in the home folder)
#   --out DIR                run folder (default bucket/NAME with --bucket, else runs/NAME); a slice of several hosts
#                            needs a folder that all share: --bucket, or an absolute path
#   --create-tries N         tries to get capacity (default 5)
#   --max-restarts N         restarts after a preemption or a lost connection (default 10)
#   --delay SECONDS          before a retry (default 20)
#   --grace SECONDS          for the other workers after one failed (default 30)
#   --save-time SECONDS      for a job that was asked to end, before it is killed (default 60)
#   --dry-run                print the commands, run nothing
#
# A worker that ends with its own error stops the job: its number and exit code are reported, nothing is restarted.
# The same `run` again resumes the run in --out; more --steps, say, count then, and what a run cannot change is named.
# Where a job runs already, `run` ends with code 79.
#
#   bash launch/tpu_vm.sh up --name rl --zone us-west4-a --type v5litepod-16 --spot --bucket my-runs -- \
#       --model bucket/Qwen3-0.6B --data bucket/gsm8k.jsonl --mesh fsdp=16 --steps 500
set -euo pipefail
. "$(dirname "$0")/workers.sh"

NAME="" ZONE="" PROJECT="" TYPE="" VERSION="" BUCKET=""
SPOT=0
CREATE_TRIES=5
TPU=(gcloud compute tpus tpu-vm)
WHERE=()

on_worker() {
    execute "${TPU[@]}" ssh "$NAME" "${WHERE[@]}" "--worker=$1" "--command=$2"
}

# The processes of a slice find one another.
hosts_of() {
    printf auto
}

# READY, PREEMPTED, ...; MISSING where there is no such VM; UNKNOWN where gcloud itself fails.
state() {
    local said
    if said="$("${TPU[@]}" describe "$NAME" "${WHERE[@]}" '--format=value(state)' 2>&1)"; then
        printf '%s' "$said"
    elif [ "${said#*NOT_FOUND}" != "$said" ] || [ "${said#*not found}" != "$said" ]; then
        printf MISSING
    else
        printf UNKNOWN
    fi
}

create() {
    local words=("${TPU[@]}" create "$NAME" "${WHERE[@]}" "--accelerator-type=$TYPE" "--version=$VERSION")
    if [ "$SPOT" = 1 ]; then words+=(--spot); fi
    retry "$CREATE_TRIES" execute "${words[@]}" || give_up "$?" "$NAME could not be created in $CREATE_TRIES tries"
}

delete() {
    execute "${TPU[@]}" delete "$NAME" "${WHERE[@]}" --quiet
}

# Whether the run folder is lost with the VM, as far as its name tells: an absolute one may be mounted.
on_own_disk() {
    case "${OUT#./}" in
    /*) return 1 ;;
    bucket | bucket/*) [ -z "$BUCKET" ] ;;
    esac
}

# Sets COUNT to the number of hosts.
count_workers() {
    local addresses
    COUNT=1
    if [ "$DRY_RUN" = 1 ]; then return 0; fi
    addresses="$("${TPU[@]}" describe "$NAME" "${WHERE[@]}" '--format=value(networkEndpoints[].ipAddress)')" ||
        give_up 1 "$NAME cannot be described; create it first, and see \`gcloud auth login\`"
    IFS=';' read -r -a addresses <<<"$addresses"
    COUNT="${#addresses[@]}"
    if [ "$COUNT" -gt 1 ] && on_own_disk; then
        fail "--out $OUT lies on one of $COUNT workers; give --bucket, or an absolute --out that all share"
    fi
}

mount_line() {
    # shellcheck disable=SC2016
    printf '%s' 'command -v gcsfuse >/dev/null || { echo "deb https://packages.cloud.google.com/apt ' \
        'gcsfuse-$(lsb_release -c -s) main" | sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null && ' \
        'curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee /etc/apt/trusted.gpg.d/gcsfuse.asc ' \
        '>/dev/null && sudo apt-get update -q && sudo apt-get install -qy gcsfuse; } && '
    printf 'mkdir -p %q && { mountpoint -q %q || ' "$DIR/bucket" "$DIR/bucket"
    printf 'gcsfuse --implicit-dirs --rename-dir-limit=100000 %q %q; }' "$BUCKET" "$DIR/bucket"
}

on_all() {
    execute "${TPU[@]}" ssh "$NAME" "${WHERE[@]}" --worker=all "--command=$1"
}

# Every worker holds the code, its environment and the bucket; a fresh VM may need some time to let one in.
setup() {
    local folder python
    folder="$(mktemp -d)"
    pack_code "$folder/jaxrl_llm.tar.gz"
    retry 5 execute "${TPU[@]}" scp "$folder/jaxrl_llm.tar.gz" "$NAME:" "${WHERE[@]}" --worker=all ||
        give_up "$?" "the code could not be sent to $NAME"
    rm -rf "$folder"
    python='command -v python3.12 >/dev/null || command -v python3.11 >/dev/null || '
    python+='{ sudo apt-get update -q && sudo apt-get install -qy python3.11 python3.11-venv; }'
    retry 3 on_all "$python && $(printf 'mkdir -p %q && tar -xzf jaxrl_llm.tar.gz -C %q' "$DIR" "$DIR") \
&& ($(install_line "'jax[tpu]'"))" || give_up "$?" "the installation on $NAME failed"
    if [ -n "$BUCKET" ]; then
        retry 3 on_all "$(mount_line)" || give_up "$?" "the bucket $BUCKET could not be mounted on $NAME"
    fi
}

# A VM that was taken away is made again; a lost connection to one that is there is only waited for.
recover() {
    local now
    now="$(state)"
    case "$now" in
    READY)
        case "$FAILED_CODE" in 255 | "$RUNS_ALREADY") ;; *) return 1 ;; esac
        stop_all
        sleep "$DELAY"
        # the job of a worker that was out of reach went on; one that does not answer shows at the next start
        if answering; then stop_all; fi
        ;;
    PREEMPTED | TERMINATED | STOPPED | MISSING | DELETING)
        if [ -z "$TYPE" ]; then fail "$NAME is $now; give --type, so that it can be created again"; fi
        say "$NAME is $now"
        check_code
        if on_own_disk; then say "--out $OUT was on its disk: the run begins anew; --bucket keeps it"; fi
        if [ "$now" != MISSING ]; then delete || say "deleting $NAME failed; creating may tell why"; fi
        create
        setup
        count_workers
        ;;
    *) sleep "$DELAY" ;;
    esac
}

flag() {
    [ "$1" = --spot ] && SPOT=1
}

option() {
    case "$1" in
    --name) NAME="$2" ;;
    --zone) ZONE="$2" ;;
    --project) PROJECT="$2" ;;
    --type) TYPE="$2" ;;
    --version) VERSION="$2" ;;
    --bucket)
        BUCKET="${2#gs://}" && BUCKET="${BUCKET%/}"
        case "$2" in gs:// | /) fail "--bucket $2 names no bucket" ;; esac
        ;;
    --create-tries) CREATE_TRIES="$2" && number "$1" "$2" 1 ;;
    *) return 1 ;;
    esac
}

check() {
    if [ -z "$NAME" ]; then fail "--name is missing"; fi
    if [ -z "$ZONE" ]; then fail "--zone is missing, for example --zone us-west4-a"; fi
    case "$BUCKET" in
    */*) fail "--bucket $BUCKET is a folder of a bucket; give the bucket alone, and the folder as --out bucket/FOLDER" ;;
    esac
    WHERE=("--zone=$ZONE")
    if [ -n "$PROJECT" ]; then WHERE+=("--project=$PROJECT"); fi
    if [ -z "$OUT" ]; then if [ -n "$BUCKET" ]; then OUT="bucket/$NAME"; else OUT="runs/$NAME"; fi; fi
    case "$1" in create | up) if [ -z "$TYPE" ]; then fail "--type is missing, for example v5litepod-16"; fi ;; esac
    if [ "$1" = up ] && on_own_disk; then
        fail "--out $OUT lies on the disk of $NAME, which up deletes; give --bucket, or an absolute --out on storage that stays"
    fi
    if [ -n "$VERSION" ]; then return; fi
    case "$TYPE" in
    v5litepod-*) VERSION=v2-alpha-tpuv5-lite ;;
    v5p-*) VERSION=v2-alpha-tpuv5 ;;
    v6e-*) VERSION=v2-alpha-tpuv6e ;;
    '') ;;
    *) fail "--type $TYPE has no known runtime; give --version" ;;
    esac
}

main() {
    local command="${1:-}" commands="create, setup, run, up, logs, stop, status or delete"
    case "$command" in
    create | setup | run | up | logs | stop | status | delete) shift ;;
    --help | -h) usage "$0" && exit 0 ;;
    '') fail "a command is missing: $commands; see --help" ;;
    *) fail "unknown command $command: $commands; see --help" ;;
    esac
    read_options "$@"
    check "$command"
    if [ "$DRY_RUN" = 0 ] && ! command -v gcloud >/dev/null; then
        fail "gcloud is not on PATH; install the Google Cloud CLI, or use --dry-run"
    fi
    # before a VM that costs is made: what it would be set up with
    case "$command" in up | setup) check_code ;; esac
    case "$command" in
    create) create ;;
    setup) setup ;;
    run)
        count_workers
        if on_own_disk; then say "--out $OUT lies on the disk of $NAME, which a preemption takes; --bucket keeps it"; fi
        run_job
        ;;
    up)
        create
        setup
        count_workers
        run_job
        delete
        ;;
    logs)
        count_workers
        follow_job
        ;;
    stop)
        count_workers
        stop_job
        ;;
    status) if [ "$DRY_RUN" = 1 ]; then execute "${TPU[@]}" describe "$NAME" "${WHERE[@]}"; else state && echo; fi ;;
    delete) delete ;;
    esac
}

main "$@"
