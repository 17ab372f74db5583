"""Servers of the Model Context Protocol: programs that this machine runs, or remote addresses.

From the outside in: spec, server, client, transports.
"""
