"""A model of the attention kernels on GPUs that are not at hand, made from their machine code.

cubin.py: what is in a kernel; gpus.py: what is known of each card; hot.py: what a warp executes; units.py: in which unit,
for how long; simulate.py: how warps get on with each other; model.py: from that to the time of a call; tables.py: how it is
shown; original.py: the same of SageAttention's own kernels.
"""
