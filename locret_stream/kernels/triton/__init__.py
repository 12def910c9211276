"""One Triton kernel file per operation, named as it; each agrees with its reference of the same name.

Written for CUDA; under `TRITON_INTERPRET=1`, set before triton is imported, they run on CPU tensors, slowly.
Addresses are 64-bit, loads are masked, any sizes go. Every launch names `enable_fp_fusion`, as Triton warns where it is
left to a default.
"""
