"""Programs that a resource starts, and how nothing of them is left behind: by a small process that keeps each.

From the outside in: kept_program, keeper, log; reaping is for what a dead process left.
"""
