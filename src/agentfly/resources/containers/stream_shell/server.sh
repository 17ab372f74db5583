# The server of a sandbox's shell. It reads requests from its input and reports on its output, one line per report:
#
#   h PID           a session is ready, in process PID
#   f SERVER PID    the dispatcher is ready, in process PID
#   e N K           the session has exited with code N; the next one has its variables if K is 1
#   r N             a reset has ended: everything is as after the start (0), or not (1)
#   b ID, d ID ...  a command has started, has ended: reported on the outputs of the command
#   x ID            a command was not started, because the process that holds its outputs has exited
#
# If the server has other rights than the agent, no process inside can signal it. Arguments: the script of the session,
# the script of a command in a process of its own, the owner of directories, these directories (one per line), and the
# command prefix that drops privileges.
owner=$3 drop=("${@:5}")
mapfile -t owned <<<"$4"
[[ $4 ]] || owned=()
umask 022
exec 200<&0 211>&1 212>&2 </dev/null >/dev/null 2>&1
exec 202<> <(:)
(umask 0 && : >@DIRECTORY@/@NONCE@-kept) # the session may write it
printf '%s' "$1" >@DIRECTORY@/@NONCE@-session
printf '%s' "$2" >@DIRECTORY@/@NONCE@-new-process
set --

