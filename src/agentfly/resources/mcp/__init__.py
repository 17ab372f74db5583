"""Servers of the Model Context Protocol: programs that this machine runs, or addresses where one answers.

From the outside in: spec, server, connection, session, transports.
"""
