"""The benchmarks, one program each; `python -m benchmarks` lists them."""
