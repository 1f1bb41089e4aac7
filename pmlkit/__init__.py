"""pmlkit: a workbook for GPU performance analysis. Importing it loads neither torch nor pandas."""

__version__ = "0.1.0"
