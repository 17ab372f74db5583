# What keeps the shell of a sandbox. It reads requests from its input, and reports on its output, a line each:
#
#   h PID      a session is ready, in process PID          f KEEPER PID   the dispatcher is ready
#   e N K      the session has ended with exit code N; the next one follows, with its variables if K is 1
#   r N        the sandbox is as after its start (0), or could not be brought back to that (1)
#   b ID, d ID ...  a command has begun, has ended: on the outputs of that command
#   x ID       a command has not begun, because who was to hold its outputs is gone
#
# Where it has other rights than the agent, nothing that runs inside can reach it. Arguments: the source of the session,
# the source of what runs a command alone, the user who is to own directories, those directories (a line each), the
# words before a program that take away rights.
owner=$3 drop=("${@:5}")
mapfile -t owned <<<"$4"
[[ $4 ]] || owned=()
umask 022
exec 200<&0 211>&1 212>&2 </dev/null >/dev/null 2>&1
exec 202<> <(:)
(umask 0 && : >@PLACE@/@NONCE@-kept) # which the session may write
printf '%s' "$1" >@PLACE@/@NONCE@-session
printf '%s' "$2" >@PLACE@/@NONCE@-alone
set --

# What the directories are at the beginning of each life. Nobody inside can give one that is his to somebody else.
furnish() {
    ((${#owned[@]} == 0)) || command -p chmod 755 "${owned[@]}"
    [[ ! -e /.agentfly.tar ]] || command -p tar -C / -xpf /.agentfly.tar
    : >@PLACE@/@NONCE@-hold
    : >@PLACE@/@NONCE@-kept
}

# Find the processes below those in $1, and those that process 1 has taken over unless $3 is empty. Spare those in $2.
# All are stopped before any dies, so that none gets away by forking.
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

# Kill all but process 1 and this one, and empty the directories in $1. Fails if something of before is left.
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
            [[ $'\n'$1$'\n' == *$'\n'$name$'\n'* ]] || return # not another of them that is mounted there
        done
    done
    # what outlives processes: System V's shared memory, queues and semaphores, and connections that were just closed
    for name in /proc/sysvipc/{shm,msg,sem} /proc/net/{tcp,tcp6}; do
        if [[ -r $name ]]; then
            mapfile -t lines <"$name"
            ((${#lines[@]} < 2)) || return
        fi
    done
}

dispatch() {
    local begin kind id slot holder known length data input old
    local -A alone
    printf '@MARK@f %s %s\n' "$$" "$BASHPID" >&211
    while IFS=' ' read -r -d '' -u 200 begin kind id slot holder input length known; do
        [[ $begin == "@NONCE@" ]] || continue
        data=
        ((length == 0)) || IFS= LC_ALL=C read -r -N "$length" -u 200 data || break
        case $kind in
        i) printf '%b' "$data" >>"@PLACE@/$slot.in" ;;
        n) : >"@PLACE@/$slot.in" ;;
        s)
            printf '%s' "$data" >@PLACE@/0.sh
            printf '%s - %s %s %s\n' "$id" "$holder" "$input" "$known" >&202
            ;;
        e) printf '%s %s %s /dev/null %s\n' "$id" "$slot" "$holder" "$known" >&202 ;;
        p)
            for old in "${!alone[@]}"; do kill -0 "${alone[$old]}" || unset "alone[$old]"; done
            printf '%s' "$data" >"@PLACE@/$slot.sh"
            (
                [[ $holder != 0 ]] || exec 213>&211 214>&212
                exec 200<&- 202<&-
                exec "${drop[@]}" /bin/bash @PLACE@/@NONCE@-alone "$id" "$slot" "$holder" "$input" "$known"
            ) &
            alone[$id]=$!
            ;;
        k)
            kill -STOP "$id" # it must not go on to the command's next line, nor the next one read what is for this one
            while read -r -t 0.001 -u 202; do :; done
            sweep "$id" "$id $known" "${holder#-}"
            kill -"$slot" "$id"
            kill -CONT "$id"
            ;;
        q) [[ ! ${alone[$id]} ]] || sweep "${alone[$id]}" "${alone[*]} $known" "${holder#-}" ;;
        r)
            printf 1 >@PLACE@/@NONCE@-hold
            if empty "$data"; then printf '@MARK@r 0\n' >&211; else printf '@MARK@r 1\n' >&211; fi
            exit 4
            ;;
        esac
    done
    exit 3 # nobody asks any more
}

((${#owned[@]} == 0)) || command -p chown "$owner" "${owned[@]}"
furnish
while :; do
    if ! kill -0 "$session"; then
        if [[ $session ]]; then
            wait "$session"
            code=$?
            [[ -s @PLACE@/@NONCE@-kept ]]
            printf '@MARK@e %s %s\n' "$code" $((!$?)) >&211
            session=
        fi
        if [[ ! -s @PLACE@/@NONCE@-hold ]]; then
            (
                exec 200<&-
                exec "${drop[@]}" /bin/bash @PLACE@/@NONCE@-session
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
    wait -n # for either; those that other processes left to process 1 are reaped without a word
done
