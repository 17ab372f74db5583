"""Models behind somebody else's API.

From the outside in: spec, api, caller, gate, account, traffic; and for one call: client, completion.
"""
