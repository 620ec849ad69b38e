"""Kernels that move rows of many buffers in one launch, and their plain PyTorch version.

``move`` holds the Triton kernels, ``launch`` plans and launches them, ``move_reference`` does the
same in PyTorch on any device, ``table`` describes rows to a kernel. Nothing here knows of pools.
Triton is imported by ``move`` and ``launch`` alone.
"""
