"""A protocol that measures, on a machine with several NUMA nodes, what the split and placement are worth.

``python -m torch_numa_moe bench --numa-study`` starts the same load anew and again in a few *arms*, taking
turns, and prints a table that can be pasted into an issue.
"""
