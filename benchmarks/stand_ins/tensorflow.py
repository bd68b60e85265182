"""Nothing: DLIO imports TensorFlow for a profiler of its own, which nobody asks for here (decision 0033)."""
