# The session of a sandbox. It runs each command in itself, so that directory and variables persist. It has the rights
# of the agent, so the host trusts none of its reports. Each report begins with the mark. The scripts of commands are in
# @DIRECTORY@. RUN_IN_SESSION stands for the script of this name.

# Save the state of a session that exits, for the next one.
__agentfly_keep() {
    builtin set +eux
    __agentfly_print_state >@DIRECTORY@/@NONCE@-kept 2>/dev/null || : >@DIRECTORY@/@NONCE@-kept
}

# Report the end of a command on both outputs: its number, its exit code, whether other processes hold its outputs, how
# many processes were killed for memory, and the children of the session and of process 1. A kill of the next command
# spares these children.
__agentfly_end() {
    builtin local lingering=0 mine="" orphans=""
    ! __agentfly_is_open "$4" "$BASHPID" $5 || lingering=1
    __agentfly_count_oom_kills
    { IFS= builtin read -r mine <"/proc/$BASHPID/task/$BASHPID/children"; } 2>/dev/null || :
    { IFS= builtin read -r orphans </proc/1/task/1/children; } 2>/dev/null || :
    builtin printf '@MARK@d %s %s %s %s %s %s\n' "$1" "$2" "$lingering" "${__agentfly_oom_kills:-0}" "$mine" "$orphans" >&"$3"
    builtin printf '@MARK@d %s\n' "$1" >&"$6"
}

if [[ -s @DIRECTORY@/@NONCE@-kept ]]; then
    . @DIRECTORY@/@NONCE@-kept
    : >@DIRECTORY@/@NONCE@-kept
fi
trap __agentfly_keep EXIT
trap 'exit 143' TERM
builtin printf '@MARK@h %s\n' "$BASHPID" >&211
while IFS=' ' builtin read -r -u 202 __agentfly_id __agentfly_code __agentfly_holder __agentfly_in __agentfly_known; do
    [[ $__agentfly_id ]] || continue
    __agentfly_connected=
    if [[ $__agentfly_holder == 0 ]]; then
        {
            @RUN_IN_SESSION@
        } 213>&211 214>&212
    else
        {
            @RUN_IN_SESSION@
        } 213>"/proc/$__agentfly_holder/fd/1" 214>"/proc/$__agentfly_holder/fd/2"
    fi
    [[ $__agentfly_connected ]] || builtin printf '@MARK@x %s\n' "$__agentfly_id" >&211
done
