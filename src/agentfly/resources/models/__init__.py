"""Models behind a server of this machine.

From the outside in: spec, server, server_run.
"""
