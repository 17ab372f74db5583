"""A policy whose model is served by vLLM.

From the outside in: policy and its settings, fleet (the servers as one), members (one server each), routes, proof,
reference, exchange.
"""
