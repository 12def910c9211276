"""The operations in Triton, one file for each, under the name of the operation in `reference`, with which it agrees;
`tiles` has what those of attention share.

The kernels are written for CUDA. `TRITON_INTERPRET=1`, set before triton is imported, runs them on CPU tensors, slowly.
Addresses are 64-bit and loads are masked, so that tensors may have any size. Launches that compute set
`enable_fp_fusion`, so that `TRITON_DEFAULT_FP_FUSION` changes no bit.
"""
