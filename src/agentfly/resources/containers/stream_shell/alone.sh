# A command with a process of its own. Arguments: its id, the number of its file, who holds its outputs (0: they are
# open as 213 and 214), its input, and the processes that have these open by right.
if [[ $3 != 0 ]]; then
    { : >"/proc/$3/fd/1"; } 2>/dev/null || printf '@MARK@x %s\n' "$1" >&211
    exec 213>"/proc/$3/fd/1" 214>"/proc/$3/fd/2" || exit
fi
exec 211>&- 212>&-
printf '@MARK@b %s\n' "$1" >&213
/bin/bash "@PLACE@/$2.sh" <"$4" >&213 2>&214 213>&- 214>&-
code=$?
kept=0
! __agentfly_held /proc/self/fd/213 "$BASHPID" "$3" $5 || kept=1
__agentfly_kills
printf '@MARK@d %s %s %s %s\n' "$1" "$code" "$kept" "${__agentfly_killed:-0}" >&213
printf '@MARK@d %s\n' "$1" >&214
