# Process 1 of a sandbox. It keeps a shell alive that takes the session's commands, and a second one that starts
# commands on their own. The session is told words of eight characters, a number with what it means before it:
#
#   g…           the session of that number takes over: whatever was asked before this is not for it
#   c…           its commands print to the pipes of that number from now on
#   i…           they read from the input of the command of that number; from none if it is 0
#   0…           the command of that number begins, whose source is in the file "command"
#
# and the starter lines of three numbers: of a command, which has a script to itself, of its pipes, and that of its
# input, or 0. What both report to the host, one line each:
#
#   h PID ID     a session is ready; its process id inside, and the command that the one before was asked and did not
#                begin, or 0
#   f PID        the starter is ready
#   b ID PID     command ID begins in process PID, which is its own
#   d ID N       command ID is done with exit code N
#   e N K M      the session has ended with exit code N; session M follows, with its variables if K is 1
#
# Arguments: limit of processes, limit of private memory of a process in KiB (0: set elsewhere).

(($1 == 0)) || ulimit -u "$1"
(($2 == 0)) || ulimit -d "$2"
set --
# Where it is not the kernel's process 1, it would end by one of these. It ignores them, for bash may forget of a child
# that it has ended if a trap runs just then; what is not to ignore them says so.
__agentfly_signals="HUP INT QUIT USR1 USR2 ALRM TERM"
trap '' $__agentfly_signals
exec 200<&0 201>&1 202<>/run/agentfly/starts </dev/null >/dev/null 2>&1

# Open a file as descriptor 242 (the input of the session's commands), 243 or 244 (their outputs), of which no program
# that is executed sees anything. Bash cannot mark a descriptor as close-on-exec, but the copy that it keeps of one that
# a block redirects is so marked, and so are copies of that. Below that copy is 247: the lowest that is free above 245.
# What was open before is closed last: a pipe that nobody has open is at its end for the host, who stops reading it.
__agentfly_open() {
    builtin unset -f exec
    case $1 in
    242) exec 245</dev/null 246<"$2" 242<&- && { exec 242<&247; } 246<&245 ;;
    243) exec 245</dev/null 246>"$2" 243>&- && { exec 243>&247; } 246>&245 ;;
    244) exec 245</dev/null 246>"$2" 244>&- && { exec 244>&247; } 246>&245 ;;
    esac || exit
    exec 245<&- 246<&-
}

# Do what a word says that is not about a command.
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

# Write down the variables, functions and directory of a session that ends, for the next one. Not those of bash itself,
# some of which cannot be set. A signal that came before the next command may end the session after it has read of it.
__agentfly_keep() {
    builtin set +eux
    local __agentfly_name
    {
        ((__agentfly_ran)) || [[ $__agentfly_id != 0* ]] || builtin echo "__agentfly_stale=$__agentfly_id"
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

# What follows "set -m" has a process group of its own, so that "kill 0" reaches nobody but who says it.
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
            unset __agentfly_session __agentfly_starter __agentfly_code __agentfly_signals
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
                ((__agentfly_ran)) || exit 126 # a command before has closed what this one needs
                builtin echo "d $__agentfly_id $__agentfly_code" || exit
                __agentfly_ran=0
            done
        ) &
        __agentfly_session=$!
    fi
    if ! kill -0 "$__agentfly_starter"; then
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
        __agentfly_starter=$!
    fi
    set +m # who waits is not to hear of those that are stopped
    wait -n # for either; those that other processes left to process 1 are reaped without a word
done
