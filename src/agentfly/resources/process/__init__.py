"""Processes of this host: identity, children, control groups, supervisors, the ledger of what was started."""
