"""Products: main loops, which take steps of `prologue` and `epilogue`."""
