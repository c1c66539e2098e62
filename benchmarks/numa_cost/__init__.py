"""A cost model of decoding MoE experts on a machine with several NUMA nodes."""
