"""The shell of a sandbox that is reachable by streams alone.

On the host: shell, channels. Inside: the scripts, of which the server dispatches the others.
"""