# Set up the directories, at the start and after each reset. The agent cannot change the owner of its directories.
furnish() {
    ((${#owned[@]} == 0)) || command -p chmod 755 "${owned[@]}"
    [[ ! -e /.agentfly.tar ]] || command -p tar -C / -xpf /.agentfly.tar
    : >@DIRECTORY@/@NONCE@-hold
    : >@DIRECTORY@/@NONCE@-kept
}

# Kill the descendants of the processes in $1 and, unless $3 is empty, the orphans that process 1 has adopted. Spare the
# processes in $2. All are stopped before any is killed, so that none escapes by forking.
sweep() {
    local spared=" 1 $BASHPID $2 " round pid line changed fresh
    local -A parent roots stopped
    for pid in $1; do roots[$pid]=1; done
    for round in {1..50}; do
        parent=()
        for line in /proc/[0-9]*/stat; do
            pid=${line//[!0-9]/}
            { IFS= read -r line <"/proc/$pid/stat"; } || continue
            line=${line##*) }
            line=${line#* }
            parent[$pid]=${line%% *}
        done
        local -A found=()
        for pid in "${!parent[@]}"; do
            [[ $spared != *" $pid "* ]] || continue
            if [[ ${roots[${parent[$pid]}]} || ($3 && ${parent[$pid]} == 1) ]]; then found[$pid]=1; fi
        done
        changed=1
        while [[ $changed ]]; do
            changed=
            for pid in "${!parent[@]}"; do
                if [[ ${found[${parent[$pid]}]} && ! ${found[$pid]} && $spared != *" $pid "* ]]; then
                    found[$pid]=1 changed=1
                fi
            done
        done
        fresh=
        for pid in "${!found[@]}"; do
            if [[ ! ${stopped[$pid]} ]]; then
                kill -STOP "$pid"
                stopped[$pid]=1 fresh=1
            fi
        done
        [[ $fresh ]] || break
    done
    for pid in "${!stopped[@]}"; do kill -KILL "$pid"; done
}

# Kill all processes but process 1 and this one, and empty the directories in $1. Fail if anything is left.
empty() {
    local directory name pid alive lines
    local -a directories left
    for ((round = 0; round < 500; round++)); do
        kill -KILL -1
        alive=
        for pid in /proc/[0-9]*; do
            case ${pid#/proc/} in 1 | "$BASHPID") ;; *) alive=1 ;; esac
        done
        [[ $alive ]] || break
        read -r -t 0.002 -u 202
    done
    [[ ! $alive ]] || return
    mapfile -t directories <<<"$1"
    shopt -s dotglob nullglob
    for directory in "${directories[@]}"; do left+=("$directory"/*); done
    ((${#left[@]} == 0)) || command -p rm -rf -- "${left[@]}"
    for directory in "${directories[@]}"; do
        for name in "$directory"/*; do
            [[ $'\n'$1$'\n' == *$'\n'$name$'\n'* ]] || return # unless another of the directories is mounted there
        done
    done
    # these outlive processes: System V's shared memory, queues and semaphores, and connections that were just closed
    for name in /proc/sysvipc/{shm,msg,sem} /proc/net/{tcp,tcp6}; do
        if [[ -r $name ]]; then
            mapfile -t lines <"$name"
            ((${#lines[@]} < 2)) || return
        fi
    done
}

dispatch() {
    local nonce kind id argument holder known length data input old
    local -A new_processes
    printf '@MARK@f %s %s\n' "$$" "$BASHPID" >&211
    while IFS=' ' read -r -d '' -u 200 nonce kind id argument holder input length known; do
        [[ $nonce == "@NONCE@" ]] || continue
        data=
        ((length == 0)) || IFS= LC_ALL=C read -r -N "$length" -u 200 data || break
        case $kind in
        i) printf '%b' "$data" >>"@DIRECTORY@/$argument.in" ;;
        n) : >"@DIRECTORY@/$argument.in" ;;
        s)
            printf '%s' "$data" >@DIRECTORY@/0.sh
            printf '%s - %s %s %s\n' "$id" "$holder" "$input" "$known" >&202
            ;;
        e) printf '%s %s %s /dev/null %s\n' "$id" "$argument" "$holder" "$known" >&202 ;;
        p)
            for old in "${!new_processes[@]}"; do kill -0 "${new_processes[$old]}" || unset "new_processes[$old]"; done
            printf '%s' "$data" >"@DIRECTORY@/$argument.sh"
            (
                [[ $holder != 0 ]] || exec 213>&211 214>&212
                exec 200<&- 202<&-
                exec "${drop[@]}" /bin/bash @DIRECTORY@/@NONCE@-new-process "$id" "$argument" "$holder" "$input" "$known"
            ) &
            new_processes[$id]=$!
            ;;
        k)
            kill -STOP "$id" # it must not run the command's next line; the next session must not read this request
            while read -r -t 0.001 -u 202; do :; done
            sweep "$id" "$id $known" "${holder#-}"
            kill -"$argument" "$id"
            kill -CONT "$id"
            # a signal just before bash blocks in "read" is handled only after it: an empty line ends that "read"
            [[ $argument != TERM ]] || printf '\n' >&202
            ;;
        q)
            [[ ! ${new_processes[$id]} ]] ||
                sweep "${new_processes[$id]}" "${new_processes[*]} $known" "${holder#-}"
            ;;
        r)
            printf 1 >@DIRECTORY@/@NONCE@-hold
            if empty "$data"; then printf '@MARK@r 0\n' >&211; else printf '@MARK@r 1\n' >&211; fi
            exit 4
            ;;
        esac
    done
    exit 3 # the host has closed the input
}

((${#owned[@]} == 0)) || command -p chown "$owner" "${owned[@]}"
furnish
while :; do
    if ! kill -0 "$session"; then
        if [[ $session ]]; then
            wait "$session"
            code=$?
            [[ -s @DIRECTORY@/@NONCE@-kept ]]
            printf '@MARK@e %s %s\n' "$code" $((!$?)) >&211
            session=
        fi
        if [[ ! -s @DIRECTORY@/@NONCE@-hold ]]; then
            (
                exec 200<&-
                exec "${drop[@]}" /bin/bash @DIRECTORY@/@NONCE@-session
            ) &
            session=$!
        fi
    fi
    if ! kill -0 "$dispatcher"; then
        if [[ $dispatcher ]]; then
            wait "$dispatcher"
            case $? in
            3) exit ;;
            4)
                exec 202<> <(:)
                dispatcher= session=
                furnish
                continue
                ;;
            esac
        fi
        dispatch &
        dispatcher=$!
    fi
    wait -n # for either; orphans of other processes are reaped silently
done
