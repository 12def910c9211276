"""The parts of `benchmarks/models.py`: the classes of transformers that count, a tiny random model of each, and what a
runtime makes of it.

The order: `counted`, `sizes`, `shapes`, `apart` · `tiny` · `measure` · `page`. Only `shapes`, `counted` and `page` know
models by their names.
"""
