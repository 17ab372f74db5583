# Process 1 of a sandbox. It keeps two shells alive: the session, which runs commands in itself, and the spawner, which
# starts commands in processes of their own. The session receives words of eight characters, a kind and a number:
#
#   g…           the session of this number takes over; earlier words are not for it
#   c…           its commands print to the pipes of this number from now on
#   i…           its commands read the input of the command of this number; no input if it is 0
#   0…           the command of this number starts; its script is in the file "command"
#   x…           nothing; it ends a "read" that would delay a signal
#
# The spawner receives lines of three numbers: the command, which has a script of its own, its pipes, and its input or
# 0. Both report to the host, one line per report:
#
#   h PID ID     a session is ready: its process id inside, and the command that the previous session received and did
#                not start, or 0
#   f PID        the spawner is ready
#   b ID PID     command ID starts in process PID of its own
#   d ID N       command ID has ended with exit code N
#   e N K M      the session has exited with code N; session M follows, with its variables if K is 1
#
# Arguments: the limit of processes, and the limit of a process's private memory in KiB (0: set elsewhere).

(($1 == 0)) || ulimit -u "$1"
(($2 == 0)) || ulimit -d "$2"
set --
# Without a PID namespace, these signals would end it. It ignores them instead of trapping them, because bash may miss
# the exit of a child while a trap runs. Its children restore the defaults.
__agentfly_signals="HUP INT QUIT USR1 USR2 ALRM TERM"
trap '' $__agentfly_signals
exec 200<&0 201>&1 202<>/run/agentfly/spawn </dev/null >/dev/null 2>&1

# Open a file as descriptor 242 (the input of the session's commands), 243 or 244 (their outputs), invisible to executed
# programs. Bash cannot mark a descriptor as close-on-exec. But when a block redirects a descriptor, bash saves a copy
# that is close-on-exec, and so are copies of it. Bash puts the saved copy at the lowest free descriptor above 245: at
# 247. The old file is closed last: the host stops reading a pipe that no process has open, because it is at EOF.
__agentfly_open() {
    builtin unset -f exec
    case $1 in
    242) exec 245</dev/null 246<"$2" 242<&- && { exec 242<&247; } 246<&245 ;;
    243) exec 245</dev/null 246>"$2" 243>&- && { exec 243>&247; } 246>&245 ;;
    244) exec 245</dev/null 246>"$2" 244>&- && { exec 244>&247; } 246>&245 ;;
    esac || exit
    exec 245<&- 246<&-
}

# Handle a word that is not the start of a command.
__agentfly_connect() {
    local __agentfly_number=$((10#${1:1}))
    case $1 in
    c*)
        __agentfly_open 243 "/run/agentfly/$__agentfly_number.out"
        __agentfly_open 244 "/run/agentfly/$__agentfly_number.err"
        ;;
    i0000000) __agentfly_open 242 /dev/null ;;
    i*) __agentfly_open 242 "/run/agentfly/$__agentfly_number.in" ;;
    esac
}

# Save the state of a session that exits, for the next one. A late signal may end the session after it has received the
# next command, so the number of that command is saved too.
__agentfly_keep() {
    builtin set +eux
    {
        ((__agentfly_ran)) || [[ $__agentfly_id != 0* ]] || builtin echo "__agentfly_stale=$__agentfly_id"
        __agentfly_print_state
    } >/tmp/.session 2>/dev/null || : >/tmp/.session
}

@PRINT_STATE@

# After "set -m", each child has a process group of its own, so "kill 0" of a command reaches only that command.
__agentfly_number=0
while :; do
    set -m
    if ! kill -0 "$__agentfly_session"; then
        ((++__agentfly_number))
        if [[ $__agentfly_session ]]; then
            wait "$__agentfly_session"
            __agentfly_code=$?
            [[ -s /tmp/.session ]]
            printf 'e %s %s %s\n' $__agentfly_code $((!$?)) $__agentfly_number >&201 || exit
        fi
        (
            set +m
            exec 0<&200 1>&201 200<&- 201>&- 202<&-
            trap - $__agentfly_signals
            __agentfly_id=0 __agentfly_stale=0 __agentfly_ran=0
            if [[ -f /tmp/.session ]]; then
                . /tmp/.session </dev/null >/dev/null
                rm -f /tmp/.session
            fi
            unset __agentfly_session __agentfly_spawner __agentfly_code __agentfly_signals
            trap __agentfly_keep EXIT
            trap 'exit 143' TERM
            while builtin read -r -N 8 __agentfly_id; do
                [[ $__agentfly_id != 0* ]] || __agentfly_stale=$__agentfly_id
                [[ $__agentfly_id != g* ]] || ((10#${__agentfly_id:1} != __agentfly_number)) || break
            done
            echo "h $BASHPID $__agentfly_stale"
            while builtin read -r -N 8 __agentfly_id; do
                [[ $__agentfly_id == 0* ]] || {
                    __agentfly_connect "$__agentfly_id"
                    continue
                }
                {
                    __agentfly_ran=1
                    builtin . /run/agentfly/command
                } <&242 >&243 2>&244
                __agentfly_code=$?
                ((__agentfly_ran)) || exit 126 # an earlier command has closed descriptors that this one needs
                builtin echo "d $__agentfly_id $__agentfly_code" || exit
                __agentfly_ran=0
            done
        ) &
        __agentfly_session=$!
    fi
    if ! kill -0 "$__agentfly_spawner"; then
        (
            exec 200<&-
            printf 'f %s\n' "$BASHPID" >&201
            while read -r -u 202 id pipes input; do
                [[ $id ]] || continue
                (
                    printf 'b %s %s\n' "$id" "$BASHPID" >&201
                    set -m
                    (
                        trap - $__agentfly_signals
                        exec 201>&- 202<&- >"/run/agentfly/$pipes.out" 2>"/run/agentfly/$pipes.err"
                        ((input == 0)) || exec <"/run/agentfly/$input.in"
                        exec /bin/bash "/run/agentfly/$id.sh"
                    )
                    printf 'd %s %s\n' "$id" $? >&201
                ) &
            done
        ) &
        __agentfly_spawner=$!
    fi
    set +m # stopped children must not end the wait
    wait -n # for either; orphans of other processes are reaped silently
done
