"""Tensor operations: selective scans, fused layers and CUDA graphs.

`functional` holds the public scans. `reference` defines them in plain PyTorch; `cpu` and `triton` compute them
fast, as the torch.library operators of `operators`. `tensors` names the tensors and their shapes. `batch_norm`,
`linear` and `convolution` choose between PyTorch's layers and our kernels.
"""
