"""The CUDA backend of sconv: every mode of the contract in Triton kernels, one launch each."""
