# Process 1 of a sandbox. It keeps a shell alive that takes the session's commands, and a second one that starts
# commands on their own. What they are told, one line each:
#
#   goN          session N takes over: whatever was asked before this is not for it
#   ID P [IN]    the session runs the command, which prints to the pipes P.out and P.err and reads from the file IN
#   ID IN P      the starter does, in a process of the command's own; on a pipe of its own
#
# What they report to the host:
#
#   h PID ID     a session is ready; its process id inside, and the command that it found asked of the one before
#   f PID        the starter is ready
#   b ID PID     command ID begins in process PID, which is its own
#   d ID N       command ID is done with exit code N
#   e N K M      the session has ended with exit code N; session M follows, with its variables if K is 1
#
# Arguments: limit of processes, limit of private memory of a process in KiB (0: set elsewhere).

(($1 == 0)) || ulimit -u "$1"
(($2 == 0)) || ulimit -d "$2"
set --
exec 200<&0 201>&1 202<>/run/agentfly/starts </dev/null >/dev/null 2>&1

# The session's own descriptors, of which no program that it executes sees anything, are 240 (requests), 241 (reports)
# and 242 to 244 (input and outputs of its commands). Bash cannot mark a descriptor as close-on-exec, but the copies that
# it keeps of those that a block redirects are so marked, and so are copies of them. In the blocks below, which redirect
# to 245, that copy is 249: the lowest free one above it.

# Be connected to the pipes and the input that $__agentfly_where names.
__agentfly_connect() {
    [[ $__agentfly_where ]] || return
    local __agentfly_in=/dev/null __agentfly_out=/run/agentfly/${__agentfly_where%% *}
    [[ $__agentfly_where != *" "* ]] || __agentfly_in=/run/agentfly/${__agentfly_where#* }
    builtin unset -f exec
    exec 242<&- 243>&- 244>&-
    exec 245</dev/null 246<"$__agentfly_in" 247>"$__agentfly_out.out" 248>"$__agentfly_out.err" || exit
    { exec 242<&249; } 246<&245
    { exec 243>&249; } 247<&245
    { exec 244>&249; } 248<&245
    exec 245<&- 246<&- 247<&- 248<&-
    __agentfly_connected=$__agentfly_where
}

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

__agentfly_number=0
while :; do
    if ! kill -0 "$__agentfly_session"; then
        ((++__agentfly_number))
        if [[ $__agentfly_session ]]; then
            wait "$__agentfly_session"
            __agentfly_code=$?
            [[ -s /tmp/.session ]]
            printf 'e %s %s %s\n' $__agentfly_code $((!$?)) $__agentfly_number >&201 || exit
        fi
        (
            exec 202<&- 245</dev/null
            { exec 240<&246; } 200<&245
            { exec 241>&246; } 201<&245
            exec 200<&- 201>&- 245<&-
            if [[ -f /tmp/.session ]]; then
                . /tmp/.session
                rm -f /tmp/.session
            fi
            unset __agentfly_session __agentfly_starter __agentfly_code
            trap __agentfly_keep EXIT
            trap 'exit 143' TERM
            __agentfly_stale=0 __agentfly_connected=none
            while IFS=' ' builtin read -r -u 240 __agentfly_id __agentfly_where; do
                [[ $__agentfly_id != "go$__agentfly_number" ]] || break
                [[ ! $__agentfly_where ]] || __agentfly_stale=$__agentfly_id
            done
            printf 'h %s %s\n' "$BASHPID" "$__agentfly_stale" >&241
            while IFS=' ' builtin read -r -u 240 __agentfly_id __agentfly_where; do
                [[ $__agentfly_where == "$__agentfly_connected" ]] || __agentfly_connect || continue
                {
                    builtin . /run/agentfly/command
                } <&242 >&243 2>&244
                builtin printf 'd %s %s\n' "$__agentfly_id" $? >&241 || exit
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
