"""The four metric-learning losses, one file each. Importing this package loads no torch."""
