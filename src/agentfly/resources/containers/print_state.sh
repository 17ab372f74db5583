# Print bash code that restores the variables, functions and directory of this session in the next one. Bash's own
# variables are left out, because some of them cannot be set. The sessions of both shells contain this function.
__agentfly_print_state() {
    builtin local __agentfly_name
    for __agentfly_name in $(IFS=$' \n' builtin compgen -v); do
        case $__agentfly_name in
        __agentfly_* | BASH* | COMP_* | DIRSTACK | EPOCH* | EUID | FUNCNAME | GROUPS | HISTCMD | LINENO | OPTERR | \
            PIPESTATUS | PPID | RANDOM | SECONDS | SHELLOPTS | SRANDOM | UID | _) ;;
        *) builtin declare -p "$__agentfly_name" ;;
        esac
    done
    builtin declare -f
    builtin printf 'builtin cd -- %q\n' "$PWD"
}
