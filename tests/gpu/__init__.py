"""What is checked where there is a GPU: `python -m tests.gpu` runs all, `make gpu-check` too.

Parts that need none run on the CPU without one; the rest is skipped and says so.
"""
