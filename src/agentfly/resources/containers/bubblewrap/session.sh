# Process 1 of a sandbox. It keeps a shell alive that takes the session's commands, and a second one that starts
# commands on their own, and reports to the host, one line each:
#
#   h PID    a session is ready; its process id inside       f PID   the starter is ready
#   b ID PID command ID begins, in process PID (0: in the session itself)
#   d ID N   command ID is done with exit code N
#   e N K    the session has ended with exit code N; the next one follows, with its variables if K is 1
#
# Arguments: limit of processes, limit of private memory of a process in KiB (0: set elsewhere).

(($1 == 0)) || ulimit -u "$1"
(($2 == 0)) || ulimit -d "$2"
set --
exec 200<&0 201>&1 202<>/run/agentfly/starts </dev/null >/dev/null 2>&1

# Write down the variables, functions and directory of a session that ends, for the next one. Not those of bash itself,
# some of which cannot be set.
__agentfly_keep() {
    builtin set +eux
    local __agentfly_name
    {
        for __agentfly_name in $(IFS=$' \n' builtin compgen -v); do
            case $__agentfly_name in
            __agentfly_* | BASH* | COMP_* | DIRSTACK | EPOCH* | EUID | FUNCNAME | GROUPS | HISTCMD | LINENO | OPTERR | \
                PIPESTATUS | PPID | RANDOM | SECONDS | SHELLOPTS | SRANDOM | UID | _) ;;
            *) builtin declare -p "$__agentfly_name" ;;
            esac
        done
        builtin declare -f
        builtin printf 'builtin cd -- %q\n' "$PWD"
    } >/tmp/.session 2>/dev/null || : >/tmp/.session
}

while :; do
    if ! kill -0 "$__agentfly_session"; then
        if [[ $__agentfly_session ]]; then
            wait "$__agentfly_session"
            __agentfly_code=$?
            [[ -s /tmp/.session ]]
            printf 'e %s %s\n' $__agentfly_code $((!$?)) >&201 || exit
        fi
        (
            exec 202<&-
            if [[ -f /tmp/.session ]]; then
                . /tmp/.session
                rm -f /tmp/.session
            fi
            unset __agentfly_session __agentfly_starter __agentfly_code
            trap __agentfly_keep EXIT
            trap 'exit 143' TERM
            printf 'h %s\n' "$BASHPID" >&201
            while IFS=' ' builtin read -r -u 200 __agentfly_id __agentfly_in __agentfly_out; do
                builtin printf 'b %s 0\n' "$__agentfly_id" >&201
                {
                    . "/run/agentfly/$__agentfly_id.sh"
                } 200<&- 201>&- <"$__agentfly_in" >"$__agentfly_out.out" 2>"$__agentfly_out.err"
                builtin printf 'd %s %s\n' "$__agentfly_id" $? >&201
            done
        ) &
        __agentfly_session=$!
    fi
    if ! kill -0 "$__agentfly_starter"; then
        (
            exec 200<&-
            trap '' TERM
            printf 'f %s\n' "$BASHPID" >&201
            while IFS=' ' read -r -u 202 id in out; do
                (
                    printf 'b %s %s\n' "$id" "$BASHPID" >&201
                    (
                        trap - TERM
                        exec 201>&- 202<&- <"$in" >"$out.out" 2>"$out.err"
                        exec /bin/bash "/run/agentfly/$id.sh"
                    )
                    printf 'd %s %s\n' "$id" $? >&201
                ) &
            done
        ) &
        __agentfly_starter=$!
    fi
    wait -n # for either; those that other processes left to process 1 are reaped without a word
done
