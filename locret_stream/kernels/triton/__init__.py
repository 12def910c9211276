"""The operations in Triton, one file for each, under the name of the operation in `reference`, with which it agrees.

The kernels are written for CUDA. `TRITON_INTERPRET=1`, set before triton is imported, runs them on CPU tensors, slowly.
Addresses are 64-bit and loads are masked, so that tensors may have any size. Every launch sets `enable_fp_fusion`, as
Triton warns where it is left to a default.
"""
