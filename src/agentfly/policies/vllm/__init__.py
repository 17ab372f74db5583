"""A policy whose model is served by vLLM.

`policy` has the policy and its settings, `fleet` the servers as one, `servers` a single server, and `weight_sync` the
transfer of weights and their check.
"""
