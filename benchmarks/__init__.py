"""What is measured, one program each; `python -m benchmarks` lists them."""
