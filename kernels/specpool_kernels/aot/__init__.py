"""What the compilers make of the kernels, known without a GPU.

``compile`` compiles ahead of time; ``ptx``, ``sass`` and ``amdgcn`` read the texts into ``code``;
``provenance`` says what each access touches, ``order`` walks the paths between accesses, ``gate``
judges; ``python -m specpool_kernels.aot --report`` prints it all as a table.
"""
