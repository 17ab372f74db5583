"""Simulators as resources.

From the outside in: spec, environment, hosts. For a process: worker_process, fork_server, process_supervisor, worker.
"""
