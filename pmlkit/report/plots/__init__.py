"""One function a figure: `plot_*(frame, ...) -> ReportFigure`, drawn from data frames, never from a GPU."""
