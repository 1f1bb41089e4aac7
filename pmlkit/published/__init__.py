"""Importers: figures released by others, turned into records. One module a source."""
