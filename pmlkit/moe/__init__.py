"""The mixture-of-experts layer. Importing this package loads no torch."""
