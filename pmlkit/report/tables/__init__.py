"""One function a table: `table_*(frame, ...) -> Table`."""
