__agentfly_connected=1
if [[ $__agentfly_code == - ]]; then
    builtin printf '@MARK@b %s\n' "$__agentfly_id" >&213
    {
        builtin . @DIRECTORY@/0.sh
    } <"$__agentfly_in" >&213 2>&214 202<&- 211>&- 212>&- 213>&- 214>&-
    __agentfly_code=$?
fi
__agentfly_end "$__agentfly_id" "$__agentfly_code" 213 /proc/self/fd/213 \
    "$__agentfly_holder $__agentfly_known" 214 2>/dev/null
