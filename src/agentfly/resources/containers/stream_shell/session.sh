# The session of a sandbox: it runs each command in itself, so that directory and variables last. It has the rights of
# the agent, and whatever it says may be made up. @MARK@ begins each report, @PLACE@ is where commands are put,
# and what carries one out stands where SERVE is said.

# Write down the variables, functions and directory of a session that ends, for the next one. Not those of bash itself,
# some of which cannot be set.
__agentfly_keep() {
    builtin set +eux
    builtin local __agentfly_name
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
    } >@PLACE@/@NONCE@-kept 2>/dev/null || : >@PLACE@/@NONCE@-kept
}

# Report the end of a command on both outputs: its id, exit code, whether others hold its outputs, how many were killed
# for memory, and the children of the session and of process 1, which the next command must not be blamed for.
__agentfly_end() {
    builtin local kept=0 mine="" orphans=""
    ! __agentfly_held "$4" "$BASHPID" $5 || kept=1
    __agentfly_kills
    { IFS= builtin read -r mine <"/proc/$BASHPID/task/$BASHPID/children"; } 2>/dev/null || :
    { IFS= builtin read -r orphans </proc/1/task/1/children; } 2>/dev/null || :
    builtin printf '@MARK@d %s %s %s %s %s %s\n' "$1" "$2" "$kept" "${__agentfly_killed:-0}" "$mine" "$orphans" >&"$3"
    builtin printf '@MARK@d %s\n' "$1" >&"$6"
}

if [[ -s @PLACE@/@NONCE@-kept ]]; then
    . @PLACE@/@NONCE@-kept
    : >@PLACE@/@NONCE@-kept
fi
trap __agentfly_keep EXIT
trap 'exit 143' TERM
builtin printf '@MARK@h %s\n' "$BASHPID" >&211
while IFS=' ' builtin read -r -u 202 __agentfly_id __agentfly_code __agentfly_holder __agentfly_in __agentfly_known; do
    __agentfly_served=
    if [[ $__agentfly_holder == 0 ]]; then
        {
            @SERVE@
        } 213>&211 214>&212
    else
        {
            @SERVE@
        } 213>"/proc/$__agentfly_holder/fd/1" 214>"/proc/$__agentfly_holder/fd/2"
    fi
    [[ $__agentfly_served ]] || builtin printf '@MARK@x %s\n' "$__agentfly_id" >&211
done
