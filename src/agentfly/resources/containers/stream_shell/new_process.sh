# Run a command in a process of its own. Arguments: the number of the command, the number of its files, the process that
# holds its outputs (0: they are already open as 213 and 214), its input, and the processes that may hold the outputs.
if [[ $3 != 0 ]]; then
    { : >"/proc/$3/fd/1"; } 2>/dev/null || printf '@MARK@x %s\n' "$1" >&211
    exec 213>"/proc/$3/fd/1" 214>"/proc/$3/fd/2" || exit
fi
exec 211>&- 212>&-
printf '@MARK@b %s\n' "$1" >&213
/bin/bash "@DIRECTORY@/$2.sh" <"$4" >&213 2>&214 213>&- 214>&-
code=$?
lingering=0
! __agentfly_is_open /proc/self/fd/213 "$BASHPID" "$3" $5 || lingering=1
__agentfly_count_oom_kills
printf '@MARK@d %s %s %s %s\n' "$1" "$code" "$lingering" "${__agentfly_oom_kills:-0}" >&213
printf '@MARK@d %s\n' "$1" >&214
