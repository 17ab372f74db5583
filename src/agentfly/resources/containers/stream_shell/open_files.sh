# Check whether a process other than those named has the file $1 open.
__agentfly_is_open() {
    builtin local file=$1 process opened options=$-
    builtin shift
    builtin set +f
    for process in /proc/[0-9]*; do
        case " 1 $* " in *" ${process#/proc/} "*) continue ;; esac
        for opened in "$process"/fd/*; do
            if [[ $opened -ef $file ]]; then
                [[ $options != *f* ]] || builtin set -f
                builtin return 0
            fi
        done
    done
    [[ $options != *f* ]] || builtin set -f
    builtin return 1
}

# Count the processes of the sandbox that the kernel has killed for memory.
__agentfly_count_oom_kills() {
    builtin local name number
    for name in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        if [[ -r $name ]]; then
            while IFS=' ' builtin read -r name number; do
                [[ $name != oom_kill ]] || __agentfly_oom_kills=$number
            done <"$name"
            builtin return
        fi
    done
}
