"""Compressors and local updates on a GPU: CUDA sources and their runners. Imported when needed.

`sources.py` reads the `.cu` files, `encoders.py` says which kernels make a payload, `runtime.py`
compiles and starts them through CuPy, on torch's memory and torch's current stream.
"""
